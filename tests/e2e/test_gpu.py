"""The same commands on a GPU; `make gpu` runs them there."""

from pathlib import Path

import pytest
import torch

from tests.support.command import llm, losses, summary
from tests.support.device import DEVICE

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]


def _pretrain(out: Path, *options: object) -> Path:
    llm("pretrain", "--recipe", "debug", "--steps", 10, "--data.cache", out.parent / "corpora", "--out", out, *options)
    return out


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_gpu_learns_what_the_cpu_learns(tmp_path: Path, zero: int) -> None:
    ours = _pretrain(tmp_path / "gpu", "--precision", "fp64", "--device", DEVICE, "--zero", zero)
    theirs = _pretrain(tmp_path / "cpu", "--precision", "fp64", "--device", "cpu")
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-9)


def test_kernels_learn_what_torch_learns(tmp_path: Path) -> None:
    theirs = _pretrain(tmp_path / "torch", "--device", DEVICE, "--no-shown-kernels")
    ours = _pretrain(tmp_path / "kernels", "--device", DEVICE, "--kernels")
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-4)


@pytest.mark.parametrize(
    "options", [("--precision", "bf16"), ("--precision", "bf16", "--kernels"), ("--precision", "fp16"), ("--compile",)]
)
def test_formats_and_compile(tmp_path: Path, options: tuple) -> None:
    out = _pretrain(tmp_path / "run", "--device", DEVICE, *options)
    assert losses(out)[-1] < 0.8 * losses(out)[0]
    if DEVICE == "cuda":
        assert 0 < summary(out)["device_peak_bytes"] < torch.cuda.get_device_properties(0).total_memory


def test_resume_on_a_gpu_is_exact(tmp_path: Path) -> None:
    whole = _pretrain(tmp_path / "whole", "--device", DEVICE)
    parts = _pretrain(tmp_path / "parts", "--device", DEVICE, "--stop-after", 4)
    _pretrain(parts, "--device", DEVICE, "--resume")
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-6)


OTHERS = {
    "adafactor": 1e-7, "adamw8bit": 1e-3, "came": 1e-7, "galore": 1e-7, "hessian_free": 1e-7, "kfac": 1e-7,
    "lamb": 1e-7, "muon": 1e-7, "shampoo": 1e-7, "soap": 1e-7,
}  # fmt: skip
"""How near losses are, in fp64; a state in 8 bits rounds a number between two of them either way."""


@pytest.mark.parametrize("name", OTHERS)
def test_optimizers_learn_what_they_learn_on_a_cpu(tmp_path: Path, name: str) -> None:
    """Kernels, decompositions and Newton-Schulz of a GPU."""
    options = ("--optim.name", name, "--precision", "fp64", "--steps", 5)
    ours = _pretrain(tmp_path / "gpu", *options, "--device", DEVICE)
    theirs = _pretrain(tmp_path / "cpu", *options, "--device", "cpu")
    assert losses(ours) == pytest.approx(losses(theirs), rel=OTHERS[name])
