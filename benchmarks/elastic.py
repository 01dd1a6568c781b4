"""Seconds from a kill by -9 to the next step, and goodput under a kill every n steps, by what is done about a loss.

    level 1   the run starts again from its last checkpoint, of every 5 steps
    level 3   the replica that was killed is dropped, the rest repeat its step, and another joins (`core.train.elastic`)

Goodput is the share of an undisturbed run's steps a second. The model is that of the tests, in fp64 on gloo, each of
whose microbatches takes at least 20 ms; replicas are forks of one process, so that imports do not count, which level 1
would pay for at each kill. Samples lost are rows of the batch that no replica had in a step, or two had.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.result import Measured, Number, Row
from benchmarks.run import Benchmark, Options, main
from core.checkpoint import CheckpointConfig, complete_steps
from core.config import run_command
from tests.support.elastic import ROWS, config, dealt_out, fork, pause, replica, rows, store, train, wait_for_step

PAUSE_S = 0.02
START_S = 120.0
REPLICAS = 3
SAVED_EVERY = 5


def measure(options: Options) -> Measured:
    steps, every = (18, 6) if options.quick else (200, 10)
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
        found = [_elastic(Path(folder, "3"), steps, every), _restarted(Path(folder, "1"), steps, every)]
        undisturbed = _undisturbed(Path(folder, "0"), steps)
    figures = []
    for level, (kills, rate, lost) in zip((3, 1), found, strict=True):
        numbers = {
            "longest from a kill to the next step": Number(max(kills), "s"),
            "mean from a kill to the next step": Number(sum(kills) / len(kills), "s"),
            "goodput": Number(rate / undisturbed, ""),
        }
        if lost is not None:
            numbers["samples lost"] = Number(float(lost), "")
        figures.append(Row({"level": level, "a kill every": every, "steps": steps}, numbers))
        options.kept(figures[-1])
    return Measured(tuple(figures))


def _taken(out: Path) -> int:
    """Steps from the first to the last that is in the log."""
    return rows(out)[-1]["step"] - 1


def _undisturbed(out: Path, steps: int) -> float:
    kept = store()
    given = config(out, kept.port, steps, REPLICAS)
    all_of_them = [replica(given, out.parent / "said", pause(PAUSE_S)) for _ in range(REPLICAS)]
    wait_for_step(out, 1, START_S)
    begin = time.monotonic()
    for process in all_of_them:
        process.join()
    return _taken(out) / (time.monotonic() - begin)


def _elastic(out: Path, steps: int, every: int) -> tuple[list[float], float, int]:
    kept, seconds = store(), list[float]()
    given = config(out, kept.port, steps, 2)
    running = [replica(given, out.parent / "said", pause(PAUSE_S)) for _ in range(REPLICAS)]
    wait_for_step(out, 1, START_S)
    begin = time.monotonic()
    try:
        for step in range(every, steps, every):
            wait_for_step(out, step, START_S)
            alive = [process for process in running if process.is_alive()]
            alive[0].kill()
            seconds.append(wait_for_step(out, rows(out)[-1]["step"] + 1, START_S))
            running.append(replica(given, out.parent / "said", pause(PAUSE_S)))
        wait_for_step(out, steps, START_S)
        rate = _taken(out) / (time.monotonic() - begin)
    finally:
        for process in running:
            process.join(5.0)
            process.kill()
    lost = sum(len(set(range(ROWS)) ^ set(dealt_out(row))) for row in rows(out))
    return seconds, rate, lost


def _restarted(out: Path, steps: int, every: int) -> tuple[list[float], float, None]:
    seconds, begin = list[float](), None
    process, resume = None, None
    for step in (*range(every, steps, every), steps):
        given = config(out, None, steps, resume=resume, checkpoint=CheckpointConfig(every=SAVED_EVERY))
        process = fork.Process(target=_train, args=(given, out.parent / "said"))
        reached = rows(out)[-1]["step"] if rows(out) else 0
        started = time.monotonic()
        process.start()
        time.sleep(0.05)
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
    return seconds, _taken(out) / (time.monotonic() - begin), None


def _train(given: object, said: Path) -> None:
    sys.stdout = sys.stderr = said.open("a", buffering=1)
    # One rank computes what three replicas share: it takes the rows of all, so its pause is a third.
    train(given, pause(PAUSE_S / REPLICAS))  # pyright: ignore[reportArgumentType]
    os._exit(0)


BENCHMARK = Benchmark(
    "elastic",
    "Replicas that are killed: seconds to the next step and goodput",
    measure,
    ("core/members.py", "core/train", "core/checkpoint", "benchmarks/elastic.py"),
)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="elastic"), sys.argv[1:]))
