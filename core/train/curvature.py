"""A training step's part in optimizers that look at curvature: K-FAC's factors, Hessian-free's problem of each step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from core.config import UserError
from core.mesh import GRID_AXES, axis_size, pipeline_ranks
from core.optim.hessian_free import Found, HessianFree
from core.optim.kfac import KFAC
from core.optim.kfac_cut import OtherStages
from core.optim.prediction import Drawing, Predict, Prediction, drawn_targets, exact_fisher, mean_loss
from core.parallel.parallel_model import ParallelModel
from core.parallel.pipeline.run import Pipeline
from core.parallel.pipeline.schedule import SCHEDULES
from core.train.config import TrainConfig

Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


class Microbatch(NamedTuple):
    """share: of the whole batch's weight; first_row: in the whole batch"""

    part: dict[str, Tensor]
    share: Tensor
    first_row: int
    rows: int

    @property
    def length(self) -> int | None:
        """The length of its sequences; None where it has none."""
        ids = self.part.get("input_ids")
        return None if ids is None or ids.ndim < 2 else ids.shape[1]


class Curvature:
    """What K-FAC and Hessian-free ask of a model in a step.  Raises UserError for what they do not go with."""

    def __init__(
        self, parallel: ParallelModel, optimizer: KFAC | HessianFree, predict: Predict | None, config: TrainConfig
    ):
        _refuse(parallel, optimizer, predict, config)
        self.parallel, self.optimizer, self.predict, self.config = parallel, optimizer, predict, config
        if isinstance(optimizer, KFAC) and isinstance(parallel, Pipeline):
            optimizer.watch(parallel.model, parallel.table, OtherStages(parallel.copies, parallel.add_on_owner))
        else:
            optimizer.watch(parallel.model, parallel.table)

    @property
    def solves(self) -> bool:
        """Return whether the optimizer evaluates the model itself, and asks for no gradients."""
        return isinstance(self.optimizer, HessianFree)

    def look(
        self, microbatches: Sequence[Microbatch], weights: Sequence[float], whole: float, loss: Loss, step: int,
        scale: float,
    ) -> None:  # fmt: skip
        """Show K-FAC the model at work on a step's microbatches, where it wants to see it.

        weights, whole  items of each microbatch, and of all on all ranks
        """
        optimizer = self.optimizer
        assert isinstance(optimizer, KFAC)
        optimizer.forget()
        if not optimizer.due or optimizer.defaults["fisher"] == "empirical":
            return
        with _buffers_kept(self.parallel.model):
            if isinstance(self.parallel, Pipeline):
                weighted = list(zip(microbatches, weights, strict=True))
                self._look_at_stages(self.parallel, weighted, whole, loss, step, scale)
                return
            for microbatch, items in zip(microbatches, weights, strict=True):
                drawn, rows = partial(self._drawn, microbatch, loss, step), microbatch.rows
                with self.parallel.looking():
                    optimizer.observe(drawn, items, rows=rows, scale=scale, length=microbatch.length, whole=whole)

    def _look_at_stages(
        self, pipeline: Pipeline, weighted: Sequence[tuple[Microbatch, float]], whole: float, loss: Loss, step: int,
        scale: float,
    ) -> None:  # fmt: skip
        optimizer = self.optimizer
        assert isinstance(optimizer, KFAC)

        def drawn(each: tuple[Microbatch, float], outputs: list[Tensor]) -> Tensor:
            microbatch, items = each
            options = {"rows": microbatch.rows, "factor": whole / scale, "length": microbatch.length}
            part, stages = microbatch.part, pipeline.stages
            if stages.current == stages.num_stages - 1:
                part = self._part_drawn(microbatch, step)
                stages.start_again()
            with optimizer.recording(items * self._counts, **options) as seen:
                try:
                    with self._at(microbatch, step):
                        return loss(pipeline.model, part) * (items / whole)
                finally:
                    outputs += seen

        pipeline.look(weighted, drawn, scale)

    def _drawn(self, microbatch: Microbatch, loss: Loss, step: int) -> Tensor | list[Tensor]:
        """The loss of targets that the model draws, or all of them as `exact_fisher` has them."""
        if self.optimizer.defaults["fisher"] == "exact":
            prediction = self._prediction(microbatch, step)
            return exact_fisher(prediction, microbatch.part[prediction.targets])
        part = self._part_drawn(microbatch, step)
        with self._at(microbatch, step):
            return loss(self.parallel.model, part)

    @torch.no_grad()
    def _part_drawn(self, microbatch: Microbatch, step: int) -> dict[str, Tensor]:
        """The microbatch with targets that the model draws."""
        prediction, part = self._prediction(microbatch, step), microbatch.part
        drawing = Drawing(self.config.seed, step, microbatch.first_row)
        return part | {prediction.targets: drawn_targets(prediction, part[prediction.targets], drawing)}

    def _prediction(self, microbatch: Microbatch, step: int) -> Prediction:
        assert self.predict is not None
        with self._at(microbatch, step):
            return self.predict(self.parallel.model, microbatch.part)

    @contextmanager
    def watching(self, microbatch: Microbatch, items: Tensor, whole: Tensor, scale: float) -> Iterator[None]:
        """Surround a microbatch's own forward, of so many items of all: what the empirical Fisher is made from."""
        optimizer = self.optimizer
        if not isinstance(optimizer, KFAC) or optimizer.defaults["fisher"] != "empirical" or not optimizer.due:
            yield
            return
        with optimizer.recording(
            float(items) * self._counts, rows=microbatch.rows, factor=float(whole) / scale, length=microbatch.length
        ):
            yield

    @property
    def _counts(self) -> bool:
        """Whether a forward's items count: those of a microbatch that goes through several stages here count once."""
        return not isinstance(self.parallel, Pipeline) or self.parallel.stages.current == self.parallel.stages.own[0]

    def minimise(self, microbatches: Sequence[Microbatch], step: int) -> Found:
        """A step of Hessian-free; the parameters of the next forward are up to whoever publishes them."""
        optimizer = self.optimizer
        assert isinstance(optimizer, HessianFree)
        closures = [self._evaluation(microbatch, step) for microbatch in microbatches]
        optimizer.step(closures, first_row=microbatches[0].first_row)
        assert optimizer.found is not None
        return optimizer.found

    def _evaluation(self, microbatch: Microbatch, step: int) -> Callable[[], tuple[Tensor, Tensor]]:
        first = True

        def evaluate() -> tuple[Tensor, Tensor]:
            nonlocal first
            assert self.predict is not None
            # Of torch's attentions the mathematics alone have second derivatives.
            twice = sdpa_kernel(SDPBackend.MATH)
            with _buffers_kept(self.parallel.model, not first), self._at(microbatch, step), twice:
                prediction = self.predict(self.parallel.model, microbatch.part)
                loss = mean_loss(prediction, microbatch.part[prediction.targets])
            first = False
            return loss * microbatch.share.to(torch.promote_types(loss.dtype, torch.float32)), prediction.outputs

        return evaluate

    def _at(self, microbatch: Microbatch, step: int) -> Any:
        return self.parallel.draws.at(self.config.seed, step, microbatch.first_row, microbatch.rows, watch=False)


def curvature_of(
    parallel: ParallelModel, optimizer: torch.optim.Optimizer, predict: Predict | None, config: TrainConfig
) -> Curvature | None:
    """What a step has to do for an optimizer beside its gradients; None of one that looks at gradients alone."""
    if not isinstance(optimizer, KFAC | HessianFree):
        return None
    return Curvature(parallel, optimizer, predict, config)


def _refuse(
    parallel: ParallelModel, optimizer: KFAC | HessianFree, predict: Predict | None, config: TrainConfig
) -> None:
    """Raises UserError for the first of what the optimizer does not go with."""
    mesh = parallel.mesh
    grid = [axis for axis in GRID_AXES if axis in (mesh.mesh_dim_names or ()) and axis_size(mesh, axis) > 1]
    context = axis_size(mesh, "cp") if "cp" in (mesh.mesh_dim_names or ()) else 1
    is_kfac = isinstance(optimizer, KFAC)
    name = "kfac" if is_kfac else "hessian_free"
    fisher = optimizer.defaults["fisher"] if is_kfac else None
    refused = [
        (config.compile, "compile", "hooks and second derivatives do not see into compiled blocks", "use no compile"),
        (config.recompute.segmented, "recompute.mode", "a block's layers are not seen in one forward",
         "use --recompute.mode none or full"),
    ]  # fmt: skip
    if is_kfac and pipeline_ranks(mesh) > 1:
        schedule = config.pipeline.schedule
        spec, option = SCHEDULES[schedule], f"pipeline.schedule={schedule}"
        instead = "use --pipeline.schedule 1f1b, gpipe or interleaved"
        refused += [
            (spec.splits_backward, option, "gradients of a layer's outputs come in both parts of a backward", instead),
            (spec.runs_ahead, option, "a look at the model is of one step, and its steps overlap", instead),
            (fisher == "exact", "mesh.pp", "a backward for each output goes through no stages",
             "use --mesh.pp 1, or --optim.fisher sampled or empirical"),
        ]  # fmt: skip
    if not is_kfac:
        why = "products by two backwards do not pass the messages and hooks of"
        refused += [
            (context > 1, "mesh.cp", f"{why} attention to parts of rows", "use --mesh.cp 1"),
            (pipeline_ranks(mesh) > 1, "mesh.pp", "its passes over the model go through no stages", "use --mesh.pp 1"),
            (config.gemini.budget is not None, "gemini.budget", f"{why} Gemini's chunks", "leave --gemini.budget out"),
            (config.zero == 3, "zero=3", f"{why} FSDP2", "use --zero 0, 1 or 2"),
            (bool(grid), "mesh.tp_mode", f"{why} a grid's layers", "use --mesh.tp-mode 1d"),
            (config.recompute.mode != "none", "recompute.mode", f"{why} its blocks", "use --recompute.mode none"),
            (config.precision in ("fp16", "bf16"), f"precision={config.precision}", "conjugate gradients need more "
             "digits", "use --precision fp32 or fp64"),
        ]  # fmt: skip
    for given, option, because, instead in refused:
        if given:
            raise UserError(f"optim.name={name} with {option}: {because}; {instead}")
    if predict is None and fisher != "empirical":
        wanted = "the closure is missing: fit has no predict, which says what the model predicts of a batch"
        instead = "use --optim.fisher empirical" if is_kfac else "use another --optim.name, or give fit a predict"
        raise UserError(f"optim.name={name}: {wanted}; {instead}")


@contextmanager
def _buffers_kept(model: nn.Module, keeps: bool = True) -> Iterator[None]:
    """Put back what an extra forward changes of buffers, such as running means of batch norm."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()] if keeps else []
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
