"""Quantized weights in a traced graph: it calls their products as operators, which know a weight by a number.

So the kernel is chosen when the graph runs, by the number of rows, and what no graph can hold (fbgemm's own objects)
need not be in it.
"""

import weakref

import torch
from torch import Tensor

from core.quant.weight import QuantizedWeight

_TRACED: weakref.WeakValueDictionary[int, QuantizedWeight] = weakref.WeakValueDictionary()


def number_of(weight: QuantizedWeight) -> int:
    """Under which a graph knows a weight."""
    found = next((number for number, known in _TRACED.items() if known is weight), None)
    if found is None:
        found = max(_TRACED, default=-1) + 1
        _TRACED[found] = weight
    return found


def traced(number: int) -> QuantizedWeight:
    """The weight that a graph knows under the number."""
    return _TRACED[number]


def is_lone_twice(x: Tensor, digits: int) -> bool:
    """Whether rows [digits 2, I] are one token's, given twice, as a graph is given a lone token: multiply it once."""
    return x.shape[0] == 2 * digits and torch.equal(x[::2], x[1::2])
