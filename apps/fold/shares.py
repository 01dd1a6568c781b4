"""Slices for a prediction that several ranks share, so that none of them allocates more than its budget.

1. a plan for one machine with n times the memory (where there is none, the leanest) says how many rows each operation
   takes at a time; a rank takes an n-th of these, of the rows that it has
2. what a rank then allocates is counted, not derived: the sharded model runs on the meta device, where nothing travels
   (core.comm). So all-to-alls' buffers, gathered biases and pieces of factors are in it
3. where that is beyond the budget the plan is made anew for less, by bisection

Every rank finds the same slices: they count the largest share, and plan for the smallest budget of them all. Counting
needs no ranks, so `fold plan --nproc` asks the same of ranks that are not there (`Absent`).
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from apps.fold.axial import FirstTwo, read_shards, shard_evoformer
from apps.fold.model.network import trainable
from apps.fold.subbatch import HEADS, FoldJob, How
from apps.fold.subbatch.counting import MetaAccount
from apps.fold.subbatch.planner import (
    gib_up,
    layer_bytes,
    meta_features,
    planned,
    stand_in,
    weights_bytes,
    without_masks,
)
from core.comm.collectives import all_reduce_max
from core.config import UserError
from core.kernels.operator import forced
from core.runtime import process_holding, tensors_within

_BISECTIONS = 3


@dataclass(frozen=True)
class Absent:
    """An axis of `count` ranks that were not started, seen from one of them; the first has the largest share."""

    count: int
    rank: int = 0
    mesh_dim_names: tuple[str, ...] = ("tp",)

    def size(self) -> int:
        return self.count

    def get_local_rank(self) -> int:
        return self.rank


Axis = DeviceMesh | Absent


def plan_shares(job: FoldJob, budget_bytes: int, axis: Axis, *, of_process: bool = False) -> dict[str, How]:
    """Slices of a rank's rows, alike on all ranks, within `budget_bytes` of each.

    of_process  as in `plan_subbatches`

    Raises UserError where no slices are: with what a rank needs at least.
    """
    given, size = -int(_largest(-float(budget_bytes), axis)), axis.size()
    budget = tensors_within(given) if of_process else given

    def counted(whole_bytes: int) -> tuple[dict[str, How], int]:
        choices = _shares(planned(job, whole_bytes).choices, size)
        return choices, int(_largest(float(rank_bytes(job, choices, axis)), axis))

    choices, peak = counted(size * budget)
    if peak <= budget:
        return choices
    choices, peak = counted(0)
    if peak > budget:
        least = gib_up(process_holding(peak) if of_process else peak)
        raise UserError(
            f"{job.residues} residues with {job.rows} + {job.extra} rows need at least {least} GiB on each of "
            f"{size} ranks, and there are {given / 2**30:.2f}; give --memory {least}, fewer rows, a narrower "
            "--precision or more ranks"
        )
    low, high = 0, size * budget
    for _ in range(_BISECTIONS):
        middle = (low + high) // 2
        found, peak = counted(middle)
        if peak <= budget:
            choices, low = found, middle
        else:
            high = middle
    return choices


def _shares(choices: Mapping[str, How], size: int) -> dict[str, How]:
    return {name: How("rows", max(1, how.rows // size)) for name, how in choices.items()}


def _largest(number: float, axis: Axis) -> float:
    if isinstance(axis, Absent):
        return number
    return float(all_reduce_max(torch.tensor(number, dtype=torch.float64), axis))


def rank_bytes(job: FoldJob, choices: Mapping[str, How], axis: Axis) -> int:
    """The most bytes that this rank has alive at once on its device in a prediction with these slices."""
    return _counted(job, tuple(choices.items()), Absent(axis.size(), axis.get_local_rank()))


@lru_cache(maxsize=256)  # other seeds and models of the same shape ask again
def _counted(job: FoldJob, choices: tuple[tuple[str, How], ...], axis: Absent) -> int:
    config = job.config
    stacks = {name: replace(getattr(config, name), num_blocks=min(1, getattr(config, name).num_blocks))
              for name in ("evoformer", "extra")}  # fmt: skip
    short = replace(config, **stacks, structure=replace(config.structure, num_layers=1))
    with torch.device("meta"):
        model = trainable(short).to(job.dtype).eval()
        others = torch.empty(weights_bytes(config, job.dtype) - weights_bytes(short, job.dtype), dtype=torch.uint8)
    mesh = cast(DeviceMesh, axis)  # of which sizes alone are asked where nothing travels
    two = {name: FirstTwo(how.method, how.rows) for name, how in choices}
    shard_evoformer(model, mesh, two)
    if not job.hidden:
        without_masks(model)
    features = meta_features(job)
    on_gpu = job.device == "cuda"
    kernels, host = (forced(), stand_in) if on_gpu else (nullcontext(), partial(torch.empty, device="meta"))
    with torch.inference_mode(), kernels, MetaAccount() as account:
        account.add([*model.parameters(), others])
        features.map(lambda tensor: account.add([tensor]) or tensor)
        found = model.fold([features] * min(2, job.iterations))
        read_shards(model.heads, found.pair_BNNZ, features.mask_BN, mesh, two.get(HEADS), host, distances=job.distances)
    return account.peak_bytes + (config.structure.num_layers - 1) * layer_bytes(found.structure)
