"""Launchers that are killed by -9 at any moment of a run: while ranks start, train and save."""

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from core.checkpoint import complete_steps, read_full
from tests.support.command import llm, losses, start
from tests.support.outliving import alive

NUM_KILLS = 40
NUM_EARLY = 10  # while ranks start
NUM_OVERLAPPING = 4
LIMIT_S = 5.0
LATEST_S = 2.0  # after the first checkpoint: several steps and saves
START_S = 120.0


def kill_behind(command: Sequence[object], out: Path, draw: random.Random, *, saves: bool = True) -> None:
    """Start a run, and kill it within seconds of its next checkpoint, or, unless it `saves`, of its start."""
    before, begin = complete_steps(out / "checkpoints"), time.monotonic()
    launcher = start("-m", "apps.llm", *command)
    while saves and complete_steps(out / "checkpoints") == before:
        assert launcher.poll() is None
        assert time.monotonic() - begin < START_S
        time.sleep(0.05)
    time.sleep(draw.uniform(0, LATEST_S))
    launcher.kill()
    launcher.wait()
    time.sleep(LIMIT_S)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_rank_outlives_its_launcher(tmp_path: Path) -> None:
    """The later kills count from the first checkpoint, so that they fall in training and saving on any machine."""
    options = ("pretrain", "--recipe", "debug", "--no-hf", "--data.cache", tmp_path / "corpora")
    llm(*options, "--steps", 1, "--out", tmp_path / "first")
    draw, survivors, saved = random.Random(0), [], 0
    for number in range(NUM_KILLS):
        out = tmp_path / f"run-{number}"
        many = ("--nproc", 2, "--steps", 100_000, "--checkpoint.every", 1, "--checkpoint.keep", 2, "--out", out)
        kill_behind([*options, *many], out, draw, saves=number >= NUM_EARLY)
        survivors += alive(str(out))
        if complete_steps(out / "checkpoints"):
            saved += 1
            assert read_full(out / "checkpoints"), "what was saved last is whole"
    print(f"{NUM_KILLS} kills, {saved} of them after a checkpoint, {len(survivors)} ranks alive {LIMIT_S} s later")
    assert saved >= NUM_KILLS - NUM_EARLY
    assert not survivors


STAGES = ("--mesh.pp", 2, "--pipeline.microbatches", 2, "--pipeline.schedule")
SERVED = ("--local.async", "parameter_server", "--local.staleness", 0)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "form",
    [(*STAGES, "2bw"), (*STAGES, "pipedream"), (*STAGES, "pipedream_sync"), SERVED],
    ids=["2bw", "pipedream", "pipedream_sync", "parameter_server"],
)
def test_what_overlaps_goes_on_to_the_bit(tmp_path: Path, form: tuple, request: pytest.FixtureRequest) -> None:
    """Killed again and again, at moments drawn at random, it learns what one does that is left alone."""
    out, straight, draw = tmp_path / "run", tmp_path / "straight", random.Random(request.node.callspec.id)
    options = ("pretrain", "--recipe", "debug", "--model.num-layers", 4, "--data.global-batch", 4, "--no-hf")
    options = (*options, "--steps", 100_000, "--nproc", 2, *form, "--data.cache", tmp_path / "corpora")
    for number in range(NUM_OVERLAPPING):
        many = ("--checkpoint.every", 2, "--out", out, *("--resume",) * (number > 0))
        kill_behind([*options, *many], out, draw)
    steps = max(complete_steps(out / "checkpoints")) + 3
    for folder, more in ((out, ("--resume",)), (straight, ("--checkpoint.every", 0))):
        llm(*options, *more, "--stop-after", steps, "--out", folder)
    found, expected = (read_full(folder / "checkpoints" / f"step-{steps:08d}") for folder in (out, straight))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert losses(out) == losses(straight)
