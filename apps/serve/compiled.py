"""Two compiled graphs of the decoder in place of some thousand small operators (`serve --engine.compile`).

1. For sequences with one new token each, any number of them: the decoder is traced once, up to its head. In its
   `attend` slots stands attention over pages in plain arithmetic (`attend_alone`); products of quantized weights become
   calls of operators. No second forward is written.
2. For prompts, any number of tokens, the same with attention as the decoder has it, as one operator.
3. torch's inductor makes loops in C++ of them. Written tokens: keys and values are read once, in the order in which
   they lie, for all sequences, and nothing is gathered first. Prompts: what stands around a product of integers, norms
   and residuals too, is a few passes over memory instead of dozens.

Tokens that a sequence wrote itself go through the first graph, also those that are computed again after a preemption,
several of one sequence as so many sequences. Tokens of prompts go through the second, in the same step, also where a
part of a prompt is one token long. The two round otherwise; so which of them computes a token follows from the token,
not from where the scheduler cuts, and pages with written tokens are not shared with prompts that say the same.

For a lone token inductor would make other loops, which round otherwise, so it is given twice. Sums over a sequence
run in order, a run of 16 places after the other, and what fills up a shorter one adds zeros behind them, so no bit
depends on the longest. By runs, because the keys and values of one head lie far apart: those of 16 places stay in the
processor's nearest cache while a head is read, those of a whole sequence do not.

Needs a C++ compiler when it is made. On CPUs, one rank, no experts.

Shapes: T sequences with one new token (of prompts: tokens), R runs of C = 16 places that hold the longest, N places of
all pages, J heads of keys and values, G query heads of each, K head size, D model.
"""

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from apps.serve.runner import PagedAttend, PagedContext, Runner
from core.config import UserError
from core.kernels.paged_attention import quantized
from core.models.decoder import Decoder
from core.nn.attention import Attention
from core.quant import compile_widening

log = logging.getLogger("serve")

_RUN = 16


@dataclass(frozen=True)
class Alone:
    """What attention needs to know of sequences with one new token each.

    slots_T     int64: the new token's place in the pages
    places_TRC  int64: those of the sequence's tokens in order; behind its end any that holds numbers
    lengths_T   int64: its tokens, with the new one
    """

    slots_T: Tensor
    places_TRC: Tensor
    lengths_T: Tensor

    @staticmethod
    def of(tables: Sequence[Sequence[int]], lengths: Sequence[int], slots: Sequence[int], page_size: int) -> "Alone":
        """The same, of page tables."""
        width = max(map(len, tables))
        pages_TP = torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], device="cpu")
        slots_T, lengths_T = torch.tensor(slots, device="cpu"), torch.tensor(lengths, device="cpu")
        runs = max(2, -(-max(lengths) // _RUN))  # of 1 a graph of its own would be made
        order_S = torch.arange(runs * _RUN, device="cpu")
        places_TS = pages_TP[:, (order_S // page_size).clamp_(max=width - 1)].mul_(page_size).add_(order_S % page_size)
        places_TS = places_TS.where(order_S < lengths_T[:, None], slots_T[:, None])
        return Alone(slots_T, places_TS.view(-1, runs, _RUN), lengths_T)


def flat_pages(attend: PagedAttend) -> list[Tensor]:
    """A layer's keys, values and scales by places: [N, J, K], and [N, J] of int8."""
    found = (attend.k, attend.v, attend.k_scales, attend.v_scales)
    return [pages.flatten(0, 1) for pages in found if pages is not None]


def attend_alone(
    q_TJGK: Tensor, k_TJK: Tensor, v_TJK: Tensor, pages: Sequence[Tensor], slopes_JG: Tensor | None, step: Alone
) -> Tensor:
    """Write the new keys and values into their places, and attend: o[T, J, G, K] of q's dtype.

    pages   as `flat_pages` gives them; they are written to
    slopes  of ALiBi, in q's order of heads
    """
    dtype = torch.promote_types(q_TJGK.dtype, torch.float32)
    k_TRCJK, v_TRCJK = (
        _kept(new, pages[index::2], step, dtype) for index, new in enumerate((k_TJK, v_TJK))
    )  # fmt: skip
    scores_TRCJG = (k_TRCJK[..., None, :] * q_TJGK[:, None, None].to(dtype)).sum(-1) / math.sqrt(q_TJGK.shape[-1])
    order_RC = torch.arange(step.places_TRC.shape[1] * _RUN, device=q_TJGK.device).view(-1, _RUN)
    if slopes_JG is not None:
        distance_TRC = (order_RC - (step.lengths_T[:, None, None] - 1)).to(dtype)
        scores_TRCJG = scores_TRCJG + slopes_JG.to(dtype) * distance_TRC[..., None, None]
    hidden_TRC = order_RC >= step.lengths_T[:, None, None]
    scores_TRCJG = scores_TRCJG.masked_fill(hidden_TRC[..., None, None], -math.inf)
    weights_TRCJG = (scores_TRCJG - scores_TRCJG.amax(2).amax(1)[:, None, None]).exp()
    o_TJGK = (weights_TRCJG[..., None] * v_TRCJK[..., None, :]).sum(2).sum(1)
    return (o_TJGK / weights_TRCJG.sum(2).sum(1)[..., None]).to(q_TJGK.dtype)


def _kept(new_TJK: Tensor, pages: Sequence[Tensor], step: Alone, dtype: torch.dtype) -> Tensor:
    """Put new keys (or values) into the pages, and all of their sequences out of these: [T, R, C, J, K]."""
    if len(pages) == 1:
        (pages_NJK,) = pages
        pages_NJK.index_put_((step.slots_T,), new_TJK.to(pages_NJK.dtype))
        return pages_NJK[step.places_TRC].to(dtype)
    pages_NJK, scales_NJ = pages
    rounded_TJK, scale_TJ = quantized(new_TJK)
    pages_NJK.index_put_((step.slots_T,), rounded_TJK)
    scales_NJ.index_put_((step.slots_T,), scale_TJ)
    return pages_NJK[step.places_TRC].to(dtype) * scales_NJ[step.places_TRC].to(dtype)[..., None]


class _Slot:
    """In place of `attend` while tracing: the layer's pages and the step, as they stand in the graph."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.pages: Sequence[Tensor] = ()
        self.step: Alone | None = None

    def __call__(
        self, q_1THK: Tensor, k_1TJK: Tensor, v_1TJK: Tensor, /, *, slopes: Tensor | None, **_others: Any
    ) -> Tensor:
        assert self.step is not None
        heads = k_1TJK.shape[2]
        q_TJGK = q_1THK[0].unflatten(1, (heads, -1))
        slopes_JG = None if slopes is None else slopes.view(heads, -1)
        o_TJGK = attend_alone(q_TJGK, k_1TJK[0], v_1TJK[0], self.pages, slopes_JG, self.step)
        return o_TJGK.flatten(1, 2)[None]


class _PromptSlot:
    """In place of `attend` while tracing: a call of what the layer of the runner at hand has there."""

    def __init__(self, layer: int):
        self.layer = layer

    def __call__(
        self, q_1THK: Tensor, k_1TJK: Tensor, v_1TJK: Tensor, /, *, slopes: Tensor | None, **_others: Any
    ) -> Tensor:
        return torch.ops.megalith.attend_of_layer(q_1THK[0], k_1TJK[0], v_1TJK[0], slopes, self.layer)[None]


@dataclass(frozen=True)
class _Prompts:
    """What the operator needs to know of the step that this thread computes."""

    attends: Sequence[PagedAttend]
    context: PagedContext


_STEP = threading.local()
torch.library.define("megalith::attend_of_layer", "(Tensor q, Tensor k, Tensor v, Tensor? slopes, int layer) -> Tensor")


@torch.library.impl("megalith::attend_of_layer", "CPU")
def _attend_of_layer(q_THK: Tensor, k_TJK: Tensor, v_TJK: Tensor, slopes: Tensor | None, layer: int) -> Tensor:
    step: _Prompts = _STEP.prompts
    count = len(step.context.slots_T)  # a lone token is given twice
    given = (x[None, :count] for x in (q_THK, k_TJK, v_TJK))
    positions = torch.empty(0, device="cpu")
    (o_THK,) = step.attends[layer](*given, slopes=slopes, mask=None, positions=positions, context=step.context)
    return o_THK.contiguous() if count == len(q_THK) else torch.cat((o_THK, o_THK))


@torch.library.register_fake("megalith::attend_of_layer")
def _attended_shape(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, layer: int) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


class CompiledDecoder:
    """A decoder up to its head in two graphs, over any runner's pages.

    Called with sequences of one new token each; `read` takes tokens of prompts.
    """

    def __init__(self, model: Decoder, pages: Sequence[Sequence[Tensor]]):
        attentions = [module for module in model.modules() if isinstance(module, Attention)]
        slots = [_Slot(len(layer)) for layer in pages]

        def read(ids_1T: Tensor, positions_1T: Tensor) -> tuple[Tensor]:
            return (model(ids_1T, positions=positions_1T),)

        def decode(
            ids_1T: Tensor, positions_1T: Tensor, slots_T: Tensor, places_TRC: Tensor, lengths_T: Tensor, *flat: Tensor
        ) -> tuple[Tensor]:
            step, rest = Alone(slots_T, places_TRC, lengths_T), iter(flat)
            for slot in slots:
                slot.step, slot.pages = step, [next(rest) for _ in range(slot.num_pages)]
            return (model(ids_1T, positions=positions_1T),)

        given = _example(pages)
        with _replaced(model, attentions, slots):
            self._decode = _graph(decode, given)
        with _replaced(model, attentions, [_PromptSlot(layer) for layer in range(len(attentions))]):
            self._read = _graph(read, given[:2])

    def __call__(self, ids_1T: Tensor, positions_1T: Tensor, step: Alone, pages: Sequence[Tensor]) -> Tensor:
        """What the head is given, [1, T, D]; `pages` of all layers behind each other."""
        given = (ids_1T, positions_1T, step.slots_T, step.places_TRC, step.lengths_T)
        if ids_1T.shape[1] > 1:
            return self._decode(*given, *pages)[0]
        twice = [torch.cat((x, x), 1 if x.shape[0] == 1 and index < 2 else 0) for index, x in enumerate(given)]
        return self._decode(*twice, *pages)[0][:, :1]

    def read(
        self, ids_1T: Tensor, positions_1T: Tensor, attends: Sequence[PagedAttend], context: PagedContext
    ) -> Tensor:
        """The same of tokens of prompts; `attends` of all layers, which keep the keys and values."""
        _STEP.prompts = _Prompts(attends, context)
        try:
            if ids_1T.shape[1] > 1:
                return self._read(ids_1T, positions_1T)[0]
            return self._read(*(x.repeat(1, 2) for x in (ids_1T, positions_1T)))[0][:, :1]
        finally:
            del _STEP.prompts


Graph = Callable[..., Sequence[Tensor]]


def _graph(function: Callable[..., tuple[Tensor]], given: Sequence[Tensor]) -> Graph:
    with torch.no_grad():
        traced = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*given)
    # Without torch.compile's checks of what is given and of what operators return, which are always the same but for
    # sizes. Places come from page tables; to check each where it is read would slow all loops.
    checks = ("assert_indirect_indexing", "size_asserts", "alignment_asserts")
    options: Any = {"config_patches": dict.fromkeys(checks, False)}
    return torch._inductor.standalone_compile(traced, list(given), options=options)


def _example(pages: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Arguments of `decode`, whose sizes are those of nothing else that is given, so that none is taken for another."""
    sizes = {size for layer in pages for part in layer for size in part.shape}
    count, width = [number for number in (11, 13, 17, 19, 23, 29) if number not in sizes][:2]
    zeros_1T, zeros_T = torch.zeros(1, count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    step = [zeros_T, torch.zeros(count, width, _RUN, dtype=torch.int64), zeros_T + 1]
    return [zeros_1T, zeros_1T.clone(), *step, *(part for layer in pages for part in layer)]


class _Through(nn.Module):
    """In place of a head: nothing."""

    def forward(self, x_1TD: Tensor, *_others: Any) -> Tensor:
        return x_1TD


@contextmanager
def _replaced(model: Decoder, attentions: Sequence[Attention], slots: Sequence[_Slot | _PromptSlot]) -> Iterator[None]:
    """Inside, attention is what the slots do, and there is no head."""
    head, attends = model.head, [attention.attend for attention in attentions]
    model.head = _Through()  # pyright: ignore[reportAttributeAccessIssue]
    for attention, slot in zip(attentions, slots, strict=True):
        attention.attend = slot
    try:
        yield
    finally:
        model.head = head
        for attention, attend in zip(attentions, attends, strict=True):
            attention.attend = attend


def compile_runner(runner: Runner, known: CompiledDecoder | None = None) -> CompiledDecoder | None:
    """Let a runner compute by compiled graphs, which are made now.

    known  that of another runner of the same model, whose pages have the same format

    Returns the graphs. None if they could not be made: the log says why in one line, and the runner computes as before.
    """
    pages = [flat_pages(layer) for layer in runner.pages]
    try:
        with torch.inference_mode():
            compile_widening(runner.model)
            compiled = known or CompiledDecoder(runner.model, pages)
            first, second, *step = _example(pages)[:5]
            flat = [part for layer in pages for part in layer]
            compiled(first, second, Alone(*step), flat)  # what it is compiled for is known now
    except Exception as error:  # whatever a compiler does not like: the decoder itself computes the same
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        log.warning("steps are not compiled: %s; install a C++ compiler (g++), or leave --engine.compile out", reason)
        return None

    def decode(
        ids_1T: Tensor, positions_1T: Tensor, tables: Sequence[Sequence[int]], lengths: Sequence[int],
        slots: Sequence[int],
    ) -> Tensor:  # fmt: skip
        return compiled(ids_1T, positions_1T, Alone.of(tables, lengths, slots, runner.page_size), flat)

    runner.decode = decode
    runner.read = lambda ids_1T, positions_1T, context: compiled.read(ids_1T, positions_1T, runner.pages, context)
    return compiled


def check_compilable(device: str, ranks: int, num_experts: int) -> None:
    """Raises UserError for what is not compiled."""
    if torch.device(device).type != "cpu":
        raise UserError(f"compile is for CPUs, and the device is {device}; leave --engine.compile out")
    if ranks > 1:
        raise UserError(f"compile is for one rank, and tp is {ranks}; leave one of them out")
    if num_experts:
        raise UserError("compile is not for models with experts; leave --engine.compile out")
