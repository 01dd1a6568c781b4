"""The axes that are cut together: those that come in and go out with parameters, and vocabularies."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from core.config import UserError
from core.parallel.infer.axes import Axis, Dims, flat, leaves_of, size_of
from core.parallel.infer.flow import Trace, Value

SMALL_TABLE = 64
"""A table of rows that are only looked up is cut where it is more than this part of the parameters."""


class Unsure(Exception):
    """An axis cannot be cut: which, and why."""

    def __init__(self, axes: Iterable[Axis], why: str):
        super().__init__(why)
        self.axes = set(axes)


@dataclass
class Chosen:
    """Axes that are cut together; those of vocabularies, whose results leave the model, among them."""

    axes: set[Axis] = field(default_factory=set)
    vocabularies: set[Axis] = field(default_factory=set)


def choose(found: Trace, ranks: int, refused: Mapping[Axis, str]) -> Chosen:
    """Those that come in and go out with parameters, and vocabularies of large tables; the heaviest first."""
    parameters = dict.fromkeys(found.parameters.values())
    weights: Counter[Axis] = Counter()
    for value in parameters:
        for dim in value.dims:
            for leaf in axes_of((dim,)):
                weights[leaf] += prod(value.shape) * _indices_with(dim, leaf) // size_of(dim)
    sources, sinks, tables = set[Axis](), set[Axis](), set[Axis]()
    for op in found.operations:
        if op.rows and op.given[0].parameter is not None:
            tables |= op.rows
        if op.summed and any(value.parameter for value in op.given[-2:]):
            sinks |= op.summed
            sources |= {leaf for v in op.given[-2:] if v.parameter for leaf in axes_of(v.dims)} - op.summed
    leaving = {leaf for value in found.outputs for leaf in axes_of(value.dims)}
    total = sum(prod(value.shape) for value in parameters)
    chosen, taken = Chosen(), set[Value]()
    for axis, weight in weights.most_common():
        owners = {value for value in parameters if axis in axes_of(value.dims)}
        if axis.frozen or axis.size == 1 or axis in refused or owners & taken:
            continue
        is_vocabulary = axis in leaving or axis in tables
        if is_vocabulary:
            if axis in sinks or weight * SMALL_TABLE <= total or axis.size < ranks * ranks:
                continue
            chosen.vocabularies.add(axis)
        elif axis not in sources or axis not in sinks:
            continue
        elif axis.size % ranks:
            owner = next(name for name, value in found.parameters.items() if value in owners)
            raise UserError(
                f"{owner.rpartition('.')[0]}: its {axis.size} parts (heads, groups of them, or features) do not divide "
                f"over tp={ranks}; use a tp that divides {axis.size}"
            )
        taken |= owners
        chosen.axes.add(axis)
    if not chosen.axes:
        why = [f"{name} looks at values" for name in found.opaque]
        for reasons in (refused.values(), (axis.frozen for axis in weights if axis.frozen)):
            why += [reason for reason, _ in Counter(reasons).most_common(3)]
        said = "; ".join(dict.fromkeys(why))
        raise UserError(
            f"no axis of this model can be cut over tp={ranks} for sure ({said}); use tp=1, or say how modules are cut"
        )
    return chosen


def _indices_with(dim: Sequence[Axis], leaf: Axis) -> int:
    """How many indices of a dim lie in stretches that have the axis: of three projections in one, two or all three."""
    count, has = 1, False
    for axis in flat(dim):
        inside = sum(_indices_with((part,), leaf) for part in axis.parts)
        count *= inside or axis.size
        has = has or axis is leaf or bool(inside)
    return count if has else 0


def axes_of(dims: Dims) -> set[Axis]:
    return set(leaves_of(dims))


def left_whole(found: Trace, chosen: Chosen, refused: Mapping[Axis, str]) -> dict[str, str]:
    """Matrices of which nothing is cut -> why."""
    left = {}
    for name, value in found.parameters.items():
        leaves = axes_of(value.dims)
        if len(value.shape) > 1 and not leaves & chosen.axes:
            why = [refused.get(leaf, leaf.frozen) for leaf in leaves if leaf in refused or leaf.frozen]
            left[name] = found.opaque.get(name.rpartition(".")[0], next(iter(why), "nothing sums over its axes"))
    return left
