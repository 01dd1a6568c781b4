"""The training commands as a user runs them: on two ranks, stopped, resumed elsewhere; drawing with what they leave."""

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file

from apps.diffusion.__main__ import APP
from apps.diffusion.pipeline import save_pipeline
from tests.support.command import losses, run, summary
from tests.support.diffusion_training import tiny_pipeline, write_pictures

UNET = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """weights, subject, class"""
    folder = tmp_path_factory.mktemp("diffusion")
    save_pipeline(tiny_pipeline(shallow=True), folder / "weights")
    write_pictures(folder / "subject", 3, captions=False)
    write_pictures(folder / "class", 4, captions=False)
    return folder


def diffusion(*arguments: object) -> None:
    done = run("-m", "apps.diffusion", *arguments)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"


def here(*arguments: object) -> None:
    """Run it in this process: what is compared with, or is a command of its own in test_diffusion_sample.py."""
    assert APP.dispatch([str(word) for word in arguments]) == 0


def dreambooth(folder: Path, out: Path, *options: object, command: Callable[..., None] = diffusion) -> Path:
    given = ("--model", folder / "weights", "--instance-dir", folder / "subject", "--device", "cpu", "--out", out)
    command("dreambooth", *given, "--instance-prompt", "a photo of sks dog", "--log.no-tensorboard", *options)
    return out


def test_a_subject_is_learned_on_any_ranks_alike(folder: Path, tmp_path: Path) -> None:
    """Drawn class images, the text encoder too, fp64: two ranks with sharded weights, then one in a given memory."""
    options = ("--steps", 3, "--precision", "fp64", "--train-text-encoder", "--class-prompt", "a dog", "--average", 0.5)
    options += ("--class-dir", tmp_path / "class", "--num-class-images", 2, "--data.global-batch", 2)
    options += ("--optim.lr", 1e-3, "--data.resolution", 16, "--noise.offset", 0.1)
    moving = dreambooth(folder, tmp_path / "moving", *options, "--nproc", 2, "--zero", 3, "--stop-after", 2)
    assert len(list((tmp_path / "class").iterdir())) == 2
    assert not (moving / UNET).exists()
    dreambooth(folder, moving, *options, "--resume", "--gemini.budget", "1.4MB")
    assert 0 < summary(moving)["device_peak_bytes"] <= 1_400_000
    one = dreambooth(folder, tmp_path / "one", *options, command=here)
    assert losses(moving) == pytest.approx(losses(one), rel=1e-9)
    found, wanted, start = (load_file(path / UNET) for path in (moving, one, folder / "weights"))
    for name, value in wanted.items():
        assert (found[name] - value).abs().max() <= 1e-7, name
    assert any((wanted[name] - start[name]).abs().max() > 1e-4 for name in wanted)


def test_a_lora_is_learned_and_drawn_with(folder: Path, tmp_path: Path) -> None:
    options = ("--method", "lora", "--recipe", "lora_4gb", "--steps", 2, "--optim.lr", 0.1, "--lora.targets", "all")
    out = dreambooth(folder, tmp_path / "lora", *options, "--validation.prompts", "a dog", "--validation.num-images", 1)
    assert Image.open(out / "validation" / "step-00000002.png").size == (16, 16)
    lora = out / "pytorch_lora_weights.safetensors"
    sampled = ("sample", "--model", folder / "weights", "--prompt", "a dog", "--steps", 2)
    here(*sampled, "--out", tmp_path / "plain")
    here(*sampled, "--out", tmp_path / "adapted", "--lora", lora)
    plain, adapted = (Image.open(tmp_path / name / "00000-0.png").tobytes() for name in ("plain", "adapted"))
    assert plain != adapted
