"""A step of training from a disk, beside what bounds it, and beside DeepSpeed's.

The same GPT, batch and AdamW in fp32, activations recomputed by block, nothing clipped: with everything in memory, and
under Gemini in budgets of device and host that leave most of it on a disk, every step made durable. Contenders take
turns of a few steps, and between turns the drive is probed, past the page cache. A turn on the disk ends when its last
step is durable, so nothing of it is written in the time of another; the seconds of a step are a turn's by its steps.
The disk has two turns in each round: with updates that begin beside the backward, and with all at the step's end. A
step can be no shorter than the larger of the step in memory and

    bytes read / the drive's reading + bytes written / the drive's writing

with the bytes that were counted. All figures are medians over rounds.

DeepSpeed ZeRO-Infinity keeps masters and optimizer state on the same drive, and makes nothing durable; it runs in a
process of --peers-python, which needs deepspeed beside what this project needs, a compiler, and libaio with its headers
(CPATH, LIBRARY_PATH where they are not the system's), since it compiles its operator of asynchronous I/O at first use.
"""

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.offload import Shape, Training, Turn, attempt, gemini, plain
from benchmarks.result import ROOT, Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import UserError, run_command
from core.gemini.direct import drive_speed
from core.runtime import start

MIB = 2**20
QUICK = Shape("GPT-2", 4, 128, 2, 128, 128)
SHAPE = Shape("GPT-2", 12, 768, 12, 2048, 512)
"""No parameter is larger than an MLP's matrix: places are as large as the largest."""
OURS, AT_END, PEER, IN_MEMORY = (
    *("Gemini on a disk", "Gemini on a disk, updates at the end"),
    *("DeepSpeed ZeRO-Infinity", "in memory"),
)
BYTES_PER_PARAMETER = 16
"""Parameter, gradient and AdamW's two moments, all in fp32."""


def turn_of(shape: Shape, contender: str, folder: Path, num_steps: int, length: int) -> Turn:
    """Device and host have a fifth and five eighths of the model data."""
    whole = BYTES_PER_PARAMETER * shape.num_parameters()
    disk = folder / contender.replace(" ", "-")
    disk.mkdir()
    return Turn(contender, shape, 1, length, num_steps, whole // 5, disk=str(disk), host_bytes=5 * whole // 8)


@dataclass
class Found:
    """Of each turn: seconds of a step, and bytes read and written in it."""

    seconds: list[float] = field(default_factory=list)
    moved: list[tuple[float, float]] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        return statistics.median(self.seconds)


def timed(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def turn_on_disk(ours: Training, early: bool, num_steps: int, found: Found) -> None:
    assert ours.gemini is not None
    disk = ours.gemini.parallel.disk
    assert disk is not None
    ours.early = early
    before = disk.moved_bytes
    seconds = sum(ours.timed() for _ in range(num_steps)) + timed(ours.gemini.confirm)
    moved = disk.moved_bytes[0] - before[0], disk.moved_bytes[1] - before[1]
    found.seconds.append(seconds / num_steps)
    found.moved.append((moved[0] / num_steps, moved[1] / num_steps))


def beside_one_another(memory: Training, ours: Training, folder: Path, rounds: int, num_steps: int) -> list[Row]:
    """Turns of steps, and the drive between them."""
    assert ours.gemini is not None
    found = {name: Found() for name in (IN_MEMORY, OURS, AT_END)}
    drive = []
    memory.timed()
    turn_on_disk(ours, True, 1, Found())
    for _ in range(rounds):
        for name in (OURS, AT_END):
            drive.append(drive_speed(folder))
            turn_on_disk(ours, name == OURS, num_steps, found[name])
        found[IN_MEMORY].seconds.append(sum(memory.timed() for _ in range(num_steps)) / num_steps)
    to, back = (statistics.median(values) for values in zip(*drive, strict=True))
    shape = {"model": memory.turn.shape.name, "tokens": memory.turn.length}
    memory_s = found[IN_MEMORY].step_s
    rows = [Row({**shape, "contender": IN_MEMORY}, {"step": Number(memory_s, "s")})]
    for name in (OURS, AT_END):
        read, written = (statistics.median(values) for values in zip(*found[name].moved, strict=True))
        numbers = {
            "step": Number(found[name].step_s, "s"),
            "bound": Number(max(read / to + written / back, memory_s), "s"),
            "planned": Number(ours.plan.step_s, "s"),
            "read": Number(read / MIB, "MiB"),
            "planned to be read": Number(ours.plan.disk_read_bytes / MIB, "MiB"),
            "written": Number(written / MIB, "MiB"),
            "drive reads": Number(to / MIB, "MiB/s"),
            "drive writes": Number(back / MIB, "MiB/s"),
            "on the device": Number(ours.gemini.device_peak_bytes / MIB, "MiB"),
            "on the host": Number(ours.gemini.parallel.host.peak_bytes / MIB, "MiB"),
        }
        rows.append(Row({**shape, "contender": name}, numbers))
    return rows


def measure(options: Options) -> Measured:
    shape, rounds, num_steps, length = (QUICK, 2, 1, 16) if options.quick else (SHAPE, 5, 4, 64)
    runs = ROOT / "runs"
    runs.mkdir(exist_ok=True)
    with start("cpu"), tempfile.TemporaryDirectory(prefix="disk-", dir=runs) as name:
        folder = Path(name)
        mine = turn_of(shape, OURS, folder, num_steps, length)
        ours, memory = gemini(mine), plain(Turn(IN_MEMORY, shape, 1, length, num_steps, None))
        rows = beside_one_another(memory, ours, folder, rounds, num_steps)
        assert ours.gemini is not None
        ours.gemini.close()
        del ours, memory
        gc.collect()
        step, bound = (rows[1].numbers[key].value for key in ("step", "bound"))
        targets = [
            Target("the step's bound / the step", 1 / 1.15, bound / step),
            Target("the step with updates at the end / beside the backward", 1.0, rows[2].numbers["step"].value / step),
        ]
        if options.peers_python is None:
            notes = [f"{PEER} is left out: --peers-python names an interpreter that has it."]
            return Measured(tuple(rows), tuple(targets), tuple(notes))
        try:
            ran = attempt(turn_of(shape, PEER, folder, rounds * 2, length), options.peers_python)
        except UserError as failure:
            return Measured(tuple(rows), tuple(targets), (f"{PEER} did not run: {failure}",))
        assert ran is not None
        theirs = statistics.median(ran.seconds)
        row = Row({**rows[0].case, "contender": PEER}, {"step": Number(theirs, "s")})
        targets.append(Target(f"{PEER}'s step / ours", 1.9, theirs / step))
        return Measured((*rows, row), tuple(targets))


MEASURES = ("core/gemini", "core/trace", "core/optim", "core/models", "benchmarks/offload.py", "benchmarks/disk.py")
BENCHMARK = Benchmark("disk", "Training from a disk", measure, MEASURES)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="disk"), sys.argv[1:]))
