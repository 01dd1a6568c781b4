"""`serve plan`: how many devices a model needs, in 16, 8 and 4 bits, before anything is bought or downloaded.

A device holds its share of the weights, the pages of the sequences that are to be served at once, and what a step works
with. Ranks of tensor parallelism must divide the heads.
"""

import math
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from apps.serve.model import find_source, page_bytes
from core.config import UserError, parse
from core.estimate import ModelShape, decoder_shape
from core.models import SHAPES, DecoderConfig
from core.runtime import gigabytes

# Bits of a weight in matrices: int8 has a scale of 32 bits a row, int4 one of 16 bits and a zero of 16 bits a group.
_FORMATS = {"fp16": 16.0, "int8": 8.0, "int4": 4.0}
_ROW_SCALE_BITS, _GROUP_BITS = 32, 32
# The runtime's own: CUDA context, libraries' workspaces.
_RUNTIME_BYTES = 1 << 30


@dataclass(frozen=True)
class PlanConfig:
    """Devices that a model needs."""

    model: Path | None = None
    """a folder; only its config.json is read"""
    shape: str | None = None
    """or a published shape, such as bloom_176b or opt_175b"""
    memory_gb: float = 24.0
    """memory of a device"""
    sequences: int = 8
    """served at once"""
    length: int = 2048
    """tokens of each, prompt and text"""
    batch_tokens: int = 2048
    """tokens of a step"""
    group: int = 64
    """weights that share a scale in int4"""

    def __post_init__(self) -> None:
        for name in ("memory_gb", "sequences", "length", "batch_tokens", "group"):
            if getattr(self, name) <= 0:
                raise UserError(f"{name} is {getattr(self, name)}; it must be positive")


@dataclass(frozen=True)
class Need:
    """Bytes on each of `devices` devices; devices is None where no number of ranks suffices."""

    format: str
    devices: int | None
    weights: int
    pages: int
    work: int

    @property
    def total(self) -> int:
        return self.weights + self.pages + self.work


def main(argv: list[str]) -> int:
    config = parse({"default": PlanConfig}, argv, "serve plan", default="default")
    name, model = _chosen(config)
    table = Table(
        "weights", "devices", "weights a device", "cache", "work", "together", title=_title(name, model, config)
    )
    for format in _FORMATS:
        found = need(model, format, config)
        devices = "none suffices" if found.devices is None else str(found.devices)
        table.add_row(format, devices, *map(gigabytes, (found.weights, found.pages, found.work, found.total)))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0


def _title(name: str, model: DecoderConfig, config: PlanConfig) -> str:
    served = f"{config.sequences} sequences of {config.length} tokens"
    return f"{name}: {_shape(model).num_parameters():,} parameters, {served}, devices of {config.memory_gb:g} GB"


def _chosen(config: PlanConfig) -> tuple[str, DecoderConfig]:
    if (config.model is None) == (config.shape is None):
        raise UserError("give one of --model DIR and --shape NAME, such as --shape bloom_176b")
    if config.model is not None:
        source = find_source(config.model)
        return source.name, source.config
    if config.shape not in SHAPES:
        raise UserError(f"no shape '{config.shape}'; the shapes are {', '.join(SHAPES)}")
    return config.shape, SHAPES[config.shape]


def need(model: DecoderConfig, format: str, config: PlanConfig) -> Need:
    """The fewest devices that hold the model so, or what it needs on as many as its heads allow."""
    ranks = [n for n in range(1, model.kv_heads + 1) if model.kv_heads % n == 0 and model.num_heads % n == 0]
    found = None
    for count in ranks:
        found = _on(model, format, config, count)
        if found.total <= config.memory_gb * 1e9:
            return found
    assert found is not None
    return Need(format, None, found.weights, found.pages, found.work)


def _on(model: DecoderConfig, format: str, config: PlanConfig, ranks: int) -> Need:
    pages = config.sequences * -(-config.length // 16) * page_bytes(model, 16, torch.float16, ranks)
    # Widest at once: the residual, an MLP's hidden activations, and in fp32 the logits of one token a sequence.
    widest = 3 * model.dim + 2 * model.ffn_dim // ranks
    work = 2 * config.batch_tokens * widest + 4 * config.sequences * model.vocab_size
    return Need(format, ranks, weight_bytes(model, format, config.group, ranks), pages, work + _RUNTIME_BYTES)


@lru_cache
def _shape(model: DecoderConfig) -> ModelShape:
    return decoder_shape(model)


def weight_bytes(model: DecoderConfig, format: str, group: int, ranks: int) -> int:
    """Of the largest shard: matrices in the format, with their scales; vectors and positions in 16 bits."""
    bits = 0.0
    for weight in _shape(model).weights:
        shape = weight.local_shape(ranks)
        count = math.prod(shape)
        is_matrix = len(shape) == 2 and weight.tp_dim is not None
        if not is_matrix or format == "fp16":
            bits += 16 * count
        elif format == "int8":
            bits += _FORMATS[format] * count + _ROW_SCALE_BITS * shape[0]
        else:
            bits += _FORMATS[format] * count + _GROUP_BITS * shape[0] * -(-shape[1] // group)
    return math.ceil(bits / 8)
