"""A rank that dies brings the job down within 10 s, its own traceback first."""

from pathlib import Path

import pytest

from core.watch import GRACE_S, INTERVAL_S
from tests.support.command import run

LIMIT_S = 10.0
BUSY = 4.0
"""times as long it may take on a machine that other tests load; without the watch it takes half an hour"""


def test_the_watch_leaves_time() -> None:
    """Of the 10 s it takes less than half by design; the rest is for machines that are slow or busy."""
    assert INTERVAL_S + GRACE_S <= LIMIT_S / 2


@pytest.mark.parametrize("mode", ["raise", "kill", "far"])
def test_the_others_end_with_it(tmp_path: Path, mode: str) -> None:
    """From the failure to the last sign of life of the other rank, which hears no signal."""
    done = run("-m", "tests.support.failing", mode, tmp_path)
    assert done.returncode == 1, done.stderr
    took_s = float((tmp_path / "alive_at").read_text()) - float((tmp_path / "failed_at").read_text())
    assert took_s < BUSY * LIMIT_S, f"{took_s:.1f} s\n{done.stderr}"
    if mode == "kill":
        assert "rank 0 ends, because rank 1 failed" in done.stderr
        return
    own, other = done.stderr.find("ArithmeticError: a mistake of rank 1"), done.stderr.find("rank 0 ends")
    assert 0 <= done.stderr.find("rank 1 failed:\nTraceback") < own < other
    assert done.stderr.count("ArithmeticError: a mistake of rank 1") == 1
