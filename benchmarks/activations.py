"""Activations that wait for the backward elsewhere or in fewer bytes: memory, gradients, and the loss after some steps.

A decoder with ReLU (OPT's) and one with SwiGLU (Llama's) train from the same weights on the same rows of a Markov chain
of tokens, in fp32 on a CPU, with AdamW, once in each form:

none              everything is kept
full              the input of each block is kept, and the block computed again
offload           `core.parallel.offload`: on the host
disk              `core.parallel.drive`: on a drive
compressed        `core.parallel.encoded` without loss
compressed, bits  8 and 4 bits a number
budget            what the plan chooses of each block, kept, computed again, on the host or encoded, in the mean of what
                  `none` and `offload` take

peak       bytes of all tensors that are alive at once in a step, counted (`core.trace.account`)
planned    the same, as `megalith llm plan` says before
host       most bytes on the host at once, or on the drive
gradient   |g - g0| / |g0| over all parameters, of the first step, g0 that of `none`
loss       mean of the last tenth of the steps, of the forms that are not exact, and of `none`; what the mean of `none`
           differs by from other seeds' is the noise. Of the exact ones a few steps are compared with those of `none`
step       seconds of forwards and backwards, the median
"""

import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.result import ROOT, Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.compose import ParallelConfig, parallelize
from core.config import run_command
from core.estimate import RunShape, decoder_shape, estimate_memory
from core.mesh import MeshConfig
from core.models.decoder import Decoder, DecoderConfig, initialise
from core.optim.build import OptimConfig, build_optimizer
from core.parallel.drive import OnDrive
from core.parallel.offload import Offloaded
from core.parallel.plan import blocks_of
from core.parallel.recompute import RecomputeConfig
from core.parallel.recompute_chain import RecomputedChain
from core.placement.table import ModelPlan
from core.runtime import Runtime, start
from core.trace.account import MemoryAccount
from core.trace.machine import Speed, bandwidth_of
from core.trace.segments import Segments
from core.train.segments import choose_segments, lines_of

EXACT = ("full", "offload", "disk", "compressed", "budget")
WITHIN = 0.05
"""Of the plan's peak, what the counted one may differ by."""
SPEED = Speed(1e11, 1e10)
VOCABULARY = 64


@dataclass(frozen=True)
class Sizes:
    layers: int
    dim: int
    rows: int
    length: int
    steps: int
    few: int
    seeds: int


def sizes_of(options: Options) -> Sizes:
    if options.quick:
        return Sizes(3, 32, 2, 64, steps=2, few=2, seeds=1)
    return Sizes(6, 128, 8, 128, steps=80, few=20, seeds=2)


def models(sizes: Sizes) -> dict[str, DecoderConfig]:
    relu = DecoderConfig(
        family="opt",
        vocab_size=VOCABULARY,
        dim=sizes.dim,
        num_layers=sizes.layers,
        num_heads=4,
        ffn_dim=4 * sizes.dim,
        max_length=sizes.length,
        position_offset=2,
        activation="relu",
    )
    gated = replace(
        relu,
        family="llama",
        ffn_dim=3 * sizes.dim,
        position_offset=0,
        positions="rotary",
        norm="rms_norm",
        activation="swiglu",
        tied_head=False,
        attention_bias=False,
        mlp_bias=False,
    )
    return {"ReLU": relu, "SwiGLU": gated}


def batches(sizes: Sizes, seed: int) -> Tensor:
    """[steps, rows, length] of a chain each of whose tokens has four likely ones behind it."""
    generator = torch.Generator().manual_seed(seed)
    likely = torch.randint(0, VOCABULARY, (VOCABULARY, 4), generator=generator)
    x = torch.randint(0, VOCABULARY, (sizes.steps, sizes.rows), generator=generator)
    found = [x]
    for _ in range(sizes.length - 1):
        x = likely[x, torch.randint(0, 4, x.shape, generator=generator)]
        found.append(x)
    return torch.stack(found, -1)


@dataclass(frozen=True)
class Form:
    """How a run keeps what its backward needs, and the peak that the plan says."""

    recompute: RecomputeConfig
    planned_bytes: int
    segments: Segments | None = None


def forms(config: DecoderConfig, sizes: Sizes, folder: Path) -> dict[str, Form]:
    """By name; that of the budget last."""

    def planned(recompute: RecomputeConfig) -> Form:
        shape = RunShape(
            recompute=recompute.mode,
            recompute_bits=recompute.bits,
            microbatch_size=sizes.rows,
            sequence_length=sizes.length,
            optimizer=OptimConfig(),
        )
        return Form(recompute, estimate_memory(decoder_shape(config, device_type="cpu"), shape).peak_bytes)

    found = {
        "none": planned(RecomputeConfig()),
        "full": planned(RecomputeConfig("full")),
        "offload": planned(RecomputeConfig("offload")),
        "disk": planned(RecomputeConfig("offload", disk=folder)),
        "compressed": planned(RecomputeConfig("compressed")),
        "compressed, 8 bits": planned(RecomputeConfig("compressed", bits=8)),
        "compressed, 4 bits": planned(RecomputeConfig("compressed", bits=4)),
    }
    budget = (found["none"].planned_bytes + found["offload"].planned_bytes) // 2
    return found | {"budget": in_budget(config, sizes, budget)}


def in_budget(config: DecoderConfig, sizes: Sizes, budget: int) -> Form:
    """What the plan chooses, by this machine's copies."""
    recompute = RecomputeConfig("budget", budget=str(budget), host="1GiB")
    with torch.device("meta"):
        model = Decoder(config)

    def loss(model: nn.Module) -> Tensor:
        ids = torch.zeros(sizes.rows, sizes.length, dtype=torch.int64)
        return model(ids, targets=ids)

    lines = lines_of(recompute, "cpu", bandwidth_of(torch.device("cpu"), 1))
    alone, parallel = MeshConfig().resolve(1), ParallelConfig(recompute=recompute)
    found = choose_segments(model, loss, alone, parallel, SPEED, optimizer=OptimConfig(), lines=lines)
    return Form(recompute, found.peak_bytes, found.segments)


@dataclass(frozen=True)
class Run:
    peak_bytes: int
    away_bytes: int
    gradient: Tensor
    losses: list[float]
    step_s: float

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 10) :])


def run(runtime: Runtime, config: DecoderConfig, form: Form, sizes: Sizes, seed: int, steps: int) -> Run:
    """The second step is the one that is counted: the optimizer has its state then."""
    with torch.device("meta"):
        model = Decoder(config)
    given = ParallelConfig(recompute=form.recompute), ModelPlan(recompute=form.segments)
    mesh = runtime.mesh(MeshConfig())
    spread = parallelize(model, mesh, *given, materialise=lambda model: initialise(model, seed))
    optimizer = build_optimizer(OptimConfig(lr=3e-3), spread.masters)
    losses, seconds, peak = [], [], 0
    gradient = torch.zeros(0)
    for step, rows in enumerate(batches(sizes, seed)[:steps]):
        ids = rows.clone()  # a view would have the account count the rows of all steps
        account = MemoryAccount()
        with account if step == 1 else nullcontext():
            if step == 1:
                account.add(spread.masters.values())
                account.add(value for state in optimizer.state.values() for value in state.values())
            begin = time.perf_counter()
            loss = spread.run(range(1), lambda _, ids=ids: spread.model(ids, targets=ids))
            seconds.append(time.perf_counter() - begin)
            spread.reduce()
            if step == 0:
                gradient = torch.cat([m.grad.flatten() for m in spread.masters.values() if m.grad is not None])
            optimizer.step()
            spread.release()
            spread.publish()
        peak = max(peak, account.peak_bytes)
        losses.append(float(loss) / ids.numel())
    return Run(peak, _away_bytes(spread.model), gradient, losses, statistics.median(seconds[2:] or seconds))


def _away_bytes(model: nn.Module) -> int:
    """The most that ever waited elsewhere."""
    forward = blocks_of(model)[0].forward
    owner = forward.func.__self__ if isinstance(forward, partial) and hasattr(forward.func, "__self__") else None
    stores = owner.stores.values() if isinstance(owner, RecomputedChain) else [owner]
    return sum(store.tier.peak_bytes for store in stores if isinstance(store, Offloaded | OnDrive))


def measure(options: Options) -> Measured:
    sizes = sizes_of(options)
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="activations-", dir=ROOT / "runs") as folder:
        # Plans pretend ranks, which there must not be yet.
        planned = {name: forms(config, sizes, Path(folder) / name) for name, config in models(sizes).items()}
        with start("cpu") as runtime:
            return _measured(runtime, sizes, planned, options)


def _measured(runtime: Runtime, sizes: Sizes, planned: dict[str, dict[str, Form]], options: Options) -> Measured:
    figures, targets = [], []
    for name, config in models(sizes).items():
        plain: list[Run] = []
        for form, how in planned[name].items():
            steps, seeds = (sizes.few, 1) if form in EXACT else (sizes.steps, sizes.seeds)
            found = [run(runtime, config, how, sizes, seed, steps) for seed in range(seeds)]
            plain = plain or found
            error = max(float((a.gradient - b.gradient).norm() / b.gradient.norm()) for a, b in zip(found, plain))
            numbers = {
                "peak": Number(found[0].peak_bytes / 2**20, "MiB"),
                "planned": Number(how.planned_bytes / 2**20, "MiB"),
                "host": Number(found[0].away_bytes / 2**20, "MiB"),
                "gradient": Number(error, "of its norm"),
                "step": Number(statistics.median(one.step_s for one in found), "s"),
            }
            if form not in EXACT:
                loss, wanted = (statistics.fmean(one.loss for one in runs) for runs in (found, plain))
                numbers |= {"loss": Number(loss, "nats"), "beyond none": Number(loss - wanted, "nats")}
            figures.append(Row({"model": name, "form": form}, numbers))
            options.kept(figures[-1])
            off = abs(found[0].peak_bytes / how.planned_bytes - 1)
            said = f"{name}: the peak of {form} within {WITHIN:.0%} of the plan's"
            targets.append(Target(said, 1.0, WITHIN / max(off, 1e-9) if off > WITHIN else 1.0))
            if form in EXACT:
                same = all(
                    a.losses == b.losses[:steps] and torch.equal(a.gradient, b.gradient) for a, b in zip(found, plain)
                )
                targets.append(Target(f"{name}: losses of {form} are those of none, to the bit", 1.0, float(same)))
    return Measured(tuple(figures), tuple(targets), notes(sizes))


def notes(sizes: Sizes) -> tuple[str, ...]:
    return (
        f"decoders of {sizes.layers} blocks, width {sizes.dim}, {sizes.rows} x {sizes.length} tokens, {sizes.steps} "
        f"steps, {sizes.seeds} seeds; exact forms {sizes.few} steps of one. Peaks are of all that a step has: "
        "parameters, gradients, optimizer state, activations.",
        "On a CPU copies to the host are made at once; on a GPU they are made beside computing.",
    )


BENCHMARK = Benchmark(
    "activations",
    "Activations on the host or in fewer bytes: memory, gradients and loss",
    measure,
    measures=(
        "core/auto/checkpointing.py",
        "core/estimate/chain.py",
        "core/estimate/memory.py",
        "core/parallel/drive.py",
        "core/parallel/encoded.py",
        "core/parallel/offload.py",
        "core/parallel/recompute_chain.py",
        "core/parallel/stored.py",
        "core/trace/chain.py",
        "core/comm/block_code.py",
        "benchmarks/activations.py",
    ),
)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="activations"), sys.argv[1:]))
