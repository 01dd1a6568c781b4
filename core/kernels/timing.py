"""The clock by which the faster of two kernels is chosen."""

import time
from collections.abc import Callable
from typing import Any


def least_seconds(call: Callable[[], Any], rounds: int) -> float:
    """The least that a call took in so many."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)
