"""The squares of the gradients that each microbatch leaves, before reduction and clipping.

A rank's gradient of one microbatch is of its own rows alone until data parallelism adds the ranks up. `GradientSquares`
is told of each as autograd delivers it, takes its norm, and keeps no gradient. Tensor parallelism has cut a gradient:
the squares of its shards add up, and what the ranks hold alike counts once. Data-parallel ranks hold gradients of other
rows: these are never added before they are squared.

Where the gradients of small parameters are partial sums over tp (norms between sharded sequences), each microbatch's is
kept until the step's end, and all travel in one message: the square of a sum is not the sum of squares.

McCandlish et al. 2018, An Empirical Model of Large-Batch Training, appendix A.1. The estimate is `core.train.noise`.
"""

import math
from collections import Counter
from collections.abc import Callable
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
from core.placement.table import Placed, Table


class GradientSquares:
    """Adds up, over the microbatches of a step, the squares of this rank's gradients."""

    def __init__(self, mesh: DeviceMesh, table: Table):
        self._mesh, self._table = mesh, table
        self._alike = mesh.size() // pipeline_ranks(mesh) // data_axis(mesh).size()  # ranks of the same rows and stage
        self._norms: dict[int, list[Tensor]] = {}  # by how many ranks hold the same
        self._partial: dict[str, list[Tensor]] = {}
        self._calls: Counter[str] = Counter()

    @torch.no_grad()
    def add(self, name: str, grad: Tensor) -> None:
        """One microbatch's gradient of a parameter, on this rank; it is only looked at."""
        self._calls[name] += 1
        grad = own_part(grad) if is_dtensor(grad) else grad
        if not grad.numel():
            return
        row, wide = self._table[name], torch.promote_types(grad.dtype, torch.float32)
        if row.partial:
            self._partial.setdefault(name, []).append(grad.detach().to(wide, copy=True).flatten())
        else:
            norm = torch.linalg.vector_norm(grad.detach(), dtype=wide)
            self._norms.setdefault(self._copies(row), []).append(norm)

    def _copies(self, row: Placed) -> int:
        return self._alike // math.prod(map(row.layout.axis_size, row.layout.axes()))

    @torch.no_grad()
    def take(self, num_microbatches: int) -> Tensor:
        """Two numbers (fp64), to be added up over all ranks; begins anew.

        The first is then the sum over all microbatches of all ranks of the squared norm of the microbatch's gradient.
        The second is above 0 where a gradient came in several parts in one microbatch, and the first is wrong.
        """
        total = torch.zeros((), dtype=torch.float64, device=device_of(self._mesh))
        for copies, norms in self._norms.items():
            total += torch.stack(norms).to(total).square().sum() / copies
        for axis in sorted({axis for name in self._partial for axis in self._table[name].partial}):
            names = sorted(name for name in self._partial if axis in self._table[name].partial)
            flat = torch.cat([grad for name in names for grad in self._partial[name]])
            dist.all_reduce(flat, group=sub_mesh(self._mesh, axis).get_group())
            total += flat.to(total).square().sum() / self._copies(self._table[names[0]])
        several = max(self._calls.values(), default=0) > num_microbatches
        self._norms.clear()
        self._partial.clear()
        self._calls.clear()
        return torch.stack((total, torch.full_like(total, float(several))))

    def watch(self, name: str, parameter: Tensor) -> None:
        """Be told of each gradient that arrives at a leaf."""
        # The garbage collector does not see into a tensor's hooks: what they held could never be freed.
        own = ref(self)

        def arrived(grad: Tensor) -> None:
            if (squares := own()) is not None:
                squares.add(name, grad)

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
