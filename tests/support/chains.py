"""Chains of blocks and segments, drawn at random; and the best schedules of small chains, found by trying all."""

import heapq
import random
from collections.abc import Iterator
from itertools import count
from typing import get_args

from core.trace.chain import Chain, ChainBlock, Kept
from core.trace.segments import Lean, Results, Segments

NOTHING, INPUT, WHOLE, REFILLED = range(4)
RESULTS: tuple[Results, ...] = get_args(Results)


def random_segments(draw: random.Random, num_blocks: int) -> Segments:
    """Any, nested as deep as they come."""
    found: list[int | Lean | Segments] = []
    left = num_blocks
    while left:
        size = draw.randint(1, left)
        if draw.random() < 0.4:
            found.append(size if draw.random() < 0.5 else Lean(size, draw.choice(RESULTS)))
        elif size == num_blocks and draw.random() < 0.5:
            continue
        else:
            found.append(random_segments(draw, size))
        left -= size
    return tuple(found)


def random_chain(draw: random.Random, num_blocks: int, most: int = 6) -> Chain:
    """Sizes of a few bytes each, times of a few seconds, levels that rise with the gradients."""

    def some(least: int = 0) -> int:
        return draw.randint(least, most)

    blocks: list[ChainBlock] = []
    gradients = sorted((some() for _ in range(num_blocks)), reverse=True)
    outputs = [some(1) for _ in range(num_blocks)]
    for k in range(num_blocks):
        begins = k > 0 and draw.random() < 0.15
        lean: dict[Results, Kept] = {}
        for results in draw.sample(RESULTS, draw.randint(0, 2)):
            less = outputs[k] + draw.randint(0, 2)
            lean[results] = Kept(less + some(), less, some() + gradients[k], some(2), again_s=draw.choice((0.5, 1.0)))
        keeps, forward_s = outputs[k] + some(), float(some(1))
        blocks.append(
            ChainBlock(
                input=0 if begins or k == 0 else outputs[k - 1],
                first=some(),
                again=some() + gradients[k],
                dropping_peak=outputs[k] + some(),
                whole=Kept(keeps + some(), keeps, some() + gradients[k], some()),
                refill_peak=keeps + some(),
                refilled=keeps - draw.randint(0, outputs[k]),
                refilled_peak=some(),
                forward_s=forward_s,
                refill_s=forward_s - draw.choice((0.0, 0.5)),
                backward_s=float(some(1)),
                begins=begins,
                lean=lean,
            )
        )
    alone = draw.random() < 0.2
    return Chain(tuple(blocks), output=outputs[-1], head=some() + outputs[-1], least=some(), single=alone)


def best_seconds(chain: Chain, budget: int) -> float:
    """The least time of a step in so many bytes; infinity where there is none.

    Tries all memory persistent schedules: whenever a block runs it may keep nothing, its input, results of operators,
    or everything, and that stays until its backward; a run again begins with the nearest block whose input is there.
    """
    last = len(chain.blocks) - 1
    if chain.least > budget:
        return float("inf")
    number = count()
    start = ("run", 0, -1, (INPUT, *(NOTHING,) * last))  # what is done, block, block that is asked (-1: none), kept
    queue = [(0.0, next(number), start)]
    known: set[object] = set()
    while queue:
        seconds, _, state = heapq.heappop(queue)
        if state in known:
            continue
        known.add(state)
        if state[0] == "back" and state[1] < 0:
            return seconds
        for taken, following in _moves(chain, budget, *state):
            if following not in known:
                heapq.heappush(queue, (seconds + taken, next(number), following))
    return float("inf")


What = int | Results
"""What is kept of a block: one of the four above, or results."""
State = tuple[str, int, int, tuple[What, ...]]


def _moves(
    chain: Chain, budget: int, what: str, index: int, asked: int, kept: tuple[What, ...]
) -> Iterator[tuple[float, State]]:
    blocks, last = chain.blocks, len(chain.blocks) - 1
    alive = sum(_bytes(chain, kept, k) for k in range(last + 1))

    def fits(beside: int, more: int) -> bool:
        return beside + alive + more <= budget

    if what == "back":
        of = blocks[index]
        if kept[index] not in (NOTHING, INPUT):
            how = _how(of, kept[index])
            if fits(of.again, of.refilled_peak) if how is None else fits(how.back, how.backward_peak):
                again_s = 0.0 if how is None else how.again_s
                yield again_s + of.backward_s, ("back", index - 1, -1, _with(kept, index, NOTHING))
            return
        for begin in range(index, -1, -1):
            if _is_kept(kept, begin):
                return
            if kept[begin] == INPUT or _is_kept(kept, begin - 1):
                yield 0.0, ("run", begin, index, _with(kept, begin, INPUT))
                return
        return
    if index > last:
        if fits(chain.head, 0 if _is_kept(kept, last) else chain.output):
            yield 0.0, ("back", last, -1, kept)
        return
    of = blocks[index]
    has_input = kept[index] == INPUT or _is_kept(kept, index - 1)
    if not has_input:
        if of.begins or kept[index] == NOTHING:
            yield 0.0, ("run", index, asked, _with(kept, index, INPUT))
        if of.begins:
            return
    running = 0 if has_input else of.input
    beside = of.first if asked < 0 else blocks[asked].again
    if index == asked:
        if fits(of.again, running + of.refill_peak):
            yield of.refill_s, ("back", index, -1, _with(kept, index, REFILLED))
        return
    if (has_input or not chain.single) and fits(beside, running + of.dropping_peak):
        yield of.forward_s, ("run", index + 1, asked, kept)
    if fits(beside, running + of.whole.peak):
        yield of.forward_s, ("run", index + 1, asked, _with(kept, index, WHOLE))
    for results, how in of.lean.items():
        if fits(beside, running + how.peak):
            yield of.forward_s, ("run", index + 1, asked, _with(kept, index, results))


def _how(of: ChainBlock, what: What) -> Kept | None:
    return None if what in (NOTHING, INPUT, REFILLED) else of.ways[None if isinstance(what, int) else what]


def _is_kept(kept: tuple[What, ...], index: int) -> bool:
    """Whether a block has kept more than its input, and so what it hands on."""
    return index >= 0 and kept[index] not in (NOTHING, INPUT, REFILLED)


def _bytes(chain: Chain, kept: tuple[What, ...], index: int) -> int:
    """What one block holds: its input is part of what the block before keeps, if that keeps more than its input."""
    of = chain.blocks[index]
    if kept[index] == NOTHING:
        return 0
    how = _how(of, kept[index])
    own_input = 0 if _is_kept(kept, index - 1) else of.input
    return own_input + (how.num_bytes if how is not None else of.refilled if kept[index] == REFILLED else 0)


def _with(kept: tuple[What, ...], index: int, what: What) -> tuple[What, ...]:
    return (*kept[:index], what, *kept[index + 1 :])
