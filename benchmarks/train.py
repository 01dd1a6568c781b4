"""Tokens per second and peak memory of one training step: ours beside transformers, DDP, FSDP2 and DeepSpeed.

1. Ours makes the initial weights and writes them as a Hugging Face folder, from which every peer starts.
2. A turn is a fresh process group of one contender (`benchmarks.contenders`). All contenders of a setting (size, ranks,
   threads, precision) take their turns one after the other, A B C A B C ..., so that what the machine does meanwhile
   falls on all of them.
3. After the first round the losses of its first three steps are compared; a contender that does not train as ours does
   ends the benchmark. Memory is accounted in that round too.
4. The figure is the median over all timed steps of all rounds.

Not here: GPUs, and convergence beyond those three steps.
"""

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.contenders import SEED, Size, Turn
from benchmarks.result import Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import UserError, run_command
from core.models import save_pretrained
from core.models.decoder import Decoder, initialise
from core.precision import bf16_units

NUM_LOSSES = 3
TURN_LIMIT_S = 600

GPT2_124M = Size("GPT-2 124M", 50257, 768, num_layers=12, num_heads=12, rows=4, length=256)
SMALL = Size("8 x 256", 4096, 256, num_layers=8, num_heads=8, rows=16, length=256)
TINY = Size("2 x 64", 512, 64, num_layers=2, num_heads=2, rows=4, length=32)

ONE_PROCESS = {
    "fp32": ("ours", "transformers", "transformers, default malloc"),
    "bf16": ("ours", "transformers", "transformers, fp32 masters"),
}
OURS_ON_TWO = tuple(f"ours zero {z}" for z in (0, 1, 2, 3))
DEEPSPEED = tuple(f"DeepSpeed zero {z}" for z in (1, 2, 3))
ON_TWO = (*OURS_ON_TWO, "DDP", "FSDP2", *DEEPSPEED)


@dataclass(frozen=True)
class Setting:
    """What contenders have in common when they are compared."""

    size: Size
    num_ranks: int
    num_threads: int
    precision: str
    contenders: tuple[str, ...]
    num_rounds: int
    num_steps: int

    def case(self) -> dict[str, str | int]:
        return {
            "model": self.size.name,
            "ranks": self.num_ranks,
            "threads": self.num_threads,
            "precision": self.precision,
        }


def settings(quick: bool, full: bool, precisions: tuple[str, ...] = ("fp32", "bf16")) -> list[Setting]:
    """By default the small model with one thread a rank: a quarter of an hour on two cores.

    quick       seconds, to see that it runs
    full        also two threads, more rounds, and GPT-2 124M: hours on two cores
    precisions  those that the machine has arithmetic for
    """
    if quick:
        pair = [("ours", "transformers"), ("ours zero 0", "ours zero 2", "DDP", "DeepSpeed zero 2")]
        return [Setting(TINY, n + 1, 1, "fp32", names, 1, 3) for n, names in enumerate(pair)]
    found = []
    for size, rounds, steps in ((SMALL, 5, 4), (GPT2_124M, 3, 2)) if full else ((SMALL, 2, 5),):
        for precision in precisions:
            one = ONE_PROCESS[precision]
            found += [
                Setting(size, 1, threads, precision, one, rounds, steps) for threads in ((1, 2) if full else (1,))
            ]
            found.append(Setting(size, 2, 1, precision, ON_TWO, rounds, steps))
    return found


def measure(options: Options) -> Measured:
    deepspeed = _deepspeed_missing(options.peers_python)
    figures: list[Row] = []
    versions: dict[str, str] = {}
    has_bf16 = bf16_units(torch.device("cpu")) is not None
    precisions = ("fp32", "bf16") if has_bf16 else ("fp32",)
    with tempfile.TemporaryDirectory(prefix="train-benchmark-") as folder:
        for setting in settings(options.quick, options.full, precisions):
            weights = _initial_weights(setting.size, Path(folder))
            names = [c for c in setting.contenders if not (deepspeed and c in DEEPSPEED)]
            turns = _rounds(setting, names, weights, options)
            figures += [_row(setting, name, turns[name]) for name in names]
            for name in names:
                label = "peers' " if name in DEEPSPEED else ""
                versions |= {label + package: v for package, v in turns[name][0]["versions"].items()}
    notes = [
        "All contenders: same initial weights, batches, loss, AdamW (fused, in decay groups), clipping; no dropout.",
        "Processes: glibc malloc keeps what is freed (mallopt M_MMAP_MAX 0, M_TRIM_THRESHOLD 2 GiB, M_TOP_PAD 64 MiB: "
        "core.runtime.start), but for 'default malloc', a process as a user of transformers would have it.",
        f"Losses of the first {NUM_LOSSES} steps agree with ours to {TOLERANCE['fp32']:.0e} in fp32 and "
        f"{TOLERANCE['bf16']:.0e} in bf16, relative.",
        "bf16: transformers and DDP by autocast; FSDP2 and DeepSpeed with bf16 parameters and fp32 masters, as ours.",
        "peak: bytes of tensors during a step, accounted tensor by tensor, on the rank that needs most.",
    ]
    if not has_bf16:
        notes.append("bf16 was left out: this CPU has no bf16 arithmetic, so nobody would train in it here.")
    if deepspeed:
        notes.append(f"DeepSpeed was left out: {deepspeed}")
    return Measured(tuple(figures), tuple(targets(figures)), tuple(notes), versions)


def _deepspeed_missing(python: Path | None) -> str | None:
    """Why DeepSpeed cannot run; None when it can."""
    python = python or Path(sys.executable)
    if not python.exists():
        raise UserError(
            f"--peers-python {python} does not exist; give the interpreter of an environment with deepspeed"
        )
    probe = "import importlib.util as u; raise SystemExit(u.find_spec('deepspeed') is None)"
    if subprocess.run([python, "-c", probe], check=False).returncode == 0:
        return None
    return "the interpreter has no deepspeed (make a venv with torch, transformers and deepspeed: --peers-python)"


def _initial_weights(size: Size, folder: Path) -> Path:
    path = folder / f"{size.vocab_size}-{size.dim}"
    if not path.exists():
        model = Decoder(size.model())
        initialise(model, SEED)
        save_pretrained(model, size.model(), path)
    return path


def _rounds(setting: Setting, names: list[str], weights: Path, options: Options) -> dict[str, list[dict[str, Any]]]:
    """name -> what each round's turn found."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    console = Console(stderr=True)
    for index in range(setting.num_rounds):
        for name in names:
            turn = Turn(
                contender=name,
                precision=setting.precision,
                size=setting.size,
                num_ranks=setting.num_ranks,
                num_threads=setting.num_threads,
                num_warmup=2 if index else NUM_LOSSES,
                num_steps=setting.num_steps,
                account=index == 0,
                weights=str(weights),
            )
            python = options.peers_python if name in DEEPSPEED else None
            found[name].append(take_turn(turn, python or Path(sys.executable)))
            seconds = statistics.median(found[name][-1]["seconds"])
            console.print(f"round {index + 1} of {setting.num_rounds}: {setting.case()} {name}: {seconds:.3f} s a step")
        if index == 0:
            compare_losses(setting, {name: turns[0]["losses"] for name, turns in found.items()})
    return found


# Sums of the same terms in another order: fp32 rounds at 6e-8, and Adam's first steps, which divide a gradient by its
# own size, blow up what is noise in it; a step that is wrong (no decay, another clip) shows at 1e-4 and above.
# bf16 rounds logits and gradients at 2^-8, autocast other operators than ours: a tenth of that is seen.
TOLERANCE = {"fp32": 2e-5, "bf16": 1e-3}


def compare_losses(setting: Setting, losses: dict[str, list[float]]) -> None:
    """Raises UserError when a contender does not train as the first one does: then its speed means nothing."""
    first, *others = losses
    for name in others:
        difference = max(abs(a - b) / abs(a) for a, b in zip(losses[first], losses[name], strict=True))
        if not difference <= TOLERANCE[setting.precision]:
            raise UserError(
                f"{name} does not train as {first} does: {losses[name]} and {losses[first]} at {setting.case()}; "
                f"{difference:.1e} apart, where rounding is below {TOLERANCE[setting.precision]:.0e}; no result"
            )


def take_turn(turn: Turn, python: Path) -> dict[str, Any]:
    """Run one process group to its end.  Raises UserError, with what it last said, when it fails."""
    with tempfile.TemporaryDirectory(prefix="turn-") as name:
        folder, port = Path(name), _free_port()
        (folder / "turn.json").write_text(turn.to_json())
        ranks = []
        for rank in range(turn.num_ranks):
            arguments = [python, "-m", "benchmarks.contenders", folder / "turn.json", folder / f"{rank}.json"]
            with (folder / f"{rank}.log").open("w") as log:
                ranks.append(subprocess.Popen(arguments, env=_environment(turn, rank, port), stdout=log, stderr=log))
        late, failed = _wait(ranks)
        if failed is not None:
            said = (folder / f"{failed}.log").read_text().strip().splitlines()[-1:]
            what = f"has not ended after {TURN_LIMIT_S} s" if late else "failed"
            raise UserError(f"{turn.contender} at {turn.precision} {what} on rank {failed}: {' '.join(said)}")
        return json.loads((folder / "0.json").read_text())


def _wait(ranks: list[subprocess.Popen]) -> tuple[bool, int | None]:
    """Wait for all.  Returns (late, the first rank that failed or is late); that rank ends the others."""
    deadline = time.monotonic() + TURN_LIMIT_S
    try:
        while running := [rank for rank, process in enumerate(ranks) if process.poll() is None]:
            failed = [rank for rank, process in enumerate(ranks) if process.poll()]
            if failed:
                return False, failed[0]
            if time.monotonic() > deadline:
                return True, running[0]
            time.sleep(0.05)
        return False, next((rank for rank, process in enumerate(ranks) if process.returncode), None)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _free_port() -> int:
    """A free port below those that the kernel gives to outgoing connections: nobody takes it before the ranks do."""
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise UserError("100 ports from 20000 to 30000 are all taken; end what listens there")


def _environment(turn: Turn, rank: int, port: int) -> dict[str, str]:
    """That of one rank: as torchrun would set it, with the number of threads."""
    set_here = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": turn.num_ranks,
        "LOCAL_WORLD_SIZE": turn.num_ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": turn.num_threads,
        "DS_ACCELERATOR": "cpu",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    return os.environ | {name: str(value) for name, value in set_here.items()}


def _row(setting: Setting, name: str, turns: list[dict[str, Any]]) -> Row:
    seconds = [s for turn in turns for s in turn["seconds"]]
    tokens = setting.size.rows * setting.size.length
    numbers = {
        "throughput": Number(tokens / statistics.median(seconds), "tokens/s"),
        "best": Number(tokens / min(seconds), "tokens/s"),
        "step": Number(statistics.median(seconds), "s"),
        "peak": Number(turns[0]["accounted_peak_bytes"] / 2**20, "MiB"),
        "resident peak": Number(turns[0]["resident_peak_bytes"] / 2**20, "MiB"),
    }
    return Row(setting.case() | {"contender": name}, numbers)


def targets(figures: list[Row]) -> list[Target]:
    """Never slower than any; 1.3 x plain transformers on one process; 1.2 x DeepSpeed, level for level, on two."""
    groups: dict[str, dict[str, float]] = {}
    for row in figures:
        case = ", ".join(f"{v} {k}" if isinstance(v, int) else v for k, v in row.case.items() if k != "contender")
        groups.setdefault(case, {})[str(row.case["contender"])] = row.numbers["throughput"].value
    found = []
    for case, speeds in groups.items():
        ours = {name: speed for name, speed in speeds.items() if name.startswith("ours")}
        for name, speed in speeds.items():
            if name in ours:
                continue
            own = opponent(name)
            if own in ours:
                wanted = 1.3 if name == "transformers" else 1.2 if name in DEEPSPEED else 1.0
                found.append(Target(f"{own} / {name}, {case}", wanted, ours[own] / speed))
    return found


def opponent(name: str) -> str:
    """Which of ours does the same as a peer."""
    if name.startswith("DeepSpeed"):
        return name.replace("DeepSpeed", "ours")
    return {"DDP": "ours zero 0", "FSDP2": "ours zero 3"}.get(name, "ours")


MEASURES = (
    "core/train",
    "core/models",
    "core/nn",
    "core/optim",
    "core/parallel",
    "core/placement",
    "core/kernels",
    "core/comm",
    "core/precision.py",
    "core/runtime.py",
    "benchmarks/contenders.py",
    "benchmarks/train.py",
)
BENCHMARK = Benchmark("train", "One training step", measure, MEASURES)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="train"), sys.argv[1:]))
