"""One-dimensional tensor parallelism (Megatron): a column-parallel linear layer followed by a row-parallel one.

Shapes: B batch, L length, I in_features, O out_features, V vocabulary, D model.

    colwise          W[O_tp, I]   x[.., I]          -> y[.., O_tp]
    rowwise          W[O, I_tp]   x[.., I_tp]       -> y[.., O]{tp} -> all-reduce
    vocab_embedding  W[V_tp, D]   ids[B, L]         -> y[B, L, D]{tp} -> all-reduce
    vocab_head       W[V_tp, D]   x[B, L, D]        -> logits[B, L, V_tp], or losses that never leave their shard
    shard_heads      marks an attention module whose projections are sharded by heads
    norm_of_heads    w[K]         x[B, L, H_tp, K]  -> the same

How activations enter and leave (`Transition`) is an argument: here those between the pairs are replicated, in
`sequence` they are sharded along the sequence.

Shoeybi et al. 2019, Megatron-LM, section 3.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from core.comm.collectives import all_reduce, all_reduce_max, copy_to, join_from, reduce_from
from core.config import UserError
from core.layout import largest_share, layout_of
from core.mesh import AnyMesh, axis_size
from core.parallel.plan import on_local_parameters
from core.placement.style import AXIS, Cut, Message, Messages, Site, Style

Move = Callable[[Tensor, DeviceMesh], Tensor]


@dataclass(frozen=True)
class Transition:
    """The way that activations come to a pair of layers, or leave it.

    move      (x, axis) -> x
    outside   how they lie on the axis outside of the pair
    forward   the operation of its message in a forward, if there is one, and
    backward  in a backward
    """

    move: Move
    outside: Placement
    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()

    def messages(self, features: Callable[[Site], int]) -> Messages:
        """The messages of a style, of activations of so many features."""

        def size(site: Site) -> int:
            length = site.length if self.outside.is_replicate() else site.padded_length()
            return site.batch * length * features(site)

        sent = (tuple(Message(operation, size) for operation in each) for each in (self.forward, self.backward))
        return Messages(*sent)


COPY = Transition(copy_to, Replicate(), backward=("all_reduce",))
WHOLE = Transition(lambda x, axis: x, Replicate())
"""Of activations that lie on every rank, and that nobody sends gradients back through."""

REDUCE = Transition(reduce_from, Replicate(), forward=("all_reduce",))


def in_features(site: Site) -> int:
    """The inputs of the module's first matrix: the last dim of its activations."""
    return next(layout.shape[-1] for layout in site.layouts.values() if len(layout.shape) > 1)


def _out_features(site: Site) -> int:
    return site.shape()[0]


def colwise_by(enter: Transition) -> Style:
    """Shard out_features (rows of the weight).  x[.., I] replicated -> y[.., O_tp]."""
    return Style(
        cuts={"*": Cut(0)},
        inputs={AXIS: enter.outside},
        outputs={AXIS: Shard(-1)},
        messages=enter.messages(in_features),
        wrap=lambda linear, axis: on_local_parameters(linear, before=lambda x: enter.move(x, axis)),
    )


def rowwise_by(leave: Transition) -> Style:
    """Shard in_features (columns of the weight).  x[.., I_tp] -> y[.., O]; the bias is added after the reduction."""

    def wrap(linear: nn.Module, axis: DeviceMesh) -> nn.Module:
        def reduce_then_bias(partial_y: Tensor) -> Tensor:
            y, bias = leave.move(partial_y, axis), linear._parameters.get("bias")
            return y if bias is None else y + bias

        return on_local_parameters(linear, after=reduce_then_bias, hide=("bias",))

    return Style(
        cuts={"weight": Cut(1)},
        partial={} if leave.outside.is_replicate() else {"bias": (AXIS,)},  # it meets this rank's rows alone
        inputs={AXIS: Shard(-1)},
        outputs={AXIS: leave.outside},
        messages=leave.messages(_out_features),
        wrap=wrap,
    )


def vocab_embedding_by(leave: Transition) -> Style:
    """Shard the rows of a vocabulary.  ids[B, L] -> y[B, L, D]; ids of other ranks' rows look up zeros."""

    def wrap(embedding: nn.Module, axis: DeviceMesh) -> nn.Module:
        start = _first_row(embedding)

        def forward(ids: Tensor) -> Tensor:
            weight = embedding.weight
            assert isinstance(weight, Tensor)
            local_ids = ids - start
            elsewhere = (local_ids < 0) | (local_ids >= weight.shape[0])
            return _lookup(local_ids.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)

        embedding.forward = forward
        return on_local_parameters(embedding, after=lambda y: leave.move(y, axis))

    return Style(
        cuts={"weight": Cut(0)},
        outputs={AXIS: leave.outside},
        messages=leave.messages(in_features),
        refuse=refuse_padding,
        wrap=wrap,
    )


def refuse_padding(embedding: Any, mesh: AnyMesh, axis: str) -> None:
    """Raises UserError for an embedding whose rows are not looked up as they are."""
    if getattr(embedding, "padding_idx", None) is not None or getattr(embedding, "max_norm", None) is not None:
        raise UserError("a sharded vocabulary looks up plain embeddings; build it without padding_idx and max_norm")


def _lookup(ids: Tensor, weight: Tensor) -> Tensor:
    """Embedding rows; a shard without any rows (a tiny vocabulary) looks up zeros."""
    if weight.shape[0] == 0:
        return weight.new_zeros(*ids.shape, weight.shape[1])
    return nn.functional.embedding(ids, weight)


def _first_row(module: nn.Module) -> int:
    """The first row of the vocabulary that this rank holds."""
    return layout_of(module.get_parameter("weight")).box()[0].start


def vocab_head_by(enter: Transition) -> Style:
    """Shard the vocabulary of the head with its loss (core.nn.loss): the logits of other ranks' rows are never formed.

    With targets, three numbers a token cross the axis: maximum, sum of exponentials and target logit. Without, the
    logits are gathered: logits[B, L, V] on every rank.
    """

    def wrap(head: Any, axis: DeviceMesh) -> nn.Module:
        num_rows = layout_of(head.weight).shape[0]
        head.vocab_start, head.max_rows = _first_row(head), largest_share(num_rows, axis.size())
        head.combine = partial(combine_statistics, axis=axis)
        on_local_parameters(head, before=lambda x: enter.move(x, axis))
        inner = head.forward

        def forward(x: Tensor, targets: Tensor | None = None, *rest: Any) -> Tensor:
            out = inner(x, targets, *rest)
            return out if targets is not None else _gather_vocabulary(out, num_rows, axis)

        head.forward = forward
        return head

    statistics = Message("all_reduce", lambda site: 3 * site.batch * site.length, width="wide")
    return Style(
        cuts={"*": Cut(0)},
        inputs={AXIS: enter.outside},
        messages=enter.messages(in_features) + Messages((statistics,)),
        refuse=_refuse_vocabulary,
        wrap=wrap,
    )


def _refuse_vocabulary(head: Any, mesh: AnyMesh, axis: str) -> None:
    """Raises UserError where a rank would have no row."""
    num_rows, tp = head.weight.shape[0], axis_size(mesh, axis)
    max_rows = largest_share(num_rows, tp)
    if max_rows * (tp - 1) >= num_rows:
        holders = -(-num_rows // max_rows)
        raise UserError(f"{num_rows} rows of a vocabulary reach {holders} ranks of tp={tp}; use a smaller tp")


def _gather_vocabulary(logits: Tensor, num_rows: int, axis: DeviceMesh) -> Tensor:
    """logits[.., V_tp], ragged -> logits[.., V] on every rank, which all go on with alike."""
    padded = nn.functional.pad(logits, (0, largest_share(num_rows, axis.size()) - logits.shape[-1]))
    return join_from(padded, logits.ndim - 1, axis)[..., :num_rows]


def combine_statistics(
    maximum: Tensor, sum_exp: Tensor, target_logit: Tensor, *, axis: DeviceMesh
) -> tuple[Tensor, Tensor, Tensor]:
    """Per-token statistics of each shard's logits -> those of the whole vocabulary.

    maximum, sum_exp (relative to the maximum) and target_logit (0 where the target is another rank's), each [tokens].
    """
    whole_maximum = all_reduce_max(maximum, axis)
    sums = torch.stack((sum_exp * torch.exp(maximum - whole_maximum), target_logit))
    whole_sum_exp, whole_target_logit = all_reduce(sums, axis)
    return whole_maximum, whole_sum_exp, whole_target_logit


def _own_slopes(attention: Any, axis: DeviceMesh) -> nn.Module:
    if attention.slopes is not None:
        attention.slopes = attention.slopes.chunk(axis.size())[axis.get_local_rank()].clone()
    return attention


def _refuse_heads(attention: Any, mesh: AnyMesh, axis: str) -> None:
    """Raises UserError unless the axis divides the heads, naming the sizes that do."""
    tp, num_heads, num_kv_heads = axis_size(mesh, axis), attention.num_heads, attention.num_kv_heads
    for count, what in ((num_heads, "heads"), (num_kv_heads, "key/value heads")):
        if count % tp:
            allowed = ", ".join(str(n) for n in range(1, count + 1) if num_heads % n == 0 and num_kv_heads % n == 0)
            raise UserError(f"{count} {what} do not divide over tp={tp}; use tp in {{{allowed}}}")


colwise, rowwise = colwise_by(COPY), rowwise_by(REDUCE)
vocab_embedding, vocab_head = vocab_embedding_by(REDUCE), vocab_head_by(COPY)
shard_heads = Style(refuse=_refuse_heads, wrap=_own_slopes)
"""Attention over this rank's heads: its projections are sharded by other styles, its per-head slopes here."""

norm_of_heads = Style(partial={"**": (AXIS,)}, inputs={AXIS: Shard(2)}, outputs={AXIS: Shard(2)})
"""A norm over the features of each head: replicated, and of its gradient every rank has the sum over its own heads."""
