"""Optimizers by name, over the masters that data parallelism hands out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

from core.config import UserError, option, require_finite
from core.layout import layout_of
from core.optim.adafactor import Adafactor, Convention, MomentumFormat
from core.optim.adamw8bit import AdamW8bit
from core.optim.came import Came
from core.optim.factored import WhichDims
from core.optim.lamb import Lamb
from core.optim.lars import Lars
from core.optim.muon import Muon
from core.optim.schedule import ScheduleConfig
from core.optim.sharded import ShardedOptimizer
from core.optim.sm3 import Sm3

_ADAM = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
_ADAFACTOR = {"beta2_decay": -0.8, "eps": None, "eps2": 1e-3, "d": 1.0, "weight_decay": 0.0, "beta1": None}
_ADAFACTOR |= {"momentum_format": "fp32", "relative_step": True, "scale_parameter": True, "warmup_init": False}
_ADAFACTOR |= {"factored": "last", "convention": "torch"}

DEFAULTS: dict[str, dict[str, Any]] = {
    "adafactor": _ADAFACTOR,
    "adamw": _ADAM,
    "adamw8bit": _ADAM,
    "came": {"betas": (0.9, 0.999, 0.9999), "eps": 1e-30, "eps2": 1e-16, "d": 1.0, "weight_decay": 0.0},
    "lamb": {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "max_norm": None},
    "lars": {"momentum": 0.9, "weight_decay": 5e-4, "trust": 1e-3, "eps": 1e-8},
    "muon": _ADAM | {"momentum": 0.95},
    "sgd": {"momentum": 0.9, "weight_decay": 0.1},
    "sm3": {"momentum": 0.9},
}
"""The options that each optimizer has beside lr, with their defaults."""

_SHARDED: dict[str, Callable[..., ShardedOptimizer]] = {
    "adafactor": Adafactor, "adamw8bit": AdamW8bit, "came": Came, "lamb": Lamb, "lars": Lars, "sm3": Sm3,
}  # fmt: skip
_COMMON = ("name", "lr", "clip_norm", "schedule")


@dataclass(frozen=True)
class OptimConfig:
    """An optimizer by name. Options that are None take its default; those that it does not have are refused."""

    name: Literal["adafactor", "adamw", "adamw8bit", "came", "lamb", "lars", "muon", "sgd", "sm3"] = "adamw"
    """muon: orthogonalised momentum for the blocks' matrices (which must be whole), AdamW for the rest"""
    lr: float = 3e-4
    """peak learning rate; of adafactor: bound of the relative step"""
    betas: tuple[float, ...] | None = None
    """of adamw, adamw8bit, lamb and muon two, of came three"""
    eps: float | None = None
    """of all but sgd and sm3; of adafactor and came that of the second moment"""
    weight_decay: float | None = None
    """of matrices; vectors (norms, biases) are never decayed; not of sm3"""
    momentum: float | None = None
    """of lars, muon, sgd and sm3"""
    eps2: float | None = None
    """of adafactor: least RMS that a parameter counts with; of came: added to squared residuals"""
    d: float | None = None
    """of adafactor and came: RMS that an update is scaled down to"""
    beta2_decay: float | None = None
    """of adafactor: the second moment averages with weight t^beta2_decay"""
    beta1: float | None = None
    """of adafactor: decay of a first moment; by default there is none"""
    momentum_format: MomentumFormat | None = None
    """of adafactor's first moment: fp32, bf16 or 8bit"""
    relative_step: bool | None = None
    """of adafactor: the step falls as 1 / sqrt t"""
    scale_parameter: bool | None = None
    """of adafactor: the step is relative to the parameter's RMS"""
    warmup_init: bool | None = None
    """of adafactor: the step is at most 1e-6 t"""
    factored: WhichDims | None = None
    """of adafactor: the last two dims, or the largest two"""
    convention: Convention | None = None
    """of adafactor: epsilon and decay as in torch, or as in the paper and transformers"""
    trust: float | None = None
    """of lars: the layers' rates are trust |p| / |g|"""
    max_norm: float | None = None
    """of lamb: bound of the weights' norm in the trust ratio; by default there is none"""
    clip_norm: float | None = 1.0
    """global gradient norm beyond which gradients are scaled down; None: never"""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self) -> None:
        if self.name not in DEFAULTS:
            raise UserError(f"no optimizer '{self.name}'; the optimizers are {', '.join(DEFAULTS)}")
        own = DEFAULTS[self.name]
        for item in fields(self):
            if item.name not in (*_COMMON, *own) and (value := getattr(self, item.name)) is not None:
                raise UserError(
                    f"optim.name={self.name} has no option {item.name}={value}; its options are "
                    f"{', '.join(('lr', *own))}; leave it out, or give {option(f'optim.{item.name}')} None"
                )
            for value in (self.betas or ()) if item.name == "betas" else (getattr(self, item.name),):
                require_finite(f"optim.{item.name}", value)
        options = self.options()
        betas, momentum, decay = (
            options.get("betas", ()),
            options.get("momentum", 0.0),
            options.get("weight_decay", 0.0),
        )
        if self.lr < 0 or decay < 0 or ((eps := options.get("eps")) is not None and eps <= 0):
            raise UserError(
                f"optim lr={self.lr}, weight_decay={decay}, eps={options.get('eps')}; "
                "give lr >= 0, weight_decay >= 0 and eps > 0"
            )
        if not all(0 <= beta < 1 for beta in (*betas, momentum)) or len(betas) != len(own.get("betas", ())):
            raise UserError(
                f"optim betas={betas}, momentum={momentum}; {self.name} takes {len(own.get('betas', ()))} betas; "
                "give numbers from 0 to below 1"
            )
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise UserError(f"optim.clip_norm={self.clip_norm}; give a positive norm, or None for no clipping")
        if self.name in _SHARDED:
            _sharded(self, {"nothing": torch.zeros(1)})  # what remains is its own to check

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        if self.name != "adafactor" or self.beta1 is not None:
            return {}
        return {"momentum_format": "without a first moment; give --optim.beta1, too"}

    def options(self) -> dict[str, Any]:
        """The optimizer's options, lr aside: those that are given, and the defaults of the others."""
        given = {name: getattr(self, name) for name in DEFAULTS[self.name]}
        return DEFAULTS[self.name] | {name: value for name, value in given.items() if value is not None}


def build_optimizer(config: OptimConfig, masters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """The optimizer over the local tensors.

    Empty shards are left out where a step is a matter of this rank alone; there is nothing to update.
    """
    if config.name == "muon":
        return _muon(config, masters)
    if config.name in _SHARDED:
        return _sharded(config, masters)
    options = config.options()
    groups = _groups({n: m for n, m in masters.items() if m.numel()}, options)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=options["momentum"], foreach=True)
    return torch.optim.AdamW(groups, lr=config.lr, betas=options["betas"], eps=options["eps"], fused=True)


def _groups(masters: Mapping[str, Tensor], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Matrices, which decay, and vectors, which do not; what counts is the shape of the whole."""
    matrices = [m for m in masters.values() if len(layout_of(m).shape) >= 2]
    vectors = [m for m in masters.values() if len(layout_of(m).shape) < 2]
    if "weight_decay" not in options:
        return [{"params": matrices}, {"params": vectors}]
    return [
        {"params": matrices, "weight_decay": options["weight_decay"]},
        {"params": vectors, "weight_decay": 0.0},
    ]


def _sharded(config: OptimConfig, masters: Mapping[str, Tensor]) -> ShardedOptimizer:
    """One of ours, whose step all ranks take together: with the empty shards too."""
    options = config.options()
    groups = _groups(masters, options)
    if config.name in ("lamb", "lars"):
        groups[1]["adapt"] = False  # norms and biases, as the authors do
    if "eps2" in options:
        options["eps"] = (options["eps"], options.pop("eps2"))
    return _SHARDED[config.name](groups, lr=config.lr, **options)


def _muon(config: OptimConfig, masters: Mapping[str, Tensor]) -> Muon:
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
        {"params": matrices, "orthogonalise": False},
        {"params": vectors, "orthogonalise": False, "weight_decay": 0.0},
    ]
    options = config.options()
    return Muon(groups, config.lr, options["momentum"], options["betas"], options["eps"], options["weight_decay"])
