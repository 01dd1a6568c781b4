"""Weights in a traced graph: it calls their products as operators, which know a weight by a number.

So the kernel is chosen when the graph runs, by the number of rows, and what no graph can hold (forms of weights that
are another library's own) need not be in it.
"""

import weakref

from torch import Tensor

_TRACED: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def number_of(weight: Tensor) -> int:
    """The number under which a graph knows a weight."""
    found = next((number for number, known in _TRACED.items() if known is weight), None)
    if found is None:
        found = max(_TRACED, default=-1) + 1
        _TRACED[found] = weight
    return found


def traced(number: int) -> Tensor:
    """The weight that a graph knows under the number."""
    return _TRACED[number]
