"""Megatron's sequence parallelism: what tensor parallelism leaves replicated is sharded along the sequence.

Between the tensor-parallel pairs activations lie as x[B, L_tp, D]: norms, residuals and biases work on L / tp rows, and
an all-reduce becomes a reduce-scatter and an all-gather of the same volume.

    x[B, L_tp, D] -> gather -> x[B, L, D] -> colwise -> [B, L, O_tp] -> rowwise -> [B, L, D]{tp} -> scatter

The parameters between the pairs stay replicated; their gradients are partial sums over the axis (`mark_partial`).
A length that tp does not divide is padded with rows of zeros where the sequence is first cut (the embedding). Attention
and head drop the surplus rows, because they know the length from the positions and the targets.

Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, section 4.2.2.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from core.comm.collectives import gather_from, scatter_to, take_shard
from core.parallel import tensor1d
from core.parallel.draws import sharded
from core.parallel.plan import Style, mark_partial, mark_partial_parameter

_L = 1  # activations are [B, L, D]


def _gather_rows(x: Tensor, axis: DeviceMesh) -> Tensor:
    """x[B, L_tp, D] -> x[B, L, D]; the gradient comes back as this rank's sum."""
    return gather_from(x, _L, axis)


def _scatter_rows(y: Tensor, axis: DeviceMesh) -> Tensor:
    """y[B, L, D]{tp} -> y[B, L_tp, D]."""
    return scatter_to(y, _L, axis)


colwise: Style = partial(tensor1d.colwise, enter=_gather_rows)
colwise_of_whole: Style = partial(tensor1d.colwise, enter=lambda x, axis: x)
vocab_head: Style = partial(tensor1d.vocab_head, enter=_gather_rows)
vocab_embedding: Style = partial(tensor1d.vocab_embedding, leave=_scatter_rows)


def rowwise(linear: nn.Module, axis: DeviceMesh) -> nn.Module:
    """Shard in_features.  x[B, L, I_tp] -> y[B, L_tp, O]; the bias meets only those rows: a partial gradient."""
    styled = tensor1d.rowwise(linear, axis, leave=_scatter_rows)
    bias = styled._parameters.get("bias")
    if bias is not None:
        mark_partial_parameter(bias, axis.mesh_dim_names or ("tp",))
    return styled


def replicate(module: nn.Module, axis: DeviceMesh) -> nn.Module:
    """A module that works row by row on x[B, L_tp, D] (a norm, a dropout), its parameters replicated."""
    for child in module.modules():
        mark_partial(child, axis)
    return sharded(_L)(module, axis)


def gather_input(module: nn.Module, axis: DeviceMesh) -> nn.Module:
    """A module x[B, L_tp, D] -> … whose parts see x[B, L, D]: gathered once for all the `colwise_of_whole` in it."""
    inner = module.forward

    def forward(x: Tensor, *rest: Any) -> Tensor:
        return inner(_gather_rows(x, axis), *rest)

    module.forward = forward
    return module


def lookup(embedding: nn.Module, axis: DeviceMesh) -> nn.Module:
    """An embedding of positions[B, L] that looks up only this rank's rows -> [B, L_tp, D]."""
    inner = embedding.forward

    def forward(positions: Tensor) -> Tensor:
        return inner(take_shard(positions, _L, axis))

    embedding.forward = forward
    mark_partial(embedding, axis)
    return embedding
