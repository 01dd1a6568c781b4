"""Which blocks make which stage: runs of blocks, the costliest stage as cheap as can be."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Costs:
    """What forward and backward of a microbatch cost, in any unit.

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
    """What a pipeline must know of a model whose blocks hand on one tensor.

    blocks  name of the module list
    before  names of the modules that come before it; they belong to the first stage. All that is neither belongs to the
            last, but for parameters that modules share: every stage that has one of those modules has the parameter
    costs   what stages are balanced by
    """

    blocks: str = "blocks"
    before: tuple[str, ...] = ()
    costs: Costs = ALIKE


def split_by_cost(num_blocks: int, num_stages: int, costs: Costs = ALIKE) -> tuple[int, ...]:
    """Number of blocks of each stage, at least one: the largest cost of a stage is the least possible.

    Among equals it prefers even stages, by the sum of squared costs.
    """
    assert 1 <= num_stages <= num_blocks, (num_stages, num_blocks)
    each = costs.blocks or (1.0,) * num_blocks
    assert len(each) == num_blocks, (len(each), num_blocks)
    upto = [0.0, *accumulate(each)]

    def cost(stage: int, start: int, stop: int) -> float:
        ends = costs.before * (stage == 0) + costs.behind * (stage == num_stages - 1)
        return upto[stop] - upto[start] + ends

    # best[stop]: (largest cost, sum of squares, blocks of each stage) of the first stages over blocks[:stop].
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (largest, squares, sizes) in best.items():
            for stop in range(start + 1, num_blocks - (num_stages - 1 - stage) + 1):
                one = cost(stage, start, stop)
                candidate = max(largest, one), squares + one**2, (*sizes, stop - start)
                if stop not in following or candidate < following[stop]:
                    following[stop] = candidate
        best = following
    return best[num_blocks][2]


def stage_ranges(split: Sequence[int]) -> list[range]:
    """The blocks of each stage."""
    stops = list(accumulate(split))
    return [range(stop - size, stop) for size, stop in zip(split, stops, strict=True)]
