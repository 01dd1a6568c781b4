"""Rotary positions: queries and keys turned by the angles of their positions, both in one launch.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, section 3.2. Of each head the first R
elements are R / 2 pairs (a, b); pair i at position t is turned by the angle t f_i:

    a' = a cos - b sin,   b' = b cos + a sin          da = da' cos + db' sin,   db = db' cos - da' sin

Half-rotation pairs (x[i], x[i + R / 2]), as Llama does; interleaved pairs (x[2 i], x[2 i + 1]), as the paper does. What
lies beyond R is copied. The gradient is the turn by the negative angle: the same kernel. Arithmetic is in fp32, rounded
once; q and k are read and written once.

Shapes: B batch, L length, H query heads, J key/value heads, K head size, R = 2 x the last dim of cos and sin.
"""

import torch
from torch import Tensor

from core.kernels.blocks import Blocks
from core.kernels.language import tl, triton
from core.kernels.operator import launches, operator, runs_kernel, unsupported_dtype
from core.kernels.spec import Case, KernelSpec, Traffic, drawing


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """(q, k) turned, of their shapes and dtypes; gradients for both.

    q, k      [B, L, H, K] and [B, L, J, K]
    cos, sin  [B or 1, L, R / 2] of the angles, R <= K; constants

    Raises ValueError when shapes do not fit together.
    """
    B, L, _, K = q.shape if q.ndim == 4 else (-1, -1, -1, -1)
    if q.ndim != 4 or k.ndim != 4 or k.shape[:2] != q.shape[:2] or k.shape[3] != K:
        raise ValueError(f"rope: q {list(q.shape)} and k {list(k.shape)}; they are [B, L, H, K] and [B, L, J, K]")
    if cos.shape != sin.shape or cos.ndim != 3 or cos.shape[0] not in (1, B) or cos.shape[1] != L:
        raise ValueError(f"rope: cos {list(cos.shape)} and sin {list(sin.shape)}; both are [{B} or 1, {L}, R / 2]")
    if 2 * cos.shape[2] > K:
        raise ValueError(f"rope: {cos.shape[2]} angles turn {2 * cos.shape[2]} elements; heads have {K}")
    if runs_kernel("rope", q, unless=unsupported_dtype(q, k, cos, sin)):
        return _forward(q, k, cos, sin, interleaved, False)
    return reference(q, k, cos, sin, interleaved=interleaved)


def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """The same by torch; what runs on a CPU."""
    return _turned(q, cos, sin, interleaved), _turned(k, cos, sin, interleaved)


def _turned(x_BLHK: Tensor, cos_BLR: Tensor, sin_BLR: Tensor, interleaved: bool) -> Tensor:
    dtype = torch.promote_types(x_BLHK.dtype, torch.promote_types(cos_BLR.dtype, torch.float32))
    cos, sin = (t.to(dtype)[:, :, None] for t in (cos_BLR, sin_BLR))
    turned, rest = x_BLHK.tensor_split((2 * cos.shape[-1],), dim=-1)
    wide = turned.to(dtype)
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    pairs = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    turned = turned.to(x_BLHK.dtype)
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), -1)


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _turn_heads(
    x, y, at, first, num_heads, x2, x3, cos, sin, R, K, row,
    HEADS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Heads first … of token `row`, which begin at x + at; y is contiguous."""
    head = (first + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    pair = tl.arange(0, BLOCK_R).to(tl.int64)[None, :]
    inside = (head < num_heads) & (pair < R)
    if INTERLEAVED:
        one, other = 2 * pair, 2 * pair + 1
    else:
        one, other = pair, pair + R
    x_at, y_at = at + head * x2, (row * num_heads + head) * K
    a = tl.load(x + x_at + one * x3, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + x_at + other * x3, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + y_at + one, a * cos - b * sin, mask=inside)
    tl.store(y + y_at + other, b * cos + a * sin, mask=inside)
    if BLOCK_REST > 0:
        column = 2 * R + tl.arange(0, BLOCK_REST).to(tl.int64)[None, :]
        inside = (head < num_heads) & (column < K)
        tl.store(y + y_at + column, tl.load(x + x_at + column * x3, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["L"])
def _rope(
    q, k, cos, sin, yq, yk, L, H, J, K, R, sign,
    q0, q1, q2, q3, k0, k1, k2, k3, c0, c1, c2, s0, s1, s2,
    HEADS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b, t = row // L, row % L
    pair = tl.arange(0, BLOCK_R).to(tl.int64)[None, :]
    c = tl.load(cos + b * c0 + t * c1 + pair * c2, mask=pair < R, other=0.0).to(tl.float32)
    s = tl.load(sin + b * s0 + t * s1 + pair * s2, mask=pair < R, other=0.0).to(tl.float32) * sign
    tile, q_tiles = tl.program_id(1), tl.cdiv(H, HEADS)
    if tile < q_tiles:
        at = b * q0 + t * q1
        _turn_heads(q, yq, at, tile * HEADS, H, q2, q3, c, s, R, K, row, HEADS, BLOCK_R, BLOCK_REST, INTERLEAVED)
    else:
        at = b * k0 + t * k1
        first = (tile - q_tiles) * HEADS
        _turn_heads(k, yk, at, first, J, k2, k3, c, s, R, K, row, HEADS, BLOCK_R, BLOCK_REST, INTERLEAVED)


# --- operators --------------------------------------------------------------------------------------------------------


@operator("rope")
def _forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backwards: bool
) -> tuple[Tensor, Tensor]:
    yq, yk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    (B, L, H, K), J, R = q.shape, k.shape[2], cos.shape[2]
    if launches(q) or launches(k):
        blocks = _blocks(max(H, J), K, R)
        heads = blocks["HEADS"]
        _rope[(B * L, triton.cdiv(H, heads) + triton.cdiv(J, heads))](
            q, k, cos, sin, yq, yk, L, H, J, K, R, -1.0 if backwards else 1.0,
            *q.stride(), *k.stride(), *_strides(cos), *_strides(sin), INTERLEAVED=interleaved, **blocks,
        )  # fmt: skip
    return yq, yk


def _setup(ctx, inputs, output) -> None:
    _, _, cos, sin, ctx.interleaved, ctx.backwards = inputs
    ctx.save_for_backward(cos, sin)


def _gradients(ctx, dq: Tensor, dk: Tensor):
    cos, sin = ctx.saved_tensors
    return *_forward(dq, dk, cos, sin, ctx.interleaved, not ctx.backwards), None, None, None, None


_forward.register_autograd(_gradients, setup_context=_setup)


def _strides(x: Tensor) -> tuple[int, ...]:
    """Those of cos and sin; one for all sequences has none over the batch."""
    return (0 if x.shape[0] == 1 else x.stride(0), *x.stride()[1:])


def _blocks(num_heads: int, head_size: int, num_pairs: int) -> Blocks:
    """A token's heads, as many as make a tile of about 2048 elements: cos and sin are read once for them."""
    block = triton.next_power_of_2(max(num_pairs, 1))
    rest = head_size - 2 * num_pairs
    heads = min(triton.next_power_of_2(num_heads), max(1, 1024 // block))
    return {
        "HEADS": heads, "BLOCK_R": block, "BLOCK_REST": triton.next_power_of_2(rest) if rest else 0,
        "num_warps": 4 if heads * block >= 512 else 2,
    }  # fmt: skip


# --- spec -------------------------------------------------------------------------------------------------------------


def _inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    B, L, H, J, K = (case[name] for name in "BLHJK")
    R = min(case.get("R", K), K) // 2
    draw = drawing(dtype, device, generator)
    q, k = draw(B, L, H, K), draw(B, L, J, K)
    frequency = 100.0 ** -(torch.arange(R, dtype=torch.float64) / max(R, 1))
    positions = torch.randint(0, 1000, (B if case.get("each") else 1, L, 1), generator=generator)
    angles = positions * frequency
    inputs = {"q": q, "k": k, "interleaved": case.get("interleaved", False)}
    return inputs | {"cos": angles.cos().to(device, dtype), "sin": angles.sin().to(device, dtype)}


def _traffic(case: Case, dtype: torch.dtype) -> Traffic:
    B, L, H, J, K = (case[name] for name in "BLHJK")
    R, whole = min(case.get("R", K), K), B * L * (H + J) * K
    moved = dtype.itemsize * (2 * whole + (B if case.get("each") else 1) * L * R)
    return Traffic(moved, moved, 3 * B * L * (H + J) * R, 3 * B * L * (H + J) * R)


SPECS = (KernelSpec(
    name="rope",
    function=rope,
    reference=reference,
    inputs=_inputs,
    grads=("q", "k"),
    cases=(
        {"B": 2, "L": 5, "H": 4, "J": 2, "K": 64},
        {"B": 2, "L": 3, "H": 3, "J": 1, "K": 100, "each": True, "interleaved": True},
        {"B": 1, "L": 4, "H": 2, "J": 2, "K": 63, "R": 20},
        {"B": 2, "L": 2, "H": 1, "J": 3, "K": 1000, "R": 26, "each": True, "interleaved": True},
        {"B": 1, "L": 1, "H": 1, "J": 1, "K": 2},
        {"B": 1, "L": 2, "H": 1, "J": 1, "K": 3, "R": 0},
        {"B": 2, "L": 0, "H": 2, "J": 2, "K": 4},
    ),
    space={"B": range(1, 4), "L": range(1, 5), "H": range(1, 5), "J": range(1, 4), "K": range(2, 80),
           "R": range(2, 100), "each": (False, True), "interleaved": (False, True)},
    timed=(
        {"B": 8, "L": 2048, "H": 32, "J": 8, "K": 128},
        {"B": 8, "L": 2048, "H": 16, "J": 16, "K": 80, "R": 32, "interleaved": True},
        {"B": 64, "L": 1, "H": 32, "J": 8, "K": 128, "each": True},
    ),
    # Products and their sum are in fp32 and rounded once: 2^-24, 2^-8 (bf16; 2^-7 by the interpreter, which cuts off),
    # 2^-11 (fp16) of an element that may be the largest.
    tolerance={torch.float32: 3e-7, torch.bfloat16: 8e-3, torch.float16: 1e-3},
    traffic=_traffic,
    gradcheck={"B": 2, "L": 2, "H": 2, "J": 1, "K": 5, "R": 4, "interleaved": True},
),)  # fmt: skip
