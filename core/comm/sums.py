"""Sums over a tensor-parallel axis for inference: few numbers, often, each waited for.

A ring or tree of NCCL takes many small steps. Where every rank of the axis sees the others' memory, each can read all
parts at once and add them by itself ("one-shot"): one kernel, which torch has over its symmetric memory. It reads n
times what it needs, so it is for small tensors. Elsewhere, and for larger ones, the process group sums. Both can be
captured in a graph.

Every rank adds in the order of ranks, so all of them get the same bits.
"""

import logging
from collections.abc import Callable
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from core.compat import symmetric_memory

log = logging.getLogger("comm")

MOST_BYTES = 256 << 10
"""Of a tensor that is summed in one shot."""


def sums_over(
    axis: DeviceMesh, device: torch.device | str, dtype: torch.dtype
) -> Callable[[Tensor, DeviceMesh], Tensor]:
    """Make the function that sums partial tensors over the axis, in place where it can: [..] -> [..], no gradients.

    All ranks of the axis call it together.
    """
    one_shot = _OneShot.over(axis, torch.device(device), dtype) if torch.device(device).type == "cuda" else None

    def total(x: Tensor, _axis: DeviceMesh) -> Tensor:
        if axis.size() == 1 or x.numel() == 0:
            return x
        x = x.contiguous()
        if one_shot is not None and x.dtype == dtype and x.nbytes <= MOST_BYTES:
            return one_shot(x)
        dist.all_reduce(x, group=axis.get_group())
        return x

    return total


class _OneShot:
    """Two buffers that all ranks see, in turns: a rank may write the next part while others read the last one."""

    def __init__(self, axis: DeviceMesh, device: torch.device, dtype: torch.dtype):
        symmetric = symmetric_memory()
        self.name = axis.get_group().group_name
        buffers = [symmetric.empty(MOST_BYTES // dtype.itemsize, dtype=dtype, device=device) for _ in range(2)]
        for buffer in buffers:
            symmetric.rendezvous(buffer, self.name)
        self._buffers = cycle(buffers)

    def __call__(self, x: Tensor) -> Tensor:
        shared = next(self._buffers)[: x.numel()]
        return torch.ops.symm_mem.one_shot_all_reduce_copy(shared, x.view(-1), "sum", self.name).view(x.shape)

    @classmethod
    def over(cls, axis: DeviceMesh, device: torch.device, dtype: torch.dtype) -> "_OneShot | None":
        """None where it is not offered, or does not add up to what the process group says."""
        made, why = None, ""
        try:
            made = cls(axis, device, dtype)
        except (ImportError, AttributeError, RuntimeError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
        if not _all(made is not None, axis, device):
            log.info("sums over tp go through NCCL: %s", why or "another rank has no symmetric memory")
            return None
        assert made is not None
        if not _all(_is_right(made, axis, device, dtype), axis, device):
            log.warning("sums over tp go through NCCL: one-shot sums are not theirs on this machine")
            return None
        return made


def _is_right(one_shot: _OneShot, axis: DeviceMesh, device: torch.device, dtype: torch.dtype) -> bool:
    """On numbers whose sums are exact, several times, so that each buffer is used again.

    Each rank takes all turns, whatever it finds: others wait for it.
    """
    is_right = True
    for turn in range(6):
        own = torch.arange(1000 + turn, device=device).remainder(7).add(axis.get_local_rank() + turn).to(dtype)
        wanted = own.clone()
        dist.all_reduce(wanted, group=axis.get_group())
        try:
            is_right &= torch.equal(one_shot(own), wanted)
        except RuntimeError:  # a kernel tells of a format that it does not have, such as fp16, when it is called
            is_right = False
    return is_right


def _all(is_so: bool, axis: DeviceMesh, device: torch.device) -> bool:
    answer = torch.tensor(int(is_so), device=device)
    dist.all_reduce(answer, dist.ReduceOp.MIN, group=axis.get_group())
    return bool(answer)
