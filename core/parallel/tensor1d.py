"""One-dimensional tensor parallelism (Megatron): a column-parallel linear layer followed by a row-parallel one.

Shapes: B batch, L length, I in_features, O out_features, V vocabulary, D model.

    colwise          W[O_tp, I]   x[.., I]          -> y[.., O_tp]
    rowwise          W[O, I_tp]   x[.., I_tp]       -> y[.., O]{tp} -> all-reduce
    vocab_embedding  W[V_tp, D]   ids[B, L]         -> y[B, L, D]{tp} -> all-reduce
    vocab_head       W[V_tp, D]   x[B, L, D]        -> logits[B, L, V_tp], or losses that never leave their shard
    shard_heads      marks an attention module whose projections are sharded by heads

What leaves and enters (`enter`, `leave`) is an argument: here the activations between the pairs are replicated, in
`sequence` they are sharded along the sequence.

Shoeybi et al. 2019, Megatron-LM, section 3.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from core.comm.collectives import all_gather, all_reduce, all_reduce_max, copy_to, reduce_from
from core.config import UserError
from core.layout import layout_of
from core.parallel.plan import on_local_parameters, shard_parameter

Transition = Callable[[Tensor, DeviceMesh], Tensor]


def colwise(linear: nn.Module, axis: DeviceMesh, *, enter: Transition = copy_to) -> nn.Module:
    """Shard out_features (rows of the weight).  x[.., I] replicated -> y[.., O_tp]."""
    for name, _ in list(linear.named_parameters(recurse=False)):
        shard_parameter(linear, name, axis, Shard(0))
    return on_local_parameters(linear, before=lambda x: enter(x, axis))


def rowwise(linear: nn.Module, axis: DeviceMesh, *, leave: Transition = reduce_from) -> nn.Module:
    """Shard in_features (columns of the weight).  x[.., I_tp] -> y[.., O]; the bias is added after the reduction."""
    shard_parameter(linear, "weight", axis, Shard(1))

    def reduce_then_bias(partial_y: Tensor) -> Tensor:
        y, bias = leave(partial_y, axis), linear._parameters.get("bias")
        return y if bias is None else y + bias

    return on_local_parameters(linear, after=reduce_then_bias, hide=("bias",))


def vocab_embedding(embedding: nn.Module, axis: DeviceMesh, *, leave: Transition = reduce_from) -> nn.Module:
    """Shard the rows of a vocabulary.  ids[B, L] -> y[B, L, D]; ids of other ranks' rows look up zeros."""
    if getattr(embedding, "padding_idx", None) is not None or getattr(embedding, "max_norm", None) is not None:
        raise UserError("a sharded vocabulary looks up plain embeddings; build it without padding_idx and max_norm")
    shard_parameter(embedding, "weight", axis, Shard(0))
    start = _first_row(embedding)

    def forward(ids: Tensor) -> Tensor:
        weight = embedding.weight
        assert isinstance(weight, Tensor)
        local_ids = ids - start
        elsewhere = (local_ids < 0) | (local_ids >= weight.shape[0])
        return _lookup(local_ids.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)

    embedding.forward = forward
    return on_local_parameters(embedding, after=lambda y: leave(y, axis))


def _lookup(ids: Tensor, weight: Tensor) -> Tensor:
    """Embedding rows; a shard without any rows (a tiny vocabulary) looks up zeros."""
    if weight.shape[0] == 0:
        return weight.new_zeros(*ids.shape, weight.shape[1])
    return nn.functional.embedding(ids, weight)


def _first_row(module: nn.Module) -> int:
    """The first row of the vocabulary that this rank holds."""
    return layout_of(module.get_parameter("weight")).box()[0].start


def vocab_head(head: Any, axis: DeviceMesh, *, enter: Transition = copy_to) -> nn.Module:
    """Shard the vocabulary of the head with its loss (core.nn.loss): the logits of other ranks' rows are never formed.

    With targets, three numbers a token cross the axis: maximum, sum of exponentials and target logit. Without, the
    logits are gathered: logits[B, L, V] on every rank.
    """
    num_rows = head.weight.shape[0]
    max_rows = -(-num_rows // axis.size())
    if max_rows * (axis.size() - 1) >= num_rows:
        holders = -(-num_rows // max_rows)
        raise UserError(f"{num_rows} rows of a vocabulary reach {holders} ranks of tp={axis.size()}; use a smaller tp")
    shard_parameter(head, "weight", axis, Shard(0))
    head.vocab_start, head.max_rows = _first_row(head), max_rows
    head.combine = partial(combine_statistics, axis=axis)
    on_local_parameters(head, before=lambda x: enter(x, axis))
    inner = head.forward

    def forward(x: Tensor, targets: Tensor | None = None, *rest: Any) -> Tensor:
        out = inner(x, targets, *rest)
        return out if targets is not None else _gather_vocabulary(out, num_rows, axis)

    head.forward = forward
    return head


def _gather_vocabulary(logits: Tensor, num_rows: int, axis: DeviceMesh) -> Tensor:
    """logits[.., V_tp], ragged -> logits[.., V] on every rank; for inference, without a gradient."""
    rows_per_rank = -(-num_rows // axis.size())
    padded = nn.functional.pad(logits.detach(), (0, rows_per_rank - logits.shape[-1]))
    return all_gather(padded, logits.ndim - 1, axis)[..., :num_rows]


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


def shard_heads(attention: Any, axis: DeviceMesh) -> nn.Module:
    """Attention over this rank's heads: its projections are sharded by other styles, its per-head slopes here.

    Raises UserError when the heads (or key/value heads) do not divide over the axis.
    """
    check_heads(attention.num_heads, attention.num_kv_heads, axis.size())
    if attention.slopes is not None:
        attention.slopes = attention.slopes.chunk(axis.size())[axis.get_local_rank()].clone()
    return attention


def check_heads(num_heads: int, num_kv_heads: int, tp: int) -> None:
    """Raises UserError unless tp divides the heads, naming the sizes that do."""
    for count, what in ((num_heads, "heads"), (num_kv_heads, "key/value heads")):
        if count % tp:
            allowed = ", ".join(str(n) for n in range(1, count + 1) if num_heads % n == 0 and num_kv_heads % n == 0)
            raise UserError(f"{count} {what} do not divide over tp={tp}; use tp in {{{allowed}}}")
