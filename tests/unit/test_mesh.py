"""Meshes: sizes that are left open, and what the refusals say."""

import inspect

import pytest
from torch.distributed.device_mesh import DeviceMesh

from core.config import UserError
from core.mesh import AXES, MeshConfig, build_mesh, data_axis, gradient_axis, shard_axis


@pytest.mark.parametrize(
    ("mesh", "world_size", "zero", "replicate", "shard"),
    [
        (MeshConfig(), 1, 0, 1, 1),
        (MeshConfig(), 6, 0, 6, 1),
        (MeshConfig(), 6, 3, 1, 6),
        (MeshConfig(tp=2), 6, 0, 3, 1),
        (MeshConfig(tp=2), 6, 1, 1, 3),
        (MeshConfig(tp=2), 2, 2, 1, 1),
        (MeshConfig(dp_replicate=2), 8, 2, 2, 4),
        (MeshConfig(dp_shard=2), 8, 2, 4, 2),
        (MeshConfig(dp_replicate=2, dp_shard=2, tp=2), 8, 3, 2, 2),
        (MeshConfig(dp_shard=1), 4, 0, 4, 1),
        (MeshConfig(cp=2), 6, 0, 3, 1),
        (MeshConfig(cp=2), 2, 3, 1, 1),
        (MeshConfig(cp=2, tp=2), 8, 1, 1, 2),
        (MeshConfig(pp=2, tp=2), 8, 0, 2, 1),
    ],
)
def test_open_sizes_take_the_ranks_that_remain(mesh, world_size, zero, replicate, shard) -> None:
    resolved = mesh.resolve(world_size, zero)
    assert resolved.sizes() == (mesh.pp, replicate, shard, mesh.cp, mesh.tp)
    assert resolved.data_ranks == replicate * shard
    assert resolved.resolve(world_size, zero) == resolved


@pytest.mark.parametrize(
    ("mesh", "world_size", "zero", "says"),
    [
        (MeshConfig(tp=3), 4, 0, "tp=3 takes 3 ranks or a multiple of it, and 4 are running; use --nproc 3"),
        (MeshConfig(tp=4), 1, 0, "tp=4 takes 4 ranks or a multiple of it, and 1 is running; use --nproc 4"),
        (MeshConfig(tp=2), 7, 3, "use --nproc 6"),
        (MeshConfig(dp_replicate=2, dp_shard=3), 4, 1, "dp_replicate=2 x dp_shard=3 takes 6 ranks"),
        (MeshConfig(dp_replicate=1, dp_shard=2), 4, 1, "exactly 2 ranks, and 4 are running; use --nproc 2, or leave"),
        (MeshConfig(dp_replicate=2), 4, 0, "exactly 2 ranks, and 4 are running"),
        (MeshConfig(dp_shard=2), 4, 0, "zero=0 shards nothing; use --zero 1, 2 or 3, or mesh.dp_replicate=2"),
    ],
)
def test_refusals_say_what_would_work(mesh: MeshConfig, world_size: int, zero, says: str) -> None:
    with pytest.raises(UserError) as refusal:
        mesh.resolve(world_size, zero)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"tp": 0}, "mesh.tp=0: an axis has at least 1 rank"),
        ({"dp_shard": -2}, "mesh.dp_shard=-2"),
        ({"tp": 6, "tp_mode": "2d"}, "mesh.tp=6 with tp_mode=2d: the ranks must be a square; use mesh.tp=4 or 9, or"),
        ({"tp": 2, "tp_mode": "2d"}, "the ranks must be a square; use mesh.tp=4, or --mesh.tp-mode 1d"),
        (
            {"tp": 6, "tp_mode": "2.5d", "tp_depth": 2},
            "mesh.tp=6 with tp_mode=2.5d: the ranks must be a square times tp_depth=2; use mesh.tp=2 or 8",
        ),
        ({"tp": 9, "tp_mode": "3d"}, "mesh.tp=9 with tp_mode=3d: the ranks must be a cube; use mesh.tp=8 or 27"),
        (
            {"tp": 8, "tp_mode": "3d", "tp_depth": 2},
            "only 2.5d has a depth; use --mesh.tp-mode 2.5d, or mesh.tp_depth=1",
        ),
    ],
)
def test_impossible_sizes_are_refused_at_once(sizes: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        MeshConfig(**sizes)


@pytest.mark.parametrize(
    ("mesh", "grid"),
    [
        (MeshConfig(tp=1, tp_mode="2d"), (1, 1, 1)),
        (MeshConfig(tp=9, tp_mode="2d"), (1, 3, 3)),
        (MeshConfig(tp=2, tp_mode="2.5d", tp_depth=2), (2, 1, 1)),
        (MeshConfig(tp=18, tp_mode="2.5d", tp_depth=2), (2, 3, 3)),
        (MeshConfig(tp=27, tp_mode="3d"), (3, 3, 3)),
    ],
)
def test_a_grid_stands_in_the_place_of_tp(mesh: MeshConfig, grid: tuple[int, ...]) -> None:
    assert mesh.grid == grid
    resolved = mesh.resolve(2 * mesh.tp, 1)
    assert resolved.axes == ("pp", "dp_replicate", "dp_shard", "cp", "tp_depth", "tp_row", "tp_col")
    assert resolved.sizes() == (1, 1, 2, 1, *grid)


@pytest.mark.parametrize(
    ("mesh", "world_size", "zero", "sizes"),
    [
        (MeshConfig(ep=2), 8, 0, (1, 4, 1, 2, 1, 1)),
        (MeshConfig(ep=4, tp=2), 8, 0, (1, 1, 1, 4, 1, 2)),
        (MeshConfig(ep=2), 8, 1, (1, 1, 4, 2, 1, 1)),
        (MeshConfig(ep=2, dp_replicate=2, cp=2), 8, 3, (1, 2, 1, 2, 2, 1)),
    ],
)
def test_experts_take_ranks_of_the_data_axes(mesh: MeshConfig, world_size: int, zero, sizes: tuple[int, ...]) -> None:
    resolved = mesh.resolve(world_size, zero)
    assert resolved.axes == ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
    assert resolved.sizes() == sizes
    assert resolved.data_ranks == world_size // mesh.tp // mesh.cp


@pytest.mark.parametrize(
    ("mesh", "world_size", "zero", "says"),
    [
        (MeshConfig(ep=3), 8, 0, "mesh.ep=3 does not divide the 8 ranks of dp_replicate; use mesh.ep in {1, 2, 4, 8}"),
        (MeshConfig(ep=4, dp_replicate=2), 4, 2, "does not divide the 2 ranks of dp_shard; use mesh.ep in {1, 2}"),
        (MeshConfig(ep=2), 1, 3, "does not divide the 1 rank of dp_shard"),
    ],
)
def test_experts_divide_the_ranks_that_zero_shards_over(mesh: MeshConfig, world_size: int, zero, says: str) -> None:
    with pytest.raises(UserError) as refusal:
        mesh.resolve(world_size, zero)
    assert says in str(refusal.value)


def places() -> tuple[int, list[int], list[int], list[int]]:
    """Data rank, and the ranks of the axes over which gradients of all parameters, and of experts', are added up."""
    mesh = build_mesh(MeshConfig(ep=2, cp=2).resolve(8, 1), "cpu")
    rest = shard_axis(mesh, ("ep",))
    return data_axis(mesh).get_local_rank(), *(axis.mesh.tolist() for axis in (gradient_axis(mesh), mesh["ep"], rest))


def test_copies_of_experts_are_at_the_same_place_of_ep(ranks) -> None:
    found = ranks(8).run(places)
    assert [data for data, *_ in found] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [group for _, group, _, _ in found] == [list(range(8))] * 8
    assert [group for _, _, group, _ in found] == [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
    assert [group for *_, group in found] == [[0, 1, 4, 5]] * 2 + [[2, 3, 6, 7]] * 2 + [[0, 1, 4, 5]] * 2 + [
        [2, 3, 6, 7]
    ] * 2


def coordinates() -> tuple[dict[str, int], list[int], int]:
    mesh = build_mesh(MeshConfig(tp=2, dp_replicate=1, dp_shard=2).resolve(4, 1), "cpu")
    axis = data_axis(mesh)
    assert data_axis(mesh) is axis
    assert isinstance(axis, DeviceMesh)
    build_anew = inspect.unwrap(build_mesh)  # the ranks of these tests keep their meshes
    again = build_anew(MeshConfig(tp=2, dp_replicate=1, dp_shard=2).resolve(4, 1), "cpu")
    assert data_axis(again) is not axis, "a mesh that is made anew, equal or not, has process groups of its own"
    return {name: mesh[name].get_local_rank() for name in AXES}, axis.mesh.tolist(), axis.get_local_rank()


def test_tensor_parallel_ranks_are_neighbours_and_data_ranks_one_axis(ranks) -> None:
    found = ranks(4).run(coordinates)
    assert [c["tp"] for c, _, _ in found] == [0, 1, 0, 1]
    assert [c["dp_shard"] for c, _, _ in found] == [0, 0, 1, 1]
    assert [group for _, group, _ in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [index for _, _, index in found] == [0, 0, 1, 1]
