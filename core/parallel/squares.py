"""The squares of the gradients that each microbatch leaves, before reduction and clipping.

A rank's gradient of one microbatch is of its own rows alone until data parallelism adds the ranks up. `GradientSquares`
is told of each as autograd delivers it, and takes its norm while caches still hold it. A small gradient's norm takes
longer to call than to compute: small ones of rows as long are collected, copied into one tensor, and have one norm
together. Nothing else of a gradient is kept. Tensor parallelism has cut a gradient: the squares of its shards add up,
and what the ranks hold alike counts once. Data-parallel ranks hold gradients of other rows: these are never added
before they are squared.

Where the gradients of small parameters are partial sums over tp (norms between sharded sequences), each microbatch's is
kept until the step's end, and all travel in one message: the square of a sum is not the sum of squares.

McCandlish et al. 2018, An Empirical Model of Large-Batch Training, appendix A.1. The estimate is `core.train.noise`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from core.compat import own_part
from core.layout import is_dtensor
from core.mesh import data_axis, device_of, pipeline_ranks, sub_mesh
from core.placement.table import Table

SMALL_BYTES = 2**16
"""A gradient up to this size is collected: copying it takes less than a norm of its own."""
COLLECTED_BYTES = 2**22
"""Of collected gradients, at which their norm is taken."""

_Kind = tuple[int, torch.dtype, torch.Size]
"""Of gradients that make one tensor: how many ranks hold the same, format, shape without its first dim."""


@dataclass(eq=False, slots=True)
class _Seen:
    """What is known of a parameter's gradients from the first one on: a hook that looks it up anew takes longer.

    alike  where those that make one tensor with these are collected; None: they have norms of their own
    held   one of these is in it
    """

    copies: int
    size: int
    partial: bool
    alike: list[Tensor] | None
    calls: int = 0
    held: bool = False


class GradientSquares:
    """Adds up, over the microbatches of a step, the squares of this rank's gradients."""

    def __init__(self, mesh: DeviceMesh, table: Table):
        self._mesh, self._table = mesh, table
        alike = mesh.size() // pipeline_ranks(mesh) // data_axis(mesh).size()  # ranks of the same rows and stage
        self._copies = {n: alike // math.prod(map(r.layout.axis_size, r.layout.axes())) for n, r in table.items()}
        self._norms: dict[int, list[Tensor]] = {}  # by how many ranks hold the same
        self._seen: dict[str, _Seen] = {}
        self._collected: dict[_Kind, list[Tensor]] = {}
        self._held: list[_Seen] = []
        self._collected_bytes = 0
        self._partial: dict[str, list[Tensor]] = {}

    def add(self, name: str, grad: Tensor) -> None:
        """One microbatch's gradient of a parameter, on this rank, that needs no gradient itself.

        It is only looked at: until the next one of this parameter, or `take`, so that it must not change before.
        """
        if is_dtensor(grad):
            grad = own_part(grad)
        if (seen := self._seen.get(name)) is None:
            seen = self._seen[name] = self._first(name, grad)
        seen.calls += 1
        if seen.partial:
            self._partial.setdefault(name, []).append(grad.to(_wide(grad), copy=True).flatten())
        elif seen.alike is None:
            self._square(grad, seen.copies)
        else:
            if seen.held:
                self._square_collected()
            seen.alike.append(grad)
            seen.held = True
            self._held.append(seen)
            self._collected_bytes += seen.size
            if self._collected_bytes > COLLECTED_BYTES:
                self._square_collected()

    def _first(self, name: str, grad: Tensor) -> _Seen:
        copies, size = self._copies[name], grad.nbytes
        kind = copies, grad.dtype, grad.shape[1:]
        alike = self._collected.setdefault(kind, []) if size <= SMALL_BYTES and grad.ndim else None
        return _Seen(copies, size, bool(self._table[name].partial), alike)

    @torch.no_grad()
    def _square(self, grad: Tensor, copies: int) -> None:
        self._norms.setdefault(copies, []).append(torch.linalg.vector_norm(grad, dtype=_wide(grad)))

    def _square_collected(self) -> None:
        for (copies, *_), alike in self._collected.items():
            if alike:
                self._square(torch.cat(alike), copies)
                alike.clear()
        for seen in self._held:
            seen.held = False
        self._held.clear()
        self._collected_bytes = 0

    @torch.no_grad()
    def take(self, num_microbatches: int) -> Tensor:
        """Two numbers (fp64), to be added up over all ranks; begins anew.

        The first is then the sum over all microbatches of all ranks of the squared norm of the microbatch's gradient.
        The second is above 0 where a gradient came in several parts in one microbatch, and the first is wrong.
        """
        self._square_collected()
        total = torch.zeros((), dtype=torch.float64, device=device_of(self._mesh))
        for copies, norms in self._norms.items():
            total += torch.stack(norms).to(total).square().sum() / copies
        for axis in sorted({axis for name in self._partial for axis in self._table[name].partial}):
            names = sorted(name for name in self._partial if axis in self._table[name].partial)
            flat = torch.cat([grad for name in names for grad in self._partial[name]])
            dist.all_reduce(flat, group=sub_mesh(self._mesh, axis).get_group())
            total += flat.to(total).square().sum() / self._copies[names[0]]
        several = max((seen.calls for seen in self._seen.values()), default=0) > num_microbatches
        for seen in self._seen.values():
            seen.calls = 0
        self._norms.clear()
        self._partial.clear()
        return torch.stack((total, torch.full_like(total, float(several))))

    def watch(self, name: str, parameter: Tensor) -> None:
        """Be told of each gradient that arrives at a leaf."""
        # The garbage collector does not see into a tensor's hooks: what they held could never be freed.
        own = ref(self)

        def arrived(grad: Tensor) -> None:
            if (squares := own()) is not None:
                squares.add(name, grad.detach())  # another name of it: what has two of this one autograd copies

        parameter.register_hook(arrived)

    def watch_gathered(self, model: nn.Module, kept_whole: dict[str, Tensor]) -> None:
        """Be told of the gradients of what FSDP2 gathers: whole parameters, which are there from the first forward on.

        kept_whole  name -> parameter of those that it leaves alone
        """
        for name, parameter in kept_whole.items():
            self.watch(name, parameter)
        own = ref(self)

        def tell(name: str, parameter: Tensor) -> None:
            if (squares := own()) is not None:
                squares.watch(name, parameter)

        when_gathered(model, tell)


def when_gathered(model: nn.Module, tell: Callable[[str, Tensor], None]) -> None:
    """Have each trained parameter told of, once, when FSDP2 has first gathered it: what forwards compute with.

    tell  (name, parameter) -> None; what it holds lives as long as the model
    """
    seen = {id(parameter) for parameter in model.parameters()}

    def gathered(prefix: str) -> Callable[[nn.Module, Any], None]:
        def look(unit: nn.Module, _: Any) -> None:
            for name, parameter in unit.named_parameters(prefix):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    if parameter.requires_grad:
                        tell(name, parameter)

        return look

    for name, unit in model.named_modules():
        module: nn.Module = unit
        if isinstance(unit, FSDPModule):
            module.register_forward_pre_hook(gathered(name))  # behind FSDP2's own, which is the first


def _wide(grad: Tensor) -> torch.dtype:
    """The format of its norm."""
    return torch.promote_types(grad.dtype, torch.float32)
