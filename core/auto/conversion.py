"""Paths from one sharding spec to another: the published greedy heuristic, and the cheapest path beside it.

    python -m core.auto.conversion S01RR RS01R --mesh 2x4      # both paths, with bytes and seconds

A path is a sequence of steps, each over one axis of the mesh:

    step            from     to              sends
    all_gather      S01R  -> S0R             the axis stops to cut a dim, whose innermost it was
    all_to_all      S01R  -> S0S1            it goes to another dim, as the innermost there
    split           S0R   -> S01R, S0S1      an axis that replicated cuts a dim: every rank keeps its piece
    all_reduce      RR{0} -> RR              partial sums are added up on every rank
    reduce_scatter  RR{0} -> S0R             and every rank gets its piece of the sum
    embed           S0R, RR -> RR{0}         becomes partial: pieces with zeros around them, or zeros but on one rank

Splits and embeddings are free. Only what the target has partial is embedded: partial sums on the way, to be added up
again, cost memory.

`greedy` takes, from all steps, the one to the spec nearest to the target, until it is there (Colossal-AI's layout
conversion). The distance of two specs is that of Colossal-AI's table, 20 for a gather, 5 for a split and 6 between two
of them, in a closed form for any number of axes; partial axes are held as one more dim. The next gather, or where there
is none to make the next split, always comes nearer, so it ends.

`cheapest` is Dijkstra's algorithm over all specs, by seconds, then bytes, then steps, at the costs of
`core.auto.costs`. Messages are those of the first rank, whose pieces are the largest: shards of lengths that do not
divide travel padded, except in an all-to-all. `core.auto.exchange` executes a path and sends just these bytes.

What one all-to-all among the ranks of several axes could do in one step is no step: meshes have no group for it.
"""

import argparse
import heapq
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from core.auto.costs import Link, bytes_sent, seconds_of
from core.auto.specs import Spec, parse
from core.config import UserError, in_words, run_command

GATHER, SPLIT, BETWEEN = 20, 5, 6
"""Colossal-AI's distances: of an all-gather, of a split, and for each further step."""

Operation = Literal["all_gather", "all_to_all", "split", "all_reduce", "reduce_scatter", "embed"]
FREE = ("split", "embed")


@dataclass(frozen=True)
class Step:
    """One transform over one axis; left and entered are the dims that the axis stops to cut, and begins to."""

    operation: Operation
    axis: int
    source: Spec
    target: Spec
    left: int | None = None
    entered: int | None = None

    def full_bytes(
        self, shape: Sequence[int], itemsize: int, sizes: Sequence[int], coordinate: Sequence[int] | None = None
    ) -> int:
        """Bytes of the full tensor of the axis, as `core.auto.costs` has them; by default of the first rank.

        coordinate  of a rank; what it sends with all ranks of its line along the axis is padded to the largest of them
        """
        if self.operation in FREE:
            return 0
        smaller = self.target if self.operation == "reduce_scatter" else self.source
        if coordinate is None:
            elements = _largest_piece(smaller, tuple(shape), tuple(sizes))
        else:
            place = coordinate if self.operation == "all_to_all" else first_of_line(coordinate, self.axis)
            elements = math.prod(smaller.local_shape(shape, sizes, place))
        return elements * itemsize * (1 if self.operation == "all_reduce" else sizes[self.axis])

    def bytes_sent(
        self, shape: Sequence[int], itemsize: int, sizes: Sequence[int], coordinate: Sequence[int] | None = None
    ) -> float:
        """Bytes that a rank sends; arguments as of `full_bytes`."""
        if self.operation in FREE:
            return 0.0
        return bytes_sent(self.operation, self.full_bytes(shape, itemsize, sizes, coordinate), sizes[self.axis])


def first_of_line(coordinate: Sequence[int], axis: int) -> tuple[int, ...]:
    """The rank of the line along the axis whose piece is the largest."""
    return (*coordinate[:axis], 0, *coordinate[axis + 1 :])


@dataclass(frozen=True)
class Path:
    """Steps from one spec to another, and what each rank sends; `str` shows the specs.

    seconds, bytes_sent  of all steps, one after another
    largest_bytes        of a rank's tensor, at the most on the way
    """

    source: Spec
    steps: tuple[Step, ...] = ()
    seconds: float = 0.0
    bytes_sent: float = 0.0
    largest_bytes: int = 0

    def __str__(self) -> str:
        return " -> ".join(map(str, (self.source, *(step.target for step in self.steps))))


Cost = tuple[float, float, int]
"""Seconds, bytes and steps of a path: of two the lower is cheaper."""


@lru_cache(maxsize=4096)
def one_step(spec: Spec, num_axes: int, into: tuple[int, ...] = ()) -> tuple[Step, ...]:
    """Every step from a spec on a mesh of so many axes.

    into  axes that may become partial
    """
    steps, dims = [], range(len(spec.dims))
    for dim, axes in enumerate(spec.dims):
        if not axes:
            continue
        axis, without = axes[-1], spec.with_dim(dim, axes[:-1])
        steps.append(Step("all_gather", axis, spec, without, left=dim))
        for other in dims:
            if other != dim:
                target = without.with_dim(other, (*without.dims[other], axis))
                steps.append(Step("all_to_all", axis, spec, target, left=dim, entered=other))
        if axis in into:
            steps.append(Step("embed", axis, spec, Spec(without.dims, (*spec.partial, axis)), left=dim))
    for axis in spec.partial:
        without = Spec(spec.dims, tuple(other for other in spec.partial if other != axis))
        steps.append(Step("all_reduce", axis, spec, without))
        for dim in dims:
            target = without.with_dim(dim, (*spec.dims[dim], axis))
            steps.append(Step("reduce_scatter", axis, spec, target, entered=dim))
    for axis in range(num_axes):
        if axis not in spec.axes:
            steps += [
                Step("split", axis, spec, spec.with_dim(dim, (*spec.dims[dim], axis)), entered=dim) for dim in dims
            ]
            if axis in into:
                steps.append(Step("embed", axis, spec, Spec(spec.dims, (*spec.partial, axis))))
    return tuple(steps)


# --- greedy -----------------------------------------------------------------------------------------------------------


def distance(source: Spec, target: Spec) -> int:
    """How far two specs are apart, by the heuristic: gathers and splits that lead from one to the other, dim by dim."""
    partial = len(set(source.partial) - set(target.partial)), len(set(target.partial) - set(source.partial))
    return _apart(*partial) + sum(itertools.starmap(_dims_apart, zip(source.dims, target.dims, strict=True)))


def _dims_apart(source: tuple[int, ...], target: tuple[int, ...]) -> int:
    alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(source, target)))
    return _apart(len(source) - alike, len(target) - alike)


def _apart(gathers: int, splits: int) -> int:
    return GATHER * gathers + SPLIT * splits + BETWEEN * max(gathers + splits - 1, 0)


def greedy(
    source: Spec, target: Spec, shape: tuple[int, ...], itemsize: int, sizes: tuple[int, ...], links: tuple[Link, ...]
) -> Path:
    """The heuristic's path, with its cost: each step to the spec that is nearest to the target, the first of equals.

    shape     of the whole tensor, itemsize of its elements
    sizes     ranks on each axis of the mesh
    links     of each axis, or one for all

    Raises UserError where the tensor cannot lie so on the mesh.
    """
    links = _check(source, target, shape, sizes, links)
    steps, cost, spec = [], (0.0, 0.0), source
    while spec != target:
        step = min(one_step(spec, len(sizes), target.partial), key=lambda step: distance(step.target, target))
        assert distance(step.target, target) < distance(spec, target), (str(spec), str(target))
        seconds, sent = _price(step, shape, itemsize, sizes, links)
        steps, cost, spec = [*steps, step], (cost[0] + seconds, cost[1] + sent), step.target
    largest = max(_largest_piece(spec, shape, sizes) for spec in (source, *(step.target for step in steps)))
    return Path(source, tuple(steps), *cost, itemsize * largest)


# --- cheapest ---------------------------------------------------------------------------------------------------------


def cheapest(
    source: Spec, target: Spec, shape: tuple[int, ...], itemsize: int, sizes: tuple[int, ...], links: tuple[Link, ...]
) -> Path:
    """The path with the least seconds, then bytes, then steps; arguments and errors as of `greedy`."""
    links = _check(source, target, shape, sizes, links)
    into = tuple(axis for axis in target.partial if axis not in source.partial)
    return paths_from(source, shape, itemsize, sizes, links, into)[target]


@lru_cache(maxsize=4096)
def paths_from(
    source: Spec,
    shape: tuple[int, ...],
    itemsize: int,
    sizes: tuple[int, ...],
    links: tuple[Link, ...],
    into: tuple[int, ...] = (),
) -> dict[Spec, Path]:
    """The cheapest path to every spec, by Dijkstra's algorithm; the dict is shared, so read it only.

    links  of each axis
    into   axes that may become partial
    """
    found: dict[Spec, Path] = {}
    order = itertools.count()
    costs: dict[Spec, Cost] = {source: (0.0, 0.0, 0)}
    waiting: list[tuple[Cost, int, Spec, Step | None]] = [(costs[source], next(order), source, None)]
    while waiting:
        cost, _, spec, last = heapq.heappop(waiting)
        if spec in found:
            continue
        held = itemsize * _largest_piece(spec, shape, sizes)
        if last is None:
            found[spec] = Path(source, largest_bytes=held)
        else:
            before = found[last.source]
            found[spec] = Path(source, (*before.steps, last), *cost[:2], max(before.largest_bytes, held))
        for step in one_step(spec, len(sizes), into):
            if step.target in found:
                continue
            seconds, sent = _price(step, shape, itemsize, sizes, links)
            further = cost[0] + seconds, cost[1] + sent, cost[2] + 1
            if step.target not in costs or further < costs[step.target]:
                costs[step.target] = further
                heapq.heappush(waiting, (further, next(order), step.target, step))
    return found


def _price(
    step: Step, shape: tuple[int, ...], itemsize: int, sizes: tuple[int, ...], links: tuple[Link, ...]
) -> tuple[float, float]:
    """Seconds of a step, and bytes that the first rank sends."""
    if step.operation in FREE:
        return 0.0, 0.0
    return _priced(step.operation, step.full_bytes(shape, itemsize, sizes), sizes[step.axis], links[step.axis])


@lru_cache(maxsize=4096)
def _priced(operation: str, full_bytes: int, ranks: int, link: Link) -> tuple[float, float]:
    return seconds_of(operation, full_bytes, ranks, link), bytes_sent(operation, full_bytes, ranks)


@lru_cache(maxsize=4096)
def _largest_piece(spec: Spec, shape: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """Elements of the first rank's piece."""
    return math.prod(spec.largest_shape(shape, sizes))


def _check(
    source: Spec, target: Spec, shape: tuple[int, ...], sizes: tuple[int, ...], links: tuple[Link, ...]
) -> tuple[Link, ...]:
    """The link of each axis.  Raises UserError where the tensor cannot lie so on the mesh."""
    source.check(shape, sizes)
    target.check(shape, sizes)
    if len(links) not in (1, len(sizes)):
        raise UserError(f"{len(links)} links for a mesh of {len(sizes)} axes; give one for each, or one for all")
    return links * len(sizes) if len(links) == 1 else links


# --- command ----------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> None:
    """Print both paths between two specs, step by step."""
    parser = argparse.ArgumentParser(prog="python -m core.auto.conversion", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", help="the spec that a tensor has, such as S01RR or S(0)S(0)")
    parser.add_argument("target", help="the spec that it is to have, such as RS01R")
    parser.add_argument("--mesh", required=True, help="ranks on each axis, such as 2x4")
    parser.add_argument("--shape", help="of the whole tensor, such as 512x512x64; 1024 of each dim by default")
    parser.add_argument("--itemsize", type=int, default=2, help="bytes of an element")
    parser.add_argument(
        "--link",
        action="append",
        help="latency in seconds and bytes a second, such as 1e-5:25e9, for all axes, or once for each",
    )
    options = parser.parse_args(argv)
    sizes = _numbers("--mesh", options.mesh)
    shape = None if options.shape is None else _numbers("--shape", options.shape)
    source = parse(options.source, None if shape is None else len(shape))
    target = parse(options.target, len(source.dims))
    shape = shape or (1024,) * len(source.dims)
    if options.itemsize < 1:
        raise UserError(f"--itemsize {options.itemsize}: an element has at least 1 byte")
    links = tuple(map(_link, options.link or ["1e-5:25e9"]))
    ways = {"greedy": greedy, "cheapest": cheapest}
    paths = {name: way(source, target, shape, options.itemsize, sizes, links) for name, way in ways.items()}
    print(f"{source} to {target}: {options.itemsize} x {'x'.join(map(str, shape))} bytes on {options.mesh} ranks")
    for name, path in paths.items():
        print(f"\n{name}: {path}")
        for step in path.steps:
            sent = step.bytes_sent(shape, options.itemsize, sizes)
            print(f"  {step.operation:<14} axis {step.axis}  {in_words(sent):>10} sent  {step.target}")
        print(
            f"  each rank sends {in_words(path.bytes_sent)} in {1e3 * path.seconds:.3g} ms "
            f"and holds {in_words(path.largest_bytes)} at the most"
        )


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split("x"))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        raise UserError(f"{option} {text}: give positive whole numbers with x between them, such as 2x4")
    return numbers


def _link(text: str) -> Link:
    try:
        latency, rate = map(float, text.split(":"))
    except ValueError:
        raise UserError(f"--link {text}: give seconds and bytes a second, such as 1e-5:25e9") from None
    return Link(latency, rate)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
