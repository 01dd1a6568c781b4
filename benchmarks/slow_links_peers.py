"""PowerSGD as torch's hook for DDP has it beside ours, of the same first basis, for `benchmarks.slow_links`.

Each worker has gradients of two directions that all have in common, and noise of its own. The two keep errors
differently, torch C_w - G^ / n and we C_w - P Q_w^T, which have the same sum: so they send the same in every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from core.comm.volume import count_volume
from core.mesh import MeshConfig, build_mesh
from core.parallel.compress import CommConfig, compression_of
from core.parallel.powersgd import PowerSGD
from core.placement.table import placement

WHOLE_STEPS = 2
"""Which torch's hook asks for before it compresses."""
SEED = 5


@dataclass(frozen=True)
class Beside:
    """difference  the largest of any step between the two sums, over the norm of torch's
    lost  the least share of the norm of the whole sum that a step did not send
    ours, theirs  bytes of a step's messages; torch's as the hook counts its elements, since it sends from callbacks
    """

    difference: float
    lost: float
    ours: float
    theirs: float


class Product(nn.Module):
    """A matrix whose gradient is what it is called with."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(shape, dtype=torch.float64))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.matrix * gradient).sum()


def gradient(shape: tuple[int, ...], step: int, worker: int) -> Tensor:
    common, own = (torch.Generator().manual_seed(1000 * step + seed) for seed in (99, worker))
    left, right = (torch.randn(size, 2, generator=common, dtype=torch.float64) for size in shape)
    return left @ right.mT + torch.randn(shape, generator=own, dtype=torch.float64)


def beside_torchs_hook(shapes: Sequence[tuple[int, ...]], rank: int, num_steps: int) -> list[Beside]:
    """On every worker, for a matrix of each shape that both compress."""
    return [_of_shape(shape, rank, num_steps) for shape in shapes]


def _of_shape(shape: tuple[int, ...], rank: int, num_steps: int) -> Beside:
    workers, worker = dist.get_world_size(), dist.get_rank()
    mesh, model = build_mesh(MeshConfig().resolve(workers), "cpu"), Product(shape)
    comm, table = CommConfig("powersgd", rank=rank), placement(model, None, mesh)
    compression = compression_of(comm, mesh, table, torch.float64, torch.device("cpu"))
    assert isinstance(compression, PowerSGD)
    with torch.random.fork_rng(devices=[]):  # as the hook draws its first basis
        torch.manual_seed(np.random.RandomState(SEED).randint(1_000_000_000))
        compression.bases["matrix"] = torch.randn(1, shape[1], rank, dtype=torch.float64)
    theirs = DistributedDataParallel(Product(shape))
    state = powerSGD_hook.PowerSGDState(
        None, rank, start_powerSGD_iter=WHOLE_STEPS, min_compression_rate=1, random_seed=SEED
    )
    theirs.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    differences, lost, ours = list[float](), list[float](), 0.0
    for step in range(WHOLE_STEPS + num_steps):
        grads = [gradient(shape, step, each) for each in range(workers)]
        theirs.zero_grad()
        theirs(grads[worker]).backward()
        if step < WHOLE_STEPS:
            continue
        with count_volume(mesh) as volume:
            summed = compression.reduce({"matrix": grads[worker].clone()})["matrix"]
        compression.commit()
        ours += volume.total_bytes / num_steps
        wanted, whole = theirs.module.matrix.grad, torch.stack(grads).sum(0)
        assert wanted is not None
        differences.append(float((summed / workers - wanted).norm() / wanted.norm()))
        lost.append(float((summed - whole).norm() / whole.norm()))
    sent = state.total_numel_after_compression * model.matrix.element_size() / num_steps
    return Beside(max(differences), min(lost), ours, sent)
