"""The pools of ranks that parity tests run on, and the commands of the end-to-end tests: a hang is a failure."""

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support import command
from tests.support.ranks import Pool, RankFailure


def be_there() -> None:
    dist.barrier()


def wait_for_one_that_sleeps() -> None:
    if dist.get_rank() == 1:
        sleep_on()
    dist.barrier()


def sleep_on() -> None:
    time.sleep(600)


def test_a_hang_ends_with_the_stack_of_every_rank() -> None:
    pool = Pool(2)
    pool.run(be_there)
    pool.deadline_s = 3.0
    with pytest.raises(RankFailure) as failure:
        pool.run(wait_for_one_that_sleeps)
    first, second = str(failure.value).split("rank 1 of 2")
    assert "in barrier" in first
    assert "in wait_for_one_that_sleeps" in first
    assert "in sleep_on" in second


PROGRAM = """
import pathlib, subprocess, sys, time
def asleep():
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(600)
def waiting():
    subprocess.run([sys.executable, __file__, sys.argv[1], "child"])
    time.sleep(600)  # its child is ended first
asleep() if "child" in sys.argv else waiting()
"""


def test_a_command_that_hangs_ends_with_its_stack(tmp_path: Path) -> None:
    """Its own, and those of the processes that it started."""
    (tmp_path / "program.py").write_text(PROGRAM)
    process = command.start(tmp_path / "program.py", tmp_path / "asleep")
    while not (tmp_path / "asleep").exists():
        time.sleep(0.05)
    with pytest.raises(command.Hang, match="too long") as hang:
        command.hang(process, "too long")
    assert "in asleep" in str(hang.value)
    assert "in waiting" in str(hang.value)
    assert process.returncode
