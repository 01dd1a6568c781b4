"""Memory against recomputed FLOPs: segments of blocks beside torch's activation_memory_budget, on the same model.

The model is a GPT of torch's own modules, small and with more activations than parameters, in fp32 on a CPU. Both train
the same weights on the same batch: a forward, a backward, all gradients.

torch    AOTAutograd's graphs (backend aot_eager), cut by `torch._functorch.config.activation_memory_budget`: of the
         operators' results a knapsack keeps the most expensive ones that fit the budget
ours     the model as it is, eager, with the segments of `core.auto.checkpointing`
solver   seconds of the trace of a deeper model of such blocks, and of the dynamic programme over it

Memory is the bytes of all tensors that are alive at once, counted (`core.trace.account`); time is FLOPs of products as
torch counts them, what is computed again beyond the plain step's. For every budget of torch's ours are the segments of
the frontier that compute no more again. Gradients of all are compared with the plain step's. Seconds of a step are the
least of some, ours and torch's in turn; the frontier's time is FLOPs alone, so that both are asked for the same.
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.aot_autograd import aot_module
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.result import Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.auto.checkpointing import SLOTS, frontier
from core.compose import ParallelConfig
from core.config import run_command
from core.estimate.chain import estimate_chain
from core.mesh import MeshConfig
from core.optim.build import OptimConfig
from core.parallel.recompute import RecomputeConfig, apply_recompute
from core.trace.account import MemoryAccount
from core.trace.chain import Chain
from core.trace.machine import Speed
from core.trace.segments import Segments

SEED = 0
VOCABULARY = 512
LOWER_PEAK = 0.8  # of torch's, at no more recomputed FLOPs
ROUNDS = 3
REPORTED = (0.05, 0.1, 0.15)
"""Budgets of torch at which its peak was reported to rise as they fall (pytorch issue 197838)."""
PRODUCTS = Speed(1.0, float("inf"))
"""A machine on which only FLOPs take time."""


@dataclass(frozen=True)
class Sizes:
    layers: int
    dim: int
    heads: int
    rows: int
    length: int
    budgets: tuple[float, ...]
    deep: int
    """blocks of the chain that the solver is timed on"""


def sizes_of(options: Options) -> Sizes:
    if options.quick:
        return Sizes(4, 32, 2, 2, 32, (0.05, 0.5), deep=8)
    every = tuple(n / 20 for n in range(20)) if options.full else (*REPORTED, 0.2, 0.3, 0.5, 0.7, 0.9)
    return Sizes(12, 128, 4, 8, 256, every, deep=96)


class Block(nn.Module):
    """A transformer's block of torch's modules alone, as a user writes it."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x_BLD: Tensor) -> Tensor:
        split = self.qkv(self.norm(x_BLD)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        mixed = nn.functional.scaled_dot_product_attention(*split.unbind(2), is_causal=True)
        x_BLD = x_BLD + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BLD + self.down(nn.functional.gelu(self.up(self.mlp_norm(x_BLD))))


class Loss(nn.Module):
    """The model and its loss: tensors in, a number out, as AOTAutograd wants it."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, sizes.dim)
        self.blocks = nn.ModuleList(Block(sizes.dim, sizes.heads) for _ in range(sizes.layers))
        self.norm, self.head = nn.LayerNorm(sizes.dim), nn.Linear(sizes.dim, VOCABULARY, bias=False)

    def forward(self, ids_BL: Tensor) -> Tensor:
        x_BLD = self.embedding(ids_BL)
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return nn.functional.cross_entropy(self.head(self.norm(x_BLD)).flatten(0, 1), ids_BL.flatten())


@dataclass(frozen=True)
class Step:
    """again: another step, which takes its time; least_s: the least that one has taken"""

    peak_bytes: int
    flops: int
    gradients: list[Tensor]
    again: Callable[[], None]
    least_s: float = math.inf


def step_of(model: nn.Module, run: Callable[[Tensor], Tensor], ids: Tensor) -> Step:
    """A forward and a backward, counted, and another for its FLOPs; the gradients are taken from the model."""

    def again() -> None:
        model.zero_grad(set_to_none=True)
        run(ids).backward()

    with FlopCounterMode(display=False) as flops:
        run(ids).backward()
    model.zero_grad(set_to_none=True)
    with MemoryAccount() as account:
        account.add((*model.parameters(), *model.buffers()))
        run(ids).backward()
    found = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in found)
    return Step(account.peak_bytes, flops.get_total_flops(), found, again)  # pyright: ignore[reportArgumentType]


def in_turn(*steps: Step) -> list[Step]:
    """The steps with the seconds that they take."""
    least = [step.least_s for step in steps]
    for _ in range(ROUNDS):
        for index, step in enumerate(steps):
            begin = time.perf_counter()
            step.again()
            least[index] = min(least[index], time.perf_counter() - begin)
    return [replace(step, least_s=seconds) for step, seconds in zip(steps, least, strict=True)]


def model_of(sizes: Sizes) -> Loss:
    torch.manual_seed(SEED)
    return Loss(sizes).train()


def with_torch(sizes: Sizes, ids: Tensor, budget: float) -> Step:
    model = model_of(sizes)
    compiled = aot_module(
        model, fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=min_cut_rematerialization_partition
    )
    with torch._functorch.config.patch(activation_memory_budget=budget):
        compiled(ids).backward()  # graphs are made here
        return step_of(model, compiled, ids)


def with_segments(sizes: Sizes, ids: Tensor, segments: Segments | None) -> Step:
    model = model_of(sizes)
    if segments is not None:
        apply_recompute(model, RecomputeConfig("budget", budget="1GiB"), segments=segments)
    return step_of(model, model, ids)


def chain_of(sizes: Sizes) -> Chain:
    with torch.device("meta"):
        model = model_of(sizes)

    def loss(model: nn.Module) -> Tensor:
        return model(torch.zeros(sizes.rows, sizes.length, dtype=torch.int64))

    parallel = ParallelConfig(recompute=RecomputeConfig("budget", budget="1GiB"))
    stateless = OptimConfig("sgd")
    return estimate_chain(model, loss, MeshConfig().resolve(1), parallel, PRODUCTS, optimizer=stateless)


def solver(sizes: Sizes) -> Row:
    begin = time.perf_counter()
    chain = chain_of(replace(sizes, layers=sizes.deep))
    traced = time.perf_counter()
    frontier(chain)
    seconds = {"trace": Number(traced - begin, "s"), "programme": Number(time.perf_counter() - traced, "s")}
    return Row({"contender": "solver", "budget": f"{sizes.deep} blocks, {SLOTS} slots"}, seconds)


def measure(options: Options) -> Measured:
    sizes = sizes_of(options)
    ids = torch.randint(0, VOCABULARY, (sizes.rows, sizes.length), generator=torch.Generator().manual_seed(SEED))
    (plain,) = in_turn(with_segments(sizes, ids, None))
    choices = frontier(chain_of(sizes))
    measured: dict[Segments, Step] = {}
    figures = [_row("no recomputation", "", plain, plain), solver(sizes)]
    for row in figures:
        options.kept(row)
    targets = []
    for budget in sorted(sizes.budgets, reverse=True):
        theirs = with_torch(sizes, ids, budget)
        _check(theirs, plain, f"torch at {budget}")
        again = theirs.flops - plain.flops
        found = next(choice for choice in choices if choice.step.again_flops <= max(again, 0))
        if found.segments not in measured:
            measured[found.segments] = with_segments(sizes, ids, found.segments)
            _check(measured[found.segments], plain, f"segments {found.segments}")
        theirs, ours = in_turn(theirs, measured[found.segments])
        measured[found.segments] = ours
        figures += [_row("torch", str(budget), theirs, plain), _row("ours", f"as torch at {budget}", ours, plain)]
        for row in figures[-2:]:
            options.kept(row)
        if budget in REPORTED:
            what = f"torch's peak at a budget of {budget}, over ours at no more recomputed FLOPs"
            targets.append(Target(what, 1 / LOWER_PEAK, theirs.peak_bytes / ours.peak_bytes))
    return Measured(tuple(figures), tuple(targets), notes(sizes))


def _check(step: Step, plain: Step, what: str) -> None:
    for found, expected in zip(step.gradients, plain.gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5, msg=what)


def _row(contender: str, budget: str, step: Step, plain: Step) -> Row:
    return Row(
        {"contender": contender, "budget": budget},
        {
            "peak": Number(step.peak_bytes / 2**20, "MiB"),
            "of the plain step's": Number(100 * step.peak_bytes / plain.peak_bytes, "%"),
            "recomputed": Number(100 * (step.flops - plain.flops) / plain.flops, "% of FLOPs"),
            "step": Number(step.least_s, "s"),
        },
    )


def notes(sizes: Sizes) -> tuple[str, ...]:
    return (
        f"GPT of {sizes.layers} blocks, width {sizes.dim}, {sizes.rows} x {sizes.length} tokens, fp32, one step; "
        "peaks are of parameters, gradients and activations together.",
        "recomputed: FLOPs of products and attention beyond those of the step without recomputation; a negative one is "
        "what torch's graphs spare of it.",
    )


BENCHMARK = Benchmark(
    "checkpointing",
    "Peak memory against recomputed FLOPs: segments of blocks, and torch's activation_memory_budget",
    measure,
    measures=(
        "core/auto/checkpointing.py",
        "core/estimate/chain.py",
        "core/parallel/recompute_chain.py",
        "core/parallel/results.py",
        "core/trace/chain.py",
        "benchmarks/checkpointing.py",
    ),
)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="checkpointing"), sys.argv[1:]))
