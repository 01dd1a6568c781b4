"""The step of Muon on two ranks beside that on one, at the shape of GPT-2 124M: homes share the work.

Parameters and gradients lie as ZeRO 1 has them, cut by rows; a step brings each matrix home, orthogonalises it there,
and sends the update back (core/optim/home.py). Ranks are processes of one thread, so on a machine whose cores are idle
the two have twice the machine of the one; rounds take turns. The time of a step is that of the slowest rank.

The third case is the machine's own share in it: the step of one rank by two processes that know nothing of one another,
at once. What these take longer than one alone, two ranks do, too, whatever they send.

Of each case stand the seconds that a rank has a processor, messages' threads too, and the parts of a step, the middle
of all steps and of ranks the mean:

    Newton-Schulz   the iterations, and FLOP/s there
    momentum        what else a home does to its matrices
    applying        the update, to what a rank holds
    AdamW           of what is no matrix
    packing         into messages, and the memory of these
    unpacking       gradients to whole matrices
    waiting         for the rank that comes to a message last: imbalance, and others' work on this machine
    messages        from there to their end
    rest            batches, order of pieces
"""

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks import device_of_rank, on_ranks
from benchmarks.result import Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import run_command
from core.layout import Layout, tag
from core.mesh import MeshConfig, build_mesh
from core.models.decoder import Decoder
from core.models.shapes import SHAPES
from core.optim import Muon, OptimConfig, build_optimizer, muon
from core.optim.home import Message, Parts

WANTED = 0.55
CASES = ((1, 1), (1, 2), (2, 1))
"""ranks, and how many of such runs at once"""
COMPUTING = ("Newton-Schulz", "momentum", "applying", "AdamW")
PARTS = (*COMPUTING, "packing", "unpacking", "waiting", "messages", "rest")
ITERATIONS = 5
_TIMED: tuple[tuple[Any, str, str], ...] = (
    (muon, "orthogonalised", "Newton-Schulz"),
    (Muon, "_direction", "momentum"),
    (Muon, "_move", "applying"),
    (Muon, "_update_parts", "AdamW"),
    (Message, "__init__", "packing"),
    (Message, "put", "packing"),
    (Parts, "whole", "unpacking"),
    (Message, "send", "messages"),
)


@dataclass
class Step:
    """seconds, of the processor's too (all threads), and by part, each without those it calls; when each message was
    waited for, and had come"""

    seconds: float = 0.0
    processor: float = 0.0
    parts: defaultdict[str, float] = field(default_factory=partial(defaultdict, float))
    waits: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class Run:
    """A rank's steps.  flop: of its homes' iterations; sent_bytes: in a step"""

    steps: list[Step]
    flop: float
    sent_bytes: int


class Clock:
    """Times what is called in a step; what that calls counts for itself."""

    def __init__(self) -> None:
        self.step, self._inner, self.sent_bytes = Step(), [0.0], 0

    def wrapped(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            self._inner.append(0.0)
            try:
                return function(*given, **named)
            finally:
                spent = time.perf_counter() - began
                self.step.parts[part] += spent - self._inner.pop()
                self._inner[-1] += spent

        return call

    def waited(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def call(message: Message) -> Any:
            self.sent_bytes += sum(piece.size for piece in message.going) * message.dtype.itemsize
            began = time.perf_counter()
            found = wait(message)
            self.step.waits.append((began, time.perf_counter()))
            self._inner[-1] += self.step.waits[-1][1] - began
            return found

        return call

    @contextmanager
    def running(self) -> Iterator[None]:
        with ExitStack() as patches:
            for owner, name, part in _TIMED:
                patches.enter_context(patch.object(owner, name, self.wrapped(getattr(owner, name), part)))
            patches.enter_context(patch.object(Message, "wait", self.waited(Message.wait)))
            yield


def steps(shape: str, num_steps: int, alone: bool) -> Run:
    """The steps of this rank, all having begun each together.  alone: it has all of the model, as the others have"""
    device, num_ranks = device_of_rank(), dist.get_world_size()
    mesh = None if alone else build_mesh(MeshConfig(dp_shard=num_ranks).resolve(num_ranks, zero=1), device.type)
    with torch.device("meta"):
        model = Decoder(SHAPES[shape])
    masters: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        layout = Layout(tuple(parameter.shape))
        layout = layout if mesh is None else layout.cut(mesh, "dp_shard", 0)
        value, grad = (torch.randn(layout.local_shape(), device=device) / 50 for _ in range(2))
        masters[name] = tag(value, layout).requires_grad_()
        masters[name].grad = grad
    optimizer = build_optimizer(OptimConfig(name="muon"), masters)
    assert isinstance(optimizer, Muon)
    clock, found = Clock(), []
    with clock.running():
        for _ in range(num_steps + 1):
            clock.step, clock.sent_bytes = Step(), 0
            dist.barrier()
            began, processor = time.perf_counter(), time.process_time()
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            clock.step.seconds = time.perf_counter() - began
            clock.step.processor = time.process_time() - processor
            found.append(clock.step)
    return Run(found[1:], 2 * ITERATIONS * _cost_here(optimizer), clock.sent_bytes)


def _cost_here(optimizer: Muon) -> float:
    """Multiplications of an iteration at the homes that this rank is."""
    here = 0.0
    for group in optimizer.param_groups:
        for p in group["params"] if group[optimizer.flag] else ():
            whole = optimizer.place(p).layout.shape
            here += optimizer._cost(whole, group) if optimizer.state[p]["momentum_buffer"].numel() else 0.0
    return here


def in_parts(of_ranks: list[Step]) -> dict[str, float]:
    """Seconds of each part of a step, the mean of its ranks."""
    found: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    latest = [max(began for began, _ in message) for message in zip(*(step.waits for step in of_ranks), strict=True)]
    for step in of_ranks:
        for part, seconds in step.parts.items():
            found[part] += seconds
        for (began, ended), last in zip(step.waits, latest, strict=True):
            found["waiting"] += min(ended, last) - began
            found["messages"] += max(0.0, ended - last)
        found["rest"] += step.seconds - sum(step.parts.values()) - sum(ended - began for began, ended in step.waits)
    return {part: seconds / len(of_ranks) for part, seconds in found.items()}


def numbers_of(rounds: list[list[Run]]) -> dict[str, Number]:
    """rounds: [round][rank]"""
    seconds, processor, parts, imbalances = [], [], [], []
    for ranks in rounds:
        for of_ranks in zip(*(run.steps for run in ranks), strict=True):
            seconds.append(max(step.seconds for step in of_ranks))
            processor.append(statistics.fmean(step.processor for step in of_ranks))
            parts.append(in_parts(list(of_ranks)))
            computing = [sum(step.parts[part] for part in COMPUTING) for step in of_ranks]
            imbalances.append(max(computing) / statistics.fmean(computing))
    middle = {part: statistics.median(step[part] for step in parts) for part in PARTS}
    flop = [run.flop for run in rounds[0]]
    return {
        "a step": Number(statistics.median(seconds), "s"),
        "least": Number(min(seconds), "s"),
        "most": Number(max(seconds), "s"),
        "of a processor": Number(statistics.median(processor), "s a rank"),
        **{part: Number(middle[part], "s") for part in PARTS},
        "iterating": Number(statistics.fmean(flop) / middle["Newton-Schulz"] / 1e9, "GFLOP/s"),
        "busiest by FLOPs": Number(max(flop) / statistics.fmean(flop), "of the mean"),
        "busiest by time": Number(statistics.median(imbalances), "of the mean"),
        "a rank sends": Number(statistics.fmean(run.sent_bytes for run in rounds[0]), "bytes"),
    }


def measure(options: Options) -> Measured:
    shape, num_steps, rounds = ("debug", 2, 1) if options.quick else ("gpt2_124m", 3, 3)
    found: dict[tuple[int, int], list[list[Run]]] = {case: [] for case in CASES}
    for _ in range(rounds):
        for ranks, copies in CASES:
            given = (shape, num_steps, copies > 1)
            made = on_ranks(ranks * copies, steps, *given, preload=["core.models.decoder", "core.optim"])
            found[ranks, copies].append(made)
    rows = []
    for (ranks, copies), runs in found.items():
        rows.append(Row({"model": shape, "optimizer": "muon", "ranks": ranks, "at once": copies}, numbers_of(runs)))
        options.kept(rows[-1])
    one, twice, two = (row.numbers["a step"].value for row in rows)
    target = Target(
        f"{WANTED} / a step on 2 ranks of one on 1 rank", 1.0, WANTED / (two / one),
        limit=f"{WANTED / (twice / one / 2):.2f}: two steps of one rank at once take {twice / one:.2f} of one alone",
    )  # fmt: skip
    return Measured(tuple(rows), () if options.quick else (target,))


MEASURES = ("core/optim/home.py", "core/optim/muon.py", "core/optim/matrices.py", "core/optim/sharded.py",
            "benchmarks/ranks.py", "benchmarks/optimizer_homes.py")  # fmt: skip
BENCHMARK = Benchmark("optimizer_homes", "Muon's step on two ranks and on one", measure, MEASURES)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="optimizer_homes"), sys.argv[1:]))
