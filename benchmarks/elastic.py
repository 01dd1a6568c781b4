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

Where level 4 ends, on rows that are in no batch: runs of seeds that draw the model's values, the data and the moments
of kills; the same seeds undisturbed; and undisturbed with as many steps fewer as samples were lost. Their rate is a
tenth of the other runs', at which undisturbed seeds are the last figure: the outer optimizer takes 7 times (eta / (1 -
mu)) the mean way, more than is good at that rate, and where a run ends is a matter of chance.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from ctypes import c_double
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from benchmarks.result import ROOT, Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.checkpoint import CheckpointConfig, complete_steps
from core.config import run_command
from core.optim.build import OptimConfig
from core.optim.schedule import ScheduleConfig
from core.parallel.local import LocalTrainingConfig
from core.train import TrainConfig
from core.train.config import ElasticConfig
from tests.support.elastic import (
    ROWS,
    Task,
    config,
    dealt_out,
    die_and_join,
    pause,
    replica,
    rows,
    store,
    wait_for_step,
)

PAUSE_S = 0.02
START_S = 120.0
REPLICAS = 3
SAVED_EVERY, KEPT_EVERY, ROUND = 5, 2, 5
RATE = 1e-3
KILLED, UNDISTURBED = "held-out loss with kills", "held-out loss undisturbed"


class Found(NamedTuple):
    """Of a run with kills: seconds from each to the next step, steps a second, samples lost."""

    seconds: list[float]
    rate: float
    lost: int


def measure(options: Options) -> Measured:
    steps, every = (18, 6) if options.quick else (150, 10)
    notes, figures, found = [], [], dict[str, Found]()
    begins_s, torch_s = _process_start("tests.support.elastic"), _process_start("torch, torch.distributed")
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
        ends = _ends(folder, *((30, (10,), 1) if options.quick else (400, range(10, 372, 19), 3)))
        figures.append(ends)
        options.kept(ends)
    starts = {"to start and to import": Number(begins_s, "s"), "of it Python and torch": Number(torch_s, "s")}
    figures.append(Row({"level": "a process"}, starts))
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
        Target(
            "level 4 ends within the spread of seeds: the mean with kills is not above the highest without",
            1.0,
            ends.numbers[f"{UNDISTURBED}, highest"].value / ends.numbers[f"{KILLED}, mean"].value,
        ),
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


def _process_start(imports: str) -> float:
    """The least seconds in which a process has started and imported these modules."""
    seconds = list[float]()
    for _ in range(2):
        begin = time.monotonic()
        subprocess.run([sys.executable, "-c", f"import {imports}"], check=True, cwd=ROOT)
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


def _ends(folder: Path, steps: int, kills: Sequence[int], seeds: int) -> Row:
    """Where level 4 ends, by seed."""
    killed, undisturbed, fewer, fast = list[float](), list[float](), list[float](), list[float]()
    lost = 0
    for seed in range(seeds):
        out = folder / f"ends-kills-{seed}"
        killed.append(_end_of(out, steps, seed, kills))
        lost += _lost_of_rounds(out)
    as_many = ROUND * round(steps * (1 - lost / (seeds * steps * ROWS)) / ROUND)
    for seed in range(seeds):
        undisturbed.append(_end_of(folder / f"ends-{seed}", steps, seed))
        fewer.append(_end_of(folder / f"ends-fewer-{seed}", as_many, seed))
        fast.append(_end_of(folder / f"ends-fast-{seed}", steps, seed, rate=10 * RATE))
    numbers = {}
    as_many_samples, ten_times = f"{UNDISTURBED}, as many samples", f"{UNDISTURBED}, ten times the rate"
    for name, ends in ((KILLED, killed), (UNDISTURBED, undisturbed), (as_many_samples, fewer), (ten_times, fast)):
        numbers |= {
            f"{name}, lowest": Number(min(ends), ""),
            f"{name}, mean": Number(statistics.mean(ends), ""),
            f"{name}, highest": Number(max(ends), ""),
        }
    for name, ends in ((UNDISTURBED, undisturbed), (as_many_samples, fewer)):
        ratio = statistics.geometric_mean([with_kills / end for with_kills, end in zip(killed, ends, strict=True)])
        numbers[f"{KILLED} over {name}, seed by seed"] = Number(ratio, "")
    numbers |= {"samples lost": Number(lost / seeds, ""), "steps with as many samples": Number(float(as_many), "")}
    return Row({"level": "4", "kills": len(kills), "steps": steps, "seeds": seeds}, numbers)


def _end_of(out: Path, steps: int, seed: int, kills: Sequence[int] = (), rate: float = RATE) -> float:
    kept = store()
    optim = OptimConfig(lr=rate, schedule=ScheduleConfig(warmup_steps=2))
    local, saved = LocalTrainingConfig(every=ROUND), CheckpointConfig(every=0)
    given = config(out, kept.port, steps, seed=seed, optim=optim, local=local, checkpoint=saved)
    task = Task(dropout=0.0, steep=0.4, seeded=True)
    die_and_join(given, out.parent / f"said-{out.name}", task, REPLICAS, kills, START_S)
    return json.loads((out / "summary.json").read_text())["held_out"]


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
