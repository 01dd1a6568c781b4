"""The blocks of each pipeline stage, runs of them, and the ranks of the pp axis that hold a parameter."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate


@dataclass(frozen=True)
class Costs:
    """Costs of forward and backward of a microbatch, in any unit.

    blocks  of each block; empty: all alike
    before  of what comes before the blocks (embedding), which is on the first stage
    behind  of what comes behind them (norm, head, loss), on the last
    """

    blocks: tuple[float, ...] = ()
    before: float = 0.0
    behind: float = 0.0


ALIKE = Costs()


@dataclass(frozen=True)
class PipelinePlan:
    """A pipeline's view of a model whose blocks hand on one tensor.

    blocks      name of the module list
    before      names of the modules that come before it; they belong to the first stage. All that is neither belongs to
                the last, but for parameters that modules share: every stage that has one of those modules has the
                parameter
    costs       what stages are balanced by
    tuple_size  of the tuple that blocks return, whose first tensor alone is handed on; 0: they return the tensor
    """

    blocks: str = "blocks"
    before: tuple[str, ...] = ()
    costs: Costs = ALIKE
    tuple_size: int = 0


@lru_cache(512)
def split_by_cost(
    num_blocks: int, num_stages: int, costs: Costs = ALIKE, replicas: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Number of blocks of each stage, at least one: the largest cost of a stage is the least possible.

    Among equals it prefers even stages, by the sum of squared costs.

    replicas  ranks that take the microbatches of each stage in turn: a stage costs each its share; empty: one each
    """
    assert 1 <= num_stages <= num_blocks, (num_stages, num_blocks)
    each = costs.blocks or (1.0,) * num_blocks
    assert len(each) == num_blocks, (len(each), num_blocks)
    upto = [0.0, *accumulate(each)]

    def cost(stage: int, start: int, stop: int) -> float:
        ends = costs.before * (stage == 0) + costs.behind * (stage == num_stages - 1)
        return (upto[stop] - upto[start] + ends) / (replicas[stage] if replicas else 1)

    small, more = divmod(num_blocks, num_stages)
    even = stage_ranges([small + (stage < more) for stage in range(num_stages)])
    enough = max(cost(stage, blocks.start, blocks.stop) for stage, blocks in enumerate(even))
    # best[stop]: (largest cost, sum of squares, blocks of each stage) of the first stages over blocks[:stop].
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (largest, squares, sizes) in best.items():
            for stop in range(start + 1, num_blocks - (num_stages - 1 - stage) + 1):
                one = cost(stage, start, stop)
                if one > enough:  # more than even stages cost
                    break
                candidate = max(largest, one), squares + one**2, (*sizes, stop - start)
                if stop not in following or candidate < following[stop]:
                    following[stop] = candidate
        best = following
    return best[num_blocks][2]


def stage_ranges(split: Sequence[int]) -> list[range]:
    """The blocks of each stage."""
    stops = list(accumulate(split))
    return [range(stop - size, stop) for size, stop in zip(split, stops, strict=True)]


@dataclass(frozen=True)
class StageSplit:
    """Blocks and rank (on the pp axis) of each stage.

    replicas  ranks of each stage, of which `owners` has the first and the others follow; empty: one each
    """

    ranges: tuple[range, ...]
    owners: tuple[int, ...]
    plan: PipelinePlan = PipelinePlan()
    replicas: tuple[int, ...] = ()

    def ranks_of(self, stage: int) -> range:
        """The ranks of a stage."""
        first = self.owners[stage]
        return range(first, first + (self.replicas[stage] if self.replicas else 1))

    @property
    def last_ranks(self) -> range:
        """Those of the last stage."""
        return self.ranks_of(len(self.owners) - 1)

    def own(self, rank: int) -> list[int]:
        """The stages of a rank."""
        return [stage for stage in range(len(self.owners)) if rank in self.ranks_of(stage)]

    def stage_of_block(self, block: int) -> int:
        """The stage of a block; modules before the blocks (-1) are on the first, modules behind them on the last."""
        return next((s for s, blocks in enumerate(self.ranges) if block < blocks.stop), len(self.ranges) - 1)

    def ranks_with(self, block: int) -> range:
        """The ranks of a block, or of what is before or behind them."""
        return self.ranks_of(self._stages[min(max(block, 0), len(self._stages) - 1)])

    @cached_property
    def _stages(self) -> list[int]:
        """The stage of each block."""
        return [stage for stage, blocks in enumerate(self.ranges) for _ in blocks]

    def stage_of(self, name: str) -> int:
        """The stage of a parameter, by its name."""
        if any(name.startswith(f"{before}.") for before in self.plan.before):
            return 0
        if not name.startswith(f"{self.plan.blocks}."):
            return len(self.owners) - 1
        return self.stage_of_block(int(name.removeprefix(f"{self.plan.blocks}.").split(".")[0]))

    def holders(self, names: Sequence[str]) -> tuple[int, ...]:
        """Ranks that hold a parameter of these names, the owner first."""
        return tuple(dict.fromkeys(rank for stage in self.stages_with(names) for rank in self.ranks_of(stage)))

    def stages_with(self, names: Sequence[str]) -> list[int]:
        """Stages that have a parameter of these names, the one that updates it first."""
        return list(dict.fromkeys(self.stage_of(name) for name in names))
