"""Launchers that are killed by -9 at any moment of a run: while ranks start, train and save."""

import random
import time
from pathlib import Path

import pytest

from core.checkpoint import complete_steps, read_full
from tests.support.command import llm, start
from tests.support.outliving import alive

NUM_KILLS = 40
NUM_EARLY = 10  # while ranks start
LIMIT_S = 5.0
LATEST_S = 2.0  # after the first checkpoint: several steps and saves
START_S = 120.0


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
        begin = time.monotonic()
        launcher = start("-m", "apps.llm", *options, *many)
        while number >= NUM_EARLY and not complete_steps(out / "checkpoints"):
            assert launcher.poll() is None
            assert time.monotonic() - begin < START_S
            time.sleep(0.05)
        time.sleep(draw.uniform(0, LATEST_S))
        launcher.kill()
        launcher.wait()
        time.sleep(LIMIT_S)
        survivors += alive(str(out))
        if complete_steps(out / "checkpoints"):
            saved += 1
            assert read_full(out / "checkpoints"), "what was saved last is whole"
    print(f"{NUM_KILLS} kills, {saved} of them after a checkpoint, {len(survivors)} ranks alive {LIMIT_S} s later")
    assert saved >= NUM_KILLS - NUM_EARLY
    assert not survivors
