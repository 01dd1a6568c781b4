"""What blocks save for their backward waits on the host, on a drive or in fewer bytes: gradients as without.

Copies run in streams of their own there, and places on the host are used again in the second step and the third.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from core.gemini.scratch import scratch_file
from core.parallel.encoded import encode
from core.parallel.recompute import RecomputeConfig, apply_recompute
from core.runtime import start
from core.trace.segments import Away, Lean, Segments
from tests.gpu.test_device_work import waits
from tests.unit.test_stored import ROWS, WIDTH, Net, _values

pytestmark = pytest.mark.gpu

BUDGET = RecomputeConfig("budget", budget="1GiB")
MIXED: Segments = (Away(2, "host"), (1,), Away(1, "compressed"), Lean(1, "linear"), 1)
ON_A_DRIVE: Segments = (Away(2, "disk"), (1,), Away(1, "host"), Away(1, "disk"), 1)
WAYS: dict[str, tuple[RecomputeConfig, Segments | None, bool]] = {
    "offload": (RecomputeConfig("offload"), None, False),
    "every third": (RecomputeConfig("offload", 3), None, False),
    "drive": (RecomputeConfig("offload"), None, True),
    "compressed": (RecomputeConfig("compressed"), None, False),
    "budget": (BUDGET, MIXED, False),
    "budget, drive": (BUDGET, ON_A_DRIVE, True),
}
STEPS = 3


def gradients(
    device: torch.device, config: RecomputeConfig, segments: Segments | None = None, disk: Path | None = None
) -> list[Tensor]:
    torch.manual_seed(0)
    net = Net(6).to(device)
    with start(device.type):
        drive = None if disk is None else partial(scratch_file, disk, "recompute.disk")
        config = RecomputeConfig(**{**vars(config), "disk": disk})
        apply_recompute(net, config, segments=segments, drive=drive)
        x, mask = (torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(k)).to(device) for k in (1, 2))
        x.requires_grad_()
        losses = []
        for _ in range(STEPS):
            loss = net(x, mask).square().mean()
            loss.backward()
            losses.append(loss.detach())
    assert x.grad is not None
    return [one.cpu() for one in (*losses, x.grad, *(p.grad for p in net.parameters() if p.grad is not None))]


def farthest(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Of all tensors the largest norm of a difference, relative to the norm."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_the_same(way: str, device: torch.device, tmp_path: Path) -> None:
    config, segments, on_drive = WAYS[way]
    found = gradients(device, config, segments, tmp_path if on_drive else None)
    assert farthest(found, gradients(device, RecomputeConfig())) <= 1e-6


@pytest.mark.parametrize(("bits", "within"), [(8, 0.02), (4, 0.3)])
def test_few_bits_change_gradients_a_little(bits: int, within: float, device: torch.device) -> None:
    config = RecomputeConfig("compressed", bits=bits)  # pyright: ignore[reportArgumentType]
    found, wanted = gradients(device, config), gradients(device, RecomputeConfig())
    assert farthest(found[:STEPS], wanted[:STEPS]) <= 1e-6  # the forward is exact
    assert 1e-5 < farthest(found[STEPS:], wanted[STEPS:]) < within


def test_codes_are_those_of_a_cpu(device: torch.device) -> None:
    for what, values, _ in _values():
        code = encode(values.to(device), None)
        assert code is not None, what
        words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
        assert torch.equal(code.decode().cpu().view(words), values.view(words)), what
    x = torch.randn(1000)
    for bits in (8, 4):
        here, there = encode(x, bits), encode(x.to(device), bits)
        assert here is not None
        assert there is not None
        torch.testing.assert_close(there.decode().cpu(), here.decode(), rtol=1e-6, atol=1e-6)


def _wide(device: torch.device) -> nn.ModuleList:
    layers = (nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(8))
    return nn.ModuleList(layers).to(device)


@pytest.mark.cuda
def test_offload_waits_for_nobody_and_takes_less(device: torch.device) -> None:
    peaks = []
    for mode in ("none", "offload"):
        blocks = _wide(device)
        apply_recompute(blocks, RecomputeConfig(mode))  # pyright: ignore[reportArgumentType]
        x = torch.randn(8192, 512, device=device)

        def step(x: Tensor = x, blocks: nn.ModuleList = blocks) -> None:
            for block in blocks:
                x = x + block(x)
            x.sum().backward()

        for _ in range(2):  # places on the host are made
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with waits():
            step()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < 0.6 * peaks[0], peaks
