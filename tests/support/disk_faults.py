"""Calls of a drive that fail, are short, or are their process's last: each in a fork of a run that has come so far.

python -m tests.support.disk_faults FOLDER RUN[,RUN...] FAULT[,FAULT...] [FIRST [STRIDE]]

Runs are those of `RUNS`, faults those of `tests.support.disk`. A run is cut into stages: it is built; its first two
steps; another process goes on from the second; two more steps. Of each stage every call, or each STRIDE-th from the
FIRST on, has its fault once, in a process of its own that is forked where the stage begins, when every thread of the
drive has ended. A fork of one that has imported, traced and planned everything takes a tenth of a second.

What must hold of each: with an error one line names the folder, and the exit code is 2; the newest record tells of a
step that was to be durable, or of the one that was about to be; what lies in its slots, and all else that it holds, is
to the byte what an undisturbed run has at that step, and that run's every step is known to be gone on with. Every
RESUMED-th such folder is gone on with itself, to the same end, and then has no file that nobody needs.

FOLDER/cases.jsonl has a line for each; those that are there are not run again. Prints what was found as a line of JSON.
"""

import gc
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch

from core.config import run_command
from core.gemini import direct, replicas
from core.gemini.direct import CHECKED_BYTES
from core.gemini.generation import RECORDS, Generation
from core.runtime import pretended
from core.train import TrainConfig, TrainState
from core.train.loop import train_step
from tests.support.disk import CASE, EARLY, EVERY_CALL, FAULTS, STEPS, TRANSFERS, Counted
from tests.support.training import Case, batch_of, build, loss, weight

RESUMED = 25
MOST_SECONDS = 300
"""Of a process, after which it hangs."""
CUT = 2
"""Steps before the process that goes on."""


NAMES = {"short": TRANSFERS, "ENOSPC": tuple(name for name in EVERY_CALL if name not in ("preadv", "unlink"))}
"""Of faults that not every call can have: those that can."""


@dataclass(frozen=True)
class Run:
    """drives: folders, of which each is one"""

    case: Case
    drives: int = 1

    def given(self, folder: Path) -> Case:
        """The case on these folders."""
        return replace(self.case, disk=Path(",".join(str(one.parent) for one in self.folders(folder))))

    def folders(self, folder: Path) -> list[Path]:
        """Those of the rank."""
        return [folder / f"drive-{k}" / "rank-0" for k in range(self.drives)]


RUNS = {
    "late": Run(CASE),
    "early": Run(EARLY),
    "drives": Run(EARLY, drives=2),
    "average": Run(replace(EARLY, average=0.9, host="240KB")),
}


# --- what a folder holds ----------------------------------------------------------------------------------------------


def records_of(folders: list[Path]) -> list[Generation]:
    """All records of a rank's folders."""
    records = [folder / name for folder in folders for name in RECORDS if (folder / name).exists()]
    return [Generation.from_bytes(record.read_bytes()) for record in records]


def held(folders: list[Path]) -> tuple[int, Any]:
    """The newest step of a rank's folders, and all that is kept of it; (0, None) where there is none.

    Raises AssertionError where it is not what its record says.
    """
    found = records_of(folders)
    if not found:
        return 0, None
    newest = max(found, key=lambda generation: generation.step)
    tensors = {}
    for chunk in newest.chunks:
        (path,) = (folder / chunk.file for folder in folders if (folder / chunk.file).exists())
        with path.open("rb") as file:
            raw = os.pread(file.fileno(), chunk.num_bytes, chunk.offset)
        for (a, b), sums in zip(chunk.regions, chunk.checksums, strict=True):
            region = raw[a:b]
            blocks = [zlib.crc32(region[k : k + CHECKED_BYTES]) for k in range(0, len(region), CHECKED_BYTES)]
            assert blocks == sums, f"bytes {a} to {b} of a slot of step {newest.step} are not those that were written"
        for part in chunk.parts:
            tensors[part.name, part.key] = raw[part.offset : part.offset + part.num_bytes]
    return newest.step, (tensors, [newest.run, newest.numbers, newest.values, newest.blob])


def unlike(found: Any, expected: Any) -> list[str]:
    """What of a step is not as in another run."""
    (tensors, others), (same_tensors, same_others) = found, expected
    wrong = [" ".join(key) for key in tensors.keys() | same_tensors.keys() if tensors.get(key) != same_tensors.get(key)]
    return wrong + [f"{one} for {other}"[:200] for one, other in zip(others, same_others, strict=True) if one != other]


class Kept:
    """The files of a folder as they are now, to be made so again; those that are open stay the same files."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files = {path: path.read_bytes() for path in self._there()}

    def _there(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file() and path.name != ".lock"]

    def again(self) -> None:
        for path in self._there():
            if path not in self.files:
                path.unlink()
        for path, content in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            now = path.read_bytes() if path.exists() else b""
            if now == content:
                continue
            handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
            if len(now) != len(content):
                os.ftruncate(handle, len(content))
            for begin in range(0, len(content), direct.DRIVE_BLOCK):
                block = content[begin : begin + direct.DRIVE_BLOCK]
                if now[begin : begin + direct.DRIVE_BLOCK] != block:
                    os.pwrite(handle, block, begin)
            os.close(handle)


# --- threads ----------------------------------------------------------------------------------------------------------


class Threads:
    """All threads of drives that there are: a process is forked when they have ended, and each fork has its own."""

    def __init__(self) -> None:
        kinds = direct._Threads, ThreadPoolExecutor
        self.found: list[Any] = [one for one in gc.get_objects() if type(one) in kinds]

    def end(self) -> None:
        for one in self.found:
            one.close() if isinstance(one, direct._Threads) else one.shutdown()
        while len(os.listdir("/proc/self/task")) > 1:  # one that has been waited for is on its way out
            time.sleep(0.001)

    def begin(self) -> None:
        for one in self.found:
            if isinstance(one, direct._Threads):
                one.__init__(direct.THREADS)
            else:
                one.__init__(1)


# --- a run, and its stages --------------------------------------------------------------------------------------------


Made = tuple[TrainState, TrainConfig]


def go(made: Made, first: int, last: int, told: Path) -> None:
    """Some steps, each durable in the end; a line of `told` says when one is committed, and with which loss.

    Behind the second step all tensors are looked at, as a checkpoint does.
    """
    state, config = made
    durable = state.parallel.durable
    assert durable is not None
    for step in range(first, last):
        value = train_step(state, batch_of(CASE, step), loss, weight, config, step)["loss"]
        if step == 1:
            state.save(Mock(save=lambda step, tensors, *_: [tensor.sum() for tensor in tensors.values()]), step)
        state.commit(step + 1, config)
        with told.open("a") as file:
            file.write(f"{step + 1} {value!r}\n")
    durable.confirm()


def begun(case: Case, resumed: int) -> Made:
    """A run that is built, or that goes on from a step."""
    made = build(case)
    durable = made[0].parallel.durable
    assert durable is not None
    latest = durable.latest()
    assert (0 if latest is None else latest[0]) == resumed
    if latest is not None:
        made[0].load_durable(resumed)
    return made


@dataclass(frozen=True)
class Stage:
    """resumed  the step that the folder has when it begins
    built    whether the run is there when it begins
    steps    from which on and to which it goes
    """

    resumed: int
    built: bool
    steps: tuple[int, int]


STAGES = {
    "build": Stage(0, False, (0, 1)),
    "first steps": Stage(0, True, (0, CUT)),
    "resume": Stage(CUT, False, (CUT, CUT + 1)),
    "later steps": Stage(CUT, True, (CUT, STEPS)),
}


def status_of(work: Callable[[], None], said: Path) -> int:
    """The exit code of work in a fork, which says what it has to say, as a command, to a file."""
    drawn = random.getstate()  # a fork would draw others
    process = os.fork()
    if process == 0:
        random.setstate(drawn)
        code = 1
        try:
            signal.alarm(MOST_SECONDS)
            out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, sys.stderr.fileno())
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = run_command(lambda _: work(), [])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


class Soak:
    """folder    of all that is written
    expected  step -> what an undisturbed run keeps of it; told: its lines
    """

    def __init__(self, folder: Path, name: str):
        self.folder, self.name, self.run = folder, name, RUNS[name]
        self.given, self.folders = self.run.given(folder / "run"), self.run.folders(folder / "run")
        self.told, self.said = folder / "told", folder / "said"
        self.log = folder / "cases.jsonl"
        rows = self.log.read_text().splitlines() if self.log.exists() else []
        self.rows = [row for row in map(json.loads, rows) if row["run"] == name]
        self.expected: dict[int, Any] = {}
        self.lines: list[str] = []
        self.calls: dict[str, int] = {}

    def clear(self) -> None:
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        self.told.unlink(missing_ok=True)

    def straight(self) -> None:
        """What an undisturbed run keeps of each step, each gone on with to the same end; and what one without a disk
        learns."""
        self.clear()
        for step in range(STEPS):
            code = status_of(lambda step=step: go(begun(self.given, step), step, step + 1, self.told), self.said)
            assert code == 0, self.said.read_text()
            found, self.expected[step + 1] = held(self.folders)
            assert found == step + 1
        self.lines = self.told.read_text().splitlines()
        self.clear()
        assert status_of(lambda: go(begun(self.given, 0), 0, STEPS, self.told), self.said) == 0, self.said.read_text()
        found, content = held(self.folders)
        assert found == STEPS
        assert not (wrong := unlike(content, self.expected[STEPS])), f"not as a run that goes on: {wrong}"
        assert self.told.read_text().splitlines() == self.lines
        assert status_of(self._without, self.said) == 0, self.said.read_text()
        self.clear()

    def _without(self) -> None:
        state, config = build(replace(self.given, host=None, disk=None))
        losses = [train_step(state, batch_of(CASE, s), loss, weight, config, s)["loss"] for s in range(STEPS)]
        assert [f"{step + 1} {value!r}" for step, value in enumerate(losses)] == self.lines
        for name, master in state.parallel.masters.items():
            assert master.detach().numpy().tobytes() == self.expected[STEPS][0][name, ""], name

    def stage(self, name: str, faults: list[str], first: int, stride: int) -> None:
        """All cases of a stage, in a process that is forked for it and comes to where it begins."""
        stage = STAGES[name]
        self.clear()
        if stage.resumed:
            assert status_of(lambda: go(begun(self.given, 0), 0, stage.resumed, self.told), self.said) == 0

        def serve() -> None:
            made, threads = None, None
            if stage.built:
                with private_rows():
                    made = begun(self.given, stage.resumed)
                threads = Threads()
                threads.end()
            self._cases(name, made, threads, faults, first, stride)

        drawn = random.getstate()
        process = os.fork()
        if process == 0:
            random.setstate(drawn)
            try:
                serve()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        assert os.waitpid(process, 0)[1] == 0, name

    def _cases(
        self, name: str, made: Made | None, threads: Threads | None, faults: list[str], first: int, stride: int
    ) -> None:
        kept, stage = Kept(self.folder / "run"), STAGES[name]
        counts, hit = self.folder / "count", self.folder / "hit"

        def work(nth: int | None, fault: str) -> None:
            if threads is not None:
                threads.begin()
            names = NAMES.get(fault, EVERY_CALL)

            def noted(name: str, *given: Any) -> Any:
                hit.write_text(name)
                return FAULTS[fault](name, *given)

            with Counted(nth, noted, names) as calls:
                go(made or begun(self.given, stage.resumed), *stage.steps, self.told)
            counts.write_text(str(calls.count))

        done = {(row["stage"], row["fault"], row["call"]) for row in self.rows}
        for fault in faults:
            self.told.unlink(missing_ok=True)
            code = status_of(lambda fault=fault: work(None, fault), self.said)
            assert code == 0, self.said.read_text()
            step, content = held(self.folders)
            assert step == stage.steps[1]
            assert not (wrong := unlike(content, self.expected[step])), f"{name}: {wrong}"
            kept.again()
            for nth in range(first, int(counts.read_text()) + 1, stride):
                if (name, fault, nth) in done:
                    continue
                self.told.unlink(missing_ok=True)
                hit.unlink(missing_ok=True)
                code = status_of(lambda nth=nth, fault=fault: work(nth, fault), self.said)
                row = {"run": self.name, "stage": name, "fault": fault, "call": nth, "exit": code}
                row["what"] = hit.read_text() if hit.exists() else ""
                row["wrong"] = list(self._wrong(stage, fault, code))
                if nth // stride % RESUMED == 1 or row["wrong"]:
                    row["resumed"] = True
                    row["wrong"] += self._gone_on_with()
                used = resource.getrusage(resource.RUSAGE_CHILDREN)
                row["seconds"] = round(used.ru_utime + used.ru_stime, 2)
                with self.log.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                kept.again()

    def _wrong(self, stage: Stage, fault: str, code: int) -> Iterator[str]:
        """What is not as it must be behind a fault."""
        lines = self.said.read_text().splitlines()
        told = self.told.read_text().splitlines() if self.told.exists() else []
        begin, end = stage.steps
        if code == -signal.SIGALRM:
            yield "it hangs"
        if code not in {"kill": (0, -signal.SIGKILL), "short": (0,)}.get(fault, (0, 2)):
            yield f"exit {code}: {' / '.join(lines[-3:])}"
        if code == 2 and (len(lines) != 1 or not lines[0].startswith("error: ")):
            yield f"says {lines}"
        elif code == 2 and str(self.folder) not in lines[0]:
            yield f"names no file: {lines[0]}"
        if told != self.lines[begin : begin + len(told)]:
            yield f"learns {told}"
        try:
            step, content = held(self.folders)
        except Exception as error:
            yield f"the record: {type(error).__name__}: {error}"
            return
        least = max(stage.resumed, begin + len(told) - 1)
        if not least <= step <= begin + len(told) + 1 or (code == 0 and step != end):
            yield f"step {step} is durable behind {len(told)} from {begin}"
        elif step and (unlikely := unlike(content, self.expected[step])):
            yield f"step {step} is not what it was: {unlikely}"

    def _gone_on_with(self) -> list[str]:
        """What is wrong with the run that goes on from the folder as it is, whose copy is taken."""
        copy, told, said = self.folder / "copy", self.folder / "told again", self.folder / "said again"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.folder / "run", copy)
        given, folders = self.run.given(copy), self.run.folders(copy)
        first, _ = held(folders)
        told.unlink(missing_ok=True)

        def to_its_end() -> None:
            made = begun(given, first)
            go(made, first, STEPS, told)
            made[0].parallel.close()

        if status_of(to_its_end, said) != 0:
            return [f"the next run ends with {said.read_text()[-500:]}"]
        wrong = []
        step, content = held(folders)
        if unlikely := ["steps"] * (step != STEPS) or unlike(content, self.expected[STEPS]):
            wrong.append(f"the next run comes to step {step} with other {unlikely}")
        named = {name for generation in records_of(folders) for name in generation.files}
        left = {path.name for folder in folders for path in folder.iterdir()} - {".lock", *RECORDS}
        if left != named:
            wrong.append(f"the next run leaves {sorted(left)}, and records name {sorted(named)}")
        return wrong


@contextmanager
def private_rows() -> Iterator[None]:
    """Within, rows of parameters that are yet to be packed lie in memory, which forks do not share."""
    with patch.object(replicas, "mapped_temporary", lambda folder, shape, dtype: torch.empty(shape, dtype=dtype)):
        yield


@contextmanager
def planned_once() -> Iterator[None]:
    """Within, the first step that is traced, and its plan, are those of all that follow; and a drive's probe is short.

    For runs of one model, and one budget.
    """
    kept: dict[str, Any] = {}

    def first(name: str) -> Callable[..., Any]:
        real = getattr(replicas, name)

        def found(*args: Any, **options: Any) -> Any:
            if name not in kept:
                kept[name] = real(*args, **options)
            return kept[name]

        return found

    with (
        patch.object(replicas, "trace_step", first("trace_step")),
        patch.object(replicas, "plan", first("plan")),
        patch.object(direct, "PROBE_BYTES", 1 << 16),
    ):
        yield


def soak(folder: Path, name: str, faults: list[str], first: int = 1, stride: int = 1) -> dict[str, Any]:
    """All cases of a run that are not in the log yet; what all of them have found."""
    folder.mkdir(parents=True, exist_ok=True)
    one = Soak(folder, name)
    one.clear()
    with pretended(1), planned_once():
        begun(one.given, 0)[0].parallel.close()  # traces and plans
        gc.collect()
        gc.freeze()
        one.straight()
        for stage in STAGES:
            one.stage(stage, faults, first, stride)
    one.clear()
    rows = [row for row in map(json.loads, one.log.read_text().splitlines()) if row["run"] == name]
    rows = [row for row in rows if row["fault"] in faults]
    return {
        "run": name,
        "cases": dict(Counter(row["fault"] for row in rows)),
        "exits": dict(Counter(f"{row['fault']} {row['exit']}" for row in rows)),
        "passed over": dict(Counter(row["what"] for row in rows if row["exit"] == 0 and row["fault"] != "short")),
        "resumed": sum("resumed" in row for row in rows),
        "wrong": [row for row in rows if row["wrong"]],
    }


if __name__ == "__main__":
    where, runs, what, *numbers = sys.argv[1:]
    for each in runs.split(","):
        print(json.dumps(soak(Path(where), each, what.split(","), *map(int, numbers))), flush=True)
