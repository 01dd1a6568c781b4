"""The pools of ranks that parity tests run on, and the commands of the end-to-end tests: a hang is a failure."""

import os
import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support import command
from tests.support.ranks import Pool, Pools, RankFailure


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


def fail_on_the_last() -> int:
    if dist.get_rank() == 1:
        raise ArithmeticError("on the last")
    return dist.get_rank()


def test_a_failure_has_the_traceback_of_its_rank_and_the_next_case_fresh_ranks(ranks: Pools) -> None:
    before = ranks(2).run(os.getpid)
    with pytest.raises(
        RankFailure, match=r"^rank 1 of 2:\n(.*\n)+.*in fail_on_the_last\n(.*\n)*ArithmeticError: on the"
    ):
        ranks(2).run(fail_on_the_last)
    assert not set(before) & set(ranks(2).run(os.getpid))


def leave() -> None:
    os._exit(3)


def test_a_rank_that_ends_is_a_failure(ranks: Pools) -> None:
    with pytest.raises(RankFailure, match="rank 0 of 2:\nthe process died"):
        ranks(2).run(leave)
    assert len(ranks(2).run(os.getpid)) == 2


def state() -> list[object]:
    seeds = random.random(), float(torch.rand(()))
    return [
        dict(os.environ),
        os.getcwd(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        seeds,
    ]


def change_everything() -> None:
    os.environ["LEFT"] = "behind"
    del os.environ["PATH"]
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    random.seed(dist.get_rank())
    torch.manual_seed(5)


def test_a_case_leaves_nothing_of_its_own_behind(ranks: Pools) -> None:
    before, pids = ranks(2).run(state), ranks(2).run(os.getpid)
    ranks(2).run(change_everything)
    assert ranks(2).run(state) == before
    assert ranks(2).run(os.getpid) == pids


def destroy() -> None:
    dist.destroy_process_group()


def test_a_case_that_ends_the_process_group_is_a_failure(ranks: Pools) -> None:
    with pytest.raises(RankFailure, match="without a process group"):
        ranks(2).run(destroy)


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


def test_commands_find_what_they_import(tmp_path: Path) -> None:
    """What cannot be imported beforehand is imported by each command, which nobody would see."""
    script = tmp_path / "script.py"
    script.write_text("import sys; print('tests.support.preloaded' in sys.modules, 'diffusers' in sys.modules)")
    assert command.run(script).stdout == "True True\n"
