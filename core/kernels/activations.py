"""The activations between the two matrices of an MLP: GELU with its bias, and SwiGLU.

    bias_gelu:  u = x + bias;  y = u Phi(u), Phi the normal distribution function        (Hendrycks and Gimpel 2016)
                exact  Phi(u) = (1 + erf(u / sqrt 2)) / 2,               y' = Phi(u) + u phi(u)
                tanh   Phi(u) ~ sigmoid(c (u + 0.044715 u^3)) = s,       y' = s + u s (1 - s) c (1 + 0.134145 u^2)
                with c = 2 sqrt(2 / pi): the sigmoid of twice the argument is (1 + tanh) / 2
    swiglu:     y = silu(gate) up, silu(g) = g s, s = sigmoid(g)                                      (Shazeer 2020)
                dup = dy g s;  dgate = dy up s (1 + g (1 - s))

Each is one pass over memory. The backward starts from the inputs, which the matrices keep anyway, and computes the
activation again: nothing is saved. The bias' gradient is summed in two phases, over the rows of each program in a fixed
order and then over the programs, so that it is the same in every run. Arithmetic is in fp32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.language import tl, triton
from core.kernels.operator import launches, operator, runs_kernel, unsupported_dtype
from core.kernels.rows import as_rows, grid, shares, tile
from core.kernels.spec import Case, KernelSpec, Traffic, drawing

_APPROXIMATIONS = ("none", "tanh")


def bias_gelu(x: Tensor, bias: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """gelu(x + bias), of x's shape and dtype; gradients for x and bias.

    x            [.., F]
    bias         [F]; None: no bias
    approximate  "tanh", or "none" for the exact form, as in torch.nn.functional.gelu

    Rows that do not lie evenly in memory are copied first. Raises ValueError for another shape or approximation.
    """
    if approximate not in _APPROXIMATIONS:
        raise ValueError(f"bias_gelu: approximate={approximate!r}; choose from {', '.join(_APPROXIMATIONS)}")
    if x.ndim == 0 or (bias is not None and bias.shape != x.shape[-1:]):
        raise ValueError(f"bias_gelu: bias {_shape(bias)} is not one number for each column of x {_shape(x)}")
    if runs_kernel("bias_gelu", x, unless=unsupported_dtype(x, bias)):
        return _gelu_forward(x, bias, approximate == "tanh")
    return gelu_reference(x, bias, approximate=approximate)


def gelu_reference(x: Tensor, bias: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """The same by torch; what runs on a CPU."""
    return F.gelu(x if bias is None else (x + bias).to(x.dtype), approximate=approximate)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up, of up's shape; gradients for both.

    gate, up  [.., F] each, of one dtype; or gate alone [.., 2F]: the gate's columns, then up's

    Rows that do not lie evenly in memory are copied first. Raises ValueError for other shapes.
    """
    if up is None:
        if gate.ndim == 0 or gate.shape[-1] % 2:
            raise ValueError(f"swiglu: {_shape(gate)} is not a gate and an input side by side, [.., 2F]")
        if runs_kernel("swiglu", gate, unless=unsupported_dtype(gate)):
            return _swiglu_fused_forward(gate)
    else:
        if gate.ndim == 0 or gate.shape != up.shape or gate.dtype != up.dtype:
            raise ValueError(f"swiglu: gate {_shape(gate)} {gate.dtype} and up {_shape(up)} {up.dtype} differ")
        if runs_kernel("swiglu", gate, unless=unsupported_dtype(gate)):
            return _swiglu_forward(gate, up)
    return swiglu_reference(gate, up)


def swiglu_reference(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """The same by torch; what runs on a CPU."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    return F.silu(gate) * up


def _shape(x: Tensor | None) -> list[int] | None:
    return None if x is None else list(x.shape)


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _distribution(u, TANH: tl.constexpr):
    """Phi(u)."""
    if TANH:
        return tl.sigmoid(1.5957691216057308 * (u + 0.044715 * u * u * u))
    return 0.5 * (1.0 + tl.erf(u * 0.7071067811865476))


@triton.jit
def _gelu_slope(u, TANH: tl.constexpr):
    """gelu'(u)."""
    p = _distribution(u, TANH)
    if TANH:
        return p + u * p * (1.0 - p) * 1.5957691216057308 * (1.0 + 0.134145 * u * u)
    return p + u * 0.3989422804014327 * tl.exp(-0.5 * u * u)


@triton.jit
def _bias_gelu_forward(
    x, bias, y, num_rows, length, x_row, x_column,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, TANH: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < length)
    u = tl.load(x + row * x_row + column * x_column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        u += tl.load(bias + column, mask=column < length, other=0.0).to(tl.float32)
    tl.store(y + row * length + column, u * _distribution(u, TANH), mask=inside)


@triton.jit
def _bias_gelu_backward(
    dy, x, bias, dx, partial, num_rows, length, rows_each, dy_row, dy_column, x_row, x_column,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, TANH: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """dx, and a program's part of dbias: the sum over its rows_each rows."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    added = tl.zeros((1, BLOCK), tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + column, mask=column < length, other=0.0).to(tl.float32)
    total = tl.zeros((1, BLOCK), tl.float32)
    for start in range(0, rows_each, ROWS):
        row = program * rows_each + start + tl.arange(0, ROWS)[:, None]
        inside = (row < num_rows) & (column < length)
        u = tl.load(x + row * x_row + column * x_column, mask=inside, other=0.0).to(tl.float32) + added
        dout = tl.load(dy + row * dy_row + column * dy_column, mask=inside, other=0.0).to(tl.float32)
        du = dout * _gelu_slope(u, TANH)
        tl.store(dx + row * length + column, du, mask=inside)
        total += tl.sum(du, 0)[None, :]
    if HAS_BIAS:
        tl.store(partial + program * length + column, total, mask=column < length)


@triton.jit
def _swiglu_forward_kernel(
    gate, up, y, num_rows, length, g_row, g_column, u_row, u_column, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < length)
    g = tl.load(gate + row * g_row + column * g_column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * u_row + column * u_column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * length + column, g * tl.sigmoid(g) * u, mask=inside)


@triton.jit
def _swiglu_backward_kernel(
    dy, gate, up, dgate, dup, num_rows, length, dy_row, dy_column, g_row, g_column, u_row, u_column, d_row,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < length)
    g = tl.load(gate + row * g_row + column * g_column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * u_row + column * u_column, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(dy + row * dy_row + column * dy_column, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(dgate + row * d_row + column, dout * u * s * (1.0 + g * (1.0 - s)), mask=inside)
    tl.store(dup + row * d_row + column, dout * g * s, mask=inside)


# --- operators --------------------------------------------------------------------------------------------------------


@operator("bias_gelu_forward")
def _gelu_forward(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if launches(x):
        rows, blocks = as_rows(x), tile(x.shape[-1])
        _bias_gelu_forward[grid(rows, blocks)](
            rows, x if bias is None else bias.contiguous(), y, *rows.shape, *rows.stride(),
            TANH=tanh, HAS_BIAS=bias is not None, **blocks,
        )  # fmt: skip
    return y


@operator("bias_gelu_backward")
def _gelu_backward(dy: Tensor, x: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    """dx, and dbias [F] in fp32 (nothing, [0], without a bias)."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = 0 if bias is None else x.shape[-1]
    if not launches(x):
        return dx, torch.zeros(width, dtype=torch.float32, device=x.device)
    rows, dy_rows, blocks = as_rows(x), as_rows(dy), tile(x.shape[-1])
    programs, rows_each, partial = shares(rows, blocks, width)
    _bias_gelu_backward[programs](
        dy_rows, rows, x if bias is None else bias.contiguous(), dx, partial, *rows.shape, rows_each,
        *dy_rows.stride(), *rows.stride(), TANH=tanh, HAS_BIAS=bias is not None, **blocks,
    )  # fmt: skip
    return dx, partial.sum(0)


def _gelu_setup(ctx, inputs, output) -> None:
    x, bias, ctx.tanh = inputs
    ctx.save_for_backward(x, bias)


def _gelu_gradients(ctx, dy: Tensor):
    x, bias = ctx.saved_tensors
    dx, dbias = _gelu_backward(dy, x, bias, ctx.tanh)
    return dx, None if bias is None else dbias.to(bias.dtype), None


_gelu_forward.register_autograd(_gelu_gradients, setup_context=_gelu_setup)


@operator("swiglu_forward")
def _swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if launches(gate):
        _launch_swiglu(gate, up, y)
    return y


@operator("swiglu_fused_forward")
def _swiglu_fused_forward(x: Tensor) -> Tensor:
    y = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    if launches(x):
        _launch_swiglu(*x.chunk(2, -1), y)
    return y


@operator("swiglu_backward")
def _swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    if launches(gate):
        _launch_swiglu_backward(dy, gate, up, dgate, dup)
    return dgate, dup


@operator("swiglu_fused_backward")
def _swiglu_fused_backward(dy: Tensor, x: Tensor) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if launches(x):
        _launch_swiglu_backward(dy, *x.chunk(2, -1), *dx.chunk(2, -1))
    return dx


def _launch_swiglu(gate: Tensor, up: Tensor, y: Tensor) -> None:
    g, u, blocks = as_rows(gate), as_rows(up), tile(gate.shape[-1])
    _swiglu_forward_kernel[grid(g, blocks)](g, u, y, *g.shape, *g.stride(), *u.stride(), **blocks)


def _launch_swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """dgate and dup lie in memory as new tensors do, or as the two halves of one."""
    d, g, u, blocks = as_rows(dy), as_rows(gate), as_rows(up), tile(gate.shape[-1])
    _swiglu_backward_kernel[grid(g, blocks)](
        d, g, u, dgate, dup, *g.shape, *d.stride(), *g.stride(), *u.stride(), as_rows(dgate).stride(0), **blocks
    )


def _swiglu_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


_swiglu_forward.register_autograd(lambda ctx, dy: _swiglu_backward(dy, *ctx.saved_tensors), setup_context=_swiglu_setup)
_swiglu_fused_forward.register_autograd(
    lambda ctx, dy: _swiglu_fused_backward(dy, *ctx.saved_tensors), setup_context=_swiglu_setup
)


# --- spec -------------------------------------------------------------------------------------------------------------


def _gelu_inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    draw = drawing(dtype, device, generator)
    bias = draw(case["F"]) if case.get("bias", True) else None
    return {"x": 2 * draw(*case["rows"], case["F"]), "bias": bias, "approximate": case.get("approximate", "tanh")}


def _gelu_traffic(case: Case, dtype: torch.dtype) -> Traffic:
    whole = torch.Size(case["rows"]).numel() * case["F"]
    return Traffic(2 * dtype.itemsize * whole, 3 * dtype.itemsize * whole, 10 * whole, 16 * whole)


def _swiglu_inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    draw, rows, length = drawing(dtype, device, generator), case["rows"], case["F"]
    if case.get("fused"):
        return {"gate": 2 * draw(*rows, 2 * length)}
    return {"gate": 2 * draw(*rows, length), "up": 2 * draw(*rows, length)}


def _swiglu_traffic(case: Case, dtype: torch.dtype) -> Traffic:
    whole = torch.Size(case["rows"]).numel() * case["F"]
    return Traffic(3 * dtype.itemsize * whole, 5 * dtype.itemsize * whole, 6 * whole, 10 * whole)


SPECS = (
    KernelSpec(
        name="bias_gelu",
        function=bias_gelu,
        reference=gelu_reference,
        inputs=_gelu_inputs,
        grads=("x", "bias"),
        cases=(
            {"rows": (3, 5), "F": 100},
            {"rows": (33,), "F": 63, "approximate": "none"},
            {"rows": (2, 1, 3), "F": 1100, "approximate": "none", "bias": False},
            {"rows": (5000,), "F": 3},
            {"rows": (), "F": 1},
            {"rows": (0,), "F": 7},
        ),
        space={"rows": ((1,), (3, 2), (130,)), "F": range(1, 200), "approximate": _APPROXIMATIONS,
               "bias": (False, True)},
        timed=(
            {"rows": (4, 2048), "F": 4 * 2048},
            {"rows": (4, 2048), "F": 4 * 2048, "approximate": "none"},
            {"rows": (65_536,), "F": 512},
        ),
        # Elementwise in fp32 and rounded once at the end: 2^-8 of bf16, 2^-11 of fp16; the interpreter cuts bf16 off
        # instead, 2^-7. In fp32 the exponential of the tanh form errs by a few roundings, to which its cube adds.
        tolerance={torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 5e-4},
        traffic=_gelu_traffic,
        gradcheck={"rows": (2,), "F": 3, "approximate": "none"},
    ),
    KernelSpec(
        name="swiglu",
        function=swiglu,
        reference=swiglu_reference,
        inputs=_swiglu_inputs,
        grads=("gate", "up"),
        cases=(
            {"rows": (3, 5), "F": 100},
            {"rows": (3, 5), "F": 100, "fused": True},
            {"rows": (33,), "F": 63, "fused": True},
            {"rows": (2,), "F": 1100},
            {"rows": (), "F": 1},
            {"rows": (0,), "F": 7, "fused": True},
        ),
        space={"rows": ((1,), (3, 2), (130,)), "F": range(1, 200), "fused": (False, True)},
        timed=(
            {"rows": (4, 2048), "F": 11_008},
            {"rows": (4, 2048), "F": 11_008, "fused": True},
        ),
        # Elementwise in fp32, rounded once: 2^-8 of bf16 (2^-7 where the interpreter cuts off), 2^-11 of fp16.
        tolerance={torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 5e-4},
        traffic=_swiglu_traffic,
        gradcheck={"rows": (2,), "F": 3, "fused": True},
    ),
)  # fmt: skip
