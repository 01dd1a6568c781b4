"""Activations that wait for the backward elsewhere or in fewer bytes: memory, gradients, and the loss after some steps.

A decoder with ReLU (OPT's) and one with SwiGLU (Llama's) train from the same weights on the same rows of a Markov chain
of tokens, in fp32 on a CPU, with AdamW, once in each form:

none              everything is kept
full              the input of each block is kept, and the block computed again
offload           `core.parallel.offload`: on the host
compressed        `core.parallel.encoded` without loss
compressed, bits  8 and 4 bits a number

peak       bytes of all tensors that are alive at once in a forward and backward, counted (`core.trace.account`)
host       most bytes on the host at once
gradient   |g - g0| / |g0| over all parameters, of the first step, g0 that of `none`
loss       mean of the last tenth of the steps; what the mean of `none` differs by from other seeds' is the noise
step       seconds, the median
"""

import statistics
import sys
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.result import Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import run_command
from core.models.decoder import Decoder, DecoderConfig, initialise
from core.parallel.offload import Offloaded
from core.parallel.recompute import RecomputeConfig, apply_recompute
from core.trace.account import MemoryAccount

FORMS = {
    "none": RecomputeConfig(),
    "full": RecomputeConfig("full"),
    "offload": RecomputeConfig("offload"),
    "compressed": RecomputeConfig("compressed"),
    "compressed, 8 bits": RecomputeConfig("compressed", bits=8),
    "compressed, 4 bits": RecomputeConfig("compressed", bits=4),
}
EXACT = ("full", "offload", "compressed")
VOCABULARY = 64


@dataclass(frozen=True)
class Sizes:
    layers: int
    dim: int
    rows: int
    length: int
    steps: int
    seeds: int


def sizes_of(options: Options) -> Sizes:
    if options.quick:
        return Sizes(2, 32, 2, 32, steps=2, seeds=1)
    return Sizes(6, 128, 8, 128, steps=300, seeds=3)


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
class Run:
    peak_bytes: int
    host_bytes: int
    gradient: Tensor
    losses: list[float]
    step_s: float

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 10) :])


def run(config: DecoderConfig, form: RecomputeConfig, sizes: Sizes, seed: int) -> Run:
    with torch.device("meta"):
        model = Decoder(config)
    initialise(model.to_empty(device="cpu"), seed)
    blocks = apply_recompute(model, form)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, seconds, peak = [], [], 0
    gradient = torch.zeros(0)
    for step, ids in enumerate(batches(sizes, seed)):
        if step == 0:
            with MemoryAccount() as account:
                account.add(model.parameters())
                loss = model(ids, targets=ids)
                loss.backward()
            peak = account.peak_bytes
            gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        else:
            begin = time.perf_counter()
            loss = model(ids, targets=ids)
            loss.backward()
            seconds.append(time.perf_counter() - begin)
        losses.append(loss.item() / ids.numel())
        optimizer.step()
        optimizer.zero_grad()
    host = blocks.tier.peak_bytes if isinstance(blocks, Offloaded) else 0
    return Run(peak, host, gradient, losses, statistics.median(seconds))


def measure(options: Options) -> Measured:
    sizes, figures, targets = sizes_of(options), [], []
    for name, config in models(sizes).items():
        plain = [run(config, FORMS["none"], sizes, seed) for seed in range(sizes.seeds)]
        for form, how in FORMS.items():
            found = plain if form == "none" else [run(config, how, sizes, seed) for seed in range(sizes.seeds)]
            error = max(float((a.gradient - b.gradient).norm() / b.gradient.norm()) for a, b in zip(found, plain))
            loss, wanted = (statistics.fmean(one.loss for one in runs) for runs in (found, plain))
            figures.append(
                Row(
                    {"model": name, "form": form},
                    {
                        "peak": Number(found[0].peak_bytes / 2**20, "MiB"),
                        "host": Number(found[0].host_bytes / 2**20, "MiB"),
                        "gradient": Number(error, "of its norm"),
                        "loss": Number(loss, "nats"),
                        "beyond none": Number(loss - wanted, "nats"),
                        "step": Number(statistics.median(one.step_s for one in found), "s"),
                    },
                )
            )
            options.kept(figures[-1])
            if form in EXACT:
                same = all(a.losses == b.losses and torch.equal(a.gradient, b.gradient) for a, b in zip(found, plain))
                targets.append(Target(f"{name}: losses of {form} are those of none, to the bit", 1.0, float(same)))
    return Measured(tuple(figures), tuple(targets), notes(sizes))


def notes(sizes: Sizes) -> tuple[str, ...]:
    return (
        f"decoders of {sizes.layers} blocks, width {sizes.dim}, {sizes.rows} x {sizes.length} tokens, {sizes.steps} "
        f"steps, {sizes.seeds} seeds; peaks are of parameters, gradients and activations together.",
        "On a CPU copies to the host are made at once; on a GPU they are made beside computing.",
    )


BENCHMARK = Benchmark(
    "activations",
    "Activations on the host or in fewer bytes: memory, gradients and loss",
    measure,
    measures=(
        "core/parallel/encoded.py",
        "core/parallel/offload.py",
        "core/parallel/stored.py",
        "core/comm/block_code.py",
        "benchmarks/activations.py",
    ),
)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="activations"), sys.argv[1:]))
