"""The configuration of a training run, which every app's own adds to."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar

from core.checkpoint import CheckpointConfig
from core.compose import ParallelConfig
from core.config import UserError, require_device
from core.members import parse_address
from core.mesh import MeshConfig
from core.optim.adam import AdamConfig
from core.optim.build import OptimConfig
from core.optim.sgd import SgdConfig
from core.optim.spec import spec_of
from core.parallel.compress import IN_SIGNS
from core.parallel.correction import CORRECTIONS
from core.parallel.local import LocalTrainingConfig, check_local
from core.parallel.pipeline.schedule import SCHEDULES
from core.precision import LossScaleConfig, MatmulPrecision

OF_ONE_RANK = ("adagrad", "adam", "adamw", "rmsprop", "sgd")
"""Optimizers that are torch's own: their update of a parameter asks no other rank."""


@dataclass(frozen=True)
class LogConfig:
    tensorboard: bool = True
    """also write TensorBoard events, when tensorboard is installed"""
    wandb_project: str | None = None
    """Weights & Biases project to report to"""


@dataclass(frozen=True)
class ElasticConfig:
    """Replicas that come and go."""

    store: str | None = None
    """HOST:PORT where the replicas of a run, each a launch of its own with the same options, find each other, join and
    are missed; where HOST is this machine and nobody listens, a store is started. None: the launch is the run"""
    min: int = 1
    """replicas that a step takes at least; with fewer the run saves and waits"""
    max: int | None = None
    """replicas that a step takes at most; those that come later wait as spares. None: as many as it has rows"""
    buddy_every: int | None = None
    """keep each rank's state also in memory that outlives it, every so many steps: where no replica is left that has
    the state, the next one takes it from there, without a disk. None: from the last checkpoint"""
    lost_after: float = 5.0
    """seconds without a sign of life after which a replica is taken for lost"""

    def __post_init__(self) -> None:
        if self.store is not None:
            parse_address(self.store)
        if self.min < 1:
            raise UserError(f"elastic.min={self.min}; give a number of replicas, at least 1")
        if self.max is not None and self.max < self.min:
            raise UserError(f"elastic.max={self.max}; give a number of replicas, at least elastic.min={self.min}")
        if self.buddy_every is not None and self.buddy_every < 1:
            raise UserError(
                f"elastic.buddy_every={self.buddy_every}; give a number of steps, at least 1, or leave it out to keep "
                "state in checkpoints alone"
            )
        if not 1 <= self.lost_after < float("inf"):
            raise UserError(f"elastic.lost_after={self.lost_after}; give seconds, at least 1")

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        if self.store is not None:
            return {}
        why = "without elastic.store, through which replicas find each other; give --elastic.store localhost:29400"
        return dict.fromkeys(("min", "max", "buddy_every", "lost_after"), why)


@dataclass(frozen=True)
class TrainConfig(ParallelConfig):
    """A training run: how the model runs (see ParallelConfig), on which mesh, for how long, and what is kept of it."""

    ESSENTIAL: ClassVar[tuple[str, ...]] = (
        *("steps", "out", "resume", "seed", "device", "precision", "microbatch", "optim.name", "optim.lr"),
        *("optim.schedule.warmup_steps", "checkpoint.every", "evaluate_every", "compile", "recompute.mode"),
        *("zero", "mesh.tp", "mesh.pp", "mesh.cp", "gemini.budget"),
    )

    CALLED: ClassVar[Mapping[str, str]] = {"local.asynchronous": "local.async"}  # a word of Python's

    CHOOSES_SEGMENTS: ClassVar[bool] = False
    """Whether its command finds what recompute.mode budget computes again."""

    ELASTIC: ClassVar[bool] = True
    """Whether replicas of its command may come and go."""

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
    noise_scale: bool = False
    """estimate the gradient noise scale, in rows: about the largest batch whose rows still save steps"""
    noise_scale_steps: int = 200
    """steps that its numerator and its denominator are averaged over; only read with noise_scale"""
    log: LogConfig = field(default_factory=LogConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    """data parallelism over launches that come and go"""
    device: str = "auto"
    """cpu or cuda; auto: CUDA where there is one"""
    matmul_precision: MatmulPrecision = "highest"
    """of products in fp32: highest (exact), high (on a GPU by TF32, with 11 bits) or medium (as bf16)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_device("device", self.device, numbered=False)
        for name in ("steps", "stop_after", "microbatch", "noise_scale_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value}; give a positive number")
        if self.hang_after is not None and not 0 < self.hang_after < float("inf"):
            raise UserError(f"hang_after={self.hang_after}; give seconds, or leave it out for 20 median steps")
        if self.gemini.budget is not None:
            self._check_gemini()
        if self.recompute.mode == "budget" and not self.CHOOSES_SEGMENTS:
            raise UserError(
                "recompute.mode=budget: of the commands only megalith llm and fold train choose what is computed "
                "again; use --recompute.mode full, sqrt or recursive"
            )
        if self.evaluate_every < 0:
            raise UserError(f"evaluate_every={self.evaluate_every}; give a number of steps, or 0 for only at the end")
        if self.noise_scale:
            self._check_noise_scale()
        if self.local.asynchronous is not None:
            self._check_asynchronous()
        if self.comm.compress is not None or self.comm.gradients is not None:
            self._check_compression()
        self.comm.check_activations(self.mesh)
        if self.rounds is not None:
            self._check_workers(self.rounds)
        if self.elastic.store is not None:
            self._check_elastic()
        self.check_pipeline(self.mesh.pp)
        self._check_correction()
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
        if self.optim.clip_norm is None:
            found["pipeline.clip"] = "without optim.clip_norm: nothing is clipped; leave it out"
        if not self.noise_scale:
            found["noise_scale_steps"] = "without noise_scale, which it averages; give --noise-scale"
        if self.gemini.budget is not None:
            found["reduce_each"] = "with a budget: Gemini says itself when gradients are reduced; leave it out"
        if self.mesh.pp > 1:
            found["gemini.order"] = "with stages, whose --pipeline.schedule is the order of microbatches; leave it out"
        elif self.microbatch is None:
            found["gemini.order"] = "without microbatch, where a step has one; give --microbatch"
        if self.gemini.disk is None:
            found["gemini.durable_every"] = "without a disk, on which steps are durable; give --gemini.disk"
        return found

    def _check_correction(self) -> None:
        """Raises UserError for an optimizer that the pipeline's correction is not defined for."""
        spec, name = CORRECTIONS[self.pipeline.correction], self.optim.name
        given = f"pipeline.correction={self.pipeline.correction} with optim.name={name}"
        if spec.optimizers and name not in spec.optimizers:
            raise UserError(
                f"{given}: it is defined for {', '.join(spec.optimizers)}; use one of these, or --pipeline.correction "
                "error_feedback, which goes with all"
            )
        if not spec.has_momentum:
            return
        option = "momentum" if name == "sgd" else "betas"
        value = getattr(self.optim, option)
        first, *others = value if isinstance(value, tuple) else (value,)
        if first:
            without = " ".join(f"{n:g}" for n in (0, *others))
            raise UserError(
                f"{given}, whose {option} {'is' if option == 'momentum' else 'begin with'} {first:g}: the correction "
                f"brings the momentum itself; give --optim.{option} {without}"
            )

    def _check_asynchronous(self) -> None:
        """Raises UserError where not every rank is a worker, and for optimizers whose update is not one rank's."""
        mesh, optim, given = self.mesh, self.optim, f"local.async={self.local.asynchronous}"
        for axis in ("tp", "cp", "pp", "ep"):
            if getattr(mesh, axis) > 1:
                raise UserError(
                    f"{given} with mesh.{axis}={getattr(mesh, axis)}: those ranks wait for one another in every step; "
                    f"use --mesh.{axis} 1, or no --local.async"
                )
        if self.noise_scale:
            raise UserError(f"{given} with noise_scale: no rank has the gradient of the whole batch; leave one out")
        if optim.plan and self.local.asynchronous == "parameter_server":
            raise UserError(f"{given} with optim.plan: no rank has all parameters to tell of; leave --optim.plan out")
        if optim.name not in OF_ONE_RANK:
            raise UserError(
                f"{given} with optim.name={optim.name}: an owner updates single parameters, by itself; "
                f"use {', '.join(OF_ONE_RANK)}"
            )
        if self.local.asynchronous == "hogwild" and not (isinstance(optim, SgdConfig) and optim.momentum == 0):
            raise UserError(
                f"{given} with optim.name={optim.name}: its updates have no state that workers would share; use "
                "--optim.name sgd --optim.momentum 0, or --local.async parameter_server"
            )

    def _check_compression(self) -> None:
        """Raises UserError for meshes, optimizers and estimates that need the sum of the gradients itself."""
        self.comm.check_mesh(self.mesh.pp, self.mesh.ep, self.mesh.cp)
        given = self.comm.given
        if self.noise_scale:
            raise UserError(f"{given} with noise_scale: no rank has the gradient of the whole batch; leave one out")
        if self.optim.name == "hessian_free":
            raise UserError(
                f"{given} with optim.name=hessian_free: it solves with products of which it needs the sums themselves; "
                f"use another --optim.name, or no --{given.split('=')[0]}"
            )
        if self.comm.compress in IN_SIGNS:
            self._check_in_signs()

    def _check_in_signs(self) -> None:
        """Raises UserError for optimizers that have no momentum to send, or of which it is not all that they take."""
        optim, given = self.optim, f"comm.compress={self.comm.compress}"
        if self.zero == 3:
            raise UserError(f"{given} with zero=3: no rank has all momenta then; use --zero 0, 1 or 2")
        known = ("adam", "adamw", "lamb") if self.comm.compress == "one_bit" else ("adam", "adamw")
        if optim.name not in known:
            raise UserError(
                f"{given} with optim.name={optim.name}: it sends the momenta of {', '.join(known)}; use one of these, "
                "or --comm.compress powersgd"
            )
        if isinstance(optim, AdamConfig) and (optim.amsgrad or optim.weight_decay):
            name = "amsgrad" if optim.amsgrad else "weight_decay"
            raise UserError(f"{given} with optim.{name}={getattr(optim, name)} of adam; use --optim.name adamw")

    def _check_workers(self, rounds: LocalTrainingConfig) -> None:
        """Raises UserError where it is not said what a worker is, and for what is of all ranks' rows in each step."""
        mesh = self.mesh
        check_local(
            rounds,
            {
                (
                    f"zero={self.zero} and no mesh.dp_replicate",
                    "that is the number of workers, within which ZeRO shards",
                    "--mesh.dp-replicate 2",
                ): self.zero > 0 and mesh.dp_replicate is None and self.elastic.store is None,
                (
                    "mesh.cp_mode=mixed",
                    "its two axes are of the whole mesh",
                    "--mesh.cp-mode ring",
                ): mesh.cp_mode == "mixed",
                (
                    "noise_scale",
                    "no rank has the gradient of the whole batch",
                    "no --noise-scale",
                ): self.noise_scale,
                (
                    f"optim.name={self.optim.name}",
                    "it looks at the curvature of the whole batch",
                    "--optim.name adamw or muon",
                ): spec_of(self.optim.name).looks,
            },
        )

    def _check_elastic(self) -> None:
        """Raises UserError for what replicas that come and go cannot do."""
        schedule = self.pipeline.schedule
        for there, given, why, instead in (
            (not self.ELASTIC, "this command", "its data is prepared by one launch", "megalith llm"),
            (self.local.asynchronous is not None, f"local.async={self.local.asynchronous}",
             "its workers never take a step together", "no --local.async"),
            (self.comm.compress is not None, f"comm.compress={self.comm.compress}",
             "what was not sent yet is lost with a replica", "no --comm.compress"),
            (self.comm.gradients is not None, f"comm.gradients={self.comm.gradients}",
             "gradients are rounded within a replica, and fewer replicas would round others", "no --comm.gradients"),
            (self.gemini.budget is not None, f"gemini.budget={self.gemini.budget}",
             "masters lie on two sides, and a joining replica would have to place them alike", "no budget"),
            (self.noise_scale, "noise_scale", "no rank has the gradient of the whole batch", "no --noise-scale"),
            (spec_of(self.optim.name).looks, f"optim.name={self.optim.name}",
             "it looks at the curvature of the whole batch", "--optim.name adamw or muon"),
            (SCHEDULES[schedule].runs_ahead, f"pipeline.schedule={schedule}",
             "steps begin before the one before has ended", "--pipeline.schedule 1f1b"),
        ):  # fmt: skip
            if there:
                raise UserError(
                    f"elastic.store={self.elastic.store} with {given}: {why}; use {instead}, or no --elastic.store"
                )

        if self.rounds is not None:
            self._check_elastic_rounds(self.rounds)

    def _check_elastic_rounds(self, rounds: LocalTrainingConfig) -> None:
        """Raises UserError for what local workers that come and go cannot do."""
        every, saved = rounds.every, self.checkpoint.every
        for there, given, why, instead in (
            (rounds.start > 0, f"local.start={rounds.start}", "before it all workers would take each step together",
             "no --local.start"),
            (rounds.fragments > 1, f"local.fragments={rounds.fragments}", "a worker joins where all rounds end",
             "no --local.fragments"),
            (rounds.overlap > 0, f"local.overlap={rounds.overlap}", "a worker that is lost meanwhile would be averaged",
             "no --local.overlap"),
            (rounds.bits is not None, f"local.bits={rounds.bits}", "what was not sent yet is lost with a worker",
             "no --local.bits"),
            (self.elastic.buddy_every is not None, f"elastic.buddy_every={self.elastic.buddy_every}",
             "every worker has theta and the outer momentum", "no --elastic.buddy-every"),
            (saved % every > 0, f"checkpoint.every={saved}", f"what is saved is of whole rounds of local.every={every}",
             f"--checkpoint.every {max(1, round(saved / every)) * every}"),
        ):  # fmt: skip
            if there:
                raise UserError(f"elastic.store with local.every={every} and {given}: {why}; use {instead}")

    def _check_noise_scale(self) -> None:
        """Raises UserError where no rank has the gradient of its own rows, or its shards, before they are reduced."""
        mesh = self.mesh
        for given, there, why, instead in (
            (f"mesh.cp={mesh.cp}", mesh.cp > 1, "a rank has the gradient of a part of each row", "--mesh.cp 1"),
            (f"mesh.ep={mesh.ep}", mesh.ep > 1, "an expert's gradient is of several ranks' rows", "--mesh.ep 1"),
            (
                f"mesh.tp_mode={mesh.tp_mode}",
                mesh.tp_mode != "1d",
                "a rank has the gradient of a part of the rows",
                "--mesh.tp-mode 1d",
            ),
            (
                f"gemini.budget={self.gemini.budget}",
                self.gemini.budget is not None,
                "gradients are moved and reduced chunk by chunk",
                "--zero 3 without a budget",
            ),
            ("compile and zero=3", self.compile and self.zero == 3, "FSDP2's hooks are compiled", "--zero 2"),
        ):
            if there:
                raise UserError(f"noise_scale with {given}: {why}; use {instead}, or no --noise-scale")

    def _check_gemini(self) -> None:
        """Raises UserError for what Gemini does not go with."""
        given = f"gemini.budget={self.gemini.budget}"
        if self.zero not in (0, 3):
            raise UserError(
                f"{given} with zero={self.zero}: Gemini shards parameters, gradients and optimizer together; "
                "use --zero 3, or --zero 0 for copies"
            )
        disk = f"gemini.disk={self.gemini.disk}"
        if self.gemini.disk is not None and spec_of(self.optim.name).looks:
            raise UserError(
                f"{disk} with optim.name={self.optim.name}: it looks at all masters at once; use another --optim.name"
            )
        why = SCHEDULES[self.pipeline.schedule].refuses.get("gemini.budget")
        if self.mesh.pp > 1 and why is not None:
            raise UserError(
                f"{given} with pipeline.schedule={self.pipeline.schedule}: {why}; "
                "use --pipeline.schedule 1f1b, gpipe or interleaved"
            )

    def microbatch_rows(self, rows: int) -> list[int]:
        """The number of a rank's rows in each microbatch."""
        if self.microbatch is None and self.mesh.pp > 1:
            sizes = self.pipeline.microbatch_rows(rows, self.mesh.pp)
        else:
            size = min(self.microbatch or rows, rows)
            sizes = [min(size, rows - start) for start in range(0, rows, size)]
        if self.mesh.pp > 1:
            self.pipeline.check_microbatches(len(sizes), self.mesh.pp)
        return sizes
