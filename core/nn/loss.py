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
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100

# Logits of one chunk. Larger makes the GEMMs a little better, smaller keeps memory and page faults down.
CHUNK_BYTES = 64 << 20

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
    z_loss  adds z_loss * logsumexp^2 for each token (Chowdhery et al., "PaLM", 2022, section 5)
    """

    def __init__(self, vocab_size: int, dim: int, *, weight: nn.Parameter | None = None, z_loss: float = 0.0):
        super().__init__()
        if weight is None:
            weight = nn.Linear(dim, vocab_size, bias=False).weight
        self.weight = weight
        self.combine: Combine | None = None
        self.vocab_start = 0
        self.z_loss = z_loss

    def forward(self, x_BLD: Tensor, targets_BL: Tensor | None = None, length: int | None = None) -> Tensor:
        """logits[B, L, V]; with targets a scalar, fp32 or wider: the sum over targets other than -100.

        Rows of x beyond `length` (default: all are real) are padding of a sharded sequence and dropped.
        """
        x_BLD = x_BLD[:, :length]
        if targets_BL is None:
            return F.linear(x_BLD, self.weight)
        return linear_cross_entropy(
            x_BLD.flatten(0, 1), self.weight, targets_BL.flatten(), self.combine, self.vocab_start, self.z_loss
        )


def linear_cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    combine: Combine | None = None,
    vocab_start: int = 0,
    z_loss: float = 0.0,
) -> Tensor:
    """sum of cross_entropy(x W^T, targets) over targets != -100; scalar, fp32 or wider."""
    needs_grad = torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad)
    return _LinearCrossEntropy.apply(x_ND, weight_VD, targets_N, combine, vocab_start, z_loss, needs_grad)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        combine: Combine | None,
        vocab_start: int,
        z_loss: float,
        needs_grad: bool,
    ) -> Tensor:
        loss = x_ND.new_zeros((), dtype=torch.promote_types(x_ND.dtype, torch.float32))
        dx_ND = torch.empty_like(x_ND) if needs_grad else None
        dweight_VD: Tensor | None = None
        num_tokens = x_ND.shape[0]
        num_chunks = max(1, -(-num_tokens * weight_VD.shape[0] * loss.itemsize // CHUNK_BYTES))
        chunk_tokens = max(1, -(-num_tokens // num_chunks))
        for start in range(0, num_tokens, chunk_tokens):
            here = slice(start, min(start + chunk_tokens, num_tokens))
            x_CD, targets_C = x_ND[here], targets_N[here]
            logits_CV = x_CD @ weight_VD.T
            chunk_loss, g_CV = _cross_entropy(logits_CV, targets_C, combine, vocab_start, z_loss, needs_grad)
            loss += chunk_loss
            if g_CV is None:
                continue
            assert dx_ND is not None
            torch.mm(g_CV, weight_VD, out=dx_ND[here])
            dweight_VD = _accumulate(dweight_VD, g_CV, x_CD, last=here.stop == num_tokens)
        if needs_grad:
            ctx.save_for_backward(dx_ND, dweight_VD)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dx_ND, dweight_VD = ctx.saved_tensors
        scale = grads[0]
        # In place: a second backward through the same graph is refused by autograd's version check.
        return dx_ND.mul_(scale), dweight_VD.mul_(scale), None, None, None, None, None


def _accumulate(total_VD: Tensor | None, g_CV: Tensor, x_CD: Tensor, last: bool) -> Tensor:
    """total + g^T x, summed over chunks in fp32 or wider, in the model's dtype after the last."""
    if total_VD is None:
        total_VD = g_CV.T @ x_CD
    elif total_VD.dtype == g_CV.dtype and g_CV.dtype.itemsize >= 4:
        total_VD.addmm_(g_CV.T, x_CD)
    else:
        total_VD = (total_VD.float() if total_VD.dtype != torch.float32 else total_VD).add_(g_CV.T @ x_CD)
    return total_VD.to(x_CD.dtype) if last else total_VD


def _cross_entropy(
    logits_CV: Tensor, targets_C: Tensor, combine: Combine | None, vocab_start: int, z_loss: float, needs_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """(sum of losses, d loss / d logits in the logits' dtype or None)."""
    dtype = torch.promote_types(logits_CV.dtype, torch.float32)
    rows_C = (targets_C - vocab_start)[:, None]
    held_C1 = (rows_C >= 0) & (rows_C < logits_CV.shape[1])
    rows_C1 = rows_C.clamp(0, logits_CV.shape[1] - 1)
    counted_C = targets_C != IGNORED

    max_C = logits_CV.amax(-1).to(dtype)
    target_C = logits_CV.gather(1, rows_C1).to(dtype).masked_fill(~held_C1, 0.0).squeeze(1)
    exp_CV = logits_CV.to(dtype).sub_(max_C[:, None]).exp_()
    sum_C = exp_CV.sum(-1)
    whole = (max_C, sum_C, target_C) if combine is None else combine(max_C, sum_C, target_C)
    logsumexp_C = whole[0] + whole[1].log()
    loss = (logsumexp_C - whole[2] + z_loss * logsumexp_C.square()).masked_fill(~counted_C, 0.0).sum()
    if not needs_grad:
        return loss, None
    scale_C = ((max_C - whole[0]).exp() / whole[1] * (1 + 2 * z_loss * logsumexp_C)).masked_fill(~counted_C, 0.0)
    onehot_C1 = (held_C1 & counted_C[:, None]).to(dtype)
    return loss, exp_CV.mul_(scale_C[:, None]).scatter_add_(1, rows_C1, -onehot_C1).to(logits_CV.dtype)
