"""A command of the protocol: entries one after another in a budget of time; figures are printed and kept as they come.

1. An entry is a function that yields figures. Entries run in workers, processes that start without them: one that ends,
   hangs or breaks its CUDA context takes no other entry with it, and the next gets a new worker.
2. Every figure is printed and, with all before it, written to OUT/gpu_X.json, a result as `benchmarks.result` has it.
   An entry that fails or is stopped is a note with its reason, and the others run.
3. No entry begins that the budget has no room for, and none runs longer than is left: those are named, too.

The exit code is 1 where an entry failed. One that was left out for lack of time is said, and changes nothing.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from benchmarks.result import ROOT, Measured, Number, Row, Target, beginning, result_of, write
from benchmarks.run import in_a_line

START_AND_END_S = 15
"""of a command's minutes, which its entries do not get"""
TITLES = {
    "a": "Right on a GPU",
    "b": "Kernels and decoding on a GPU",
    "c": "Training on a GPU",
    "d": "What no GPU had measured",
}
MEASURES = ("core", "apps", "benchmarks")


@dataclass(frozen=True)
class Where:
    """device: "cuda" or "cpu"; quick: sizes that measure nothing."""

    device: str
    quick: bool

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def untimed_workers(self) -> int:
        """Processes that compile and compute beside one another where nothing is timed."""
        return 14 if self.on_gpu else 1 if self.quick else 2


@dataclass(frozen=True)
class Entry:
    """Something to be measured: `run(where)` yields figures as they come, and notes.

    least_s  of the budget that has to be left for it to begin
    most_s   after which it is stopped
    """

    name: str
    run: Callable[[Where], Iterator[Row | str]]
    least_s: float = 5.0
    most_s: float = 240.0


@dataclass(frozen=True)
class Phase:
    """Entries of which `workers` run at once; one where they are timed."""

    entries: Sequence[Entry]
    workers: int = 1


@dataclass(frozen=True)
class Part:
    """Of a command: the minutes that it may take, and the entries of which one of `only` is in the name; () for all."""

    minutes: float = 9.0
    only: tuple[str, ...] = ()

    @property
    def budget_s(self) -> float:
        return 60 * self.minutes - START_AND_END_S

    def of(self, phases: Sequence[Phase]) -> list[Phase]:
        """Raises ValueError where no entry is left."""
        chosen = [Phase([e for e in phase.entries if self._has(e.name)], phase.workers) for phase in phases]
        if not any(phase.entries for phase in chosen):
            names = ", ".join(entry.name for phase in phases for entry in phase.entries)
            raise ValueError(f"--only {' '.join(self.only)}: no entry has that in its name; they are: {names}")
        return chosen

    def _has(self, name: str) -> bool:
        return not self.only or any(text in name for text in self.only)

    def options(self) -> list[str]:
        minutes = [] if self.minutes == Part.minutes else ["--minutes", f"{self.minutes:g}"]
        return minutes + (["--only", *map(shlex.quote, self.only)] if self.only else [])


@dataclass
class Record:
    """What came of a command so far, on paper after each figure."""

    command: str
    where: Where
    part: Part
    out: Path
    targets: Callable[[list[Row]], list[Target]]
    began: float = field(default_factory=time.monotonic)
    figures: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_failed: int = 0
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock, self._beginning = threading.Lock(), beginning(MEASURES)

    @property
    def left_s(self) -> float:
        return self.part.budget_s - (time.monotonic() - self.began)

    def add(self, row: Row) -> None:
        with self._lock:
            self.figures.append(row)
            self._say(in_a_line(row))
            self._write()

    def note(self, text: str, failed: bool = False) -> None:
        with self._lock:
            self.num_failed += failed
            self.notes.append(text)
            self._say(f"{'FAILED ' * failed}{text}")
            self._write()

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", flush=True)

    def _write(self) -> None:
        if not self.figures:
            return
        options = ["--device", self.where.device, *["--quick"] * self.where.quick, *self.part.options()]
        line = " ".join(["python -m benchmarks.gpu", self.command, "--out PATH", *options])
        measured = Measured(tuple(self.figures), tuple(self.targets(self.figures)), tuple(self.notes))
        write(result_of(f"gpu_{self.command}", TITLES[self.command], line, measured, self._beginning), self.out)


def main(command: str, out: Path, where: Where, part: Part) -> int:
    from benchmarks.gpu import entries

    if where.on_gpu and (reason := no_gpu()):
        print(f"error: {reason}; --device cpu --quick shows that the command runs", file=sys.stderr)
        return 2
    try:
        phases = part.of(entries.phases(command, where))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    record = Record(command, where, part, out, entries.targets_of(command))
    if where.quick:  # nothing is timed, and a worker imports for longer than its entries take
        phases = [Phase([entry for phase in phases for entry in phase.entries])]
    for phase in phases:
        run_phase(phase, record)
    if record.left_out:
        print(f"not reached; for another call: --only {' '.join(map(shlex.quote, record.left_out))}", flush=True)
    failed = f", {record.num_failed} failed" if record.num_failed else ""
    print(f"{len(record.figures)} figures{failed} in {time.monotonic() - record.began:.0f} s: {out}/gpu_{command}.json")
    return int(record.num_failed > 0 or not record.figures)


def no_gpu() -> str | None:
    """Why there is none. Asked in a process of its own: this one starts others."""
    said = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"torch cannot be used: {done.stderr.strip().splitlines()[-1:]}"
    return None if done.stdout.strip() else "torch finds no CUDA device"


def run_phase(phase: Phase, record: Record) -> None:
    waiting: Queue[Entry] = Queue()
    for entry in phase.entries:
        waiting.put(entry)

    def turns() -> None:
        worker: Worker | None = None
        while True:
            try:
                entry = waiting.get_nowait()
            except Empty:
                break
            if record.left_s < entry.least_s:
                record.left_out.append(entry.name)
                record.note(
                    f"{entry.name} is left out: {record.left_s:.0f} s are left, and it takes {entry.least_s:.0f}"
                )
                continue
            worker = worker or Worker(record.command, record.where)
            if not run_entry(entry, worker, record):
                worker.end()
                worker = None
        if worker is not None:
            worker.end()

    with ThreadPoolExecutor(phase.workers) as pool:
        for turn in [pool.submit(turns) for _ in range(phase.workers)]:
            turn.result()


def run_entry(entry: Entry, worker: "Worker", record: Record) -> bool:
    """Whether its worker can take another."""
    worker.ask(entry.name)
    if not worker.is_ready(record.left_s):  # importing takes seconds, and is none of the entry's time
        record.note(f"{entry.name}: its process did not start in time", failed=True)
        return False
    began, limit_s = time.monotonic(), min(entry.most_s, record.left_s)
    while True:
        answer = worker.answer(began + limit_s - time.monotonic())
        if answer is None:
            if limit_s < entry.most_s:
                record.left_out.append(entry.name)
            record.note(f"{entry.name} was stopped after {limit_s:.0f} s, the most that it may take or that was left")
            return False
        if "row" in answer:
            numbers = {name: Number(**number) for name, number in answer["row"]["numbers"].items()}
            record.add(Row({"entry": entry.name} | answer["row"]["case"], numbers))
        elif "note" in answer:
            record.note(f"{entry.name}: {answer['note']}")
        elif "failed" in answer:
            record.note(f"{entry.name}: {answer['failed']}", failed=True)
            if answer["broken"]:
                return False
        else:
            return True


class Worker:
    """A process that runs entries, one at a time: a name on a line in, figures as lines of JSON out."""

    def __init__(self, command: str, where: Where):
        line = [sys.executable, "-m", "benchmarks.gpu.worker", command, where.device, *["--quick"] * where.quick]
        self._process = subprocess.Popen(
            line, cwd=ROOT, env=environment(where), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        self._lines: Queue[str] = Queue()
        self._is_ready = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def ask(self, name: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            print(name, file=self._process.stdin, flush=True)

    def is_ready(self, timeout_s: float) -> bool:
        """Whether it has imported all and takes entries."""
        if not self._is_ready:
            self._is_ready = self.answer(timeout_s) == {"ready": True}
        return self._is_ready

    def answer(self, timeout_s: float) -> dict[str, Any] | None:
        """The next thing that it says; None where nothing comes in time."""
        try:
            line = self._lines.get(timeout=max(0.0, timeout_s))
        except Empty:
            return None
        if not line:
            code = self._process.wait()
            return {"failed": f"its process ended with exit code {code}", "broken": True}
        return json.loads(line)

    def end(self) -> None:
        """With all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def environment(where: Where) -> dict[str, str]:
    """Of a process that computes: on the CPU without GPUs, and kernels that are asked for by the interpreter."""
    given = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    on_cpu = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    return given if where.on_gpu else given | on_cpu


def as_json(row: Row) -> dict[str, Any]:
    return {"case": row.case, "numbers": {name: asdict(number) for name, number in row.numbers.items()}}
