"""Models nobody wrote for Gemini, trained in random budgets of device, host and disk, beside training without any.

python -m tests.support.disk_plans FOLDER NUMBER [FIRST]

Plan k is drawn from k alone: a GPT, a U-Net, a T5 or a mixture of experts; one of all optimizers that a disk takes;
a budget of the device and one of the host between the least that is told to who gives too little and what is enough;
with a traced step or without; one microbatch or two; clipped, or updated beside the backward. Half of the runs are
stopped after a durable step and gone on with in other budgets. FOLDER/plans.jsonl has a line for each; those that are
there are not run again. Prints what was found as a line of JSON.
"""

import contextlib
import io
import json
import random
import re
import shutil
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from core.config import UserError, size_in_bytes
from core.gemini import Gemini, direct, replicas, wrap
from core.gemini.chunk import Chunk
from core.gemini.disk import Disk
from core.gemini.executor import Executor
from core.optim.build import OPTIMIZERS, OptimConfig, build_optimizer
from core.trace.tracer import StepTrace
from tests.support.gemini import Accounted
from tests.support.zoo import CASES

MODELS = ("gpt2", "unet", "t5", "mixtral")
OPTIMIZER_NAMES = tuple(sorted(name for name, spec in OPTIMIZERS.items() if not spec.looks))
STEPS = 3
LARGE = 1 << 30


@dataclass(frozen=True)
class Plan:
    """wanted  where between the least and enough (device, host) lie in the first part of the run, and in the second
    stop     the durable step after which the run is stopped; None: it is not
    """

    model: str
    optim: str
    precision: Any
    policy: Any
    planned: bool
    microbatches: int
    clips: bool
    wanted: tuple[tuple[float, float], tuple[float, float]]
    stop: int | None


def drawn(number: int) -> Plan:
    draw = random.Random(number)
    return Plan(
        model=MODELS[number % len(MODELS)],
        optim=OPTIMIZER_NAMES[number // len(MODELS) % len(OPTIMIZER_NAMES)],
        precision=draw.choice(["fp32", "fp32", "bf16"]),
        policy=draw.choice(["auto", "auto", "auto", "static", "cpu"]),
        planned=draw.random() < 0.7,
        microbatches=draw.choice([1, 1, 2]),
        clips=draw.random() < 0.5,
        wanted=((draw.random() ** 2, draw.random() ** 2), (draw.random() ** 2, draw.random() ** 2)),
        stop=draw.choice([None, None, 1, 2]),
    )


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    masters: Any = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return build_optimizer(OptimConfig(name, lr=1e-3), masters)


def losses_of(plan: Plan, step: int) -> list[Callable[[nn.Module], Tensor]]:
    case, count = CASES[plan.model], plan.microbatches
    return [lambda model, rank=rank: case.share(model, step, rank, count) for rank in range(count)]


@cache
def started(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[name].make()


def made(plan: Plan) -> nn.Module:
    model = CASES[plan.model].make()
    model.load_state_dict(started(plan.model).state_dict())
    return model


@dataclass
class Learned:
    losses: list[float]
    values: dict[str, Tensor]


def steps_of(plan: Plan, model: nn.Module, gemini: Gemini, first: int, last: int) -> list[float]:
    """The losses of steps, each of them made durable."""
    found = []
    for step in range(first, last):
        total, losses = 0.0, losses_of(plan, step)
        for index, loss in enumerate(losses):
            value = loss(model)
            is_final = index + 1 == len(losses) and not plan.clips
            with gemini.last_backward() if is_final else contextlib.nullcontext():
                value.backward()
            total += float(value.detach())
        if plan.clips:
            gemini.clip_grad_norm_(0.5)
        gemini.optimizer.step()
        gemini.optimizer.zero_grad()
        if gemini.parallel.disk is not None:
            gemini.commit(step + 1, {"step": step + 1})
        found.append(total)
    return found


_expected: dict[Any, Learned] = {}


def expected(plan: Plan) -> Learned:
    """What is learned with everything on the device: in fp32 and fp64 what training without Gemini learns."""
    key = plan.model, plan.optim, plan.precision, plan.microbatches, plan.clips
    if key not in _expected:
        model = made(plan)
        gemini = wrap(model, optimizer_of(plan.optim, model), LARGE, precision=plan.precision, device="cpu")
        losses = steps_of(plan, model, gemini, 0, STEPS)
        _expected[key] = Learned(losses, gemini.state_dict())
    return _expected[key]


@contextlib.contextmanager
def traced_once_of_each() -> Iterator[None]:
    """Within, a step of a model in one format and of as many rows is traced once, and a drive's probe is short."""
    trace, kept = replicas.trace_step, {}

    def kept_trace(model: nn.Module, *args: Any, **options: Any) -> StepTrace:
        shapes = tuple((name, p.dtype) for name, p in model.named_parameters())
        key = shapes, _tracing.microbatches
        if key not in kept:
            kept[key] = trace(model, *args, **options)
        return kept[key]

    with patch.object(replicas, "trace_step", kept_trace), patch.object(direct, "PROBE_BYTES", 1 << 16):
        yield


_tracing = SimpleNamespace(microbatches=1)


def wrapped(plan: Plan, model: nn.Module, budget: int | str, host: int | str, disk: Path) -> Gemini:
    optimizer = optimizer_of(plan.optim, model)
    _tracing.microbatches = plan.microbatches
    return wrap(
        model,
        optimizer,
        budget,
        precision=plan.precision,
        sample=(lambda: losses_of(plan, 0)[0]) if plan.planned else None,
        host=host,
        disk=disk,
        policy=plan.policy,
        device="cpu",
    )


def least_told(plan: Plan, budget: int | str, host: int | str, disk: Path) -> int:
    """Bytes that the refusal of too small a budget tells of."""
    try:
        wrapped(plan, made(plan), budget, host, disk).close()
    except UserError as refused:
        words = str(refused)
        found = re.search(r"at least ([\d.]+ \w+)", words) or re.search(r"([\d.]+ [KMG]iB) of model data", words)
        assert found is not None, words
        return size_in_bytes(found[1].replace("bytes", "B"), "least")
    return 0


class HostAccounted(Accounted):
    """Within, neither the device nor the host has more than its budget at any moment of a step."""

    def __init__(self, gemini: Gemini):
        super().__init__()
        self.gemini, self.host_peak_bytes = gemini, 0

    def _check(self, executor: Executor) -> None:
        super()._check(executor)
        parallel = self.gemini.parallel
        on_host = parallel._host_bytes()
        self.host_peak_bytes = max(self.host_peak_bytes, on_host)
        assert parallel.host.budget_bytes is not None
        assert on_host <= parallel.host.budget_bytes, (on_host, parallel.host.budget_bytes)


class Accepted:
    """Within, counts updates that had begun before the step's end."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "Accepted":
        accept = Disk.accept

        def counted(disk: Disk, chunk: Chunk) -> None:
            self.count += 1
            accept(disk, chunk)

        self._patch = patch.object(Disk, "accept", counted)
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()


_least: dict[Any, int] = {}


def budgets(plan: Plan, part: int, disk: Path) -> tuple[int, int]:
    """Of device and host: between the least and a little more than all of it."""
    in_device, in_host = plan.wanted[part]
    whole = sum(p.nbytes for p in started(plan.model).parameters())
    key = plan.model, plan.optim, plan.precision, plan.planned, plan.microbatches
    if key not in _least:
        _least[key] = least_told(plan, 4096, LARGE, disk)
    # Without a traced step it is known what one parameter needs, and not what a module does.
    device = int(_least[key] * (1.001 if plan.planned else 2) + in_device * 3 * whole)
    least = int(1.001 * least_told(plan, device, 1024, disk)) + 4096
    return device, int(least + in_host * 4 * whole)


def trained(plan: Plan, disk: Path) -> tuple[Learned, Counter[str]]:
    """In the plan's budgets; and how often it was on the disk, stopped, and so on."""
    losses, seen = [], Counter[str]()
    ends = [STEPS] if plan.stop is None else [plan.stop, STEPS]
    values: dict[str, Tensor] = {}
    first = 0
    for part, last in enumerate(ends):
        device, host = budgets(plan, part, disk)
        model = made(plan)
        gemini = wrapped(plan, model, device, host, disk)
        try:
            assert gemini.resume() == (first, {"step": first} if first else {})
            with HostAccounted(gemini) as accounted, Accepted() as accepted:
                losses += steps_of(plan, model, gemini, first, last)
            parallel = gemini.parallel
            assert parallel.tier.peak_bytes <= device
            assert 0 < parallel.host.peak_bytes <= host
            assert parallel.disk is not None
            assert accounted.num_checks > 0 or parallel.hooks.rests
            seen["on disk"] += bool(parallel.disk.away)
            seen["on disk whole"] += len(parallel.disk.away) == len(parallel.chunks)
            seen["updated early"] += accepted.count > 0
            seen["on device too"] += any(chunk.resident for chunk in parallel.chunks)
            seen["parts"] += 1
            seen["cached pages"] += sum(pages_in_cache(drive.file.path) for drive in parallel.disk.drives)
            values = gemini.state_dict()
        finally:
            gemini.close()
        first = last
    return Learned(losses, values), seen


def pages_in_cache(path: Path) -> int:
    """Pages of a file that the page cache has."""
    looked_at = subprocess.run(
        ["fincore", "--bytes", "--raw", "--noheadings", "-o", "PAGES", path], capture_output=True, text=True, check=True
    )
    return int(looked_at.stdout)


def require_plan(number: int, folder: Path) -> Counter[str]:
    """One plan; raises AssertionError where it is not bit for bit what is learned without."""
    plan, disk = drawn(number), folder / f"plan-{number}"
    shutil.rmtree(disk, ignore_errors=True)  # of one that was killed
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        found, seen = trained(plan, disk)
        without = expected(plan)
    assert found.losses == without.losses, (plan, found.losses, without.losses)
    wrong = [name for name, value in without.values.items() if not torch.equal(found.values[name], value)]
    assert not wrong, (plan, wrong)
    shutil.rmtree(disk)
    return seen


def main(folder: Path, count: int, first: int = 0) -> dict[str, Any]:
    """Those plans that plans.jsonl in the folder does not have yet, and what all of them have found."""
    log, total, failed = folder / "plans.jsonl", Counter[str](), {}
    folder.mkdir(parents=True, exist_ok=True)
    known = {row["plan"]: row for row in map(json.loads, log.read_text().splitlines())} if log.exists() else {}
    with traced_once_of_each():
        for number in range(first, first + count):
            if number not in known:
                row: dict[str, Any] = {"plan": number}
                try:
                    row["seen"] = require_plan(number, folder)
                except Exception as error:  # all of them are told
                    where = traceback.extract_tb(error.__traceback__)[-1]
                    row["failed"] = f"{type(error).__name__} at {where.name}:{where.lineno}: {error}"[:2000]
                known[number] = row
                with log.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            total += Counter[str](known[number].get("seen", {}))
            if said := known[number].get("failed"):
                failed[number] = said
    return {"plans": count, "failed": failed, **total}


if __name__ == "__main__":
    told = main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    print(json.dumps(told))
    sys.exit(bool(told["failed"]))
