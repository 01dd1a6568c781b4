"""The options of elastic training: addresses, and what does not go with replicas that come and go."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from apps.diffusion.config import DiffusionConfig
from core.checkpoint import CheckpointConfig
from core.config import UserError
from core.members import _ANSWER_S, Aborted, Members, parse_address
from core.optim.sgd import SgdConfig
from core.parallel.compress import CommConfig
from core.parallel.local import LocalTrainingConfig
from core.train import TrainConfig
from core.train.config import ElasticConfig
from core.watch import exists
from tests.support.elastic import store

STORE = ElasticConfig("localhost:29400")
RECORD = {"out": "/run", "version": "torch 2", "ranks": 1, "options": {"steps": 5}}


def test_an_address_is_a_host_and_a_port() -> None:
    assert parse_address("node7:29400") == ("node7", 29400)
    assert parse_address("[::1]:29400") == ("::1", 29400)
    for wrong in ("node7", ":29400", "node7:", "node7:x", "node7:0", "node7:65536"):
        with pytest.raises(UserError, match="give HOST:PORT"):
            parse_address(wrong)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"local": LocalTrainingConfig(asynchronous="hogwild"), "optim": SgdConfig(momentum=0.0)}, "with local.async"),
        ({"comm": CommConfig(compress="powersgd")}, "with comm.compress=powersgd"),
        ({"comm": CommConfig(gradients="int4"), "zero": 3}, "with comm.gradients=int4"),
        ({"noise_scale": True}, "with noise_scale"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match="elastic.store=localhost:29400 " + words):
        TrainConfig(elastic=STORE, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"start": 3}, "local.start=3: before it"),
        ({"fragments": 2}, "local.fragments=2: a worker joins"),
        ({"overlap": 1}, "local.overlap=1: a worker that"),
        ({"bits": 4}, "local.bits=4: what was not sent"),
    ],
)
def test_what_local_workers_cannot_do_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match="elastic.store with local.every=5 and " + words):
        TrainConfig(elastic=STORE, local=LocalTrainingConfig(every=5, **options))


def test_local_workers_save_whole_rounds_and_have_no_buddies() -> None:
    rounds = LocalTrainingConfig(every=5)
    with pytest.raises(UserError, match=r"checkpoint.every=12: .*; use --checkpoint.every 10"):
        TrainConfig(elastic=STORE, local=rounds, checkpoint=CheckpointConfig(every=12))
    with pytest.raises(UserError, match=r"elastic.buddy_every=2: every worker has theta"):
        TrainConfig(elastic=ElasticConfig("localhost:29400", buddy_every=2), local=rounds)
    TrainConfig(elastic=STORE, local=rounds, zero=3)


def test_commands_whose_data_one_launch_prepares_refuse_it() -> None:
    with pytest.raises(UserError, match=r"with this command: .*; use megalith llm"):
        DiffusionConfig(elastic=STORE)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"min": 0}, "elastic.min=0"),
        ({"lost_after": 0.1}, "lost_after=0.1"),
        ({"buddy_every": 0}, "elastic.buddy_every=0; give a number of steps"),
        ({"min": 3, "max": 2}, "elastic.max=2; give a number of replicas, at least elastic.min=3"),
    ],
)
def test_numbers_are_checked(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        ElasticConfig("localhost:29400", **given)


def test_without_a_store_the_rest_is_not_read() -> None:
    assert set(ElasticConfig().unread()) == {"min", "max", "buddy_every", "lost_after"}
    assert not STORE.unread()


def test_a_process_that_has_ended_and_that_nobody_has_asked_is_gone() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    while exists(child):
        pass
    os.waitpid(child, 0)
    assert exists(os.getpid())


def test_a_replica_that_joins_has_no_state_before_its_generation_has_begun() -> None:
    """The one that would give it the state leaves meanwhile: the next generation has to give it."""
    kept = store()
    first, second, third = (Members(f"localhost:{kept.port}", 0, 1, least=2, lost_after=30.0) for _ in range(3))

    def together(do: Callable[[Members], Any], *members: Members) -> list[Any]:
        with ThreadPoolExecutor(len(members)) as threads:
            return list(threads.map(do, members))

    def set_up(members: Members) -> None:
        with members.working("setup", times=False):
            members.arrive()
            members.vote()

    together(lambda members: members.join(RECORD), first)
    together(lambda members: members.join(RECORD), second)
    found = together(lambda members: members.regroup(0, 9), first, second)
    assert [one.members for one in found] == [(0, 1)] * 2
    together(set_up, first, second)
    together(lambda members: members.join(RECORD), third)
    first.least = second.least = 3
    found = together(lambda members: members.regroup(1, 9), first, second, third)
    assert [(one.members, one.holders) for one in found] == [((0, 1, 2), (0, 1))] * 3
    first.leave()
    second.least = 2
    found = together(lambda members: members.regroup(1, 9), second, third)
    assert [(one.members, one.holders) for one in found] == [((1, 2), (1,))] * 2
    for members in (second, third):
        members.leave()


def test_a_replica_that_comes_while_a_generation_is_written_is_in_the_one_after() -> None:
    """It has registered, and the one that writes has not seen a sign of it yet."""
    kept = store()
    first, second = (Members(f"localhost:{kept.port}", 0, 1, least=1, lost_after=30.0) for _ in range(2))
    first.join(RECORD)
    second.join(RECORD)
    seen = first._seen
    try:
        first._seen = lambda member: member != second.id and seen(member)
        found = first.regroup(0, 9)
        assert found is not None
        assert found.members == (0,)
        first._seen = seen
        with first.working("setup", times=False):
            first.arrive()
            assert first.vote() == "regroup"
    finally:
        for members in (first, second):
            members.leave()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"out": "/other"}, "is in use by the run in /run, and this one writes to /other; give each run a store"),
        ({"version": "torch 3"}, "this replica has torch 3, and the run that it would join torch 2; install the same"),
        ({"ranks": 2}, "this replica has 2 ranks, and those of the run that it would join 1; launch it with as many"),
        ({"options": {"steps": 7}}, r"configured otherwise .*\(steps 5 -> 7\); give it the same options"),
    ],
)
def test_a_replica_of_another_run_is_refused(changed: dict[str, Any], words: str) -> None:
    kept = store()
    first, other = (Members(f"localhost:{kept.port}", 0, 1, lost_after=1.0) for _ in range(2))
    first.join(RECORD)
    try:
        with pytest.raises(UserError, match=words):
            other.join(RECORD | changed)
    finally:
        first.leave()


def test_a_word_that_is_forgotten_meanwhile_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps go on, and forget what earlier ones have left, while the thread looks for the word of one."""
    with alone() as only:

        class Forgetful:
            def __getattr__(self, name: str) -> Any:
                return getattr(kept, name)

            def check(self, keys: list[str]) -> bool:
                found = kept.check(keys)
                if "/verdict/" in keys[0]:
                    only.forget("setup")
                return found

        kept = only._other
        only.arrive()
        only.vote()
        monkeypatch.setattr(only, "_other", Forgetful())
        begin = time.monotonic()
        only._look()
        assert time.monotonic() - begin < _ANSWER_S / 2


def test_who_waits_for_all_hears_of_an_abort_whose_author_has_died() -> None:
    """It has written the word, and not yet that nobody need wait."""
    with alone() as only, ThreadPoolExecutor(1) as thread:
        only._store.add(only._of_step("arrived"), -1)  # one is missing
        waiting = thread.submit(only.arrive)
        only._store.set(only._of_step("verdict"), "abort 7")
        try:
            with pytest.raises(Aborted):
                waiting.result(timeout=20.0)
        finally:
            only._gone = True  # ends the wait


def test_a_replica_is_known_when_all_of_its_ranks_are() -> None:
    """Others wait for the keys of each rank of one that is known."""
    kept = store()
    address = f"localhost:{kept.port}"

    def agree(value: Any) -> Any:
        return value if isinstance(value, list) else (None, (first.prefix, first.id))

    first = Members(address, 0, 2, lost_after=30.0)
    second = Members(address, 1, 2, lost_after=30.0, agree=agree)
    with ThreadPoolExecutor(1) as thread:
        joining = thread.submit(first.join, RECORD)
        try:
            while first.id < 0:
                time.sleep(0.01)
            time.sleep(0.5)
            assert first._registered() == []
            assert not joining.done()
        finally:
            second.join(RECORD)
            joining.result(timeout=20.0)
            for members in (first, second):
                members._left.set()
    assert first._registered() == [0]


def test_one_that_has_just_come_writes_a_generation_with_those_that_let_it_in() -> None:
    """It has not looked at their signs yet."""
    kept = store()
    first, second = (Members(f"localhost:{kept.port}", 0, 1, lost_after=30.0) for _ in range(2))
    second._look = lambda: None
    try:
        first.join(RECORD)
        assert first.regroup(0, 9) is not None
        with first.working("setup", times=False):
            first.arrive()
            first.vote()
        second.join(RECORD)
        first.least = 2
        assert first.regroup(1, 9) is not None
        assert second.regroup(0, 9) is not None
        found = second.regroup(0, 9)
        assert found is not None
        assert (found.number, found.members, found.holders) == (3, (0, 1), (0,))
    finally:
        for members in (first, second):
            members.leave()


@contextmanager
def alone() -> Iterator[Members]:
    """The only replica of a run, in its setup."""
    kept = store()
    only = Members(f"localhost:{kept.port}", 0, 1, lost_after=30.0)
    only.join(RECORD)
    try:
        assert only.regroup(0, 9) is not None
        with only.working("setup", times=False):
            yield only
    finally:
        only.leave()
