"""`llm profile`: what a step of a model computes, touches and holds, operator by operator, without memory or data."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import nn

from apps.llm.foreign import ForeignModel
from apps.llm.model import UnknownModel, find_model
from core.auto.machines import Gpu
from core.auto.measured import device_named
from core.config import UserError, parse
from core.estimate.profile import as_json, draw_memory, tables
from core.models.decoder import Decoder, DecoderConfig
from core.models.shapes import SHAPES
from core.parallel.recompute import RecomputeConfig, apply_recompute
from core.precision import Precision, compute_dtype
from core.trace.balanced import balanced_loads
from core.trace.graph import Graph
from core.trace.machine import Speed
from core.trace.record import trace_graph

USUAL_LENGTH = 1024


@dataclass(frozen=True)
class ProfileConfig:
    """Profile a model's step on one device."""

    model: Path = Path()
    """a run folder, or a Hugging Face folder of any causal model, config.json alone; or the name of a recipe"""
    mode: Literal["train", "eval"] = "train"
    """train: forward, loss and backward; eval: the forward, without gradients"""
    microbatch: int = 1
    """rows"""
    sequence_length: int | None = None
    """tokens of a row; by default 1024, or what the model has positions for"""
    precision: Precision = "fp32"
    """of parameters and activations"""
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    gpu: str | None = None
    """seconds on it, operator by operator: a name such as A100, or the JSON file of a machine that was measured by
    megalith llm plan --measure"""
    depth: int = 4
    """modules are shown down to names of so many parts"""
    top: int = 12
    """how many operators, and groups of what is alive at the peak, are printed"""
    draw: Path | None = None
    """draw the bytes that are alive along the step to this PNG"""
    json: bool = False
    """print all as JSON"""

    def __post_init__(self) -> None:
        for name in ("microbatch", "sequence_length", "depth", "top"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value}; give at least 1")
        if self.gpu is not None and device_named(self.gpu).peak_flops(compute_dtype(self.precision)) is None:
            raise UserError(f"gpu={self.gpu} does not compute in {self.precision}; give another --precision or --gpu")
        if self.draw is not None and self.draw.suffix != ".png":
            raise UserError(f"draw={self.draw}; the picture is a PNG, give a name that ends in .png")

    def unread(self) -> dict[str, str]:
        found = {}
        if self.mode == "eval":
            why = "with mode=eval, which has no backward; leave it out"
            found |= {f"recompute.{name}": why for name in ("mode", "every", "bits")}
        if self.json:
            found["top"] = "with --json, which prints all; leave it out"
        return found


def main(argv: list[str]) -> int:
    config = parse({"default": ProfileConfig}, argv, "megalith llm profile", default="default", places=("model",))
    model, inputs = _model_and_inputs(config)
    graph = _traced(model, inputs, config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    length = inputs[next(iter(inputs))].shape[1]
    step = "a training step" if config.mode == "train" else "a forward"
    title = (
        f"{type(model).__name__}, {num_parameters:,} parameters: {step} of {config.microbatch:,} x {length:,} tokens "
        f"in {config.precision}"
    )
    picture = None if config.draw is None else draw_memory(graph, config.draw, title)
    took = None if config.gpu is None else seconds_on(device_named(config.gpu), graph, config.precision)
    if config.json:
        about = {"model": type(model).__name__, "parameters": num_parameters, "mode": config.mode}
        about |= {"microbatch": config.microbatch, "sequence_length": length, "precision": config.precision}
        about |= {} if picture is None else {"draw": str(picture)}
        about |= {} if took is None else {"gpu": config.gpu, "seconds": took}
        print(json.dumps(about | as_json(graph, config.depth), indent=1))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(title)
    for part in tables(graph, config.depth, config.top):
        console.print(part)
    if took is not None:
        console.print(f"at least {took:.3g} s on {config.gpu}: each operator by its FLOPs or by its bytes")
    if picture is not None:
        console.print(picture)
    return 0


def seconds_on(gpu: Gpu, graph: Graph, precision: Precision) -> float:
    """No less than the step takes: every operator by its products' FLOPs or its bytes, whichever takes longer."""
    total, dtype = 0.0, compute_dtype(precision)
    for node in (node for node in graph.nodes if not node.is_view):
        rate = gpu.flops_per_s(dtype, node.flops)
        assert rate is not None
        total += Speed(rate, 1e9 * gpu.memory_gb_s).seconds(node.flops, node.bytes_read + node.bytes_written)
    return total


def _traced(model: nn.Module, inputs: dict[str, Any], config: ProfileConfig) -> Graph:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(compute_dtype(config.precision))
    train = config.mode == "train"
    if train:
        apply_recompute(model, config.recompute)
    with balanced_loads():
        return trace_graph(model, inputs, train=train)


def _model_and_inputs(config: ProfileConfig) -> tuple[nn.Module, dict[str, Any]]:
    """The model without values, and what it is given.  Raises UserError for sequences without positions."""
    found = _find(config.model)
    train = config.mode == "train"
    if isinstance(found, ForeignModel):
        length = config.sequence_length or min(USUAL_LENGTH, found.longest or USUAL_LENGTH)
        found.check_length("sequence_length", length)
        ids = torch.zeros(config.microbatch, length, dtype=torch.int64, device="meta")
        return found.build(), {"input_ids": ids, "use_cache": False} | ({"labels": ids} if train else {})
    length = config.sequence_length or min(USUAL_LENGTH, found.max_length)
    if found.positions == "learned" and length > found.max_length:
        raise UserError(
            f"sequence_length={length} and the model has positions for {found.max_length}; shorten the sequence"
        )
    ids = torch.zeros(config.microbatch, length, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        model = Decoder(found)
    return model, {"input_ids_BL": ids} | ({"targets": ids} if train else {})


def _find(model: Path) -> DecoderConfig | ForeignModel:
    """Raises UserError for what is no model."""
    if model == Path():
        raise UserError("no model; give --model FOLDER, or the name of a recipe (megalith llm recipes)")
    if not model.exists() and str(model) in SHAPES:
        return SHAPES[str(model)]
    try:
        return find_model(model).config
    except UnknownModel as refused:
        return ForeignModel(model, refused)
