"""The operations around the output projection of gated attention: out = residual + mask (sigmoid(gate) (y + bias)).

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

from core.kernels.language import tl, triton
from core.kernels.matmul import linear
from core.kernels.operator import launches, operator, runs_kernel, unsupported_dtype
from core.kernels.rows import as_rows, broadcasts, grid, row_offset, rows_of, shares, tile
from core.kernels.spec import Case, KernelSpec, Traffic, drawing


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
    if mask is not None and not broadcasts(mask, y):
        raise ValueError(f"gated_residual: mask {list(mask.shape)} does not broadcast to y {list(y.shape)}")
    if mask is not None:
        mask = mask.to(y.dtype)
    if runs_kernel("gated_residual", y, unless=unsupported_dtype(y, gate, bias, mask, residual)):
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
    if not torch.is_grad_enabled() and all(x is None or x.dtype == y.dtype for x in (gate, bias, mask, residual)):
        return _without_gradients(y, gate, bias, mask, residual)
    if bias is not None:
        y = y + bias
    if gate is not None:
        y = torch.sigmoid(gate) * y
    if mask is not None:
        y = mask * y
    if residual is not None:
        y = residual + y
    return y.to(dtype)


def _without_gradients(
    y: Tensor, gate: Tensor | None, bias: Tensor | None, mask: Tensor | None, residual: Tensor | None
) -> Tensor:
    """The same, of one dtype, in the memory of its result and at most one tensor more."""
    out = None
    if gate is not None:
        out = torch.sigmoid(gate).mul_(y if bias is None else y + bias)
    elif bias is not None:
        out = y + bias
    if mask is not None:
        out = y * mask if out is None else out.mul_(mask)
    if residual is not None:
        out = y + residual if out is None else out.add_(residual)
    return y.clone() if out is None else out


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
    y = linear(gated_residual(o, gate=gate), weight)
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


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _gated_residual_forward(
    y, gate, bias, mask, residual, out, num_rows, length,
    y_row, y_column, g_row, g_column, r_row, r_column, m_sizes, m_strides, m_column,
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
        mask += row_offset(row, m_sizes, m_strides) + column * m_column
        value *= tl.load(mask, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * r_row + column * r_column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * length + column, value, mask=inside)


@triton.jit
def _gated_residual_backward(
    dout, y, gate, bias, mask, dy, dgate, partial, num_rows, length, rows_each,
    d_row, d_column, y_row, y_column, g_row, g_column, m_sizes, m_strides, m_column,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """dy, dgate, and a program's part of dbias: the sum over its rows_each rows."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    added = tl.zeros((1, BLOCK), tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + column, mask=column < length, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)  # summed over rows once: programs of several warps would wait each time
    for start in range(0, rows_each, ROWS):
        row = program * rows_each + start + tl.arange(0, ROWS)[:, None]
        inside = (row < num_rows) & (column < length)
        d = tl.load(dout + row * d_row + column * d_column, mask=inside, other=0.0).to(tl.float32)
        if HAS_MASK:
            m_at = mask + row_offset(row, m_sizes, m_strides) + column * m_column
            d *= tl.load(m_at, mask=inside, other=0.0).to(tl.float32)
        if HAS_GATE:
            value = tl.load(y + row * y_row + column * y_column, mask=inside, other=0.0).to(tl.float32) + added
            g = tl.load(gate + row * g_row + column * g_column, mask=inside, other=0.0).to(tl.float32)
            s = tl.sigmoid(g)
            tl.store(dgate + row * length + column, d * value * s * (1.0 - s), mask=inside)
            d *= s
        tl.store(dy + row * length + column, d, mask=inside)
        total += d
    if HAS_BIAS:
        tl.store(partial + program * length + column, tl.sum(total, 0)[None, :], mask=column < length)


# --- operators --------------------------------------------------------------------------------------------------------


@operator("gated_residual_forward")
def _forward(
    y: Tensor, gate: Tensor | None, bias: Tensor | None, mask: Tensor | None, residual: Tensor | None
) -> Tensor:
    out = torch.empty(y.shape, dtype=y.dtype if residual is None else residual.dtype, device=y.device)
    if launches(y):
        rows, gates, residuals = (as_rows(y if t is None else t) for t in (y, gate, residual))
        blocks, (masks, *mask_at) = tile(y.shape[-1]), _masks(y, mask)
        _gated_residual_forward[grid(rows, blocks)](
            rows, gates, y if bias is None else bias.contiguous(), masks, residuals, out,
            *rows.shape, *rows.stride(), *gates.stride(), *residuals.stride(), *mask_at,
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
    d, rows, gates = (as_rows(dout if t is None else t) for t in (dout, y, gate))
    blocks, (masks, *mask_at) = tile(dout.shape[-1], elements=1024), _masks(dout, mask)
    programs, rows_each, partial = shares(d, blocks, width)
    _gated_residual_backward[programs](
        d, rows, gates, dout if bias is None else bias.contiguous(), masks, dy, dgate, partial,
        *d.shape, rows_each, *d.stride(), *rows.stride(), *gates.stride(), *mask_at,
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
        dbias = None if bias is None else as_rows(dout).sum(0, dtype=torch.float32).to(bias.dtype)
        return dout.to(ctx.dtype), None, dbias, None, dresidual
    dy, dgate, dbias = _backward(dout, ctx.dtype, y, gate, bias, mask)
    dbias = None if bias is None else dbias.to(bias.dtype)
    return dy, None if gate is None else dgate, dbias, None, dresidual


_forward.register_autograd(_gradients, setup_context=_setup)


def _masks(y: Tensor, mask: Tensor | None) -> tuple[Tensor, tuple[int, ...], tuple[int, ...], int]:
    """The mask of y's shape and where its rows lie; where there is none something in its place."""
    return (y, (1, 1, 1), (0, 0, 0, 0), 1) if mask is None else rows_of(mask.expand(y.shape))


# --- spec -------------------------------------------------------------------------------------------------------------


def _inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    draw = drawing(dtype, device, generator)
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
    draw = drawing(dtype, device, generator)
    lead, H, F = case["rows"], case["H"], case["F"]
    return {
        "o": draw(*lead, H), "gate": draw(*lead, H), "weight": draw(F, H) / max(H, 1) ** 0.5, "bias": draw(F),
        "residual": draw(*lead, F), "mask": (torch.rand((*lead, 1), generator=generator) < 0.7).to(device, dtype),
    }  # fmt: skip


def _output_traffic(case: Case, dtype: torch.dtype) -> Traffic:
    """Through the matrix product: sigmoid(g) o is written and read, and so is y."""
    rows, H, F = torch.Size(case["rows"]).numel(), case["H"], case["F"]
    forward, backward = 4 * H + 4 * F, 7 * H + 4 * F
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
