"""What surrounds the output projection of gated attention: out = residual + mask (sigmoid(gate) (y + bias)).

    s = sigmoid(gate);  dy = mask s dout;  dgate = mask (y + bias) s (1 - s) dout;  dbias = sum dy;  dresidual = dout

Every part is optional, so that one kernel serves both sides of the projection (Jumper et al. 2021, supplement,
algorithm 7, lines 5 and 7) and the end of the triangle update (algorithm 11, line 4), each in one pass over memory:

    gated_residual(o, gate=g)                              what enters the projection: sigmoid(g) o
    gated_residual(y, bias=b, mask=m, residual=x)          what leaves it: x + m (y + b), m the mask of a dropout, say
    gated_residual(y, bias=b, gate=g, residual=x)          the triangle update, gated after its projection

`gated_output` is the first two with the projection, a matrix product of torch's, between them. The backward computes
the sigmoid again. Without gate and mask the gradients are dout itself and its sum, and no kernel runs. The bias'
gradient is summed in two phases, in a fixed order: the same in every run. Arithmetic is in fp32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.blocks import Blocks
from core.kernels.language import tl, triton
from core.kernels.operator import launches, operator, runs_kernel, unsupported_dtype
from core.kernels.spec import Case, KernelSpec, Traffic

_PROGRAMS = 1024
_NUM_LEADING = 3


def gated_residual(
    y: Tensor,
    *,
    gate: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + mask * (sigmoid(gate) * (y + bias)), of y's shape; gradients for all but the mask.

    y, gate, residual  [.., F]; the result has the residual's dtype if there is one, else y's
    bias               [F]
    mask               a constant that broadcasts to y's shape, such as [.., 1] for rows, or a dropout's shared by rows

    Rows that do not lie evenly in memory are copied first. Raises ValueError for other shapes.
    """
    for name, other in (("gate", gate), ("residual", residual)):
        if other is not None and other.shape != y.shape:
            raise ValueError(f"gated_residual: {name} {list(other.shape)} has not the shape of y {list(y.shape)}")
    if y.ndim == 0 or (bias is not None and bias.shape != y.shape[-1:]):
        given = None if bias is None else list(bias.shape)
        raise ValueError(f"gated_residual: bias {given} is not one number for each column of y {list(y.shape)}")
    if mask is not None and not _broadcasts(mask, y):
        raise ValueError(f"gated_residual: mask {list(mask.shape)} does not broadcast to y {list(y.shape)}")
    if mask is not None:
        mask = mask.to(y.dtype)
    if runs_kernel("gated_residual", y, unless=_unsupported(y, gate, bias, mask, residual)):
        return _forward(y, gate, bias, mask, residual)
    return reference(y, gate=gate, bias=bias, mask=mask, residual=residual)


def reference(
    y: Tensor,
    *,
    gate: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The same by torch; what runs on a CPU."""
    dtype = y.dtype if residual is None else residual.dtype
    if bias is not None:
        y = y + bias
    if gate is not None:
        y = torch.sigmoid(gate) * y
    if mask is not None:
        y = mask * y
    if residual is not None:
        y = residual + y
    return y.to(dtype)


def gated_output(
    o: Tensor,
    gate: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """residual + mask * ((sigmoid(gate) * o) weight^T + bias), with gradients for all but the mask.

    o, gate     [.., H], attention's output with its heads side by side, and the gate before its sigmoid
    weight      [F, H], bias [F]
    residual    [.., F]; mask broadcasts to that

    Raises ValueError for other shapes.
    """
    if weight.ndim != 2 or o.ndim == 0 or o.shape[-1] != weight.shape[1]:
        raise ValueError(f"gated_output: o {list(o.shape)} does not fit the weight {list(weight.shape)} [F, H]")
    y = F.linear(gated_residual(o, gate=gate), weight)
    return gated_residual(y, bias=bias, mask=mask, residual=residual)


def output_reference(
    o: Tensor,
    gate: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """gated_output by torch alone."""
    y = F.linear(torch.sigmoid(gate) * o, weight, bias)
    y = y if mask is None else mask * y
    return y if residual is None else residual + y


def _broadcasts(mask: Tensor, y: Tensor) -> bool:
    pairs = zip(reversed(mask.shape), reversed(y.shape))
    return mask.ndim <= y.ndim and all(m in (1, n) for m, n in pairs)


def _unsupported(y: Tensor, gate: Tensor | None, bias: Tensor | None, mask: Tensor | None, residual: Tensor | None):
    if mask is not None and y.ndim > _NUM_LEADING + 1:
        return f"with a mask the kernel takes at most {_NUM_LEADING} leading dims"
    return unsupported_dtype(y, gate, bias, mask, residual)


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _mask_at(mask, row, column, d1, d2, m0, m1, m2, m3):
    """Where the mask of a row and column of y[d0, d1, d2, F] lies."""
    return mask + (row // (d1 * d2)) * m0 + (row // d2 % d1) * m1 + (row % d2) * m2 + column * m3


@triton.jit
def _gated_residual_forward(
    y, gate, bias, mask, residual, out, num_rows, length, d1, d2,
    y_row, y_column, g_row, g_column, r_row, r_column, m0, m1, m2, m3,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < length)
    value = tl.load(y + row * y_row + column * y_column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + column, mask=column < length, other=0.0).to(tl.float32)
    if HAS_GATE:
        g = tl.load(gate + row * g_row + column * g_column, mask=inside, other=0.0).to(tl.float32)
        value *= tl.sigmoid(g)
    if HAS_MASK:
        value *= tl.load(_mask_at(mask, row, column, d1, d2, m0, m1, m2, m3), mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * r_row + column * r_column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * length + column, value, mask=inside)


@triton.jit
def _gated_residual_backward(
    dout, y, gate, bias, mask, dy, dgate, partial, num_rows, length, d1, d2, rows_each,
    d_row, d_column, y_row, y_column, g_row, g_column, m0, m1, m2, m3, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """dy, dgate, and a program's part of dbias: the sum over its rows_each rows."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    added = tl.zeros((1, BLOCK), tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + column, mask=column < length, other=0.0).to(tl.float32)
    total = tl.zeros((1, BLOCK), tl.float32)
    for start in range(0, rows_each, ROWS):
        row = program * rows_each + start + tl.arange(0, ROWS)[:, None]
        inside = (row < num_rows) & (column < length)
        d = tl.load(dout + row * d_row + column * d_column, mask=inside, other=0.0).to(tl.float32)
        if HAS_MASK:
            d *= tl.load(_mask_at(mask, row, column, d1, d2, m0, m1, m2, m3), mask=inside, other=0.0).to(tl.float32)
        if HAS_GATE:
            value = tl.load(y + row * y_row + column * y_column, mask=inside, other=0.0).to(tl.float32) + added
            g = tl.load(gate + row * g_row + column * g_column, mask=inside, other=0.0).to(tl.float32)
            s = tl.sigmoid(g)
            tl.store(dgate + row * length + column, d * value * s * (1.0 - s), mask=inside)
            d *= s
        tl.store(dy + row * length + column, d, mask=inside)
        total += tl.sum(d, 0)[None, :]
    if HAS_BIAS:
        tl.store(partial + program * length + column, total, mask=column < length)


# --- operators --------------------------------------------------------------------------------------------------------


@operator("gated_residual_forward")
def _forward(
    y: Tensor, gate: Tensor | None, bias: Tensor | None, mask: Tensor | None, residual: Tensor | None
) -> Tensor:
    out = torch.empty(y.shape, dtype=y.dtype if residual is None else residual.dtype, device=y.device)
    if launches(y):
        rows, gates, residuals = (_rows(y if t is None else t) for t in (y, gate, residual))
        blocks = _blocks(y.shape[-1])
        grid = triton.cdiv(rows.shape[0], blocks["ROWS"]), triton.cdiv(rows.shape[1], blocks["BLOCK"])
        sizes, mask_strides = _leading(y, mask)
        _gated_residual_forward[grid](
            rows, gates, y if bias is None else bias.contiguous(), y if mask is None else mask, residuals, out,
            *rows.shape, *sizes, *rows.stride(), *gates.stride(), *residuals.stride(), *mask_strides,
            HAS_GATE=gate is not None, HAS_BIAS=bias is not None, HAS_MASK=mask is not None,
            HAS_RESIDUAL=residual is not None, **blocks,
        )  # fmt: skip
    return out


@operator("gated_residual_backward")
def _backward(
    dout: Tensor, dtype: torch.dtype, y: Tensor | None, gate: Tensor | None, bias: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dy of the given dtype, dgate, and dbias in fp32; [0] for what there is none of. y is given where a gate is."""
    dy = torch.empty(dout.shape, dtype=dtype, device=dout.device)
    dgate = dy.new_empty(0) if gate is None else torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    width = 0 if bias is None else dout.shape[-1]
    if not launches(dout):
        return dy, dgate, torch.zeros(width, dtype=torch.float32, device=dout.device)
    d, rows, gates = (_rows(dout if t is None else t) for t in (dout, y, gate))
    blocks = _blocks(dout.shape[-1], tile=1024)
    num_columns = triton.cdiv(d.shape[1], blocks["BLOCK"])
    rows_each = blocks["ROWS"] * max(1, triton.cdiv(d.shape[0] * num_columns, blocks["ROWS"] * _PROGRAMS))
    grid = (triton.cdiv(d.shape[0], rows_each), num_columns)
    partial = torch.empty((grid[0], width), dtype=torch.float32, device=dout.device)
    sizes, mask_strides = _leading(dout, mask)
    _gated_residual_backward[grid](
        d, rows, gates, dout if bias is None else bias.contiguous(), dout if mask is None else mask, dy, dgate, partial,
        *d.shape, *sizes, rows_each, *d.stride(), *rows.stride(), *gates.stride(), *mask_strides,
        HAS_GATE=gate is not None, HAS_BIAS=bias is not None, HAS_MASK=mask is not None, **blocks,
    )  # fmt: skip
    return dy, dgate, partial.sum(0)


def _setup(ctx, inputs, output) -> None:
    y, gate, bias, mask, residual = inputs
    ctx.dtype, ctx.has_residual = y.dtype, residual is not None
    ctx.save_for_backward(None if gate is None else y, gate, bias, mask)


def _gradients(ctx, dout: Tensor):
    y, gate, bias, mask = ctx.saved_tensors
    dresidual = dout if ctx.has_residual else None
    if gate is None and mask is None:
        dbias = None if bias is None else _rows(dout).sum(0, dtype=torch.float32).to(bias.dtype)
        return dout.to(ctx.dtype), None, dbias, None, dresidual
    dy, dgate, dbias = _backward(dout, ctx.dtype, y, gate, bias, mask)
    dbias = None if bias is None else dbias.to(bias.dtype)
    return dy, None if gate is None else dgate, dbias, None, dresidual


_forward.register_autograd(_gradients, setup_context=_setup)


def _rows(x: Tensor) -> Tensor:
    """x as [rows, F]: a view wherever the leading dims lie evenly in memory."""
    return x.reshape(-1, x.shape[-1])


def _leading(y: Tensor, mask: Tensor | None) -> tuple[list[int], list[int]]:
    """The last two leading dims of y, and the mask's strides over y[d0, d1, d2, F]."""
    if mask is None:
        return [1, 1], [0] * (_NUM_LEADING + 1)
    missing = _NUM_LEADING + 1 - y.ndim
    return ([1] * missing + list(y.shape))[1:-1], [0] * missing + list(mask.expand(y.shape).stride())


def _blocks(length: int, tile: int = 2048) -> Blocks:
    """A tile of 2048 elements: two loads of 16 bytes in flight for each thread and tensor; the backward has half."""
    block = min(1024, triton.next_power_of_2(length))
    return {"ROWS": tile // block, "BLOCK": block, "num_warps": 4}


# --- spec -------------------------------------------------------------------------------------------------------------


def _inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device, dtype)

    lead, F, parts = case["rows"], case["F"], case["parts"]
    inputs = {"y": draw(*lead, F)}
    for name in ("gate", "residual"):
        if name in parts:
            inputs[name] = draw(*lead, F)
    if "bias" in parts:
        inputs["bias"] = draw(F)
    if "mask" in parts:
        kept = torch.rand((*lead, 1), generator=generator) < 0.7
        inputs["mask"] = kept.to(device, dtype)
    if "dropout" in parts:  # shared by the rows of the pair
        kept = torch.rand((*lead[:-2], 1, *lead[-1:], F), generator=generator) < 0.75
        inputs["mask"] = (kept / 0.75).to(device, dtype)
    return inputs


def _traffic(case: Case, dtype: torch.dtype) -> Traffic:
    whole, parts = torch.Size(case["rows"]).numel() * case["F"], case["parts"]
    gate, residual = "gate" in parts, "residual" in parts
    backward = 2 + 3 * gate if gate or "mask" in parts or "dropout" in parts else "bias" in parts
    forward = 2 + gate + residual
    return Traffic(dtype.itemsize * forward * whole, dtype.itemsize * backward * whole, 4 * whole, 6 * whole)


def _output_inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device, dtype)

    lead, H, F = case["rows"], case["H"], case["F"]
    return {
        "o": draw(*lead, H), "gate": draw(*lead, H), "weight": draw(F, H) / max(H, 1) ** 0.5, "bias": draw(F),
        "residual": draw(*lead, F), "mask": (torch.rand((*lead, 1), generator=generator) < 0.7).to(device, dtype),
    }  # fmt: skip


def _output_traffic(case: Case, dtype: torch.dtype) -> Traffic:
    """Through the matrix product: sigmoid(g) o is written and read, and so is y."""
    rows, H, F = torch.Size(case["rows"]).numel(), case["H"], case["F"]
    forward, backward = 4 * H + 4 * F, 9 * H + 5 * F
    product = 2 * rows * H * F
    return Traffic(dtype.itemsize * rows * forward, dtype.itemsize * rows * backward, product, 2 * product)


SPECS = (
    KernelSpec(
        name="gated_residual",
        function=gated_residual,
        reference=reference,
        inputs=_inputs,
        grads=("y", "gate", "bias", "residual"),
        cases=(
            {"rows": (2, 3, 5), "F": 100, "parts": ("gate", "bias", "dropout", "residual")},
            {"rows": (7, 33), "F": 63, "parts": ("bias", "mask", "residual")},
            {"rows": (2, 2, 1, 3), "F": 1100, "parts": ("gate",)},
            {"rows": (5000,), "F": 3, "parts": ("gate", "bias")},
            {"rows": (2, 3, 5), "F": 6, "parts": ("gate", "mask")},
            {"rows": (3,), "F": 5, "parts": ("bias", "residual")},
            {"rows": (1,), "F": 1, "parts": ("gate", "mask")},
            {"rows": (0, 2), "F": 7, "parts": ("gate", "bias", "mask", "residual")},
        ),
        space={"rows": ((1, 1), (3, 2), (2, 3, 11)), "F": range(1, 200),
               "parts": (("gate",), ("bias", "dropout"), ("gate", "mask", "residual"), ("gate", "bias", "residual"))},
        timed=(
            {"rows": (512, 512), "F": 128, "parts": ("gate", "bias", "dropout", "residual")},
            {"rows": (512, 512), "F": 128, "parts": ("gate",)},
            {"rows": (512, 512), "F": 128, "parts": ("bias", "mask", "residual")},
        ),
        # Elementwise in fp32, rounded once: 2^-8 of bf16 (2^-7 where the interpreter cuts off), 2^-11 of fp16. In fp32
        # the terms of dbias may cancel but for a tenth.
        tolerance={torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 5e-4},
        traffic=_traffic,
        gradcheck={"rows": (2, 2), "F": 2, "parts": ("gate", "bias", "mask", "residual")},
    ),
    KernelSpec(
        name="gated_output",
        function=gated_output,
        reference=output_reference,
        inputs=_output_inputs,
        grads=("o", "gate", "weight", "bias", "residual"),
        cases=(
            {"rows": (3, 5), "H": 24, "F": 17},
            {"rows": (1,), "H": 1, "F": 1},
            {"rows": (0,), "H": 3, "F": 2},
        ),
        timed=({"rows": (512, 512), "H": 128, "F": 128}, {"rows": (128, 256), "H": 256, "F": 256}),
        # Two roundings meet in a row of a product, sigmoid(g) o or dy and the result's own: twice gated_residual's.
        tolerance={torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 1.5e-3},
        traffic=_output_traffic,
        gradcheck={"rows": (2,), "H": 3, "F": 2},
    ),
)  # fmt: skip
