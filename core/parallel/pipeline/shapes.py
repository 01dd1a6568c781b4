"""Format and shape of what goes from stage to stage, as a tensor: what a sender says of it before it comes."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from core.comm.coded_rows import RowCode

FORMATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MOST_DIMS = 7

Parcel = tuple[Tensor, ...]
"""What is passed on: activations or their gradient; and if blocks add to the loss, the sum or its gradient, fp64[1]."""
Form = tuple[torch.dtype, tuple[int, ...], int]
"""Format and shape of the first tensor of a parcel, and how many there are."""


def form_of(parcel: Sequence[Tensor]) -> Form:
    return parcel[0].dtype, tuple(parcel[0].shape), len(parcel)


def empty_parcel(form: Form, device: torch.device | str, code: RowCode | None = None) -> Parcel:
    """A parcel of that form, closed with that code; what stands in it is undefined."""
    dtype, shape, num_tensors = form
    first = torch.empty(shape, dtype=dtype, device=device)
    if code is not None:
        size = math.prod(shape[:-1]), code(shape[-1]).num_bytes(dtype.itemsize)
        first = torch.empty(size, dtype=torch.uint8, device=device)
    return (first, *(torch.empty(1, dtype=torch.float64, device=device) for _ in range(num_tensors - 1)))


def closed(parcel: Parcel, code: RowCode | None) -> Parcel:
    """The tensors that are sent of a parcel: with a code, each row of the last dim of the first in few bits."""
    first, *others = (tensor.contiguous() for tensor in parcel)
    if code is not None:
        first = code(first.shape[-1]).encode(first.view(-1, first.shape[-1]))
    return (first, *others)


def opened(parcel: Parcel, form: Form, code: RowCode | None) -> Parcel:
    """The parcel of that form, of what has been sent of it."""
    if code is None:
        return parcel
    dtype, shape, _ = form
    first = torch.empty(shape, dtype=dtype, device=parcel[0].device)
    code(shape[-1]).decode(parcel[0], first.view(-1, shape[-1]))
    return (first, *parcel[1:])


def description_of(form: Form, device: torch.device | str) -> Tensor:
    """int64[MOST_DIMS + 3]: tensors, format, dims, sizes."""
    dtype, shape, num_tensors = form
    assert len(shape) <= MOST_DIMS, f"{len(shape)} dims between two stages; at most {MOST_DIMS} are sent"
    numbers = [num_tensors, FORMATS.index(dtype), len(shape), *shape, *[0] * (MOST_DIMS - len(shape))]
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def no_description(device: torch.device | str) -> Tensor:
    """The tensor that receives a description; left as it is, it describes nothing."""
    return torch.zeros(MOST_DIMS + 3, dtype=torch.int64, device=device)


def read_description(description: Tensor) -> Form | None:
    """Read a description; None where it describes nothing."""
    num_tensors, dtype, ndim, *sizes = description.tolist()
    return (FORMATS[dtype], tuple(sizes[:ndim]), num_tensors) if num_tensors else None
