"""Layouts: the boxes of all ranks tile the whole once, and are those of torch's own sharding."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from core.layout import Layout, boxes_of, full_tensor, layout_of, local, tag
from core.mesh import MeshConfig, MeshShape, build_mesh


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, dict[str, int]]:
    """Up to three cuts of a tensor of up to three dims, some of the same dim or in parts, some leaving empty shards."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    axes = draw(st.permutations(["tp", "dp_shard", "cp"]))[: draw(st.integers(0, 3))]
    sizes = {axis: draw(st.integers(1, 5)) for axis in ("tp", "dp_shard", "cp")}
    layout, mesh = Layout(shape), MeshShape(tuple(sizes), tuple(sizes.values()))
    for axis in axes:
        dim = draw(st.integers(0, len(shape) - 1))
        is_whole = dim not in [cut for _, cut in layout.cuts]
        borders = draw(st.lists(st.integers(0, shape[dim]), max_size=2)) if is_whole else []
        parts = tuple(b - a for a, b in itertools.pairwise([0, *sorted(borders), shape[dim]])) if borders else ()
        layout = layout.cut(mesh, axis, dim, parts=parts)
    return layout, {axis: sizes[axis] for axis in axes}


def test_an_even_cut_gives_some_a_row_more() -> None:
    for rows, size, expected in ((6, 4, (2, 2, 1, 1)), (5, 4, (2, 1, 1, 1)), (8, 3, (3, 3, 2)), (2, 3, (1, 1, 0))):
        layout = Layout((rows, 3)).cut(MeshShape(("ep",), (size,)), "ep", even=True)
        boxes = [layout.box({"ep": index})[0] for index in range(size)]
        assert tuple(box.stop - box.start for box in boxes) == expected
        assert [box.start for box in boxes] == [0, *(box.stop for box in boxes[:-1])]
        assert layout.largest_shape() == (expected[0], 3)


@given(layouts())
def test_boxes_tile_the_whole_exactly_once(drawn: tuple[Layout, dict[str, int]]) -> None:
    layout, sizes = drawn
    times_held = torch.zeros(layout.shape, dtype=torch.int64)
    for indices in itertools.product(*(range(s) for s in sizes.values())):
        for _, box in boxes_of(layout.stretches(dict(zip(sizes, indices)))):
            times_held[box] += 1
    assert (times_held == 1).all()


@given(units=st.integers(0, 7), unit=st.integers(1, 4), size=st.integers(1, 5))
def test_a_cut_keeps_units_together(units: int, unit: int, size: int) -> None:
    """Where DTensor would cut the units, a layout with rows for units holds what it would hold of the units."""
    mesh = MeshShape(("tp",), (size,))
    layout = Layout((units * unit, 2)).cut(mesh, "tp", 0, unit)
    whole_units = Layout((units,)).cut(mesh, "tp")
    for index in range(size):
        rows, of_units = layout.box({"tp": index})[0], whole_units.box({"tp": index})[0]
        assert (rows.start, rows.stop) == (unit * of_units.start, unit * of_units.stop)
    assert layout.collapsed((1,)).box({"tp": 0})[0] == layout.box({"tp": 0})[0]


def test_of_each_part_a_rank_has_its_share_and_data_parallelism_cuts_what_lies_there() -> None:
    """Four queries, two keys and two values of a matrix, each two rows, and a bias to them."""
    mesh = MeshShape(("tp", "dp"), (2, 3))
    layout = Layout((16, 3)).cut(mesh, "tp", parts=(8, 4, 4))
    rows = [[*range(4), 8, 9, 12, 13], [*range(4, 8), 10, 11, 14, 15]]
    for tp, own in enumerate(rows):
        assert [row for stretch in layout.stretches({"tp": tp})[0] for row in stretch] == own
        for dp in range(3):
            cut = layout.cut(mesh, "dp").stretches({"tp": tp, "dp": dp})
            assert [row for stretch in cut[0] for row in stretch] == own[3 * dp : 3 * dp + 3]
            assert cut[1] == (range(3),)
    assert layout.largest_shape() == (8, 3)
    assert layout.collapsed((1,)).stretches({"tp": 1})[0] == layout.stretches({"tp": 1})[0]
    here = replace(layout, mesh=MeshShape(("tp", "dp"), (2, 3), 3))
    whole = torch.arange(48).view(16, 3)
    assert torch.equal(here.local(whole), whole[rows[1]])
    assert list(here.boxes())[1] == ((slice(4, 6), slice(0, 3)), (slice(10, 12), slice(0, 3)))


@given(rows=st.integers(0, 11), size=st.integers(1, 5))
def test_one_cut_is_that_of_torch_chunk(rows: int, size: int) -> None:
    layout = Layout((rows, 2)).cut(MeshShape(("tp",), (size,)), "tp")
    whole = torch.arange(rows * 2).view(rows, 2)
    chunks = list(whole.chunk(size)) if rows else []
    for index in range(size):
        expected = chunks[index] if index < len(chunks) else whole[:0]
        assert torch.equal(whole[layout.box({"tp": index})], expected)


def sharded_by_torch() -> list[str]:
    """Parameters that tensor parallelism, FSDP2 and both cut: is what lies here what the layout says?"""
    mesh = build_mesh(MeshConfig(tp=2).resolve(4, 3), "cpu")
    wrong = []
    for rows, columns, placement in itertools.product((1, 3, 8), (2, 5), (None, Replicate(), Shard(0), Shard(1))):
        if placement == Shard(1) and columns % 2:
            continue  # FSDP2 takes no uneven shard off dim 0
        module = nn.Linear(columns, rows, bias=False, dtype=torch.float64)
        whole = torch.arange(rows * columns, dtype=torch.float64).view(rows, columns)
        weight = whole.clone()
        if placement is not None:
            weight = distribute_tensor(weight, mesh["tp"], [placement], src_data_rank=None)
        module.weight = nn.Parameter(weight)
        fully_shard(module, mesh=mesh["dp_shard"])
        layout, here = layout_of(module.weight), local(module.weight.detach())
        if not torch.equal(here, layout.local(whole)) or layout.local_shape() != tuple(here.shape):
            wrong.append(f"box of {rows} x {columns}, {placement}: {layout.box()}")
        if not torch.equal(full_tensor(here), whole) or layout_of(here) != layout:
            wrong.append(f"whole of {rows} x {columns}, {placement}")
    return wrong


def test_layouts_are_where_torch_puts_its_shards(ranks) -> None:
    assert ranks(4).run(sharded_by_torch) == [[]] * 4


def test_plain_tensors_are_whole_and_tags_are_read_back() -> None:
    plain = torch.zeros(3, 2)
    assert layout_of(plain) == Layout((3, 2))
    assert local(plain) is plain
    assert torch.equal(full_tensor(plain), plain)
    scalar = torch.tensor(2.0)
    assert Layout(()).local(scalar) is scalar
    noted = Layout((3, 2))
    assert layout_of(tag(plain, noted)) is noted
    with pytest.raises(AssertionError):
        tag(torch.zeros(2, 2), noted)
