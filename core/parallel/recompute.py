"""Activation checkpointing: what the forward does not keep, the backward computes again.

    none        keep everything
    full        keep each block's input (Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost)
    selective   keep matrix products and convolutions, compute again what is cheap and large: attention, norms,
                activations (Korthikanti et al. 2022, section 5)

`every` n recomputes one block of n, the first, the (n+1)-th, … and leaves the others as they are.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import core.kernels.matmul  # noqa: F401 - registers an operator that is named below
from core.config import UserError
from core.parallel.pipeline.recompute import checkpoint_once
from core.parallel.plan import RECOMPUTED, blocks_of

RecomputeMode = Literal["none", "full", "selective"]

_MATRIX_PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.mkldnn._linear_pointwise.default,  # what core.kernels.matmul takes on a CPU
    torch.ops.megalith.onednn_linear.default,  # the same in what is compiled
    torch.ops.aten._grouped_mm.default,  # what core.nn.experts takes on a GPU
)


@dataclass(frozen=True)
class RecomputeConfig:
    mode: RecomputeMode = "none"
    every: int = 1
    """recompute one block of this many"""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UserError(f"recompute.every={self.every}: one block of how many is recomputed; give at least 1")

    def unread(self) -> dict[str, str]:
        return {"every": "and nothing is recomputed; give --recompute.mode full"} if self.mode == "none" else {}


def apply_recompute(model: nn.Module, config: RecomputeConfig, *, in_parts: bool = False) -> None:
    """Wrap the forward of the model's blocks, which stays as `recomputed_forward`; names and parameters stay.

    in_parts  the backward comes in several, each block's values computed again in the first of them
    """
    if config.mode == "none":
        return
    again = checkpoint_once if in_parts else partial(checkpoint, use_reentrant=False)
    if config.mode == "selective":
        again = partial(again, context_fn=partial(create_selective_checkpoint_contexts, _keep_matrix_products))
    for block in blocks_of(model)[:: config.every]:
        setattr(block, RECOMPUTED, block.forward)
        block.forward = partial(again, partial(_forward, block))


def _forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return getattr(block, RECOMPUTED)(*args, **kwargs)


def _keep_matrix_products(ctx, operator, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _MATRIX_PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
