"""Rows: what the kernels that go over the last dim share.

A tensor [.., N] is rows of N elements. Row numbers count through the leading dims, whatever their strides: neighbours
that lie in memory as one dim are merged, and where a row begins follows from at most four sizes and strides
(`placed`, `row_offset`). A dense tensor has one leading dim left, for which the divisions fold away.

Elementwise kernels take tiles of two dims from tensors whose rows lie evenly (`as_rows`, `tile`). Gradients that are
sums over rows take two phases: each program sums over its share of the rows in a fixed order (`shares`), then the
programs' sums are summed (`programs_summed`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from core.kernels.blocks import Blocks
from core.kernels.language import tl, triton

NUM_LEADING = 4
PROGRAMS = 1024
"""That sum over rows: enough to fill a chip, few enough that the second phase costs nothing."""

Place = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes of the last three of four leading dims, and the strides of all four."""


@triton.jit
def row_offset(row, sizes, strides):
    """The offset of a row in a tensor of leading dims [.., sizes[0], sizes[1], sizes[2]] and four strides; 64 bits."""
    row = tl.cast(row, tl.int64)
    last, row = row % sizes[2], row // sizes[2]
    third, row = row % sizes[1], row // sizes[1]
    return row // sizes[0] * strides[0] + row % sizes[0] * strides[1] + third * strides[2] + last * strides[3]


def placed(sizes: Sequence[int], strides: Sequence[int]) -> Place | None:
    """The place that `row_offset` takes for leading dims of these sizes and strides; None where over four are left."""
    kept: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if kept and kept[-1][1] == stride * size:
            kept[-1] = kept[-1][0] * size, stride
        else:
            kept.append((size, stride))
    if len(kept) > NUM_LEADING:
        return None
    kept += [(1, 0)] * (NUM_LEADING - len(kept))  # ones at the end: their divisions fold away
    return tuple(size for size, _ in kept[1:]), tuple(stride for _, stride in kept)


def rows_of(x: Tensor) -> tuple[Tensor, tuple[int, ...], tuple[int, ...], int]:
    """(x, sizes, strides, stride of the columns), x copied where its leading dims do not come down to four."""
    place = placed(x.shape[:-1], x.stride()[:-1])
    if place is None:
        x = x.contiguous()
        place = placed([x.shape[:-1].numel()], [x.shape[-1]])
    assert place is not None
    return x, *place, x.stride(-1)


def broadcasts(added: Tensor, x: Tensor) -> bool:
    """Return whether `added` broadcasts to x's shape."""
    pairs = zip(reversed(added.shape), reversed(x.shape))
    return added.ndim <= x.ndim and all(a in (1, b) for a, b in pairs)


def as_rows(x: Tensor) -> Tensor:
    """x as [rows, N]: a view wherever the leading dims lie evenly in memory."""
    return x.reshape(-1, x.shape[-1])


def tile(length: int, elements: int = 2048) -> Blocks:
    """A tile of 2048 elements: two loads of 16 bytes in flight for each thread and tensor."""
    block = min(1024, triton.next_power_of_2(length))
    return {"ROWS": elements // block, "BLOCK": block, "num_warps": 4}


def grid(rows: Tensor, blocks: Blocks) -> tuple[int, int]:
    return triton.cdiv(rows.shape[0], blocks["ROWS"]), triton.cdiv(rows.shape[1], blocks["BLOCK"])


def shares(rows: Tensor, blocks: Blocks, width: int) -> tuple[tuple[int, int], int, Tensor]:
    """(grid, rows of each program, fp32[programs, width] for their sums) of a kernel that sums over rows by tiles."""
    num_columns = triton.cdiv(rows.shape[1], blocks["BLOCK"])
    rows_each = blocks["ROWS"] * max(1, triton.cdiv(rows.shape[0] * num_columns, blocks["ROWS"] * PROGRAMS))
    num_programs = triton.cdiv(rows.shape[0], rows_each)
    partial = torch.empty((num_programs, width), dtype=torch.float32, device=rows.device)
    return (num_programs, num_columns), rows_each, partial


def programs_summed(parts_KPN: Tensor, *dtypes: torch.dtype) -> list[Tensor]:
    """One or two vectors [N] in these dtypes: sums over the programs P of fp32[K, P, N], in one launch for both."""
    num_vectors, num_programs, width = parts_KPN.shape
    assert num_vectors == len(dtypes)
    sums = [torch.empty(width, dtype=dtype, device=parts_KPN.device) for dtype in dtypes]
    _sum_programs[(triton.cdiv(width, 32), num_vectors)](
        parts_KPN, sums[0], sums[-1], num_programs, width, PROGRAMS=128, BLOCK=32, num_warps=8
    )
    return sums


@triton.jit
def _sum_programs(parts, first, second, num_programs, width, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    column, program = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PROGRAMS)
    parts += tl.program_id(1).to(tl.int64) * num_programs * width
    total = tl.zeros((PROGRAMS, BLOCK), tl.float32)
    for start in range(0, num_programs, PROGRAMS):
        inside = (start + program < num_programs)[:, None] & (column < width)[None, :]
        at = (start + program).to(tl.int64)[:, None] * width + column[None, :]
        total += tl.load(parts + at, mask=inside, other=0.0)
    if tl.program_id(1) == 0:
        tl.store(first + column, tl.sum(total, 0), mask=column < width)
    else:
        tl.store(second + column, tl.sum(total, 0), mask=column < width)
