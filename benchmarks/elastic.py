"""Seconds from a kill by -9 to the next step, and goodput under a kill every n steps, by what is done about a loss.

    level 1   the run starts again from its last checkpoint, of every 5 steps
    level 2   both replicas are killed; the next two take the state from the memory of keepers, of every 2 steps
              (`core.train.buddies`): spares that wait, or replicas that are started then
    level 3   the replica that was killed is dropped, the rest repeat its step, and another joins (`core.train.elastic`)
    level 4   local training, rounds of 5 steps: a worker that was killed is left out of its round, and another joins
              (`core.train.elastic_local`)
    torchft   a group that was killed is left out of its step, and another joins (`benchmarks.elastic_peer`)

Goodput is the share of the steps a second of as many replicas that nobody disturbs; the next step is one that had not
been taken before. The model is that of the tests, in fp64 on gloo, each of whose microbatches takes at least 20 ms.
Replicas are forks of one process, so what a process takes to start and to import is not in these seconds; it is
measured by itself. Level 1 pays it at each kill, level 2 without spares too; levels 3 and 4 and spares wait for nobody.
Samples lost are rows of the batch that no replica had in a step that was kept, or two had.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from ctypes import c_double
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from benchmarks.result import ROOT, Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.checkpoint import CheckpointConfig, complete_steps
from core.config import run_command
from core.parallel.local import LocalTrainingConfig
from core.train import TrainConfig
from core.train.config import ElasticConfig
from tests.support.elastic import ROWS, config, dealt_out, pause, replica, rows, store, wait_for_step

PAUSE_S = 0.02
START_S = 120.0
REPLICAS = 3
SAVED_EVERY, KEPT_EVERY, ROUND = 5, 2, 5


class Found(NamedTuple):
    """Of a run with kills: seconds from each to the next step, steps a second, samples lost."""

    seconds: list[float]
    rate: float
    lost: int


def measure(options: Options) -> Measured:
    steps, every = (18, 6) if options.quick else (200, 10)
    notes, figures, found = [], [], dict[str, Found]()
    begins_s = _process_start()
    with tempfile.TemporaryDirectory(prefix="elastic-") as name:
        folder = Path(name)
        quiet = {number: _undisturbed(folder / f"quiet-{number}", steps, number) for number in (2, REPLICAS)}
        forms: dict[str, tuple[int, Callable[[Path, int, int], Found]]] = {
            "1": (REPLICAS, _restarted),
            "2, spares": (2, _kept_with_spares),
            "2, started then": (2, _kept),
            "3": (REPLICAS, _elastic),
            "4": (REPLICAS, _local),
        }
        for level, (number, run) in forms.items():
            found[level] = run(folder / level, steps, every)
            figures.append(_row(level, found[level], every, steps, quiet[number]))
            options.kept(figures[-1])
        if options.peers_python is None:
            notes.append("left out: torchft: --peers-python names an interpreter that has it")
        else:
            try:
                peer, rate = _torchft(options.peers_python, folder, steps, every)
            except (subprocess.SubprocessError, ValueError, IndexError) as failed:
                notes.append(f"left out: torchft: {type(failed).__name__} ({str(failed)[-200:]})")
            else:
                figures.append(_row("torchft", peer, every, steps, rate))
                options.kept(figures[-1])
        if not options.quick:
            figures.append(_ends(folder, steps, found["4"], folder / "4"))
    figures.append(Row({"level": "a process"}, {"to start and to import": Number(begins_s, "s")}))
    notes.append(
        f"a process takes {begins_s:.1f} s to start and to import, which is in no other figure: level 1 pays it at "
        "each kill, and level 2 without spares"
    )
    level_1 = statistics.mean(found["1"].seconds) + begins_s
    targets = (
        Target(
            "level 2 is back twice as fast as level 1, which starts processes",
            2.0,
            level_1 / statistics.mean(found["2, spares"].seconds),
        ),
        Target(
            "level 2 without spares, processes that start on both sides, is back twice as fast as level 1",
            2.0,
            level_1 / (statistics.mean(found["2, started then"].seconds) + begins_s),
            limit="a process starts on both sides",
        ),
        Target("at level 3 the next step comes within 10 s", 1.0, 10.0 / max(found["3"].seconds)),
    )
    return Measured(tuple(figures), targets, tuple(notes))


def _row(level: str, found: Found, every: int, steps: int, undisturbed: float) -> Row:
    numbers = {
        "longest from a kill to the next step": Number(max(found.seconds), "s"),
        "mean from a kill to the next step": Number(statistics.mean(found.seconds), "s"),
        "goodput": Number(found.rate / undisturbed, ""),
        "samples lost": Number(float(found.lost), ""),
    }
    return Row({"level": level, "a kill every": every, "steps": steps}, numbers)


def _process_start() -> float:
    """The least seconds in which a process has started and imported what trains."""
    seconds = list[float]()
    for _ in range(2):
        begin = time.monotonic()
        subprocess.run([sys.executable, "-c", "import tests.support.elastic"], check=True, cwd=ROOT)
        seconds.append(time.monotonic() - begin)
    return min(seconds)


def _taken(out: Path) -> int:
    """Steps from the first to the last that is in the log."""
    return rows(out)[-1]["step"] - 1


def _step(out: Path) -> int:
    found = rows(out)
    return found[-1]["step"] if found else 0


def _lost(out: Path) -> int:
    return sum(len(set(range(ROWS)) ^ set(dealt_out(row))) for row in rows(out))


def _undisturbed(out: Path, steps: int, number: int) -> float:
    kept = store()
    given = config(out, kept.port, steps, number)
    all_of_them = [_replica(given, pause(PAUSE_S)) for _ in range(number)]
    wait_for_step(out, 1, START_S)
    begin = time.monotonic()
    for process in all_of_them:
        process.join()
    return _taken(out) / (time.monotonic() - begin)


def _replica(given: TrainConfig, slow: c_double) -> BaseProcess:
    return replica(given, given.out.parent / f"said-{given.out.name}", slow)


def _end(running: list[BaseProcess]) -> None:
    for process in running:
        process.join(5.0)
        process.kill()


def _elastic(out: Path, steps: int, every: int) -> Found:
    kept = store()
    return _with_joiners(config(out, kept.port, steps, 2), every, _lost)


def _local(out: Path, steps: int, every: int) -> Found:
    kept = store()
    local, saved = LocalTrainingConfig(every=ROUND), CheckpointConfig(every=0)
    return _with_joiners(config(out, kept.port, steps, 2, local=local, checkpoint=saved), every, _lost_of_rounds)


def _lost_of_rounds(out: Path) -> int:
    """Rows of workers that were not there when their round ended, and those that nobody had."""
    lost, of_round = _lost(out), dict[str, int]()
    for row in rows(out):
        for worker, (begin, end) in row["rows"].items():
            of_round[worker] = of_round.get(worker, 0) + end - begin
        if "workers" in row:
            lost += sum(number for worker, number in of_round.items() if int(worker) not in row["workers"])
            of_round = {}
    return lost


def _with_joiners(given: TrainConfig, every: int, lost: Callable[[Path], int]) -> Found:
    """The replica that leads is killed, and another is started when the next step is there."""
    seconds, slow, out = list[float](), pause(PAUSE_S), given.out
    running = [_replica(given, slow) for _ in range(REPLICAS)]
    wait_for_step(out, 1, START_S)
    begin = time.monotonic()
    try:
        for step in range(every, given.steps, every):
            wait_for_step(out, step, START_S)
            next(process for process in running if process.is_alive()).kill()
            seconds.append(wait_for_step(out, _step(out) + 1, START_S))
            running.append(_replica(given, slow))
        wait_for_step(out, given.steps, START_S)
        rate = _taken(out) / (time.monotonic() - begin)
    finally:
        _end(running)
    return Found(seconds, rate, lost(out))


def _kept_with_spares(out: Path, steps: int, every: int) -> Found:
    return _kept(out, steps, every, spares=2)


def _kept(out: Path, steps: int, every: int, spares: int = 0) -> Found:
    """Both replicas that take steps are killed at once."""
    kept, seconds, slow = store(), list[float](), pause(PAUSE_S)
    given = config(out, kept.port, steps, 2, checkpoint=CheckpointConfig(every=0))
    elastic = ElasticConfig(given.elastic.store, 2, 2, buddy_every=KEPT_EVERY, lost_after=given.elastic.lost_after)
    given = replace(given, elastic=elastic)
    running = [_replica(given, slow) for _ in range(2)]
    wait_for_step(out, 1, START_S)
    running += [_replica(given, slow) for _ in range(spares)]
    begin = time.monotonic()
    try:
        for step in range(every, steps, every):
            wait_for_step(out, step, START_S)
            for process in [process for process in running if process.is_alive()][:2]:
                process.kill()
                process.join()
            killed, reached = time.monotonic(), _step(out)
            if not spares:
                running += [_replica(given, slow) for _ in range(2)]
            wait_for_step(out, reached + 1, START_S)
            seconds.append(time.monotonic() - killed)
            running += [_replica(given, slow) for _ in range(spares)]
        wait_for_step(out, steps, START_S)
        rate = _taken(out) / (time.monotonic() - begin)
    finally:
        _end(running)
    return Found(seconds, rate, _lost(out))


def _restarted(out: Path, steps: int, every: int) -> Found:
    """One rank computes what three replicas share: it takes the rows of all, so its pause is a third."""
    seconds, begin, resume, slow = list[float](), None, None, pause(PAUSE_S / REPLICAS)
    for step in (*range(every, steps, every), steps):
        given = config(out, None, steps, resume=resume, checkpoint=CheckpointConfig(every=SAVED_EVERY))
        reached, started = _step(out), time.monotonic()
        process = _replica(given, slow)
        wait_for_step(out, reached + 1, START_S)
        if begin is None:
            begin = time.monotonic()
        else:
            seconds.append(time.monotonic() - started)
        wait_for_step(out, step, START_S)
        if step < steps:
            process.kill()
        process.join()
        resume = "auto" if complete_steps(out / "checkpoints") else None
    assert begin is not None
    return Found(seconds, _taken(out) / (time.monotonic() - begin), 0)


def _ends(folder: Path, steps: int, found: Found, out: Path) -> Row:
    """Where level 4 ends, beside three seeds of the same without a kill: the mean loss of the last ten rounds."""
    assert found.seconds
    ends = list[float]()
    for seed in range(3):
        kept, quiet = store(), folder / f"seed-{seed}"
        local, saved = LocalTrainingConfig(every=ROUND), CheckpointConfig(every=0)
        given = config(quiet, kept.port, steps, REPLICAS, local=local, checkpoint=saved, seed=seed)
        _end_of_itself([_replica(given, pause(0.0)) for _ in range(REPLICAS)])
        ends.append(_last(quiet))
    numbers = {"loss at the end, with kills": Number(_last(out), "")}
    numbers |= {f"loss at the end, seed {seed}": Number(end, "") for seed, end in enumerate(ends)}
    return Row({"level": "4", "steps": steps}, numbers)


def _end_of_itself(running: list[BaseProcess]) -> None:
    for process in running:
        process.join(START_S)


def _last(out: Path) -> float:
    return statistics.mean([row["round_loss"] for row in rows(out) if "round_loss" in row][-10:])


def _torchft(python: Path, folder: Path, steps: int, every: int) -> tuple[Found, float]:
    """The same kills of torchft's groups.  Returns what came of it, and its steps a second without a kill."""
    found = []
    for kills in (0, every):
        given = {"steps": steps, "every": kills, "replicas": REPLICAS, "rows": ROWS, "pause_s": PAUSE_S}
        command = [str(python), "-m", "benchmarks.elastic_peer", json.dumps(given), str(folder / f"torchft-{kills}")]
        with (folder / "said-torchft").open("a") as said:  # of each step several lines
            ran = subprocess.run(
                command, cwd=ROOT, check=True, stdout=subprocess.PIPE, stderr=said, text=True, timeout=1800.0
            )
        found.append(json.loads(ran.stdout.splitlines()[-1]))
    quiet, killed = found
    return Found(killed["seconds"], killed["rate"], killed["lost"]), quiet["rate"]


BENCHMARK = Benchmark(
    "elastic",
    "Replicas that are killed: seconds to the next step and goodput",
    measure,
    ("core/keeper.py", "core/members.py", "core/train", "core/checkpoint", "core/parallel/local.py",
     "benchmarks/elastic.py", "benchmarks/elastic_peer.py"),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="elastic"), sys.argv[1:]))
