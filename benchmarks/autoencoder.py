"""K-FAC and Hessian-free on the deep autoencoder of digits, beside tuned Adam: steps to Adam's loss of 1,000 steps.

The 8-layer autoencoder of Hinton and Salakhutdinov 2006, on which second-order optimizers are compared, in the size of
the 8 x 8 digits of UCI (Alpaydin and Kaynak 1998): 64-128-64-32-8-32-64-128-64, tanh, a linear code, a Bernoulli for
each pixel. All rows are one batch, so nothing but the optimizer differs. Each optimizer is tuned by as many short runs,
of a fifth of its steps; the best goes on to the whole length, by a cosine to a tenth of its rate (Hessian-free has
none). A step of K-FAC is one look at the model and one gradient; one of Hessian-free has up to `CG` products.
"""

import gzip
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.result import Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import run_command
from core.optim import KFAC, HessianFree
from core.optim.prediction import Drawing, Prediction, drawn_targets, mean_loss

DIGITS = Path(__file__).parent / "data" / "digits.csv.gz"
WIDTHS = (64, 128, 64, 32, 8, 32, 64, 128, 64)
CG = 100
SHARE = 5
"""A short run is one of this many parts of the whole."""


@dataclass(frozen=True)
class Contender:
    """steps: of the whole run; settings: of which each has a short run; train: (model, x, steps, setting) -> losses"""

    steps: int
    settings: tuple[dict[str, float], ...]
    train: Callable[[nn.Module, Tensor, int, dict[str, float]], list[float]]


def digits(rows: int | None = None) -> Tensor:
    """x[rows, 64] from 0 to 1."""
    lines = gzip.decompress(DIGITS.read_bytes()).decode().splitlines()[:rows]
    return torch.tensor([[float(v) for v in line.split(",")[:64]] for line in lines]) / 16


def autoencoder(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for index, (n_in, n_out) in enumerate(pairwise(WIDTHS)):
        linear = nn.Linear(n_in, n_out)
        nn.init.xavier_normal_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()] if index not in (3, len(WIDTHS) - 2) else [linear]
    return nn.Sequential(*layers)


def predicted(model: nn.Module, x: Tensor) -> Prediction:
    return Prediction(model(x), "x", "bernoulli")


def rate(step: int, steps: int, whole: int) -> float:
    """The cosine's factor of the rate, of a short run as at the begin of a whole one."""
    return 0.1 + 0.45 * (1 + math.cos(math.pi * step / whole)) if steps == whole else 1.0


def by_adam(model: nn.Module, x: Tensor, steps: int, setting: dict[str, float], whole: int) -> list[float]:
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=setting["lr"]), []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = setting["lr"] * rate(step, steps, whole)
        loss = mean_loss(predicted(model, x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def by_kfac(model: nn.Module, x: Tensor, steps: int, setting: dict[str, float], whole: int) -> list[float]:
    options: dict[str, Any] = {"damping": setting["damping"], "kl_clip": setting["kl_clip"], "inverse_every": 1}
    optimizer, losses = KFAC(model, lr=setting["lr"], **options), []

    def drawn(step: int) -> Tensor:
        made = predicted(model, x)
        return mean_loss(made, drawn_targets(made, x, Drawing(0, step, 0)))

    for step in range(steps):
        optimizer.param_groups[0]["lr"] = setting["lr"] * rate(step, steps, whole)
        optimizer.observe(lambda step=step: drawn(step), items=len(x))
        loss = mean_loss(predicted(model, x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def by_hessian_free(model: nn.Module, x: Tensor, steps: int, setting: dict[str, float], whole: int) -> list[float]:
    optimizer = HessianFree(model, damping=setting["damping"], cg_steps=int(setting["cg_steps"]))

    def closure() -> tuple[Tensor, Tensor]:
        made = predicted(model, x)
        return mean_loss(made, x), made.outputs

    return [float(optimizer.step(closure)) for _ in range(steps)]


def contenders(quick: bool) -> dict[str, Contender]:
    lengths = (20, 10, 5) if quick else (1000, 200, 60)
    adam = tuple({"lr": lr} for lr in (3e-4, 6e-4, 1e-3, 2e-3, 3e-3, 5e-3, 8e-3, 1.2e-2))
    kfac = tuple(
        {"lr": lr, "damping": damping, "kl_clip": clip}
        for lr in (0.1, 0.3) for damping in (1e-3, 1e-2) for clip in (1e-2, 1e-1)
    )  # fmt: skip
    free = tuple({"damping": d, "cg_steps": n} for d in (0.01, 0.1, 1.0, 10.0) for n in (CG // 2, CG))
    kept = slice(0, 2) if quick else slice(None)
    runs = (by_adam, by_kfac, by_hessian_free)
    return {
        name: Contender(steps, settings[kept], lambda *given, run=run, whole=steps: run(*given, whole))
        for name, steps, settings, run in zip(
            ("Adam", "K-FAC", "Hessian-free"), lengths, (adam, kfac, free), runs, strict=True
        )
    }


def measure(options: Options) -> Measured:
    x = digits(200 if options.quick else None)
    rows, losses = [], {}
    for name, contender in contenders(options.quick).items():
        begin = time.perf_counter()
        short = max(2, contender.steps // SHARE)
        best = min(contender.settings, key=lambda s: _end(contender.train(autoencoder(0), x, short, s)))
        tuned = time.perf_counter()
        losses[name] = contender.train(autoencoder(0), x, contender.steps, best)
        seconds = time.perf_counter() - tuned
        goal = min(losses["Adam"])
        reached = next((i for i, loss in enumerate(losses[name]) if loss <= goal), None)
        numbers = {
            "loss": Number(min(losses[name]), "nats a row"),
            "steps": Number(contender.steps, ""),
            "to Adam's loss": Number(contender.steps * 10 if reached is None else max(1, reached), "steps"),
            "seconds": Number(seconds, "s"),
            "seconds to Adam's loss": Number(seconds * 10 if reached is None else
                                             seconds * max(1, reached) / contender.steps, "s"),
            "tuning": Number(tuned - begin, "s"),
        }  # fmt: skip
        rows.append(Row({"optimizer": name, "setting": ", ".join(f"{k} {v:g}" for k, v in best.items())}, numbers))
        options.kept(rows[-1])
    targets = [
        Target(f"{most} / steps of {name} to Adam's loss", 1.0, most / row.numbers["to Adam's loss"].value)
        for name, most, row in zip(("K-FAC", "Hessian-free"), (200, 60), rows[1:])
    ]
    notes = (
        f"All {len(x)} rows are one batch; tuned by {len(contenders(options.quick)['Adam'].settings)} runs each, of "
        " a fifth of the steps. Where Adam's loss is not reached, ten times the run stands for it.",
    )
    return Measured(tuple(rows), () if options.quick else tuple(targets), notes)


def _end(losses: list[float]) -> float:
    return losses[-1] if math.isfinite(losses[-1]) else math.inf


BENCHMARK = Benchmark(
    "autoencoder",
    "Second-order optimizers: the deep autoencoder of digits",
    measure,
    ("benchmarks/autoencoder.py", "benchmarks/data", "core/optim"),
)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="autoencoder"), sys.argv[1:]))
