"""A run whose step does not end says where every rank stands, and ends; what takes long beside its steps is left alone.

Python prints nothing of this by itself: without the watch each of these runs would wait for ten minutes and more.
"""

import re
from pathlib import Path

import pytest

from tests.support.command import run, summary
from tests.support.hanging import BAD_STEP, HANG_AFTER_S

LIMIT_S = 120.0
IN_ALL_REDUCE = r"rank 0 waits in all_reduce of \[[\d, ]+\] over ranks 0, 1: \S+:\d+ in \w+"


def hangs(*arguments: object) -> str:
    """What is printed by a run that hangs; it ends with exit code 1 and one line that says so."""
    done = run(*arguments, timeout_s=LIMIT_S)
    assert done.returncode == 1, done.stdout + done.stderr
    ends = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(ends) == 1, done.stderr
    assert f"(--hang-after {HANG_AFTER_S:g}), and no rank goes on, so the run ends" in ends[0]
    assert "failed:\nTraceback" not in done.stderr, "a rank that is ended has not failed by itself"
    return done.stderr


def test_a_rank_that_waits_for_a_message_that_nobody_sends(tmp_path: Path) -> None:
    said = hangs("-m", "tests.support.hanging", "receive", tmp_path, "--ranks", 2)
    assert f"error: step {BAD_STEP} has not ended" in said
    assert re.search(IN_ALL_REDUCE, said), said
    assert re.search(r"rank 1 waits in recv: \S+hanging.py:\d+ in receive", said), said
    first, second = said.split("rank 1 stands at")
    assert "in train_step" in first
    assert "in receive\n" in second


def test_a_rank_that_sleeps_under_torchrun(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", 2, "-m", "tests.support.hanging", "sleep", tmp_path)
    said = hangs(*torchrun)
    assert re.search(IN_ALL_REDUCE, said), said
    assert re.search(r"rank 1 waits in no collective: \S+hanging.py:\d+ in never_end", said), said


def test_one_rank_that_sleeps_before_its_first_step(tmp_path: Path) -> None:
    said = hangs("-m", "tests.support.hanging", "early", tmp_path)
    assert "error: what comes before the first step has not ended" in said or "error: step 1 has not ended" in said
    assert "rank 0 waits in no collective" in said


def test_evaluations_checkpoints_and_compilers_may_take_long(tmp_path: Path) -> None:
    """Each takes longer than --hang-after, the evaluation on one rank while the other waits in its next step."""
    done = run("-m", "tests.support.hanging", "calm", tmp_path, "--ranks", 2, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path)["step"] == 4


@pytest.mark.soak
def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    """None of its threads answers; torch's launcher gives it half a minute before it is killed."""
    said = hangs("-m", "tests.support.hanging", "stopped", tmp_path, "--ranks", 2)
    assert "rank 1 does not answer" in said
    assert re.search(IN_ALL_REDUCE, said), said


def test_the_command_knows_it(tmp_path: Path) -> None:
    done = run("-m", "apps.llm", "pretrain", "--recipe", "debug", "--hang-after", 0, "--out", tmp_path)
    assert done.returncode == 2
    assert "hang_after=0.0; give seconds" in done.stderr
