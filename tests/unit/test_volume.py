"""The volume counter against programs whose collectives can be counted by hand."""

from typing import cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from core.comm import collectives
from core.comm.volume import Volume, count_volume, slow_link
from core.compose import ParallelConfig, parallelize
from core.config import UserError
from core.mesh import MeshConfig, Zero, build_mesh
from core.models.plan import tensor_parallel_plan
from core.models.shapes import SHAPES
from core.nn.mlp import MLP
from core.parallel import sequence, tensor1d
from core.parallel.data import DataParallel
from core.parallel.plan import apply_plan

FP64 = 8
B, L, D, I = 2, 6, 8, 10
LLAMA = SHAPES["llama_7b"]


def counted(volume: Volume) -> dict[str, tuple[int, int]]:
    return {f"{op}/{axis}": (n, volume.bytes[op, axis]) for (op, axis), n in volume.calls.items()}


def each_operation() -> tuple[dict[str, tuple[int, int]], float]:
    mesh = build_mesh(MeshConfig(tp=2).resolve(4), "cpu")
    tp, dp = mesh["tp"], mesh["dp_replicate"]
    x = torch.ones(4, 3, dtype=torch.float64)
    with count_volume(mesh) as volume:
        collectives.all_reduce(x, tp)
        collectives.all_reduce(x, dp)
        collectives.all_gather(x, 0, tp)
        collectives.reduce_scatter(x, 0, dp)
        dist.broadcast(x, src=dist.get_global_rank(tp.get_group(), 0), group=tp.get_group())
        dist.all_gather([torch.empty_like(x)] * 2, x, group=tp.get_group())
        dist.all_to_all_single(torch.empty_like(x), x, group=tp.get_group())
        dist.all_reduce(x)
        dist.barrier()
    collectives.all_reduce(x, tp)  # outside
    return counted(volume), volume.wire_bytes


def test_each_operation_by_axis(ranks) -> None:
    message = 12 * FP64
    found, wire_bytes = ranks(4).run(each_operation)[0]
    assert found == {
        "all_reduce/tp": (1, message),
        "all_reduce/dp_replicate": (1, message),
        "all_gather/tp": (2, 2 * 2 * message),
        "reduce_scatter/dp_replicate": (1, message),
        "broadcast/tp": (1, message),
        "all_to_all/tp": (1, message),
        "all_reduce/world": (1, message),
    }
    # An all-reduce over two ranks sends its message once, over four 1.5 times; gathers and scatters send half.
    assert wire_bytes == message * (1 + 1 + 2 + 0.5 + 1 + 0.5 + 1.5)


def point_to_point() -> tuple[dict[str, tuple[int, int]], int, float]:
    """Two messages from the first rank to the second, by two of torch's functions."""
    mesh = build_mesh(MeshConfig(tp=2).resolve(2), "cpu")
    group, x = mesh["tp"].get_group(), torch.ones(4, 3, dtype=torch.float64)
    with count_volume(mesh) as volume:
        if dist.get_rank() == 0:
            dist.send(x, 1, group=group)
            messages = [dist.P2POp(dist.isend, x, 1, group)]
        else:
            dist.recv(x, 0, group=group)
            messages = [dist.P2POp(dist.irecv, x, 0, group)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
    return counted(volume), volume.total_bytes, volume.wire_bytes


def test_a_message_between_two_ranks_counts_where_it_is_sent(ranks) -> None:
    both = 2 * 12 * FP64
    first, second = ranks(2).run(point_to_point)
    assert first == ({"send/tp": (2, both)}, both, both)
    assert second == ({"recv/tp": (2, both)}, 0, 0.0)


def functional() -> dict[str, tuple[int, int]]:
    mesh = build_mesh(MeshConfig(tp=2).resolve(2), "cpu")
    x = DTensor.from_local(torch.ones(4, 3, dtype=torch.float64), mesh["tp"], [Shard(0)])
    with count_volume(mesh) as volume:
        x.redistribute(placements=[Replicate()]).to_local()
        x.sum().full_tensor()
    return counted(volume)


def test_collectives_of_dtensor(ranks) -> None:
    assert ranks(2).run(functional)[0] == {"all_gather/tp": (1, 24 * FP64), "all_reduce/tp": (1, FP64)}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, I), nn.Linear(I, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def tensor_parallel(in_sequence: bool) -> dict[str, tuple[int, int]]:
    mesh = build_mesh(MeshConfig(tp=2).resolve(2), "cpu")
    styles = sequence if in_sequence else tensor1d
    mlp = apply_plan(Mlp().double(), {"up": styles.colwise, "down": styles.rowwise}, mesh["tp"])
    rows = L // 2 if in_sequence else L
    x = torch.randn(B, rows, D, dtype=torch.float64, requires_grad=True)
    with count_volume(mesh) as volume:
        mlp(x).sum().backward()
    return counted(volume)


def test_a_tensor_parallel_block_sends_one_message_each_way(ranks) -> None:
    message = B * L * D * FP64
    assert ranks(2).run(tensor_parallel, False)[0] == {"all_reduce/tp": (2, 2 * message)}
    assert ranks(2).run(tensor_parallel, True)[0] == {
        "all_gather/tp": (2, 2 * message),
        "reduce_scatter/tp": (2, 2 * message),
    }


def gated() -> dict[str, tuple[int, int]]:
    """The MLP of a Llama block under its plan, on this rank's rows of the sequence."""
    mesh = build_mesh(MeshConfig(tp=2).resolve(2), "cpu")
    mlp = MLP(D, I, "swiglu", bias=False).double()
    prefix = "blocks.*.mlp"
    plan = {k.removeprefix(prefix)[1:]: v for k, v in tensor_parallel_plan(LLAMA).items() if k.startswith(f"{prefix}.")}
    apply_plan(mlp, plan | {"": tensor_parallel_plan(LLAMA)[prefix]}, mesh["tp"])
    x = torch.randn(B, L // 2, D, dtype=torch.float64, requires_grad=True)
    with count_volume(mesh) as volume:
        mlp(x).sum().backward()
    return counted(volume)


def test_a_gated_mlp_gathers_its_input_once(ranks) -> None:
    both = (2, 2 * B * L * D * FP64)
    assert ranks(2).run(gated)[0] == {"all_gather/tp": both, "reduce_scatter/tp": both}


class Stack(nn.Module):
    """Two blocks that FSDP2 takes for units, and a head outside of them; 3 rows do not divide over 2 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(2))
        self.head = nn.Linear(3, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def spread(zero: Zero, mesh: MeshConfig) -> DataParallel:
    resolved = mesh.resolve(dist.get_world_size(), zero)
    return parallelize(Stack(), build_mesh(resolved, "cpu"), ParallelConfig(zero=zero, precision="fp64"))


def microbatches(zero: Zero, mesh: MeshConfig) -> list[dict[str, tuple[int, int]]]:
    """What is sent in two microbatches before the last, in the last with the reduction, and when it is published."""
    parallel = spread(zero, mesh)
    x = torch.randn(4, 3, dtype=torch.float64)
    volumes = []
    for last in (False, False, True):
        with count_volume(parallel.mesh) as volume:
            with parallel.microbatch(last=last):
                parallel.model(x).sum().backward()
            if last:
                parallel.reduce()
        volumes.append(volume)
    with count_volume(parallel.mesh) as publish:
        parallel.publish()
    return [counted(v) for v in (*volumes, publish)]


BLOCK, HEAD = 4 * 3 * FP64, 6 * 3 * FP64  # padded to rows that divide
ALL = 2 * BLOCK + HEAD
EXACT = 2 * 9 * FP64 + 15 * FP64
MARKS = 2 * 3  # bytes in which ranks tell of each of three parameters that they used it, and that they did not


@pytest.mark.parametrize(
    ("zero", "reduction", "publish"),
    [
        (0, {"all_reduce/dp_replicate": (2, EXACT + MARKS)}, {}),
        *(
            (
                zero,
                {"reduce_scatter/dp_shard": (1, ALL), "all_reduce/dp_shard": (1, MARKS)},
                {"all_gather/dp_shard": (1, ALL)},
            )
            for zero in (1, 2)
        ),
    ],
)
def test_nothing_is_sent_before_the_last_microbatch(ranks, zero: Zero, reduction: dict, publish: dict) -> None:
    first, second, last, published = ranks(2).run(microbatches, zero, MeshConfig())[0]
    assert first == second == {}
    assert last == reduction
    assert published == publish


def test_zero_3_gathers_parameters_and_reduces_only_in_the_last_microbatch(ranks) -> None:
    first, second, last, published = ranks(2).run(microbatches, 3, MeshConfig())[0]
    gathers = {"all_gather/dp_shard": (5, 2 * 2 * BLOCK + HEAD)}  # blocks forward and backward, the rest once
    assert first == second == gathers
    assert last == gathers | {"reduce_scatter/dp_shard": (3, ALL), "all_reduce/dp_shard": (1, MARKS)}
    assert published == {}


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_hybrid_shard_also_sums_its_shards_over_the_replicas(ranks, zero: Zero) -> None:
    mesh = MeshConfig(dp_replicate=2, dp_shard=2)
    first, _, last, _ = ranks(4).run(microbatches, zero, mesh)[0]
    assert not any(name.startswith(("reduce_scatter", "all_reduce")) for name in first)
    assert last["reduce_scatter/dp_shard"][1] == ALL
    assert last["all_reduce/dp_replicate"][1] == ALL // 2


def each_over_a_slow_link(axes: tuple[str, ...] | None, bits_per_s: float) -> tuple[float, float]:
    """Seconds that this rank sleeps, and the wire bytes of all its messages."""
    mesh = build_mesh(MeshConfig(tp=2).resolve(4), "cpu")
    tp, dp = mesh["tp"], mesh["dp_replicate"]
    x, slept = torch.ones(4, 3, dtype=torch.float64), list[float]()
    with patch("core.comm.volume.time.sleep", slept.append), slow_link(mesh, bits_per_s, axes) as volume:
        collectives.all_reduce(x, tp)
        collectives.all_gather(x, 0, dp)
        dist.all_reduce(x)
        dist.barrier()
    return sum(slept), volume.wire_bytes


def test_a_slow_link_takes_its_wire_bytes_over_its_rate(ranks) -> None:
    """An all-reduce over two ranks sends its message once, a gather half of what it brings, one over four 1.5 times."""
    message = 12 * FP64
    slept, wire_bytes = ranks(4).run(each_over_a_slow_link, None, 1e6)[0]
    assert wire_bytes == message * (1 + 1 + 1.5)
    assert slept == pytest.approx(8 * wire_bytes / 1e6)
    slept, _ = ranks(4).run(each_over_a_slow_link, ("dp_replicate",), 1e6)[0]
    assert slept == pytest.approx(8 * message / 1e6)


def test_a_slow_link_without_a_rate_is_refused() -> None:
    with (
        pytest.raises(UserError, match=r"a slow link of 0 bits/s; give a positive rate"),
        slow_link(cast(DeviceMesh, None), 0),
    ):
        pass
