"""Which blocks of a chain keep what their backward needs, as data: segments.

    n           the next n blocks keep everything
    Lean(n, x)  the next n blocks keep their input and the results of some operators, and each computes the rest again
    Away(n, x)  the next n blocks keep everything in another place or form, and compute nothing again
    (…)         the next blocks are a segment: of them only the input of the first is kept, and when their backward
                comes they run again from it, by the segments that stand inside

So (4,) keeps all of four blocks, ((1,), (1,), (1,), (1,)) each block's input, and ((2,), 2) computes the first two
again. A segment inside a segment is one of the run that comes later: ((((1,), 1), 2) …) runs its first block up to
three times. What is kept is kept until its own backward (memory persistent schedules). In a run that comes later
nothing waits elsewhere: its backward follows at once.

Two named ones, of l equal blocks:

    sqrt        Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4: segments of about sqrt(l)
                blocks. Inputs of sqrt(l) segments and all of sqrt(l) blocks are alive at once, and every block but
                those of the last segment runs twice.
    recursive   the same, section 4.3: halves, and halves of these. Inputs of log2(l) segments and all of one block are
                alive at once, and l log2(l) / 2 blocks run again.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

Results = Literal["attention", "linear", "products"]
"""Of which operators: fused attention; products with weights and convolutions; these, attention and all products."""


@dataclass(frozen=True)
class Lean:
    """So many blocks that keep the results of these operators."""

    blocks: int
    keeps: Results


Form = Literal["host", "disk", "compressed"]
"""Where or how what a block saves waits: `core.parallel.offload`, on a drive below it, `core.parallel.encoded`."""

FORMS: tuple[Form, ...] = get_args(Form)


@dataclass(frozen=True)
class Away:
    """So many blocks whose activations wait in this place or form."""

    blocks: int
    form: Form


Segments = tuple["int | Lean | Away | Segments", ...]
NamedSegments = Literal["sqrt", "recursive"]


def sqrt_segments(num_blocks: int) -> Segments:
    """As many segments as each has blocks, or nearly; the last keeps everything, for its backward comes first."""
    many = max(1, math.isqrt(num_blocks - 1) + 1) if num_blocks else 0
    sizes = [num_blocks // many + (index < num_blocks % many) for index in range(many)]
    return (*((size,) for size in sizes[:-1]), *sizes[-1:])


def recursive_segments(num_blocks: int) -> Segments:
    """The first half is a segment, of halves itself, while the second goes on like this to the last block."""
    if num_blocks < 2:
        return (num_blocks,) * num_blocks
    half = num_blocks // 2
    return (recursive_segments(half), *recursive_segments(num_blocks - half))


NAMED: dict[str, Callable[[int], Segments]] = {"sqrt": sqrt_segments, "recursive": recursive_segments}


def num_blocks_of(segments: Segments) -> int:
    return sum(size_of(item) for item in segments)


def size_of(item: "int | Lean | Away | Segments") -> int:
    if isinstance(item, Lean | Away):
        return item.blocks
    return item if isinstance(item, int) else num_blocks_of(item)


def is_kept(segments: Segments) -> list[bool]:
    """Of each block, whether its first run keeps everything."""
    return [isinstance(item, int) for item in segments for _ in range(size_of(item))]


@dataclass(frozen=True)
class Again:
    """How often a block runs again in the backward.

    whole  to its end, since the blocks behind it run again, too
    cut    for its own backward alone, as far as that asks for: its end may be left out
    """

    whole: int = 0
    cut: int = 0

    @property
    def runs(self) -> int:
        return self.whole + self.cut


def runs_of(segments: Segments) -> list[int]:
    """How often each block runs: in the forward, and again in the backward."""
    return [1 + again.runs for again in runs_again(segments)]


def runs_again(segments: Segments) -> list[Again]:
    """How often each block runs again in the backward."""
    found: list[Again] = []
    for item in segments:
        if isinstance(item, tuple):
            found += _in_segment(item)
        else:
            found += [Again(cut=int(isinstance(item, Lean)))] * size_of(item)
    return found


def _in_segment(segments: Segments) -> list[Again]:
    """The same of a segment when its backward has come: what stands last in it is gone into at once."""
    found: list[Again] = []
    for index, item in enumerate(segments):
        last = index == len(segments) - 1
        if isinstance(item, tuple):
            found += [replace(again, whole=again.whole + (not last)) for again in _in_segment(item)]
        else:
            found += [Again(1, int(isinstance(item, Lean)))] * size_of(item)
            found[-1] = Again(cut=1) if last else found[-1]
    return found


def check_segments(segments: Any, num_blocks: int) -> Segments:
    """The segments, of so many blocks.  Raises ValueError for what are none."""

    def check(part: Any, inside: bool = False) -> Segments:
        if not isinstance(part, tuple | list) or not part:
            raise ValueError(f"segments are numbers of blocks and segments, and not {part!r}")
        for item in part:
            blocks = item.blocks if isinstance(item, Lean | Away) else item
            if isinstance(blocks, bool) or (isinstance(blocks, int) and blocks < 1):
                raise ValueError(f"{item} in segments {part}; give numbers of blocks of at least 1")
            if isinstance(item, Lean) and item.keeps not in get_args(Results):
                raise ValueError(f"{item} in segments {part}; blocks keep {' or '.join(get_args(Results))}")
            if isinstance(item, Away) and (inside or item.form not in FORMS):
                what = "inside of another" if inside else f"; what is saved waits in {' or '.join(get_args(Form))}"
                raise ValueError(f"{item} in segments {part} {what}")
        return tuple(item if isinstance(item, int | Lean | Away) else check(item, True) for item in part)

    found = check(segments) if num_blocks or segments else ()
    if num_blocks_of(found) != num_blocks:
        raise ValueError(f"segments of {num_blocks_of(found)} blocks, and the model has {num_blocks}")
    return found


def of_blocks(segments: Segments, blocks: range) -> Segments:
    """The segments of some of the blocks."""
    found: list[int | Lean | Away | Segments] = []
    index = 0
    for item in segments:
        size = size_of(item)
        own = range(max(0, blocks.start - index), min(size, blocks.stop - index))
        if own:
            found.append(_part(item, own))
        index += size
    return tuple(found)


def _part(item: int | Lean | Away | Segments, blocks: range) -> int | Lean | Away | Segments:
    if isinstance(item, Lean | Away):
        return replace(item, blocks=len(blocks))
    return len(blocks) if isinstance(item, int) else of_blocks(item, blocks)


def first_blocks(segments: Segments, num_blocks: int) -> Segments:
    """The segments of the first blocks alone; what they do not reach keeps everything."""
    found = of_blocks(segments, range(num_blocks))
    left = num_blocks - num_blocks_of(found)
    return (*found, left) if left else found
