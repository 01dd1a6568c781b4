"""The thread that watches other ranks is not inside the store when its own process ends."""

import threading
import time
from collections.abc import Callable
from typing import cast

import pytest
from torch.distributed import Store

from core.watch import INTERVAL_S, Watch


class SlowStore:
    """A store each of whose answers takes a while, and which notes who waits for one."""

    def __init__(self) -> None:
        self.inside: set[str] = set()
        self.asked = 0

    def _answer(self, value: object) -> object:
        name = threading.current_thread().name
        self.inside.add(name)
        self.asked += name == "watch"
        time.sleep(0.2)
        self.inside.discard(name)
        return value

    def set(self, key: str, value: str) -> None:
        self._answer(None)

    def check(self, keys: list[str]) -> bool:
        return bool(self._answer(False))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return cast(bytes, self._answer(value.encode()))


@pytest.mark.parametrize("ends", [lambda watch: watch.report(1), lambda watch: watch.leave()], ids=["fails", "is done"])
def test_a_rank_that_ends_has_no_thread_inside_the_store(ends: Callable[[Watch], object]) -> None:
    store = SlowStore()
    watch = Watch(cast(Store, store), 0, 2)
    while "watch" not in store.inside:
        time.sleep(0.01)
    ends(watch)
    assert not store.inside
    asked = store.asked
    time.sleep(INTERVAL_S + 0.2)
    assert store.asked == asked
    watch.leave()
