"""What drawing and training take of a process on a CPU, beside what the plan says."""

import weakref
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from apps.diffusion import finetune, sample, train
from apps.diffusion.pipeline import save_pipeline
from apps.diffusion.plan import main
from core.runtime import freed_memory_given_back
from tests.support.diffusion_memory import Size, measured
from tests.support.diffusion_training import tiny_pipeline, write_pictures


@pytest.mark.parametrize(
    "size",
    [Size("sample", 128, 3, guided=False), pytest.param(Size("train", 64, 2), marks=pytest.mark.soak)],
    ids=lambda size: size.task,
)
def test_the_process_stays_within_the_plan(size: Size) -> None:
    """In a child that runs 64 px first; tests/soak/test_diffusion_memory.py takes 30 random sizes."""
    found = measured(size)
    assert found.code == 0
    assert found.rise <= found.planned, found
    assert found.planned <= found.allowed, found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    save_pipeline(tiny_pipeline(shallow=True), folder / "weights")
    write_pictures(folder / "pictures", 2)
    return folder


@pytest.mark.parametrize("options", [(), ("--method", "lora"), ("--gemini.budget", "1GB"), ("--average", "0.9")])
def test_what_was_trained_is_gone_when_the_pipeline_is_loaded_again(
    folder: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    trained: list[weakref.ref[torch.nn.Module]] = []
    alive: list[bool] = []

    def build(*given):
        module = denoiser(*given)
        trained.append(weakref.ref(module))
        return module

    def save(config):
        alive.extend(module() is not None for module in trained)
        saved(config)

    denoiser, saved = train.denoiser, train.save
    argv = ["--model", folder / "weights", "--data.images", folder / "pictures", "--data.global-batch", 1, "--steps", 1]
    argv += ["--device", "cpu", "--out", tmp_path / "run", "--log.no-tensorboard", "--data.resolution", 16, *options]
    with patch.object(train, "denoiser", build), patch.object(train, "save", save):
        assert finetune.main([str(word) for word in argv]) == 0
    assert alive == [False]


def test_drawing_gives_freed_memory_back(folder: Path, tmp_path: Path) -> None:
    """On a CPU, to the process's allocator as it was before."""
    argv = ["--model", folder / "weights", "--prompt", "a", "--steps", 1, "--device", "cpu", "--out", tmp_path / "out"]
    with patch("core.runtime.give_back_freed_memory") as gives_back, patch("core.runtime._set_allocator") as before:
        assert sample.main([str(word) for word in argv]) == 0
        held = tiny_pipeline(shallow=True).stored_bytes
        assert [call.args for call in gives_back.call_args_list] == [(held,)]
        assert before.call_count == 1
        with freed_memory_given_back(held, torch.device("cuda")):
            assert gives_back.call_count == before.call_count == 1


def test_the_plan_says_what_a_process_on_a_cpu_takes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(folder / "weights"), "--task", "train"]) == 0
    assert "on a CPU the process takes" in capsys.readouterr().out
