"""`llm plan`: memory and time of a run before it runs, for any number of ranks; and the check that every run makes."""

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from apps.llm.config import PretrainConfig, check_combination
from apps.llm.recipes import RECIPES
from apps.llm.residency import estimate_residency
from core.config import UserError, parse
from core.estimate import (
    Machine,
    ModelShape,
    RunShape,
    decoder_shape,
    draw_timelines,
    estimate_memory,
    estimate_time,
    require_fit,
    simulated_timeline,
)
from core.gemini.tier import parse_bytes
from core.gemini.tracer import Speed
from core.metrics import peak_flops
from core.metrics.throughput import gpu_peak_flops
from core.precision import compute_dtype
from core.runtime import gigabytes

UNKNOWN_FLOPS = 1e11
"""Of a device whose peak nobody knows: what is computed in a second."""


def main(argv: list[str]) -> int:
    device, options = _device_options(argv)
    config = parse(RECIPES, options, "llm plan", default="debug")
    console = Console(width=None if sys.stdout.isatty() else 120)
    if config.gemini.budget is not None:
        return _show_residency(config, device, console)
    run = run_shape(config)
    model = decoder_shape(config.model)
    memory = estimate_memory(model, run)
    table = Table("per rank", "bytes", title=f"{model.num_parameters():,} parameters, {_describe(config)}")
    for row in memory.table():
        table.add_row(*row)
    console.print(table)
    if config.model.moe.num_experts:
        console.print(f"{model.num_matmul_parameters:,} parameters multiply a token")
    machine = _machine(device, config)
    if machine is not None:
        time = estimate_time(model, run, machine)
        console.print(
            f"a step of {time.tokens:,} tokens: {time.step_s:.3g} s at {machine.utilisation:.0%} of the peak "
            f"({time.compute_s:.3g} s computing, {time.communication_s:.3g} s communicating), "
            f"{time.tokens_per_s:,.0f} tokens/s, {config.steps:,} steps in {_duration(config.steps * time.step_s)}"
        )
    if device.timeline is not None:
        console.print(draw_step(config, model, run, machine, device.timeline))
    if device.memory_gb is not None:
        require_fit(model, run, round(device.memory_gb * 1e9))
        console.print(f"fits {device.memory_gb:g} GB")
    return 0


def _show_residency(config: PretrainConfig, device: argparse.Namespace, console: Console) -> int:
    """What Gemini makes of the run in its budget."""
    if device.timeline is not None or config.gemini.trace is not None:
        option = "--timeline" if device.timeline is not None else "--gemini.trace"
        raise UserError(f"{option} with gemini.budget={config.gemini.budget}: llm plan does not draw it; leave it out")
    machine = _machine(device, config)
    flops_per_s = UNKNOWN_FLOPS if machine is None else machine.peak_flops * machine.utilisation
    speed = Speed(flops_per_s, 1e9 * device.memory_gb_s)
    found = estimate_residency(config, speed, 1e9 * device.bandwidth_gb_s)
    parameters = decoder_shape(config.model).num_parameters()
    table = Table("per rank", "bytes", title=f"{parameters:,} parameters, {_describe(config)}")
    if found.messages_bytes:
        table.add_row("messages between ranks", gigabytes(found.messages_bytes))
    table.add_row("fullest moment of Gemini's plan", gigabytes(found.plan.device_peak_bytes))
    table.add_row("on the device", gigabytes(found.device_bytes))
    table.add_row("on the host", gigabytes(found.plan.host_bytes))
    console.print(table)
    console.print(f"{found.plan.describe()}; the smallest budget is {gigabytes(found.least_bytes)}")
    steps = run_shape(config).num_microbatches
    if machine is not None:
        each = max(seconds for what, seconds in found.plan.busy_s.items() if what != "host_update")
        whole = found.plan.step_s + (steps - 1) * each
        console.print(
            f"{config.steps:,} steps of {steps} microbatch{'es' * (steps > 1)} in at least "
            f"{_duration(config.steps * whole)}, messages between ranks left out"
        )
    if device.memory_gb is not None:
        if found.device_bytes > 1e9 * device.memory_gb:
            raise UserError(
                f"the run needs {gigabytes(found.device_bytes)} per rank, the device has {device.memory_gb:g} GB; "
                f"try --gemini.budget {device.memory_gb:g}GB"
            )
        console.print(f"fits {device.memory_gb:g} GB")
    return 0


def draw_step(config: PretrainConfig, model: ModelShape, run: RunShape, machine: Machine | None, png: Path) -> str:
    """Draw a step of the pipeline as its stages are estimated.  Returns a line that says what it shows."""
    if run.pp == 1:
        raise UserError("--timeline draws the stages of a pipeline, and mesh.pp=1 has none; add --mesh.pp 2 or more")
    timeline = simulated_timeline(model, run, machine or Machine(1.0, bandwidth=float("inf"), utilisation=1.0))
    of = f"{config.pipeline.schedule}, {run.pp} ranks, {run.num_microbatches} microbatches"
    draw_timelines(png, {f"{of}, simulated": timeline}, "s" if machine is not None else "FLOPs")
    return (
        f"{of}: bubble {timeline.bubble:.1%} as the stages are estimated, {timeline.theory:.1%} in theory "
        f"(stages of equal cost); drawn in {png}"
    )


def run_shape(config: PretrainConfig) -> RunShape:
    """How a run of this configuration cuts model and batch."""
    mesh = check_combination(config)
    microbatches = config.microbatch_rows(config.data.global_batch // mesh.data_ranks)
    assert mesh.dp_replicate is not None
    assert mesh.dp_shard is not None
    return RunShape(
        precision=config.precision,
        optimizer=config.optim,
        dp_replicate=mesh.dp_replicate,
        dp_shard=mesh.dp_shard,
        cp=mesh.cp,
        cp_exchange=mesh.exchange_ranks,
        tp=mesh.tp,
        tp_mode=mesh.tp_mode,
        tp_depth=mesh.tp_depth,
        pp=mesh.pp,
        pipeline=config.pipeline,
        ep=mesh.ep,
        zero=config.zero,
        recompute=config.recompute.mode,
        recompute_every=config.recompute.every,
        microbatch_size=max(microbatches),
        num_microbatches=len(microbatches),
        reduce_each=config.reduce_each,
        sequence_length=config.data.sequence_length,
    )


def warning(config: PretrainConfig, device_bytes: int, host_bytes: int) -> str | None:
    """A line where the run is estimated to need more than a rank's device, or with a budget its host, has; else None.

    host_bytes  of a rank; on a CPU the host is the device
    """
    model, run = decoder_shape(config.model), run_shape(config)
    if config.gemini.budget is None:
        try:
            require_fit(model, run, device_bytes)
        except UserError as error:
            return str(error)
        return None
    budget = parse_bytes(config.gemini.budget)
    if budget > device_bytes:
        return (
            f"gemini.budget={config.gemini.budget} and the device has {gigabytes(device_bytes)} for a rank; give at "
            "most that"
        )
    found = estimate_memory(model, run)
    data = found.parameters_bytes + found.gradients_bytes + found.optimizer_bytes
    away = max(0, data - (budget if device_bytes != host_bytes else 0))
    if away > host_bytes:
        return (
            f"{gigabytes(away)} of parameters, gradients and optimizer state a rank are more than the host's "
            f"{gigabytes(host_bytes)}; take more ranks with --zero 3, --optim.name adafactor, or a smaller model"
        )
    return None


def _device_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """What only `plan` asks: about the device that the run is planned for."""
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    options.add_argument("--gpu")
    options.add_argument("--memory_gb", "--memory-gb", type=float)
    options.add_argument("--bandwidth_gb_s", "--bandwidth-gb-s", type=float, default=25.0)
    options.add_argument("--memory_gb_s", "--memory-gb-s", type=float, default=1000.0)
    options.add_argument("--utilisation", type=float, default=0.4)
    options.add_argument("--timeline", type=Path)
    if "-h" in argv or "--help" in argv:
        print(
            "llm plan [--gpu NAME] [--memory_gb N] [--bandwidth_gb_s 25] [--memory_gb_s 1000] [--utilisation 0.4] "
            "[--timeline FILE.png] and the options of llm pretrain:\n"
            "  --gpu  a name such as A100 or H100, for the time of a step; this machine's by default\n"
            "  --memory_gb  say whether the run fits a device of that size, and what would\n"
            "  --bandwidth_gb_s  of the links between ranks, and with --gemini.budget to the host\n"
            "  --memory_gb_s  with --gemini.budget: what the device reads of its memory in a second\n"
            "  --timeline  with --mesh.pp: draw the stages' step, with its bubble beside the published one\n"
        )
    try:
        return options.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}; see llm plan --help") from None


def _machine(device: argparse.Namespace, config: PretrainConfig) -> Machine | None:
    dtype = compute_dtype(config.precision)
    if device.gpu is None:
        peak = peak_flops("cuda" if torch.cuda.is_available() else "cpu", dtype)
    else:
        peak = gpu_peak_flops(device.gpu, dtype)
        if peak is None:
            raise UserError(
                f"gpu={device.gpu} has no known {config.precision} peak; give A100, H100, H200, B200, L4, …"
            )
    return None if peak is None else Machine(peak, device.bandwidth_gb_s * 1e9, device.utilisation)


def _describe(config: PretrainConfig) -> str:
    mesh = check_combination(config)
    ranks = mesh.data_ranks * mesh.tp * mesh.cp * mesh.pp
    return f"{ranks} ranks ({mesh.describe()}), ZeRO {config.zero}, {config.precision}"


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.1f} s"
