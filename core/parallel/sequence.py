"""Megatron's sequence parallelism: what tensor parallelism leaves replicated is sharded along the sequence.

Between the tensor-parallel pairs activations lie as x[B, L_tp, D]: norms, residuals and biases work on L / tp rows, and
an all-reduce becomes a reduce-scatter and an all-gather of the same volume.

    x[B, L_tp, D] -> gather -> x[B, L, D] -> colwise -> [B, L, O_tp] -> rowwise -> [B, L, D]{tp} -> scatter

The parameters between the pairs stay replicated; their gradients are partial sums over the axis.
A length that tp does not divide is padded with rows of zeros where the sequence is first cut (the embedding). Attention
and head drop the surplus rows, because they know the length from the positions and the targets.

Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, section 4.2.2.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from core.comm.collectives import gather_from, scatter_to, take_shard
from core.parallel.draws import mark_sharded
from core.parallel.plan import on_local_parameters
from core.parallel.tensor1d import (
    Transition,
    colwise_by,
    in_features,
    rowwise_by,
    vocab_embedding_by,
    vocab_head_by,
)
from core.placement.style import AXIS, Messages, Style

_L = 1  # activations are [B, L, D]
_ROWS = {AXIS: Shard(_L)}

GATHER = Transition(
    lambda x, axis: gather_from(x, _L, axis), Shard(_L), forward=("all_gather",), backward=("reduce_scatter",)
)
"""x[B, L_tp, D] -> x[B, L, D]; the gradient comes back as this rank's sum."""

SCATTER = Transition(
    lambda y, axis: scatter_to(y, _L, axis), Shard(_L), forward=("reduce_scatter",), backward=("all_gather",)
)
"""y[B, L, D]{tp} -> y[B, L_tp, D]."""

colwise, rowwise = colwise_by(GATHER), rowwise_by(SCATTER)
vocab_head, vocab_embedding = vocab_head_by(GATHER), vocab_embedding_by(SCATTER)

colwise_of_whole = replace(
    colwise, inputs={}, messages=Messages(), wrap=lambda linear, axis: on_local_parameters(linear)
)
"""x[B, L, I] -> y[B, L, O_tp], of which the caller has gathered x; its gradient is this rank's sum."""

replicate = Style(
    partial={"**": (AXIS,)},
    inputs=_ROWS,
    outputs=_ROWS,
    wrap=lambda module, axis: mark_sharded(module, axis, _L),
)
"""A module that works row by row on x[B, L_tp, D] (a norm, a dropout), its parameters replicated."""


def _gathered_input(module: nn.Module, axis: DeviceMesh) -> nn.Module:
    inner = module.forward

    def forward(x: Tensor, *rest: Any) -> Tensor:
        return inner(GATHER.move(x, axis), *rest)

    module.forward = forward
    return module


gather_input = Style(inputs=_ROWS, messages=GATHER.messages(in_features), wrap=_gathered_input)
"""A module x[B, L_tp, D] -> … whose parts see x[B, L, D]: gathered once for all the `colwise_of_whole` in it."""


def _own_positions(embedding: nn.Module, axis: DeviceMesh) -> nn.Module:
    inner = embedding.forward

    def forward(positions: Tensor) -> Tensor:
        return inner(take_shard(positions, _L, axis))

    embedding.forward = forward
    return embedding


lookup = Style(partial={"*": (AXIS,)}, outputs=_ROWS, wrap=_own_positions)
"""An embedding of positions[B, L] that looks up only this rank's rows -> [B, L_tp, D]."""
