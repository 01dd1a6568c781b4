"""`--gemini.budget` of the commands: refused with the smallest that works, which then works, and what a run says."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from apps.diffusion.__main__ import APP as DIFFUSION
from apps.diffusion.pipeline import save_pipeline
from apps.fold.__main__ import APP as FOLD
from apps.fold.training.config import _OWN_MODELS
from apps.llm.__main__ import APP as LLM
from core.config import run_command
from core.gemini.tier import parse_bytes
from tests.support.command import summary
from tests.support.diffusion_training import tiny_pipeline, write_pictures
from tests.support.fold import one_block
from tests.support.gemini import traced_once

COMMANDS = {
    "llm pretrain": (LLM, "pretrain", "--recipe", "debug", "--model.num-layers", 2, "--data.global-batch", 4),
    "diffusion finetune": (DIFFUSION, "finetune", "--data.global-batch", 2),
    "diffusion pretrain": (DIFFUSION, "pretrain", "--data.global-batch", 2, "--precision", "fp32"),
    "fold train": (
        *(FOLD, "train", "--recipe", "debug"),
        *["--data.crop", "16", "--num-recycles", "0", "--max-msa", "2", "--max-extra-msa", "2"],
    ),
}


@pytest.fixture(autouse=True)
def a_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_OWN_MODELS, "debug", one_block)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple]:
    """app -> the options that name its data."""
    folder = tmp_path_factory.mktemp("given")
    save_pipeline(tiny_pipeline(shallow=True), folder / "weights")
    write_pictures(folder / "pictures", 4)
    pictures = ("--model", folder / "weights", "--data.images", folder / "pictures")
    cache = ("--data.cache", folder / "cache")
    return {"llm": cache, "diffusion": pictures, "fold": cache}


@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=pytest.mark.soak) if name == "diffusion pretrain" else name for name in COMMANDS],
)
def test_a_budget_is_all_that_is_said(command: str, given, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app, *words = COMMANDS[command]
    out, drawing = tmp_path / "run", tmp_path / "memory.png"
    words += [*given[command.split()[0]], "--out", out, "--steps", 2, "--device", "cpu", "--log.no-tensorboard"]

    def run(*options: object) -> tuple[int, str, str]:
        code = run_command(app.dispatch, [str(word) for word in (*words, *options)])
        said = capsys.readouterr()
        return code, said.out, said.err

    with traced_once():
        _check(run, out, drawing)


def _check(run: Callable[..., tuple[int, str, str]], out: Path, drawing: Path) -> None:
    code, _, err = run("--gemini.budget", "4KiB")
    assert code == 2
    refusal = err.strip().splitlines()[-1]
    assert refusal.startswith("error: gemini: a budget of 0.004 MiB on the device is too small")
    found = re.search(r"give at least ([\d.]+ \w+)", refusal)
    assert found, refusal
    assert not drawing.exists()

    least = found[1]
    code, said, err = run("--gemini.budget", least, "--gemini.figure", drawing)
    assert code == 0, err
    plan = re.search(r"gemini: (\d+) chunks live on the device, (\d+) on the host .* bound by", said)
    assert plan, said
    assert int(plan[2]) > 0
    assert said.count("gemini: ") == 1
    figures = summary(out)
    assert figures["status"] == "complete"
    assert 0 < figures["device_peak_bytes"] <= figures["gemini_budget_bytes"] == parse_bytes(least)
    assert figures["gemini_moved_bytes"] > 0
    assert drawing.read_bytes().startswith(b"\x89PNG")
