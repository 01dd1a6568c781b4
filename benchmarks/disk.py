"""A step of training from a disk, beside what bounds it, and beside DeepSpeed's.

The same GPT, batch and AdamW in fp32, activations recomputed by block, nothing clipped: with everything in memory, and
under Gemini in budgets of device and host that leave most of it on a disk, every step made durable. The two take their
steps in turn, and between them the drive is probed, past the page cache. A step can be no shorter than the larger of
the step in memory and

    bytes read / the drive's reading + bytes written / the drive's writing

with the bytes that were counted. All figures are medians.

DeepSpeed ZeRO-Infinity keeps masters and optimizer state on the same drive, and makes nothing durable; it runs in a
process of --peers-python, which needs deepspeed beside what this project needs, a compiler, and libaio with its headers
(CPATH, LIBRARY_PATH where they are not the system's), since it compiles its operator of asynchronous I/O at first use.
"""

import gc
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.offload import Shape, Training, Turn, attempt, gemini, plain
from benchmarks.result import ROOT, Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import UserError, run_command
from core.gemini.direct import drive_speed
from core.runtime import start

MIB = 2**20
QUICK = Shape("GPT-2", 2, 128, 2, 512, 128)
SHAPE = Shape("GPT-2", 12, 768, 12, 8192, 512)
OURS, PEER, IN_MEMORY = "Gemini on a disk", "DeepSpeed ZeRO-Infinity", "in memory"
BYTES_PER_PARAMETER = 16
"""Parameter, gradient and AdamW's two moments, all in fp32."""


def turn_of(shape: Shape, contender: str, folder: Path, num_steps: int, length: int) -> Turn:
    """Device and host have a fifth and five eighths of the model data."""
    whole = BYTES_PER_PARAMETER * shape.num_parameters()
    disk = folder / contender.replace(" ", "-")
    disk.mkdir()
    return Turn(contender, shape, 1, length, num_steps, whole // 5, disk=str(disk), host_bytes=5 * whole // 8)


def beside_one_another(memory: Training, ours: Training, folder: Path, num_steps: int) -> list[Row]:
    """Steps in turn, and the drive between them."""
    assert ours.gemini is not None
    disk = ours.gemini.parallel.disk
    assert disk is not None
    seconds: dict[str, list[float]] = {IN_MEMORY: [], OURS: []}
    drive, moved = [], []
    memory.timed()
    ours.timed()
    for _ in range(num_steps):
        drive.append(drive_speed(folder))
        before = disk.file.read_bytes, disk.file.written_bytes
        seconds[OURS].append(ours.timed())
        moved.append((disk.file.read_bytes - before[0], disk.file.written_bytes - before[1]))
        seconds[IN_MEMORY].append(memory.timed())
    read, written = (statistics.median(values) for values in zip(*moved, strict=True))
    to, back = (statistics.median(values) for values in zip(*drive, strict=True))
    io_s = read / to + written / back
    step_s = {name: statistics.median(values) for name, values in seconds.items()}
    shape = {"model": memory.turn.shape.name, "tokens": memory.turn.length}
    return [
        Row({**shape, "contender": IN_MEMORY}, {"step": Number(step_s[IN_MEMORY], "s")}),
        Row(
            {**shape, "contender": OURS},
            {
                "step": Number(step_s[OURS], "s"),
                "bound": Number(max(io_s, step_s[IN_MEMORY]), "s"),
                "planned": Number(ours.plan.step_s, "s"),
                "read": Number(read / MIB, "MiB"),
                "written": Number(written / MIB, "MiB"),
                "drive reads": Number(to / MIB, "MiB/s"),
                "drive writes": Number(back / MIB, "MiB/s"),
                "on the device": Number(ours.gemini.device_peak_bytes / MIB, "MiB"),
                "on the host": Number(ours.gemini.parallel.host.peak_bytes / MIB, "MiB"),
            },
        ),
    ]


def measure(options: Options) -> Measured:
    shape, num_steps, length = (QUICK, 3, 16) if options.quick else (SHAPE, 9, 64)
    runs = ROOT / "runs"
    runs.mkdir(exist_ok=True)
    with start("cpu"), tempfile.TemporaryDirectory(prefix="disk-", dir=runs) as name:
        folder = Path(name)
        mine = turn_of(shape, OURS, folder, num_steps, length)
        ours, memory = gemini(mine), plain(Turn(IN_MEMORY, shape, 1, length, num_steps, None))
        rows = beside_one_another(memory, ours, folder, num_steps)
        assert ours.gemini is not None
        ours.gemini.close()
        del ours, memory
        gc.collect()
        step, bound = (rows[1].numbers[key].value for key in ("step", "bound"))
        targets = [Target("the step's bound / the step", 1 / 1.15, bound / step)]
        if options.peers_python is None:
            notes = [f"{PEER} is left out: --peers-python names an interpreter that has it."]
            return Measured(tuple(rows), tuple(targets), tuple(notes))
        try:
            ran = attempt(turn_of(shape, PEER, folder, num_steps, length), options.peers_python)
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
