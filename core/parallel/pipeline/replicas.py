"""The replicas of a stage: ranks that take its microbatches in turn, and hold the same weights.

PipeDream's 1F1B-RR (Narayanan et al. 2019, PipeDream, section 3.2): microbatch b runs forward and backward on replica b
mod r, so its version of the weights is looked up where it was made. What the replicas have of a step is added up in r
parts: each replica adds up one, in the order of the replicas, and sends it to the others. So all have the same sums, to
the bit, and a rank sends 2 (r - 1) / r of them, as in a ring.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from core.parallel.data import in_buckets
from core.placement.table import Table


class StageReplicas:
    """This rank's among them.

    ranks  of the world that are replicas of its stage
    place  of this rank in their order
    group  of the pipeline's ranks; between replicas nobody else sends by it
    """

    def __init__(self, ranks: Sequence[int], place: int, group: dist.ProcessGroup):
        self.ranks, self.place, self.group = list(ranks), place, group

    @property
    def number(self) -> int:
        return len(self.ranks)

    @torch.no_grad()
    def add_up(self, x: Tensor) -> None:
        """Add to x, in place, those of the other replicas; x: [elements], contiguous."""
        if self.number == 1:
            return
        parts = x.tensor_split(self.number)
        mine = parts[self.place]
        each = [mine if place == self.place else torch.empty_like(mine) for place in range(self.number)]
        self._exchange(parts, each)
        total = each[0].clone()
        for other in each[1:]:
            total += other
        mine.copy_(total)
        self._exchange([mine] * self.number, parts)

    def _exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Send to each other replica its tensor, and receive one of it."""
        others = [place for place in range(self.number) if place != self.place]
        operations = [
            dist.P2POp(operation, tensors[place], self.ranks[place], self.group)
            for place in others
            for operation, tensors in ((dist.isend, sent), (dist.irecv, received))
            if tensors[place].numel()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    def add_up_gradients(self, masters: Mapping[str, Tensor], table: Table) -> None:
        """Add up the masters' gradients: some where a microbatch of any replica had one, else none."""
        if self.number == 1:
            return
        used = self._used(masters)
        for name in masters:
            if name not in used:
                masters[name].grad = None
        for names in in_buckets({name: masters[name].nbytes for name in masters if name in used}, table):
            whole = torch.cat([_gradient(masters[name]).flatten() for name in names])
            self.add_up(whole)
            for name, grad in zip(names, whole.split([masters[name].numel() for name in names]), strict=True):
                masters[name].grad = grad.view(masters[name].shape)

    def _used(self, masters: Mapping[str, Tensor]) -> Collection[str]:
        """Those of which any replica has a gradient."""
        marks = torch.tensor([float(m.grad is not None) for m in masters.values()], device=_device(masters.values()))
        self.add_up(marks)
        return {name for name, mark in zip(masters, marks.tolist(), strict=True) if mark}


def _gradient(master: Tensor) -> Tensor:
    return torch.zeros_like(master) if master.grad is None else master.grad


def _device(masters: Iterable[Tensor]) -> torch.device:
    return next(iter(masters)).device
