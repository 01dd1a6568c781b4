"""Format and shape of what goes from stage to stage, as a tensor: what a sender says of it before it comes."""

import torch
from torch import Tensor

FORMATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MOST_DIMS = 7


def description_of(x: Tensor, device: torch.device | str | None = None) -> Tensor:
    """int64[MOST_DIMS + 2]: format, dims, sizes; on the tensor's device, if not on another."""
    assert x.ndim <= MOST_DIMS, f"{x.ndim} dims between two stages; at most {MOST_DIMS} are sent"
    padding = [0] * (MOST_DIMS - x.ndim)
    return torch.tensor(
        [FORMATS.index(x.dtype), x.ndim, *x.shape, *padding],
        dtype=torch.int64,
        device=x.device if device is None else device,
    )


def read_description(description: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    """The format and the shape."""
    dtype, ndim, *sizes = description.tolist()
    return FORMATS[dtype], tuple(sizes[:ndim])
