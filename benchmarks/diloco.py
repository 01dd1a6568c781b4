"""Local training beside torchft's DiLoCo: the same workers, rows, inner and outer optimizer, from the same weights.

    python -m benchmarks.run diloco --peers-python PYTHON      whose interpreter has torchft 0.2.0

Two workers train the demo's model in fp64 over gloo, each on its rows of random tokens, in rounds of ten steps whose
displacements an outer SGD with Nesterov's momentum takes. The inner optimizer is SGD or AdamW, without clipping, decay
or a schedule, so that nothing but rounding is left to differ in:

    difference   |ours - theirs| / |theirs - begin|, of all parameters together, behind the last round
    sent         bytes of a round that a worker sends by rings: as ours are counted, and as torchft is given them
    end          seconds of a step that ends a round, beyond those of another: the least of each

Ours runs a second time with displacements in 2 bits both ways and error feedback. torchft quantizes on GPUs alone.
"""

import json
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from apps.llm.loss import num_targets, token_loss
from apps.llm.recipes import RECIPES
from benchmarks.ranks import on_ranks
from benchmarks.result import ROOT, Measured, Missing, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.comm.volume import wire_share
from core.compose import parallelize
from core.config import run_command
from core.data.batches import rows_of_rank
from core.layout import full_tensor
from core.metrics import read_metrics
from core.models.decoder import Decoder, DecoderConfig, initialise
from core.models.plan import decoder_plan
from core.optim.adamw import AdamWConfig
from core.optim.build import build_optimizer
from core.optim.schedule import ScheduleConfig
from core.optim.sgd import SgdConfig
from core.parallel.local import LocalTrainingConfig
from core.runtime import start
from core.train import TrainConfig, fit

WORKERS, ROWS, LENGTH = 2, 4, 64
RATES = {"sgd": 0.1, "adamw": 1e-3}
ALIKE = 1e-6
"""The most that parameters may differ by."""


@dataclass(frozen=True)
class Given:
    """A run, of both; what is here goes to another interpreter as JSON."""

    optimizer: str
    recipe: str
    num_layers: int
    every: int
    rounds: int
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    @property
    def rate(self) -> float:
        return RATES[self.optimizer]

    @property
    def steps(self) -> int:
        return self.every * self.rounds

    @property
    def model(self) -> DecoderConfig:
        return replace(RECIPES[self.recipe]().model, num_layers=self.num_layers)


class Tokens:
    """Random rows, a function of the step."""

    def __init__(self, given: Given):
        self.vocab_size = given.model.vocab_size

    def batch(self, step: int, rank: int, num_ranks: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(self.vocab_size, (ROWS, LENGTH + 1), generator=generator)
        own = rows_of_rank(ROWS, rank, num_ranks)
        ids = ids[own.start : own.stop]
        return {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}


class Found(NamedTuple):
    """Seconds of each step, and bytes of a round that a worker sends."""

    seconds: list[float]
    a_round: float


def ours(given: Given, bits: Any, folder: Path, name: str) -> Found:
    """On every worker; the first leaves the weights before and after in the folder, the latter under a name."""
    plain: dict[str, Any] = {
        "clip_norm": None,
        "weight_decay": 0.0,
        "schedule": ScheduleConfig("constant", warmup_steps=0),
    }
    optim = {
        "sgd": lambda: SgdConfig(lr=given.rate, momentum=0.0, **plain),
        "adamw": lambda: AdamWConfig(lr=given.rate, betas=(0.9, 0.95), eps=1e-8, **plain),
    }[given.optimizer]()
    local = LocalTrainingConfig(
        every=given.every, outer_lr=given.outer_lr, outer_momentum=given.outer_momentum, bits=bits
    )
    out = folder / name
    config = TrainConfig(steps=given.steps, optim=optim, local=local, precision="fp64", device="cpu", out=out)
    with start("cpu", config.seed) as runtime, redirect_stdout(StringIO()):  # a line a step
        torch.set_num_threads(1)
        with torch.device("meta"):
            model = Decoder(given.model)
        mesh, plan = runtime.mesh(config.mesh, config.zero), decoder_plan(given.model, config.mesh)
        parallel = parallelize(model, mesh, config, plan, materialise=lambda made: initialise(made, config.seed))
        optimizer = build_optimizer(config.optim, parallel.masters)

        def save(path: Path) -> None:
            values = {n: full_tensor(master).detach().clone() for n, master in parallel.masters.items()}
            if runtime.leads:
                save_file(values, path)

        save(folder / "begin.safetensors")
        fit(parallel, optimizer, Tokens(given), token_loss, config, runtime, weight=num_targets)
        save(folder / f"{name}.safetensors")
        dist.barrier()
        rows = list(read_metrics(out / "metrics.jsonl"))
    sent = [row["sent_bytes_dp_replicate"] for row in rows if "sent_bytes_dp_replicate" in row]
    return Found([row["step_s"] for row in rows], sum(sent) / given.rounds)


def theirs(given: Given, python: Path, folder: Path) -> Found:
    command = [str(python), "-m", "benchmarks.diloco_peer", json.dumps(asdict(given)), str(folder)]
    with (folder / "said-torchft").open("w") as said:
        ran = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, stderr=said, text=True)
    told = json.loads(ran.stdout.splitlines()[-1])
    return Found(told["seconds"], wire_share("all_reduce", WORKERS) * told["a_round"])


def difference(folder: Path) -> float:
    begin, own, other = (load_file(folder / f"{name}.safetensors") for name in ("begin", "ours", "theirs"))
    apart, moved = (
        torch.cat([(one[name] - values[name]).flatten() for name in begin]).norm()
        for one, values in ((own, other), (other, begin))
    )
    return float(apart / moved)


def end_s(found: Found, every: int) -> float:
    """Seconds of a step that ends a round, beyond those of another one; the first round makes state."""
    steps = list(enumerate(found.seconds))[every:]
    ends, others = ([s for step, s in steps if ((step + 1) % every == 0) is wanted] for wanted in (True, False))
    return min(ends) - min(others)


def row(given: Given, by: str, found: Found, **more: Number) -> Row:
    numbers = {"sent": Number(found.a_round / 1e6, "MB/round"), "end": Number(end_s(found, given.every), "s")}
    return Row({"inner": given.optimizer, "by": by, "every": given.every, "rounds": given.rounds}, numbers | more)


def measure(options: Options) -> Measured:
    if options.peers_python is None:
        raise Missing("torchft: --peers-python names an interpreter that has it")
    sizes = ("debug", 2, 2, 2) if options.quick else ("demo", RECIPES["demo"]().model.num_layers, 10, 4)
    figures, apart, less = list[Row](), list[float](), list[float]()
    for optimizer in RATES:
        given = Given(optimizer, *sizes)
        with tempfile.TemporaryDirectory(prefix="diloco-") as name:
            folder = Path(name)
            own, few = (
                on_ranks(WORKERS, ours, given, bits, folder, called, preload=[__name__])[0]
                for bits, called in ((None, "ours"), (2, "few"))
            )
            other = theirs(given, options.peers_python, folder)
            apart.append(difference(folder))
        less.append(other.a_round / few.a_round)
        differs = Number(apart[-1], "")
        figures += [row(given, "ours", own, difference=differs), row(given, "ours, 2 bits", few)]
        figures.append(row(given, "torchft", other))
        for one in figures[-3:]:
            options.kept(one)
    targets = (
        Target(f"{ALIKE:g} / the largest difference of parameters behind the last round", 1.0, ALIKE / max(apart)),
        Target("torchft's bytes of a round / ours in 2 bits, fp64", 20.0, min(less)),
    )
    return Measured(tuple(figures), targets, NOTES)


NOTES = (
    "difference: of ours and torchft's parameters, over the way that torchft's have gone from where both began.",
    "Weights, displacements and messages are in fp64. torchft averages each parameter in a message of its own, waits "
    "for a quorum and a vote; its figures end with what `should_commit` says. Ours sends buckets.",
    "Workers share this machine's cores.",
)
BENCHMARK = Benchmark(
    "diloco",
    "Local training beside torchft's DiLoCo",
    measure,
    ("core/parallel/local.py", "core/parallel/coded_sum.py", "core/comm", "core/train", "benchmarks/diloco.py",
     "benchmarks/diloco_peer.py", "benchmarks/ranks.py"),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="diloco"), sys.argv[1:]))
