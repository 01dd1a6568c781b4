"""The state of a training run from step to step, and in checkpoints."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from core.checkpoint import Checkpointer, complete_steps, decode_rank_values, encode_rank_values
from core.config import UserError, option
from core.mesh import GRID_AXES, axis_size, data_axis, group_of_ranks, stage_axis
from core.nn.moe import MoE, take_load
from core.optim.average import WeightAverage
from core.optim.clip import gradient_squares
from core.optim.frozen import frozen
from core.optim.sharded import make_state, restore_state, state_tensors
from core.parallel.coded_shards import CodedErrors
from core.parallel.compress import UNCOMPRESSED
from core.parallel.correction import CORRECTIONS
from core.parallel.one_bit import InSigns
from core.parallel.parallel_model import ParallelModel, Work
from core.parallel.pipeline.schedule import SCHEDULES, ScheduleName
from core.parallel.regroup import Read, check_form
from core.precision import LossScale
from core.rng import rng_state, set_rng_state
from core.runtime import agreed
from core.train.config import TrainConfig
from core.train.curvature import Curvature
from core.train.folder import changes, checkpoint_path
from core.train.noise import NoiseScale
from core.weights import persistent_buffers

BUFFER = "buffer/"
MOST_SKIPPED_IN_A_ROW = 20
RandomState = dict[str, Tensor | bytes]
NO_CORRECTION = {"name": "none", "count": 0}
"""of checkpoints that were written before there were any"""


class Elastic(Protocol):
    """Replicas that share a step's rows, and come and go (`core.train.elastic`).

    num_rows  of the step's whole batch
    """

    num_rows: int

    def first_row(self, data_rank: int, rows: int) -> int:
        """The place in the whole batch of the first row of a data rank of this replica, which has so many."""
        ...

    def exchange(self, weight: Tensor, mean: Tensor) -> Tensor:
        """Make the masters' gradients, complete in this replica, those of all rows.  Returns their loss.

        weight  of this replica's rows
        mean    this rank's part of their loss

        Raises `core.members.Aborted` on all replicas, or on none.
        """
        ...


class TrainState:
    """A run's state, as checkpoints keep it: parameters, average, optimizer, loss scale, buffers, values, draws."""

    def __init__(
        self,
        parallel: ParallelModel,
        optimizer: torch.optim.Optimizer,
        loss_scale: LossScale,
        values: dict[str, Any],
        average: WeightAverage | None = None,
        keep_frozen: bool = True,
        noise: NoiseScale | None = None,
    ):
        self.parallel, self.optimizer, self.loss_scale, self.values = parallel, optimizer, loss_scale, values
        self.average, self.keep_frozen, self.noise = average, keep_frozen, noise
        self.curvature: Curvature | None = None
        self._loaded: dict[str, Any] = {}
        self.stopping = False
        self.loss = float("nan")
        self.begun = deque[tuple[Work, StepTally]]()  # a pipeline's next steps, as far as the last one has begun them
        self.norms: dict[int, float] = {}  # of gradients of the latest steps, for a pipeline whose stages clip by them
        self.elastic: Elastic | None = None
        self._skipped_in_a_row = 0
        if isinstance(parallel.compression, InSigns):
            parallel.compression.attach(frozen(optimizer, parallel.masters))
        if parallel.ahead is not None:
            loss_scale.remembers = parallel.ahead.depth

    @property
    def learning_rates(self) -> list[float]:
        """Each parameter group's own rate, before any schedule: torch's `initial_lr`, or what it has at first."""
        return [float(group.setdefault("initial_lr", group["lr"])) for group in self.optimizer.param_groups]

    def tensors(
        self, optim: dict[str, dict[str, Tensor]] | None = None, comm: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """name -> local tensor of everything that is saved as tensors.

        optim  parameter -> its optimizer's tensors; by default as they are now
        comm   those of compressed messages; by default as they are now
        """
        unsent = self.parallel.unsent
        if comm is None:
            comm = {} if unsent is None else unsent.tensors()
        frozen = self.parallel.frozen if self.keep_frozen else {}
        found = {f"model/{name}": parameter for name, parameter in frozen.items()}
        found |= {f"model/{name}": master for name, master in self.parallel.masters.items()}
        found |= {f"stashed/{name}": parameter for name, parameter in self.parallel.stashed.items()}
        for key, state in self.parallel.correction.tensors.items():
            found |= {f"correction/{key}/{name}": value for name, value in state.items()}
        found |= {f"{BUFFER}{name}": b for name, b in persistent_buffers(self.parallel.model).items()}
        for name, state in (self._optimizer_tensors() if optim is None else optim).items():
            found |= {f"optim/{key}/{name}": value for key, value in state.items()}
        found |= {f"comm/{name}": value for name, value in comm.items()}
        if self.average is not None:
            found |= {f"average/{name}": value for name, value in self.average.tensors.items()}
        return found if self.parallel.local is None else self.parallel.local.stored(found)

    def _optimizer_tensors(self) -> dict[str, dict[str, Tensor]]:
        return {name: state_tensors(self.optimizer, master) for name, master in self.parallel.masters.items()}

    def save(self, checkpointer: Checkpointer, step: int) -> None:
        if self.parallel.durable is not None:
            self.parallel.durable.confirm()
        checkpointer.save(step, self.complete_tensors(), self.record(), rng_state())

    def complete_tensors(self) -> dict[str, Tensor]:
        """`tensors`, with the optimizer's state of what has none: it took part in no step, or all were skipped."""
        make_state(self.optimizer, self.parallel.masters.values())
        return self.tensors()

    def record(self) -> dict[str, Any]:
        """All that is saved and is no tensor, JSON-able, alike on every rank."""
        values: dict[str, Any] = {"values": self.values, "loss_scale": self.loss_scale.state()}
        values["schedule"] = self.parallel.schedule_name
        values["correction"] = {"name": self._correction, "count": self.parallel.correction.count}
        values["stages"] = self.parallel.blocks_of_stages
        if self.parallel.local is not None:
            values["local"] = dict(self.parallel.local.form)
        if self.norms:
            values["norms"] = [[step, norm] for step, norm in self.norms.items()]
        if self.average is not None:
            values["average_steps"] = self.average.steps
        if self.noise is not None:
            values["noise_scale"] = self.noise.state()
        if self.parallel.unsent is not None:
            values["compression"] = self.parallel.unsent.record()
        return values

    def commit(self, step: int, config: TrainConfig) -> None:
        """Begin to make a step durable where the model's steps are; the last one of a run is when this returns."""
        durable = self.parallel.durable
        if durable is None or (step % durable.every and step < config.steps and not self.stopping):
            return
        buffers = persistent_buffers(self.parallel.model)
        blob = encode_rank_values(rng_state() | {f"{BUFFER}{name}": b for name, b in buffers.items()})
        durable.commit(step, run_of(config), self.record(), blob)
        if step == config.steps or self.stopping:
            durable.confirm()

    def load_durable(self, step: int) -> int:
        """Take over a durable step.  Returns it."""
        durable = self.parallel.durable
        assert durable is not None
        with durable.loading(), torch.no_grad():
            values, blob = durable.restore(step)
            self._require_schedule(values)
            found = decode_rank_values(blob)
            for name, buffer in persistent_buffers(self.parallel.model).items():
                kept = found.pop(f"{BUFFER}{name}")
                assert isinstance(kept, Tensor)
                buffer.copy_(kept)
            self.parallel.publish()
        self._take_over(values, found)
        return step

    def load(self, checkpointer: Checkpointer, at: Path | None) -> int:
        """Take over a checkpoint, of whatever mesh.  Returns its step.

        Raises UserError for one of a pipeline that runs ahead where this does not, and the other way round, and for one
        of another correction, one whose stages were late by other numbers of updates, one of other local training, and
        one of compressed messages that this run does not compress alike.
        """
        saved = checkpointer.values(at)
        self._require_schedule(saved)
        self._require_correction(saved)
        comm = self._compression_to_fill(saved)
        self._require_rounds(saved)
        step = 0

        def fill(tensors: dict[str, Tensor]) -> tuple[dict[str, Any], RandomState | None]:
            nonlocal step
            local = self.parallel.local
            reads = iter([Read(tensors)]) if local is None else local.reads(saved["local"], tensors)
            found = [checkpointer.load(at, read.tensors, leaves=read.leaves) for read in reads]
            step, values, random = found[0]
            return values, random

        self.take(fill, comm)
        return step

    @torch.no_grad()
    def take(
        self,
        fill: Callable[[dict[str, Tensor]], tuple[dict[str, Any], RandomState | None]],
        comm: dict[str, Tensor] | None = None,
        publish: bool = True,
    ) -> None:
        """Take over the state of a run.

        fill     fills `tensors` in place, and returns the `record` and this rank's random state, where it is to be had
        comm     see `tensors`
        publish  by its masters at once; whoever says no does it before the next forward
        """
        make_state(self.optimizer, self.parallel.masters.values())
        durable = self.parallel.durable
        with nullcontext() if durable is None else durable.loading():
            optim = self._optimizer_tensors()
            values, random = fill(self.tensors(optim, comm))
            self.parallel.correction.count = values.get("correction", NO_CORRECTION)["count"]
            for name, loaded in optim.items():
                restore_state(self.optimizer, self.parallel.masters[name], loaded)
            if self.parallel.local is not None:
                self.parallel.local.restored()
            if publish:
                self.parallel.publish()
        if comm and self.parallel.unsent is not None:
            self.parallel.unsent.take(values["compression"], comm)
        self._take_over(values, random)

    def _take_over(self, values: dict[str, Any], random: Mapping[str, Tensor | bytes] | None) -> None:
        self._loaded = values["values"] | _workers(values)
        self.norms = {int(step): float(norm) for step, norm in values.get("norms", [])}
        self.loss_scale.load_state(values["loss_scale"])
        if self.average is not None:
            self.average.steps = values["average_steps"]
        if self.noise is not None and "noise_scale" in values:
            self.noise.load_state(values["noise_scale"])
        if random is not None:
            set_rng_state(dict(random))

    def changed(self) -> str:
        """What is otherwise than when the checkpoint was made that was taken over: see `core.train.folder.changes`."""
        return changes(self._loaded, self.values | _workers(self.record()))

    def _require_schedule(self, saved: dict[str, Any]) -> None:
        name, own = saved.get("schedule", "1f1b"), self.parallel.schedule_name
        names = {schedule for schedule, spec in SCHEDULES.items() if spec.runs_ahead}
        if name != own and names & {name, own}:
            again = "--mesh.pp 1" if name == "none" else f"--pipeline.schedule {name}"
            raise UserError(
                f"it is a checkpoint of pipeline.schedule={name}, and this run has {own}, whose steps compute with "
                f"weights of other updates; resume it with {again}, or begin anew with its weights"
            )
        stages, own_stages = saved.get("stages", []), self.parallel.blocks_of_stages
        if name in names and _lateness(name, stages) != _lateness(name, own_stages):
            blocks, own_blocks = (" ".join(map(str, of)) for of in (stages, own_stages))
            raise UserError(
                f"it is a checkpoint of pipeline.schedule={name} with stages of {blocks} blocks, and this run has "
                f"stages of {own_blocks}, whose weights are late by other numbers of updates; resume it with "
                f"--mesh.pp {len(stages)} --pipeline.split {blocks}, or begin anew with its weights"
            )

    def _require_rounds(self, saved: dict[str, Any]) -> None:
        """Raises UserError for a checkpoint of workers that keep other things than those of this run."""
        rounds, local = saved.get("local"), self.parallel.local
        if rounds is not None and local is not None:
            check_form(rounds, local.form)
        elif rounds is not None:
            raise UserError(
                f"it is a checkpoint of {rounds['workers']} local workers, and this run has none; resume it with "
                "--local.every, or begin anew with its weights"
            )
        elif local is not None:
            raise UserError(
                f"it is a checkpoint of no local workers, and this run has {local.form['workers']}; resume it without "
                "--local.every, or begin anew with its weights"
            )

    def note_norm(self, step: int, norm: float) -> None:
        """Keep a step's norm for those whose stages clip by it (`last_norm`)."""
        ahead = self.parallel.ahead
        if ahead is not None and ahead.updates_at_once:
            self.norms = {known: value for known, value in self.norms.items() if known > step - ahead.depth}
            self.norms[step] = norm

    def last_norm(self, step: int, own: float) -> float:
        """The norm of all stages' gradients in the latest step that every stage knows when it updates in this one.

        own  taken where there is none, or none that is finite
        """
        ahead = self.parallel.ahead
        assert ahead is not None
        norm = self.norms.get(step - ahead.depth, own)
        return norm if math.isfinite(norm) else own

    @property
    def _correction(self) -> str:
        return next(name for name, spec in CORRECTIONS.items() if spec.make is type(self.parallel.correction))

    def _require_correction(self, saved: dict[str, Any]) -> None:
        name = saved.get("correction", NO_CORRECTION)["name"]
        if name != self._correction:
            raise UserError(
                f"it is a checkpoint of pipeline.correction={name}, and this run has {self._correction}, of another "
                f"state; resume it with --pipeline.correction {name}, or begin anew with its weights"
            )

    def _compression_to_fill(self, saved: dict[str, Any]) -> dict[str, Tensor]:
        """The tensors of compressed messages in a checkpoint; of one that had none, none: they begin with this run.

        Raises UserError where this run does not go on with them.
        """
        record, unsent = saved.get("compression"), self.parallel.unsent
        if record is None:
            return {}
        if unsent is None or record["compress"] != unsent.name:
            was, own = _option_of(record["compress"]), "none" if unsent is None else _option_of(unsent.name)
            raise UserError(
                f"it is a checkpoint of {was}, and this run has {own}, which would lose what has not been sent yet; "
                f"resume it with --{was.replace('=', ' ')}, or begin anew with its weights"
            )
        for name, value in unsent.options.items():
            saved_value = record.get(name, getattr(UNCOMPRESSED, name))  # one that is not there is younger
            if saved_value != value:
                typed = option(f"comm.{name}")
                again = f"without {typed}" if saved_value is None else f"with {typed} {saved_value}"
                raise UserError(
                    f"it is a checkpoint of comm.{name}={saved_value}, and this run has {value}; resume it {again}, or "
                    "begin anew with its weights"
                )
        return unsent.to_fill(record)

    def read_step(
        self, mean: Tensor, norm: Tensor, stop_requested: bool, squares: Tensor | None = None
    ) -> "StepFigures":
        """Read a step's figures, alike on all ranks, in one wait for the device: loss, norm, stop, experts' load.

        squares  numbers of this rank whose sums over all ranks are read, too: in the same message
        """
        axis = data_axis(self.parallel.mesh)
        copies = self.parallel.mesh.size() // axis.size()
        both = torch.stack((mean / copies, torch.full_like(mean, float(stop_requested))))
        sums = both if squares is None else torch.cat((both, squares.to(both)))
        if self.parallel.mesh.size() > 1:
            dist.all_reduce(sums, group=group_of_ranks(self.parallel.mesh))
        load = _expert_load(self.parallel)
        parts = [norm.double().reshape(1), sums.double(), *(() if load is None else (load.flatten(),))]
        norm_read, self.loss, stops, *rest = torch.cat(parts).tolist()
        self.stopping = stops > 0
        squares_read, loads = rest[: len(sums) - 2], rest[len(sums) - 2 :]
        # Read back as they were: fp64 has all the digits that any of these formats has.
        load = None if load is None else torch.tensor(loads, dtype=load.dtype).view(load.shape)
        return StepFigures(norm_read, load, squares_read)

    def read_sums(self, sums: Tensor, tally: "StepTally") -> "StepFigures":
        """The same of a pipeline that runs ahead, of what its tally has come to."""
        self.loss, stops, _, *loads = sums.tolist()
        self.stopping = stops > 0
        shape = tally.load_shape
        load = None if shape is None else torch.tensor(loads, dtype=torch.float64).view(shape)
        return StepFigures(StepTally.norm_in(sums), load, [])

    def require_progress(self) -> None:
        """Raises UserError where step after step was skipped, this one too."""
        self._skipped_in_a_row = 0 if self.loss_scale.good_steps else self._skipped_in_a_row + 1
        if self._skipped_in_a_row == MOST_SKIPPED_IN_A_ROW:
            raise UserError(
                f"gradients were not finite in {MOST_SKIPPED_IN_A_ROW} steps in a row (loss {self.loss}); "
                "lower optim.lr, warm up for longer, or use --precision bf16 or fp32"
            )


class StepTally:
    """What a step says of itself, where its stages end it at different times: loss, stop, squares of gradients, load.

    load_shape  of the experts' load; None of a model without experts
    """

    def __init__(self, parallel: ParallelModel, stop_requested: Callable[[], bool]):
        self.parallel, self.stop_requested = parallel, stop_requested
        layers = [module for module in parallel.model.modules() if isinstance(module, MoE)]
        self.load_shape = (len(layers), layers[0].config.num_experts + 5) if layers else None
        self.size = 3 + math.prod(self.load_shape or (0,))
        self._load: Tensor | None = None

    def forwarded(self) -> None:
        self._load = take_load(self.parallel.model, self.parallel.device)

    def of_stage(self, loss: Tensor, replicas: int) -> Tensor:
        mesh, stage = self.parallel.mesh, stage_axis(self.parallel.mesh)
        assert stage is not None
        copies = stage.size() // data_axis(mesh).size()
        stop = torch.full_like(loss, float(self.stop_requested()))
        squares = gradient_squares(self.parallel.masters.values(), mesh).to(loss) / replicas
        load = () if self._load is None else ((self._load / _alike(mesh)).flatten().to(loss),)
        sums = torch.cat((torch.stack((loss / copies, stop, squares)), *load))
        if stage.size() > 1:
            dist.all_reduce(sums, group=stage.get_group())
        return sums

    @staticmethod
    def norm_in(sums: Tensor) -> float:
        """The norm of the gradients that are in sums."""
        squares = float(sums[2])
        return math.sqrt(squares) if squares >= 0 else squares


def _option_of(compression: str) -> str:
    """What asks for a compression, by its name."""
    return "comm.feedback" if compression == CodedErrors.name else f"comm.compress={compression}"


def _workers(values: Mapping[str, Any]) -> dict[str, int]:
    """Of a `record`."""
    return {"local workers": values["local"]["workers"]} if "local" in values else {}


def _lateness(name: ScheduleName, stages: list[int]) -> int | list[int]:
    """What the versions of a checkpoint depend on: by how much all stages are late, or which blocks each has."""
    delays = {SCHEDULES[name].delay(stage, len(stages)) for stage in range(len(stages))}
    return delays.pop() if len(delays) == 1 else stages


class StepFigures(NamedTuple):
    """norm: of the gradients, times the loss scale. expert_load: see `core.nn.moe.take_load`, on the host.

    squares  see `TrainState.read_step`; empty where none were given
    """

    norm: float
    expert_load: Tensor | None
    squares: list[float]


def _expert_load(parallel: ParallelModel) -> Tensor | None:
    """The step's load of experts, over all ranks; None of a model without experts."""
    load = take_load(parallel.model, parallel.device)
    if load is None:
        return None
    if parallel.mesh.size() > 1:
        dist.all_reduce(load, group=group_of_ranks(parallel.mesh))
    return load / _alike(parallel.mesh)


def _alike(mesh: DeviceMesh) -> int:
    """The ranks that route as one."""
    alike = [axis for axis in ("tp", GRID_AXES[-1]) if axis in (mesh.mesh_dim_names or ())]
    return math.prod(axis_size(mesh, axis) for axis in alike)


def resume(state: TrainState, checkpointer: Checkpointer, config: TrainConfig, again: bool = False) -> int | None:
    """Load what `config.resume` names.  Returns the step to go on from; None for a fresh run.

    again  the run itself goes on, from what it has saved last

    Raises UserError where a fresh run, or one that goes on from another place, would write over an earlier one, and for
    a path without a complete checkpoint.
    """
    latest = agreed(checkpointer.latest())  # file systems need not show all ranks the same at once
    on_disk = _durable_step(state, config, latest or 0)
    if config.resume is None and not again:
        if latest is not None:
            raise UserError(
                f"{config.out} already holds a run (step {latest}); add --resume to continue it, or give another --out"
            )
        return None
    if config.resume in (None, "auto") or (again and latest is not None):
        if on_disk is not None and on_disk >= (latest or 0):
            return state.load_durable(on_disk)
        return None if latest is None else state.load(checkpointer, None)
    path = agreed(checkpoint_path(Path(config.resume)))
    if latest is not None and path.resolve() != agreed(complete_steps(checkpointer.folder).get(latest, path).resolve()):
        raise UserError(
            f"resume={config.resume} and {config.out} already holds a run (step {latest}), which this one would write "
            "over; give --resume alone to continue that, or another --out"
        )
    return state.load(checkpointer, path)


def run_of(config: TrainConfig) -> str:
    """The name of a run on a disk: its folder."""
    return str(config.out.resolve())


def _durable_step(state: TrainState, config: TrainConfig, latest: int) -> int | None:
    """The last step of this run on its disk.

    latest  step of the last checkpoint

    Raises UserError where the disk has steps of others, of no resumed run, or later ones than the last checkpoint that
    are of another number of ranks: none of these could be gone on from, and all would be written over.
    """
    durable = state.parallel.durable
    if durable is None:
        return None
    found = durable.latest()
    others = durable.of_other_ranks() if found is None else None
    if others is not None:
        found = others[:2]
    if found is None:
        return None
    step, run = found
    if run != run_of(config):
        raise UserError(
            f"gemini.disk={durable.folder} holds step {step} of {run}; continue that run, or give another folder"
        )
    if config.resume is None:
        raise UserError(
            f"gemini.disk={durable.folder} already holds step {step} of this run; add --resume to continue it, or "
            "remove the folder"
        )
    if others is None:
        return step
    if config.resume == "auto" and step > latest:
        number = others[2]
        raise UserError(
            f"gemini.disk={durable.folder} holds step {step} of this run on {number} rank{'s' * (number > 1)}, and the "
            f"last checkpoint is of step {latest}; continue it with as many, or remove the folder to lose these steps"
        )
    return None
