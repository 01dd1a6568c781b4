"""Replicas that are killed, stopped and join: losses are those of a run that nobody disturbs, each row is seen once."""

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from core.checkpoint import read_full
from core.mesh import MeshConfig
from core.train import TrainConfig
from core.train.elastic import shares
from tests.support.elastic import (
    ROWS,
    config,
    dealt_out,
    fork,
    pause,
    replica,
    replica_of_ranks,
    rows,
    said,
    store,
    train,
    wait_for_step,
)

LIMIT_S = 10.0
"""from a kill to the next step, where nothing else runs"""
START_S = 120.0
"""after which what is waited for does not come"""


class Replicas:
    """Those of one run; none outlives the test."""

    def __init__(self, given: TrainConfig, folder: Path, pause_s: float):
        self.given, self.folder, self.pause = given, folder, pause(pause_s)
        self.all: list[BaseProcess] = []

    @property
    def alive(self) -> list[BaseProcess]:
        return [process for process in self.all if process.is_alive()]

    def start(self, number: int = 1) -> None:
        for _ in range(number):
            self.all.append(replica(self.given, self.folder / f"said-{len(self.all)}", self.pause))

    def step(self) -> int:
        found = rows(self.given.out)
        return found[-1]["step"] if found else 0

    def wait_for_step(self, step: int, limit_s: float = START_S) -> float:
        return wait_for_step(self.given.out, step, limit_s, self.all)

    def wait_for_members(self, number: int) -> None:
        wait_for_members(self.given.out, number)

    def wait_to_say(self, words: str, limit_s: float = START_S) -> str:
        """Until one of them says so.  Returns what it has said."""
        begin = time.monotonic()
        while True:
            for path in self.folder.glob("said-*"):
                if words in said(path):
                    return said(path)
            assert time.monotonic() - begin < limit_s, words
            time.sleep(0.02)

    def end(self, limit_s: float = START_S) -> list[int]:
        """Let them run to the end, and wait for all.  Returns their exit codes."""
        self.pause.value = 0
        codes = list[int]()
        for place, process in enumerate(self.all):
            process.join(limit_s)
            assert process.exitcode is not None, f"{place} has not ended: {said(self.folder / f'said-{place}')[-500:]}"
            codes.append(process.exitcode)
        return codes

    def kill(self) -> None:
        for process in self.alive:
            with suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGCONT)
            process.kill()
            process.join()


def wait_for_members(out: Path, number: int) -> None:
    """Until the last step was taken by so many."""
    begin = time.monotonic()
    while not (found := rows(out)) or found[-1]["replicas"] < number:
        assert time.monotonic() - begin < START_S
        time.sleep(0.02)


@pytest.fixture
def kept() -> TCPStore:
    return store()


@pytest.fixture
def run(tmp_path: Path, kept: TCPStore, request: pytest.FixtureRequest) -> Iterator[Replicas]:
    """steps and pause: half a minute, which is what a test's replicas have for what they must see"""
    steps, least, pause_s, lost_after = getattr(request, "param", (80, 2, 0.15, 60.0))
    found = Replicas(config(tmp_path / "run", kept.port, steps, least, lost_after), tmp_path, pause_s)
    yield found
    found.kill()


def undisturbed(tmp_path: Path, steps: int) -> list[float]:
    out = tmp_path / "undisturbed"
    process = fork.Process(target=lambda: train(config(out, None, steps)))
    process.start()
    process.join()
    return [row["loss"] for row in rows(out)]


def check(tmp_path: Path, out: Path, steps: int, parameters: bool = True) -> None:
    """All steps are there, once, with every row, and as if nothing had happened."""
    found = rows(out)
    assert [row["step"] for row in found] == list(range(1, steps + 1))
    for row in found:
        assert dealt_out(row) == list(range(ROWS)), row
    torch.testing.assert_close(
        torch.tensor([row["loss"] for row in found]).double(),
        torch.tensor(undisturbed(tmp_path, steps)).double(),
        rtol=1e-10,
        atol=1e-10,
    )
    if not parameters:
        return
    straight = read_full(tmp_path / "undisturbed" / "checkpoints")
    ended = read_full(out / "checkpoints")
    assert straight.keys() == ended.keys()
    for name, value in straight.items():
        if not name.startswith("buffer/"):  # which counts the microbatches of a replica
            torch.testing.assert_close(ended[name], value, rtol=1e-10, atol=1e-10, msg=name)


def test_units_are_dealt_out_evenly() -> None:
    for units in range(1, 12):
        for replicas in range(1, units + 1):
            found = shares(units, replicas)
            assert [n for each in found for n in each] == list(range(units))
            assert max(map(len, found)) - min(map(len, found)) <= 1


def test_kills_and_joins_change_no_loss(run: Replicas, tmp_path: Path) -> None:
    """The one that leads, one while another joins, two at once."""
    run.start(4)
    run.wait_for_step(3)
    run.wait_for_members(4)
    draw, seconds = random.Random(0), []
    leader = str(rows(run.given.out)[-1]["rows"]).split("'")[1]
    assert leader.isdigit()
    for number in (1, 1, 2):
        run.start(number)
        for process in draw.sample(run.alive[:4], number):
            process.kill()
        begin = time.monotonic()
        run.wait_for_step(run.step() + 2)
        seconds.append(time.monotonic() - begin)
        run.wait_for_members(4)
    codes = run.end()
    assert sorted(set(codes)) == [-signal.SIGKILL, 0]
    print(f"seconds from a kill to the step after the next: {[round(s, 2) for s in seconds]}")
    check(tmp_path, run.given.out, run.given.steps)
    assert rows(run.given.out)[-1]["generation"] >= 4


@pytest.mark.parametrize("form", ["tp", "pp", "zero3"])
def test_a_rank_of_several_takes_its_replica_along(form: str, tmp_path: Path, kept: TCPStore) -> None:
    """Within a replica lie tensor parallelism, stages or ZeRO's shards, of which the others have copies."""
    within = {"tp": {"mesh": MeshConfig(tp=2)}, "pp": {"mesh": MeshConfig(pp=2)}, "zero3": {"zero": 3}}[form]
    within |= {"microbatch": None if form == "pp" else 2}
    given, all_ranks, slow = config(tmp_path / "run", kept.port, 80, 1, **within), [], pause(0.15)
    try:
        for number in range(2):
            all_ranks += replica_of_ranks(given, tmp_path / f"said-{number}", 2, slow)
        wait_for_members(given.out, 2)
        all_ranks[1].kill()
        wait_for_step(given.out, rows(given.out)[-1]["step"] + 2, START_S)
        all_ranks += replica_of_ranks(given, tmp_path / "said-2", 2, slow)
        wait_for_members(given.out, 2)
        slow.value = 0
        for process in all_ranks:
            process.join(START_S)
        assert [process.exitcode for process in all_ranks[2:4]] == [0, 0]
    finally:
        for process in all_ranks:
            process.kill()
    check(tmp_path, given.out, given.steps, parameters=form != "pp")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", [4, 8])
def test_twenty_kills_lose_nothing(number: int, tmp_path: Path, kept: TCPStore) -> None:
    """200 steps; at any moment one is killed, or two are, and others join at the same time."""
    steps, draw, seconds = 200, random.Random(number), []
    run = Replicas(config(tmp_path / "run", kept.port, steps, 2), tmp_path, 0.02)
    try:
        run.start(number)
        run.wait_for_step(3)
        kills = 0
        while kills < 20:
            many = draw.choice([1, 1, 2])
            time.sleep(draw.uniform(0, 0.8))
            if draw.random() < 0.7:
                run.start(many)
            for process in draw.sample(run.alive, min(many, len(run.alive) - 2)):
                process.kill()
                kills += 1
            if len(run.alive) < number:
                run.start(number - len(run.alive))
            begin, step = time.monotonic(), run.step()
            run.wait_for_step(min(step + 1, steps), LIMIT_S)
            seconds.append(time.monotonic() - begin)
        assert run.step() < steps, "all kills fell into the run"
        assert set(run.end(600)) == {-signal.SIGKILL, 0}
        print(f"{kills} kills of {number}; seconds to the next step: at most {max(seconds):.2f}")
    finally:
        run.kill()
    check(tmp_path, run.given.out, steps)


@pytest.mark.parametrize("run", [(80, 2, 0.15, 5.0)], indirect=True)
def test_one_that_only_hangs_is_lost_and_learns_so(run: Replicas, tmp_path: Path) -> None:
    run.start(3)
    run.wait_for_members(3)
    stopped = run.all[1]
    os.kill(stopped.pid or 0, signal.SIGSTOP)
    run.wait_for_step(run.step() + 2)
    os.kill(stopped.pid or 0, signal.SIGCONT)
    assert sorted(run.end()) == [0, 0, 1]
    lines = [line for line in said(tmp_path / "said-1").splitlines() if "error" in line]
    assert len(lines) == 1
    assert "took this replica for lost" in lines[0]
    check(tmp_path, run.given.out, run.given.steps)


def test_too_few_wait_say_for_whom_and_save(run: Replicas, tmp_path: Path) -> None:
    run.start(2)
    run.wait_for_step(3)
    run.all[0].kill()
    line = run.wait_to_say("of at least 2 replicas")
    assert "1 of at least 2 replicas is there; lost: replica" in line
    assert "saves and waits for 1 more at 127.0.0.1" in line
    step = run.step()
    time.sleep(1.0)
    assert run.step() == step
    assert (run.given.out / "checkpoints" / f"step-{step:08d}").is_dir()
    run.start()
    assert sorted(run.end()) == [-signal.SIGKILL, 0, 0]
    check(tmp_path, run.given.out, run.given.steps)


def test_one_that_is_asked_to_stop_leaves_and_all_that_are_stop(run: Replicas, tmp_path: Path) -> None:
    run.start(3)
    run.wait_for_members(3)
    run.all[1].terminate()
    run.wait_for_step(run.step() + 2)
    for process in run.alive:
        process.terminate()
    assert run.end() == [0, 0, 0]
    step = run.step()
    assert step < run.given.steps
    assert (run.given.out / "checkpoints" / f"step-{step:08d}").is_dir()


@pytest.mark.parametrize("run", [(100_000, 2, 0.05, 3.0)], indirect=True)
def test_another_run_in_the_store_is_refused(run: Replicas, tmp_path: Path) -> None:
    run.start(2)
    run.wait_for_step(2)
    first = run.given
    for changed, words in (
        (config(tmp_path / "other", _port(first), first.steps, 2, 3.0), "in use by the run in"),
        (config(first.out, _port(first), first.steps + 1, 2, 3.0), "configured otherwise"),
    ):
        refused = replica(changed, tmp_path / "refused")
        refused.join(START_S)
        assert refused.exitcode == 2
        lines = said(tmp_path / "refused").splitlines()
        assert len(lines) == 1
        assert words in lines[0]
        (tmp_path / "refused").unlink()


def _port(given: TrainConfig) -> int:
    assert given.elastic.store is not None
    return int(given.elastic.store.rpartition(":")[2])
