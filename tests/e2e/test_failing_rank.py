"""A rank that dies brings the job down within 10 s, its own traceback first."""

import sys
import time
from pathlib import Path

import pytest

from core.watch import GRACE_S, INTERVAL_S
from tests.support.command import hang, run, start
from tests.support.outliving import alive

LIMIT_S = 10.0
BUSY = 4.0
"""times as long it may take on a machine that other tests load; without the watch it takes half an hour"""


def test_the_watch_leaves_time() -> None:
    """Of the 10 s it takes less than half by design; the rest is for machines that are slow or busy."""
    assert INTERVAL_S + GRACE_S <= LIMIT_S / 2


@pytest.mark.parametrize("mode", ["raise", "kill", "far"])
def test_the_others_end_with_it(tmp_path: Path, mode: str) -> None:
    """From the failure to the last sign of life of the other rank, which hears no signal."""
    done = run("-m", "tests.support.failing", mode, tmp_path, "--ranks", 2)
    assert done.returncode == 1, done.stderr
    took_s = float((tmp_path / "alive_at").read_text()) - float((tmp_path / "failed_at").read_text())
    assert took_s < BUSY * LIMIT_S, f"{took_s:.1f} s\n{done.stderr}"
    if mode == "kill":
        assert "rank 0 ends, because rank 1 failed" in done.stderr
        return
    own, other = done.stderr.find("ArithmeticError: a mistake of rank 1"), done.stderr.find("rank 0 ends")
    assert 0 <= done.stderr.find("rank 1 failed:\nTraceback") < own < other
    assert done.stderr.count("ArithmeticError: a mistake of rank 1") == 1


@pytest.mark.parametrize("mode", ["early", "both"])
def test_what_a_rank_meets_before_there_is_a_group_is_told_once(tmp_path: Path, mode: str) -> None:
    """By whichever rank it is, since the launcher ends the others before they come to it."""
    done = run("-m", "tests.support.failing", mode, tmp_path, "--ranks", 2)
    assert done.returncode == 2, done.stderr
    said = [line for line in done.stderr.splitlines() if "corpora" in line]
    assert said == [f"error: {tmp_path}/corpora: No space left on device; free space, or choose another path"]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("mode", "code"), [("worker", 2), pytest.param("owner", 1, marks=pytest.mark.soak)])
def test_workers_that_do_not_wait_end_with_one_that_fails(tmp_path: Path, mode: str, code: int) -> None:
    """The one that waits for its pushes, too, and the thread of each that serves the others: within a minute.

    Where the machine is busy the launcher ends a rank before that has said why it ends.
    """
    done = run("-m", "tests.support.failing", mode, tmp_path, "--ranks", 2, timeout_s=60)
    assert done.returncode == code, done.stderr
    line = "error: a mistake of rank 1" if mode == "worker" else "ArithmeticError: a mistake of rank 1"
    assert done.stderr.splitlines().count(line) == 1, done.stderr
    assert ("Traceback" in done.stderr) == (mode == "owner")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """They hear nothing of it, ignore SIGTERM, and are gone within 5 s. More of it: tests/soak/test_kills.py."""
    launcher = start("-m", "tests.support.outliving", tmp_path)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.iterdir())) < 2:
        assert time.monotonic() < deadline, hang(launcher, "its ranks did not start")
        time.sleep(0.05)
    assert len(alive(str(tmp_path))) >= 3
    launcher.kill()
    launcher.wait()
    time.sleep(5)
    assert not alive(str(tmp_path))
