"""Compressed reductions of gradients with error feedback: what every compression keeps, sends and tells.

In a step each data-parallel rank w has its own gradient g_w and its own error e_w, of the same shape, zero at first:

    c_w = g_w + e_w          once a step, of the gradient that all its microbatches have added up
    G^  = sum of D(C(c_w))   what the optimizer gets in the place of the sum of g_w; it is clipped, like any gradient
    e_w = c_w - D(C(c_w))    what of c_w has not been sent: it goes along in the next step

A step that is skipped, because its gradients are not finite, leaves the errors as they were. They are in units of the
gradient without its loss scale. Parameters that took part in no rank's loss keep theirs.

In checkpoints the errors of a parameter are one tensor [ranks, *shape], cut over the ranks. On fewer or more ranks each
takes its share of those rows and adds them up: the sum over the ranks, which is all that a later step depends on (of
one rank's error a quantizer or top-k depends, too), is what it was.

`Unsent` is what is kept, whoever sends; `Feedback` takes the place of a reduction.

Seide et al. 2014, 1-bit SGD, section 3.2; Karimireddy et al. 2019, arXiv:1901.09847, algorithm 2.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from core.layout import Layout, tag
from core.mesh import gradient_axes, gradient_axis
from core.placement.table import Table


class Unsent:
    """What of the gradients of some parameters has not been sent yet: an error of each on each rank.

    names    of the parameters, in an order alike on every rank
    options  what a checkpoint must agree in, beside the name
    """

    name: ClassVar[str]
    start: int = 0
    """steps that are reduced whole first"""

    def __init__(
        self, names: Sequence[str], mesh: DeviceMesh, table: Table, dtype: torch.dtype, device: torch.device,
        options: Mapping[str, Any],
    ):  # fmt: skip
        """dtype: of the reduction"""
        self.names, self.mesh, self.table, self.options = tuple(names), mesh, table, dict(options)
        self.axis = gradient_axis(mesh)
        self.steps = 0
        self._pending: dict[str, Tensor] = {}
        self.begin(dtype, device)

    def begin(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make what is kept from step to step, as a run begins with it."""
        shapes = {name: self.table[name].layout.local_shape() for name in self.names}
        self.errors = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in shapes.items()}

    def commit(self) -> None:
        """Take over what the step has left: its update is made."""
        self.errors |= self._pending
        self._pending = {}
        self.steps += 1

    def discard(self) -> None:
        """Leave all as it was before the step: it is skipped."""
        self._pending = {}

    def held(self) -> list[Tensor]:
        """What stays from step to step and is as large as gradients."""
        return [*self.errors.values()]

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """What of a checkpoint's values is this state's."""
        return {"compress": self.name, "ranks": self.axis.size(), "steps": self.steps, **self.options}

    def of_ranks(self) -> dict[str, dict[str, Tensor]]:
        """Kind -> name -> what each rank has of its own, of the parameter's shape."""
        return {"error": self.errors}

    def tensors(self) -> dict[str, Tensor]:
        """Name -> local tensor, tagged with its layout, of everything that is kept from step to step."""
        ranks, found = self.axis.size(), self.own_tensors()
        for kind, own in self.of_ranks().items():
            found |= {f"{kind}/{n}": tag(one.unsqueeze(0), self._of_ranks_layout(n, ranks)) for n, one in own.items()}
        return found

    def own_tensors(self) -> dict[str, Tensor]:
        """Those beside what each rank has of its own; what is written into them is the new state."""
        return {}

    def to_fill(self, record: Mapping[str, Any]) -> dict[str, Tensor]:
        """The same with what each of as many ranks had as saved it, for `take`."""
        found = self.own_tensors()
        for kind, own in self.of_ranks().items():
            for name, one in own.items():
                layout = self._of_ranks_layout(name, record["ranks"])
                found[f"{kind}/{name}"] = tag(one.new_zeros(layout.local_shape()), layout)
        return found

    def take(self, record: Mapping[str, Any], filled: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self.steps = int(record["steps"])
        self.errors = {name: filled[f"error/{name}"].sum(0) for name in self.errors}

    def _of_ranks_layout(self, name: str, ranks: int) -> Layout:
        own, axis = self.table[name].layout, "+".join(gradient_axes(self.mesh))
        cuts = ((axis, 0), *((axis, dim + 1) for axis, dim in own.cuts))
        return replace(own, shape=(ranks, *own.shape), mesh=self.mesh, cuts=cuts)


class Feedback(Unsent, ABC):
    """A compression of the gradients of some parameters.

    names    parameters that are compressed
    options  the compression's own
    start    steps that are reduced whole first
    report_every  steps between two reports (`row`), each of which sums gradients and errors whole; 0: none
    """

    clip_norm: float | None = None
    """for those that clip each rank's gradients"""
    norm: Tensor | None = None
    """of a step whose gradients were clipped here: that by which they were, times their scale"""
    is_last: bool = False
    """whether a step is the last one of a run"""

    def __init__(
        self,
        names: Sequence[str],
        mesh: DeviceMesh,
        table: Table,
        dtype: torch.dtype,
        device: torch.device,
        options: Mapping[str, Any],
        start: int = 0,
        report_every: int = 0,
    ):
        """Take the arguments of `Unsent`."""
        super().__init__(names, mesh, table, dtype, device, options)
        self.start, self.report_every = start, report_every
        self._report: Tensor | None = None

    @property
    def is_on(self) -> bool:
        """Whether the next step is compressed."""
        return self.steps >= self.start

    @abstractmethod
    def exchange(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """The decompressed sum over the ranks of what each of them gives, on every rank; a collective of all ranks.

        given  name -> c_w of this rank, contiguous; what of it was not sent is left there
        """

    @torch.no_grad()
    def reduce(self, grads: dict[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
        """Name -> the sum over the ranks of their gradients, as far as it was sent.

        grads  of this rank, alike named on all; their memory is taken over
        scale  that they are multiplied with (the loss scale)
        """
        self._pending, self._report = grads, None
        if not grads:
            return {}
        reports = self.report_every and (self.steps + 1) % self.report_every == 0
        true = self._whole(grads) if reports else {}
        for name, grad in grads.items():
            grad.add_(self.errors[name], alpha=scale)
        given = self._whole(grads) if reports else {}
        found = self.exchange(grads)
        if scale != 1.0:
            torch._foreach_mul_(list(grads.values()), 1 / scale)
        if reports:
            self._report = self._compared(found, true, given)
        return found

    def commit(self) -> None:
        super().commit()
        self.norm = None

    def discard(self) -> None:
        super().discard()
        self._report, self.norm = None, None

    def update(self, optimizer: torch.optim.Optimizer) -> bool:
        """`commit`, and the optimizer's step.  Returns whether there was one."""
        self.commit()
        optimizer.step()
        return True

    def apart(self, parameters: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Surround the forwards and backwards of a step: inside, parameters may have values of this rank alone."""
        return nullcontext()

    def settle(self) -> None:
        """Be as in a step behind the first ones, for estimates of such steps."""
        self.start = 0

    def row(self) -> dict[str, float]:
        """Figures of the step that was reported, else none.

        compression_cosine  between what the optimizer got and the sum of the gradients
        compression_error   norm of what was not sent, of all ranks together, over that of the sum of the gradients
        """
        report, self._report = self._report, None
        return {} if report is None else figures_of(report)

    def _whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies, summed over the ranks without compression."""
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        sum_together(list(copies.values()), self.axis)
        return copies

    def _compared(self, found: Mapping[str, Tensor], true: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> Tensor:
        """fp64[4], alike on every rank: <found, true>, |found|^2, |true|^2, |given - found|^2."""
        total = torch.zeros(4, dtype=torch.float64, device=next(iter(self.errors.values())).device)
        for name, one in found.items():
            copies = self.table[name].layout.num_holders(self.mesh)
            total += compared(one, true[name], given[name] - one) / copies
        if self.mesh.size() > 1:
            dist.all_reduce(total)
        return total


def compared(found: Tensor, true: Tensor, left: Tensor) -> Tensor:
    """fp64[4]: <found, true>, |found|^2, |true|^2, |left|^2.  left: of what was to be sent"""
    one, other, rest = (tensor.double() for tensor in (found, true, left))
    return torch.stack([part.sum() for part in (one * other, one.square(), other.square(), rest.square())])


def figures_of(total: Tensor) -> dict[str, float]:
    """The figures of `Feedback.row` by what `compared` has come to; none where nothing was sent."""
    dot, found, true, left = total.tolist()
    if not (found > 0 and true > 0):
        return {}
    return {"compression_cosine": dot / math.sqrt(found * true), "compression_error": math.sqrt(left / true)}


def gathered(own: Tensor, axis: DeviceMesh) -> Tensor:
    """[n] of this rank -> [ranks, n]."""
    if axis.size() == 1:
        return own.unsqueeze(0)
    whole = own.new_empty(axis.size(), len(own))
    dist.all_gather_into_tensor(whole.view(-1), own, group=axis.get_group())
    return whole


def sum_together(tensors: Sequence[Tensor], axis: DeviceMesh) -> None:
    """All-reduce tensors, in place, in one message."""
    if axis.size() == 1 or not any(t.numel() for t in tensors):
        return
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat, group=axis.get_group())
    for tensor, summed in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(summed.view_as(tensor))
