"""Long sequences on n ranks: ring self-attention, Ulysses and Megatron's tensor parallelism on a BERT-like encoder.

Published (Li et al. 2021, Sequence Parallelism, section 4; the claim that its library repeats): beside tensor
parallelism on BERT twice as fast, or sequences half as long again, in the same memory. Tensor parallelism was then
that of Shoeybi et al. 2019 ("tensor"); "megatron" is what it has become since: norms and residuals, too, are sharded,
along the sequence (Korthikanti et al. 2022).

1. Longest sequence. Of a training step every tensor that is alive is accounted, on the rank that needs most. Real steps
   of doubled, then bisected lengths find the longest sequence that fits the budget, in units of 48.
2. Communication of a step at one length, counted: bytes that a rank sends, by ring algorithms.
3. Time of a step at that length, from a barrier to the end of the slowest rank.

The encoder has the modules of the decoder, attends both ways and predicts 15 % of its tokens; AdamW in fp32. ZeRO-3
shards parameters and state over the ranks that share sequences, so that all contenders hold about 1 / n of them.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import on_ranks
from benchmarks.result import Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.comm.volume import count_volume
from core.compose import ParallelConfig, parallelize
from core.config import run_command
from core.mesh import MeshConfig, build_mesh
from core.models.decoder import Decoder, DecoderConfig, initialise
from core.models.plan import context_parallel_plan, tensor_parallel_plan
from core.nn.attention import attend_both_ways
from core.optim.build import OptimConfig, build_optimizer
from core.parallel import tensor1d
from core.parallel.data import DataParallel
from core.placement.style import Plan
from core.placement.table import ModelPlan
from core.trace.account import MemoryAccount

UNIT = 48  # divides over 2, 3 and 4 ranks, twice for a zig-zag
LIMIT_S = 3600.0
CONTENDERS: dict[str, Callable[[int], MeshConfig]] = {
    "ring": lambda n: MeshConfig(cp=n),
    "ulysses": lambda n: MeshConfig(cp=n, cp_mode="ulysses"),
    "tensor": lambda n: MeshConfig(tp=n),
    "megatron": lambda n: MeshConfig(tp=n),
}
TENSOR: Plan = {
    "embedding.tokens": tensor1d.vocab_embedding,
    "blocks.*.attention": tensor1d.shard_heads,
    "blocks.*.attention.qkv": tensor1d.colwise,
    "blocks.*.attention.out": tensor1d.rowwise,
    "blocks.*.mlp.up": tensor1d.colwise,
    "blocks.*.mlp.down": tensor1d.rowwise,
    "head": tensor1d.vocab_head,
}


@dataclass(frozen=True)
class Size:
    """What is measured: the encoder, a budget of bytes a rank for the longest sequence, the length of the rest.

    steps  timed
    """

    model: DecoderConfig
    budget_bytes: int
    length: int
    steps: int
    ranks: tuple[int, ...]


def encoder(dim: int, num_layers: int, num_heads: int, max_length: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=4096, dim=dim, num_layers=num_layers, num_heads=num_heads, ffn_dim=4 * dim, max_length=max_length
    )


QUICK = Size(encoder(32, 1, 4, 2048), 7_000_000, UNIT, 1, (1, 2))
USUAL = Size(encoder(256, 2, 4, 8192), 110_000_000, 960, 5, (1, 2, 4))
FULL = Size(encoder(768, 12, 12, 32768), 4_000_000_000, 2880, 5, (1, 2, 4))


def measure(options: Options) -> Measured:
    size = FULL if options.full else QUICK if options.quick else USUAL
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for num_ranks in size.ranks:
        for contender in CONTENDERS:
            if num_ranks > 1 or contender == "ring":
                found[contender, num_ranks] = _on_ranks(size, contender, num_ranks)
    most = size.ranks[-1]
    ours = ("ring", "ulysses")
    longest = {c: found[c, most]["longest"] for c in CONTENDERS}
    seconds = {c: found[c, most]["step_s"] for c in CONTENDERS}
    return Measured(
        tuple(_row(size, *key, figures) for key, figures in found.items()),
        (
            Target(
                f"longest sequence on {most} ranks beside tensor parallelism",
                1.5,
                max(longest[c] for c in ours) / max(longest["tensor"], 1),
            ),
            Target(
                f"speed on {most} ranks beside tensor parallelism",
                2.0,
                seconds["tensor"] / min(seconds[c] for c in ours),
            ),
        ),
        (
            "Memory is that of accounted tensors, without what a communication library and scratch inside of an "
            "operator take.",
            "One thread a rank; where there are fewer cores than ranks, times are those of ranks that take turns.",
        ),
    )


def _row(size: Size, contender: str, num_ranks: int, figures: dict[str, Any]) -> Row:
    model = size.model
    return Row(
        {
            "encoder": f"{model.num_layers} x {model.dim}, {model.num_heads} heads",
            "ranks": num_ranks,
            "contender": "one rank" if num_ranks == 1 else contender,
        },
        {
            f"longest in {size.budget_bytes / 1e6:,.0f} MB": Number(figures["longest"], "tokens"),
            f"memory at {size.length}": Number(figures["peak_bytes"] / 1e6, "MB"),
            f"sent at {size.length}": Number(figures["wire_bytes"] / 1e6, "MB a rank"),
            f"step at {size.length}": Number(1e3 * figures["step_s"], "ms"),
        },
    )


# --- ranks ------------------------------------------------------------------------------------------------------------


def _on_ranks(size: Size, contender: str, num_ranks: int) -> dict[str, Any]:
    """Rank 0's figures, on which all ranks agree."""
    return on_ranks(num_ranks, _of_a_rank, size, contender, preload=["core.train", "core.models"], limit_s=LIMIT_S)[0]


def _of_a_rank(size: Size, contender: str) -> dict[str, Any]:
    plan = TENSOR if contender == "tensor" else tensor_parallel_plan(size.model)
    run = _Run(size.model, CONTENDERS[contender](dist.get_world_size()), plan)
    longest = longest_within(size, run.peak_bytes)
    peak = run.peak_bytes(size.length)
    with count_volume(run.parallel.mesh) as volume:
        run.step(size.length)
    seconds = [run.seconds(size.length) for _ in range(size.steps)]
    return {
        "longest": longest,
        "peak_bytes": peak,
        "wire_bytes": volume.wire_bytes,
        "step_s": statistics.median(seconds),
    }


def longest_within(size: Size, peak_bytes: Callable[[int], int]) -> int:
    """The longest sequence, in units, whose step stays within the budget; 0 where none does, at most the model's.

    By doubling and bisection: longer sequences never need less.
    """
    most = size.model.max_length // UNIT
    fits, too_long = 0, 1
    while too_long <= most and peak_bytes(too_long * UNIT) <= size.budget_bytes:
        fits, too_long = too_long, 2 * too_long
    too_long = min(too_long, most + 1)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if peak_bytes(middle * UNIT) <= size.budget_bytes:
            fits = middle
        else:
            too_long = middle
    return fits * UNIT


class _Run:
    """The encoder on a mesh, and its training steps."""

    def __init__(self, config: DecoderConfig, mesh: MeshConfig, plan: Plan):
        options = ParallelConfig(zero=3)
        device_mesh = build_mesh(mesh.resolve(dist.get_world_size(), options.zero), "cpu")
        with torch.device("meta"):
            model = Decoder(config)
        for block in model.blocks:
            attention: Any = block.attention
            attention.attend = attend_both_ways
        self.vocab_size = config.vocab_size
        self.parallel: DataParallel = parallelize(
            model,
            device_mesh,
            options,
            ModelPlan(tensor=plan, context=context_parallel_plan(mesh, causal=False)),
            materialise=lambda m: initialise(m, 0),
        )
        self.optimizer = build_optimizer(OptimConfig(), self.parallel.masters)
        self.step(UNIT)  # makes the optimizer's state

    def step(self, length: int) -> None:
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(self.vocab_size, (1, length), generator=generator)
        predicted = torch.rand(1, length, generator=generator) < 0.15
        targets = ids.masked_fill(~predicted, -100)
        with self.parallel.microbatch(last=True):
            self.parallel.model(ids, targets=targets).backward()
        self.parallel.reduce()
        self.optimizer.step()
        self.parallel.release()
        self.parallel.publish()

    def peak_bytes(self, length: int) -> int:
        """Of the rank that needs most."""
        with MemoryAccount() as account:
            account.add(self.parallel.model.parameters())
            account.add(self.parallel.masters.values())
            account.add(value for state in self.optimizer.state.values() for value in state.values())
            self.step(length)
        peak = torch.tensor(account.peak_bytes)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        return int(peak)

    def seconds(self, length: int) -> float:
        dist.barrier()
        begin = time.perf_counter()
        self.step(length)
        elapsed = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        return float(elapsed)


MEASURES = (
    "core/parallel",
    "core/placement",
    "core/nn",
    "core/models",
    "core/comm",
    "benchmarks/ranks.py",
    "benchmarks/sequence_parallel.py",
)
BENCHMARK = Benchmark("sequence_parallel", "Long sequences: ring, Ulysses, Megatron", measure, MEASURES)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="sequence_parallel"), sys.argv[1:]))
