"""`llm scaling RUN...`: the scaling law of runs that ended, and what a budget should train by it."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from apps.llm.corpus import DataConfig
from apps.llm.laws import LEAST_RUNS, LEAST_SIZES, Fit, Law, fit
from apps.llm.model import find_model
from core.config import UserError, parse
from core.data import RampConfig
from core.data.ramp import BatchSize
from core.files import save_figure
from core.metrics import read_metrics
from core.models.decoder import DecoderConfig, decoder_without_memory
from core.optim.roles import role_of

NOT_OF_THE_DATA = ("global_batch", "ramp", "cache", "on_error")
"""Fields of `data` in which runs of one law may differ."""
TAIL = 0.1
"""Share of a run's steps, its last, whose mean is its training loss."""
CONSTANTS = ("E", "A", "B", "alpha", "beta")


@dataclass(frozen=True)
class ScalingConfig:
    """Fit loss = E + A / N^alpha + B / D^beta over runs of megalith llm pretrain."""

    ESSENTIAL: ClassVar[tuple[str, ...]] = ("runs", "loss", "budget", "draw", "json")

    runs: tuple[Path, ...] = ()
    """folders of runs that ended, of the same data; they may stand without --runs before the first option"""
    loss: Literal["heldout", "train"] = "heldout"
    """held-out loss at the end of a run; or training loss, the mean of its last tenth"""
    budget: float | None = None
    """FLOPs, as 6 x parameters x tokens: say what they should train"""
    samples: int = 400
    """fits to losses drawn anew, of which the intervals are"""
    seed: int = 0
    """of those draws"""
    draw: Path | None = None
    """draw the runs and the law to this PNG"""
    json: bool = False
    """print all as JSON"""

    def __post_init__(self) -> None:
        if self.samples < 20:
            raise UserError(f"samples={self.samples}; an interval needs at least 20")
        if self.budget is not None and not 1 <= self.budget < math.inf:
            raise UserError(f"budget={self.budget}; give FLOPs, a number that is at least 1")
        if self.draw is not None and self.draw.suffix != ".png":
            raise UserError(f"draw={self.draw}; the picture is a PNG, give a name that ends in .png")


class Run(NamedTuple):
    """parameters: without embeddings and head; tokens: that it learned from, again in each epoch; loss: nats a token"""

    folder: Path
    parameters: int
    tokens: int
    loss: float


def main(argv: list[str]) -> int:
    folders = list(takewhile(lambda word: not word.startswith("-"), argv))
    given = ["--runs", *folders, *argv[len(folders) :]] if folders else argv
    config = parse({"default": ScalingConfig}, given, "megalith llm scaling", default="default")
    runs = read_runs(config.runs, config.loss)
    parameters, tokens, losses = np.array([run[1:] for run in runs], dtype=np.float64).T
    found = fit(parameters, tokens, losses, config.samples, config.seed)
    picture = None if config.draw is None else draw(config.draw, runs, found, config.budget)
    if config.json:
        print(json.dumps(as_json(config, runs, found), indent=1))
        return 0
    show(config, runs, found)
    if picture is not None:
        print(picture)
    return 0


# --- runs -------------------------------------------------------------------------------------------------------------


def read_runs(folders: Sequence[Path], loss: Literal["heldout", "train"]) -> list[Run]:
    """Raises UserError for a folder of no run that ended, for runs of different data, and for too few of them."""
    if twice := [folder for at, folder in enumerate(folders) if folder.resolve() in map(Path.resolve, folders[:at])]:
        raise UserError(f"{twice[0]} is given twice; give each run once")
    runs, first = [], None
    for folder in folders:
        model = find_model(folder)
        if not model.is_run:
            raise UserError(f"{folder} is a Hugging Face folder, whose training is not known; give folders of runs")
        described = json.loads((folder / "config.json").read_text())
        if not {"data", "steps"} <= described.keys():
            raise UserError(f"{folder} is no run of megalith llm pretrain; give folders of such runs")
        data = _data_of(folder, described, model.config)
        first = first or (folder, data)
        _require_alike(*first, folder, data)
        ended = _summary(folder, described)
        rows = BatchSize(described["data"]["global_batch"], RampConfig(**described["data"].get("ramp", {})))
        tokens = rows.rows_before(described["steps"]) * described["data"]["sequence_length"]
        runs.append(Run(folder, num_parameters(folder, model.config), tokens, _loss(folder, ended, loss)))
    _require_enough(runs)
    return runs


def num_parameters(folder: Path, model: DecoderConfig) -> int:
    """Those beside embeddings and head (Kaplan et al. 2020, arXiv:2001.08361, section 1.3).

    Raises UserError for a model with experts.
    """
    if model.moe.num_experts:
        raise UserError(f"{folder} is of a model with experts, for which this law has no N; give runs without")
    named = decoder_without_memory(model).named_parameters()
    return sum(p.numel() for name, p in named if role_of(name, p.shape) not in ("embedding", "head"))


def _data_of(folder: Path, described: dict[str, Any], model: DecoderConfig) -> dict[str, Any]:
    """What two runs must have alike for their losses to be compared."""
    if "source" in described:
        raise UserError(f"{folder} is a run of megalith llm finetune, which began with a trained model; leave it out")
    usual = {item.name: getattr(DataConfig(), item.name) for item in fields(DataConfig)}
    data = {f"data.{name}": described["data"].get(name, value) for name, value in usual.items()
            if name not in NOT_OF_THE_DATA}  # fmt: skip
    return data | {"model.causal": model.causal}


def _require_alike(first: Path, its: dict[str, Any], folder: Path, own: dict[str, Any]) -> None:
    for name, value in its.items():
        if _plain(own[name]) != _plain(value):
            raise UserError(
                f"{first} has {name}={value} and {folder} {own[name]}: losses of different data are of no law; give "
                "runs of the same"
            )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _summary(folder: Path, described: dict[str, Any]) -> dict[str, Any]:
    path = folder / "summary.json"
    try:
        found = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise UserError(f"{path} cannot be read ({error}); leave this run out") from None
    if found.get("status") != "complete" or found.get("step") != described["steps"]:
        at = f"is at step {found['step']} of {described['steps']}" if "step" in found else "has no summary.json"
        raise UserError(f"{folder} {at}: the run did not end, and its rate did not decay; continue it with --resume, "
                        "or leave it out")  # fmt: skip
    return found


def _loss(folder: Path, ended: dict[str, Any], which: Literal["heldout", "train"]) -> float:
    if which == "heldout":
        found = ended.get("heldout_loss")
        if found is None:
            raise UserError(f"{folder} held no text out (data.heldout_fraction), so it has no held-out loss; give "
                            "--loss train")  # fmt: skip
    else:
        losses = [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if row.get("loss") is not None]
        tail = losses[-max(1, round(TAIL * len(losses))) :]
        found = sum(tail) / len(tail) if tail else math.nan
    if not 0 < found < math.inf:
        raise UserError(f"{folder} has a loss of {found}; give runs whose loss is a positive number")
    return float(found)


def _require_enough(runs: Sequence[Run]) -> None:
    if len(runs) < LEAST_RUNS:
        raise UserError(
            f"{len(runs)} runs, and a law of five constants is fitted to at least {LEAST_RUNS}; give more folders of "
            "runs of megalith llm pretrain"
        )
    for what, option in (("parameters", "--model.dim"), ("tokens", "--steps")):
        sizes = {getattr(run, what) for run in runs}
        if len(sizes) < LEAST_SIZES:
            raise UserError(
                f"the runs have {len(sizes)} numbers of {what}, and a law needs at least {LEAST_SIZES}; add runs with "
                f"another {option}"
            )
    logs = np.log([[run.parameters, run.tokens] for run in runs])
    if abs(np.corrcoef(logs.T)[0, 1]) > 0.999:
        raise UserError(
            "in these runs the tokens follow from the parameters, so that what either does is not told apart; add runs "
            "of a model with other --steps"
        )


# --- what is printed --------------------------------------------------------------------------------------------------


def _told(found: Fit, name: str, flops: float | None = None) -> dict[str, float]:
    value = getattr(found.law if flops is None else found.law.best(flops), name)
    low, high = found.interval(name, flops)
    return {"value": value, "low": low, "high": high}


def as_json(config: ScalingConfig, runs: Sequence[Run], found: Fit) -> dict[str, Any]:
    content: dict[str, Any] = {
        "loss": config.loss,
        "runs": [run._asdict() | {"folder": str(run.folder), "fitted": found.law(*run[1:3])} for run in runs],
        "law": {name: _told(found, name) for name in CONSTANTS},
    }
    if config.budget is not None:
        content["budget"] = {"flops": config.budget} | {
            name: _told(found, name, config.budget) for name in ("parameters", "tokens", "loss")
        }
    return content


def show(config: ScalingConfig, runs: Sequence[Run], found: Fit) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    table = Table("run", "parameters", "tokens", "loss", "the law's", "off", title=f"{len(runs)} runs")
    for run in sorted(runs, key=lambda run: (run.parameters, run.tokens)):
        law = found.law(run.parameters, run.tokens)
        off = f"{run.loss / law - 1:+.2%}"
        table.add_row(str(run.folder), f"{run.parameters:,}", f"{run.tokens:,}", f"{run.loss:.4f}", f"{law:.4f}", off)
    console.print(table)
    console.print("loss = E + A / N^alpha + B / D^beta; N parameters without embeddings and head, D tokens")
    for name in CONSTANTS:
        console.print(f"{name:5} {_in_words(_told(found, name))}")
    if config.budget is None:
        return
    best = {name: _told(found, name, config.budget) for name in ("parameters", "tokens", "loss")}
    console.print(f"{config.budget:.3g} FLOPs = 6 N D should train")
    for name, told in best.items():
        console.print(f"  {name:10} {_in_words(told)}")
    for name in ("parameters", "tokens"):
        least, most = min(getattr(run, name) for run in runs), max(getattr(run, name) for run in runs)
        if not least <= best[name]["value"] <= most:
            console.print(f"the runs had {least:,} to {most:,} {name}: what is beyond, the law only guesses")


def _in_words(told: dict[str, float]) -> str:
    return f"{told['value']:.4g}   (95 %: {told['low']:.4g} to {told['high']:.4g})"


def draw(png: Path, runs: Sequence[Run], found: Fit, flops: float | None) -> Path:
    """Left losses against tokens, a colour a size of model, with the law; right the best loss against FLOPs."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    few, many = min(run.tokens for run in runs), max(run.tokens for run in runs)
    tokens = np.geomspace(few, many, 60)
    for size in sorted({run.parameters for run in runs}):
        own = sorted((run.tokens, run.loss) for run in runs if run.parameters == size)
        (line,) = left.plot(tokens, [found.law(size, d) for d in tokens], linewidth=1)
        left.plot(*zip(*own, strict=True), "o", color=line.get_color(), markersize=5, label=f"{size:,}")
    left.set(xlabel="tokens", ylabel="loss, nats a token", xscale="log", yscale="log")
    left.legend(title="parameters", frameon=False, fontsize=8)
    spent = [6 * run.parameters * run.tokens for run in runs]
    budgets = np.geomspace(min(spent), max([*spent, flops or 0]), 60)
    bounds = [found.interval("loss", float(budget)) for budget in budgets]
    right.plot(spent, [run.loss for run in runs], "o", color="#555555", markersize=4, label="runs")
    right.plot(budgets, [_best_loss(found.law, budget) for budget in budgets], color="#30638e", label="the best")
    right.fill_between(budgets, *zip(*bounds, strict=True), color="#30638e", alpha=0.2)
    if flops is not None:
        right.axvline(flops, color="#d1495b", linewidth=1, label="budget")
    right.set(xlabel="FLOPs = 6 N D", xscale="log", yscale="log")
    right.legend(frameon=False, fontsize=8)
    save_figure(figure, png, 150)
    return png


def _best_loss(law: Law, flops: float) -> float:
    return law.best(float(flops)).loss
