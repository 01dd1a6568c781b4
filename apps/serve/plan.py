"""`serve plan`: how many devices a model needs, in 16, 8 and 4 bits, before anything is bought or downloaded.

A device holds its share of the weights, the pages of the sequences that are to be served at once, and what a step works
with (`apps.serve.memory`, which `serve` asks, too). Ranks of tensor parallelism must divide the heads; experts are
served whole, on one device.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

import torch
from rich.console import Console
from rich.table import Table

from apps.serve.memory import Format, Load, Need, folder_format, has_weights, need, quantized_format
from apps.serve.model import find_model
from core.config import UserError, in_words, parse, size_in_bytes
from core.models import SHAPES, DecoderConfig
from core.quant import Scheme, is_quantized
from core.runtime import device_kind

_RUNTIME_BYTES = {"cuda": 1 << 30, "cpu": 0}
"""The runtime's own: CUDA context, libraries' workspaces."""


@dataclass(frozen=True)
class PlannedEngine:
    """The load at once, under the names of the server's options (`apps.serve.config.EngineConfig`).

    Pages are planned for all of it; a server has as many as fit, and lets sequences wait.
    """

    max_running: int = 8
    """sequences at once"""
    max_length: int = 2048
    """tokens of each, prompt and text together"""
    max_batch_tokens: int = 2048
    """tokens of all sequences in one step"""

    def __post_init__(self) -> None:
        _require_positive(self, "max_running", "max_length", "max_batch_tokens", prefix="engine.")


@dataclass(frozen=True)
class ServePlanConfig:
    """Devices that a model needs."""

    RENAMED: ClassVar[Mapping[str, str]] = {
        "memory_gb": "memory=GB",
        "group": "group_size",
        "sequences": "engine.max_running",
        "length": "engine.max_length",
        "batch_tokens": "engine.max_batch_tokens",
    }

    model: Path | None = None
    """a folder, of which config.json is read and, if its weights are there, their headers"""
    shape: str | None = None
    """or a published shape, such as bloom_176b or opt_175b"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """the kind of device that is planned for, which need not be here; auto: CUDA where there is one"""
    memory: str = "24GiB"
    """of a device (24 alone is GiB)"""
    group_size: int = 64
    """weights that share a scale in int4"""
    engine: PlannedEngine = field(default_factory=PlannedEngine)

    def __post_init__(self) -> None:
        _require_positive(self, "group_size")
        size_in_bytes(self.memory, "memory", "GiB")

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        return device_kind("auto") if self.device == "auto" else self.device

    @property
    def memory_bytes(self) -> int:
        return size_in_bytes(self.memory, "memory", "GiB")

    @property
    def load(self) -> Load:
        return Load(self.engine.max_running, self.engine.max_length, self.engine.max_batch_tokens)


def _require_positive(config: object, *names: str, prefix: str = "") -> None:
    for name in names:
        if getattr(config, name) <= 0:
            raise UserError(f"{prefix}{name} is {getattr(config, name)}; it must be positive")


@dataclass(frozen=True)
class Found:
    """The holdings of each of `devices` devices; devices is None where no number of ranks suffices.

    runtime  bytes of the runtime's own
    """

    devices: int | None
    need: Need
    pages: int
    runtime: int

    @property
    def work(self) -> int:
        return self.need.work + self.runtime

    @property
    def total(self) -> int:
        return self.need.weights + self.pages + self.work


def main(argv: list[str]) -> int:
    config = parse({"default": ServePlanConfig}, argv, "megalith serve plan", default="default")
    name, model, folder = _chosen(config)
    asked = formats(model, folder, config.group_size)
    if config.group_size != ServePlanConfig.group_size and "int4" not in asked:
        raise UserError(f"group_size={config.group_size}, and {name} is not planned in int4; leave it out")
    table = Table(
        "weights", "devices", "weights a device", "cache", "work", "together", title=_title(name, model, config)
    )
    for weights, format in asked.items():
        found = fewest(model, format, config)
        devices = "none suffices" if found.devices is None else str(found.devices)
        table.add_row(weights, devices, *map(in_words, (found.need.weights, found.pages, found.work, found.total)))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0


def _title(name: str, model: DecoderConfig, config: ServePlanConfig) -> str:
    served = f"{config.engine.max_running} sequences of {config.engine.max_length} tokens"
    devices = f"devices of {in_words(config.memory_bytes)} ({config.kind})"
    return f"{name}: {model.num_parameters():,} parameters, {served}, {devices}"


def _chosen(config: ServePlanConfig) -> tuple[str, DecoderConfig, Path | None]:
    """Name, shape and folder of what is planned for."""
    if (config.model is None) == (config.shape is None):
        raise UserError("give one of --model DIR and --shape NAME, such as --shape bloom_176b")
    if config.model is not None:
        source = find_model(config.model)
        return source.name, source.config, source.folder
    assert config.shape is not None
    if config.shape not in SHAPES:
        raise UserError(f"no shape '{config.shape}'; the shapes are {', '.join(SHAPES)}")
    SHAPES[config.shape].require_causal()
    return config.shape, SHAPES[config.shape], None


def formats(model: DecoderConfig, folder: Path | None = None, group: int = 64) -> dict[str, Format]:
    """name -> format, of those in which a model can be served: a quantized folder in its own alone."""
    own = {}
    if folder is not None and has_weights(folder):
        own = {"as it is": folder_format(model, folder, None, None, None)}
        if is_quantized(folder):
            return own
    half = torch.float16
    found = own | {"fp16": Format(half, half)}
    if not model.moe.num_experts:
        found["int8"] = quantized_format(model, Scheme("int8"), half, half)
        found["int4"] = quantized_format(model, Scheme("int4", group), half, half)
    return found


def fewest(model: DecoderConfig, format: Format, config: ServePlanConfig) -> Found:
    """The fewest devices that hold the model so, or what it needs on as many as its heads allow."""
    ranks = [n for n in range(1, model.kv_heads + 1) if model.kv_heads % n == 0 and model.num_heads % n == 0]
    load, found = replace(config.load, window=model.every_window, local_window=model.local_window), None
    for count in ranks if not model.moe.num_experts else [1]:
        needed = need(model, format, load, count, config.kind)
        found = Found(count, needed, needed.cache(load.pages), _RUNTIME_BYTES[config.kind])
        if found.total <= config.memory_bytes:
            return found
    assert found is not None
    return replace(found, devices=None)
