"""The triangle multiplicative update of a pair representation (Jumper et al. 2021, supplement, algorithms 11 and 12).

    n = norm(z)                                                                     z[N, N, D], one vector for each pair
    a = mask sigmoid(n Wga + bga) (n Wpa + bpa),   b likewise                                   two tensors [N, N, C]
    outgoing  x_ij = sum_k a_ik b_jk,     incoming  x_ij = sum_k a_ki b_kj                      elementwise in C
    out = sigmoid(n Wg + bg) (norm(x) Wo + bo)

The sum over k is a batch of C matrix products, which wants channels first; everything else wants them last. Between
torch's matrix products stand two kernels that change the order while they compute what has to be computed anyway, each
one pass over memory, and one without an order (gated_output.py):

    1. n, and h = n [Wpa | Wpb | Wga | Wgb]                       torch
    2. `gate_channels_first`: h[.., I, J, 4C] -> a, b[.., C, I, J]
           da -> dp = mask s da,   dg = mask p s (1 - s) da,   s = sigmoid(g) computed again
    3. `pair_product`: a, b -> x[.., C, I, J]                     torch; both gradients come out channels first, too
    4. `norm_channels_last`: x[.., C, I, J] -> norm(x)[.., I, J, C]
           with w = weight dy:  dx = rstd (w - mean(w) - x^ mean(w x^)); mean and rstd as the forward had them
    5. norm(x) Wo and n Wg                                        torch
    6. `gated_residual`: sigmoid(n Wg + bg) (norm(x) Wo + bo), and the residual

Gradients of the norm's weight and bias are summed in two phases in a fixed order, so that every run's are the same.
Arithmetic between the products is in fp32. The pieces work on strips of rows, too: a caller with 10,000 residues does.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.blocks import Blocks, chip
from core.kernels.gated_output import gated_residual
from core.kernels.language import tl, triton
from core.kernels.matmul import batched_product, linear, product
from core.kernels.operator import launches, operator, runs_kernel, unsupported_dtype
from core.kernels.rows import programs_summed
from core.kernels.spec import Case, KernelSpec, Traffic, drawing

MAX_CHANNELS = 1024
_PROGRAMS = 1024


def triangle_multiply(
    z: Tensor,
    mask: Tensor | None,
    *,
    outgoing: bool,
    norm_weight: Tensor,
    norm_bias: Tensor,
    in_weight: Tensor,
    in_bias: Tensor | None,
    product_norm_weight: Tensor,
    product_norm_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor | None,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """The update of z (plus residual, if given), of z's shape; gradients for all but the mask.

    z                                     [.., N, N, D]
    mask                                  [.., N, N], a constant: 1 where a pair is, 0 where there is none
    outgoing                              sum over the edges that leave i and j (algorithm 11), else that enter (12)
    norm_weight, norm_bias                [D], of z's norm
    in_weight, in_bias                    [4C, D], [4C]: projections of a and of b, then gates of a and of b
    product_norm_weight, product_norm_bias  [C], of the product's norm
    out_weight, out_bias                  [D, C], [D]
    gate_weight, gate_bias                [D, D], [D], of the result's gate

    AlphaFold's weights call a left and b right; for incoming edges they call b left and a right. All biases of the
    projections may be None. Parameters have z's dtype, except under autocast, where they may be in fp32.

    Raises ValueError where a shape does not fit.
    """
    _check(z, mask, in_weight, product_norm_weight, out_weight, gate_weight)
    n = F.layer_norm(z, norm_weight.shape, norm_weight, norm_bias, eps)
    a, b = pair_factors(n, in_weight, in_bias, mask)
    x = pair_product(a, b, outgoing=outgoing)
    del a, b
    y = norm_channels_last(x, product_norm_weight, product_norm_bias, eps=eps)
    del x
    gate = linear(n, gate_weight, gate_bias)
    return gated_residual(linear(y, out_weight), gate=gate, bias=out_bias, residual=residual)


def reference(
    z: Tensor,
    mask: Tensor | None,
    *,
    outgoing: bool,
    norm_weight: Tensor,
    norm_bias: Tensor,
    in_weight: Tensor,
    in_bias: Tensor | None,
    product_norm_weight: Tensor,
    product_norm_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor | None,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """The same as the algorithms have it."""
    n = F.layer_norm(z, norm_weight.shape, norm_weight, norm_bias, eps)
    p, g = F.linear(n, in_weight, in_bias).chunk(2, -1)
    ab = torch.sigmoid(g) * p
    if mask is not None:
        ab = mask[..., None] * ab
    a, b = ab.chunk(2, -1)
    x = torch.einsum("...ikc,...jkc->...ijc" if outgoing else "...kic,...kjc->...ijc", a, b)
    y = F.layer_norm(x, product_norm_weight.shape, product_norm_weight, product_norm_bias, eps)
    update = torch.sigmoid(F.linear(n, gate_weight, gate_bias)) * F.linear(y, out_weight, out_bias)
    return update if residual is None else residual + update


def _check(
    z: Tensor, mask: Tensor | None, in_weight: Tensor, norm_weight: Tensor, out_weight: Tensor, gate_weight: Tensor
) -> None:
    if z.ndim < 3 or z.shape[-3] != z.shape[-2]:
        raise ValueError(f"triangle_multiply: z {list(z.shape)} is not [.., N, N, D]")
    if mask is not None and mask.shape != z.shape[:-1]:
        raise ValueError(f"triangle_multiply: mask {list(mask.shape)} is not z {list(z.shape)} without D")
    C, D = norm_weight.shape[0], z.shape[-1]
    for name, weight, shape in (
        ("in_weight", in_weight, (4 * C, D)),
        ("out_weight", out_weight, (D, C)),
        ("gate_weight", gate_weight, (D, D)),
    ):
        if weight.shape != shape:
            raise ValueError(f"triangle_multiply: {name} {list(weight.shape)} is to be {list(shape)}: {C=}, {D=}")


def pair_factors(n: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """a and b = mask sigmoid(n Wg + bg) (n Wp + bp), channels first; gradients for all but the mask.

    n        [.., I, J, D], the norm of some rows of z
    weight   [4C, D], bias [4C] or None: projections of a and of b, then gates of a and of b
    mask     [.., I, J], a constant; None: ones
    a, b     [.., C, I, J]

    Where no kernel transposes as it writes (a CPU), the product has the weights on its left, so channels come first out
    of it: torch's batched product of factors that do not lie so copies them matrix by matrix.
    """
    if runs_kernel("gate_channels_first", n, unless=unsupported_dtype(n)):
        return gate_channels_first(linear(n, weight, bias), mask)
    parts = [product(weight, rows.flatten(0, 1).mT) for rows in n.reshape(-1, *n.shape[-3:])]
    h = parts[0] if len(parts) == 1 else torch.stack(parts)
    h = h.view(*n.shape[:-3], len(weight), *n.shape[-3:-1])
    mask = None if mask is None else mask.to(h.dtype)[..., None, :, :]
    if torch.is_grad_enabled():
        p, g = (h if bias is None else h + bias[:, None, None]).chunk(2, -3)
        ab = torch.sigmoid(g) * p if mask is None else torch.sigmoid(g) * p * mask
    else:
        ab, g = (h if bias is None else h.add_(bias[:, None, None])).chunk(2, -3)
        ab.mul_(g.sigmoid_())
        if mask is not None:
            ab.mul_(mask)
    a, b = ab.chunk(2, -3)
    return a, b


def gate_channels_first(h: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """a = mask sigmoid(h2) h0 and b = mask sigmoid(h3) h1, channels first; gradients for h.

    h     [.., I, J, 4C], four parts of C channels each; leading dims that do not lie evenly in memory are copied first
    mask  [.., I, J], a constant; None: ones
    a, b  [.., C, I, J], contiguous (where the kernel runs)

    Raises ValueError for other shapes.
    """
    if h.ndim < 3 or h.shape[-1] % 4:
        raise ValueError(f"gate_channels_first: h {list(h.shape)} is not [.., I, J, 4C]")
    if mask is not None and mask.shape != h.shape[:-1]:
        raise ValueError(f"gate_channels_first: mask {list(mask.shape)} is not h {list(h.shape)} without 4C")
    if mask is not None:
        mask = mask.to(h.dtype)
    if runs_kernel("gate_channels_first", h, unless=unsupported_dtype(h, mask)):
        return _gate_forward(h, mask)
    return gate_reference(h, mask)


def gate_reference(h: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """gate_channels_first by torch; what runs on a CPU."""
    p, g = h.chunk(2, -1)
    ab = torch.sigmoid(g) * p
    if mask is not None:
        ab = ab * mask[..., None]
    a, b = ab.movedim(-1, -3).chunk(2, -3)
    return a, b


def pair_product(a: Tensor, b: Tensor, *, outgoing: bool) -> Tensor:
    """sum over k of a_ik b_jk (outgoing) or of a_ki b_kj, for each channel; gradients for both.

    a, b  [.., C, I, K] and [.., C, J, K] (outgoing), or [.., C, K, I] and [.., C, K, J]; the result is [.., C, I, J]

    Torch's matrix products. Where kernels run it is an operator, for its backward's sake: both gradients come out
    contiguous, where torch's own would hand back the transpose of one. Raises ValueError for other shapes.
    """
    k = -1 if outgoing else -2
    if a.ndim < 3 or a.ndim != b.ndim or a.shape[:-2] != b.shape[:-2] or a.shape[k] != b.shape[k]:
        raise ValueError(f"pair_product: a {list(a.shape)} and b {list(b.shape)} have no common k ({outgoing=})")
    if not runs_kernel("pair_product", a):
        a, b = (a, b) if outgoing else (a.mT, b.mT)
        return batched_product(a.flatten(0, -3), b.flatten(0, -3)).view(*a.shape[:-1], b.shape[-2])
    return _product(a, b, outgoing)


def norm_channels_last(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    """Layer norm over x's channels, which come first and go out last; gradients for all three.

    x             [.., C, I, J]; copied first where it is not contiguous
    weight, bias  [C]
    result        [.., I, J, C], contiguous (where the kernel runs), of x's dtype

    Raises ValueError for other shapes.
    """
    if x.ndim < 3 or weight.shape != x.shape[-3:-2] or bias.shape != x.shape[-3:-2]:
        shapes = f"weight {list(weight.shape)} and bias {list(bias.shape)}"
        raise ValueError(f"norm_channels_last: {shapes} are not one number for each channel of x {list(x.shape)}")
    if runs_kernel("norm_channels_last", x, unless=_too_many_channels(x) or unsupported_dtype(x, weight, bias)):
        return _norm_forward(x, weight, bias, eps)[0]
    return norm_reference(x, weight, bias, eps=eps)


def norm_reference(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    """norm_channels_last by torch; what runs on a CPU."""
    if x.is_cuda or torch.compiler.is_compiling():
        y = x.movedim(-3, -1)
    else:
        y = _Transpose.apply(x.flatten(-2)).unflatten(-2, x.shape[-2:])
    return F.layer_norm(y, weight.shape, weight.to(x.dtype), bias.to(x.dtype), eps)


class _Transpose(torch.autograd.Function):
    """x[.., M, N] -> [.., N, M], contiguous, and so is the gradient: matrix by matrix, as torch's norm of a view would
    copy it element by element, four times slower, and products of a gradient that lies transposed do alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.new_empty(*x.shape[:-2], x.shape[-1], x.shape[-2])
        if x.numel() > 0:
            for there, here in zip(y.flatten(0, -3) if y.ndim > 2 else [y], x.flatten(0, -3) if x.ndim > 2 else [x]):
                there.copy_(here.T)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Transpose.apply(grads[0])


def _too_many_channels(x: Tensor) -> str | None:
    return f"the kernel takes at most {MAX_CHANNELS} channels" if x.shape[-3] > MAX_CHANNELS else None


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _gate_forward_kernel(
    h, mask, a, b, num_rows, num_channels, num_tiles, h_batch, h_row, h_channel,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """A tile of rows (pairs) and channels, of a and of b."""
    program = tl.program_id(0).to(tl.int64)
    batch = program // num_tiles
    row = (program % num_tiles) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(1).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    inside = (row < num_rows) & (channel < num_channels)
    at = h + batch * h_batch + row * h_row
    out = (batch * num_channels + channel) * num_rows + row
    p = tl.load(at + channel * h_channel, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(at + (channel + 2 * num_channels) * h_channel, mask=inside, other=0.0).to(tl.float32)
    value = p * tl.sigmoid(g)
    p = tl.load(at + (channel + num_channels) * h_channel, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(at + (channel + 3 * num_channels) * h_channel, mask=inside, other=0.0).to(tl.float32)
    other_value = p * tl.sigmoid(g)
    if HAS_MASK:
        m = tl.load(mask + batch * num_rows + row, mask=row < num_rows, other=0.0).to(tl.float32)
        value *= m
        other_value *= m
    tl.store(a + out, value, mask=inside)
    tl.store(b + out, other_value, mask=inside)


@triton.jit
def _gate_backward_kernel(
    da, db, h, mask, dh, num_rows, num_channels, num_tiles, h_batch, h_row, h_channel,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    batch = program // num_tiles
    row = (program % num_tiles) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(1).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    inside = (row < num_rows) & (channel < num_channels)
    first = (batch * num_channels + channel) * num_rows + row
    last = (batch * num_rows + row) * 4 * num_channels + channel
    at = h + batch * h_batch + row * h_row
    m = tl.full((ROWS, 1), 1.0, tl.float32)
    if HAS_MASK:
        m = tl.load(mask + batch * num_rows + row, mask=row < num_rows, other=0.0).to(tl.float32)
    for side in tl.static_range(2):
        d = tl.load((db if side else da) + first, mask=inside, other=0.0).to(tl.float32) * m
        p = tl.load(at + (channel + side * num_channels) * h_channel, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(at + (channel + (side + 2) * num_channels) * h_channel, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(g)
        tl.store(dh + last + side * num_channels, d * s, mask=inside)
        tl.store(dh + last + (side + 2) * num_channels, d * p * s * (1.0 - s), mask=inside)


@triton.jit
def _rows(tile, num_tiles, ROWS: tl.constexpr):
    """A tile's batch element and its rows [1, ROWS]: 64 bits, but for a division, which in 32 is no call."""
    return (tile // num_tiles).to(tl.int64), (tile % num_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)[None, :]


@triton.jit
def _vector(vector, channels, num_channels):
    """A weight or bias in fp32, loaded with one dim, so that it has no layout that the tile would be brought into."""
    return tl.load(vector + channels, mask=channels < num_channels, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _norm_forward_kernel(
    x, weight, bias, y, centre, rstd, num_rows, num_channels, num_tiles, eps,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    batch, row = _rows(tl.program_id(0), num_tiles, ROWS)
    channels = tl.arange(0, CHANNELS)
    channel = channels[:, None]
    known = channel < num_channels
    w, b = _vector(weight, channels, num_channels), _vector(bias, channels, num_channels)
    at = (batch * num_channels + channel) * num_rows + row
    value = tl.load(x + at, mask=known & (row < num_rows), other=0.0).to(tl.float32)
    mean = (tl.sum(value, 0) / num_channels)[None, :]
    off = tl.where(known, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(off * off, 0) / num_channels + eps)[None, :]
    tl.store(centre + batch * num_rows + row, mean, mask=row < num_rows)
    tl.store(rstd + batch * num_rows + row, scale, mask=row < num_rows)
    at = (batch * num_rows + row) * num_channels + channel
    tl.store(y + at, off * scale * w + b, mask=known & (row < num_rows))


@triton.jit
def _norm_backward_kernel(
    dy, x, weight, centre, rstd, dx, dweight, dbias, num_rows, num_channels, num_tiles, all_tiles, tiles_each,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """dx of tiles_each tiles, and the program's part of dweight and dbias: the sums over their rows."""
    program = tl.program_id(0)
    channels = tl.arange(0, CHANNELS)
    channel = channels[:, None]
    known = channel < num_channels
    w = _vector(weight, channels, num_channels)
    weighted = tl.zeros((CHANNELS, ROWS), tl.float32)
    plain = tl.zeros((CHANNELS, ROWS), tl.float32)
    for tile in range(program * tiles_each, tl.minimum((program + 1) * tiles_each, all_tiles)):
        batch, row = _rows(tile, num_tiles, ROWS)
        inside = known & (row < num_rows)
        at = (batch * num_channels + channel) * num_rows + row
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        at_row = batch * num_rows + row
        d = tl.load(dy + at_row * num_channels + channel, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + at_row, mask=row < num_rows, other=0.0)
        mean = tl.load(centre + at_row, mask=row < num_rows, other=0.0)
        normal = tl.where(known, (value - mean) * scale, 0.0)
        weighted += d * normal
        plain += d
        d *= w
        slope = (tl.sum(d * normal, 0) / num_channels)[None, :]
        d -= (tl.sum(d, 0) / num_channels)[None, :]
        tl.store(dx + at, scale * (d - normal * slope), mask=inside)
    to = program.to(tl.int64) * num_channels + channels
    tl.store(dweight + to, tl.sum(weighted, 1), mask=channels < num_channels)
    tl.store(dbias + to, tl.sum(plain, 1), mask=channels < num_channels)


# --- operators --------------------------------------------------------------------------------------------------------


@operator("gate_channels_first_forward")
def _gate_forward(h: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    *lead, I, J, width = h.shape
    a, b = (torch.empty((*lead, width // 4, I, J), dtype=h.dtype, device=h.device) for _ in range(2))
    if launches(h):
        flat, blocks = h.reshape(-1, I * J, width), _gate_blocks(width // 4)
        grid, sizes = _gate_grid(flat, blocks)
        _gate_forward_kernel[grid](
            flat, h if mask is None else mask.contiguous(), a, b, *sizes, *flat.stride(),
            HAS_MASK=mask is not None, **blocks,
        )  # fmt: skip
    return a, b


@operator("gate_channels_first_backward")
def _gate_backward(da: Tensor, db: Tensor, h: Tensor, mask: Tensor | None) -> Tensor:
    dh = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    if launches(h):
        *_, I, J, width = h.shape
        flat, blocks = h.reshape(-1, I * J, width), _gate_blocks(width // 4)
        grid, sizes = _gate_grid(flat, blocks)
        _gate_backward_kernel[grid](
            da.contiguous(), db.contiguous(), flat, h if mask is None else mask.contiguous(), dh, *sizes,
            *flat.stride(), HAS_MASK=mask is not None, **blocks,
        )  # fmt: skip
    return dh


def _gate_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


_gate_forward.register_autograd(
    lambda ctx, da, db: (_gate_backward(da, db, *ctx.saved_tensors), None), setup_context=_gate_setup
)


def _gate_blocks(num_channels: int) -> Blocks:
    """Tiles of 2048 elements, which read and write at least 64 bytes in a piece, whichever dim is dense."""
    channels = min(32, triton.next_power_of_2(num_channels))
    return {"ROWS": 2048 // channels, "CHANNELS": channels, "num_warps": 4}


def _gate_grid(flat: Tensor, blocks: Blocks) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """The launch's grid, and (rows, channels, tiles of rows) of one batch element."""
    batch, num_rows, width = flat.shape
    num_tiles = triton.cdiv(num_rows, blocks["ROWS"])
    return (batch * num_tiles, triton.cdiv(width // 4, blocks["CHANNELS"])), (num_rows, width // 4, num_tiles)


@operator("pair_product")
def _product(a: Tensor, b: Tensor, outgoing: bool) -> Tensor:
    x = _bmm(a, b.mT) if outgoing else _bmm(a.mT, b)
    return x.contiguous()


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a.flatten(0, -3), b.flatten(0, -3)).unflatten(0, a.shape[:-2])


def _product_setup(ctx, inputs, output) -> None:
    a, b, ctx.outgoing = inputs
    ctx.save_for_backward(a, b)


def _product_gradients(ctx, dx: Tensor):
    a, b = ctx.saved_tensors
    if ctx.outgoing:
        return _bmm(dx, b), _bmm(dx.mT, a), None
    return _bmm(b, dx.mT), _bmm(a, dx), None


_product.register_autograd(_product_gradients, setup_context=_product_setup)


@operator("norm_channels_last_forward")
def _norm_forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y, and of each row mean and rstd, fp32[.., I, J]."""
    *lead, C, I, J = x.shape
    y = torch.empty((*lead, I, J, C), dtype=x.dtype, device=x.device)
    mean, rstd = (torch.empty((*lead, I, J), dtype=torch.float32, device=x.device) for _ in range(2))
    if launches(x):
        blocks = _norm_blocks(C)
        num_tiles = triton.cdiv(I * J, blocks["ROWS"])
        _norm_forward_kernel[(x.numel() // (C * I * J) * num_tiles,)](
            x.contiguous(), weight.contiguous(), bias.contiguous(), y, mean, rstd, I * J, C, num_tiles, eps, **blocks
        )
    return y, mean, rstd


@operator("norm_channels_last_backward")
def _norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, bias_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight[C] and dbias[C]."""
    *_, C, I, J = x.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not launches(x):
        return dx, *(torch.zeros(C, dtype=dtype, device=x.device) for dtype in (weight.dtype, bias_dtype))
    blocks = _norm_blocks(C, backward=True)
    num_tiles = triton.cdiv(I * J, blocks["ROWS"])
    all_tiles = x.numel() // (C * I * J) * num_tiles
    tiles_each = triton.cdiv(all_tiles, _PROGRAMS)
    num_programs = triton.cdiv(all_tiles, tiles_each)
    partial = torch.empty((2, num_programs, C), dtype=torch.float32, device=x.device)
    _norm_backward_kernel[(num_programs,)](
        dy.contiguous(), x.contiguous(), weight.contiguous(), mean, rstd, dx, *partial, I * J, C, num_tiles, all_tiles,
        tiles_each, **blocks,
    )  # fmt: skip
    return dx, *programs_summed(partial, weight.dtype, bias_dtype)


def _norm_setup(ctx, inputs, output) -> None:
    x, weight, bias, _ = inputs
    _, mean, rstd = output
    ctx.dtype = bias.dtype
    ctx.save_for_backward(x, weight, mean, rstd)


def _norm_gradients(ctx, dy: Tensor, *_):
    return *_norm_backward(dy, *ctx.saved_tensors, ctx.dtype), None


_norm_forward.register_autograd(_norm_gradients, setup_context=_norm_setup)


def _norm_blocks(num_channels: int, backward: bool = False) -> Blocks:
    """All channels of some rows: 32 or more, 64 bytes in a piece, and fewer only where registers would not suffice.

    A thread of the backward, which holds x^, dy and dx at once, gets 16 elements; one of the forward 32.
    """
    channels, each = triton.next_power_of_2(num_channels), 512 if backward else 1024
    rows = max(8, min(256, max(32, 4096 // channels), 16 * each // channels))
    warps = max(4, min(16, rows * channels // each))
    # Sums over rows stay in registers, 128 of which let 16 warps run at a time.
    limit = {"maxnreg": 128} if backward and not chip().startswith("gfx") else {}
    return {"ROWS": rows, "CHANNELS": channels, "num_warps": warps} | limit


# --- spec -------------------------------------------------------------------------------------------------------------


def _some(dtype: torch.dtype, device: torch.device | str, generator: torch.Generator):
    """A mask that hides a tenth."""
    return lambda *shape: (torch.rand(shape, generator=generator) < 0.9).to(device, dtype)


def _inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    draw, lead = drawing(dtype, device, generator), case.get("lead", ())
    N, C, D = case["N"], case["C"], case["D"]
    inputs = {
        "z": draw(*lead, N, N, D), "mask": _some(dtype, device, generator)(*lead, N, N), "outgoing": case["outgoing"],
        "norm_weight": 1 + 0.3 * draw(D), "norm_bias": 0.3 * draw(D),
        "in_weight": draw(4 * C, D) / D**0.5, "in_bias": draw(4 * C),
        "product_norm_weight": 1 + 0.3 * draw(C), "product_norm_bias": 0.3 * draw(C),
        "out_weight": draw(D, C) / C**0.5, "out_bias": draw(D),
        "gate_weight": draw(D, D) / D**0.5, "gate_bias": draw(D),
    }  # fmt: skip
    if not case.get("biases", True):
        inputs |= {"in_bias": None, "out_bias": None, "gate_bias": None, "mask": None}
    if case.get("residual"):
        inputs["residual"] = draw(*lead, N, N, D)
    return inputs


def _traffic(case: Case, dtype: torch.dtype) -> Traffic:
    """Through torch's matrix products: what one operation writes, the next one reads."""
    N, C, D = case["N"], case["C"], case["D"]
    pairs = N * N * torch.Size(case.get("lead", ())).numel()
    forward = (2 * D) + (D + 4 * C) + 6 * C + 3 * C + 2 * C + (C + D) + 2 * D + (3 + case.get("residual", False)) * D
    flops = 2 * pairs * (4 * C * D + C * N + C * D + D * D)
    return Traffic(dtype.itemsize * pairs * forward, 2 * dtype.itemsize * pairs * forward, flops, 2 * flops)


def _gate_inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    lead, C = case["lead"], case["C"]
    mask = _some(dtype, device, generator)(*lead) if case.get("mask", True) else None
    return {"h": drawing(dtype, device, generator)(*lead, 4 * C), "mask": mask}


def _gate_traffic(case: Case, dtype: torch.dtype) -> Traffic:
    whole = torch.Size(case["lead"]).numel() * case["C"]
    return Traffic(6 * dtype.itemsize * whole, 10 * dtype.itemsize * whole, 10 * whole, 20 * whole)


def _norm_inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    draw, (*lead, I, J), C = drawing(dtype, device, generator), case["lead"], case["C"]
    # A large eps: it shows, and of a thousand rows of three channels some are nearly constant: gradients of these would
    # be differences of rounding errors.
    return {"x": 2 * draw(*lead, C, I, J) + 1, "weight": 1 + 0.5 * draw(C), "bias": draw(C), "eps": 1.0}


def _norm_traffic(case: Case, dtype: torch.dtype) -> Traffic:
    whole = torch.Size(case["lead"]).numel() * case["C"]
    return Traffic(2 * dtype.itemsize * whole, 3 * dtype.itemsize * whole, 8 * whole, 16 * whole)


SPECS = (
    KernelSpec(
        name="triangle_multiply",
        function=triangle_multiply,
        reference=reference,
        inputs=_inputs,
        grads=("z", "norm_weight", "norm_bias", "in_weight", "in_bias", "product_norm_weight", "product_norm_bias",
               "out_weight", "out_bias", "gate_weight", "gate_bias", "residual"),
        cases=(
            {"N": 7, "C": 12, "D": 10, "outgoing": True, "residual": True},
            {"N": 7, "C": 12, "D": 10, "outgoing": False, "lead": (2,)},
            {"N": 3, "C": 33, "D": 5, "outgoing": False, "biases": False},
            {"N": 0, "C": 4, "D": 3, "outgoing": True},
        ),
        timed=(
            {"N": 256, "C": 128, "D": 128, "outgoing": True, "residual": True},
            {"N": 1024, "C": 128, "D": 128, "outgoing": False, "residual": True},
        ),
        # Two norms divide by deviations of few values. In 16 bits some ten results are rounded on the way from z to its
        # gradient, and sums of signed terms keep their roundings: a dozen of 2^-8 and 2^-11.
        tolerance={torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 6e-3},
        traffic=_traffic,
        gradcheck={"N": 2, "C": 3, "D": 3, "outgoing": False, "residual": True},
    ),
    KernelSpec(
        name="gate_channels_first",
        function=gate_channels_first,
        reference=gate_reference,
        inputs=_gate_inputs,
        grads=("h",),
        cases=(
            {"lead": (2, 5, 7), "C": 33},
            {"lead": (9, 9), "C": 100, "mask": False},
            {"lead": (1, 1000), "C": 3},
            {"lead": (1, 1, 1), "C": 1},
            {"lead": (0, 3), "C": 2},
        ),
        space={"lead": ((3, 4), (2, 1, 70), (1, 2, 2, 3)), "C": range(1, 70), "mask": (False, True)},
        timed=({"lead": (1, 512, 512), "C": 128}, {"lead": (1, 512, 512), "C": 64, "mask": False}),
        # Elementwise in fp32, rounded once: 2^-8 of bf16 (2^-7 where the interpreter cuts off), 2^-11 of fp16.
        tolerance={torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 5e-4},
        traffic=_gate_traffic,
        gradcheck={"lead": (2, 2), "C": 2},
    ),
    KernelSpec(
        name="norm_channels_last",
        function=norm_channels_last,
        reference=norm_reference,
        inputs=_norm_inputs,
        grads=("x", "weight", "bias"),
        cases=(
            {"lead": (2, 5, 7), "C": 33},
            {"lead": (9, 9), "C": 100},
            {"lead": (1, 1000), "C": 3},
            {"lead": (1, 1, 1), "C": 5},
            {"lead": (2, 3), "C": 300},
            {"lead": (0, 3), "C": 2},
        ),
        space={"lead": ((3, 4), (2, 1, 70), (1, 2, 2, 3)), "C": range(5, 150)},
        timed=({"lead": (1, 512, 512), "C": 128}, {"lead": (1, 512, 512), "C": 64}, {"lead": (256, 256), "C": 1024}),
        # A mean and two projections are subtracted: some roundings of fp32, more where three channels leave one degree
        # of freedom. In 16 bits a result is rounded once: 2^-8 of bf16 (2^-7 where the interpreter cuts off), 2^-11.
        tolerance={torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 5e-4},
        traffic=_norm_traffic,
        gradcheck={"lead": (1, 2), "C": 3},
    ),
)  # fmt: skip
