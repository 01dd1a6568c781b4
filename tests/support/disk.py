"""A small GPT trained with Gemini's disk, killed at the n-th call of the drive again and again, or let down by it.

python -m tests.support.disk FOLDER KILLS [SEED] [early] [average]
python -m tests.support.disk FOLDER EIO|ENOSPC|short [FIRST [STRIDE]] [early] [average]

Every run is a fork of one process that has imported everything and joined no group. In a killed run a write is torn:
half of it is on the drive when the process ends. The second form lets every call, or each STRIDE-th from the FIRST on,
fail once, each in a run of its own: with an error the command ends with one line and 2, and the next run goes on from
the last durable step; a short transfer is gone on with. `early`: nothing is clipped, and updates begin beside the
backward. `average`: of the weights, which is compared like them.
"""

import errno
import json
import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from core.compose import ParallelConfig
from core.config import run_command
from core.gemini import direct
from core.pinned import DRIVE_BLOCK
from core.runtime import join
from core.train import TrainConfig, TrainState
from core.train.loop import train_step
from tests.parity.test_train import GPT2
from tests.support.training import Case, batch_of, build, gemini_of, loss, weight

STEPS = 4
CASE = Case(
    replace(GPT2, num_layers=2), parallel=ParallelConfig(precision="bf16", zero=3), steps=STEPS, batch=4, length=5,
    budget="120KB", host="200KB", planned=True,
)  # fmt: skip
EARLY = replace(CASE, clip=None)
CALLS = ("preadv", "pwritev", "fdatasync", "fsync", "replace", "posix_fallocate")


def go_on(state: TrainState, config: TrainConfig, done: Path | None = None, steps: int = STEPS) -> dict[int, float]:
    """Train to the end from what is durable, each step durable.  Returns the loss of each step.

    done  gets a line when a step is committed: it is durable before the next one's
    """
    durable = state.parallel.durable
    assert durable is not None
    found = durable.latest()
    first = 0 if found is None else state.load_durable(found[0])
    losses = {}
    for step in range(first, steps):
        losses[step] = train_step(state, batch_of(CASE, step), loss, weight, config, step)["loss"]
        state.commit(step + 1, config)
        if done is not None:
            with done.open("a") as file:
                file.write(f"{step + 1} {losses[step]!r}\n")
    durable.confirm()
    return losses


class Counted:
    """Calls of the drive, counted; the n-th may be something else."""

    def __init__(self, nth: int | None = None, instead: Callable[[str, Callable[..., Any], tuple], Any] | None = None):
        self.count, self.nth, self.instead = 0, nth, instead
        self._real = {name: getattr(os, name) for name in CALLS}

    def __enter__(self) -> "Counted":
        for name, real in self._real.items():
            setattr(direct.os, name, lambda *args, name=name, real=real: self._call(name, real, args))
        return self

    def __exit__(self, *error: object) -> None:
        for name, real in self._real.items():
            setattr(direct.os, name, real)

    def _call(self, name: str, real: Callable[..., Any], args: tuple) -> Any:
        self.count += 1
        if self.instead is not None and self.count == self.nth:
            return self.instead(name, real, args)
        return real(*args)


def torn_and_killed(name: str, real: Callable[..., Any], args: tuple) -> None:
    if name == "pwritev":
        handle, (view,), offset = args
        half = len(view) // 2 // DRIVE_BLOCK * DRIVE_BLOCK
        if half:
            real(handle, [view[:half]], offset)
    os.kill(os.getpid(), signal.SIGKILL)


def failing(code: int) -> Callable[..., Any]:
    """A call that fails."""

    def fail(name: str, real: Callable[..., Any], args: tuple) -> None:
        names = [str(args[0])] if name == "replace" else []  # as the system's own error has it
        raise OSError(code, "injected", *names)

    return fail


def half(name: str, real: Callable[..., Any], args: tuple) -> Any:
    """A short transfer."""
    if name not in ("preadv", "pwritev"):
        return real(*args)
    handle, (view,), offset = args
    return real(handle, [view[: len(view) // 2]], offset)


FAULTS = {"kill": torn_and_killed, "EIO": failing(errno.EIO), "ENOSPC": failing(errno.ENOSPC), "short": half}


def train(case: Case, folder: Path, out: Path, nth: int | None, fault: str = "kill") -> None:
    join("cpu")
    with Counted(nth, FAULTS[fault]) as calls:
        state, config = build(replace(case, disk=folder))
        go_on(state, config, out.with_suffix(".done"))
    torch.save({name: value.clone() for name, value in learned(state).items()}, out)
    out.with_suffix(".calls").write_text(str(calls.count))


def learned(state: TrainState) -> dict[str, torch.Tensor]:
    """The masters, and their averages where there are any."""
    averages = {} if state.average is None else state.average.tensors
    return state.parallel.masters | {f"average/{name}": average for name, average in averages.items()}


def counted_and_planned(state: TrainState, config: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Bytes (read, written) of the third step and its durable copy, and those that follow from its plan."""
    replicas = gemini_of(state.parallel)
    disk, planned = replicas.disk, replicas.planned
    assert disk is not None
    assert planned is not None
    before = (0, 0)
    for step in range(3):
        before = disk.moved_bytes
        train_step(state, batch_of(CASE, step), loss, weight, config, step)
        state.commit(step + 1, config)
    fetches = [move.chunk for moves in planned.plan.moves for move in moves if move.kind in ("fetch", "prefetch")]
    read = written = 0
    for chunk, slots in disk.slots.items():
        written += slots.num_bytes if chunk.trainable else 0
        if chunk in disk.away:
            begin, end = slots.fetched
            read += fetches.count(chunk.index) * (end - begin) + sum(b - a for a, b in slots.updated)
    waiting = sum(gradient.num_bytes for gradient in disk.waiting.of.values())
    read, written = read + waiting, written + waiting
    return (disk.moved_bytes[0] - before[0], disk.moved_bytes[1] - before[1]), (read, written)


def forked(*args: Any, said: Path | None = None) -> int:
    """Exit status of `train` in a process of its own.  said: gets what it says, as a command that fails says it"""
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            if said is not None:
                os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), sys.stderr.fileno())
            code = run_command(lambda _: train(*args), [])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitpid(process, 0)[1]


def main(case: Case, folder: Path, num_kills: int, seed: int = 0) -> dict[str, Any]:
    draw = random.Random(seed)
    straight = folder / "straight.pt"
    assert forked(case, folder / "disk", straight, None) == 0
    shutil.rmtree(folder / "disk")
    num_calls, lost, from_step = int(straight.with_suffix(".calls").read_text()), 0, []
    expected = torch.load(straight)
    told = straight.with_suffix(".done").read_text().splitlines()
    for kill in range(num_kills):
        disk, out = folder / "disk", folder / f"{kill}.pt"
        # Few calls belong to what comes before the first step; each kill falls anywhere.
        at = draw.randint(1, num_calls)
        while (status := forked(case, disk, out, at)) == 0:  # how many calls a run takes depends on its threads
            shutil.rmtree(disk)
            out.with_suffix(".done").unlink(missing_ok=True)
            at = at * 3 // 4
        assert status == signal.SIGKILL, status
        done = out.with_suffix(".done")
        durable = done.read_text().splitlines() if done.exists() else []
        done.unlink(missing_ok=True)
        assert forked(case, disk, out, None) == 0
        rest = done.read_text().splitlines() if done.exists() else []
        first = STEPS - len(rest)
        from_step.append(first)
        assert len(durable) - 1 <= first <= len(durable) + 1, (durable, first)
        assert durable == told[: len(durable)]
        assert rest == told[first:]
        lost += any(not torch.equal(value, expected[name]) for name, value in torch.load(out).items())
        shutil.rmtree(disk)
    return {"calls": num_calls, "kills": num_kills, "from_step": from_step, "wrong": lost}


def let_down(case: Case, folder: Path, fault: str, first: int = 1, stride: int = 1) -> dict[str, Any]:
    """A run with a fault at each call, and what the next run makes of the folder."""
    straight = folder / "straight.pt"
    assert forked(case, folder / "disk", straight, None) == 0
    shutil.rmtree(folder / "disk")
    num_calls, expected = int(straight.with_suffix(".calls").read_text()), torch.load(straight)
    told = straight.with_suffix(".done").read_text().splitlines()
    wrong, unhit, failures = [], 0, 0
    for nth in range(first, num_calls + 1, stride):
        disk, out, said = folder / "disk", folder / f"{nth}.pt", folder / f"{nth}.txt"
        code = os.waitstatus_to_exitcode(forked(case, disk, out, nth, fault, said=said))
        lines = said.read_text().splitlines()
        done = out.with_suffix(".done")
        durable = done.read_text().splitlines() if done.exists() else []
        done.unlink(missing_ok=True)
        if code == 0:
            unhit += fault != "short"
            rest, at = told, 0
        else:
            failures += 1
            named = [line for line in lines if line.startswith("error: ") and str(folder) in line]
            if code != 2 or len(lines) != 1 or not named:
                wrong.append(f"call {nth}: exit {code}: {' / '.join(lines[-3:])}")
            at = None
            if forked(case, disk, out, None, said=said) == 0:
                rest = done.read_text().splitlines() if done.exists() else []
                at = STEPS - len(rest)
            else:
                wrong.append(f"call {nth}: the next run ends with: {said.read_text()[-500:]}")
        if at is not None:
            if durable != told[: len(durable)] or (code and not len(durable) - 1 <= at <= len(durable) + 1):
                wrong.append(f"call {nth}: {len(durable)} steps were durable, and it goes on from {at}")
            if any(not torch.equal(value, expected[name]) for name, value in torch.load(out).items()):
                wrong.append(f"call {nth}: other weights")
        shutil.rmtree(disk)
        for left in folder.glob(f"{nth}.*"):
            left.unlink()
    return {"calls": num_calls, "fault": fault, "failures": failures, "unhit": unhit, "wrong": wrong}


if __name__ == "__main__":
    where, what, *others = sys.argv[1:]
    chosen, rest = EARLY if "early" in others else CASE, [int(word) for word in others if word.isdigit()]
    chosen = replace(chosen, average=0.9, host="240KB") if "average" in others else chosen
    found = (
        main(chosen, Path(where), int(what), *rest) if what.isdigit() else let_down(chosen, Path(where), what, *rest)
    )
    print(json.dumps(found))
