"""Where no replica is left that has the state, memory that outlives ranks has it: at most K steps are repeated."""

import json
import os
import re
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

import core.members
import core.train.buddies
from core.checkpoint import CheckpointConfig
from core.keeper import Keeper
from core.train import TrainConfig
from core.train.config import ElasticConfig
from tests.parity.test_elastic import START_S, Replicas, check
from tests.support.elastic import config, pause, replica, replica_of_ranks, rows, said, store, wait_for_step

EVERY, STEPS, PAUSE_S = 4, 80, 0.1
TAKEN = re.compile(
    r"elastic: no replica is left that has the state; that behind step (\d+) is taken .* and (\d+) steps"
)


@pytest.fixture
def kept() -> TCPStore:
    return store()


def given(out: Path, kept: TCPStore, steps: int, least: int, **options: Any) -> TrainConfig:
    """Without a checkpoint that anybody could go on from."""
    elastic = ElasticConfig(f"127.0.0.1:{kept.port}", least, buddy_every=EVERY, lost_after=60.0)
    return config(out, None, steps, elastic=elastic, checkpoint=CheckpointConfig(every=0), **options)


def keepers(kept: TCPStore) -> list[tuple[int, str, str, int]]:
    """(replica, machine, host, port) of all that were ever started."""
    run = json.loads(kept.get("began"))["run"]
    return [json.loads(one) for one in kept.get(f"{run}/noted/keepers").decode().split(";") if one]


def is_there(keeper: tuple[int, str, str, int]) -> bool:
    try:
        Keeper(*keeper[2:]).close()
    except OSError:
        return False
    return True


def repeated(path: Path, before: int) -> int:
    """Steps that a replica said would be repeated, behind a step that had been taken when it began anew."""
    (found,) = TAKEN.findall(said(path))
    step, number = map(int, found)
    assert step % EVERY == 0
    assert step + number >= before
    return number


def test_all_replicas_are_killed(tmp_path: Path, kept: TCPStore) -> None:
    run = Replicas(given(tmp_path / "run", kept, STEPS, 2), tmp_path, PAUSE_S)
    try:
        run.start(2)
        run.wait_for_step(2)
        for keeper in keepers(kept):  # which are started again
            Keeper(*keeper[2:]).end()
        run.wait_for_step(3 * EVERY + 2)
        for process in run.all:
            process.kill()
        for process in run.all:
            process.join()
        before = run.step()
        run.start(2)
        run.wait_for_step(before + 1, START_S)
        assert run.end()[2:] == [0, 0]
        (leader,) = [path for path in tmp_path.glob("said-*") if TAKEN.search(said(path))]
        assert 0 < repeated(leader, before) <= EVERY
        assert len(keepers(kept)) == 6
        assert not any(map(is_there, keepers(kept)))
    finally:
        run.kill()
    check(tmp_path, run.given.out, run.given.steps)


@pytest.mark.soak
def test_each_replica_has_lost_a_rank_and_one_its_machine(tmp_path: Path, kept: TCPStore) -> None:
    """ZeRO's shards within two replicas: after this no rank is left that has either shard, and one keeper."""
    ranks, slow = list[BaseProcess](), pause(PAUSE_S)
    of = given(tmp_path / "run", kept, STEPS, 2, zero=3)
    try:
        for number in range(2):
            ranks += replica_of_ranks(of, tmp_path / f"said-{number}", 2, slow)
        wait_for_step(of.out, EVERY + 1, START_S)
        ranks[1].kill()
        ranks[2].kill()
        Keeper(*keepers(kept)[0][2:]).end()
        for process in ranks:
            process.join(START_S)
        assert all(process.exitcode for process in ranks)
        before = rows(of.out)[-1]["step"]
        assert before < of.steps
        for number in (2, 3):
            ranks += replica_of_ranks(of, tmp_path / f"said-{number}", 2, slow)
        wait_for_step(of.out, before + 1, START_S)
        slow.value = 0
        for process in ranks:
            process.join(START_S)
        assert [process.exitcode for process in ranks[4:]] == [0] * 4
        (leader,) = [path for path in tmp_path.glob("said-*") if TAKEN.search(said(path))]
        assert repeated(leader, before) <= EVERY
    finally:
        for process in ranks:
            process.kill()
    check(tmp_path, of.out, of.steps)


def test_a_replica_by_itself_has_its_copies_on_its_next_machine(
    tmp_path: Path, kept: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank takes itself to be on a machine of its own; one of these goes away with its rank and its keeper."""
    for module in (core.members, core.train.buddies):
        monkeypatch.setattr(module, "place", machine_of_rank)
    of = given(tmp_path / "run", kept, STEPS, 1, zero=3)
    slow = pause(PAUSE_S)
    ranks = replica_of_ranks(of, tmp_path / "said-0", 2, slow)
    try:
        wait_for_step(of.out, EVERY + 1, START_S)
        ranks[0].kill()
        (gone,) = [keeper for keeper in keepers(kept) if keeper[1] == "machine0"]
        Keeper(*gone[2:]).end()
        for process in ranks:
            process.join(START_S)
        before = rows(of.out)[-1]["step"]
        ranks += replica_of_ranks(of, tmp_path / "said-1", 2, slow)
        wait_for_step(of.out, before + 1, START_S)
        slow.value = 0
        for process in ranks:
            process.join(START_S)
        assert [process.exitcode for process in ranks[2:]] == [0, 0]
        assert repeated(tmp_path / "said-1", before) <= EVERY
        assert "memory of machine1, and" in said(tmp_path / "said-1")
    finally:
        for process in ranks:
            process.kill()
    check(tmp_path, of.out, of.steps)


def machine_of_rank() -> str:
    return f"machine{os.environ.get('RANK', '0')} processes"


def test_a_buddy_of_itself_is_refused(tmp_path: Path, kept: TCPStore) -> None:
    refused = replica(given(tmp_path / "run", kept, 4, 1), tmp_path / "said")
    refused.join(START_S)
    assert refused.exitcode == 2
    (line,) = said(tmp_path / "said").splitlines()
    assert "elastic.buddy_every=4 with elastic.min=1 and one machine" in line
    assert not kept.check(["began"])


@pytest.mark.soak
def test_spares_take_over_what_all_members_have_lost(tmp_path: Path, kept: TCPStore) -> None:
    of = given(tmp_path / "run", kept, STEPS, 2)
    of = TrainConfig(**{**vars(of), "elastic": ElasticConfig(**{**vars(of.elastic), "max": 2})})
    run = Replicas(of, tmp_path, PAUSE_S)
    try:
        run.start(2)
        run.wait_for_step(2, START_S)
        run.start(2)
        time.sleep(1.0)
        run.wait_for_step(EVERY + 1, START_S)
        assert rows(of.out)[-1]["replicas"] == 2
        for process in run.all[:2]:
            process.kill()
        before = run.step()
        run.wait_for_step(before + 1)
        assert run.end()[2:] == [0, 0]
        (leader,) = [path for path in tmp_path.glob("said-*") if TAKEN.search(said(path))]
        assert repeated(leader, before) <= EVERY
    finally:
        run.kill()
    check(tmp_path, of.out, of.steps)
