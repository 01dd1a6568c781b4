"""Self-attention, causal or both ways, with one fused projection, grouped key/value heads, rotary positions and ALiBi.

1. qkv(x): rows of the weight are grouped by key/value head: its G query heads, then its key, then its value. A plain
   row shard of the weight is therefore a shard over heads, and the forward never asks how many heads it holds.
2. A norm over the features of each query head, and one of each key head, where the model has them (Dehghani et al.,
   "Scaling Vision Transformers to 22 Billion Parameters", 2023): one weight[K] each for all heads.
3. `turn`, a slot: rotary positions turn queries and keys, where the model has them (Su et al., "RoFormer", 2021; the
   half-rotation convention of Llama).
4. `attend`, the slot: softmax(q k^T / sqrt(K) + bias) v. The default is torch's scaled_dot_product_attention. Caches,
   ring attention, pages and the like are other functions put into the slot from outside.
5. out(o).

A window hides what is too far away: a query sees itself and the `window` - 1 keys before it (Beltagy et al.,
"Longformer", 2020). Distances are counted in places, padding included, as transformers counts them.

The default `attend` takes the causal fast path unless there is padding, ALiBi (Press et al., "Train Short, Test Long",
2021), a window or a document boundary to respect. Their bias is built once a step and shared by the layers that see
alike (`StepContext.once`). On a GPU a window without padding goes to our kernel, which skips what it hides.
ALiBi stays in fp32 or wider: in bf16 the positions beyond 256 would collapse into a few values. On a GPU, whose fused
operators take a bias in the format of the queries only, slopes go to our kernel, and with padding, where its positions
are not those of the tokens, the product is taken in fp32.

Shapes: B batch, L query length, S key length, D model, H query heads, J key/value heads, G = H / J, K head size, R
turned pairs of a head.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.compat import uncompiled
from core.kernels.attention import attention, attention_varlen
from core.kernels.operator import runs_kernel
from core.kernels.torch_attention import torch_attention
from core.nn.causal_attention import causal_attention, fits
from core.nn.linear import Linear


@dataclass
class StepContext:
    """One forward's data that `attend` may need, beside the tensors that every block gets.

    documents_BL  number of the document that each token belongs to; a token attends only inside its own. None: one.
    rows_R        places in the sequence whose logits are wanted; None: all. For the head, when there are no targets.
    auxiliary     where experts put what they add to the loss (`core.nn.moe`); the model's, set in its forward
    """

    documents_BL: Tensor | None = None
    rows_R: Tensor | None = None
    auxiliary: Any = field(default=None, init=False, repr=False)
    _memo: dict[tuple, tuple[Any, Any]] = field(default_factory=dict, repr=False)

    @uncompiled  # torch.compiler.disable, without importing torch's tracer, a second, in every process
    def once(self, name: tuple, inputs: tuple, build: Callable[[], Any]) -> Any:
        """build(), or what it returned before in this step for the same name and the very same input tensors."""
        key = (*name, *map(id, inputs))
        if key not in self._memo:
            self._memo[key] = (build(), inputs)  # holding the inputs keeps their ids from being used again
        return self._memo[key][0]

    def of_sequences(self, choose: Callable[[Tensor], Tensor]) -> "StepContext":
        """The same for the sequences that `choose` takes of a tensor [B, ..]; it remembers for itself."""
        documents = None if self.documents_BL is None else choose(self.documents_BL)
        return replace(self, documents_BL=documents, _memo={})


class Attend(Protocol):
    """The function for the slot: attention over all visible keys.

    q[B, L, H, K], k and v[B, S, J, K] -> o[B, L, H, K]
    slopes     ALiBi slope of each query head held here, fp32 or wider; None without ALiBi
    window     keys `window` and more places away are hidden; None: none are
    mask       [B, S] nonzero where a key is a token and not padding; None when all are
    positions  [B or 1, L] of the queries
    context    per-step data, as given to the model's forward
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, /, *, slopes: Tensor | None, window: int | None, mask: Tensor | None,
        positions: Tensor, context: Any,
    ) -> Tensor: ...  # fmt: skip


def attend(
    q_BLHK: Tensor,
    k_BLJK: Tensor,
    v_BLJK: Tensor,
    /,
    *,
    slopes: Tensor | None,
    window: int | None = None,
    mask: Tensor | None,
    positions: Tensor,
    context: StepContext | None,
) -> Tensor:
    """Causal attention of a whole sequence over itself (`Attend`)."""
    return _attend(q_BLHK, k_BLJK, v_BLJK, slopes, window, mask, positions, context, causal=True)


def attend_both_ways(
    q_BLHK: Tensor,
    k_BLJK: Tensor,
    v_BLJK: Tensor,
    /,
    *,
    slopes: Tensor | None,
    window: int | None = None,
    mask: Tensor | None,
    positions: Tensor,
    context: StepContext | None,
) -> Tensor:
    """Attention of a whole sequence over itself, later keys included, as an encoder's (`Attend`)."""
    return _attend(q_BLHK, k_BLJK, v_BLJK, slopes, window, mask, positions, context, causal=False)


def _attend(
    q_BLHK: Tensor, k_BLJK: Tensor, v_BLJK: Tensor, slopes: Tensor | None, window: int | None, mask: Tensor | None,
    positions: Tensor, context: StepContext | None, causal: bool,
) -> Tensor:  # fmt: skip
    documents = context.documents_BL if context is not None else None
    window = hiding(window, q_BLHK.shape[1])
    if slopes is None and window is None and mask is None and documents is None:
        return dot_product_attention(q_BLHK, k_BLJK, v_BLJK, None, is_causal=causal)
    if (slopes is not None or window is not None) and mask is None and runs_kernel("attention", q_BLHK):
        return attention_by_kernel(q_BLHK, k_BLJK, v_BLJK, slopes, None, context, causal, window)

    def build() -> Tensor:
        lengths = q_BLHK.shape[1], k_BLJK.shape[1]
        visible = visible_keys(*lengths, mask, documents, q_BLHK.device, causal=causal, window=window)
        return attention_bias(visible, slopes, positions, positions, q_BLHK.dtype)

    num_heads = 0 if slopes is None else slopes.shape[0]
    inputs = tuple(t for t in (mask, positions) if t is not None)
    key = ("bias", causal, num_heads, window, q_BLHK.dtype)
    bias = build() if context is None else context.once(key, inputs, build)
    return dot_product_attention(q_BLHK, k_BLJK, v_BLJK, bias, is_causal=False)


def hiding(window: int | None, num_keys: int) -> int | None:
    """The window, where it hides any of so many keys that end with the query's own."""
    return None if window is None or window >= num_keys else window


def attention_by_kernel(
    q_BLHK: Tensor, k_BLJK: Tensor, v_BLJK: Tensor, slopes: Tensor | None, mask: Tensor | None,
    context: StepContext | None, causal: bool = True, window: int | None = None,
) -> Tensor:  # fmt: skip
    """Attention of a whole sequence over itself by our kernel, a document at a time where there are several.

    Positions are places in the row, which among the tokens of a document, and without padding, differ as positions do.
    """
    documents = context.documents_BL if context is not None else None
    if documents is None:
        return attention(q_BLHK, k_BLJK, v_BLJK, causal=causal, window=window, mask=mask, slopes=slopes)
    assert context is not None
    assert mask is None
    length = q_BLHK.shape[1]
    begins = context.once(("cu_seqlens",), (documents,), lambda: _begins(documents))
    q_THK, k_TJK, v_TJK = (x.flatten(0, 1) for x in (q_BLHK, k_BLJK, v_BLJK))
    o_THK, _ = attention_varlen(
        q_THK, k_TJK, v_TJK, begins, begins, length, length, causal=causal, window=window, slopes=slopes
    )
    return o_THK.unflatten(0, q_BLHK.shape[:2])


def _begins(documents_BL: Tensor) -> Tensor:
    """int32: where each run of tokens of one document begins in the rows laid end to end, and where the last ends."""
    first_BL = torch.ones_like(documents_BL, dtype=torch.bool)
    first_BL[:, 1:] = documents_BL[:, 1:] != documents_BL[:, :-1]
    return F.pad(first_BL.flatten().nonzero().flatten(), (0, 1), value=documents_BL.numel()).int()


def dot_product_attention(
    q_BLHK: Tensor, k_BSJK: Tensor, v_BSJK: Tensor, bias: Tensor | None, *, is_causal: bool
) -> Tensor:
    """softmax(q k^T / sqrt(K) + bias) v; bias[B or 1, H or 1, L, S]. Works on strided views, returns o[B, L, H, K]."""
    if is_causal and bias is None and fits(q_BLHK, k_BSJK):
        return causal_attention(q_BLHK, k_BSJK, v_BSJK)
    grouped = q_BLHK.shape[2] != k_BSJK.shape[2]
    q_BHLK, k_BJSK, v_BJSK = (x.transpose(1, 2) for x in (q_BLHK, k_BSJK, v_BSJK))
    o_BHLK = torch_attention(q_BHLK, k_BJSK, v_BJSK, bias, is_causal=is_causal, enable_gqa=grouped)
    return o_BHLK.transpose(1, 2)


def visible_keys(
    num_queries: int,
    num_keys: int,
    mask_BS: Tensor | None,
    documents_BS: Tensor | None,
    device: torch.device,
    *,
    causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """bool[B or 1, L, S]: may query l, the (S - L + l)-th token, see key s? Not padding, other documents, later ones.

    Without `causal` later ones, too. A window hides those `window` and more places away.

    Every query sees itself, padding too, so that no row of the softmax is empty.
    """
    query_L1 = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key_S = torch.arange(num_keys, device=device)
    visible = (key_S <= query_L1)[None] if causal else torch.ones(1, num_queries, num_keys, device=device).bool()
    if window is not None:
        visible = visible & ((query_L1 - key_S).abs() < window)
    if mask_BS is not None:
        visible = visible & mask_BS.bool()[:, None, :]
    if documents_BS is not None:
        visible = visible & (documents_BS[:, num_keys - num_queries :, None] == documents_BS[:, None, :])
    return visible | (key_S == query_L1)


def attention_bias(
    visible_BLS: Tensor,
    slopes_H: Tensor | None,
    query_positions_BL: Tensor,
    key_positions_BS: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The addend to the scores, [B or 1, H or 1, L, S]: -inf where a key is hidden, else slope * (key - query) or 0.

    ALiBi is defined on the key's position alone; a constant for each query drops out of the softmax, and with the
    difference the largest terms are the exact ones. Its dtype is fp32 or wider; zeros and -inf are exact in `dtype`.
    """
    if slopes_H is None:
        zero = torch.zeros((), dtype=dtype, device=visible_BLS.device)
        return torch.where(visible_BLS, zero, -math.inf)[:, None]
    dtype = torch.promote_types(dtype, torch.float32)
    distance_BLS = (key_positions_BS[:, None, :] - query_positions_BL[:, :, None]).to(dtype)
    distance_BLS = torch.where(visible_BLS, distance_BLS, -math.inf)  # slopes are positive, so it stays -inf
    return distance_BLS[:, None] * slopes_H.to(dtype)[:, None, None]


def alibi_slopes(num_heads: int) -> Tensor:
    """fp64[num_heads]: 2^(-8 i / n), n the power of two below; odd steps of 2n for heads beyond (ALiBi, section 3)."""
    n = 2 ** math.floor(math.log2(num_heads))
    exponents = [8 * i / n for i in range(1, n + 1)]
    exponents += [8 * i / (2 * n) for i in range(1, 2 * (num_heads - n), 2)]
    return torch.tensor([2.0**-e for e in exponents], dtype=torch.float64, device="cpu")


def rotate(x_BLHK: Tensor, cos_BLR: Tensor, sin_BLR: Tensor) -> Tensor:
    """Turn the pairs (x[k], x[k + R]) of the first 2 R features by the angles of `rotary_angles`; others stay."""
    size = 2 * cos_BLR.shape[-1]
    a, b = x_BLHK[..., :size].chunk(2, dim=-1)
    cos, sin = cos_BLR[:, :, None], sin_BLR[:, :, None]
    turned = (a * cos - b * sin, b * cos + a * sin)
    return torch.cat(turned if size == x_BLHK.shape[-1] else (*turned, x_BLHK[..., size:]), dim=-1)


def rotate_both(q_BLHK: Tensor, k_BLJK: Tensor, cos_BLR: Tensor, sin_BLR: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys, each turned by `rotate`."""
    return rotate(q_BLHK, cos_BLR, sin_BLR), rotate(k_BLJK, cos_BLR, sin_BLR)


class Attention(nn.Module):
    """Self-attention; see the module's docstring. `attend`, `turn` are slots; `slopes` are of the heads held here.

    window       what it hands to `attend`
    query_scale  queries are multiplied with it; None: they are not
    """

    slopes: Tensor | None

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        alibi: bool = False,
        causal: bool = True,
        norm: Callable[[int], nn.Module] | None = None,
        window: int | None = None,
        query_scale: float | None = None,
    ):
        """norm: makes the norm of a head's features, once for queries and once for keys; None: there is none."""
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.group = num_heads // num_kv_heads
        self.head_dim = head_dim
        self.qkv = Linear(dim, (num_heads + 2 * num_kv_heads) * head_dim, bias=bias)
        self.query_norm, self.key_norm = (norm(head_dim), norm(head_dim)) if norm else (None, None)
        self.out = Linear(num_heads * head_dim, dim, bias=bias)
        self.window, self.query_scale = window, query_scale
        self.register_buffer("slopes", alibi_slopes(num_heads) if alibi else None, persistent=False)
        self.attend: Attend = attend if causal else attend_both_ways
        self.turn: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = rotate_both

    def forward(
        self,
        x_BLD: Tensor,
        positions_BL: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        context: Any = None,
    ) -> Tensor:
        """x[B, L, D] -> [B, L, D]. Rows of x beyond positions' L are padding of a sharded sequence and dropped."""
        qkv = self.qkv(x_BLD)[:, : positions_BL.shape[1]]
        B, L = qkv.shape[:2]
        q_BLJGK, k_BLJ1K, v_BLJ1K = qkv.view(B, L, -1, self.group + 2, self.head_dim).split([self.group, 1, 1], dim=3)
        q, k, v = q_BLJGK.flatten(2, 3), k_BLJ1K.squeeze(3), v_BLJ1K.squeeze(3)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if rotary is not None:
            q, k = self.turn(q, k, *rotary)
        if self.query_scale is not None:
            q = q * self.query_scale
        o_BLHK = self.attend(
            q, k, v, slopes=self.slopes, window=self.window, mask=mask, positions=positions_BL, context=context
        )
        return self.out(o_BLHK.flatten(2))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Attention":
        """Slopes follow the module to a device, but keep their values and dtype under `to(bfloat16)` and `to_empty`."""
        slopes = self.slopes
        super()._apply(fn, recurse)
        if slopes is not None:
            assert self.slopes is not None
            self.slopes = slopes if self.slopes.is_meta else slopes.to(self.slopes.device)
        return self
