"""Activations on a drive: gradients to the bit, bytes counted, room that is used again, and errors in a line."""

import errno
import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.compose import ParallelConfig, parallelize
from core.config import UserError
from core.gemini.config import GeminiConfig
from core.gemini.scratch import scratch_file
from core.mesh import MeshConfig
from core.parallel.drive import DiskTier, OnDrive
from core.parallel.recompute import RecomputeConfig
from core.pinned import DRIVE_BLOCK
from core.placement.table import ModelPlan
from core.runtime import start
from core.trace.account import MemoryAccount
from core.trace.machine import Bandwidth
from core.trace.segments import Away, Segments
from core.train.segments import lines_of
from tests.unit.test_recompute_in_place import WIDTH, Block, Net
from tests.unit.test_stored import ROW, ROWS
from tests.unit.test_stored import Net as StoredNet

MIXED: Segments = (Away(2, "disk"), 1, Away(1, "host"), (1,), Away(1, "disk"), Away(1, "compressed"), 2)


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[Any]:
    with start("cpu") as runtime:
        yield runtime


def trained(runtime: Any, config: RecomputeConfig, segments: Segments | None = None) -> tuple[list[Tensor], nn.Module]:
    torch.manual_seed(0)
    model = Net(partial(Block, torch.relu_), num_blocks=9).double()
    parallel = ParallelConfig(recompute=config, precision="fp64")
    spread = parallelize(model, runtime.mesh(MeshConfig()), parallel, ModelPlan(recompute=segments))
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    losses = []
    for _ in range(3):
        loss = spread.model(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
    assert x.grad is not None
    return [*losses, x.grad, *(p.grad for p in spread.model.parameters() if p.grad is not None)], spread.model


@pytest.mark.parametrize(
    ("config", "segments"),
    [
        (RecomputeConfig("offload"), None),
        (RecomputeConfig("offload", every=2), None),
        (RecomputeConfig("budget", budget="1GiB"), MIXED),
    ],
    ids=str,
)
def test_losses_and_gradients_are_the_same_to_the_bit(
    one_rank: Any, config: RecomputeConfig, segments: Segments | None, tmp_path: Path
) -> None:
    plain, _ = trained(one_rank, RecomputeConfig())
    found, _ = trained(one_rank, replace(config, disk=tmp_path), segments)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert not list(tmp_path.rglob("*.bin"))  # it has no name, and is gone with the process


def blocks_on(tier: DiskTier, number: int = 5) -> StoredNet:
    net = StoredNet(number)
    OnDrive(list(net.blocks), tier)
    return net


def step(net: nn.Module) -> None:
    net(torch.randn(ROWS, WIDTH), torch.rand(ROWS, WIDTH)).sum().backward()


def test_the_host_has_two_blocks_and_the_drive_all(tmp_path: Path) -> None:
    for number in (4, 8):
        tier = DiskTier("recompute.disk=x", partial(scratch_file, tmp_path, "recompute.disk"))
        net = blocks_on(tier, number)
        with MemoryAccount() as account:
            account.add(net.parameters())
            before = account.current_bytes
            loss = net(torch.randn(ROWS, WIDTH), torch.rand(ROWS, WIDTH)).sum()
            kept, held = account.current_bytes - before, tier.held_bytes
            loss.backward()
        each = (tier.sent_bytes + ROW) // number
        assert held == tier.peak_bytes == tier.sent_bytes
        assert tier.held_bytes == tier.host.held_bytes == 0
        assert tier.host.peak_bytes < 2.5 * each  # whole blocks of the drive for each storage
        assert kept < 1.2 * each
        assert tier.fetched_bytes == tier.sent_bytes - each
        del loss, net, tier
        gc.collect()  # another process may have the folder again


def test_room_in_the_file_is_used_again(tmp_path: Path) -> None:
    tier = DiskTier("recompute.disk=x", partial(scratch_file, tmp_path, "recompute.disk"))
    net = blocks_on(tier)
    step(net)
    first = tier.file_bytes
    assert first % DRIVE_BLOCK == 0
    assert first >= tier.sent_bytes
    for _ in range(3):
        step(net)
    assert tier.file_bytes == first
    drive = tier._drive
    assert drive is not None
    size = os.fstat(drive.handle)  # pyright: ignore[reportAttributeAccessIssue]
    assert size.st_size == first
    assert size.st_blocks * 512 >= first  # on the disk, and no hole


class Failing:
    """A drive whose n-th call of a kind fails."""

    def __init__(self, file: Any, kind: str, at: int, code: int):
        self.file, self.kind, self.left, self.code = file, kind, at, code

    def _count(self, kind: str) -> None:
        if kind == self.kind:
            self.left -= 1
            if self.left < 0:
                raise OSError(self.code, os.strerror(self.code))

    def grow(self, offset: int, num_bytes: int) -> None:
        self._count("grow")
        self.file.grow(offset, num_bytes)

    def write(self, offset: int, memory: Tensor) -> Any:
        self._count("write")
        return self.file.write(offset, memory)

    def read(self, offset: int, memory: Tensor, checksums: Sequence[int] | None = None) -> Any:
        self._count("read")
        if self.kind == "rot" and self.left == 0:
            self.file.write(offset, memory.fill_(7)).wait()
        self.left -= self.kind == "rot"
        return self.file.read(offset, memory, checksums)


@pytest.mark.parametrize("at", [0, 7])
@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("grow", errno.ENOSPC, "No space left on device"),
        ("write", errno.EIO, "Input/output error"),
        ("read", errno.EIO, "Input/output error"),
        ("rot", 0, "is damaged: bytes"),
    ],
)
def test_what_goes_wrong_is_said_in_a_line(kind: str, code: int, said: str, at: int, tmp_path: Path) -> None:
    name = f"recompute.disk={tmp_path}"
    tier = DiskTier(name, lambda: Failing(scratch_file(tmp_path, "recompute.disk"), kind, at, code))
    net = blocks_on(tier)
    with pytest.raises(UserError, match=f"recompute.disk=.*{said}.*give another folder") as refused:
        step(net)
    assert "\n" not in str(refused.value)


def test_folders_that_are_none(tmp_path: Path) -> None:
    held = scratch_file(tmp_path, "recompute.disk")
    with pytest.raises(UserError, match=r"is in use by .*give another --recompute\.disk"):
        scratch_file(tmp_path, "recompute.disk")
    del held
    gc.collect()
    assert scratch_file(tmp_path, "recompute.disk").is_direct
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"recompute\.disk=.*file: .*give a folder on a drive that can be written"):
        scratch_file(tmp_path / "file", "recompute.disk")
    with pytest.raises(UserError, match=r"recompute\.disk=/dev/shm lies in memory"):
        scratch_file(Path("/dev/shm"), "recompute.disk")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda d: ParallelConfig(recompute=RecomputeConfig("offload", disk=d), gemini=GeminiConfig("1GiB", disk=d)),
            r"recompute\.mode=offload with gemini\.disk=",
        ),
    ],
)
def test_what_it_does_not_go_with_is_refused(make: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        make(tmp_path)
    for mode in ("full", "compressed"):
        assert "disk" in RecomputeConfig(mode, disk=tmp_path).unread()  # pyright: ignore[reportArgumentType]


def test_the_line_of_a_drive_is_the_slower_of_two(tmp_path: Path) -> None:
    link = Bandwidth(2e9, 1e9, 1e9, 1e9, disk_read=5e8, disk_write=4e9)
    config = RecomputeConfig("budget", budget="1GiB", disk=tmp_path)
    line = lines_of(config, "cpu", link)["disk"]
    assert (line.send_bytes_per_s, line.fetch_bytes_per_s, line.overlaps) == (1e9, 5e8, True)
