"""The clock by which the fastest of some kernels is chosen."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

_CACHED_BYTES = 64 << 20
"""more than caches hold"""

Given = TypeVar("Given")


def least_seconds(call: Callable[[], Any], rounds: int) -> float:
    """The least that a call took in so many."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)


def fastest_from_memory(kernels: Mapping[str, tuple[Callable[[Given], Any], Sequence[Given]]], rounds: int) -> str:
    """The name of the kernel that is through with what it is given first; the least of so many rounds, in turns.

    In a model a weight comes from memory: a kernel that arranges it anew would be faster in a cache. So each has
    weights of its own, and before each round others are read.
    """
    taken = dict.fromkeys(kernels, float("inf"))
    other = torch.zeros(_CACHED_BYTES // 4, dtype=torch.float32, device="cpu")
    for kernel, given in kernels.values():
        kernel(given[0])  # made when it is first called
    for _ in range(rounds):
        other.sum()
        for name, (kernel, given) in kernels.items():
            start = time.perf_counter()
            for one in given:
                kernel(one)
            taken[name] = min(taken[name], time.perf_counter() - start)
    return min(taken, key=lambda name: taken[name])
