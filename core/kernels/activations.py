"""The activation between the matrices of a gated MLP: SwiGLU (Shazeer 2020).

    y = silu(gate) up, silu(g) = g s, s = sigmoid(g)
    dup = dy g s;  dgate = dy up s (1 + g (1 - s))

One pass over memory. The backward starts from the inputs, which the matrices keep anyway, and computes the activation
again: nothing is saved. Arithmetic is in fp32. (GELU needs no kernel: torch's is one pass, and its bias is the
matrix product's.)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.language import tl, triton
from core.kernels.operator import launches, operator, runs_kernel, unsupported_dtype
from core.kernels.rows import as_rows, grid, tile
from core.kernels.spec import Case, KernelSpec, Traffic, drawing


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
