"""Command C, first: pretraining of two shapes, and Gemini in two budgets beside FSDP2's offload.

Pretraining: GPT-3's shapes of 350M and 1.3B, sequences of 2048 tokens, bf16 with fp32 masters, torch's fused AdamW, on
random tokens; with our kernels and without, blocks compiled and not. The MFU is of the data sheet's peak where the GPU
is in the table, else of the measured matrix product's.

Gemini: the same model under two budgets, one that holds everything and one that does not, and FSDP2 with
CPUOffloadPolicy in the smaller (`benchmarks.offload`, a process each).
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.gpu.decoding import fill
from benchmarks.gpu.protocol import Entry, Phase, Where
from benchmarks.gpu.speed import roofline
from benchmarks.offload import Turn, attempt, shaped
from benchmarks.result import Number, Row, Target
from core.compose import parallelize
from core.estimate import decoder_shape
from core.metrics import mfu, peak_flops, transformer_flops_per_token
from core.models import SHAPES, Decoder, DecoderConfig
from core.nn.by_kernels import by_kernels
from core.optim.build import OptimConfig, build_optimizer
from core.parallel.recompute import RecomputeConfig
from core.precision import LossScale
from core.runtime import Runtime, start
from core.train import TrainConfig, TrainState, train_step

MFU = 0.45
"""that 1.3B is to reach"""
LENGTH = 2048
ROWS = {"gpt3_350m": 16, "gpt3_1_3b": 8}
WARM_UP, STEPS = 3, 10
_KEPT = RecomputeConfig()


def phases(where: Where) -> list[Phase]:
    return [Phase([*_entries("gpt3_1_3b", where), Entry("Gemini", offload, least_s=40, most_s=160)])]


def late_phases(where: Where) -> list[Phase]:
    """What is left out first where time runs out."""
    return [Phase(_entries("gpt3_350m", where))]


def _entries(shape: str, where: Where) -> list[Entry]:
    ways = [(kernels, compiled) for kernels in (True, False) for compiled in (False, True)]
    return [
        Entry(_named(shape, *way), partial(pretrain, shape, *way), least_s=20, most_s=75)
        for way in (ways[:1] if where.quick else ways)
    ]


def _named(shape: str, kernels: bool, compiled: bool) -> str:
    return f"pretrain {shape}, {'our kernels' if kernels else 'torch'}{', compiled' * compiled}"


def pretrain(shape: str, kernels: bool, compiled: bool, where: Where) -> Iterator[Row]:
    config, rows, length = SHAPES[shape], ROWS[shape], LENGTH
    if where.quick:
        tiny = {"vocab_size": 64, "dim": 64, "num_layers": 2, "num_heads": 2, "ffn_dim": 128, "max_length": 32}
        config, rows, length = replace(config, **tiny), 2, 32
    with start(where.device) as runtime:
        step = step_of(config, kernels, compiled, where, runtime)
        generator = torch.Generator(runtime.device).manual_seed(0)
        ids_BL = torch.randint(config.vocab_size, (rows, length), generator=generator, device=runtime.device)
        seconds = [timed(step, ids_BL, where) for _ in range(2 if where.quick else WARM_UP + STEPS)]
        median = statistics.median(seconds[1 if where.quick else WARM_UP :])
        numbers = {
            "step": Number(1e3 * median, "ms"),
            "rate": Number(rows * length / median, "tokens/s"),
            "mfu": Number(_mfu(config, length, rows * length / median, where), "of the peak"),
        }
        if where.on_gpu:
            numbers["memory"] = Number(torch.cuda.max_memory_allocated() / 2**30, "GiB")
    case = {"shape": shape, "by": "our kernels" if kernels else "torch", "compiled": "yes" if compiled else "no"}
    yield Row(case | {"rows": rows, "length": length}, numbers)


def step_of(
    config: DecoderConfig, kernels: bool, compiled: bool, where: Where, runtime: Runtime,
    recompute: RecomputeConfig = _KEPT,
) -> Callable[[dict[str, Tensor]], Tensor]:  # fmt: skip
    """A step of training, of a batch to its loss."""
    train = TrainConfig(
        precision="bf16" if where.on_gpu else "fp32", compile=compiled, steps=1_000_000, recompute=recompute,
        optim=OptimConfig(lr=1e-4, clip_norm=1.0),
    )  # fmt: skip
    with torch.device("meta"):
        model = Decoder(config)
    if kernels:
        by_kernels(model)
    mesh = runtime.mesh(train.mesh, train.zero)
    parallel = parallelize(model, mesh, train, materialise=lambda m: fill(m, where.device))
    state = TrainState(parallel, build_optimizer(train.optim, parallel.masters), LossScale(train.precision), {})
    numbers = iter(range(1_000_000))
    return lambda batch: train_step(state, batch, _loss, _num_targets, train, next(numbers))["loss"]


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["ids"], targets=batch["ids"]) / batch["ids"].numel()


def _num_targets(batch: dict[str, Tensor]) -> Tensor:
    return torch.tensor(batch["ids"].numel(), dtype=torch.float64)


def timed(step: Callable[[dict[str, Tensor]], Tensor], ids_BL: Tensor, where: Where) -> float:
    """Seconds of a step.  Raises ArithmeticError where its loss is not a number."""
    began = time.perf_counter()
    loss = float(step({"ids": ids_BL}))
    if where.on_gpu:
        torch.cuda.synchronize()
    if not loss == loss:
        raise ArithmeticError("the loss is not a number")
    return time.perf_counter() - began


def _mfu(config: DecoderConfig, length: int, tokens_per_s: float, where: Where) -> float:
    num_matmul, width = decoder_shape(config).num_matmul_parameters, config.num_heads * config.head_size
    flops = transformer_flops_per_token(num_matmul, config.num_layers, width, length)
    dtype = torch.bfloat16 if where.on_gpu else torch.float32
    peak = peak_flops(where.device, dtype) or roofline(where).flops[dtype]
    found = mfu(tokens_per_s, flops, peak)
    assert found is not None
    return found


def offload(where: Where) -> Iterator[Row | str]:
    """OPT of 1.3B: 21 GB of weights, masters, gradients and state under AdamW."""
    shape = shaped("GPT-2", 2, 64) if where.quick else shaped("OPT", 24, 2048, 32)
    if where.quick:
        shape = replace(shape, vocab_size=64)
    large, small = (2**21, 2**21) if where.quick else (40 * 2**30, 10 * 2**30)
    base = Turn("Gemini", shape, *((1, 32) if where.quick else (4, 1024)), 1 if where.quick else 3, large, where.device)
    base = replace(base, precision="bf16" if where.on_gpu else "fp32")
    turns = (("Gemini", large), ("Gemini", small), ("FSDP2 + CPUOffloadPolicy", small))
    for contender, budget in turns[1:2] if where.quick else turns:
        found = attempt(replace(base, contender=contender, budget_bytes=budget), Path(sys.executable))
        if found is None:
            yield f"{contender} does not train {shape.name} in {budget / 2**30:.3g} GiB"
            continue
        numbers = {"step": Number(statistics.median(found.seconds), "s")}
        numbers |= {"peak": Number(found.peak_bytes / 2**30, "GiB"), "moved": Number(found.moved_bytes / 2**30, "GiB")}
        yield Row({"model": shape.name, "contender": contender, "budget": f"{budget / 2**30:.3g} GiB"}, numbers)


def targets(figures: list[Row]) -> list[Target]:
    reached = [r.numbers["mfu"].value for r in figures if r.case.get("shape") == "gpt3_1_3b"]
    return [Target("gpt3_1_3b: the best way's MFU", MFU, max(reached))] if reached else []
