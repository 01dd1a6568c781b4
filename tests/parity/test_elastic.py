"""Replicas that are killed, stopped and join: losses are those of a run that nobody disturbs, each row is seen once."""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore

from core.checkpoint import CheckpointConfig, Checkpointer, read_full
from core.kernels.blockwise import in_8_bits
from core.mesh import MeshConfig
from core.optim.build import OPTIMIZERS, OptimConfig
from core.optim.schedule import ScheduleConfig
from core.precision import LossScale, LossScaleConfig
from core.train import TrainConfig
from core.train.elastic import Group, shares
from tests.support.elastic import (
    ROWS,
    USUAL,
    Fuse,
    Task,
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
    wait_for_members,
    wait_for_step,
)
from tests.support.small import Small

LIMIT_S = 10.0
"""from a kill to the next step, where nothing else runs"""
START_S = 120.0
"""after which what is waited for does not come"""


class Replicas:
    """Those of one run; none outlives the test."""

    def __init__(self, given: TrainConfig, folder: Path, pause_s: float, task: Task = USUAL):
        self.given, self.folder, self.pause, self.task = given, folder, pause(pause_s), task
        self.all: list[BaseProcess] = []

    @property
    def alive(self) -> list[BaseProcess]:
        return [process for process in self.all if process.is_alive()]

    def start(self, number: int = 1, fuse: Fuse | None = None) -> None:
        for _ in range(number):
            said_to = self.folder / f"said-{len(self.all)}"
            self.all.append(replica(self.given, said_to, self.pause, self.task, fuse))

    def step(self) -> int:
        found = rows(self.given.out)
        return found[-1]["step"] if found else 0

    def wait_for_step(self, step: int, limit_s: float = START_S) -> float:
        return wait_for_step(self.given.out, step, limit_s, self.all)

    def wait_for_members(self, number: int) -> None:
        wait_for_members(self.given.out, number, START_S)

    def wait_for_checkpoint(self, step: int) -> None:
        begin = time.monotonic()
        while not (self.given.out / "checkpoints" / f"step-{step:08d}").is_dir():
            assert time.monotonic() - begin < START_S, step
            time.sleep(0.02)

    def wait_for(self, member: int) -> None:
        """Until that one has rows."""
        begin = time.monotonic()
        while not (found := rows(self.given.out)) or str(member) not in found[-1]["rows"]:
            assert time.monotonic() - begin < START_S
            time.sleep(0.02)

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


def undisturbed(tmp_path: Path, steps: int, task: Task, **options: Any) -> list[float]:
    out = tmp_path / "undisturbed"
    process = fork.Process(target=lambda: train(config(out, None, steps, **options), task=task))
    process.start()
    process.join()
    return [row["loss"] for row in rows(out)]


def check(tmp_path: Path, out: Path, steps: int, parameters: bool = True, task: Task = USUAL, **options: Any) -> None:
    """All steps are there, once, with every row, and as if nothing had happened."""
    found = rows(out)
    assert [row["step"] for row in found] == list(range(1, steps + 1))
    for row in found:
        assert dealt_out(row) == list(range(ROWS)), row
    torch.testing.assert_close(
        torch.tensor([row["loss"] for row in found]).double(),
        torch.tensor(undisturbed(tmp_path, steps, task, **options)).double(),
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


def test_one_dies_while_it_gives_its_state_and_another_while_it_takes_it(tmp_path: Path, kept: TCPStore) -> None:
    run = Replicas(config(tmp_path / "run", kept.port, 80), tmp_path, 0.05)
    giver, taker = Fuse([(Group, "from_first")]), Fuse([(Group, "from_first")])
    try:
        run.start(fuse=giver)
        run.wait_for_step(1)
        run.start()
        run.wait_for(1)
        giver.light(4)
        run.start()
        run.wait_for(2)
        assert run.all[0].exitcode == -signal.SIGKILL
        taker.light(4)
        run.start(fuse=taker)
        run.all[3].join(START_S)
        run.wait_for_step(run.step() + 2)
        assert run.end() == [-signal.SIGKILL, 0, 0, -signal.SIGKILL]
    finally:
        run.kill()
    check(tmp_path, run.given.out, run.given.steps)
    assert all("3" not in row["rows"] for row in rows(run.given.out))


class Wide(Small):
    """Small, with a matrix that is large enough for a state of 8 bits."""

    def __init__(self, dropout: float):
        super().__init__(dropout)
        wide = nn.Linear(64, 64)
        assert in_8_bits(tuple(wide.weight.shape))
        self.head = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), wide, nn.Tanh(), nn.Linear(64, 1))


WIDE = Task(make=Wide, average=True)
OTHERS = [name for name, spec in sorted(OPTIMIZERS.items()) if not spec.looks and name != "adamw8bit"]


def hand_over(tmp_path: Path, kept: TCPStore, steps: int, **options: Any) -> Path:
    """A run that one replica begins and another goes on with: all that it knows is what it was given."""
    run = Replicas(config(tmp_path / "run", kept.port, steps, **options), tmp_path, 0.05, WIDE)
    try:
        run.start()
        run.wait_for_step(12)
        run.start()
        run.wait_for(1)
        run.all[0].kill()
        assert run.end() == [-signal.SIGKILL, 0]
    finally:
        run.kill()
    return run.given.out


@pytest.mark.parametrize("name", ["adamw8bit", *(pytest.param(name, marks=pytest.mark.soak) for name in OTHERS)])
def test_the_state_of_any_optimizer_and_an_average_go_on(name: str, tmp_path: Path, kept: TCPStore) -> None:
    optim = OptimConfig(name, lr=1e-2, schedule=ScheduleConfig(warmup_steps=2))
    out = hand_over(tmp_path, kept, 40, optim=optim)
    assert any(key.startswith("average/") for key in read_full(out / "checkpoints"))
    check(tmp_path, out, 40, task=WIDE, optim=optim)


def test_the_loss_scale_goes_on(tmp_path: Path, kept: TCPStore) -> None:
    """Each row has the scale and the skipped steps that follow from those of the row before."""
    scale = LossScaleConfig(initial=2.0**24, growth_interval=4)
    found = rows(hand_over(tmp_path, kept, 40, precision="fp16", loss_scale=scale))
    expected = LossScale("fp16", scale)
    for step, row in enumerate(found, start=1):
        assert row["step"] == step
        expected.update(row["skipped_steps"] == expected.skipped_steps)
        assert (row["loss_scale"], row["skipped_steps"]) == (expected.factor, expected.skipped_steps), row
    (first,) = {row["skipped_steps"] for row in found if row["step"] == 12}
    assert 2 < first < found[-1]["skipped_steps"] < len(found) / 2


def within_replica(form: str) -> dict[str, Any]:
    """The options of a replica of two ranks."""
    found: dict[str, Any] = {"tp": {"mesh": MeshConfig(tp=2)}, "pp": {"mesh": MeshConfig(pp=2)}}
    found |= {"zero1": {"zero": 1}, "zero3": {"zero": 3}}
    return found[form] | {"microbatch": None if form == "pp" else 2}


@pytest.mark.parametrize("form", ["tp", "pp", "zero3"])
def test_a_rank_of_several_takes_its_replica_along(form: str, tmp_path: Path, kept: TCPStore) -> None:
    """Within a replica lie tensor parallelism, stages or ZeRO's shards, of which the others have copies."""
    given, all_ranks, slow = config(tmp_path / "run", kept.port, 80, 1, **within_replica(form)), [], pause(0.15)
    try:
        for number in range(2):
            all_ranks += replica_of_ranks(given, tmp_path / f"said-{number}", 2, slow)
        wait_for_members(given.out, 2, START_S)
        all_ranks[1].kill()
        wait_for_step(given.out, rows(given.out)[-1]["step"] + 2, START_S)
        all_ranks += replica_of_ranks(given, tmp_path / "said-2", 2, slow)
        wait_for_members(given.out, 2, START_S)
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
@pytest.mark.parametrize("form", ["alone", "tp", "pp", "zero1", "zero3"])
def test_twenty_kills_at_any_message(form: str, tmp_path: Path, kept: TCPStore) -> None:
    """200 steps of three replicas; a rank dies at a message that is drawn, of its replica's ranks, between replicas or
    of a generation's setup, most often while another replica joins."""
    steps, draw, slow, seconds = 200, random.Random(form), pause(0.01), []
    num_ranks = 1 if form == "alone" else 2
    given = config(tmp_path / "run", kept.port, steps, **({} if form == "alone" else within_replica(form)))
    begun: list[tuple[list[BaseProcess], list[Fuse]]] = []

    def begin() -> None:
        fuses = [Fuse() for _ in range(num_ranks)]
        begun.append((replica_of_ranks(given, tmp_path / f"said-{len(begun)}", num_ranks, slow, fuses), fuses))

    def alive() -> list[tuple[list[BaseProcess], list[Fuse]]]:
        return [each for each in begun if all(process.is_alive() for process in each[0])]

    def step() -> int:
        found = rows(given.out)
        return found[-1]["step"] if found else 0

    def have_ended(ranks: list[BaseProcess]) -> bool:
        return not any(process.is_alive() for process in ranks)

    def go_on(goal: int) -> bool:
        return step() >= goal and rows(given.out)[-1]["replicas"] >= 2  # one of them may die

    def wait(is_there: Callable[[], bool], at_most: int) -> None:
        """Steps behind `at_most` take long: however long others take to start, the run does not end meanwhile."""
        end = time.monotonic() + START_S
        while not is_there():
            slow.value = 0.01 if step() < at_most else 1.0
            assert time.monotonic() < end, f"what is waited for has not come in {START_S} s; step {step()}"
            time.sleep(0.02)
        slow.value = 0.01

    try:
        for _ in range(3):
            begin()
        wait_for_members(given.out, 3, START_S)
        for kill in range(1, 21):
            if draw.random() < 0.7:
                begin()
            ranks, fuses = draw.choice(alive())
            fuses[draw.randrange(num_ranks)].light(draw.randint(1, 30))
            wait(partial(have_ended, ranks), 9 * kill)
            seconds.append(wait_for_step(given.out, step() + 1, START_S))
            while len(alive()) < 3:
                begin()
            wait(partial(go_on, step() + 2), 9 * kill)
        assert step() < steps, "all kills fell into the run"
        slow.value = 0
        for ranks, _ in alive():
            for process in ranks:
                process.join(START_S)
                assert process.exitcode == 0
    finally:
        for ranks, _ in begun:
            for process in ranks:
                process.kill()
    print(f"20 kills; seconds to the next step: at most {max(seconds):.2f}")
    assert max(seconds) < LIMIT_S
    check(tmp_path, given.out, steps, parameters=form != "pp")


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
    run.wait_for_checkpoint(step)
    assert run.step() == step
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
def test_another_run_or_version_in_the_store_is_refused(
    run: Replicas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.start(2)
    run.wait_for_step(2)
    first = run.given
    for changed, torch_version, words in (
        (config(tmp_path / "other", _port(first), first.steps, 2, 3.0), torch.__version__, "in use by the run in"),
        (config(first.out, _port(first), first.steps + 1, 2, 3.0), torch.__version__, "configured otherwise"),
        (first, type(torch.__version__)("2.10.0"), "this replica has torch 2.10.0"),
    ):
        monkeypatch.setattr(torch, "__version__", torch_version)
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


def test_who_comes_behind_the_last_step_finds_nothing_to_do(tmp_path: Path, kept: TCPStore) -> None:
    """With --resume; without it the folder's run is not written over."""
    given = config(tmp_path / "run", kept.port, 3)
    replica(given, tmp_path / "said").join(START_S)
    ended = (given.out / "summary.json").read_bytes()
    for resume, code, words in (
        ("auto", 0, f"nothing to do: {given.out} is at step 3, and this run ends at 3"),
        (None, 2, "already holds a run (step 3); add --resume to continue it"),
    ):
        late = replace(given, resume=resume, elastic=replace(given.elastic, lost_after=1.0))
        process = replica(late, tmp_path / f"said-{resume}")
        process.join(START_S)
        assert process.exitcode == code, said(tmp_path / f"said-{resume}")
        assert words in said(tmp_path / f"said-{resume}")
        assert (given.out / "summary.json").read_bytes() == ended


def test_a_run_whose_end_was_not_told_is_ended_by_who_comes_next(tmp_path: Path, kept: TCPStore) -> None:
    """All replicas were lost between the last checkpoint and the summary, which is that of an earlier stop."""
    given = config(tmp_path / "run", kept.port, 3)
    replica(given, tmp_path / "said").join(START_S)
    summary = given.out / "summary.json"
    ended = json.loads(summary.read_text())
    summary.write_text(json.dumps(ended | {"step": 2, "status": "stopped"}))
    late = replace(given, resume="auto", elastic=replace(given.elastic, lost_after=1.0))
    process = replica(late, tmp_path / "said-late")
    process.join(START_S)
    assert process.exitcode == 0, said(tmp_path / "said-late")
    found = json.loads(summary.read_text())
    assert (found["step"], found["status"], found["loss"]) == (3, "complete", ended["loss"])


def test_all_that_stop_where_a_checkpoint_is_due_tell_of_it(tmp_path: Path, kept: TCPStore) -> None:
    """As they do elsewhere: by the summary, which is how the launcher knows that a stopped run has saved."""
    run = Replicas(config(tmp_path / "run", kept.port, 80, checkpoint=CheckpointConfig(every=1)), tmp_path, 0.15)
    try:
        run.start(2)
        run.wait_for_members(2)
        for process in run.alive:
            process.terminate()
        assert run.end() == [0, 0]
    finally:
        run.kill()
    step, found = run.step(), json.loads((run.given.out / "summary.json").read_text())
    assert step < run.given.steps
    assert (found["step"], found["status"]) == (step, "stopped")
    assert (run.given.out / "checkpoints" / f"step-{step:08d}").is_dir()


class NeverWritten(Fuse):
    """A replica whose checkpoints do not come to an end, as on a drive that hangs."""

    def lay(self) -> None:
        Checkpointer._write = lambda self, save: time.sleep(START_S)


def test_a_checkpoint_that_is_lost_with_its_writer_is_written_by_who_is_left(tmp_path: Path, kept: TCPStore) -> None:
    given = config(tmp_path / "run", kept.port, 80, 2, checkpoint=CheckpointConfig(every=4))
    run = Replicas(given, tmp_path, 0.05)
    try:
        run.start(fuse=NeverWritten())
        run.wait_to_say("of at least 2 replicas")
        run.start()
        run.wait_for_step(8)  # for whose checkpoint the leader waits until that of step 4 is written
        run.all[0].kill()
        run.wait_to_say("saves and waits for 1 more")
        run.wait_for_checkpoint(8)
        run.start()
        assert run.end() == [-signal.SIGKILL, 0, 0]
    finally:
        run.kill()
    check(tmp_path, run.given.out, run.given.steps)
