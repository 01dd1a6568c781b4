"""Loads of experts in a step without values: balanced, for what a router chooses is not known."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_balanced = False


@contextmanager
def balanced_loads() -> Iterator[None]:
    """Inside, whoever would look at how many rows an expert has takes them for dealt out evenly."""
    global _balanced
    before, _balanced = _balanced, True
    try:
        yield
    finally:
        _balanced = before


def are_balanced() -> bool:
    return _balanced


def numbers(counts: Tensor, total: int) -> list[int]:
    """The counts, for which the host waits; balanced, those that `total` comes to, nearly equal."""
    if not _balanced:
        return counts.tolist()
    many = counts.numel()
    return [total // many + (index < total % many) for index in range(many)]
