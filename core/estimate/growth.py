"""By how many blocks a list may be cut down so that the step of the whole model follows: `core.trace.alike`.

Besides the blocks' kinds two things repeat along them: which are recomputed, every so many, and where the messages of
gradients begin that data parallelism fills with parameters of several blocks. From the model's end on, these begin to
repeat after a while; a period is one of all of them.
"""

import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from torch import nn

from core.compose import ParallelConfig
from core.mesh import MeshConfig
from core.parallel.compress import compressed_names
from core.parallel.data import in_buckets
from core.placement.stages import StageSplit
from core.placement.style import Plan
from core.placement.table import ModelPlan, model_plan, parameter_names, placement
from core.precision import master_dtype
from core.trace.alike import AlikeBlocks, Cut, Growth, Part, alike_blocks
from core.trace.segments import of_blocks


def cuts_of(
    model: nn.Module,
    mesh: MeshConfig,
    parallel: ParallelConfig,
    plan: ModelPlan | Plan,
    split: StageSplit | None = None,
    rank: int = 0,
    *,
    few: bool = True,
) -> list[Cut]:
    """The module lists whose blocks need not all be traced; none where that saves nothing or is not known to be exact.

    split  of a pipeline, of whose rank the stages are traced; of other stages hardly a block stays
    few    False: all blocks of this rank stay
    """
    plan = model_plan(plan)
    every = 1 if parallel.recompute.mode == "none" else parallel.recompute.every
    few = few and not (parallel.recompute.segmented or parallel.recompute.stored)  # no two blocks run alike
    runs = {run.name: run for run in alike_blocks(model, partial(_told_of, plan))} if few else {}
    places: Mapping[str, int] = {}
    if runs and _sends_buckets(mesh, parallel):
        forms = (mesh.tp, plan.tensor), (mesh.cp, plan.context), (mesh.ep, plan.experts)
        if any(ranks > 1 and part is None for ranks, part in forms):  # who has what of a block is inferred later
            runs = {}
        else:
            places = _places_in_buckets(model, mesh, parallel, plan, split, rank)
    if split is None:
        parts = {name: [range(len(list(model.get_submodule(name).children())))] for name in runs}
    else:
        others = [blocks[: 1 + (len(blocks) - 1) % every] for blocks in split.ranges]
        own = split.own(rank)
        parts = {split.plan.blocks: [b if s in own else others[s] for s, b in enumerate(split.ranges)]}
    front = int(parallel.zero == 3)
    return [_cut(name, blocks, runs.get(name), every, places, front) for name, blocks in parts.items()]


def plan_of(plan: ModelPlan, cuts: Sequence[Cut], longer: Growth | None) -> ModelPlan:
    """The plan of the model that the cuts leave: it calls blocks that it names by themselves by their new places."""
    places = {cut.name: [place for stage in cut.kept(longer) for place in stage] for cut in cuts}

    def renamed(part: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for pattern, value in part.items():
            name, index, rest = _block_of(pattern)
            if name not in places:
                found[pattern] = value
            elif index in places[name]:
                found[f"{name}.{places[name].index(index)}{rest}"] = value
        return found

    recompute = plan.recompute
    if recompute is not None and cuts:
        stages = [stage for cut in cuts for stage in cut.kept(longer)]
        recompute = tuple(item for stage in stages for item in of_blocks(recompute, range(stage[0], stage[-1] + 1)))
    return replace(plan, recompute=recompute, **{field: renamed(part) for field, part in _patterns(plan).items()})


def _patterns(plan: ModelPlan) -> dict[str, dict[str, Any]]:
    parts = {name: getattr(plan, name) for name in ("tensor", "context", "experts", "kernels", "precision")}
    return {name: dict(part) for name, part in parts.items() if part}


def _told_of(plan: ModelPlan, name: str, index: int) -> Hashable:
    """The words of a plan on a block that it names by itself."""
    return tuple(
        (part, rest, id(value))
        for part, patterns in _patterns(plan).items()
        for pattern, value in patterns.items()
        for of, place, rest in [_block_of(pattern)]
        if (of, place) == (name, index)
    )


@cache
def _block_of(pattern: str) -> tuple[str, int, str]:
    """("blocks", 3, ".mlp") of blocks.3.mlp; no list where it numbers none."""
    found = re.fullmatch(r"(.+?)\.(\d+)((?:\..+)?)", pattern)
    return (found[1], int(found[2]), found[3]) if found else ("", 0, pattern)


def _sends_buckets(mesh: MeshConfig, parallel: ParallelConfig) -> bool:
    return parallel.zero < 3 and mesh.data_ranks * mesh.cp > 1


def _places_in_buckets(
    model: nn.Module, mesh: MeshConfig, parallel: ParallelConfig, plan: ModelPlan, split: StageSplit | None, rank: int
) -> dict[str, int]:
    """Name of a parameter of this pipeline rank -> bytes before it in its message."""
    table = placement(model, plan, mesh, parallel.zero, stages=split)
    width = master_dtype(parallel.precision).itemsize
    rows = {names[0]: table[names[0]] for names in parameter_names(model)}
    trained = {name: row for name, row in rows.items() if row.trained and rank in row.owners}
    sizes = {name: width * math.prod(row.layout.largest_shape()) for name, row in trained.items()}
    places = {}
    for bucket in in_buckets(sizes, table, compressed_names(table, parallel.comm)):
        before = 0
        for name in bucket:
            places[name], before = before, before + sizes[name]
    return places


def _cut(
    name: str, stages: Sequence[range], run: AlikeBlocks | None, every: int, places: Mapping[str, int], front: int
) -> Cut:
    """stages: of each the blocks that may have to stay."""
    cut: list[tuple[Part, ...]] = []
    first = 0
    for blocks in stages:
        parts = (blocks,) if run is None else _grown(blocks, run, first, math.lcm(run.period, every), places, front)
        first += sum(part.few if isinstance(part, Growth) else len(part) for part in parts)
        cut.append(parts)
    return Cut(name, tuple(cut))


def _grown(
    blocks: range, run: AlikeBlocks, first: int, period: int, places: Mapping[str, int], front: int
) -> tuple[Part, ...]:
    """The blocks with the fewest of the run among them; all, where that saves nothing."""
    before, behind = range(blocks.start, run.start), range(run.stop, blocks.stop)
    alike = range(max(blocks.start, run.start), min(blocks.stop, run.stop))
    backwards = [_places_of(run.name, index, places) for index in reversed(alike)]
    growths = [
        Growth(run.name, alike, first + len(before), many, back, front) for many, back in _repeats(backwards, period)
    ]
    growth = min(growths, key=lambda growth: growth.few + growth.period, default=None)
    if growth is None or growth.steps < 2:
        return (blocks,)
    return before, growth, behind


def _places_of(name: str, index: int, places: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(place for parameter, place in places.items() if parameter.startswith(f"{name}.{index}."))


def _repeats(values: Sequence[Hashable], period: int) -> Iterator[tuple[int, int]]:
    """(period, how many of the values come before it begins), for each period that is a multiple of the given one."""
    for many in range(period, len(values) // 4 + 1, period):
        pairs = list(zip(values, values[many:]))
        yield many, next((index for index in range(len(pairs), 0, -1) if pairs[index - 1][0] != pairs[index - 1][1]), 0)
