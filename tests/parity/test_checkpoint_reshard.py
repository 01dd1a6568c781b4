"""Checkpoints of several ranks: saved on one mesh, loaded on any other; each box written once; a rank killed in a save.

The whole tensors are drawn from a seed, so that every rank knows what each box must hold.
"""

import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from core.checkpoint import CheckpointConfig, Checkpointer, complete_steps, inspect, read_full, staged_bytes
from core.config import UserError
from core.layout import Layout, full_tensor, layout_of, local, tag
from tests.support.checkpoints import flipped, flips
from tests.support.ranks import Pool, RankFailure

NUM_FLIPS = 100

# name -> shape, dims that tp and then dp cut (None: replicated over that axis). Odd on purpose.
TENSORS: dict[str, tuple[tuple[int, ...], int | None, int | None]] = {
    "vocabulary": ((97, 13), 0, 0),  # the same dim twice, uneven both times
    "columns": ((13, 97), 1, 0),
    "rows": ((97, 13), 0, None),
    "three": ((3, 2), 0, 0),  # empty shards on four ranks
    "two": ((2, 3), 0, 0),  # an empty shard that begins where a neighbour's row does
    "pair": ((4, 2), 1, 1),
    "one": ((1, 5), 0, 0),
    "norm": ((13,), None, None),
    "moment": ((31,), None, 0),
    "cube": ((5, 6, 7), 2, 1),
    "fused": ((22, 5), 0, 0),
    "fused columns": ((5, 22), 1, 0),
    "scalar": ((), None, None),
    "nothing": ((0, 4), None, None),
}
PARTS = {"fused": (12, 4, 6), "fused columns": (8, 8, 6)}
"""Of the dim that tp cuts."""


def whole(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
    return torch.randn(TENSORS[name][0], generator=generator, dtype=torch.float64)


def layout(name: str, mesh: DeviceMesh) -> Layout:
    shape, tp_dim, dp_dim = TENSORS[name]
    made = Layout(shape, mesh)
    for axis, dim in (("tp", tp_dim), ("dp", dp_dim)):
        parts = PARTS.get(name, ()) if axis == "tp" else ()
        made = made if dim is None else made.cut(mesh, axis, dim, parts=parts)
    return made


def boxes(mesh: DeviceMesh, filled: bool) -> dict[str, Tensor]:
    """This rank's local tensors, tagged: those of `whole`, or NaN."""
    made = {}
    for name in TENSORS:
        cut = layout(name, mesh)
        box = cut.local(whole(name)).clone()
        made[name] = tag(box if filled else torch.full_like(box, torch.nan), cut)
    return made


def as_expected(loaded: dict[str, Tensor], mesh: DeviceMesh) -> bool:
    parts = all(torch.equal(loaded[name], layout(name, mesh).local(whole(name))) for name in TENSORS)
    return parts and all(torch.equal(full_tensor(loaded[name]), whole(name)) for name in PARTS)


def mesh_of(dp: int, tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def save_and_load_on_other_meshes(folder: Path) -> None:
    saved_on = mesh_of(2, 2)
    checkpointer = Checkpointer(folder, CheckpointConfig(), saved_on)
    checkpointer.save(5, boxes(saved_on, filled=True), {"a": 1}, {"rank": bytes([dist.get_rank()])})
    # Collectives of training, while the thread of the save has its own.
    total = torch.ones(1000)
    for _ in range(50):
        dist.all_reduce(total.fill_(1.0))
        assert total.eq(dist.get_world_size()).all()
    checkpointer.wait()
    for dp, tp in ((2, 2), (1, 4), (4, 1)):
        mesh = mesh_of(dp, tp)
        reader = Checkpointer(folder, CheckpointConfig(), mesh)
        loaded = boxes(mesh, filled=False)
        step, values, rank_values = reader.load(None, loaded)
        assert as_expected(loaded, mesh), f"dp={dp} tp={tp}"
        assert (step, values) == (5, {"a": 1})
        assert rank_values == ({"rank": bytes([dist.get_rank()])} if tp == 2 else None)
        reader.close()
    checkpointer.close()


def load_what_one_rank_saved(folder: Path) -> None:
    mesh = mesh_of(2, 2)
    checkpointer = Checkpointer(folder, CheckpointConfig(), mesh)
    loaded = boxes(mesh, filled=False)
    assert checkpointer.load(None, loaded)[2] is None
    assert as_expected(loaded, mesh)
    checkpointer.close()


def save_modules_of_torch(folder: Path) -> None:
    """DTensors as tensor parallelism and FSDP2 leave them: cut by tp, then by dp within that."""
    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    module = torch.nn.Linear(12, 96, bias=False, dtype=torch.float64)
    expected = module.weight.detach().clone()
    module.weight = torch.nn.Parameter(distribute_tensor(module.weight, mesh["tp"], [Shard(0)]))
    fully_shard(module, mesh=mesh["dp"])
    assert isinstance(module.weight, DTensor)
    assert layout_of(module.weight).axes() == ("tp", "dp")
    checkpointer = Checkpointer(folder, CheckpointConfig(asynchronous=False), mesh)
    checkpointer.save(1, {"weight": module.weight}, {}, {})
    with torch.no_grad():
        local(module.weight).zero_()
    checkpointer.load(1, {"weight": module.weight})
    assert torch.equal(local(module.weight), layout_of(module.weight).local(expected))
    if dist.get_rank() == 0:
        assert torch.equal(read_full(folder)["weight"], expected)
    checkpointer.close()


def stages_and_their_mistakes(folder: Path) -> None:
    """Names that differ between ranks, and a mistake of one rank: all of them get the same line."""
    rank = dist.get_rank()
    checkpointer = Checkpointer(folder, CheckpointConfig())
    mine = {f"stage{rank}/weight": torch.full((3,), float(rank)), "shared": torch.ones(2)}
    checkpointer.save(1, mine, {}, {})
    loaded = {name: torch.zeros_like(tensor) for name, tensor in mine.items()}
    checkpointer.load(1, loaded)
    assert all(torch.equal(loaded[name], mine[name]) for name in mine)
    extra = {"nonsense": torch.zeros(1)} if rank == 1 else {}
    with pytest.raises(UserError, match="lacks nonsense"):
        checkpointer.load(1, loaded | extra)
    with pytest.raises(UserError, match="does not, stage1/weight"):
        checkpointer.load(1, {"shared": loaded["shared"]} if rank == 1 else loaded)
    # One rank cannot read its own values.
    step = next(iter(complete_steps(folder).values()))
    if rank == 1:
        (step / "rank-00001.safetensors").unlink()
    dist.barrier()
    with pytest.raises(UserError, match="rank-00001"):
        checkpointer.load(1, loaded)
    checkpointer.close()


def replicas(folder: Path) -> None:
    """4 MB that every rank holds, in items of unequal size."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"t{n}": torch.randn(n, 64, generator=generator) for n in (5000, 3000, 2500, 2000, 1500, 1000, 700, 300)}
    checkpointer = Checkpointer(folder, CheckpointConfig())
    checkpointer.save(1, tensors, {}, {})
    staged = sum(buffer.nbytes for buffer in checkpointer._staging._buffers.values())
    assert staged <= 1.4 * staged_bytes(4 * 64 * 16000, dist.get_world_size()), "copied what another rank writes"
    checkpointer.close()


def load_what_is_damaged(folder: Path) -> int:
    """Files of both ranks, one byte of one of them flipped at a time: every rank is told of each."""
    mesh = mesh_of(1, 2)
    checkpointer = Checkpointer(folder, CheckpointConfig(), mesh)
    checkpointer.save(1, boxes(mesh, filled=True), {"a": 1}, {"rank": bytes([dist.get_rank()])})
    checkpointer.wait()
    files = sorted((folder / "step-00000001").iterdir())
    assert {"__0_0.distcp", "__1_0.distcp", "rank-00001.safetensors"} <= {file.name for file in files}
    drawn = list(flips(files, NUM_FLIPS, seed=0))
    dist.barrier()  # sizes are looked at before rank 0 writes
    for path, at, mask in drawn:
        damage = flipped(path, at, mask) if dist.get_rank() == 0 else nullcontext()
        dist.barrier()
        with damage:
            dist.barrier()
            with pytest.raises(UserError, match=f"cannot load step 1 .*{path.name}"):
                checkpointer.load(1, boxes(mesh, filled=False))
            dist.barrier()
    loaded = boxes(mesh, filled=False)
    checkpointer.load(1, loaded)
    assert as_expected(loaded, mesh)
    checkpointer.close()
    return len(files)


def one_rank_is_killed(folder: Path) -> None:
    from core.checkpoint import checkpointer as module

    mesh = mesh_of(1, 2)
    checkpointer = Checkpointer(folder, CheckpointConfig(), mesh)
    checkpointer.save(1, boxes(mesh, filled=True), {}, {})
    checkpointer.wait()
    if dist.get_rank() == 1:
        module.write_file = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.save(2, boxes(mesh, filled=True), {}, {})
    started = time.monotonic()
    with pytest.raises(Exception, match=r"(?i)connection|peer|closed"):
        checkpointer.wait()
    assert time.monotonic() - started < 30
    assert checkpointer.steps() == [1]


def test_dp2_tp2_loads_on_any_mesh(tmp_path, ranks):
    folder = tmp_path / "checkpoints"
    ranks(4).run(save_and_load_on_other_meshes, folder)
    alone = {name: torch.full_like(whole(name), torch.nan) for name in TENSORS}
    checkpointer = Checkpointer(folder, CheckpointConfig())
    assert checkpointer.load(None, alone) == (5, {"a": 1}, None)
    checkpointer.close()
    assert all(torch.equal(alone[name], whole(name)) for name in TENSORS)
    full = read_full(folder)
    assert all(torch.equal(full[name], whole(name)) for name in TENSORS)
    assert inspect(folder).mesh == {"dp": 2, "tp": 2}


def test_one_rank_to_dp2_tp2(tmp_path, ranks):
    folder = tmp_path / "checkpoints"
    checkpointer = Checkpointer(folder, CheckpointConfig())
    checkpointer.save(5, {name: whole(name) for name in TENSORS}, {"a": 1}, {})
    checkpointer.close()
    ranks(4).run(load_what_one_rank_saved, folder)


def test_parameters_of_tensor_parallelism_and_fsdp(tmp_path, ranks):
    ranks(4).run(save_modules_of_torch, tmp_path / "checkpoints")


def test_names_may_differ_between_ranks_and_mistakes_are_told_to_all(tmp_path, ranks):
    ranks(2).run(stages_and_their_mistakes, tmp_path / "checkpoints")


def test_replicas_are_written_once_and_by_all(tmp_path, ranks):
    folder = tmp_path / "checkpoints"
    ranks(4).run(replicas, folder)
    nbytes = [path.stat().st_size for path in folder.glob("step-*/*.distcp")]
    whole_bytes = 4 * 64 * 16000
    assert whole_bytes < sum(nbytes) < 1.01 * whole_bytes, "about 1 kB an item comes on top"
    assert max(nbytes) < 1.4 * whole_bytes / 4, "the largest item is 5/16 of the whole"


def test_no_flipped_byte_in_any_file_of_two_ranks_is_accepted(tmp_path, ranks):
    assert ranks(2).run(load_what_is_damaged, tmp_path / "checkpoints")[0] == 7


def test_a_rank_killed_in_a_save_leaves_the_one_before(tmp_path):
    folder = tmp_path / "checkpoints"
    with pytest.raises(RankFailure) as failure:
        Pool(2).run(one_rank_is_killed, folder)
    assert str(failure.value) == "rank 1 of 2:\nthe process died"
    assert list(complete_steps(folder)) == [1]
    full = read_full(folder)
    assert all(torch.equal(full[name], whole(name)) for name in TENSORS)
