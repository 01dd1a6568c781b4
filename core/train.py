"""The training loop, one for every app and every form of parallelism.

`fit` takes a model that `core.parallel.compose` has spread over the mesh, an optimizer over its masters, batches and a
loss. One step is

1. take the batch of this step: a function of the step and the data rank alone, so no mesh changes what is learned from
2. for each microbatch: forward, loss times its share of the whole batch's weight, backward, in the order and on the
   ranks that the `ParallelModel` decides
3. complete the gradients; their global norm says whether they are finite and how far they are clipped
4. the optimizer updates the masters; the parameters take over their values
5. one row of metrics; a checkpoint, an evaluation, the end when it is time

A step whose gradients are not finite is skipped and counted; under fp16 that is how the loss scale finds its place.
SIGTERM on any rank lets all ranks finish the step, save, and return.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from core.checkpoint import CheckpointConfig, Checkpointer, complete_steps, rng_state, set_rng_state
from core.comm.volume import Volume, count_volume
from core.config import UserError, as_json, in_one_line, require_device
from core.data import Batches, Prefetch
from core.files import replace_file
from core.gemini.config import GeminiConfig
from core.gemini.replicas import GeminiReplicas
from core.mesh import MeshConfig, data_axis, gradient_axis, pipeline_ranks
from core.metrics import MemoryAccount, Progress, RunLog, mfu, peak_bytes, peak_flops, resident_peak_bytes
from core.nn.moe import load_figures, take_load
from core.optim.average import WeightAverage
from core.optim.build import OptimConfig
from core.optim.clip import gradient_norm, scale_gradients
from core.optim.schedule import batch_factor, learning_rate
from core.optim.sharded import ShardedOptimizer, restore_state, state_tensors
from core.parallel.compose import ParallelConfig
from core.parallel.data import DataParallel
from core.parallel.parallel_model import ParallelModel, Sample
from core.parallel.pipeline.schedule import SPLIT_BACKWARD
from core.precision import LossScale, LossScaleConfig, MatmulPrecision, compute_dtype, set_matmul_precision
from core.run_folder import hold
from core.runtime import Runtime, StopRequest, agreed, launch, seed_everything, watch_steps

Loss = Callable[[torch.nn.Module, dict[str, Tensor]], Tensor]
Evaluate = Callable[[torch.nn.Module], Mapping[str, float]]

MOST_SKIPPED_IN_A_ROW = 20


@dataclass(frozen=True)
class LogConfig:
    tensorboard: bool = True
    """also write TensorBoard events, when tensorboard is installed"""
    wandb_project: str | None = None
    """Weights & Biases project to report to"""


@dataclass(frozen=True)
class TrainConfig(ParallelConfig):
    """A training run: how the model runs (see ParallelConfig), on which mesh, for how long, and what is kept of it."""

    ESSENTIAL: ClassVar[tuple[str, ...]] = (
        *("steps", "out", "resume", "seed", "device", "precision", "microbatch", "optim.name", "optim.lr"),
        *("optim.schedule.warmup_steps", "checkpoint.every", "evaluate_every", "compile", "recompute.mode"),
        *("zero", "mesh.tp", "mesh.pp", "mesh.cp", "gemini.budget"),
    )

    mesh: MeshConfig = field(default_factory=MeshConfig)
    steps: int = 1000
    """optimizer steps of the whole run; the learning-rate schedule spans them"""
    stop_after: int | None = None
    """save and leave after this step, as if interrupted; --resume continues"""
    microbatch: int | None = None
    """rows of a microbatch on one rank; gradients accumulate over the others. None: all rows at once"""
    seed: int = 0
    out: Path = Path("runs/latest")
    """folder of the run: config.json, metrics.jsonl, summary.json, checkpoints"""
    resume: str | None = None
    """continue: "auto" (a bare --resume) from the latest checkpoint in --out, or a run or checkpoint folder"""
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    hang_after: float | None = None
    """end a run whose step takes more seconds, with the stacks of all ranks; None: max(300, 20 median steps)"""
    evaluate_every: int = 0
    """steps between evaluations on held-out data; 0: only at the end"""
    log: LogConfig = field(default_factory=LogConfig)
    device: str = "auto"
    """cpu or cuda; auto: CUDA where there is one"""
    matmul_precision: MatmulPrecision = "highest"
    """of products in fp32: highest (exact), high (on a GPU by TF32, with 11 bits) or medium (as bf16)"""
    gemini: GeminiConfig = field(default_factory=GeminiConfig)
    """train in a given amount of device memory: model data that does not fit lives on the host"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_device("device", self.device, numbered=False)
        for name in ("steps", "stop_after", "microbatch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value}; give a positive number")
        if self.hang_after is not None and not 0 < self.hang_after < float("inf"):
            raise UserError(f"hang_after={self.hang_after}; give seconds, or leave it out for 20 median steps")
        if self.compile and self.mesh.tp_mode != "1d":
            raise UserError(
                f"compile with mesh.tp_mode={self.mesh.tp_mode}: torch.compile does not trace the messages inside its "
                "products; leave --compile out, or use --mesh.tp-mode 1d"
            )
        if self.gemini.budget is not None:
            self._check_gemini()
        if self.evaluate_every < 0:
            raise UserError(f"evaluate_every={self.evaluate_every}; give a number of steps, or 0 for only at the end")
        self.check_pipeline(self.mesh.pp)
        if self.microbatch is not None and self.pipeline.microbatches is not None:
            raise UserError(
                f"microbatch={self.microbatch} and pipeline.microbatches={self.pipeline.microbatches} both say how "
                "rows are cut; give one of them"
            )

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        found = {}
        if self.precision != "fp16":
            why = f"with precision={self.precision}: only fp16 scales the loss; give --precision fp16"
            found |= {f"loss_scale.{item.name}": why for item in fields(self.loss_scale)}
        if self.gemini.budget is not None:
            found["reduce_each"] = "with a budget: Gemini says itself when gradients are reduced; leave it out"
        return found

    def _check_gemini(self) -> None:
        """Raises UserError for what Gemini does not go with."""
        given = f"gemini.budget={self.gemini.budget}"
        if self.zero not in (0, 3):
            raise UserError(
                f"{given} with zero={self.zero}: Gemini shards parameters, gradients and optimizer together; "
                "use --zero 3, or --zero 0 for copies"
            )
        if self.mesh.ep > 1:
            raise UserError(
                f"{given} with mesh.ep={self.mesh.ep}: experts would be chunks of other ranks than all else, and there "
                "is one kind of chunks; use mesh.ep=1, where Gemini moves experts, too"
            )
        if self.mesh.pp > 1 and self.pipeline.schedule in SPLIT_BACKWARD:
            raise UserError(
                f"{given} with pipeline.schedule={self.pipeline.schedule}: parameters leave before their gradients are "
                "computed; use --pipeline.schedule 1f1b, gpipe or interleaved"
            )

    def spread(
        self, model: nn.Module, mesh: DeviceMesh, materialise: Callable[[nn.Module], None] = lambda model: None
    ) -> DataParallel:
        if self.gemini.budget is None:
            return super().spread(model, mesh, materialise)
        return GeminiReplicas(model, mesh, self.zero, self.precision, materialise, self.gemini)

    def microbatch_rows(self, rows: int) -> list[int]:
        """How many of a rank's rows each microbatch takes."""
        if self.microbatch is None and self.mesh.pp > 1:
            return self.pipeline.microbatch_rows(rows, self.mesh.pp)
        size = min(self.microbatch or rows, rows)
        return [min(size, rows - start) for start in range(0, rows, size)]


def num_rows(batch: dict[str, Tensor]) -> Tensor:
    """The default weight of a microbatch: its rows."""
    first = next(iter(batch.values()))
    return torch.tensor(float(len(first)), dtype=torch.float64)


def num_tokens(batch: dict[str, Tensor]) -> int:
    """What throughput counts: the elements of input_ids where there are any, else rows."""
    ids = batch.get("input_ids")
    return ids.numel() if ids is not None else len(next(iter(batch.values())))


def fit(
    data: ParallelModel,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    loss: Loss,
    config: TrainConfig,
    runtime: Runtime,
    *,
    weight: Callable[[dict[str, Tensor]], Tensor] = num_rows,
    evaluate: Evaluate | None = None,
    average: WeightAverage | None = None,
    keep_frozen: bool = True,
    flops_per_token: float | None = None,
    values: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train to `config.steps`, or to where it is stopped.  Returns what summary.json then holds.

    loss             (model, batch) -> mean over the items of a microbatch, a scalar
    weight           batch -> how many items that mean is over; the loss of a step is the weighted mean over all
                     microbatches of all ranks
    evaluate         model -> figures of an evaluation; called on every rank; where parameters are sharded, every rank
                     must call the model equally often
    average          follows the masters, and is part of the checkpoints
    keep_frozen      checkpoints hold what does not learn; without it they are small where little learns, and whoever
                     resumes has given the model those parameters
    flops_per_token  of forward and backward, for the MFU
    values           JSON-able data that goes into every checkpoint
    """
    set_matmul_precision(config.matmul_precision)
    loss_scale = LossScale(config.precision, config.loss_scale)
    state = TrainState(data, optimizer, loss_scale, dict(values or {}), average, keep_frozen)
    axis = data_axis(data.mesh)
    # Every rank drew the same parameters; what it draws from now on (but dropout: `core.parallel.draws`) is that of its
    # tokens and stages.
    seed_everything(config.seed + _drawing_rank(data.mesh))
    with ExitStack() as stack:
        hangs = stack.enter_context(watch_steps(config.hang_after, data.device))
        with hangs.step("what comes before the first step", counts=False):
            data.prepare(optimizer, _sample(data, batches, loss, config))
        checkpointer = Checkpointer(config.out / "checkpoints", config.checkpoint, data.mesh)
        stack.callback(checkpointer.close)
        first = resume(state, checkpointer, config)
        last = min(config.steps, config.stop_after or config.steps)
        if first is not None and first >= last and config.resume == "auto":
            return _nothing_to_do(config, runtime, first, last)
        log = stack.enter_context(_run_log(config, runtime, first))
        progress = stack.enter_context(Progress(config.steps, first_step=first or 0, active=runtime.leads))
        if first is not None:
            progress.message(f"continuing after step {first}{_changes(state.loaded, state.values)}")
        ahead = Prefetch(
            batches, axis.get_local_rank(), axis.size(), step=first or 0, pinned=data.device.type == "cuda"
        )
        source = stack.enter_context(ahead)
        stop = stack.enter_context(StopRequest())
        meter = _Meter(data, config, runtime, flops_per_token)
        step = first or 0
        saved = first if config.resume in (None, "auto") else None  # the step that --out holds, alike on every rank
        while step < last and not state.stopping:
            with meter.step(state), hangs.step(f"step {step + 1}"):
                row = train_step(state, next(source), loss, weight, config, step, lambda: stop.requested)
            step += 1
            row = {"step": step, **row, **meter.row(row.pop("tokens"))}
            if evaluate is not None and config.evaluate_every and step % config.evaluate_every == 0 and step < last:
                row |= _evaluated(data, evaluate)
            log.write(row)
            _require_finite(state.loss, step, config)
            progress.update(row)
            if config.checkpoint.every and step % config.checkpoint.every == 0 and step < last:
                state.save(checkpointer, step)
                saved = step
        if step != saved:
            state.save(checkpointer, step)
        checkpointer.wait()
        summary = meter.summary(step, config.steps, state)
        if evaluate is not None and step == config.steps:
            summary |= _evaluated(data, evaluate)
        log.summarise(summary)
        progress.close()
        return summary


def _require_finite(loss: float, step: int, config: TrainConfig) -> None:
    """Raises UserError for a loss from which no training goes on: no update of such weights makes it finite again."""
    if not math.isfinite(loss):
        raise UserError(
            f"the loss is {loss} at step {step}; lower optim.lr (now {config.optim.lr:g}), warm up for longer "
            f"(optim.schedule), or lower optim.clip_norm (now {config.optim.clip_norm})"
        )


def train_step(
    state: "TrainState",
    batch: dict[str, Tensor],
    loss: Loss,
    weight: Callable[[dict[str, Tensor]], Tensor],
    config: TrainConfig,
    step: int,
    stop_requested: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """One optimizer step on this rank's rows of the batch.  Returns its figures, alike on every rank.

    Each parameter group's own learning rate is what it had when the run began, or torch's `initial_lr`; the schedule
    multiplies it. The figure `lr` is that of the first group, `lr_1`, … are those of others that differ.

    stop_requested  asked before the update, on every rank; one that says yes stops all after it (`state.stopping`)

    The host waits for the device once: when it reads what says how the update goes (`TrainState.read_step`).
    """
    data, axis = state.data, data_axis(state.data.mesh)
    device = data.device
    scale = state.loss_scale.factor
    parts = _microbatches(batch, config, device)
    weights = torch.stack([weight(part).to(device, torch.float64, non_blocking=True) for part in parts])
    whole_weight = weights.sum()
    if axis.size() > 1:
        dist.all_reduce(whole_weight, group=axis.get_group())

    def share_of_loss(microbatch: tuple[dict[str, Tensor], Tensor, int, int]) -> Tensor:
        part, share, first_row, rows = microbatch
        # Compiled blocks are not watched: a mode would be compiled with them.
        with data.draws.at(config.seed, step, first_row, rows, watch=not config.compile):
            value = loss(data.model, part)
        return value * share.to(torch.promote_types(value.dtype, torch.float32))

    sizes = [len(next(iter(part.values()))) for part in parts]
    first_rows = [axis.get_local_rank() * sum(sizes) + before for before in accumulate([0, *sizes[:-1]])]
    microbatches = list(zip(parts, (weights / whole_weight).unbind(), first_rows, sizes, strict=True))
    mean = data.run(microbatches, share_of_loss, scale)
    data.reduce()
    read = state.read_step(mean, gradient_norm(data.masters.values(), data.mesh), stop_requested())
    norm = read.norm / scale
    schedule, rows = config.optim.schedule, len(next(iter(batch.values()))) * axis.size()
    rates = [
        learning_rate(step, config.steps, own * batch_factor(rows, schedule), schedule) for own in state.learning_rates
    ]
    if state.loss_scale.update(norm < float("inf")):
        clip = config.optim.clip_norm
        factor = min(1.0, clip / norm) if clip is not None and norm > 0 else 1.0
        scale_gradients(data.masters.values(), factor / scale)
        for group, rate in zip(state.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        state.optimizer.step()
        if state.average is not None:
            state.average.follow()
        data.release()  # before the parameters travel: the two need not share memory
        data.publish()
    data.release()
    state.require_progress()
    others = {f"lr_{index}": rate for index, rate in enumerate(rates) if rate != rates[0]}
    figures = {"loss": state.loss, "lr": rates[0], "grad_norm": norm} | others
    if read.expert_load is not None:
        figures |= load_figures(read.expert_load)
    if state.loss_scale.skipped_steps or state.loss_scale.dynamic:
        figures |= {"skipped_steps": state.loss_scale.skipped_steps, "loss_scale": state.loss_scale.factor}
    return figures | {"tokens": num_tokens(batch) * axis.size()}


def _microbatches(batch: dict[str, Tensor], config: TrainConfig, device: torch.device) -> list[dict[str, Tensor]]:
    """The rank's rows in microbatches, on the device, floating tensors in the compute format."""
    dtype = compute_dtype(config.precision)
    placed = {k: v.to(device, dtype if v.is_floating_point() else None, non_blocking=True) for k, v in batch.items()}
    sizes = config.microbatch_rows(len(next(iter(placed.values()))))
    pieces = {k: v.split(sizes) for k, v in placed.items()}
    return [{k: v[index] for k, v in pieces.items()} for index in range(len(sizes))]


def _drawing_rank(mesh: DeviceMesh) -> int:
    """A number for each rank's random draws: alike where ranks compute the same, of the same rows and stages."""
    axis = gradient_axis(mesh)
    return mesh.get_local_rank("pp") * axis.size() + axis.get_local_rank()


def _sample(data: ParallelModel, batches: Batches, loss: Loss, config: TrainConfig) -> Sample:
    """The losses of the run's first microbatches on this rank, for who wants to see a step before it runs."""

    def draw() -> list[Callable[[torch.nn.Module], Tensor]]:
        axis = data_axis(data.mesh)
        parts = _microbatches(batches.batch(0, axis.get_local_rank(), axis.size()), config, data.device)
        return [lambda model, part=part: loss(model, part) for part in parts]

    return draw


def _expert_load(data: ParallelModel) -> Tensor | None:
    """The step's load of experts, over all ranks; None of a model without experts."""
    load = take_load(data.model, data.device)
    if load is None:
        return None
    if data.mesh.size() > 1:
        dist.all_reduce(load)
    stages = pipeline_ranks(data.mesh)  # have other layers; ranks of tensor parallelism route alike
    copies = data.mesh.size() // gradient_axis(data.mesh).size() // stages
    return load / copies


def _evaluated(data: ParallelModel, evaluate: Evaluate) -> dict[str, float]:
    modes = [(module, module.training) for module in data.model.modules()]
    data.model.eval()
    with torch.no_grad():
        figures = dict(evaluate(data.model))
    for module, training in modes:
        module.training = training
    return figures


class TrainState:
    """What a checkpoint keeps: masters and frozen parameters, their average, optimizer, loss scale, buffers, values.

    And what is of a rank alone, its generators.
    """

    def __init__(
        self,
        data: ParallelModel,
        optimizer: torch.optim.Optimizer,
        loss_scale: LossScale,
        values: dict[str, Any],
        average: WeightAverage | None = None,
        keep_frozen: bool = True,
    ):
        self.data, self.optimizer, self.loss_scale, self.values = data, optimizer, loss_scale, values
        self.average, self.keep_frozen = average, keep_frozen
        self.loaded: dict[str, Any] = {}
        self.stopping = False
        self.loss = float("nan")
        self._skipped_in_a_row = 0

    @property
    def learning_rates(self) -> list[float]:
        """Of each parameter group its own, before any schedule: torch's `initial_lr`, or what it has at first."""
        return [float(group.setdefault("initial_lr", group["lr"])) for group in self.optimizer.param_groups]

    def tensors(self, optim: dict[str, dict[str, Tensor]] | None = None) -> dict[str, Tensor]:
        """name -> local tensor of everything that is saved as tensors.

        optim  parameter -> its optimizer's tensors; by default as they are now
        """
        frozen = self.data.frozen if self.keep_frozen else {}
        found = {f"model/{name}": parameter for name, parameter in frozen.items()}
        found |= {f"model/{name}": master for name, master in self.data.masters.items()}
        persistent = self.data.model.state_dict(keep_vars=True)
        found |= {f"buffer/{n}": b for n, b in self.data.model.named_buffers() if n in persistent}
        for name, state in (self._optimizer_tensors() if optim is None else optim).items():
            found |= {f"optim/{key}/{name}": value for key, value in state.items()}
        if self.average is not None:
            found |= {f"average/{name}": value for name, value in self.average.tensors.items()}
        return found

    def _optimizer_tensors(self) -> dict[str, dict[str, Tensor]]:
        return {name: state_tensors(self.optimizer, master) for name, master in self.data.masters.items()}

    def save(self, checkpointer: Checkpointer, step: int) -> None:
        self._make_optimizer_state()  # of what has none: it took part in no step, or every step was skipped
        values = {"values": self.values, "loss_scale": self.loss_scale.state()}
        if self.average is not None:
            values["average_steps"] = self.average.steps
        checkpointer.save(step, self.tensors(), values, rng_state())

    def load(self, checkpointer: Checkpointer, at: Path | None) -> int:
        """Take over a checkpoint, of whatever mesh.  Returns its step."""
        self._make_optimizer_state()
        with torch.no_grad():
            optim = self._optimizer_tensors()
            step, values, random = checkpointer.load(at, self.tensors(optim))
            for name, loaded in optim.items():
                restore_state(self.optimizer, self.data.masters[name], loaded)
            self.data.publish()
        self.loaded = values["values"]
        self.loss_scale.load_state(values["loss_scale"])
        if self.average is not None:
            self.average.steps = values["average_steps"]
        if random is not None:
            set_rng_state(random)
        return step

    def _make_optimizer_state(self) -> None:
        """State as it is before the first step, of every master that has none.

        Of torch's optimizers by a step of rate zero with gradients of zero, its state put back to zero: it exists, and
        nothing has moved.
        """
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.init_state()
            return
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        bare = [m for m in self.data.masters.values() if id(m) in held and not self.optimizer.state.get(m)]
        if not bare:
            return
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        for master in bare:
            master.grad = torch.zeros_like(master)
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates):
            group["lr"] = rate
        for master in bare:
            master.grad = None
            for value in self.optimizer.state.get(master, {}).values():
                if isinstance(value, Tensor):
                    value.zero_()

    def read_step(self, mean: Tensor, norm: Tensor, stop_requested: bool) -> "StepFigures":
        """What the host has to know of a step, agreed over all ranks, in one wait for the device: loss and norm of the
        gradients, whether to stop after it, and the experts' load."""
        axis = data_axis(self.data.mesh)
        copies = self.data.mesh.size() // axis.size()
        both = torch.stack((mean / copies, torch.full_like(mean, float(stop_requested))))
        if self.data.mesh.size() > 1:
            dist.all_reduce(both)
        load = _expert_load(self.data)
        parts = [both.double(), norm.double().reshape(1), *(() if load is None else (load.flatten(),))]
        self.loss, stops, norm_read, *loads = torch.cat(parts).tolist()
        self.stopping = stops > 0
        # Read back as they were: fp64 has all the digits that any of these formats has.
        return StepFigures(norm_read, None if load is None else torch.tensor(loads, dtype=load.dtype).view(load.shape))

    def require_progress(self) -> None:
        """Raises UserError where step after step was skipped, this one too."""
        self._skipped_in_a_row = 0 if self.loss_scale.good_steps else self._skipped_in_a_row + 1
        if self._skipped_in_a_row == MOST_SKIPPED_IN_A_ROW:
            raise UserError(
                f"gradients were not finite in {MOST_SKIPPED_IN_A_ROW} steps in a row (loss {self.loss}); "
                "lower optim.lr, warm up for longer, or use --precision bf16 or fp32"
            )


class StepFigures(NamedTuple):
    """norm: of the gradients, times the loss scale. expert_load: see `core.nn.moe.take_load`, on the host."""

    norm: float
    expert_load: Tensor | None


def resume(state: TrainState, checkpointer: Checkpointer, config: TrainConfig) -> int | None:
    """Load what `config.resume` names.  Returns the step to go on from; None for a fresh run.

    Raises UserError where a fresh run would write over an earlier one, and for a path without a complete checkpoint.
    """
    latest = agreed(checkpointer.latest())  # file systems need not show all ranks the same at once
    if config.resume is None:
        if latest is not None:
            raise UserError(
                f"{config.out} already holds a run (step {latest}); add --resume to continue it, or give another --out"
            )
        return None
    if config.resume == "auto":
        return None if latest is None else state.load(checkpointer, None)
    return state.load(checkpointer, checkpoint_path(Path(config.resume)))


def _nothing_to_do(config: TrainConfig, runtime: Runtime, first: int, last: int) -> dict[str, Any]:
    """A run that was complete already: its summary stays as it is."""
    if runtime.leads:
        print(f"nothing to do: {config.out} is at step {first}, and this run ends at {last}; give more --steps")
    path = config.out / "summary.json"
    return json.loads(path.read_text()) if path.exists() else {"step": first, "status": "complete"}


def _changes(before: dict[str, Any], now: dict[str, Any]) -> str:
    """`, with mesh.tp 2 -> 4, …`: what is configured otherwise than when the checkpoint was made."""
    found = [
        f"{name} {old} -> {new}"
        for name, (old, new) in sorted(_differences(before, now).items())
        if name.rpartition(".")[2] not in ("resume", "stop_after", "nproc", "out")
    ]
    return f", with {', '.join(found)}" if found else ""


def _differences(before: Any, now: Any, name: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted name -> (before, now) of the leaves of two JSON values that differ."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return {} if before == now else {name: (before, now)}
    found = {}
    for key in {*before, *now}:
        found |= _differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    return found


def checkpoint_path(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the latest of the run folder that it is."""
    for folder in (path, path / "checkpoints"):
        if steps := complete_steps(folder):
            return steps[max(steps)]
    return path


@contextmanager
def open_run(config: TrainConfig, runtime: Runtime) -> Iterator[None]:
    """The run's folder is this run's for the length of the block; config.json tells what produces it.

    Raises UserError, alike on every rank, where another run holds the folder or it cannot be written.
    """
    with ExitStack() as stack:
        said = None
        if runtime.leads:
            try:
                stack.enter_context(hold(config.out))
                _write_config(config)
            except (UserError, OSError) as error:
                said = in_one_line(error)
                if said is None:
                    raise
        if (refused := agreed(said)) is not None:
            raise UserError(refused)
        yield


def _write_config(config: TrainConfig) -> None:
    """config.json of the run, before it trains: what produced this folder, also when it is interrupted."""
    if config.resume is None and complete_steps(config.out / "checkpoints"):
        return  # a folder that holds a run is refused by `fit`, with its config as it was
    replace_file(config.out / "config.json", json.dumps(as_json(config), indent=2).encode() + b"\n")


def launch_run(out: Path, nproc: int, package: str, arguments: list[str]) -> int:
    """`python -m package arguments` in one process a rank.  Returns the exit code.

    A run that SIGTERM stopped and that saved, as the summary in `out` says, has done what it was asked.
    """
    summary = out / "summary.json"
    before = _identity(summary)
    code = launch(nproc, package, arguments)
    saved = _identity(summary) != before  # by this run: an earlier one's summary stays, whatever becomes of this one
    if code == 128 + 15 and saved and json.loads(summary.read_text())["status"] == "stopped":
        return 0
    return code


def _identity(path: Path) -> tuple[int, int] | None:
    """Changes whenever a file is replaced."""
    return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None


def _run_log(config: TrainConfig, runtime: Runtime, first: int | None) -> RunLog:
    tensorboard = "auto" if config.log.tensorboard else False
    return RunLog(
        config.out,
        active=runtime.leads,
        resume_step=first,
        tensorboard=tensorboard,
        wandb_project=config.log.wandb_project,
    )


class _Meter:
    """Time, throughput, memory and communication of the steps of one call of `fit`.

    Memory on a CPU is accounted tensor by tensor, and collectives are counted, during the second step alone: by then
    the optimizer's state exists, and what counting costs does not touch the other steps.
    """

    COUNTED = 2

    def __init__(self, data: ParallelModel, config: TrainConfig, runtime: Runtime, flops_per_token: float | None):
        self.data, self.runtime, self.flops_per_token = data, runtime, flops_per_token
        self.num_devices = data.mesh.size()
        self.account: MemoryAccount | None = None
        self.volume: Volume | None = None
        self.dispatch = not config.compile  # a dispatch mode would send compiled blocks back to eager
        self.peak = peak_flops(runtime.device, compute_dtype(config.precision)) if flops_per_token else None
        self.times: list[tuple[float, int]] = []
        self.begin = self.step_begin = time.perf_counter()

    @contextmanager
    def step(self, state: TrainState) -> Iterator[None]:
        self.step_begin = time.perf_counter()
        with ExitStack() as stack:
            if self.dispatch and len(self.times) == self.COUNTED - 1:
                self.volume = stack.enter_context(count_volume(self.data.mesh))
                if self.runtime.device.type == "cpu" and self.data.device_peak_bytes is None:
                    self.account = stack.enter_context(MemoryAccount())
                    self.account.add(self.data.model.parameters())
                    self.account.add(self.data.masters.values())
                    held = [v for s in state.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
                    self.account.add(held + list(state.average.tensors.values() if state.average else ()))
            yield

    def row(self, tokens: int) -> dict[str, float]:
        """Figures of the step that has just ended."""
        elapsed = time.perf_counter() - self.step_begin
        self.times.append((elapsed, tokens))
        row: dict[str, float] = {"tokens_per_s": tokens / elapsed, "step_s": elapsed}
        if self.flops_per_token:
            row |= {"mfu": share} if (share := self._mfu(tokens / elapsed)) is not None else {}
        if self.account is not None or self.data.device_peak_bytes or self.runtime.device.type == "cuda":
            row["memory_bytes"] = self._memory()
        return row

    def _mfu(self, tokens_per_s: float) -> float | None:
        return mfu(tokens_per_s, self.flops_per_token or 0.0, self.peak, self.num_devices)

    def _memory(self) -> int:
        return self.data.device_peak_bytes or peak_bytes(self.runtime.device, self.account)

    def summary(self, step: int, num_steps: int, state: TrainState) -> dict[str, Any]:
        """What the run came to; peaks are those of the rank that needed most."""
        counted = self.times[self.COUNTED :] or self.times
        tokens_per_s = sum(t for _, t in counted) / sum(s for s, _ in counted) if counted else None
        peaks = torch.tensor([self._memory(), resident_peak_bytes()], dtype=torch.int64, device=self.runtime.device)
        if self.num_devices > 1:
            dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
        device_peak, resident_peak = peaks.tolist()
        return {
            "step": step,
            "status": "complete" if step == num_steps else "stopped",
            "loss": state.loss,
            "tokens_per_s": tokens_per_s,
            "mfu": None if tokens_per_s is None or not self.flops_per_token else self._mfu(tokens_per_s),
            "peak_flops_per_device": self.peak,
            "device_peak_bytes": device_peak,
            "resident_peak_bytes": resident_peak,
            "communication_bytes_per_step": self.volume and self.volume.total_bytes,
            "skipped_steps": state.loss_scale.skipped_steps,
            "num_ranks": self.num_devices,
            "device": self.runtime.device.type,
            "wall_s": time.perf_counter() - self.begin,
            **self.data.figures(),
        }
