"""Head and loss where activations and vocabulary are cut over a grid: what 2D, 2.5D and 3D do alike.

    chunk by chunk of the tokens at hand
      1. logits[C, V_cols], by the products of the form, and the bias[V_cols] where there is one
      2. maximum, sum of exponentials and target logit of each token, combined over the columns' axis
      3. with a gradient: the logits become their gradient g, which goes into dx and dE at once
    the sum of the losses of all tokens is completed over the rows' axes

All ranks take equally many chunks, because the products are collectives.

Shapes: B batch, L length, D model, V vocabulary, C tokens of a chunk.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from core.comm.collectives import all_reduce
from core.config import UserError
from core.kernels.cross_entropy import CHUNK_BYTES, Objective, cross_entropy_of_shard
from core.layout import shares
from core.mesh import AnyMesh, axis_size
from core.parallel.grid import Side, Spread, gathered
from core.parallel.tensor1d import combine_statistics
from core.placement.style import Message


class Pass(ABC):
    """The products of one forward and its gradients: begun with x[B_rows, L, D_cols] and the weight."""

    @abstractmethod
    def logits(self, tokens: slice) -> Tensor:
        """logits[C, V_cols] of some of the tokens at hand."""

    @abstractmethod
    def add(self, tokens: slice, g_CV: Tensor) -> None:
        """Take the gradient of these logits into those of x and of the weight."""

    @abstractmethod
    def gradients(self) -> tuple[Tensor, Tensor]:
        """(dx, dweight), of the shapes of x and of the weight; dweight of fp16 in fp32."""


class Products(ABC):
    """The products of x and the embedding in one form.

    at        where logits lie: the vocabulary over the columns
    partials  logits of how many ranks are alive at once on the way to one's own
    """

    at: Spread
    partials: int

    @abstractmethod
    def begin(self, x: Tensor, weight: Tensor, with_gradients: bool) -> Pass: ...


def refuse_vocabulary(side: Side) -> Callable[[Any, AnyMesh, str], None]:
    """`Style.refuse` of a head whose vocabulary lies over the columns of a side: each of them needs a row."""

    def refuse(head: Any, mesh: AnyMesh, axis: str) -> None:
        vocabulary, ranks = head.weight.shape[0], axis_size(mesh, side.cols)
        if shares(vocabulary, ranks)[-1].start == vocabulary:
            raise UserError(
                f"{vocabulary} rows of a vocabulary do not reach all {ranks} ranks of {side.cols}; use a smaller tp"
            )

    return refuse


def messages(side: Side) -> tuple[Message, ...]:
    """Messages of the loss itself: three numbers a token over the columns, and its sum over the rows."""
    sums = tuple(Message("all_reduce", lambda site: 1, axis, width="wide") for axis in side.rows)
    return (Message("all_reduce", lambda site: 3 * side.tokens(site), side.cols, width="wide"), *sums)


def install(head: Any, products: Products) -> nn.Module:
    """Let a head (core.nn.loss) compute by these products; its weight is cut already."""
    at = products.at
    rows = at.columns(head.vocab_size)
    objective = Objective(head.vocab_size, rows[at.col].start, head.ignore_index, head.label_smoothing, head.z_loss)

    def forward(
        x: Tensor, targets: Tensor | None = None, length: int | None = None, rows_R: Tensor | None = None
    ) -> Tensor:
        x = x[:, :length]
        if targets is None:
            return _logits(products, x if rows_R is None else x[:, rows_R], head.weight, head.bias)
        own = at.batch(targets, head.ignore_index).flatten()
        most = own.numel() * products.partials * (rows[0].stop - rows[0].start) * x.element_size()
        with_gradients = torch.is_grad_enabled() and (x.requires_grad or head.weight.requires_grad)
        show = None if head.show_gradients is None else partial(head.show_gradients, x)
        how = products, objective, -(-most // CHUNK_BYTES) or 1, with_gradients, show
        return _Loss.apply(x, head.weight, head.bias, own, *how)  # pyright: ignore[reportReturnType]

    head.forward = forward
    return head


def _logits(products: Products, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """logits[B, L, V] on every rank, B padded; no gradient."""
    with torch.no_grad():
        logits = _biased(products.begin(x, weight, False).logits(slice(None)), bias)
        return gathered(logits.view(-1, x.shape[1], logits.shape[-1]), products.at)


def _biased(logits_CV: Tensor, bias: Tensor | None) -> Tensor:
    return logits_CV if bias is None else logits_CV.add_(bias)


class _Loss(Function):
    @staticmethod
    def forward(
        ctx: Any, x, weight, bias, targets, products: Products, objective, num_chunks, with_gradients, show
    ) -> Tensor:
        going, at = products.begin(x, weight, with_gradients), products.at
        combine = partial(combine_statistics, axis=at.col_axis)
        loss = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        dbias = None if bias is None else torch.zeros_like(bias, dtype=loss.dtype)
        size = -(-targets.numel() // num_chunks)
        for start in range(0, targets.numel(), size):
            tokens = slice(start, start + size)
            shard = cross_entropy_of_shard(_biased(going.logits(tokens), bias), targets[tokens], objective)
            maximum, sum_exp, target_logit = combine(*shard.statistics)
            logsumexp = maximum + sum_exp.log()
            each = logsumexp - target_logit + objective.z_loss * logsumexp.square()
            loss += (each * (targets[tokens] != objective.ignore_index)).sum()
            if with_gradients:
                g_CV = shard.gradients(logsumexp)
                if show is not None:
                    show(tokens, g_CV)
                if dbias is not None:
                    dbias += g_CV.sum(0, dtype=dbias.dtype)
                going.add(tokens, g_CV)
                del g_CV
            del shard  # before the next chunk's logits are made
        for axis in at.row_axes:
            loss = all_reduce(loss, axis)
        if with_gradients:
            ctx.save_for_backward(*going.gradients(), dbias)
            ctx.dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dx, dweight, dbias = ctx.saved_tensors
        # In place: a second backward through the same graph is refused by autograd's version check.
        dx, dweight = dx.mul_(grads[0]), dweight.mul_(grads[0]).to(ctx.dtype)
        return dx, dweight, None if dbias is None else dbias.mul_(grads[0]).to(ctx.dtype), *[None] * 6
