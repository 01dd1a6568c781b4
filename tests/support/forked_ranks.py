"""Ranks for commands that launch some, forked from the process that runs the command, before it has any thread.

Each would otherwise be an interpreter that imports torch, which takes most of a test's time. They are forked first of
all, wait, and are given what the elastic launcher wanted to start an interpreter with.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

_COUNTS = ("--nproc", "--nproc-per-node", "--ranks", "--tp")


@contextmanager
def forked_ranks(words: Sequence[str]) -> Iterator[None]:
    """Let the ranks that `python WORDS` launches be forks. Where it launches more than it was told, those are not."""
    waiting = [_Fork() for _ in range(_num_ranks(words))]

    def popen(args: Sequence[str], **options: Any) -> Any:
        if not waiting:
            return subprocess.Popen(args, **options)
        fork = waiting.pop(0)
        fork.run(args, options["env"])
        return fork

    launched, subprocess_handler.Popen = subprocess_handler.Popen, popen
    try:
        yield
    finally:
        subprocess_handler.Popen = launched
        for fork in waiting:
            fork.leave()


def _num_ranks(words: Sequence[str]) -> int:
    numbers = [int(words[at + 1]) for at, word in enumerate(words) if word in _COUNTS]
    return numbers[0] if numbers and 1 < numbers[0] <= 8 else 0  # more are planned for, and not started


class _Fork:
    """As much of subprocess.Popen as the launcher uses."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        theirs, self._ours = context.Pipe(duplex=False)
        self._process = context.Process(target=_rank, args=(theirs,))
        self._process.start()
        theirs.close()

    def run(self, args: Sequence[str], env: dict[str, str]) -> None:
        self._ours.send(([word for word in args[1:] if word != "-u"], env))

    def leave(self) -> None:
        self._ours.send(None)
        self._process.join()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0)
        return self._process.exitcode


def _rank(given: Connection) -> None:
    try:
        order = given.recv()
    except EOFError:  # who would have started it is gone
        return
    if order is None:
        return
    words, env = order
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)
    run_python(words)


def run_python(words: Sequence[str]) -> None:
    """`python WORDS`, in this process: -m MODULE … or FILE …

    What it raises goes to the hook that an interpreter would call, and not to multiprocessing, which prints it always.
    """
    try:
        if words[0] == "-m":
            sys.argv = list(words[1:])
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            runpy.run_path(words[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
