"""A small GPT trained with Gemini's disk, and calls of its drive that fail, are short, or are their process's last."""

import errno
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import IO, Any

import torch

from core import files
from core.compose import ParallelConfig
from core.pinned import DRIVE_BLOCK
from core.train import TrainConfig, TrainState
from core.train.loop import train_step
from tests.parity.test_train import GPT2
from tests.support.training import Case, batch_of, gemini_of, loss, weight

STEPS = 4
CASE = Case(
    replace(GPT2, num_layers=2), parallel=ParallelConfig(precision="bf16", zero=3), steps=STEPS, batch=4, length=5,
    budget="120KB", host="200KB", planned=True,
)  # fmt: skip
EARLY = replace(CASE, clip=None)
TRANSFERS = ("preadv", "pwritev")
CALLS = (*TRANSFERS, "fdatasync", "fsync", "replace", "posix_fallocate")
EVERY_CALL = (*CALLS, "open", "unlink", "sync")
"""`sync` is of a file that has been written as a whole (`core.files.sync`): half of it is there when it fails."""


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
    """Calls of the drive by these names, counted; the n-th may be something else."""

    def __init__(
        self,
        nth: int | None = None,
        instead: Callable[[str, Callable[..., Any], tuple], Any] | None = None,
        names: Sequence[str] = CALLS,
    ):
        self.count, self.nth, self.instead = 0, nth, instead
        self._real, self._lock = {name: getattr(_module(name), name) for name in names}, Lock()

    def __enter__(self) -> "Counted":
        for name, real in self._real.items():
            setattr(_module(name), name, lambda *args, name=name, real=real: self._call(name, real, args))
        return self

    def __exit__(self, *error: object) -> None:
        for name, real in self._real.items():
            setattr(_module(name), name, real)

    def _call(self, name: str, real: Callable[..., Any], args: tuple) -> Any:
        with self._lock:
            self.count += 1
            is_it = self.count == self.nth
        if self.instead is not None and is_it:
            return self.instead(name, real, args)
        return real(*args)


def _module(name: str) -> Any:
    return files if name == "sync" else os


def torn_and_killed(name: str, real: Callable[..., Any], args: tuple) -> None:
    if name == "pwritev":
        handle, (view,), offset = args
        half = len(view) // 2 // DRIVE_BLOCK * DRIVE_BLOCK
        if half:
            real(handle, [view[:half]], offset)
    if name == "sync":
        _halve(*args)
    os.kill(os.getpid(), signal.SIGKILL)


def _halve(file: IO[bytes]) -> None:
    file.flush()
    os.ftruncate(file.fileno(), file.tell() // 2)


def failing(code: int) -> Callable[..., Any]:
    """A call that fails."""

    def fail(name: str, real: Callable[..., Any], args: tuple) -> None:
        if name == "sync":
            _halve(*args)
        names = [str(args[0])] if name in ("replace", "open", "unlink") else []  # as the system's own error has it
        raise OSError(code, "injected", *names)

    return fail


def half(name: str, real: Callable[..., Any], args: tuple) -> Any:
    """A short transfer."""
    if name not in TRANSFERS:
        return real(*args)
    handle, (view,), offset = args
    return real(handle, [view[: len(view) // 2]], offset)


FAULTS = {"kill": torn_and_killed, "EIO": failing(errno.EIO), "ENOSPC": failing(errno.ENOSPC), "short": half}


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
