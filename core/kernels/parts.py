"""A backward in two parts: which gradients it is after, for functions that compute them one by one.

A pipeline's schedule may ask for the gradients of inputs first, for which another stage waits, and for those of weights
later (`core.parallel.pipeline.backward`). torch tells its own operators what is asked for, but not a Python function:
that computes all its gradients in the first part. A `PartedFunction` is told by `after`, and its node is run twice.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.autograd import Function
from torch.autograd.graph import Node


@dataclass(frozen=True)
class After:
    """What a backward is after."""

    inputs: bool = True
    weights: bool = True


_WHOLE = After()
_now = [_WHOLE]  # not of a thread: autograd runs the nodes of a GPU in threads of its own


def after() -> After:
    """What the backward that runs is after."""
    return _now[-1]


@contextmanager
def backward_after(*, inputs: bool, weights: bool) -> Iterator[None]:
    """Around a backward that is after some of the gradients."""
    _now.append(After(inputs, weights))
    try:
        yield
    finally:
        _now.pop()


class PartedFunction(Function):
    """A function whose backward computes what `after` says alone, and reads nothing but its saved tensors."""


def runs_in_parts(node: Node) -> bool:
    return issubclass(getattr(node, "_forward_cls", object), PartedFunction)
