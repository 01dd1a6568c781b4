"""Steps of an optimizer with given gradients, on parameters that are sharded in many ways, beside one plain rank.

Whole values and gradients are drawn from seeds, so every rank computes the plain run for itself and no model is needed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from core.checkpoint import CheckpointConfig, Checkpointer
from core.comm.volume import count_volume
from core.layout import Layout, full_tensor, layout_of, local, tag
from core.mesh import derive_axes
from core.optim.sharded import ShardedOptimizer, restore_state, state_tensors
from tests.support.covering import FEW

Make = Callable[[list[Tensor]], torch.optim.Optimizer]
AXES = ("dp_replicate", "dp_shard", "tp_row", "tp_col")

# name -> shape, the dims that tp_row and tp_col cut
DIVISIBLE: dict[str, tuple[tuple[int, ...], int | None, int | None]] = {
    "matrix": ((16, 32), 0, 1),
    "conv": ((16, 8, 3, 3), 0, 1),
    "cube": ((8, 16, 8), 1, 2),
    "embedding": ((64, 16), 0, None),
    "vector": ((32,), 0, None),
}
RAGGED: dict[str, tuple[tuple[int, ...], int | None, int | None]] = {
    "ragged_matrix": ((13, 21), 0, 1),
    "ragged_conv": ((7, 5, 3, 3), 0, 1),
    "ragged_cube": ((5, 7, 9), 1, 2),
    "ragged_embedding": ((61, 11), 0, 1),
    "three_rows": ((3, 17), 0, 1),  # empty shards
    "one_row": ((1, 9), 0, 1),
    "one_col": ((9, 1), 0, 1),
    "ragged_vector": ((13,), 0, 0),
    "pair": ((2,), 0, 0),
    "scalar": ((), None, None),
    "fused": ((20, 9), 0, 1),
    "fused_columns": ((7, 22), 0, 1),
}
PARTS = {("fused", "tp_row"): (12, 4, 4), ("fused_columns", "tp_col"): (11, 11)}
"""(name, axis) -> lengths of the parts of the dim that it cuts; a DTensor is cut as one."""
LARGE: dict[str, tuple[tuple[int, ...], int | None, int | None]] = {
    "aligned": ((64, 512), 0, 1),  # blocks of 256 are not cut
    "ragged_rows": ((37, 300), 0, None),
}
SHAPES = DIVISIBLE | RAGGED


@dataclass(frozen=True)
class Case:
    """A mesh, and how parameters lie on it: local tensors, DTensors, or FSDP2 over what tensor parallelism left."""

    dp_shard: int = 1
    tp_row: int = 1
    tp_col: int = 1
    kind: str = "local"
    hybrid: bool = False
    named: bool = True  # False: the mesh that FSDP2 makes where it is given none

    @property
    def num_ranks(self) -> int:
        return self.dp_shard * self.tp_row * self.tp_col * (2 if self.hybrid else 1)

    def mesh(self) -> DeviceMesh:
        return _mesh(dist.get_world_size(), self.dp_shard, self.tp_row, self.tp_col)


@lru_cache
def _mesh(world_size: int, *sizes: int) -> DeviceMesh:
    mesh = init_device_mesh("cpu", (world_size // math.prod(sizes), *sizes), mesh_dim_names=AXES)
    derive_axes(mesh)  # those that volumes are counted by
    return mesh


@lru_cache(maxsize=2048)
def whole(name: str, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + sum(map(ord, name)))
    drawn = torch.randn((SHAPES | LARGE)[name][0], generator=generator, dtype=torch.float64)
    return (drawn * (1.0 + seed % 3)).to(dtype)


def plain(make: Make, names: list[str], dtype: torch.dtype, steps: int) -> dict[str, Tensor]:
    """Displacements on one rank."""
    parameters = {name: whole(name, 0, dtype).clone().requires_grad_() for name in names}
    optimizer = make(list(parameters.values()))
    for step in range(1, steps + 1):
        for name, parameter in parameters.items():
            parameter.grad = whole(name, step, dtype).clone()
        optimizer.step()
    return {name: parameter.detach() - whole(name, 0, dtype) for name, parameter in parameters.items()}


def spread(case: Case, names: list[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """The parameters on the mesh of the case."""
    mesh = case.mesh()
    if case.kind == "fsdp":
        return _by_fsdp(case, mesh, names, dtype)
    return {name: _spread_one(case, mesh, name, dtype) for name in names}


def _cuts(case: Case, name: str) -> list[tuple[str, int]]:
    shape, row, col = (SHAPES | LARGE)[name]
    dims = (("tp_row", row), ("tp_col", col), ("dp_shard", 0 if shape else None))
    return [(axis, dim) for axis, dim in dims if dim is not None and getattr(case, axis) > 1]


def _spread_one(case: Case, mesh: DeviceMesh, name: str, dtype: torch.dtype) -> Tensor:
    full = whole(name, 0, dtype).clone()
    if case.kind == "local":
        layout = Layout(tuple(full.shape))
        for axis, dim in _cuts(case, name):
            layout = layout.cut(mesh, axis, dim, parts=PARTS.get((name, axis), ()))
        return tag(layout.local(full).clone(), layout).requires_grad_()
    dim_of = dict(_cuts(case, name))
    placements: list[Placement] = [Shard(dim_of[axis]) if axis in dim_of else Replicate() for axis in AXES]
    return nn.Parameter(distribute_tensor(full, mesh, placements, src_data_rank=None))


def _by_fsdp(case: Case, mesh: DeviceMesh, names: list[str], dtype: torch.dtype) -> dict[str, Tensor]:
    module = nn.Module()
    for name in names:
        full = whole(name, 0, dtype).clone()
        for axis, dim in _cuts(case, name):
            if axis != "dp_shard":
                full = distribute_tensor(full, mesh[axis], [Shard(dim)], src_data_rank=None)
                break  # FSDP2 takes one axis of tensor parallelism
        module.register_parameter(name, nn.Parameter(full))
    axes = mesh["dp_replicate", "dp_shard"] if case.hybrid else mesh["dp_shard"]
    fully_shard(module, mesh=axes if case.named else None)
    return dict(module.named_parameters())


def give_gradients(parameters: dict[str, Tensor], step: int) -> None:
    for name, parameter in parameters.items():
        grad = layout_of(parameter).local(whole(name, step, parameter.dtype)).clone()
        if isinstance(parameter, DTensor):
            places = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
            grad = DTensor.from_local(grad, parameter.device_mesh, parameter.placements, **places)
        parameter.grad = grad


def sharded(make: Make, case: Case, names: list[str], dtype: torch.dtype, steps: int) -> dict[str, Tensor]:
    """Whole displacements on the mesh, on every rank."""
    parameters = spread(case, names, dtype)
    optimizer = make(list(parameters.values()))
    for step in range(1, steps + 1):
        give_gradients(parameters, step)
        optimizer.step()
    return {name: full_tensor(p) - whole(name, 0, dtype) for name, p in parameters.items()}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a displacement relative to what one rank's parameter moved; NaN counts as infinite."""
    worst = 0.0
    for name, want in expected.items():
        size = float(want.norm())
        assert size > 0, f"{name} did not move"
        relative = float((found[name] - want).norm()) / size
        worst = max(worst, relative if math.isfinite(relative) else math.inf)
    return worst


def difference_from_one_rank(
    which: str, make: Make, case: Case, names: list[str], dtype: torch.dtype, steps: int
) -> float:
    """How far the mesh of the case is from one rank.  which: names what `make` makes, for the plain run is kept."""
    mine = [n for n in names if case.kind != "fsdp" or (SHAPES | LARGE)[n][0]]  # FSDP2 cuts no scalars
    key = (which, tuple(names), dtype, steps)
    if key not in _PLAIN:
        _PLAIN[key] = plain(make, names, dtype, steps)
    return difference(sharded(make, case, mine, dtype, steps), {n: _PLAIN[key][n] for n in mine})


_PLAIN: dict[tuple, dict[str, Tensor]] = {}


def difference_after_resharding(
    folder: Path, which: str, make: Make, before: Case, after: Case, names: list[str]
) -> float:
    """Steps on one mesh, a checkpoint, as many on another mesh: how far from one rank."""
    half, dtype = FEW, torch.float64
    parameters = spread(before, names, dtype)
    optimizer = make(list(parameters.values()))
    for step in range(1, half + 1):
        give_gradients(parameters, step)
        optimizer.step()
    checkpointer = Checkpointer(folder / which, CheckpointConfig(asynchronous=False), before.mesh())
    checkpointer.save(half, _kept(parameters, optimizer)[0], {}, {})
    parameters = spread(after, names, dtype)
    optimizer = make(list(parameters.values()))
    assert isinstance(optimizer, ShardedOptimizer)
    optimizer.init_state()
    tensors, states = _kept(parameters, optimizer)
    with torch.no_grad():
        checkpointer.load(half, tensors)
    checkpointer.close()
    for name, parameter in parameters.items():
        restore_state(optimizer, parameter, states[name])
    for step in range(half + 1, 2 * half + 1):
        give_gradients(parameters, step)
        optimizer.step()
    found = {name: full_tensor(p) - whole(name, 0, dtype) for name, p in parameters.items()}
    return difference(found, plain(make, names, dtype, 2 * half))


def _kept(
    parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """All tensors of a checkpoint by name, and each parameter's state by key."""
    states = {name: state_tensors(optimizer, p) for name, p in parameters.items()}
    tensors = {f"model/{name}": local(p.detach()) for name, p in parameters.items()}
    tensors = {n: tag(t, layout_of(parameters[n.removeprefix("model/")])) for n, t in tensors.items()}
    for name, state in states.items():
        tensors |= {f"optim/{key}/{name}": value for key, value in state.items()}
    return tensors, states


def without_collectives(make: Make, case: Case, names: list[str]) -> float:
    """The same where no partial sum is completed."""
    expected = plain(make, names, torch.float64, FEW)
    with patch("core.optim.sharded.Reduction._launch", lambda reduction: None):
        return difference(sharded(make, case, names, torch.float64, FEW), expected)


def messages(make: Make, case: Case, names: list[str]) -> dict[tuple[str, str], tuple[int, int]]:
    """(operation, axis) -> calls and bytes of one step."""
    parameters = spread(case, names, torch.float32)
    optimizer = make(list(parameters.values()))
    give_gradients(parameters, 1)
    optimizer.step()
    with count_volume(case.mesh()) as volume:
        optimizer.step()
    return {key: (calls, volume.bytes[key]) for key, calls in volume.calls.items()}
