"""LayerNorm and RMSNorm over the last dim, with an optional weight and bias, and an optional residual added before.

    s = x + residual,   xhat = (s - mean s) rstd,   rstd = 1 / sqrt(mean((s - mean s)^2) + eps),   y = xhat w + b
    g = dy w,   ds = rstd (g - mean g - xhat mean(g xhat)) + dtotal,   dw = sum_rows dy xhat,   db = sum_rows dy

RMSNorm is the same without the means of s and g. Ba et al., "Layer Normalization" (2016); Zhang and Sennrich, "Root
Mean Square Layer Normalization" (2019). With a residual the sum s is a result, too: it is what the next block adds to,
and `dtotal` is its gradient; one pass over memory less each way than an addition and a norm.

Forward: one read of x (and residual), one write of y (and s); mean and rstd are kept, one number a row. Backward: one
read of s and dy, one write of ds. The gradients of weight and bias take two phases: each program sums over its share of
the rows in registers, in an order that depends on the sizes alone; then the programs' sums are summed. No atomics, so
the same input has the same gradients, bit for bit. Rows of more than 8192 elements leave no registers for these sums:
then ds is made by tiles of a row, and a second kernel reads s and dy once more for the sums.

Sums are in fp32 whatever the dtypes. A program takes whole rows, so rows of up to 16,384 elements; longer ones go to
torch. Leading dims may have any strides; those that do not come down to four are copied.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.blocks import Blocks, chip, tuned
from core.kernels.language import tl, triton
from core.kernels.operator import launches, operator, runs_kernel, unsupported_dtype
from core.kernels.rows import programs_summed, row_offset, rows_of
from core.kernels.spec import Case, KernelSpec, Traffic, drawing

MAX_LENGTH = 16_384
_MAX_FUSED_LENGTH = 8192

NormResult = Tensor | tuple[Tensor, Tensor]


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
) -> NormResult:
    """y, of x's shape and dtype; with a residual (y, x + residual). Gradients for x, weight, bias and residual.

    x, residual   [.., N]; their sum is in the wider of their dtypes
    weight, bias  [N]

    Raises ValueError when a shape does not fit x.
    """
    _check("layer_norm", x, weight, bias, residual)
    if runs_kernel("layer_norm", x, unless=_unsupported(x, weight, bias, residual)):
        y, total, _, _ = _forward(x, residual, weight, bias, eps, True)
        return y if residual is None else (y, total)
    return layer_norm_reference(x, weight, bias, eps, residual=residual)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
) -> NormResult:
    """Normalise as `layer_norm`, without subtracting the mean."""
    _check("rms_norm", x, weight, bias, residual)
    if runs_kernel("rms_norm", x, unless=_unsupported(x, weight, bias, residual)):
        y, total, _, _ = _forward(x, residual, weight, bias, eps, False)
        return y if residual is None else (y, total)
    return rms_norm_reference(x, weight, bias, eps, residual=residual)


def layer_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
) -> NormResult:
    """The same by torch; what runs on a CPU."""
    total = x if residual is None else x + residual
    y = F.layer_norm(*_alike(total, weight, bias), eps).to(x.dtype)
    return y if residual is None else (y, total)


def rms_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
) -> NormResult:
    """The same by torch; what runs on a CPU."""
    total = x if residual is None else x + residual
    wide, shape, wide_weight, wide_bias = _alike(total, weight, bias)
    y = F.rms_norm(wide, shape, wide_weight, eps)
    y = (y if wide_bias is None else y + wide_bias).to(x.dtype)
    return y if residual is None else (y, total)


def _alike(
    total: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, list[int], Tensor | None, Tensor | None]:
    """Arguments of torch's norms, all in the widest of their dtypes."""
    dtype = total.dtype
    for other in (weight, bias):
        dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    weight, bias = (None if t is None else t.to(dtype) for t in (weight, bias))
    return total.to(dtype), list(total.shape[-1:]), weight, bias


def _check(name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> None:
    if x.ndim == 0:
        raise ValueError(f"{name}: x has no dim to normalise over")
    for what, given, allowed in (
        ("weight", weight, x.shape[-1:]),
        ("bias", bias, x.shape[-1:]),
        ("residual", residual, x.shape),
    ):
        if given is not None and given.shape != allowed:
            raise ValueError(f"{name}: {what} {list(given.shape)} for x {list(x.shape)}; it must be {list(allowed)}")


def _unsupported(x: Tensor, *others: Tensor | None) -> str | None:
    if x.shape[-1] > MAX_LENGTH:
        return f"the kernel takes rows of at most {MAX_LENGTH} elements"
    return unsupported_dtype(x, *others)


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _vector(vector, columns, stride, length):
    """A weight or bias in fp32, loaded with one dim: as [1, N] it would have a layout of its own, columns over warps,
    which the tile would be brought into, and sums of a row would go through shared memory."""
    return tl.load(vector + columns * stride, mask=columns < length, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_forward(
    x, residual, weight, bias, y, total, mean, rstd, num_rows, length, eps,
    x_sizes, x_strides, x_column, r_sizes, r_strides, r_column, w_column, b_column,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CENTERED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
    columns = tl.arange(0, BLOCK).to(tl.int64)
    column = columns[None, :]
    inside = (row < num_rows) & (column < length)
    at = row * length + column
    s = tl.load(x + row_offset(row, x_sizes, x_strides) + column * x_column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        r_at = row_offset(row, r_sizes, r_strides) + column * r_column
        s += tl.load(residual + r_at, mask=inside, other=0.0).to(tl.float32)
        rounded = s.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        s = rounded.to(tl.float32)  # what the backward will read
    if CENTERED:
        center = tl.sum(s, 1)[:, None] / length
        s = tl.where(inside, s - center, 0.0)
        tl.store(mean + row, center, mask=row < num_rows)
    scale = tl.rsqrt(tl.sum(s * s, 1)[:, None] / length + eps)
    tl.store(rstd + row, scale, mask=row < num_rows)
    s *= scale
    if HAS_WEIGHT:
        s *= _vector(weight, columns, w_column, length)[None, :]
    if HAS_BIAS:
        s += _vector(bias, columns, b_column, length)[None, :]
    tl.store(y + at, s, mask=inside)


@triton.jit
def _normalised(s_at, mean, rstd, row, num_rows, inside, CENTERED: tl.constexpr):
    """(xhat, 0 outside; rstd) of a tile, the way the forward had them."""
    s = tl.load(s_at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(rstd + row, mask=row < num_rows, other=0.0)
    if CENTERED:
        s = tl.where(inside, s - tl.load(mean + row, mask=row < num_rows, other=0.0), 0.0)
    return s * scale, scale


@triton.jit
def _norm_backward(
    dy, total, mean, rstd, weight, dtotal, ds, dweight, dbias, num_rows, length,
    dy_sizes, dy_strides, dy_column, s_sizes, s_strides, s_column, t_sizes, t_strides, t_column, w_column,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CENTERED: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_DTOTAL: tl.constexpr, SUMS_WEIGHT: tl.constexpr, SUMS_BIAS: tl.constexpr,
):  # fmt: skip
    """Program p of P takes tiles p, p + P, …, and sums over their rows into row p of dweight and dbias, both [P, N]."""
    first = tl.program_id(0)
    columns = tl.arange(0, BLOCK).to(tl.int64)
    column = columns[None, :]
    if HAS_WEIGHT:
        w = _vector(weight, columns, w_column, length)[None, :]
    if SUMS_WEIGHT:
        weight_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    if SUMS_BIAS:
        bias_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(first, tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
        inside = (row < num_rows) & (column < length)
        s_at = total + row_offset(row, s_sizes, s_strides) + column * s_column
        xhat, scale = _normalised(s_at, mean, rstd, row, num_rows, inside, CENTERED)
        y_at = dy + row_offset(row, dy_sizes, dy_strides) + column * dy_column
        g = tl.load(y_at, mask=inside, other=0.0).to(tl.float32)
        if SUMS_WEIGHT:
            weight_sum += g * xhat
        if SUMS_BIAS:
            bias_sum += g
        if HAS_WEIGHT:
            g *= w
        d = g - xhat * (tl.sum(g * xhat, 1)[:, None] / length)
        if CENTERED:
            d -= tl.sum(g, 1)[:, None] / length
        d *= scale
        if HAS_DTOTAL:
            t_at = dtotal + row_offset(row, t_sizes, t_strides) + column * t_column
            d += tl.load(t_at, mask=inside, other=0.0).to(tl.float32)
        tl.store(ds + row * length + column, d, mask=inside)
    at = first.to(tl.int64) * length + tl.arange(0, BLOCK)
    if SUMS_WEIGHT:
        tl.store(dweight + at, tl.sum(weight_sum, 0), mask=tl.arange(0, BLOCK) < length)
    if SUMS_BIAS:
        tl.store(dbias + at, tl.sum(bias_sum, 0), mask=tl.arange(0, BLOCK) < length)


@triton.jit
def _norm_backward_long(
    dy, total, mean, rstd, weight, dtotal, ds, num_rows, length,
    dy_sizes, dy_strides, dy_column, s_sizes, s_strides, s_column, t_sizes, t_strides, t_column, w_column,
    BLOCK: tl.constexpr, CENTERED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_DTOTAL: tl.constexpr,
):  # fmt: skip
    """ds of one row a program, which goes over the row twice; the second time it comes from a cache."""
    row = tl.program_id(0).to(tl.int64)
    total += row_offset(row, s_sizes, s_strides)
    dy += row_offset(row, dy_sizes, dy_strides)
    dtotal += row_offset(row, t_sizes, t_strides)
    products = tl.zeros((BLOCK,), tl.float32)
    plain = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, length, BLOCK):
        column = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = column < length
        xhat, _ = _normalised(total + column * s_column, mean, rstd, row, num_rows, inside, CENTERED)
        g = tl.load(dy + column * dy_column, mask=inside, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g *= tl.load(weight + column * w_column, mask=inside, other=0.0).to(tl.float32)
        products += g * xhat
        plain += g
    mean_product, mean_plain = tl.sum(products, 0) / length, tl.sum(plain, 0) / length
    for start in range(0, length, BLOCK):
        column = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = column < length
        xhat, scale = _normalised(total + column * s_column, mean, rstd, row, num_rows, inside, CENTERED)
        d = tl.load(dy + column * dy_column, mask=inside, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            d *= tl.load(weight + column * w_column, mask=inside, other=0.0).to(tl.float32)
        d -= xhat * mean_product
        if CENTERED:
            d -= mean_plain
        d *= scale
        if HAS_DTOTAL:
            d += tl.load(dtotal + column * t_column, mask=inside, other=0.0).to(tl.float32)
        tl.store(ds + row * length + column, d, mask=inside)


@triton.jit
def _norm_backward_parameters(
    dy, total, mean, rstd, dweight, dbias, num_rows, length,
    dy_sizes, dy_strides, dy_column, s_sizes, s_strides, s_column,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CENTERED: tl.constexpr, SUMS_WEIGHT: tl.constexpr, SUMS_BIAS: tl.constexpr,
):  # fmt: skip
    """The sums of `_norm_backward` for long rows: programs (p of P, part of the columns)."""
    first = tl.program_id(0)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = columns[None, :]
    weight_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    bias_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(first, tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
        inside = (row < num_rows) & (column < length)
        y_at = dy + row_offset(row, dy_sizes, dy_strides) + column * dy_column
        g = tl.load(y_at, mask=inside, other=0.0).to(tl.float32)
        if SUMS_WEIGHT:
            s_at = total + row_offset(row, s_sizes, s_strides) + column * s_column
            xhat, _ = _normalised(s_at, mean, rstd, row, num_rows, inside, CENTERED)
            weight_sum += g * xhat
        if SUMS_BIAS:
            bias_sum += g
    at = first.to(tl.int64) * length + columns
    if SUMS_WEIGHT:
        tl.store(dweight + at, tl.sum(weight_sum, 0), mask=columns < length)
    if SUMS_BIAS:
        tl.store(dbias + at, tl.sum(bias_sum, 0), mask=columns < length)


# --- operators --------------------------------------------------------------------------------------------------------


@operator("norm_forward")
def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, x + residual, mean[rows], rstd[rows]); the second is empty without a residual, the third if not centered."""
    num_rows = x.shape[:-1].numel()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if residual is None:
        total = torch.empty(0, dtype=x.dtype, device=x.device)
    else:
        total = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
    mean = torch.empty(num_rows if centered else 0, dtype=torch.float32, device=x.device)
    rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if launches(x):
        blocks = _blocks(x.shape[-1])
        if blocks["BLOCK"] == 8192 and not chip().startswith("gfx"):  # whose blocks have 1024 threads at most
            blocks["num_warps"] = 32  # at 16 a register is spilled on sm_90
        x, *x_at = rows_of(x)
        added, *added_at = (x, *x_at) if residual is None else rows_of(residual)

        def run(blocks: Blocks) -> None:
            _norm_forward[(triton.cdiv(num_rows, blocks["ROWS"]),)](
                x, added, _or(weight, x), _or(bias, x), y, total, mean, rstd, num_rows, x.shape[-1], eps,
                *x_at, *added_at, _stride(weight), _stride(bias),
                CENTERED=centered, HAS_RESIDUAL=residual is not None,
                HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, **blocks,
            )  # fmt: skip

        key = triton.next_power_of_2(num_rows), blocks["BLOCK"], x.dtype, centered, residual is not None
        tuned("norm_forward", key, blocks, run, num_warps=(4, 8, 16))
    return y, total, mean, rstd


@operator("norm_backward")
def _backward(
    dy: Tensor,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    dtotal: Tensor | None,
    centered: bool,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(ds, dweight[N], dbias[N]), the latter two in these dtypes; without one they are not wanted, and empty."""
    num_rows, length = rstd.shape[0], total.shape[-1]
    ds = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    dtypes = weight_dtype, bias_dtype
    wanted = [dtype for dtype in dtypes if dtype is not None]
    if not launches(total):
        return ds, *(torch.zeros(0 if d is None else length, dtype=d, device=ds.device) for d in dtypes)
    blocks = _blocks(length)
    has_dtotal = dtotal is not None
    (dy, *dy_at), (total, *total_at) = rows_of(dy), rows_of(total)
    dtotal, *dtotal_at = (total, *total_at) if dtotal is None else rows_of(dtotal)
    num_programs = _num_programs(num_rows, blocks)
    parts_KPN = torch.empty((len(wanted), num_programs, length), dtype=torch.float32, device=ds.device)
    of_weight, of_bias = (parts_KPN[0], parts_KPN[-1]) if wanted else (rstd, rstd)
    strides = *dy_at, *total_at, *dtotal_at, _stride(weight)
    gradients = {"CENTERED": centered, "HAS_WEIGHT": weight is not None, "HAS_DTOTAL": has_dtotal}
    sums = {"SUMS_WEIGHT": weight_dtype is not None, "SUMS_BIAS": bias_dtype is not None}
    inputs = dy, total, mean, rstd
    if length <= _MAX_FUSED_LENGTH:
        if total.element_size() == 2 and chip() in ("sm_80", "sm_100"):  # with half as many a few registers are spilled
            blocks["num_warps"] = min(16, 2 * blocks["num_warps"])

        def run(blocks: Blocks) -> None:
            _norm_backward[(num_programs,)](
                *inputs, _or(weight, total), dtotal, ds, of_weight, of_bias, num_rows, length, *strides,
                **gradients, **sums, **blocks,
            )  # fmt: skip

        key = triton.next_power_of_2(num_rows), blocks["BLOCK"], dy.dtype, centered, *sums.values()
        tuned("norm_backward", key, blocks, run, num_warps=(4, 8, 16))
    else:
        _norm_backward_long[(num_rows,)](
            *inputs, _or(weight, total), dtotal, ds, num_rows, length, *strides,
            **gradients, BLOCK=2048, num_warps=8,
        )  # fmt: skip
        if wanted:
            _norm_backward_parameters[(num_programs, triton.cdiv(length, 128))](
                *inputs, of_weight, of_bias, num_rows, length, *dy_at, *total_at,
                CENTERED=centered, **sums, ROWS=8, BLOCK=128, num_warps=4,
            )  # fmt: skip
    found = iter(programs_summed(parts_KPN, *wanted) if wanted else ())
    return ds, *(torch.empty(0, device=ds.device) if d is None else next(found) for d in dtypes)


def _setup(ctx, inputs, output) -> None:
    x, residual, weight, bias, _, ctx.centered = inputs
    _, total, mean, rstd = output
    ctx.set_materialize_grads(False)
    ctx.dtypes = [None if t is None else t.dtype for t in (x, residual, weight, bias)]
    ctx.save_for_backward(x if residual is None else total, mean, rstd, weight)


def _gradients(ctx, dy: Tensor | None, dtotal: Tensor | None, *_):
    total, mean, rstd, weight = ctx.saved_tensors
    x_dtype, residual_dtype, weight_dtype, bias_dtype = ctx.dtypes
    dweight = dbias = None
    if residual_dtype is None:
        dtotal = None  # of nothing
    if dy is None:
        ds = dtotal
    else:
        of_weight, of_bias = ctx.needs_input_grad[2:4]
        dtypes = weight_dtype if of_weight else None, bias_dtype if of_bias else None
        ds, dweight, dbias = _backward(dy, total, mean, rstd, weight, dtotal, ctx.centered, *dtypes)
        dweight, dbias = dweight if of_weight else None, dbias if of_bias else None
    dx = ds.to(x_dtype) if ctx.needs_input_grad[0] and ds is not None else None
    dresidual = ds.to(residual_dtype) if ctx.needs_input_grad[1] and ds is not None else None
    return dx, dresidual, dweight, dbias, None, None


_forward.register_autograd(_gradients, setup_context=_setup)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """The stand-in for an argument that the kernel will not look at."""
    return other if tensor is None else tensor


def _stride(vector: Tensor | None) -> int:
    return 1 if vector is None else vector.stride(0)


def _blocks(length: int) -> Blocks:
    """A tile of about 2048 elements, 16 a thread; the longest rows get 32, as 1024 threads would have 64 registers."""
    block = triton.next_power_of_2(length)
    return {"ROWS": max(1, 2048 // block), "BLOCK": block, "num_warps": min(16, max(4, block // 512))}


def _num_programs(num_rows: int, blocks: Blocks) -> int:
    """Programs that sum over rows: as many as 132 processors run at a time, four on each for their registers, so that
    none begins when others end; few enough that their sums (4 MiB) are small beside x."""
    return min(528, max(256, (1 << 20) // blocks["BLOCK"]), triton.cdiv(num_rows, blocks["ROWS"]))


# --- specs ------------------------------------------------------------------------------------------------------------


def _inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    B, L, N = (case[name] for name in "BLN")

    draw = drawing(dtype, device, generator)
    # A large eps: it shows, and one or two elements a row keep gradients that are not differences of rounding errors.
    inputs = {"x": 2 * draw(B, L, N) + 1, "eps": 1.0}
    if case.get("weight"):
        inputs["weight"] = draw(N)
    if case.get("bias"):
        inputs["bias"] = draw(N)
    if case.get("residual"):
        inputs["residual"] = draw(B, L, N)
    return inputs


def _traffic(case: Case, dtype: torch.dtype) -> Traffic:
    whole, added = case["B"] * case["L"] * case["N"], 2 * bool(case.get("residual"))
    return Traffic(
        dtype.itemsize * (2 + added) * whole, dtype.itemsize * (3 + added // 2) * whole, 8 * whole, 12 * whole
    )


_CASES = (
    {"B": 2, "L": 5, "N": 100, "weight": True, "bias": True, "residual": True},
    {"B": 3, "L": 21, "N": 63, "weight": True, "bias": True},
    {"B": 1, "L": 3, "N": 1000, "weight": True},
    {"B": 1, "L": 2, "N": 10_000, "weight": True, "bias": True},
    {"B": 1, "L": 2, "N": 3, "bias": True, "residual": True},
    {"B": 1, "L": 1, "N": 1},
    {"B": 2, "L": 0, "N": 5, "weight": True, "bias": True, "residual": True},
)
_SPACE = {"B": range(1, 4), "L": range(1, 40), "N": range(1, 200),
          "weight": (False, True), "bias": (False, True), "residual": (False, True)}  # fmt: skip
_GRADCHECK = {"B": 1, "L": 3, "N": 4, "weight": True, "bias": True, "residual": True}
# Sums are in fp32: a few of its roundings, in sums over a hundred rows. In 16 bits y and ds are rounded once (2^-9 of
# bf16, 2^-12 of fp16, relative to at most the largest element); with a residual their sum is rounded before it is
# normalised, which moves xhat by up to twice that, here and in the gradients.
_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.3e-3}

SPECS = (
    KernelSpec(
        name="layer_norm",
        function=layer_norm,
        reference=layer_norm_reference,
        inputs=_inputs,
        grads=("x", "weight", "bias", "residual"),
        cases=_CASES,
        space=_SPACE,
        timed=(
            {"B": 256, "L": 256, "N": 128, "weight": True, "bias": True},
            {"B": 8, "L": 2048, "N": 4096, "weight": True, "bias": True, "residual": True},
            {"B": 8, "L": 1024, "N": 8192, "weight": True, "bias": True},
            {"B": 4, "L": 1024, "N": 12_288, "weight": True, "bias": True},
        ),
        tolerance=_TOLERANCE,
        traffic=_traffic,
        gradcheck=_GRADCHECK,
    ),
    KernelSpec(
        name="rms_norm",
        function=rms_norm,
        reference=rms_norm_reference,
        inputs=_inputs,
        grads=("x", "weight", "bias", "residual"),
        cases=_CASES,
        space=_SPACE,
        timed=(
            {"B": 8, "L": 2048, "N": 2048, "weight": True},
            {"B": 8, "L": 2048, "N": 4096, "weight": True, "residual": True},
            {"B": 4, "L": 1024, "N": 16_384, "weight": True},
        ),
        tolerance=_TOLERANCE,
        traffic=_traffic,
        gradcheck=_GRADCHECK,
    ),
)
