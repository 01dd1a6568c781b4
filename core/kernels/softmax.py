"""Softmax of scaled scores with a mask and a bias: y = softmax(scale x + mask + bias) over the last dim.

    p = exp(s - max s) / sum exp(s - max s),   s = scale x + mask + bias
    ds = p (dp - sum(p dp)),   dx = scale ds,   dbias = ds summed over the dims that the bias was broadcast over

Mask and bias broadcast over any leading dims (the Evoformer's mask over rows of an MSA, its pair bias over the MSA;
Jumper et al. 2021, supplement, algorithms 7 and 13), without a copy of either. One read of x, one write of y; the
backward reads y and dy and writes ds. Sums are in fp32 A row that is -inf
throughout is NaN, as torch's.

A program takes a tile of whole rows, so rows of up to 32,768 elements; longer ones go to torch.
"""

import torch
from torch import Tensor

from core.kernels.blocks import Blocks, chip
from core.kernels.language import tl, triton
from core.kernels.operator import launches, operator, runs_kernel, unsupported_dtype
from core.kernels.spec import Case, KernelSpec, Traffic

MAX_LENGTH = 32_768
LONGEST_TILE = 8192  # of the backward: two tensors have to stay in registers
_NUM_LEADING = 4


def softmax(x: Tensor, *, scale: float = 1.0, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """softmax(scale x + mask + bias, -1), of x's shape and dtype; gradients for x and bias.

    x           [.., N]
    mask, bias  broadcastable to x's shape; the mask is a constant (0 and -inf, or large negative numbers)

    Raises ValueError when mask or bias does not broadcast.
    """
    for name, added in (("mask", mask), ("bias", bias)):
        if added is not None and not _broadcasts(added, x):
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


def _broadcasts(added: Tensor, x: Tensor) -> bool:
    pairs = zip(reversed(added.shape), reversed(x.shape))
    return added.ndim <= x.ndim and all(a in (1, b) for a, b in pairs)


def _unsupported(x: Tensor, mask: Tensor | None, bias: Tensor | None) -> str | None:
    if x.ndim > _NUM_LEADING + 1:
        return f"the kernel takes at most {_NUM_LEADING} leading dims"
    if x.ndim == 0 or x.shape[-1] > MAX_LENGTH:
        return f"the kernel takes rows of at most {MAX_LENGTH} elements"
    return unsupported_dtype(x, mask, bias)


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _row_offset(row, d1, d2, d3, s0, s1, s2, s3):
    """Where a row begins in a tensor of leading dims [.., d1, d2, d3] and strides [s0, s1, s2, s3]."""
    i3, row = row % d3, row // d3
    i2, row = row % d2, row // d2
    return (row // d1) * s0 + (row % d1) * s1 + i2 * s2 + i3 * s3


@triton.jit
def _softmax_forward(
    x, mask, bias, y, num_rows, length, d1, d2, d3, scale,
    x0, x1, x2, x3, x4, m0, m1, m2, m3, m4, b0, b1, b2, b3, b4,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < length)
    at = _row_offset(row, d1, d2, d3, x0, x1, x2, x3) + column * x4
    scores = tl.load(x + at, mask=inside, other=float("-inf")).to(tl.float32) * scale
    if HAS_MASK:
        at = _row_offset(row, d1, d2, d3, m0, m1, m2, m3) + column * m4
        scores += tl.load(mask + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        at = _row_offset(row, d1, d2, d3, b0, b1, b2, b3) + column * b4
        scores += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    scores = tl.where(inside, scores, float("-inf"))  # a negative scale would have turned the filling around
    scores = tl.where(row < num_rows, scores, 0.0)  # rows of nobody: anything finite
    p = tl.exp(scores - tl.max(scores, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None]
    tl.store(y + row * length + column, p, mask=inside)


@triton.jit
def _softmax_backward(
    dy, y, ds, num_rows, length, d1, d2, d3, s0, s1, s2, s3, s4,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """WHOLE: a tile holds whole rows. Longer rows are read twice, the second time mostly from the cache."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    dy_row = dy + _row_offset(row, d1, d2, d3, s0, s1, s2, s3)
    if WHOLE:
        inside = (row < num_rows) & (column < length)
        p = tl.load(y + row * length + column, mask=inside, other=0.0).to(tl.float32)
        dp = tl.load(dy_row + column * s4, mask=inside, other=0.0).to(tl.float32)
        tl.store(ds + row * length + column, p * (dp - tl.sum(p * dp, 1)[:, None]), mask=inside)
    else:
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, length, BLOCK):
            inside = (row < num_rows) & (start + column < length)
            p = tl.load(y + row * length + start + column, mask=inside, other=0.0).to(tl.float32)
            dp = tl.load(dy_row + (start + column) * s4, mask=inside, other=0.0).to(tl.float32)
            total += p * dp
        mean = tl.sum(total, 1)[:, None]
        for start in range(0, length, BLOCK):
            inside = (row < num_rows) & (start + column < length)
            p = tl.load(y + row * length + start + column, mask=inside, other=0.0).to(tl.float32)
            dp = tl.load(dy_row + (start + column) * s4, mask=inside, other=0.0).to(tl.float32)
            tl.store(ds + row * length + start + column, p * (dp - mean), mask=inside)


# --- operators --------------------------------------------------------------------------------------------------------


@operator("softmax_forward")
def _forward(x: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if launches(x):
        blocks, num_rows = _blocks(x.shape[-1]), x.numel() // x.shape[-1]
        added = [x if t is None else t.expand(x.shape) for t in (mask, bias)]
        _softmax_forward[_grid(num_rows, blocks)](
            x, *added, y, num_rows, x.shape[-1], *_leading(x)[0][1:], scale,
            *_strides(x), *_strides(added[0]), *_strides(added[1]),
            HAS_MASK=mask is not None, HAS_BIAS=bias is not None, **blocks,
        )  # fmt: skip
    return y


@operator("softmax_backward")
def _backward(dy: Tensor, y: Tensor) -> Tensor:
    ds = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if launches(y):
        length = y.shape[-1]
        whole = length <= LONGEST_TILE
        blocks, num_rows = _blocks(length if whole else LONGEST_TILE // 2), y.numel() // length
        _softmax_backward[_grid(num_rows, blocks)](
            dy, y, ds, num_rows, length, *_leading(dy)[0][1:], *_strides(dy), WHOLE=whole, **blocks
        )
    return ds


def _setup(ctx, inputs, output) -> None:
    _, _, bias, ctx.scale = inputs
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)
    ctx.save_for_backward(output)


def _gradients(ctx, dy: Tensor):
    (y,) = ctx.saved_tensors
    ds = _backward(dy, y)
    dbias = None
    if ctx.needs_input_grad[2]:
        shape, dtype = ctx.bias
        dbias = ds.sum_to_size(shape).to(dtype)
    dx = ds * ctx.scale if ctx.needs_input_grad[0] else None
    return dx, None, dbias, None


_forward.register_autograd(_gradients, setup_context=_setup)


def _leading(x: Tensor) -> tuple[list[int], list[int]]:
    """Sizes and strides of the leading dims, with dims of one element in front."""
    missing = _NUM_LEADING + 1 - x.ndim
    return [1] * missing + list(x.shape[:-1]), [0] * missing + list(x.stride()[:-1])


def _strides(x: Tensor) -> list[int]:
    return [*_leading(x)[1], x.stride(-1)]


def _blocks(length: int) -> Blocks:
    """A tile of about 2048 elements; a long row gets the warps that keep its elements in registers."""
    block = triton.next_power_of_2(length)
    rows = max(1, 2048 // block)
    most_warps = 16 if chip().startswith("gfx") else 32  # 1024 threads
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(most_warps, max(4, block // 1024))}


def _grid(num_rows: int, blocks: Blocks) -> tuple[int]:
    return (triton.cdiv(num_rows, blocks["ROWS"]),)


# --- spec -------------------------------------------------------------------------------------------------------------


def _inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    B, S, H, L, N = (case[name] for name in "BSHLN")

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device, dtype)

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
        {"B": 1, "S": 1, "H": 1, "L": 2, "N": LONGEST_TILE + 3},
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
