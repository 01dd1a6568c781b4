"""Low-rank adapters: a layer's weight stays as it is, and a product of two thin matrices that learns is added to it.

    y = W x + (alpha / rank) B A x        A [rank, in], B [out, rank]; B starts at zero, so nothing changes at first

Of a convolution A is a convolution of its kernel, stride and padding to `rank` channels, and B one of 1 x 1. A layer
keeps its class, its name and its parameters; A and B are two modules inside it, `lora_down` and `lora_up`.

Hu et al. 2022, LoRA: Low-Rank Adaptation of Large Language Models, section 4.1.
"""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from apps.diffusion.formats.lora import Lora, Pair
from core.config import UserError

Targets = Literal["attention", "attention+mlp", "all"]

# The last parts of the names of layers, as diffusers and transformers call them.
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "q_proj", "k_proj", "v_proj", "out_proj")
_MLP = ("ff.net.0.proj", "ff.net.2", "fc1", "fc2", "proj_in", "proj_out")
_CONVOLUTIONS = ("conv1", "conv2", "conv_shortcut", "conv")
_LAYERS = {"attention": _ATTENTION, "attention+mlp": _ATTENTION + _MLP, "all": _ATTENTION + _MLP + _CONVOLUTIONS}

DOWN, UP = "lora_down", "lora_up"


@dataclass(frozen=True)
class LoraConfig:
    """Adapters of a run."""

    rank: int = 8
    alpha: float | None = None
    """the adapter counts alpha / rank; by default alpha is the rank"""
    targets: Targets = "attention"
    """which layers: the projections of attention; also those of MLPs and around the transformers; also convolutions"""
    dropout: float = 0.0
    """share of A's inputs that a training step leaves out"""
    start: Path | None = None
    """a LoRA file to go on from, whose layers, ranks and alphas are then taken; without it adapters begin at nothing"""
    layout: Literal["diffusers", "kohya", "both"] = "diffusers"
    """of the files in --out: pytorch_lora_weights.safetensors as diffusers and PEFT read it, kohya.safetensors as web
    interfaces do"""

    def __post_init__(self) -> None:
        if self.rank < 1 or (self.alpha is not None and self.alpha <= 0) or not 0 <= self.dropout < 1:
            raise UserError(
                f"lora.rank={self.rank}, lora.alpha={self.alpha}, lora.dropout={self.dropout}; "
                "give a rank of at least 1, a positive alpha and a dropout from 0 to below 1"
            )


def add_adapters(model: nn.Module, config: LoraConfig, seed: int, start: Lora | None = None) -> None:
    """Freeze a model and give its target layers adapters.

    A is drawn from the seed and the layer's name (uniform, as nn.Linear's weights), B is zero.

    start  adapters to go on from: these layers, with these matrices, ranks and alphas, and no others
    """
    model.requires_grad_(False)
    if start is not None:
        for name, pair in start.items():
            _adapt(model.get_submodule(name), pair.rank, pair.alpha, config.dropout, seed, name)
            layer = model.get_submodule(name)
            with torch.no_grad():
                layer.get_parameter(f"{DOWN}.weight").copy_(pair.down)
                layer.get_parameter(f"{UP}.weight").copy_(pair.up)
        return
    alpha = config.rank if config.alpha is None else config.alpha
    for name in [name for name, module in model.named_modules() if _is_target(name, module, config.targets)]:
        _adapt(model.get_submodule(name), config.rank, alpha, config.dropout, seed, name)


def _is_target(name: str, module: nn.Module, targets: Targets) -> bool:
    return isinstance(module, nn.Linear | nn.Conv2d) and f".{name}".endswith(
        tuple(f".{end}" for end in _LAYERS[targets])
    )


def _adapt(layer: nn.Module, rank: int, alpha: float, dropout: float, seed: int, name: str) -> None:
    if isinstance(layer, nn.Conv2d):
        if layer.groups != 1:
            raise UserError(f"{name} is a convolution in groups, which takes no adapter; use other lora.targets")
        shape = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        down = nn.Conv2d(layer.in_channels, rank, *shape, bias=False)  # pyright: ignore[reportArgumentType]
        up = nn.Conv2d(rank, layer.out_channels, 1, bias=False)
    else:
        assert isinstance(layer, nn.Linear)
        down = nn.Linear(layer.in_features, rank, bias=False)
        up = nn.Linear(rank, layer.out_features, bias=False)
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
        nn.init.kaiming_uniform_(down.weight, a=math.sqrt(5))
        up.weight.zero_()
    weight = layer.weight
    layer.add_module(DOWN, down.to(weight.device, weight.dtype))
    layer.add_module(UP, up.to(weight.device, weight.dtype))
    layer.add_module("lora_dropout", nn.Dropout(dropout))
    layer.lora_alpha = alpha  # pyright: ignore[reportArgumentType]
    _wrap(layer, alpha / rank)


def _wrap(layer: nn.Module, scale: float) -> None:
    inner = layer.forward

    def forward(x: Tensor, *args, **kwargs) -> Tensor:
        added = layer.get_submodule(UP)(layer.get_submodule(DOWN)(layer.get_submodule("lora_dropout")(x)))
        return inner(x, *args, **kwargs) + scale * added

    layer.forward = forward


def adapters_of(model: nn.Module) -> Lora:
    """layer's name -> its adapter, for every layer that has one."""
    return {
        name: Pair(
            layer.get_parameter(f"{DOWN}.weight").detach(),
            layer.get_parameter(f"{UP}.weight").detach(),
            float(layer.lora_alpha),  # pyright: ignore[reportArgumentType]
        )
        for name, layer in model.named_modules()
        if hasattr(layer, DOWN)
    }
