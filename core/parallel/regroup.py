"""A checkpoint of local workers that others go on with, more of them or fewer (`core.parallel.local`).

Of n workers that saved, worker w of n' goes on from those v with v = w mod n':

    one        from what it was, to the bit
    several    they become one, as if they had averaged by themselves; theta, and what is on its way to it, stay as
               they are. b_v: v's share of their items since a fragment was sent last, or of their number where all have
               none
                   theta_w = theta - sum_v b_v (theta - theta_v)      buffers alike
                   items_w = sum_v items_v
                   e_w, f_w = sum_v e_v, sum_v f_v                    errors of few bits
               The inner optimizer's state is that of v = w
    none       it begins at theta, without items, with the first worker's inner optimizer's state and buffers, as one
               does that joins while others train (`core.train.elastic_local`, `LocalTraining.begin_at_theta`)

So sum_w a_w D_w and the errors' sum, which are all that theta's next step depends on, are what they were: what a worker
that is gone has learned in its round is in it, and what it has not sent yet is sent later. A worker that is alone sends
nothing: it takes what has not been sent into its own weights, theta_w - (e + f). Rows are dealt out anew
(`core.data.batches`), in an order that is a function of the step alone.

DiLoCo changes the number of workers during a run (Douillard et al. 2023, "adaptive compute pool") and leaves it open
what a new worker's inner optimizer begins with; a state of zeros would need a warm-up of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.config import UserError
from core.layout import layout_of, tag

ERRORS = ("error/", "sum_error/")
"""What names of a worker's errors begin with (`core.parallel.coded_sum`)."""
ROUNDS = "rounds"
"""The name of where a worker is in its rounds: a row for each fragment, which begins with items and their losses."""


@dataclass(frozen=True)
class Read:
    """What a rank reads of a checkpoint at a time.

    tensors  stored name -> where to
    leaves   beginnings of stored names that nobody needs to ask for
    """

    tensors: dict[str, Tensor]
    leaves: tuple[str, ...] = ()


def of_worker(worker: int) -> str:
    """What stored names of a worker's own tensors begin with."""
    return f"worker/{worker}/"


_KEPT = {
    "outer_momentum": {
        0: ("no outer momentum", "--local.outer-momentum 0"),
        1: ("an outer momentum", "--local.outer-momentum 0.9"),
    },
    "error_feedback": {
        0: ("no errors of few bits", "no --local.bits, or --local.no-error-feedback"),
        1: ("errors of few bits", "--local.bits, without --local.no-error-feedback"),
    },
    "overlap": {
        0: ("averages that arrive at once", "no --local.overlap"),
        1: ("averages that arrive later", "--local.overlap 1"),
    },
}
"""What a form says with 0 and with 1, each with the option that makes it so."""


def check_form(saved: Mapping[str, int], own: Mapping[str, int]) -> None:
    """Raises UserError where a run of one form (`LocalTraining.form`) cannot go on with a checkpoint of another."""
    free = {"workers"}
    if 1 in (saved["workers"], own["workers"]):  # that one sends nothing, so it has no errors
        free.add("error_feedback")
    unlike = [name for name in own if name not in free and saved.get(name) != own[name]]
    if unlike:
        has, here = ([_in_words(name, form[name]) for name in unlike] for form in (saved, own))
        raise UserError(
            f"it is a checkpoint of local workers with {' and '.join(what for what, _ in has)}, and this run has "
            f"{' and '.join(what for what, _ in here)}; resume it with {' and '.join(option for _, option in has)}, or "
            "begin anew with its weights"
        )


def _in_words(name: str, value: int) -> tuple[str, str]:
    if name == "fragments":
        return f"{value} fragment{'s' * (value > 1)}", f"--local.fragments {value}"
    return _KEPT[name][value]


class Regrouping:
    """One worker's part of taking a checkpoint over.

    worker     of `own`, which go on
    saved      the `LocalTraining.form` of those who saved
    tensors    stored name -> tensor, of this worker as if it had saved (`LocalTraining.stored`)
    fragments  names of the parameters of each, and the first's rounds are those of buffers, too
    """

    def __init__(
        self,
        worker: int,
        own: int,
        saved: Mapping[str, int],
        tensors: Mapping[str, Tensor],
        fragments: Sequence[Sequence[str]],
    ):
        self.worker, self.own, self.saved = worker, own, saved["workers"]
        self.has_errors, self.fragments = saved["error_feedback"] > 0, fragments
        prefix = of_worker(worker)
        self.mine = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        self.shared = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}

    def reads(self) -> Iterator[Read]:
        """What to read in turn, all ranks together; behind the last one `tensors` are what this worker goes on from."""
        yield self._first()
        unsent: dict[str, Tensor] = {}
        if self.own == 1 and self.has_errors:
            unsent = self._none_sent()
            yield _of_worker(0, unsent)
            self.mine |= unsent
        for others in range(1, -(-self.saved // self.own)):
            other = self.worker + others * self.own
            if other >= self.saved:
                yield Read({}, ("",))
                continue
            theirs = {n: tag(torch.zeros_like(t), layout_of(t)) for n, t in self.mine.items() if _is_merged(n, t)}
            yield _of_worker(other, theirs)
            self._merge(theirs, others)
        for name in unsent:
            self.mine[f"model/{name.partition('/')[2]}"].sub_(self.mine[name])

    def _first(self) -> Read:
        """All that is shared, and what this worker keeps: its own, or of the first what one takes that joins."""
        joins = self.worker >= self.saved
        without = (() if self.has_errors else ERRORS) if not joins else ("model/", *ERRORS)
        kept = {name: tensor for name, tensor in self.mine.items() if not name.startswith(without)}
        prefix = of_worker(0 if joins else self.worker)
        leaves = [of_worker(other) for other in range(self.own, self.saved)]
        if self.own == 1:
            leaves += [f"{of_worker(0)}{errors}" for errors in ERRORS]
        return Read(self.shared | {f"{prefix}{name}": tensor for name, tensor in kept.items()}, tuple(leaves))

    def _none_sent(self) -> dict[str, Tensor]:
        """Places for errors of a worker that keeps none itself."""
        like = {name: self.shared[f"model/{name}"] for names in self.fragments for name in names}
        return {f"{e}{n}": tag(torch.zeros_like(t), layout_of(t)) for e in ERRORS for n, t in like.items()}

    def _merge(self, theirs: Mapping[str, Tensor], merged: int) -> None:
        """Take another worker in.  merged: those that this one already is."""
        items, more = self.mine[ROUNDS][:, 0].tolist(), theirs[ROUNDS][:, 0].tolist()
        shares = [b / (a + b) if a + b > 0 else 1 / (merged + 1) for a, b in zip(items, more, strict=True)]
        share_of = {f"model/{n}": share for share, names in zip(shares, self.fragments, strict=True) for n in names}
        for name, other in theirs.items():
            if name.startswith(ERRORS):
                self.mine[name].add_(other)
            elif name == ROUNDS:
                self.mine[name][:, :2] += other[:, :2]
            else:
                self.mine[name].lerp_(other, share_of.get(name, shares[0]))


def _of_worker(worker: int, tensors: Mapping[str, Tensor]) -> Read:
    return Read({f"{of_worker(worker)}{name}": tensor for name, tensor in tensors.items()}, ("",))


def _is_merged(name: str, tensor: Tensor) -> bool:
    """Whether a worker's tensor becomes one with another's; the inner optimizer's and counters do not."""
    of_buffer = name.startswith("buffer/") and tensor.is_floating_point()
    return of_buffer or name == ROUNDS or name.startswith(("model/", *ERRORS))
