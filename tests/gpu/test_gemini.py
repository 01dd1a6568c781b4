"""Training under Gemini on a device, in a budget that holds everything and in one that does not, learns what plain
training learns; also with a part of it on a drive, from which another process would go on."""

from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from core.gemini import wrap
from core.gemini.disk import Disk
from core.models import Decoder, DecoderConfig, initialise
from core.parallel.recompute import RecomputeConfig, apply_recompute

pytestmark = pytest.mark.gpu

# 21 million parameters: 340 MB with gradients and AdamW's state, beside which a library's workspace is small.
CONFIG = DecoderConfig(vocab_size=1000, dim=512, num_layers=6, num_heads=8, ffn_dim=2048, max_length=64)
STEPS = 3


def made() -> Decoder:
    with torch.device("meta"):
        model = Decoder(CONFIG)
    model.to_empty(device="cpu")
    initialise(model, 0)
    apply_recompute(model, RecomputeConfig("full"))
    return model


def trained(budget: str | None, device: torch.device) -> tuple[list[float], dict[str, Tensor], list[int]]:
    """Losses, parameters after the last step, and the bytes that Gemini moved in each step."""
    model = made()
    if budget is None:
        model.to(device)
    ids = torch.randint(1000, (2, 64), generator=torch.Generator().manual_seed(0)).to(device)

    def loss(model: torch.nn.Module) -> Tensor:
        return model(ids, targets=ids) / ids.numel()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    gemini = None if budget is None else wrap(model, optimizer, budget, sample=lambda: loss, device=device.type)
    losses, moved = [], [0]
    for _ in range(STEPS):
        value = loss(model)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(value.detach()))
        moved.append(0 if gemini is None else gemini.moved_bytes)
    values = dict(model.named_parameters()) if gemini is None else gemini.state_dict()
    return losses, {name: value.detach().cpu() for name, value in values.items()}, [b - a for a, b in pairwise(moved)]


@pytest.mark.parametrize("budget", ["2GiB", "200MiB"])
def test_three_steps(budget: str, device: torch.device) -> None:
    with torch.device("meta"):
        start = Decoder(CONFIG)
    start.to_empty(device="cpu")
    initialise(start, 0)
    losses, values, _ = trained(None, device)
    found, ours, moved = trained(budget, device)
    # On a GPU nothing is resident in the first step, which is measured.
    assert [num_bytes > 0 for num_bytes in moved[1:]] == [budget == "200MiB"] * (STEPS - 1)
    assert found == pytest.approx(losses, rel=1e-5)
    require_alike(ours, values, start)


def require_alike(ours: dict[str, Tensor], values: dict[str, Tensor], start: torch.nn.Module) -> None:
    before = dict(start.named_parameters())
    went = max(float((value - before[name]).abs().max()) for name, value in values.items())
    assert went > 1e-3
    # Adam's steps are of the sign of what is nearly 0, where two orders of addition differ: the mean tells.
    for name, value in values.items():
        off, far = float((ours[name] - value).abs().mean()), float((value - before[name]).abs().mean())
        assert off <= 0.02 * far + 1e-9, name


def gone_on(disk: Path, last: int, device: torch.device) -> tuple[list[float], dict[str, Tensor], int]:
    """From what the drive has: losses, parameters, and how many chunks lie on it."""
    model = made()
    ids = torch.randint(1000, (2, 64), generator=torch.Generator().manual_seed(0)).to(device)

    def loss(model: torch.nn.Module) -> Tensor:
        return model(ids, targets=ids) / ids.numel()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    given = {"sample": lambda: loss, "device": device.type, "host": "130MiB", "disk": disk}
    gemini, losses = wrap(model, optimizer, "200MiB", **given), []
    try:
        first, _ = gemini.resume()
        for step in range(first, last):
            value = loss(model)
            with gemini.last_backward():
                value.backward()
            optimizer.step()
            optimizer.zero_grad()
            gemini.commit(step + 1)
            losses.append(float(value.detach()))
        assert gemini.parallel.disk is not None
        return losses, gemini.state_dict(), len(gemini.parallel.disk.away)
    finally:
        gemini.close()


def test_a_part_on_a_drive_is_gone_on_with(device: torch.device, tmp_path: Path) -> None:
    """What lives on the device, on the host and on the drive: all is there in the next process, state too."""
    losses, values, _ = trained(None, device)
    accept, accepted = Disk.accept, list[object]()
    with patch.object(Disk, "accept", lambda disk, chunk: accepted.append(chunk) or accept(disk, chunk)):
        before, _, away = gone_on(tmp_path, 2, device)
    assert away > 0
    assert accepted  # updated beside the backward
    after, ours, _ = gone_on(tmp_path, STEPS, device)
    assert before + after == pytest.approx(losses, rel=1e-5)
    require_alike(ours, values, made())
