"""Sharding specs: what is read and printed, which pieces ranks hold, and the same as layouts and as DTensor says it."""

import itertools
import math

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from core.auto.specs import all_specs, from_layout, from_placements, mesh_of, parse
from core.config import UserError
from core.layout import Layout

SHAPE = (7, 3, 2)
"""Of 2 x 3 ranks some get fewer rows of dim 0, some no row of dim 1 or 2."""
MESHES = ((2, 2), (2, 3), (2, 2, 2), (3, 1, 2))


def test_every_spec_is_printed_and_read() -> None:
    for num_dims in range(4):
        for spec in all_specs(num_dims, 3, partial=True):
            assert parse(str(spec)) == parse(str(spec), num_dims) == spec
            told = spec.by_axis(3)
            if "S(" in told or "P" in told:
                assert parse(told, num_dims) == spec


@pytest.mark.parametrize(
    ("text", "num_dims", "printed", "by_axis"),
    [
        ("S01,R,S2", None, "S01RS2", "S(0)S(0)S(2)"),
        (" [S0, R] {1, 2}", None, "S0R{12}", "S(0)PP"),
        ("S10 R", 2, "S10R", "S(0)[1]S(0)[0]R"),
        ("S(0)R", 2, "S0R", "S(0)RR"),
        ("S(0)S(0)", 1, "S01", "S(0)S(0)R"),
        ("S(0)[1]S(0)[0]", 1, "S10", "S(0)[1]S(0)[0]R"),
        ("S(1)[2]S(1)[0]S(1)[1]", 2, "RS120", "S(1)[2]S(1)[0]S(1)[1]"),
        ("[P(sum), S(-1)]", 3, "RRS1{0}", "PS(2)R"),
        ("(){0}", 0, "(){0}", "PRR"),
    ],
)
def test_both_forms(text: str, num_dims: int | None, printed: str, by_axis: str) -> None:
    spec = parse(text, num_dims)
    assert (str(spec), spec.by_axis(3)) == (printed, by_axis)


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (lambda: parse("S0,1"), "'S0,1' is no sharding spec; write R or S with axes for each dim, as in S01,R,S2"),
        (lambda: parse("SR"), "is no sharding spec"),
        (lambda: parse(""), "is no sharding spec"),
        (lambda: parse("S0R", 3), "'S0R' is of 2 dims, and the tensor has 3; give R or S for each dim"),
        (lambda: parse("S0S0"), "S0S0: axis 0 stands twice; an axis cuts one dim once, or is partial"),
        (lambda: parse("S00R"), "S00R: axis 0 stands twice"),
        (lambda: parse("S0R{0}"), "S0R{0}: axis 0 stands twice"),
        (lambda: parse("S3R"), "S3R: there is no axis 3; a spec has axes 0 to 2"),
        (lambda: parse("S(0)R"), "say also how many dims the tensor has"),
        (lambda: parse("S(2)R", 2), "'S(2)R' cuts dim 2 of a tensor whose dims are 0 to 1"),
        (lambda: parse("P(max)R", 2), "'P(max)R' is no list of placements"),
        (lambda: parse("S0R").check((4, 4, 4), (2, 2)), "S0R is of 2 dims and the tensor 4x4x4 has 3"),
        (lambda: parse("RS2").check((4, 4), (2, 2)), "RS2 names axis 2 of the mesh 2x2, whose axes are 0 to 1"),
        (lambda: parse("RR").check((4, 4), (2, 2, 2, 2)), "a mesh of 2x2x2x2 ranks; a spec takes 1 to 3 axes"),
        (lambda: parse("RR").check((4, 4), (2, 0)), "a mesh of 2x0 ranks"),
        (lambda: parse("S10R").placements(2), "axis 1 cuts dim 0 before axis 0; use S01R"),
        (lambda: from_placements([Partial("max")], 1, (2,)), "a spec's partial axes are sums; use Partial()"),
        (lambda: from_placements([Shard(2)], 2, (2,)), "cuts dim 2 of a tensor whose dims are 0 to 1"),
        (lambda: from_layout(Layout((4,))), "a layout without a mesh"),
        (lambda: from_layout(Layout((4,)).cut(mesh_of((2,)), "0", unit=2)), "the cuts over 0 keep units together"),
        (lambda: from_layout(Layout((4,)).cut(mesh_of((2,)), "0", even=True)), "the cuts over 0 keep units together"),
        (lambda: from_layout(Layout((4,)).cut(mesh_of((2, 2)), "0+1")), "axis 0+1 is none of the mesh's 0, 1"),
    ],
)
def test_what_is_no_spec_is_refused(refused, says: str) -> None:
    with pytest.raises(UserError) as refusal:
        refused()
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_number_of_specs() -> None:
    """Of the axes j are dealt out in order to the dims, the others replicate or are partial."""
    for num_dims, num_axes in itertools.product((1, 2, 3), (1, 2, 3)):
        ways = [math.perm(num_axes, j) * math.comb(j + num_dims - 1, j) for j in range(num_axes + 1)]
        assert len(all_specs(num_dims, num_axes)) == sum(ways)
        with_partial = sum(n * 2 ** (num_axes - j) for j, n in enumerate(ways))
        assert len(all_specs(num_dims, num_axes, partial=True)) == with_partial
    assert {str(spec) for spec in all_specs(1, 2)} == {"R", "S0", "S1", "S01", "S10"}


def test_the_order_of_axes_is_that_of_the_pieces() -> None:
    rows = {
        text: [parse(text).box((5,), (2, 2), place)[0] for place in itertools.product(range(2), repeat=2)]
        for text in ("S01", "S10")
    }
    assert rows["S01"] == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]
    assert rows["S10"] == [slice(0, 2), slice(3, 4), slice(2, 3), slice(4, 5)]


@pytest.mark.parametrize("sizes", MESHES)
def test_pieces_tile_the_whole(sizes: tuple[int, ...]) -> None:
    for spec in all_specs(3, len(sizes)):
        held = torch.zeros(SHAPE, dtype=torch.int64)
        for place in itertools.product(*map(range, sizes)):
            held[spec.box(SHAPE, sizes, place)] += 1
        assert (held == math.prod(sizes) // math.prod(sizes[axis] for axis in spec.axes)).all(), str(spec)
        first = spec.local_shape(SHAPE, sizes, (0,) * len(sizes))
        assert spec.largest_shape(SHAPE, sizes) == first
        assert spec.whole_shape(first, sizes) == tuple(
            rows * math.prod(sizes[axis] for axis in axes) for rows, axes in zip(first, spec.dims)
        )


@pytest.mark.parametrize("sizes", MESHES)
def test_layouts_and_placements_say_the_same(sizes: tuple[int, ...]) -> None:
    """A layout says nothing of partial sums; of several axes in another order than the mesh's strided shards tell."""
    for spec in all_specs(2, len(sizes), partial=True):
        assert from_layout(spec.layout((5, 3), mesh_of(sizes))) == spec.summed()
        assert spec.summed().axes == tuple(itertools.chain(*spec.dims))
        told = [Partial() if axis in spec.partial else Replicate() for axis in range(len(sizes))]
        for dim, axes in enumerate(spec.dims):
            for turn, axis in enumerate(axes):
                factor = math.prod(sizes[other] for other in axes[:turn] if other > axis)
                told[axis] = Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
        if 1 not in sizes:  # an axis of one rank leaves no trace of its place
            assert from_placements(told, 2, sizes) == spec
        if all(list(axes) == sorted(axes) for axes in spec.dims):
            assert spec.placements(len(sizes)) == tuple(told)
