"""The next token of each sequence, and what the model thought of it: all rows at once, where their logits are.

A row of logits goes through, in this order: bias, penalties, tokens that may not come yet; then, unless the likeliest
is taken, temperature, top-k, top-p, min-p, and a draw. That is the order of `transformers`. Top-p: Holtzman et al.,
"The Curious Case of Neural Text Degeneration" (2020). Repetition penalty: Keskar et al., "CTRL" (2019).

The draw is the inverse of the cumulative distribution at one uniform number, which follows from (seed, sequence,
place) alone: no state to keep, none to restore after a preemption, and neighbours in the batch make no difference.

`pick` is the whole of it for rows that are treated alike, in operators that wait for nothing, so that it can be part of
a captured step. `Sampler.sample` deals rows out to it: on a CPU each row gets what it asks for and no more, a few rows
at a time, as many as a core's cache holds; on a GPU all of them get together what any of them asks for.

Shapes: R rows, V vocabulary, N kept tokens, L lanes (`apps.serve.history`).
"""

import hashlib
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from apps.serve.history import Histories
from apps.serve.machine import Machine
from apps.serve.request import Sampling, Sequence

# Tokens looked at for top-p before all are sorted, on a CPU: they nearly always hold the mass.
_LIKELY = 256
# OpenAI's logprob of a token of probability 0.
_IMPOSSIBLE = -9999.0
SLAB_BYTES = {"cpu": 2 << 20, "cuda": 32 << 20}
"""Of logits in fp64 that are worked on at once."""
DRAW_BYTES = 104
"""That drawing takes of a logit beside it, at most: nine copies in fp64 or as an index, and what sorting takes."""

NUM_NUMBERS = 10
(U, TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, LANE, BARRED) = range(NUM_NUMBERS)
"""Numbers that the sampler takes of each row, all in fp64. TOP_K 0: all; LANE -1: none."""
NEUTRAL = (0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, -1.0, 0.0)
"""Those of a row that nobody asked for."""


@dataclass(frozen=True)
class Sampled:
    """A token; its logprob and the likeliest ones, where asked for."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """A row's way of drawing its next token, and what is reported of it.

    index, place  which text of its request it is, and how many tokens of it there are: what a draw follows from
    lane          where its history stands; -1: neither bias nor penalty needs one
    is_barred     whether tokens that end the text may not come yet
    num_logprobs  alternatives that are reported with their logprobs beside the token's own; None: no logprob at all
    """

    sampling: Sampling
    index: int = 0
    place: int = 0
    lane: int = -1
    is_barred: bool = False
    num_logprobs: int | None = None

    @property
    def way(self) -> "Way":
        s = self.sampling
        draws = s.temperature > 0
        return Way(draws, draws and (s.top_k is not None or s.top_p < 1), self.lane >= 0, self.num_logprobs)

    @property
    def numbers(self) -> tuple[float, ...]:
        s = self.sampling
        u = uniform(s.seed, self.index, self.place) if s.temperature > 0 else 0.0
        return (
            u, s.temperature, s.top_k or 0, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty,
            s.frequency_penalty, self.lane, self.is_barred,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Way:
    """The computations that rows go through.

    draws         some are drawn; otherwise the likeliest is taken
    sorts         by top-k or top-p
    adjusts       bias, penalties, or tokens that may not come yet
    num_logprobs  alternatives that are reported at most; None: no logprobs
    """

    draws: bool
    sorts: bool
    adjusts: bool
    num_logprobs: int | None

    def covers(self, other: "Way") -> bool:
        """Return whether a row that asks for `other` gets it this way."""
        own, asked = self.num_logprobs, other.num_logprobs
        enough = asked is None or (own is not None and own >= asked)
        return self.draws >= other.draws and self.sorts >= other.sorts and self.adjusts >= other.adjusts and enough

    @property
    def width(self) -> int:
        """Columns of the results: see `pick`."""
        return 1 if self.num_logprobs is None else 2 + 2 * self.num_logprobs


_LIKELIEST = Way(draws=False, sorts=False, adjusts=False, num_logprobs=None)


def joined(ways: Iterable[Way]) -> Way:
    """The least that covers all of them."""
    ways = list(ways)
    counts = [way.num_logprobs for way in ways if way.num_logprobs is not None]
    draws, sorts, adjusts = (any(getattr(way, name) for way in ways) for name in ("draws", "sorts", "adjusts"))
    return Way(draws, sorts, adjusts, max(counts, default=None))


Reading = Callable[[], list[Sampled | None]]
"""Waits for results; None for a row that names no token: NaN, inf, or nothing but -inf."""


class Sampler:
    """Draws for one model, and keeps what penalties need to know.

    tokens[max_rows] on the device are those that the last step drew, for a step that begins before they are read.
    """

    def __init__(self, vocab_size: int, machine: Machine, max_rows: int = 0):
        self.machine = machine
        self.histories = Histories(vocab_size, machine)
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=machine.device)

    def ask(self, sequence: Sequence, num_logprobs: int | None, num_unread: int = 0) -> Ask:
        """The ask of a sequence's next row; num_unread tokens of it are drawn and not read yet."""
        request, place = sequence.request, sequence.num_written + num_unread
        is_barred = place < request.min_tokens and bool(request.stop_ids)
        lane = self.histories.lane(sequence) if is_barred or not _is_plain(request.sampling) else -1
        num_logprobs = None if num_logprobs is None else min(num_logprobs, self.histories.vocab_size)
        return Ask(request.sampling, sequence.index, place, lane, is_barred, num_logprobs)

    def sample(self, logits_RV: Tensor, asks: Many[Ask], numbers: Tensor | None = None) -> Reading:
        """The next tokens.

        numbers  fp64[NUM_NUMBERS, R]: those of `asks`, where they are on the device already
        """
        groups = self._groups(asks)
        found: list[tuple[Many[int], Callable[[], Tensor]]] = []
        for way, rows in groups:
            whole = len(rows) == len(asks)
            picked_RV = logits_RV if whole else logits_RV[rows]
            given, slab = numbers, slab_rows(self.machine.device.type, logits_RV.shape[1])
            if way == _LIKELIEST:  # which takes no room, and no numbers
                given, slab = picked_RV[:0, :0], len(rows)
            elif given is None or not whole:
                given = self._numbers([asks[row] for row in rows])
            slabs = [slice(at, at + slab) for at in range(0, len(rows), slab)]
            parts = [pick(picked_RV[here], given[:, here], way, self.histories, self._looks) for here in slabs]
            results = torch.cat(parts) if len(parts) > 1 else parts[0]
            if len(self.tokens):
                self._keep(rows, results, whole)
            found.append((rows, self.machine.fetch(results)))
        return lambda: read(asks, found)

    @property
    def _looks(self) -> bool:
        """On a CPU reading a result is no waiting, and an index of rows no copy."""
        return self.machine.device.type == "cpu"

    def _groups(self, asks: Many[Ask]) -> list[tuple[Way, Many[int]]]:
        if not self._looks:
            return [(joined(ask.way for ask in asks), range(len(asks)))]
        groups: dict[tuple[bool, bool, bool, bool], list[int]] = {}
        for row, ask in enumerate(asks):
            way = ask.way
            groups.setdefault((way.draws, way.sorts, way.adjusts, way.num_logprobs is not None), []).append(row)
        return [(joined(asks[row].way for row in rows), rows) for rows in groups.values()]

    def _numbers(self, asks: Many[Ask]) -> Tensor:
        return self.machine.put(numbers_of(asks))

    def _keep(self, rows: Many[int], results: Tensor, whole: bool) -> None:
        drawn_R = results[:, 0].clamp(min=0)  # a row without a token ends, and what is computed of it is dropped
        self.tokens[slice(0, len(rows)) if whole else list(rows)] = drawn_R

    def score(self, logits_RV: Tensor, tokens: Many[int], count: int) -> Reading:
        """Given tokens with their logprobs and the `count` likeliest; None where a row's logits are no numbers."""
        tokens_R = self.machine.put(torch.tensor(tokens, dtype=torch.int64, device="cpu"))
        count = min(count, logits_RV.shape[1])
        slab = slab_rows(self.machine.device.type, logits_RV.shape[1])
        parts = []
        for at in range(0, len(tokens), slab):
            part_RV, token_R = logits_RV[at : at + slab], tokens_R[at : at + slab]
            sound_R = part_RV.max(-1).values.isfinite()
            parts.append(_logprobs(part_RV, token_R.where(sound_R, -1), count))
        fetched = self.machine.fetch(torch.cat(parts))
        asks = [Ask(Sampling(), num_logprobs=count)] * len(tokens)
        return lambda: read(asks, [(range(len(tokens)), fetched)])


def numbers_of(asks: Many[Ask]) -> Tensor:
    """fp64[NUM_NUMBERS, R], on the host."""
    return torch.from_numpy(np.array([ask.numbers for ask in asks], dtype=np.float64).T.copy())


def slab_rows(kind: str, vocab_size: int) -> int:
    """Rows that are drawn at once on a device of this kind."""
    return max(1, SLAB_BYTES[kind] // (8 * vocab_size))


def _is_plain(s: Sampling) -> bool:
    """Are the logits taken as they are?"""
    return s.repetition_penalty == 1 and s.presence_penalty == s.frequency_penalty == 0 and not s.logit_bias


def read(asks: Many[Ask], found: Many[tuple[Many[int], Callable[[], Tensor]]]) -> list[Sampled | None]:
    sampled: list[Sampled | None] = [None] * len(asks)
    for rows, fetched in found:
        table = fetched().numpy()
        values, count = table.view(np.float64), (table.shape[1] - 2) // 2
        for line, row in enumerate(rows):
            token, num_logprobs = int(table[line, 0]), asks[row].num_logprobs
            if token < 0:
                continue
            if num_logprobs is None:
                sampled[row] = Sampled(token)
                continue
            until = min(num_logprobs, count)
            top = zip(table[line, 2 : 2 + until].tolist(), values[line, 2 + count : 2 + count + until].tolist())
            sampled[row] = Sampled(token, float(values[line, 1]), tuple(top))
    return sampled


# --- on the device ----------------------------------------------------------------------------------------------------


def pick(logits_RV: Tensor, numbers: Tensor, way: Way, histories: Histories, looks: bool = False) -> Tensor:
    """int64[R, way.width]: the token of each row, -1 where it names none; and its logprobs.

    That is: the bits of its logprob; the likeliest tokens; the bits of their logprobs, all in fp64. The histories of
    the rows know of the token afterwards.
    """
    largest_R, token_R = logits_RV.max(-1)  # NaN where a row has one
    sound_R, changed_RV = largest_R.isfinite(), logits_RV
    if way.adjusts:
        chosen = (numbers[name] for name in (LANE, BARRED, REPETITION, PRESENCE, FREQUENCY))
        changed_RV = histories.adjusted(logits_RV, *chosen, looks=looks)
        largest_R, token_R = changed_RV.max(-1)
        sound_R = sound_R & largest_R.isfinite()
    if way.draws:
        token_R = token_R.where(numbers[TEMPERATURE] == 0, draw(changed_RV, numbers, way.sorts, looks))
    if way.adjusts:
        histories.add(numbers[LANE], token_R)
    token_R = token_R.where(sound_R, -1)
    return token_R[:, None] if way.num_logprobs is None else _logprobs(logits_RV, token_R, way.num_logprobs)


def _logprobs(logits_RV: Tensor, token_R: Tensor, count: int) -> Tensor:
    """Tokens and logprobs as `pick` returns them, by the model's own distribution.

    What has no probability at all gets the logprob _IMPOSSIBLE, since JSON has no infinity.
    """
    logprobs_RV = logits_RV.double().log_softmax(-1).clamp_min_(_IMPOSSIBLE)
    values_RN, ids_RN = logprobs_RV.topk(min(count, logprobs_RV.shape[1]))
    own_R1 = logprobs_RV.gather(1, token_R.clamp(min=0)[:, None])
    return torch.cat((token_R[:, None], own_R1.view(torch.int64), ids_RN, values_RN.view(torch.int64)), 1)


def draw(logits_RV: Tensor, numbers: Tensor, sorts: bool, looks: bool = False) -> Tensor:
    """Tokens[R] at the quantiles U of those that are kept, in the order in which they are cumulated.

    sorts  some rows have top-k or top-p: theirs are cumulated from the likeliest one, those of others by number
    looks  all of them have, and few likely tokens are tried first, which is looked at on the host
    """
    temperature_R = numbers[TEMPERATURE]
    temperature_R = temperature_R.where(temperature_R > 0, 1.0)
    wide_RV = logits_RV.double()
    wide_RV = wide_RV - wide_RV.amax(-1, keepdim=True)
    probs_RV = (wide_RV / temperature_R[:, None]).softmax(-1)  # so that a tiny temperature overflows to 0
    ranked_R = (numbers[TOP_K] > 0) | (numbers[TOP_P] < 1)
    if not sorts:
        return _by_number(probs_RV, numbers)
    if looks:
        return _by_rank_of_few(probs_RV, numbers)
    return _by_rank(probs_RV, numbers).where(ranked_R, _by_number(probs_RV, numbers))


def _by_number(probs_RV: Tensor, numbers: Tensor) -> Tensor:
    least_R1 = numbers[MIN_P][:, None] * probs_RV.amax(-1, keepdim=True)
    return _at_quantile(probs_RV.where(probs_RV >= least_R1, 0), numbers[U])[:, 0]


def _by_rank_of_few(probs_RV: Tensor, numbers: Tensor) -> Tensor:
    """On a CPU: a few likely tokens do for nearly all rows, and sorting takes long."""
    vocab_size = probs_RV.shape[1]
    least = _LIKELY if bool((numbers[TOP_K] == 0).any()) else 1
    count = min(vocab_size, max(least, int(numbers[TOP_K].max())))
    probs_RN, order_RN = probs_RV.topk(count)
    token_R = _ranked(probs_RN, order_RN, numbers)
    short_R = (numbers[TOP_K] == 0) & (probs_RN.sum(-1) < numbers[TOP_P])
    if count < vocab_size and bool(short_R.any()):
        token_R[short_R] = _by_rank(probs_RV[short_R], numbers[:, short_R])
    return token_R


def _by_rank(probs_RV: Tensor, numbers: Tensor) -> Tensor:
    return _ranked(*probs_RV.sort(-1, descending=True), numbers)


def _ranked(probs_RN: Tensor, order_RN: Tensor, numbers: Tensor) -> Tensor:
    """Among the likeliest tokens, in their order: of those that top-k, top-p and min-p keep."""
    top_k_R1, top_p_R1, min_p_R1 = (numbers[name][:, None] for name in (TOP_K, TOP_P, MIN_P))
    rank_N = torch.arange(probs_RN.shape[1], device=probs_RN.device)
    kept_RN = probs_RN.where((rank_N < top_k_R1) | (top_k_R1 == 0), 0)
    cumulative_RN = kept_RN.cumsum(-1)
    mass_R1 = cumulative_RN[:, -1:].where(top_k_R1 > 0, 1.0)
    before_RN = cumulative_RN - kept_RN  # what is likelier does not reach p yet
    kept_RN = kept_RN.where((before_RN < top_p_R1 * mass_R1) | (top_p_R1 >= 1), 0)
    kept_RN = kept_RN.where(kept_RN >= min_p_R1 * kept_RN[:, :1], 0)
    return order_RN.gather(1, _at_quantile(kept_RN, numbers[U]))[:, 0]


def _at_quantile(kept_RN: Tensor, u_R: Tensor) -> Tensor:
    """[R, 1]: the place at which the cumulated probability passes u of the whole."""
    cumulative_RN = kept_RN.cumsum(-1)
    total_R1 = cumulative_RN[:, -1:].contiguous()
    place_R1 = torch.searchsorted(cumulative_RN, u_R[:, None] * total_R1, right=True)
    last_R1 = torch.searchsorted(cumulative_RN, total_R1)  # u is below 1 by less than the sum's rounding
    return torch.minimum(place_R1, last_R1).clamp(max=kept_RN.shape[1] - 1)  # a row without numbers has no place


def uniform(seed: int, index: int, place: int) -> float:
    """A number of [0, 1) that follows from the three."""
    digest = hashlib.blake2b(f"{seed}/{index}/{place}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)
