"""Head and loss as one module, so that whoever shards or gathers the head's weight sees it in use.

The loss never holds all logits. For each chunk of tokens:
1. logits = x W^T, in the dtype of the model; their log-softmax in fp32 or wider.
2. `combine` turns the statistics over the vocabulary rows held here into those over all of them (one rank: nothing).
3. When a gradient is wanted: logits become softmax - onehot in place, and feed dx = g W and dW += g^T x at once, so
   the backward only scales, and the forward's GEMMs are not repeated.

The idea is that of Wijmans et al., "Cut Your Losses" (2024), and Liger's fused linear cross-entropy, without a kernel.

Shapes: B batch, L length, N = B L tokens, C tokens of a chunk, D model, V vocabulary rows held here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from core.nn.linear import linear, product

IGNORED = -100

# Logits of one chunk. Larger makes the GEMMs a little better, smaller keeps memory and page faults down.
CHUNK_BYTES = 64 << 20
# Logits worked on at a time on a CPU, counted in fp32.
TILE_BYTES = 1 << 20
# The weight's gradient added at a time.
SLAB_BYTES = 16 << 20

Statistics = tuple[Tensor, Tensor, Tensor]
Combine = Callable[[Tensor, Tensor, Tensor], Statistics]
"""(max, sum_exp, target_logit), each [C], over the rows held here -> the same over the whole vocabulary.

max and sum_exp satisfy max + log(sum_exp) = logsumexp. target_logit is 0 where the target's row is not held here, so
that it sums over the shards.
"""


class Head(nn.Module):
    """Logits, or the sum of the tokens' cross-entropies. No bias.

    weight[V, D]  the embedding's own weight when tied
    combine, vocab_start  set by whoever shards the vocabulary: see `Combine`; the first row held here
    max_rows  the most rows of the vocabulary that any rank holds: cuts the tokens into chunks, alike on every rank
    z_loss  adds z_loss * logsumexp^2 for each token (Chowdhery et al., "PaLM", 2022, section 5)
    """

    def __init__(self, vocab_size: int, dim: int, *, weight: Tensor | None = None, z_loss: float = 0.0):
        super().__init__()
        self.weight = nn.Linear(dim, vocab_size, bias=False).weight if weight is None else weight
        self.combine: Combine | None = None
        self.vocab_start = 0
        self.max_rows = vocab_size
        self.z_loss = z_loss

    def forward(self, x_BLD: Tensor, targets_BL: Tensor | None = None, length: int | None = None) -> Tensor:
        """logits[B, L, V]; with targets a scalar, fp32 or wider: the sum over targets other than -100.

        Rows of x beyond `length` (default: all are real) are padding of a sharded sequence and dropped.
        """
        x_BLD = x_BLD[:, :length]
        if targets_BL is None:
            return linear(x_BLD, self.weight)
        return linear_cross_entropy(
            x_BLD.flatten(0, 1),
            self.weight,
            targets_BL.flatten(),
            combine=self.combine,
            vocab_start=self.vocab_start,
            max_rows=self.max_rows,
            z_loss=self.z_loss,
        )


def linear_cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    combine: Combine | None = None,
    vocab_start: int = 0,
    max_rows: int | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """sum of cross_entropy(x W^T, targets) over targets != -100; scalar, fp32 or wider. Options as those of `Head`."""
    needs_grad = torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad)
    chunk_tokens = _even_part(x_ND.shape[0], CHUNK_BYTES // ((max_rows or weight_VD.shape[0]) * x_ND.itemsize))
    return _LinearCrossEntropy.apply(x_ND, weight_VD, targets_N, combine, vocab_start, chunk_tokens, z_loss, needs_grad)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        combine: Combine | None,
        vocab_start: int,
        chunk_tokens: int,
        z_loss: float,
        needs_grad: bool,
    ) -> Tensor:
        num_tokens, num_rows = x_ND.shape[0], weight_VD.shape[0]
        loss = x_ND.new_zeros((), dtype=torch.promote_types(x_ND.dtype, torch.float32))
        dx_ND = torch.empty_like(x_ND) if needs_grad else None
        dweight = _Sum(weight_VD, in_parts=chunk_tokens < num_tokens)
        for start in range(0, num_tokens, chunk_tokens):
            chunk = slice(start, min(start + chunk_tokens, num_tokens))
            x_CD, targets_C = x_ND[chunk], targets_N[chunk]
            logits_CV = product(x_CD, weight_VD.T)
            columns_C1, held_C1 = _columns(targets_C, vocab_start, num_rows)
            target_C = logits_CV.gather(1, columns_C1).to(loss.dtype).masked_fill(~held_C1, 0.0).squeeze(1)
            counted_C = (targets_C != IGNORED).to(loss.dtype)
            max_C, sum_C = _softmax_(logits_CV, counted_C)
            held_logsumexp_C = logsumexp_C = max_C + sum_C.log()
            if combine is not None:
                max_C, sum_C, target_C = combine(max_C, sum_C, target_C)
                logsumexp_C = max_C + sum_C.log()
            loss += ((logsumexp_C - target_C + z_loss * logsumexp_C.square()) * counted_C).sum()
            if dx_ND is not None:
                # d loss / d logits = softmax * scale - onehot. So far: softmax over the rows held here, 0 if ignored.
                scale_C = 1 + 2 * z_loss * logsumexp_C
                if combine is not None or z_loss:
                    rescale_C = (held_logsumexp_C - logsumexp_C).exp() * scale_C
                    logits_CV.mul_(rescale_C.to(logits_CV.dtype)[:, None])
                g_CV = logits_CV
                at_target_C = ((target_C - logsumexp_C).exp() * scale_C - 1) * counted_C
                at_target_C1 = torch.where(held_C1, at_target_C[:, None].to(g_CV.dtype), g_CV.gather(1, columns_C1))
                g_CV[torch.arange(len(g_CV), device=g_CV.device), columns_C1[:, 0]] = at_target_C1[:, 0]
                dx_ND[chunk] = product(g_CV, weight_VD)
                dweight.add(g_CV.T, x_CD)
                del g_CV
            del logits_CV  # before the next chunk's are made
        if needs_grad:
            ctx.save_for_backward(dx_ND, dweight.total())
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dx_ND, dweight_VD = ctx.saved_tensors
        # In place: a second backward through the same graph is refused by autograd's version check.
        return dx_ND.mul_(grads[0]), dweight_VD.mul_(grads[0]), None, None, None, None, None, None


class _Sum:
    """Sum of products a @ b of the shape of `like`, which it is given back in the dtype of.

    Several are summed in fp32 or wider, by slabs of rows, so that no second tensor of this size is alive.
    """

    def __init__(self, like: Tensor, in_parts: bool):
        self.like = like
        self.dtype = torch.promote_types(like.dtype, torch.float32) if in_parts else like.dtype
        self.in_parts = in_parts
        self.value: Tensor | None = None

    def add(self, a: Tensor, b: Tensor) -> None:
        if not self.in_parts:
            self.value = product(a, b)
            return
        if self.value is None:
            self.value = torch.zeros_like(self.like, dtype=self.dtype)
        slab_rows = max(1, SLAB_BYTES // (b.shape[1] * self.dtype.itemsize))
        for start in range(0, a.shape[0], slab_rows):
            slab = slice(start, start + slab_rows)
            self.value[slab].add_(product(a[slab], b))

    def total(self) -> Tensor:
        return torch.zeros_like(self.like) if self.value is None else self.value.to(self.like.dtype)


def _even_part(total: int, largest: int) -> int:
    """Size of the parts when `total` is cut into as few, nearly equal parts as `largest` allows."""
    num_parts = max(1, -(-total // max(1, largest)))
    return max(1, -(-total // num_parts))


def _columns(targets_C: Tensor, vocab_start: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """([C, 1] column of each target among the rows held here, [C, 1] is it held here?)"""
    columns_C1 = (targets_C - vocab_start)[:, None]
    return columns_C1.clamp(0, num_rows - 1), (columns_C1 >= 0) & (columns_C1 < num_rows)


def _softmax_(logits_CV: Tensor, factor_C: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits into factor * softmax, computed in the factor's dtype; returns (max[C], sum_exp[C]) of the logits.

    Goes over tiles of rows: on a CPU a tile and its softmax stay in the cache of a core; elsewhere there is one tile.
    """
    (num_tokens, width), dtype = logits_CV.shape, factor_C.dtype
    on_cpu = logits_CV.device.type == "cpu"
    tile_tokens = _even_part(num_tokens, TILE_BYTES // (width * dtype.itemsize)) if on_cpu else num_tokens
    wide_TV, softmax_TV = logits_CV.new_empty(2, tile_tokens, width, dtype=dtype)
    max_C, largest_C = logits_CV.new_empty(2, num_tokens, dtype=dtype)
    for start in range(0, num_tokens, tile_tokens):
        tile = slice(start, min(start + tile_tokens, num_tokens))
        logits_TV = logits_CV[tile]
        wide = logits_TV if logits_TV.dtype == dtype else wide_TV[: len(logits_TV)].copy_(logits_TV)
        softmax = torch.softmax(wide, -1, out=softmax_TV[: len(logits_TV)])
        torch.amax(wide, -1, out=max_C[tile])
        torch.amax(softmax, -1, out=largest_C[tile])
        logits_TV.copy_(softmax.mul_(factor_C[tile, None]))
    return max_C, largest_C.reciprocal_()  # the largest probability is exp(max - max) / sum_exp
