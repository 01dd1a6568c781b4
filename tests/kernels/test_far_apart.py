"""Elements further apart than 32 bits can count: every dim of every input in turn, forward and backward.

Pair tensors of 10,000 residues, pools of pages and transposed views of them are that large. The tensors here are not:
of memory that is asked for only what is touched is there.
"""

import pytest
import torch
from torch import Tensor

from tests.kernels.test_specs import SPECS, Lay, check, make
from tests.support.device import DEVICE

DTYPE = torch.float16
pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU has all the memory that is asked for")


def far_apart(dim: int) -> Lay:
    """The same values, the first and last element of `dim` more than 2^31 elements apart; strides have 31 bits."""

    def lay(x: Tensor) -> Tensor:
        if x.ndim <= dim or x.shape[dim] < 3:
            return x
        dense = x.movedim(dim, 0)
        steps, inner = x.shape[dim] - 1, dense[0].numel()
        stride = (1 << 31) // steps + 1
        assert inner <= stride
        room = torch.empty(steps * stride + inner, dtype=x.dtype)
        laid = room.as_strided(dense.shape, (stride, *dense[0].contiguous().stride()))
        return laid.copy_(dense).movedim(0, dim)

    return lay


@pytest.mark.parametrize("name", list(SPECS))
def test_addresses_have_64_bits(name: str) -> None:
    spec = SPECS[name]
    laid = 0
    for dim in range(5):
        found = []
        for case in spec.cases:
            sizes = {n: x for n, x in make(spec, case, DTYPE).items() if isinstance(x, Tensor) and n not in spec.alone}
            if any(x.ndim > dim and x.shape[dim] >= 3 and x.numel() for x in sizes.values()):
                found.append((sum(x.numel() for x in sizes.values()), len(found), case))
        if found:
            laid += 1
            check(spec, min(found)[2], DTYPE, far_apart(dim))
    assert laid > 0
