"""Long sequences on n ranks: ring self-attention, Ulysses and Megatron's tensor parallelism on BERT.

Published (Li et al. 2021, Sequence Parallelism, section 4; the claim that its library repeats): beside tensor
parallelism on BERT twice as fast, or sequences half as long again, in the same memory: P100s of 16 GB. Tensor
parallelism was then that of Shoeybi et al. 2019 ("tensor"); "megatron" is what it has become since: norms and
residuals, too, are sharded, along the sequence (Korthikanti et al. 2022).

1. Longest sequence of BERT base, counted, on up to 12 ranks, as many as it has heads: training steps of one sequence
   run on tensors without memory on ranks that do not exist (`core.estimate.step`). What each phase of a step takes is
   affine in layers and length, so steps of two and three layers give the form of all; one of four has to agree.
2. Bytes at one length, of the model cut in layers: counted likewise, and accounted in a real step on the rank that
   needs most, which shows what the count is worth.
3. Communication of that step: bytes that a rank sends, by ring algorithms.
4. Time of that step, from a barrier to the end of the slowest rank.

The model is the family's: it attends both ways and predicts 15 % of its tokens; AdamW in fp32. ZeRO-3 shards parameters
and state over the ranks that share sequences, so that all contenders hold about 1 / n of them.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.ranks import on_ranks
from benchmarks.result import Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.comm.volume import count_volume
from core.compose import ParallelConfig, parallelize
from core.config import UserError, run_command
from core.estimate import StepEstimate, estimate_step
from core.mesh import MeshConfig, build_mesh
from core.models.decoder import Decoder, DecoderConfig, initialise
from core.models.plan import context_parallel_plan, tensor_parallel_plan
from core.models.shapes import SHAPES
from core.optim.build import OptimConfig, build_optimizer
from core.parallel import tensor1d
from core.parallel.data import DataParallel
from core.placement.style import Plan
from core.placement.table import ModelPlan
from core.trace.account import MemoryAccount
from core.trace.machine import Speed

LIMIT_S, AGREES = 3600.0, 0.01
ZERO = ParallelConfig(zero=3)
CONTENDERS: dict[str, Callable[[int], MeshConfig]] = {
    "ring": lambda n: MeshConfig(cp=n),
    "ulysses": lambda n: MeshConfig(cp=n, cp_mode="ulysses"),
    "tensor": lambda n: MeshConfig(tp=n),
    "megatron": lambda n: MeshConfig(tp=n),
}
OURS = ("ring", "ulysses")
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
    """What is measured.

    model         as it is counted: a budget of bytes a rank, on these ranks, from steps of two and three shares each
    share         tokens
    timed_layers  of it, in real steps of `length` tokens on `timed` ranks, `steps` of them
    """

    model: DecoderConfig
    budget_bytes: int
    share: int
    ranks: tuple[int, ...]
    timed_layers: int
    length: int
    steps: int
    timed: tuple[int, ...]

    @property
    def timed_model(self) -> DecoderConfig:
        return replace(self.model, num_layers=self.timed_layers)


BASE = SHAPES["bert_base"]
TINY = replace(BASE, vocab_size=515, dim=32, num_layers=1, num_heads=4, ffn_dim=128, max_length=32)
QUICK = Size(TINY, 3_000_000, 24, (2,), 2, 96, 1, (2,))
USUAL = Size(BASE, 16_000_000_000, 540, (1, 4, 12), 2, 960, 5, (1, 2, 4))  # a share is one chunk of logits
FULL = replace(USUAL, ranks=(1, 2, 4, 6, 12), timed_layers=12)


def measure(options: Options) -> Measured:
    size = FULL if options.full else QUICK if options.quick else USUAL
    rows: list[Row] = []
    for contender, num_ranks in _contenders(size.ranks):
        rows.append(_counted(size, contender, num_ranks))
        options.kept(rows[-1])
    counted, timed = len(rows), {}
    for contender, num_ranks in _contenders(size.timed):
        timed[contender, num_ranks] = _on_ranks(size, contender, num_ranks)
        rows.append(_row_of_steps(size, contender, num_ranks, timed[contender, num_ranks]))
        options.kept(rows[-1])
    return Measured(
        tuple(rows),
        (_longer(size, rows[:counted]), _faster(size, timed)),
        (
            "Memory is that of tensors, without what a communication library and scratch inside of an operator take.",
            "The table of positions is BERT's: beyond its rows positions begin again, so that it decides nothing.",
            "One thread a rank; where there are fewer cores than ranks, times are those of ranks that take turns.",
        ),
    )


def _contenders(ranks: tuple[int, ...]) -> list[tuple[str, int]]:
    """One rank is the same for all."""
    return [(contender, n) for n in ranks for contender in CONTENDERS if n > 1 or contender == "ring"]


def _case(model: DecoderConfig, contender: str, num_ranks: int) -> dict[str, str | int]:
    shape = f"BERT, {model.num_layers} x {model.dim}, {model.num_heads} heads"
    return {"model": shape, "ranks": num_ranks, "contender": "one rank" if num_ranks == 1 else contender}


def _longer(size: Size, rows: list[Row]) -> Target:
    most, name = size.ranks[-1], _longest_name(size)
    longest = {row.case["contender"]: row.numbers[name].value for row in rows if row.case["ranks"] == most}
    reached = max(longest[c] for c in OURS) / max(longest["tensor"], 1)
    return Target(f"longest sequence on {most} ranks beside tensor parallelism", 1.5, reached)


def _faster(size: Size, timed: dict[tuple[str, int], dict[str, Any]]) -> Target:
    """The arithmetic of a step is nearly alike for all; ranks that share cores hide no message behind it.

    What tells them apart is then what they send: ZeRO-3 gathers every parameter, embeddings too, twice a step.
    """
    most = size.timed[-1]
    seconds = {contender: timed[contender, most]["step_s"] for contender in CONTENDERS}
    best = min(OURS, key=lambda contender: seconds[contender])
    flops = {c: foreseen(size.timed_model, c, most, size.length).flops for c in ("tensor", best)}
    cores = os.cpu_count() or 1
    sent = {c: timed[c, most]["wire_bytes"] / 1e6 for c in ("tensor", best)}
    limit = (
        f"a rank of tensor parallelism computes {flops['tensor'] / flops[best]:.2f} times as much and sends "
        f"{sent['tensor']:,.0f} MB, {best} {sent[best]:,.0f} MB, mostly ZeRO-3's parameters; {most} ranks share "
        f"{cores} cores, so that messages hide behind nothing"
    )
    return Target(f"speed on {most} ranks beside tensor parallelism", 2.0, seconds["tensor"] / seconds[best], limit)


# --- counted ----------------------------------------------------------------------------------------------------------


def _longest_name(size: Size) -> str:
    return f"longest in {size.budget_bytes / 1e6:,.0f} MB"


@dataclass(frozen=True)
class Form:
    """Bytes of a step of so many layers and tokens, affine in both: a + b layers + (c + d layers) length."""

    fixed: float
    of_layer: float
    of_token: float
    of_both: float

    def __call__(self, layers: int, length: float) -> float:
        return self.fixed + self.of_layer * layers + (self.of_token + self.of_both * layers) * length

    def longest(self, layers: int, budget_bytes: float) -> float:
        """Tokens of the longest step of so many layers within the budget; none where even the shortest is beyond it."""
        return max(0.0, (budget_bytes - self(layers, 0)) / (self.of_token + self.of_both * layers))


def form_of(counts: Mapping[tuple[int, int], float]) -> Form:
    """The form that four counts determine: (layers, length) -> bytes, of two numbers of layers and two lengths."""
    (k, m), (short, long) = ({key[index] for key in counts} for index in (0, 1))
    (k, m), (short, long) = sorted((k, m)), sorted((short, long))

    def line(layers: int) -> tuple[float, float]:
        slope = (counts[layers, long] - counts[layers, short]) / (long - short)
        return counts[layers, short] - slope * short, slope

    (a, c), (b, d) = line(k), line(m)
    of_layer, of_both = (b - a) / (m - k), (d - c) / (m - k)
    return Form(a - of_layer * k, of_layer, c - of_both * k, of_both)


def _counted(size: Size, contender: str, num_ranks: int) -> Row:
    """Four counts of small steps give the form of each phase of a step; a fifth, of more layers, has to agree.

    From two layers on: ZeRO-3 gathers the next block beside the one that computes. And from two shares on: logits are
    made in several chunks, all of one size.
    """
    one = num_ranks * size.share

    def phases(layers: int, length: int) -> dict[str, int]:
        return foreseen(replace(size.model, num_layers=layers), contender, num_ranks, length).phases

    counts = {(layers, n * one): phases(layers, n * one) for layers in (2, 3) for n in (2, 3)}
    forms = {name: form_of({key: found[name] for key, found in counts.items()}) for name in counts[2, 2 * one]}
    fifth, expected = (max(phases(4, 3 * one).values()), max(form(4, 3 * one) for form in forms.values()))
    if abs(fifth / expected - 1) > AGREES:
        raise UserError(f"{contender} on {num_ranks}: {fifth} bytes of 4 layers counted, {expected:.0f} by the form")
    layers = size.model.num_layers
    longest = min(
        form.longest(layers, size.budget_bytes) for form in forms.values() if form(layers, 1) > form(layers, 0)
    )
    figures = {
        _longest_name(size): Number(int(longest), "tokens"),
        f"a token of {layers} layers": Number(
            1e-3 * max(f.of_token + f.of_both * layers for f in forms.values()), "kB"
        ),
    }
    return Row(_case(size.model, contender, num_ranks), figures)


@cache
def foreseen(config: DecoderConfig, contender: str, num_ranks: int, length: int) -> StepEstimate:
    """The step of one sequence on the first of so many ranks, who holds the most."""
    mesh = CONTENDERS[contender](num_ranks).resolve(num_ranks, ZERO.zero)
    with torch.device("meta"):
        model = Decoder(config)

    def loss(model: nn.Module) -> Tensor:
        return loss_of(model, torch.zeros(1, length, dtype=torch.int64), torch.zeros(1, length, dtype=torch.int64))

    return estimate_step(model, loss, mesh, ZERO, Speed(1.0, 1.0), _plan(config, contender, mesh), OptimConfig())


# --- real steps -------------------------------------------------------------------------------------------------------


def _row_of_steps(size: Size, contender: str, num_ranks: int, figures: dict[str, Any]) -> Row:
    foretold = foreseen(size.timed_model, contender, num_ranks, size.length).peak_bytes
    return Row(
        _case(size.timed_model, contender, num_ranks),
        {
            f"memory at {size.length}, counted": Number(foretold / 1e6, "MB"),
            f"memory at {size.length}, accounted": Number(figures["peak_bytes"] / 1e6, "MB"),
            f"sent at {size.length}": Number(figures["wire_bytes"] / 1e6, "MB a rank"),
            f"step at {size.length}": Number(1e3 * figures["step_s"], "ms"),
        },
    )


def _on_ranks(size: Size, contender: str, num_ranks: int) -> dict[str, Any]:
    """Rank 0's figures, on which all ranks agree."""
    return on_ranks(num_ranks, _of_a_rank, size, contender, preload=["core.train", "core.models"], limit_s=LIMIT_S)[0]


def _of_a_rank(size: Size, contender: str) -> dict[str, Any]:
    run = _Run(size.timed_model, contender)
    run.step(size.length)  # makes the optimizer's state
    peak = run.peak_bytes(size.length)
    with count_volume(run.parallel.mesh) as volume:
        run.step(size.length)
    seconds = [run.seconds(size.length) for _ in range(size.steps)]
    return {"peak_bytes": peak, "wire_bytes": volume.wire_bytes, "step_s": statistics.median(seconds)}


def _plan(config: DecoderConfig, contender: str, mesh: MeshConfig) -> ModelPlan:
    tensor = TENSOR if contender == "tensor" else tensor_parallel_plan(config)
    return ModelPlan(tensor=tensor, context=context_parallel_plan(mesh, config))


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """The summed loss of a sequence of any length."""
    config = model.config
    assert isinstance(config, DecoderConfig)
    return model(ids, positions=torch.arange(ids.shape[1])[None] % config.max_length, targets=targets)


class _Run:
    """The model on a mesh, and its training steps."""

    def __init__(self, config: DecoderConfig, contender: str):
        mesh = CONTENDERS[contender](dist.get_world_size()).resolve(dist.get_world_size(), ZERO.zero)
        with torch.device("meta"):
            model = Decoder(config)
        self.vocab_size = config.vocab_size
        self.parallel: DataParallel = parallelize(
            model,
            build_mesh(mesh, "cpu"),
            ZERO,
            _plan(config, contender, mesh),
            materialise=lambda m: initialise(m, 0),
        )
        self.optimizer = build_optimizer(OptimConfig(), self.parallel.masters)

    def step(self, length: int) -> None:
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(self.vocab_size, (1, length), generator=generator)
        predicted = torch.rand(1, length, generator=generator) < 0.15
        with self.parallel.microbatch(last=True):
            loss_of(self.parallel.model, ids, ids.masked_fill(~predicted, -100)).backward()
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
    "core/estimate",
    "core/parallel",
    "core/placement",
    "core/nn",
    "core/models",
    "core/comm",
    "core/trace",
    "benchmarks/ranks.py",
    "benchmarks/sequence_parallel.py",
)
BENCHMARK = Benchmark("sequence_parallel", "Long sequences of BERT: ring, Ulysses, Megatron", measure, MEASURES)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="sequence_parallel"), sys.argv[1:]))
