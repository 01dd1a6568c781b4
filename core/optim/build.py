"""Optimizers by name, over the masters that data parallelism hands out."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from core.config import UserError
from core.layout import layout_of
from core.optim.muon import Muon
from core.optim.schedule import ScheduleConfig


@dataclass(frozen=True)
class OptimConfig:
    name: Literal["adamw", "muon", "sgd"] = "adamw"
    """muon: orthogonalised momentum for the blocks' matrices (which must be whole), AdamW for the rest"""
    lr: float = 3e-4
    """peak learning rate"""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    """of matrices; vectors (norms, biases) are never decayed"""
    momentum: float = 0.9
    """of sgd and muon"""
    clip_norm: float | None = 1.0
    """global gradient norm beyond which gradients are scaled down; None: never"""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self) -> None:
        if self.lr < 0 or self.weight_decay < 0 or self.eps <= 0:
            raise UserError(
                f"optim lr={self.lr}, weight_decay={self.weight_decay}, eps={self.eps}; "
                "give lr >= 0, weight_decay >= 0 and eps > 0"
            )
        if not all(0 <= beta < 1 for beta in (*self.betas, self.momentum)):
            raise UserError(f"optim betas={self.betas}, momentum={self.momentum}; give numbers from 0 to below 1")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise UserError(f"optim.clip_norm={self.clip_norm}; give a positive norm, or None for no clipping")


def build_optimizer(config: OptimConfig, masters: dict[str, Tensor]) -> torch.optim.Optimizer:
    """The optimizer over the local tensors; empty shards are left out (there is nothing to update)."""
    held = [m for m in masters.values() if m.numel()]
    matrices = [m for m in held if len(layout_of(m).shape) >= 2]
    vectors = [m for m in held if len(layout_of(m).shape) < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, foreach=True)
    if config.name == "muon":
        return _muon(config, masters)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _muon(config: OptimConfig, masters: dict[str, Tensor]) -> Muon:
    """Muon for the matrices of the repeated blocks, whose names hold a number; AdamW for the others.

    Raises UserError when a matrix is sharded.
    """
    if any(layout_of(master).cuts for master in masters.values()):
        raise UserError("optim.name=muon needs whole matrices on every rank; use --zero 0 and mesh.tp=1, or adamw")
    hidden = {n for n, m in masters.items() if m.ndim == 2 and any(part.isdigit() for part in n.split("."))}
    matrices = [m for n, m in masters.items() if n not in hidden and m.ndim >= 2]
    vectors = [m for m in masters.values() if m.ndim < 2]
    groups = [
        {"params": [masters[n] for n in masters if n in hidden], "orthogonalise": True},
        {"params": matrices},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return Muon(groups, config.lr, config.momentum, config.betas, config.eps, config.weight_decay)
