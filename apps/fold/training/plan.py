"""`fold train --plan`, or `fold plan --recipe RECIPE`: bytes and seconds of a step of the run, before it runs.

The step is the run's own, on tensors without memory and ranks that do not exist (`core.estimate`): crops and alignments
of full size, templates as many as the model takes; complexes whose
chains have no copies. Recycling iterations before the last keep nothing, so two stand for
any number. A step has 1 to num_recycles + 1 of them, each equally often: seconds are of their mean.

Left out: the moving average's update, validation, and the heads' part where only confidence learns.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import ClassVar

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from apps.fold.features.alignment import Alignment
from apps.fold.features.complexes import ChainInput
from apps.fold.features.entries import Entry
from apps.fold.features.msa import draw
from apps.fold.loss.violation import atom_tables
from apps.fold.model import residues
from apps.fold.model.config import ModelConfig, MultimerConfig
from apps.fold.model.network import trainable
from apps.fold.training.batches import cropped_shape, row_of, row_of_complex
from apps.fold.training.complexes import example_of
from apps.fold.training.config import FoldTrainConfig, model_config, plan_of, resolved_mesh
from apps.fold.training.dataset import Example
from apps.fold.training.distillation import DistillConfig
from apps.fold.training.objective import Objective, confidence_alone
from apps.fold.training.recipes import RECIPES
from apps.fold.weights.source import read_weights
from core.auto.checkpointing import Checkpointing
from core.config import UserError, in_words, option, parse, time_in_words, typed
from core.estimate import PlannedRun, StepEstimate, estimate_step
from core.estimate.residency import estimate_budget
from core.mesh import MeshConfig
from core.optim.build import without_size
from core.parallel.recompute import RecomputeConfig
from core.precision import compute_dtype
from core.runtime import device_kind
from core.trace.machine import Bandwidth, Speed, described_bandwidth
from core.trace.segments import Segments
from core.train.segments import choose_segments, described, lines_here

_IDS = ("asym", "entity", "sym", "copies")
_DRAWN = 8  # residues for which features are made, to see their shapes


@dataclass(frozen=True)
class FoldTrainPlanConfig(PlannedRun, FoldTrainConfig):
    """Plan a training run: the options of `megalith fold train`, and the device that it is planned for."""

    ESSENTIAL: ClassVar[tuple[str, ...]] = (
        *("model", "gpu", "memory", "data.crop", "data.global_batch", "max_msa", "max_extra_msa", "steps", "precision"),
        *("microbatch", "optim.name", "recompute.mode", "zero", "gemini.budget", "nproc"),
    )

    def unread(self) -> dict[str, str]:
        found = super().unread()
        if self.machine is None:
            found["utilisation"] = "and what this machine computes in a second is not known; give --gpu, such as A100"
        if self.gemini.figure is not None:
            found["gemini.figure"] = "in a plan, which does not draw it; leave it out"
        found["gemini.durable_every"] = "in a plan, which is of steps that are all made durable; leave it out"
        found["gemini.order"] = "in a plan, which is of a step of one microbatch; leave it out"
        return found


WITHOUT_EFFECT = (
    *("seed", "out", "resume", "device", "compile", "hang_after", "evaluate_every", "matmul_precision", "note"),
    *("noise_scale", "noise_scale_steps"),
    *("elastic.store", "elastic.min", "elastic.max", "elastic.buddy_every", "elastic.lost_after"),
    *("stop_after", "checkpoint.every", "checkpoint.keep", "checkpoint.asynchronous", "log.tensorboard"),
    *("log.wandb_project", "data.structures", "data.alignments", "data.max_template_date", "data.validation"),
    *(
        "data.min_residues",
        "data.max_chains",
        "data.max_resolution",
        "data.cache",
        "data.clusters",
        "data.decoys",
        *(f"distill.{item.name}" for item in fields(DistillConfig)),
        "optim.lr",
        "optim.clip_norm",
    ),
    *("optim.schedule.shape", "optim.schedule.final", "optim.schedule.warmup_steps", "optim.schedule.scaling"),
)
"""Options of the run that its plan is the same without."""


def without_effect(config: FoldTrainPlanConfig) -> set[str]:
    """Dotted names of the options that this plan does not depend on."""
    found = {*WITHOUT_EFFECT, *(f"optim.{name}" for name in without_size(config.optim))}
    return found - {"device"} if config.recompute.mode == "budget" else found


def main(argv: list[str]) -> int:
    """`fold train --plan` with the other words of its command line."""
    config = parse(recipes(), argv, "megalith fold train --plan", default="initial_training")
    show(config, typed(argv, config), Console(width=None if sys.stdout.isatty() else 120, highlight=False))
    return 0


def recipes() -> dict[str, Callable[[], FoldTrainPlanConfig]]:
    """The recipes of `fold train`, to plan."""
    return {name: partial(_planned, recipe) for name, recipe in RECIPES.items()}


def _planned(recipe: Callable[[], FoldTrainConfig]) -> FoldTrainPlanConfig:
    config = recipe()
    return FoldTrainPlanConfig(**{item.name: getattr(config, item.name) for item in fields(config)})


def show(config: FoldTrainPlanConfig, typed: set[str], console: Console) -> None:
    """Print the plan.  Raises UserError for what the run would refuse, and where it does not fit --memory."""
    mesh = resolved_mesh(config)
    of_weights = None if config.weights is None else read_weights(config.weights)[0]
    model = model_config(config, of_weights)
    if not isinstance(model, ModelConfig):
        raise UserError(f"model={config.model} is not of the AlphaFold kind, which alone is trained")
    (_show_budget if config.gemini.budget is not None else _show_step)(config, mesh, model, console)
    if ignored := sorted(typed & without_effect(config)):
        console.print(f"the plan is the same without {', '.join(map(option, ignored))}")


def _show_step(config: FoldTrainPlanConfig, mesh: MeshConfig, model: ModelConfig, console: Console) -> None:
    segments = None
    if config.recompute.mode == "budget":
        link = described_bandwidth(config.speed, 1e9 * config.bandwidth_gb_s, 1)
        kind = "cuda" if config.gpu is not None else device_kind(config.device)
        found = chosen(config, mesh, model, config.speed, kind, link)
        console.print(described(found))
        segments = found.segments

    @cache
    def step(iterations: int) -> StepEstimate:
        return step_of(config, mesh, model, config.speed, iterations, segments)

    most = min(2, model.num_recycles + 1)
    found, machine = step(most), config.machine
    console.print(_table(config, mesh, model, found.table()))
    if config.average is not None:
        average = found.average_bytes
        console.print(f"and the moving average: {in_words(average)}, counted in what --memory must hold")
    else:
        average = 0
    console.print("\n".join([f"{found.flops:.3g} FLOPs a rank and step of {most} iterations", *found.messages()]))
    if machine is not None:
        mean = mean_step(step, model.num_recycles)
        sending = mean.sent_bytes / machine.bandwidth
        step_s, chains, ranks = mean.compute_s + sending, config.data.global_batch, math.prod(mesh.sizes())
        console.print(
            f"a step of {chains} chains: {step_s:.3g} s at {config.utilisation:.0%} of the peak ({mean.compute_s:.3g} "
            f"s computing, {sending:.3g} s communicating), {ranks * mean.flops / step_s / 1e15:.3g} PFLOP/s of all "
            f"{ranks} ranks; {config.steps:,} steps in {time_in_words(config.steps * step_s)}"
        )
    advice = "try --recompute.mode full, --microbatch 1, --zero 3 with more ranks, or --gemini.budget"
    if (line := config.fits(found.peak_bytes + average, advice)) is not None:
        console.print(line)


def step_of(
    config: FoldTrainConfig,
    mesh: MeshConfig,
    model: ModelConfig,
    speed: Speed,
    iterations: int,
    segments: Segments | None = None,
) -> StepEstimate:
    """The step of a rank of a run, of so many iterations of recycling; segments: those of mode budget."""
    sizes = config.microbatch_rows(config.data.global_batch // mesh.data_ranks)
    plan = plan_of(config, segments)
    made = _network(config, model), _loss(config, model, max(sizes), iterations), mesh, config, speed, plan
    return estimate_step(*made, optimizer=config.optim, num_microbatches=len(sizes))


def chosen(
    config: FoldTrainConfig, mesh: MeshConfig, model: ModelConfig, speed: Speed, kind: str, link: Bandwidth
) -> Checkpointing:
    """What a run in mode budget computes again.  Raises UserError for a budget in which no step fits.

    kind, link  cpu or cuda, of the device, and its link to the host

    Iterations without gradients run blocks once, and keep nothing: they are no runs of the chain.
    """
    sizes = config.microbatch_rows(config.data.global_batch // mesh.data_ranks)
    loss = _loss(config, model, max(sizes), min(2, model.num_recycles + 1))
    lines = lines_here(config.recompute, kind, link)
    plan = plan_of(replace(config, recompute=RecomputeConfig()))  # the trace itself counts what it sends again
    made = _network(config, model), loss, mesh, config, speed, plan, config.optim, len(sizes), lines
    return choose_segments(*made, averaged=config.average is not None)


@dataclass(frozen=True)
class MeanStep:
    """A rank's step of as many iterations as a step has in the mean: seconds, FLOPs, bytes over a ring's wires."""

    compute_s: float
    flops: float
    sent_bytes: float


def mean_step(step: Callable[[int], StepEstimate], num_recycles: int) -> MeanStep:
    """Of the steps of one iteration and of two: the first of two keeps nothing, and so do more."""
    once = step(1)
    again = step(min(2, num_recycles + 1))

    def mean(figure: Callable[[StepEstimate], float]) -> float:
        return figure(once) + num_recycles / 2 * (figure(again) - figure(once))

    return MeanStep(mean(lambda s: s.compute_s), mean(lambda s: s.flops), mean(lambda s: s.sent.wire_bytes))


def _show_budget(config: FoldTrainPlanConfig, mesh: MeshConfig, model: ModelConfig, console: Console) -> None:
    rows = max(config.microbatch_rows(config.data.global_batch // mesh.data_ranks))
    loss = _loss(config, model, rows, min(2, model.num_recycles + 1))
    made = _network(config, model), loss, mesh, config, config.speed, 1e9 * config.bandwidth_gb_s, plan_of(config)
    found = estimate_budget(*made, optimizer=config.optim, averaged=config.average is not None)
    kinds = {
        "messages between ranks": found.messages_bytes,
        "fullest moment of Gemini's plan": found.plan.device_peak_bytes,
        "on the host": found.plan.host_bytes,
    }
    console.print(_table(config, mesh, model, [(name, in_words(size)) for name, size in kinds.items() if size]))
    console.print(f"{found.plan.describe()}; the smallest budget is {in_words(found.least_bytes)}")
    if (line := config.fits(found.device_bytes, "try --gemini.budget {memory}")) is not None:
        console.print(line)


def _table(config: FoldTrainPlanConfig, mesh: MeshConfig, model: ModelConfig, rows: list[tuple[str, str]]) -> Table:
    ranks, axes = math.prod(mesh.sizes()), mesh.describe().replace("tp=", "axial=")
    run = f"{ranks} ranks ({axes}), ZeRO {config.zero}, {config.precision}"
    sizes = f"{config.data.crop} residues, {model.max_msa} + {model.max_extra_msa} rows"
    table = Table("per rank", "bytes", title=f"{config.model}, {sizes}, {run}")
    for row in rows:
        table.add_row(*row)
    return table


def _network(config: FoldTrainConfig, model: ModelConfig) -> nn.Module:
    with torch.device("meta"):
        network = trainable(model)
    return confidence_alone(network) if config.learns == "confidence" else network.train()


def _loss(config: FoldTrainConfig, model: ModelConfig, rows: int, iterations: int) -> Callable[[nn.Module], Tensor]:
    """The run's loss of a microbatch, whose tensors are without memory, but those of which it looks at the values."""
    generator, dtype = np.random.default_rng(0), compute_dtype(config.precision)
    atom_tables()  # made of values once, which it must not be where tensors have none
    row = _row(model, iterations, generator)
    shapes = {name: (rows, *cropped_shape(name, tensor.shape, config.data.crop)) for name, tensor in row.items()}
    formats = {name: dtype if tensor.is_floating_point() else tensor.dtype for name, tensor in row.items()}
    types = generator.integers(20, size=shapes["aatype"])
    known = torch.from_numpy(residues.ATOM37_MASK[types] > 0).view(shapes["atom_mask"])
    seen = {"aatype": torch.from_numpy(types), "atom_mask": known}
    seen |= {name: torch.ones(shapes[name], dtype=torch.int64) for name in _IDS if name in row}
    objective = Objective(config.loss, config.learns)

    def loss(network: nn.Module) -> Tensor:
        batch = {name: torch.zeros(shape, dtype=formats[name]) for name, shape in shapes.items()}
        return objective(network, batch | seen)

    return loss


def _row(model: ModelConfig, iterations: int, generator: np.random.Generator) -> dict[str, Tensor]:
    """A row of a chain; of a model of complexes that of a complex of one, whose labels come in one copy."""
    alignment = _alignment(model.max_msa + model.max_extra_msa, generator)
    chain = _chain(alignment)
    if isinstance(model, MultimerConfig):
        example = example_of(chain.name, [chain], [ChainInput(chain.sequence, alignment, alignment)])
        return row_of_complex(example, model, iterations, generator, [()], np.arange(len(chain)))
    return row_of(Example(chain, alignment), [draw(alignment, model, generator) for _ in range(iterations)], model)


def _alignment(rows: int, generator: np.random.Generator) -> Alignment:
    letters = generator.integers(20, size=(rows, _DRAWN)).astype(np.uint8)
    return Alignment(letters, np.zeros_like(letters), tuple(map(str, range(rows))))


def _chain(alignment: Alignment) -> Entry:
    """A chain without coordinates."""
    sequence = "".join(residues.RESTYPES[letter] for letter in alignment.letters[0])
    atoms = np.zeros((_DRAWN, residues.NUM_ATOM37, 3), np.float32)
    return Entry("plan", sequence, np.arange(_DRAWN), atoms, atoms[..., 0], 0.0)
