"""`fold plan`: whether a prediction fits before it is run, how it would be cut, and how long a sequence may be.

With a recipe of `fold train`, a training step instead: `apps.fold.training.plan`.
"""

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from apps.fold.model.config import MULTIMER_PRESETS, PRESETS, ESMFoldConfig, ModelConfig, MultimerConfig, released
from apps.fold.precision import PredictionPrecision, chosen_precision
from apps.fold.shares import Absent, plan_shares, rank_bytes
from apps.fold.subbatch import FoldJob, Plan, free_bytes, least_bytes, longest, plan_subbatches
from apps.fold.training import plan as training
from apps.fold.weights.esmfold import is_esmfold
from apps.fold.weights.source import read_weights
from core.config import UserError, parse, size_in_bytes, typed
from core.precision import Precision, compute_dtype
from core.runtime import device_kind, process_holding, tensors_within


@dataclass(frozen=True)
class FoldPlanConfig:
    length: int | None = None
    """residues; none: only the longest sequence that fits"""
    model: str = "model_1_ptm"
    """a released model (`megalith fold recipes`), or weights as `fold predict` takes them, ESMFold's among them"""
    rows: int | None = None
    """rows of the MSA; by default all that the model takes"""
    extra_rows: int | None = None
    """rows of the extra MSA; by default all that the model takes"""
    templates: int = 0
    num_recycles: int | None = None
    precision: PredictionPrecision = "auto"
    """auto: as `fold predict` chooses it for the kind of device, bf16 for a GPU"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """the kind of device that is planned for, which need not be here; auto: CUDA where there is one"""
    memory: str | None = None
    """of the device, with --nproc of each rank's, such as 40GiB (40 alone is GiB); by default what a CPU has free here
    (each rank a part of it), and 80 GiB for a GPU"""
    nproc: int = 1
    """ranks that share the prediction; they need not be here"""

    def __post_init__(self) -> None:
        if self.length is not None and self.length <= 0:
            raise UserError(f"length={self.length}; give more than 0")
        if self.memory is not None:
            size_in_bytes(self.memory, "memory", "GiB")
        if self.nproc < 1:
            raise UserError(f"nproc={self.nproc}; give 1 or more")
        for name in ("rows", "extra_rows", "templates"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UserError(f"{name}={value}; give 0 or more")

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        return device_kind("auto") if self.device == "auto" else self.device

    @property
    def computing(self) -> Precision:
        """The precision that is planned for."""
        return chosen_precision(self.precision, self.kind, measured=not is_esmfold(Path(self.model)))


def main(argv: list[str]) -> int:
    recipes = {"default": FoldPlanConfig, **training.recipes()}
    config = parse(recipes, argv, "megalith fold plan", default="default")
    if isinstance(config, training.FoldTrainPlanConfig):
        console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
        training.show(config, typed(argv, config), console)
        return 0
    job, budget = _job(config, config.length or 1), _budget(config)
    of_ranks = "" if config.nproc == 1 else f" for each of {config.nproc} ranks"
    print(
        f"{config.model}, {job.rows} + {job.extra} rows, {job.templates} templates, {config.computing}, "
        f"{config.kind}, {budget / 2**30:.1f} GiB{of_ranks}"
    )
    if config.nproc > 1:
        return _show_shares(job, budget, config)
    of_process = config.kind == "cpu"
    longest_found = longest(job, tensors_within(budget) if of_process else budget)
    print(f"longest sequence: {longest_found:,} residues, with their pairs on the device")
    if config.length is not None:
        least = process_holding(least_bytes(job)) if of_process else least_bytes(job)
        _show(job, plan_subbatches(job, budget, of_process=of_process), least)
    return 0


def _show_shares(job: FoldJob, budget: int, config: FoldPlanConfig) -> int:
    if config.length is None:
        raise UserError("megalith fold plan --nproc needs the length: --length 10000")
    if isinstance(job.config, ESMFoldConfig):
        raise UserError(f"{config.model} is ESMFold, which one rank predicts; leave out --nproc")
    axis = Absent(config.nproc)
    shares = plan_shares(job, budget, axis, of_process=config.kind == "cpu")
    table = Table("operation", "of a rank's rows")
    for name, how in shares.items():
        table.add_row(name, str(how))
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(table)
    share = _pair_bytes(job) / config.nproc
    peak = rank_bytes(job, shares, axis)
    print(f"a rank's share of the pair representation: {share / 2**30:.2f} GiB")
    print(f"predicted peak of a rank: {peak / 2**30:.2f} GiB, {peak / share:.2f} of these")
    return 0


def _pair_bytes(job: FoldJob) -> int:
    return job.residues**2 * job.config.pair_dim * job.dtype.itemsize


def _job(config: FoldPlanConfig, length: int) -> FoldJob:
    model = _model(config.model)
    if config.num_recycles is not None:
        model = replace(model, num_recycles=config.num_recycles)
    if config.templates and model.templates is None:
        raise UserError(f"{config.model} takes no templates; leave out --templates")
    rows = model.max_msa if config.rows is None else config.rows
    return FoldJob(
        model,
        length,
        max(1, rows),
        model.max_extra_msa if config.extra_rows is None else config.extra_rows,
        config.templates or (model.max_templates if isinstance(model, MultimerConfig) else 0),
        compute_dtype(config.computing),
        config.kind,
        model.num_recycles + 1,
    )


def _model(name: str) -> ModelConfig:
    presets = [*PRESETS, *MULTIMER_PRESETS]
    if name not in presets and not Path(name).exists():
        raise UserError(f"model={name}: there are no such weights, and the presets are {', '.join(presets)}")
    return released(name) if name in presets else read_weights(Path(name))[0]


def _budget(config: FoldPlanConfig) -> int:
    if config.memory is not None:
        return size_in_bytes(config.memory, "memory", "GiB")
    return free_bytes("cpu") // config.nproc if config.kind == "cpu" else 80 * 2**30


def _show(job: FoldJob, plan: Plan, least: int) -> None:
    pairs = _pair_bytes(job)
    table = Table("operation", "how", "peak GiB", "in pair representations")
    for name, how in plan.choices.items():
        peak = plan.peaks[name]
        table.add_row(name, str(how), f"{peak / 2**30:.2f}", f"{peak / pairs:.2f}")
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(table)
    where = "in host memory" if plan.offload else "on the device"
    print(f"pair representation: {pairs / 2**30:.2f} GiB, {where}; residuals in place")
    tensors = " of tensors" if job.device == "cpu" else ""
    print(f"predicted peak{tensors}: {plan.peak_bytes / 2**30:.2f} GiB")
    print(f"the least --memory that would do: {least / 2**30:.2f} GiB")
    print(f"predicted time: about {_duration(plan.seconds)} (two CPU cores, or one H100)")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
