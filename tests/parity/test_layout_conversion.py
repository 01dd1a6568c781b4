"""Conversions between sharding specs on ranks: every rank gets its slice of the whole, for the bytes that paths name.

On 2 x 2, 2 x 3 and 2 x 2 x 2 ranks, of tensors whose lengths divide and of others: by default every spec is once a
source and once a target, `make soak` takes all pairs. Partial sums are terms of both signs, none like another.
"""

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from core.auto import exchange
from core.auto.conversion import Path, cheapest, greedy
from core.auto.costs import Link
from core.auto.exchange import ALIKE, convert, follow
from core.auto.specs import Spec, all_specs, parse
from core.comm import collectives
from core.comm.volume import count_volume
from core.config import UserError

Sizes = tuple[int, ...]
EVEN = {1: (12,), 2: (12, 12), 3: (12, 12, 12)}
UNEVEN = {1: (7,), 2: (7, 3), 3: (5, 3, 2)}
"""Over 2 x 2 ranks and more some pieces are empty."""
UNLIKE = (Link(1e-5, 1e9), Link(1e-6, 1e10), Link(0.0, 3e9))
POOLS = {(2, 2): 4, (2, 3): 8, (2, 2, 2): 8}
"""Ranks of the pool; those beyond the mesh wait."""
TOLERANCE = 1e-12


@lru_cache
def mesh_of(sizes: Sizes) -> DeviceMesh:
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    return DeviceMesh("cpu", ranks, mesh_dim_names=("x", "y", "z")[: len(sizes)])


@lru_cache
def whole(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(math.prod(shape)))


@lru_cache(maxsize=4096)
def terms(shape: tuple[int, ...], num_terms: int) -> Tensor:
    """Terms of different signs and sizes, whose sum is the whole."""
    generator = torch.Generator().manual_seed(num_terms)
    drawn = torch.randn(num_terms - 1, *shape, dtype=torch.float64, generator=generator)
    drawn *= torch.arange(1, num_terms).view(-1, *(1 for _ in shape))
    return torch.cat((drawn, (whole(shape) - drawn.sum(0))[None]))


def piece(spec: Spec, shape: tuple[int, ...], sizes: Sizes, coordinate: Sequence[int]) -> Tensor:
    """What a rank holds under a spec."""
    which = 0
    for axis in spec.partial:
        which = which * sizes[axis] + coordinate[axis]
    num_terms = math.prod(sizes[axis] for axis in spec.partial)
    return terms(shape, num_terms)[which][spec.box(shape, sizes, coordinate)].clone()


def summed(local: Tensor, spec: Spec, mesh: DeviceMesh) -> Tensor:
    names = mesh.mesh_dim_names or ()
    for axis in spec.partial:
        local = collectives.all_reduce(local, mesh[names[axis]])
    return local


def named_bytes(path: Path, shape: tuple[int, ...], sizes: Sizes, coordinate: Sequence[int]) -> float:
    """Bytes that the rank sends by the closed forms."""
    return sum(step.bytes_sent(shape, 8, sizes, coordinate) for step in path.steps)


def all_pairs(num_dims: int, num_axes: int) -> list[tuple[Spec, Spec]]:
    return list(itertools.product(all_specs(num_dims, num_axes, partial=True), repeat=2))


def few_pairs(num_dims: int, num_axes: int) -> list[tuple[Spec, Spec]]:
    """Each spec once as source and once as target."""
    specs = all_specs(num_dims, num_axes, partial=True)
    return [(spec, specs[(7 * index + 11) % len(specs)]) for index, spec in enumerate(specs)]


def wrong(sizes: Sizes, shapes: Sequence[tuple[int, ...]], every: bool, part: int = 0, parts: int = 1) -> list[str]:
    """Pairs that do not end as slices of the whole, or for other bytes than named; in all that this rank is one of.

    part  of so many parts of the pairs
    """
    mesh = mesh_of(sizes)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    found = []
    with count_volume(mesh) as volume:
        for shape in shapes:
            for source, target in (all_pairs if every else few_pairs)(len(shape), len(sizes))[part::parts]:
                given = piece(source, shape, sizes, coordinate)
                for way in (cheapest, greedy):
                    path = way(source, target, shape, 8, sizes, UNLIKE[: len(sizes)])
                    before = volume.wire_bytes
                    result = follow(given, path, mesh, shape)
                    sent = volume.wire_bytes - before
                    wanted = whole(shape)[target.box(shape, sizes, coordinate)]
                    value = summed(result, target, mesh)
                    right = value.shape == wanted.shape and torch.allclose(value, wanted, rtol=0, atol=TOLERANCE)
                    if not right:
                        found.append(f"{way.__name__} of {shape}: {path}")
                    if not math.isclose(sent, named_bytes(path, shape, sizes, coordinate), abs_tol=1e-6):
                        found.append(f"{sent} bytes in {way.__name__} of {shape}: {path}")
    return found


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize("sizes", POOLS, ids=str)
def test_every_rank_gets_its_slice(ranks, sizes: Sizes, every: bool) -> None:
    """All pairs on eight ranks take longer than a case may (`tests.support.ranks`): they are several cases."""
    parts = 12 if every and len(sizes) == 3 else 1
    shapes = [*EVEN.values(), *UNEVEN.values()] if every else [UNEVEN[3], EVEN[2]] if len(sizes) == 2 else [UNEVEN[2]]
    for part in range(parts):
        assert not any(ranks(POOLS[sizes]).run(wrong, sizes, shapes, every, part, parts))


def wrong_without(operation: str) -> int:
    """Pairs that are wrong where a collective does not send, or a step takes the neighbour's piece."""
    stand_in = {
        "all_gather": lambda x, dim, axis: torch.cat([x] * axis.size(), dim),
        "all_reduce": lambda x, axis: x,
        "reduce_scatter": lambda x, dim, axis: collectives.take_shard(x, dim, axis),
        "all_to_all": lambda parts, shapes, axis: [
            torch.zeros(shape, dtype=part.dtype) for part, shape in zip(parts, shapes)
        ],
    }
    with patch.object(exchange, operation, stand_in[operation]):
        return len(wrong((2, 2), [EVEN[2]], False))


@pytest.mark.parametrize("operation", ["all_gather", "all_reduce", "reduce_scatter", "all_to_all"])
def test_a_step_without_its_message_is_seen(ranks, operation: str) -> None:
    assert all(ranks(4).run(wrong_without, operation))


# --- beside DTensor ---------------------------------------------------------------------------------------------------


def ordered(spec: Spec) -> bool:
    return all(list(axes) == sorted(axes) for axes in spec.dims)


def beside_dtensor(sizes: Sizes, shape: tuple[int, ...], every: bool) -> tuple[list[str], int]:
    """Pairs whose results differ, and how many there were (what both send, `benchmarks.layout_conversion` counts).

    Of all that DTensor can say: axes in the mesh's order, and targets without new partial axes.
    """
    mesh = mesh_of(sizes)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    found, pairs = [], 0
    stride = whole(shape).stride()
    for source, target in (all_pairs if every else few_pairs)(len(shape), len(sizes)):
        target = target.summed()
        if not ordered(source) or not ordered(target):
            continue
        local = piece(source, shape, sizes, coordinate)
        given = DTensor.from_local(
            local, mesh, source.placements(len(sizes)), run_check=False, shape=torch.Size(shape), stride=stride
        )
        reference = given.redistribute(placements=target.placements(len(sizes))).to_local().flatten()
        result = convert(local, source, target, mesh, shape).flatten()
        pairs += 1
        if result.shape != reference.shape or not torch.allclose(result, reference, rtol=0, atol=TOLERANCE):
            found.append(f"{source} to {target} of {shape}")
    return found, pairs


@pytest.mark.parametrize(
    ("sizes", "every"),
    [((2, 2), False), *(pytest.param(sizes, True, marks=pytest.mark.soak) for sizes in ((2, 2), (2, 2, 2)))],
    ids=str,
)
def test_results_are_those_of_dtensor(ranks, sizes: Sizes, every: bool) -> None:
    for shape in (EVEN[2], UNEVEN[2]):
        for found, pairs in ranks(POOLS[sizes]).run(beside_dtensor, sizes, shape, every):
            assert found == []
            assert pairs > 10


def placed_as_dtensor(sizes: Sizes) -> bool:
    """The pieces of specs are those of DTensor."""
    mesh = mesh_of(sizes)
    for spec in filter(ordered, all_specs(2, len(sizes))):
        for shape in (EVEN[2], UNEVEN[2]):
            theirs = distribute_tensor(whole(shape), mesh, spec.placements(len(sizes)), src_data_rank=None).to_local()
            ours = whole(shape)[spec.box(shape, sizes, mesh.get_coordinate() or ())]
            if not torch.equal(ours.flatten(), theirs.flatten()):
                return False
    return True


def test_pieces_are_those_of_dtensor(ranks) -> None:
    assert all(ranks(4).run(placed_as_dtensor, (2, 2)))


# --- gradients and refusals -------------------------------------------------------------------------------------------


def gradients(source: str, target: str, sizes: Sizes, shape: tuple[int, ...]) -> bool:
    """Is the gradient of every piece the slice of the whole's gradient?"""
    mesh, before, after = mesh_of(sizes), parse(source), parse(target)
    coordinate = mesh.get_coordinate() or ()
    slopes = torch.linspace(-1, 2, math.prod(shape), dtype=torch.float64).view(shape)
    local = piece(before, shape, sizes, coordinate).requires_grad_()
    out = convert(local, before, after, mesh, shape)
    (out * slopes[after.box(shape, sizes, coordinate)]).sum().backward()
    assert local.grad is not None
    return torch.equal(local.grad, slopes[before.box(shape, sizes, coordinate)])


@pytest.mark.parametrize(
    ("source", "target"),
    [("S01R", "RS10"), ("RR{0}", "S0R"), ("S1R{0}", "RR"), ("RR", "S0S1"), ("S0R", "S0R"), ("S0R", "RR{0}"),
     ("RR{01}", "S1R{0}")],
)  # fmt: skip
def test_gradients_take_the_way_back(ranks, source: str, target: str) -> None:
    for shape in (EVEN[2], UNEVEN[2]):
        assert all(ranks(4).run(gradients, source, target, (2, 2), shape))


def refusals() -> list[str]:
    mesh, local = mesh_of((2, 2)), torch.ones(2, 3)
    unnamed = DeviceMesh("cpu", torch.arange(4).view(2, 2))
    calls: list[Any] = [
        lambda: convert(local, parse("S0"), parse("R"), mesh),
        lambda: convert(local, parse("S0R"), parse("RS2"), mesh),
        lambda: convert(local, parse("S0R"), parse("RR"), mesh, (7, 3)),
        lambda: convert(local, parse("S0R"), parse("RR"), unnamed),
        lambda: convert(local, parse("S0R"), parse("RR"), mesh, None, ALIKE * 3),
    ]
    told = []
    for call in calls:
        with pytest.raises(UserError) as refusal:
            call()
        told.append(str(refusal.value))
    return told


def test_what_is_no_piece_is_refused(ranks) -> None:
    told = ranks(4).run(refusals)[3]
    for line, says in zip(
        told,
        (
            "S0 is of 1 dims, and the local tensor has the shape 2x3",
            "RS2 names axis 2 of the mesh 2x2",
            "S0R gives this rank 3x3 of a tensor 7x3, and the local tensor is 2x3",
            "the mesh has no names of axes; give mesh_dim_names",
            "3 links for a mesh of 2 axes",
        ),
        strict=True,
    ):
        assert "\n" not in line
        assert says in line


def test_the_shape_is_that_of_equal_pieces_by_default(ranks) -> None:
    assert ranks(4).run(by_default) == [(8, 3)] * 4


def by_default() -> tuple[int, ...]:
    return tuple(convert(torch.ones(4, 3), parse("S0R"), parse("RR"), mesh_of((2, 2))).shape)


def test_ranks_beyond_the_mesh_are_refused(ranks) -> None:
    assert ranks(8).run(beyond)[6:] == ["this rank is not one of the mesh's; only those convert"] * 2


def beyond() -> str:
    mesh = mesh_of((2, 3))
    try:
        convert(torch.ones(2, 2), parse("S0R"), parse("S0R"), mesh)
    except UserError as refusal:
        return str(refusal)
    return ""
