"""Softmax of scaled scores with a mask and a bias: y = softmax(scale x + mask + bias) over the last dim.

    p = exp(s - max s) / sum exp(s - max s),   s = scale x + mask + bias
    ds = p (dp - sum(p dp)),   dx = scale ds,   dbias = ds summed over the dims that the bias was broadcast over

Mask and bias broadcast over any leading dims (the Evoformer's mask over rows of an MSA, its pair bias over the MSA;
Jumper et al. 2021, supplement, algorithms 7 and 13), without a copy of either. One read of x, one write of y; the
backward reads y and dy and writes dx, and sums dbias on the way: a program goes over the rows of x that share its rows
of the bias, in a fixed order, in as many parts as fill a chip, which are summed after. Sums are in fp32. A row that is
-inf throughout is NaN, as torch's.

A program takes a tile of whole rows, so rows of up to 32,768 elements; longer ones go to torch.
"""

import itertools
import math

import torch
from torch import Tensor

from core.kernels.blocks import Blocks, chip, tuned
from core.kernels.language import tl, triton
from core.kernels.operator import launches, operator, runs_kernel, unsupported_dtype
from core.kernels.rows import PROGRAMS, Place, broadcasts, placed, row_offset, rows_of
from core.kernels.spec import Case, KernelSpec, Traffic, drawing

MAX_LENGTH = 32_768
LONGEST_TILE = 8192  # of the backward: two tensors have to stay in registers


def softmax(x: Tensor, *, scale: float = 1.0, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """softmax(scale x + mask + bias, -1), of x's shape and dtype; gradients for x and bias.

    x           [.., N]
    mask, bias  broadcastable to x's shape; the mask is a constant (0 and -inf, or large negative numbers)

    Raises ValueError when mask or bias does not broadcast.
    """
    for name, added in (("mask", mask), ("bias", bias)):
        if added is not None and not broadcasts(added, x):
            raise ValueError(f"softmax: {name} {list(added.shape)} does not broadcast to x {list(x.shape)}")
    if runs_kernel("softmax", x, unless=_unsupported(x, mask, bias)):
        return _forward(x, mask, bias, scale)
    return reference(x, scale=scale, mask=mask, bias=bias)


def reference(x: Tensor, *, scale: float = 1.0, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """The same by torch; what runs on a CPU."""
    scores = x.to(torch.promote_types(x.dtype, torch.float32)) * scale
    for added in (mask, bias):
        if added is not None:
            scores = scores.add_(added)
    return torch.softmax(scores, -1).to(x.dtype)


def _unsupported(x: Tensor, mask: Tensor | None, bias: Tensor | None) -> str | None:
    if x.ndim == 0 or x.shape[-1] > MAX_LENGTH:
        return f"the kernel takes rows of at most {MAX_LENGTH} elements"
    return unsupported_dtype(x, mask, bias)


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _tile(num_rows, length, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows, columns and what is inside of this program's tile, in 64 bits: strides may be of any size."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK).to(tl.int64)[None, :]
    return row, column, (row < num_rows) & (column < length)


@triton.jit
def _softmax_forward(
    x, mask, bias, y, num_rows, length, scale,
    x_sizes, x_strides, x_column, m_sizes, m_strides, m_column, b_sizes, b_strides, b_column,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row, column, inside = _tile(num_rows, length, ROWS, BLOCK)
    at = row_offset(row, x_sizes, x_strides) + column * x_column
    scores = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
    if HAS_MASK:
        at = row_offset(row, m_sizes, m_strides) + column * m_column
        scores += tl.load(mask + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        at = row_offset(row, b_sizes, b_strides) + column * b_column
        scores += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    scores = tl.where(inside, scores, float("-inf"))
    scores = tl.where(row < num_rows, scores, 0.0)  # rows of nobody: anything finite
    p = tl.exp(scores - tl.max(scores, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None]
    tl.store(y + row * length + column, p, mask=inside)


@triton.jit
def _softmax_backward(
    dy, y, dx, num_rows, length, scale, dy_sizes, dy_strides, dy_column,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """WHOLE: a tile holds whole rows. Longer rows are read twice, the second time mostly from the cache."""
    row, column, inside = _tile(num_rows, length, ROWS, BLOCK)
    dy_row = dy + row_offset(row, dy_sizes, dy_strides)
    if WHOLE:
        p = tl.load(y + row * length + column, mask=inside, other=0.0).to(tl.float32)
        dp = tl.load(dy_row + column * dy_column, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + row * length + column, p * (dp - tl.sum(p * dp, 1)[:, None]) * scale, mask=inside)
    else:
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, length, BLOCK):
            inside = (row < num_rows) & (start + column < length)
            p = tl.load(y + row * length + start + column, mask=inside, other=0.0).to(tl.float32)
            dp = tl.load(dy_row + (start + column) * dy_column, mask=inside, other=0.0).to(tl.float32)
            total += p * dp
        mean = tl.sum(total, 1)[:, None]
        for start in range(0, length, BLOCK):
            inside = (row < num_rows) & (start + column < length)
            p = tl.load(y + row * length + start + column, mask=inside, other=0.0).to(tl.float32)
            dp = tl.load(dy_row + (start + column) * dy_column, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx + row * length + start + column, p * (dp - mean) * scale, mask=inside)


@triton.jit
def _softmax_backward_shared(
    dy, y, dx, dbias, num_rows, num_members, members_each, length, scale,
    dy_sizes, dy_strides, y_sizes, y_strides, dy_member_sizes, dy_member_strides, y_member_sizes, y_member_strides,
    dy_column, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx, and dbias[parts, rows of the bias, N]: rows of the bias, over some of the members, rows of x that share it.

    A row of x begins where its row of the bias and its member say together. dx lies as y does.
    """
    row, column, inside = _tile(num_rows, length, ROWS, BLOCK)
    part = tl.program_id(1).to(tl.int64)
    dy += row_offset(row, dy_sizes, dy_strides) + column * dy_column
    at_row = row_offset(row, y_sizes, y_strides) + column
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for member in range(part * members_each, tl.minimum((part + 1) * members_each, num_members)):
        at = at_row + row_offset(member, y_member_sizes, y_member_strides)
        p = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        dp = tl.load(dy + row_offset(member, dy_member_sizes, dy_member_strides), mask=inside, other=0.0)
        ds = p * (dp.to(tl.float32) - tl.sum(p * dp.to(tl.float32), 1)[:, None])
        tl.store(dx + at, ds * scale, mask=inside)
        total += ds
    tl.store(dbias + (part * num_rows + row) * length + column, total, mask=inside)


# --- operators --------------------------------------------------------------------------------------------------------


@operator("softmax_forward")
def _forward(x: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if launches(x):
        blocks, num_rows = _blocks(x.shape[-1]), x.numel() // x.shape[-1]
        x, *x_at = rows_of(x)
        (mask_x, *mask_at), (bias_x, *bias_at) = (
            (x, *x_at) if t is None else rows_of(t.expand(x.shape)) for t in (mask, bias)
        )

        def run(blocks: Blocks) -> None:
            _softmax_forward[(triton.cdiv(num_rows, blocks["ROWS"]),)](
                x, mask_x, bias_x, y, num_rows, x.shape[-1], scale, *x_at, *mask_at, *bias_at,
                HAS_MASK=mask is not None, HAS_BIAS=bias is not None, **blocks,
            )  # fmt: skip

        key = triton.next_power_of_2(num_rows), blocks["BLOCK"], x.dtype, mask is not None, bias is not None
        tuned("softmax_forward", key, blocks, run, num_warps=(4, 8, 16))
    return y


@operator("softmax_backward")
def _backward(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if launches(y):
        length = y.shape[-1]
        whole = length <= LONGEST_TILE
        blocks, num_rows = _backward_blocks(length if whole else LONGEST_TILE // 2), y.numel() // length
        dy, *dy_at = rows_of(dy)
        _softmax_backward[(triton.cdiv(num_rows, blocks["ROWS"]),)](
            dy, y, dx, num_rows, length, scale, *dy_at, WHOLE=whole, **blocks
        )
    return dx


@operator("softmax_backward_shared")
def _backward_shared(dy: Tensor, y: Tensor, bias_shape: list[int], scale: float) -> tuple[Tensor, Tensor]:
    """dx, and dbias of its shape in fp32."""
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if not launches(y):
        return dx, torch.zeros(bias_shape, dtype=torch.float32, device=y.device)
    length, dims = y.shape[-1], _dims(y, bias_shape)
    if any(_placed(dy, of) is None for of in dims):
        dy = dy.contiguous()
    places = [_placed(x, of) for of in dims for x in (dy, y)]
    num_rows, num_members = (math.prod(y.shape[d] for d in of) for of in dims)
    blocks = _backward_blocks(length)
    tiles = triton.cdiv(num_rows, blocks["ROWS"])
    members_each = triton.cdiv(num_members, min(num_members, triton.cdiv(PROGRAMS, tiles)))
    parts = triton.cdiv(num_members, members_each)
    dbias = torch.empty((parts, *bias_shape), dtype=torch.float32, device=y.device)
    _softmax_backward_shared[(tiles, parts)](
        dy, y, dx, dbias, num_rows, num_members, members_each, length, scale,
        *itertools.chain.from_iterable(place for place in places if place), dy.stride(-1), **blocks,
    )  # fmt: skip
    return dx, dbias.sum(0) if parts > 1 else dbias[0]


def _setup(ctx, inputs, output) -> None:
    _, _, bias, ctx.scale = inputs
    ctx.bias = None if bias is None else (list(bias.shape), bias.dtype)
    ctx.save_for_backward(output)


def _gradients(ctx, dy: Tensor):
    (y,) = ctx.saved_tensors
    if not ctx.needs_input_grad[2]:
        return _backward(dy, y, ctx.scale), None, None, None
    shape, dtype = ctx.bias
    if _sums_in_kernel(y, shape):
        dx, dbias = _backward_shared(dy, y, shape, ctx.scale)
    else:
        ds = _backward(dy, y, 1.0)
        dx, dbias = ds * ctx.scale, ds.sum_to_size(shape)
    return dx, None, dbias.to(dtype), None


_forward.register_autograd(_gradients, setup_context=_setup)


def _dims(y: Tensor, bias_shape: list[int]) -> tuple[list[int], list[int]]:
    """Leading dims of y that the bias has, and those that it was broadcast over."""
    missing = y.ndim - len(bias_shape)
    has = [d >= missing and bias_shape[d - missing] == y.shape[d] for d in range(y.ndim - 1)]
    return [d for d, it in enumerate(has) if it], [d for d, it in enumerate(has) if not it]


def _placed(x: Tensor, dims: list[int]) -> Place | None:
    return placed([x.shape[d] for d in dims], [x.stride(d) for d in dims])


def _sums_in_kernel(y: Tensor, bias_shape: list[int]) -> bool:
    """Return whether the bias' gradient is summed while dx is made: rows that fit a tile, of few leading dims."""
    whole_rows = len(bias_shape) > 0 and bias_shape[-1] == y.shape[-1] <= LONGEST_TILE
    return whole_rows and all(_placed(y, dims) is not None for dims in _dims(y, bias_shape))


def _blocks(length: int) -> Blocks:
    """A tile of about 2048 elements; a long row gets the warps that keep its elements in registers."""
    block = triton.next_power_of_2(length)
    rows = max(1, 2048 // block)
    most_warps = 16 if chip().startswith("gfx") else 32  # 1024 threads
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(most_warps, max(4, block // 1024))}


def _backward_blocks(length: int) -> Blocks:
    """Blocks as `_blocks`, at most 16 elements a thread, which has two tensors' and a sum to keep."""
    blocks = _blocks(length)
    return blocks | {"num_warps": min(16, max(4, blocks["BLOCK"] // 512))}


# --- spec -------------------------------------------------------------------------------------------------------------


def _inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    B, S, H, L, N = (case[name] for name in "BSHLN")

    draw = drawing(dtype, device, generator)
    inputs = {"x": 3 * draw(B, S, H, L, N), "scale": case.get("scale", 0.5)}
    if case.get("mask"):
        hidden = torch.rand(B, S, 1, 1, N, generator=generator) < 0.3
        inputs["mask"] = torch.zeros(hidden.shape).masked_fill(hidden, -1e4).to(device, dtype)
    if case.get("bias"):
        inputs["bias"] = draw(B, 1, H, L, N)
    return inputs


def _traffic(case: Case, dtype: torch.dtype) -> Traffic:
    B, S, H, L, N = (case[name] for name in "BSHLN")
    whole, pair, mask = B * S * H * L * N, B * H * L * N * case.get("bias", False), B * S * N * case.get("mask", False)
    forward = 2 * whole + pair + mask
    return Traffic(dtype.itemsize * forward, dtype.itemsize * (3 * whole + pair), 5 * whole, 5 * whole)


SPECS = (KernelSpec(
    name="softmax",
    function=softmax,
    reference=reference,
    inputs=_inputs,
    grads=("x", "bias"),
    cases=(
        {"B": 1, "S": 3, "H": 2, "L": 5, "N": 100, "mask": True, "bias": True},
        {"B": 2, "S": 1, "H": 3, "L": 1, "N": 63, "bias": True, "scale": -1.0},
        {"B": 1, "S": 1, "H": 1, "L": 2, "N": 1000, "mask": True},
        {"B": 1, "S": 1, "H": 1, "L": 1, "N": 1},
        {"B": 1, "S": 1, "H": 1, "L": 2, "N": LONGEST_TILE + 3, "bias": True},
        {"B": 1, "S": 1, "H": 1, "L": 1, "N": MAX_LENGTH, "mask": True},
        {"B": 1, "S": 0, "H": 2, "L": 3, "N": 4},
    ),
    space={"B": range(1, 3), "S": range(1, 4), "H": range(1, 3), "L": range(1, 8), "N": range(1, 200),
           "mask": (False, True), "bias": (False, True), "scale": (1.0, 0.3)},
    timed=(
        {"B": 1, "S": 128, "H": 8, "L": 256, "N": 256, "mask": True, "bias": True},
        {"B": 1, "S": 16, "H": 16, "L": 256, "N": 2048},
        {"B": 1, "S": 1, "H": 16, "L": 128, "N": 32_768},
    ),
    # Sums and exponentials are in fp32: a few of its roundings. In 16 bits the backward starts from the rounded y, and
    # its sum over a row subtracts: two roundings (2^-8 of bf16, 2^-11 of fp16) meet, twice.
    tolerance={torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3},
    traffic=_traffic,
    gradcheck={"B": 1, "S": 2, "H": 1, "L": 2, "N": 3, "mask": True, "bias": True},
),)  # fmt: skip
