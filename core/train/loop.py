"""The training loop, one for every app and every form of parallelism.

`fit` takes a model that `core.compose` has spread over the mesh, an optimizer over its masters, batches and a
loss. One step is

1. take the batch of this step: a function of the step and the data rank alone, so no mesh changes what is learned from
2. for each microbatch: forward, loss times its share of the whole batch's weight, backward, in the order and on the
   ranks that the `ParallelModel` decides
   K-FAC sees the model at work before; Hessian-free does all of 2 to 4 itself (`core.train.curvature`)
   Workers that train locally are each the whole of such a step, and average behind it (`core.parallel.local`)
3. complete the gradients; their global norm says whether they are finite and how far they are clipped
4. the optimizer updates the masters; the parameters take over their values
5. one row of metrics; a checkpoint, an evaluation, the end when it is time

A step whose gradients are not finite is skipped and counted; under fp16 that is how the loss scale finds its place.
SIGTERM on any rank lets all ranks finish the step, save, and return.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from core.checkpoint import CheckpointConfig, Checkpointer
from core.config import UserError
from core.data import Batches, Prefetch
from core.mesh import data_axis, gradient_axis
from core.metrics import Progress
from core.nn.moe import MoE, load_figures
from core.optim.average import WeightAverage
from core.optim.build import groups_in_words
from core.optim.clip import gradient_norm, scale_gradients
from core.optim.hessian_free import HessianFree
from core.optim.kfac import KFAC
from core.optim.prediction import Predict
from core.optim.schedule import batch_factor, learning_rate
from core.optim.sharded import ShardedOptimizer
from core.parallel.parallel_model import ParallelModel, Sample, Work
from core.precision import LossScale, compute_dtype, set_matmul_precision
from core.runtime import Runtime, StopRequest, agreed, seed_everything, watch_steps
from core.train.config import TrainConfig
from core.train.curvature import Microbatch, curvature_of
from core.train.elastic import Run, fit_elastically
from core.train.elastic_local import LocalRun
from core.train.folder import is_told, nothing_to_do, run_log, told_loss, write_config
from core.train.meter import Meter
from core.train.noise import NoiseScale
from core.train.state import StepTally, TrainState, resume

Loss = Callable[[torch.nn.Module, dict[str, Tensor]], Tensor]
Evaluate = Callable[[torch.nn.Module], Mapping[str, float]]


def num_rows(batch: dict[str, Tensor]) -> Tensor:
    """The default weight of a microbatch: its rows."""
    first = next(iter(batch.values()))
    return torch.tensor(float(len(first)), dtype=torch.float64)


def num_tokens(batch: dict[str, Tensor]) -> int:
    """The tokens that throughput counts: the elements of input_ids where there are any, else rows."""
    ids = batch.get("input_ids")
    return ids.numel() if ids is not None else len(next(iter(batch.values())))


def fit(
    parallel: ParallelModel,
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
    predict: Predict | None = None,
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
    predict          (model, batch) -> what the model predicts (`core.optim.prediction`), of which `loss` is the mean
                     -log p; asked by kfac, unless its fisher is empirical, and by hessian_free
    """
    set_matmul_precision(config.matmul_precision)
    loss_scale = LossScale(config.precision, config.loss_scale)
    noise = _noise_scale(parallel, optimizer, config)
    state = TrainState(parallel, optimizer, loss_scale, dict(values or {}), average, keep_frozen, noise)
    state.curvature = curvature_of(parallel, optimizer, predict, config)
    _check_asynchronous(parallel, optimizer, average)
    _check_local(parallel, average)
    if average is not None:
        parallel.keep_average(average)
    axis = data_axis(parallel.whole_mesh)
    # Every rank drew the same parameters; what it draws from now on (but dropout: `core.parallel.draws`) is that of its
    # tokens and stages.
    seed_everything(config.seed + _drawing_rank(parallel.whole_mesh))
    if config.elastic.store is not None:
        step_of = partial(train_step, state, loss=loss, weight=weight, config=config)
        sample = _sample(parallel, batches, loss, config)
        figures = None if evaluate is None else partial(_evaluated, parallel, evaluate)
        meter = Meter(parallel, config, runtime, flops_per_token)
        of = Run if parallel.local is None else LocalRun
        return fit_elastically(state, batches, config, runtime, meter, step_of, sample, figures, of)
    with ExitStack() as stack:
        hangs = stack.enter_context(watch_steps(config.hang_after, parallel.device))
        stack.callback(parallel.close)
        parallel.updates_as_final = nothing_between(state, config)
        with hangs.step("what comes before the first step", counts=False):
            parallel.prepare(optimizer, _sample(parallel, batches, loss, config))
        checkpointer = Checkpointer(config.out / "checkpoints", _checkpoints(parallel, config), parallel.whole_mesh)
        stack.callback(checkpointer.close)
        first = resume(state, checkpointer, config)
        last = min(config.steps, config.stop_after or config.steps)
        is_saved = first is not None and first == agreed(checkpointer.latest())
        if first is not None and first >= last and config.resume == "auto" and is_saved:
            if first > last or is_told(config, first):
                return nothing_to_do(config, runtime, first, last)
            state.loss = told_loss(config, first)  # what is left is behind the last step: the evaluation, the summary
        log = stack.enter_context(run_log(config, runtime, first))
        if runtime.leads and config.resume is not None:
            write_config(config)
        if parallel.asynchronous is not None:
            stack.enter_context(parallel.asynchronous.running(optimizer, first or 0, config.optim.clip_norm))
        progress = stack.enter_context(Progress(config.steps, first_step=first or 0, active=runtime.leads))
        if first is not None:
            progress.message(f"continuing after step {first}{state.changed()}")
        if config.optim.plan:
            progress.message(groups_in_words(config.optim, parallel.masters))
        ahead = Prefetch(batches, axis.get_local_rank(), axis.size(), step=first or 0, device=parallel.device)
        source = stack.enter_context(ahead)
        stop = stack.enter_context(StopRequest())
        meter = Meter(parallel, config, runtime, flops_per_token)
        pauses = config.checkpoint.every, config.evaluate_every if evaluate is not None else 0
        depth = 0 if parallel.ahead is None else parallel.ahead.depth

        def pauses_behind(step: int) -> bool:
            """Whether nothing may be under way when so many steps are over."""
            return step == last or any(every and step % every == 0 for every in pauses)

        step = first or 0
        # The step that --out holds, alike on every rank.
        saved = first if is_saved and config.resume in (None, "auto") else None
        coming = deque[dict[str, Tensor]]()  # of steps that a pipeline has begun, or may begin in this one
        while step < last and (coming or not state.stopping):
            with meter.step(state), hangs.step(f"step {step + 1}"):
                batch = coming.popleft() if coming else next(source)
                while len(coming) < depth and not state.stopping and not pauses_behind(step + len(coming) + 1):
                    coming.append(next(source))
                row = train_step(state, batch, loss, weight, config, step, lambda: stop.requested, coming)
            step += 1
            if parallel.asynchronous is not None and (state.stopping or pauses_behind(step)):
                parallel.publish()
            row = {"step": step, **row, **meter.row(row.pop("tokens"))}
            is_due = bool(config.evaluate_every) and step % config.evaluate_every == 0 and step < config.steps
            if evaluate is not None and is_due:
                row |= _evaluated(parallel, evaluate)
            log.write(row)
            _require_finite(state.loss, step, config)
            progress.update(row)
            state.commit(step, config)
            if config.checkpoint.every and step % config.checkpoint.every == 0 and step < last:
                state.save(checkpointer, step)
                saved = step
        if step != saved:
            state.save(checkpointer, step)
        checkpointer.wait()
        summary = meter.summary(step, config.steps, state)
        if evaluate is not None and step == config.steps:
            summary |= _evaluated(parallel, evaluate)
        if noise is not None and noise.rows:
            summary["noise_scale"] = noise.value
            progress.message(noise.suggestion())
        log.summarise(summary)
        progress.close()
        return summary


def nothing_between(state: TrainState, config: TrainConfig) -> bool:
    """Return whether a gradient is what its update takes: not clipped, scaled, exchanged or looked at meanwhile."""
    parallel = state.parallel
    is_scaled = state.loss_scale.dynamic or state.loss_scale.factor != 1.0
    average = None if state.average is None or state.average.in_parts else state.average
    others = state.noise, state.curvature, average, parallel.local, parallel.compression, parallel.coded
    return config.optim.clip_norm is None and not is_scaled and all(other is None for other in others)


def _checkpoints(parallel: ParallelModel, config: TrainConfig) -> CheckpointConfig:
    """Of a model on a disk they are written as they are read: copies beside the training would take its memory."""
    return config.checkpoint if parallel.durable is None else replace(config.checkpoint, asynchronous=False)


def _require_finite(loss: float, step: int, config: TrainConfig) -> None:
    """Raises UserError for a loss from which no training goes on: no update of such weights makes it finite again."""
    if not math.isfinite(loss):
        raise UserError(
            f"the loss is {loss} at step {step}; lower optim.lr (now {config.optim.lr:g}), warm up for longer "
            f"(optim.schedule), or lower optim.clip_norm (now {config.optim.clip_norm})"
        )


def _noise_scale(parallel: ParallelModel, optimizer: torch.optim.Optimizer, config: TrainConfig) -> NoiseScale | None:
    """Raises UserError where a step has no gradient of its own microbatches by the time that it is read."""
    if not config.noise_scale:
        return None
    if parallel.ahead is not None:
        raise UserError(
            f"noise_scale with pipeline.schedule={parallel.schedule_name}: its steps overlap, and so do gradients; "
            "use --pipeline.schedule 1f1b"
        )
    if isinstance(optimizer, KFAC | HessianFree):
        raise UserError(
            f"noise_scale with {type(optimizer).__name__}: it takes backwards of its own, whose gradients "
            "would count as microbatches'; use another --optim.name"
        )
    return NoiseScale(parallel, config.noise_scale_steps)


def _check_asynchronous(
    parallel: ParallelModel, optimizer: torch.optim.Optimizer, average: WeightAverage | None
) -> None:
    """Raises UserError for what workers that do not wait for one another cannot do."""
    if parallel.asynchronous is None:
        return
    if average is not None:
        raise UserError(
            "local.async with an average of the weights: no rank has all of them after a step; leave one out"
        )
    if isinstance(optimizer, ShardedOptimizer):
        raise UserError(
            f"local.async with {type(optimizer).__name__}, whose step may ask other ranks; use one of torch's"
        )
    if any(isinstance(module, MoE) for module in parallel.model.modules()):
        raise UserError(
            "local.async with experts: all ranks agree on their load in every step; leave --local.async out"
        )


def _check_local(parallel: ParallelModel, average: WeightAverage | None) -> None:
    """Raises UserError for an average of the weights, of which each worker has its own."""
    if parallel.local is not None and average is not None:
        raise UserError(
            "local.every with an average of the weights: each worker has other weights after a step; leave one out"
        )


def train_step(
    state: TrainState,
    batch: dict[str, Tensor],
    loss: Loss,
    weight: Callable[[dict[str, Tensor]], Tensor],
    config: TrainConfig,
    step: int,
    stop_requested: Callable[[], bool] = lambda: False,
    following: Sequence[dict[str, Tensor]] = (),
) -> dict[str, Any]:
    """One optimizer step on this rank's rows of the batch.  Returns its figures, alike on every rank.

    Each parameter group's own learning rate is what it had when the run began, or torch's `initial_lr`; the schedule
    multiplies it. The figure `lr` is that of the first group, `lr_1`, … are those of others that differ.

    stop_requested  asked before the update, on every rank; one that says yes stops all after it (`state.stopping`)
    following       the batches of the next steps, as far as a pipeline that runs ahead may begin them in this one, and
                    no more of them than its depth; they are to be given to the next calls. Where they are fewer than
                    that, no others will come before all of them are over; none: nothing is under way when this returns

    The host waits for the device once: when it reads what says how the update goes (`TrainState.read_step`).
    """
    parallel, axis = state.parallel, data_axis(state.parallel.whole_mesh)
    rates = _rates(state, batch, config, step)
    if parallel.asynchronous is not None:
        return _asynchronous_step(state, batch, loss, weight, config, step, stop_requested)
    ahead, curvature, sizes = parallel.ahead, state.curvature, list[int]()
    if ahead is None:
        scale = state.loss_scale.factor
        microbatches, share_of_loss, weights, whole = _work(state, batch, loss, weight, config, step)
        sizes = [rows for *_, rows in microbatches]
        if curvature is not None and curvature.solves:
            figures = _minimise(state, microbatches, rates, step, stop_requested())
            return figures | {"tokens": num_tokens(batch) * _rows_of_all(state, batch) // _rows(batch)}
        if curvature is not None:
            curvature.look(microbatches, weights.tolist(), float(whole) or 1.0, loss, step, scale)
        if parallel.coded is not None:
            parallel.coded.begin_step(step)
        if parallel.updates_as_final or parallel.compression is not None:
            _set_rates(state, rates)
        if parallel.compression is not None:
            parallel.compression.clip_norm = config.optim.clip_norm
            parallel.compression.is_last = step + 1 == config.steps
        mean = parallel.run(microbatches, share_of_loss, scale)
        parallel.reduce()
        if parallel.local is not None:
            parallel.local.share_gradients(step)
        if state.elastic is not None and parallel.local is None:
            mean = state.elastic.exchange(whole, mean)
        squares = None if state.noise is None else state.noise.take(sizes, axis.size())
        whole = None if parallel.compression is None else parallel.compression.norm
        if whole is None:
            whole = gradient_norm(parallel.masters.values(), parallel.mesh)
        read = state.read_step(mean, whole, stop_requested(), squares)
    else:
        for index, one in list(enumerate([batch, *following]))[len(state.begun) : ahead.depth + 1]:
            begun = _begun(state, one, loss, weight, config, step + index, ahead.depth - index, stop_requested)
            state.begun.append(begun)
        work, tally = state.begun.popleft()
        scale = work.scale
        read = state.read_sums(ahead.run_ahead(work, [begun for begun, _ in state.begun]), tally)
        state.note_norm(step, read.norm / scale)
    norm = read.norm / scale
    noise_figures = {}
    is_finite = state.loss_scale.update(norm < float("inf"))
    if ahead is not None and ahead.updates_at_once:
        pass  # each stage has, or has skipped the step
    elif is_finite:
        if state.noise is not None:
            parts, apart = read.squares
            noise_figures = state.noise.update(parts / scale**2, apart, norm**2, sizes * axis.size())
        _update(state, config, rates, norm, scale)
        parallel.publish()
    else:
        parallel.skip()
    parallel.release()
    state.require_progress()
    others = {f"lr_{index}": rate for index, rate in enumerate(rates) if rate != rates[0]}
    figures = {"loss": state.loss, "lr": rates[0], "grad_norm": norm} | others
    if parallel.local is not None:
        ended = parallel.local.end_step(step, state.loss, state.stopping, step + 1 == config.steps)
        state.stopping = ended.stopping
        figures |= ended.figures
    if read.expert_load is not None:
        figures |= load_figures(read.expert_load)
    if curvature is not None and curvature.optimizer.fallbacks:
        figures["curvature_fallbacks"] = curvature.optimizer.fallbacks
    figures |= noise_figures
    if state.loss_scale.skipped_steps or state.loss_scale.dynamic:
        figures |= {"skipped_steps": state.loss_scale.skipped_steps, "loss_scale": state.loss_scale.factor}
    if parallel.compression is not None:
        figures |= parallel.compression.row()
    if parallel.coded is not None:
        figures |= parallel.coded.row()
    return figures | {"tokens": num_tokens(batch) * _rows_of_all(state, batch) // _rows(batch)}


def _asynchronous_step(
    state: TrainState,
    batch: dict[str, Tensor],
    loss: Loss,
    weight: Callable[[dict[str, Tensor]], Tensor],
    config: TrainConfig,
    step: int,
    stop_requested: Callable[[], bool],
) -> dict[str, Any]:
    """A step of this rank alone, which others may be ahead of or behind; its figures are those of its own rows."""
    parallel, worker = state.parallel, state.parallel.asynchronous
    assert worker is not None
    rates = _rates(state, batch, config, step)
    microbatches, share_of_loss, weights, _ = _work(state, batch, loss, weight, config, step)
    state.loss = float(parallel.run(microbatches, share_of_loss))
    norm = worker.clip()
    is_finite = state.loss_scale.update(norm < float("inf"))
    its_weight = float(weights.sum()) if is_finite else math.nan
    told = worker.push(step, its_weight, num_tokens(batch), rates, stop_requested())
    parallel.release()
    state.stopping = told.stop_at <= step + 1
    state.require_progress()
    figures = {"loss": state.loss, "lr": rates[0], "grad_norm": norm, "staleness": told.staleness}
    if state.loss_scale.skipped_steps:
        figures["skipped_steps"] = state.loss_scale.skipped_steps
    return figures | {"wait_s": told.wait_s, "tokens": told.tokens}


def _rows(batch: dict[str, Tensor]) -> int:
    return len(next(iter(batch.values())))


def _rows_of_all(state: TrainState, batch: dict[str, Tensor]) -> int:
    """The rows of a step on all ranks, of which this one has a batch."""
    if state.elastic is not None:
        return state.elastic.num_rows
    return _rows(batch) * data_axis(state.parallel.whole_mesh).size()


def _rates(state: TrainState, batch: dict[str, Tensor], config: TrainConfig, step: int) -> list[float]:
    """The learning rate of each parameter group in a step."""
    schedule = config.optim.schedule
    factor = batch_factor(_rows_of_all(state, batch), schedule)
    return [learning_rate(step, config.steps, own * factor, schedule) for own in state.learning_rates]


def _update(state: TrainState, config: TrainConfig, rates: list[float], norm: float, scale: float) -> None:
    """Clip the gradients by that norm of theirs, both without the loss scale, and update the masters."""
    clip, compression = config.optim.clip_norm, state.parallel.compression
    if compression is not None and compression.norm is not None:
        clip = None  # they were
    factor = min(1.0, clip / norm) if clip is not None and norm > 0 else 1.0
    scale_gradients(state.parallel.masters.values(), factor / scale)
    _set_rates(state, rates)
    state.parallel.update(state.optimizer)
    if state.average is not None:
        state.average.follow()
    state.parallel.release()  # before the parameters travel: the two need not share memory


def _set_rates(state: TrainState, rates: list[float]) -> None:
    for group, rate in zip(state.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _update_stage(state: TrainState, config: TrainConfig, rates: list[float], step: int, sums: Tensor) -> bool:
    """The update of one stage that does not wait for the others: `Work.update`.

    A stage whose gradients are not finite skips the step, whatever the others do.
    """
    norm = StepTally.norm_in(sums)
    if not norm < float("inf"):
        return False
    if config.pipeline.clip == "last":
        norm = state.last_norm(step, norm)
    _update(state, config, rates, norm, 1.0)
    return True


def _minimise(
    state: TrainState, microbatches: list[Microbatch], rates: list[float], step: int, stop_requested: bool
) -> dict[str, Any]:
    """A step of an optimizer that evaluates the model itself."""
    parallel, curvature = state.parallel, state.curvature
    assert curvature is not None
    _set_rates(state, rates)
    found = curvature.minimise(microbatches, step)
    if state.average is not None:
        state.average.follow()
    parallel.publish()
    mean = torch.tensor(found.loss / data_axis(parallel.mesh).size(), dtype=torch.float64, device=parallel.device)
    state.read_step(mean, torch.tensor(found.norm, dtype=torch.float64, device=parallel.device), stop_requested)
    figures = {"loss": state.loss, "lr": rates[0], "grad_norm": found.norm, "damping": found.damping}
    figures |= {"cg_iterations": found.iterations, "reduction_ratio": found.ratio, "step_length": found.length}
    if curvature.optimizer.fallbacks:
        figures["curvature_fallbacks"] = curvature.optimizer.fallbacks
    return figures


def _work(
    state: TrainState,
    batch: dict[str, Tensor],
    loss: Loss,
    weight: Callable[[dict[str, Tensor]], Tensor],
    config: TrainConfig,
    step: int,
) -> tuple[list[Microbatch], Callable[[Microbatch], Tensor], Tensor, Tensor]:
    """The microbatches of a step on this rank, their share of its loss (arguments of `ParallelModel.run`), their
    weights, and that of the whole batch."""
    parallel, axis, curvature = state.parallel, data_axis(state.parallel.mesh), state.curvature
    device, scale = parallel.device, state.loss_scale.factor
    parts = _microbatches(batch, config, device)
    weights = torch.stack([weight(part).to(device, torch.float64, non_blocking=True) for part in parts])
    whole_weight = weights.sum()
    if parallel.asynchronous is None and axis.size() > 1:
        dist.all_reduce(whole_weight, group=axis.get_group())
    if parallel.asynchronous is not None or state.elastic is not None:  # where these rows weigh nothing, others' do
        whole_weight = whole_weight.clamp(min=torch.finfo(torch.float64).tiny)
    if parallel.local is not None:
        parallel.local.begin_step(whole_weight)

    def share_of_loss(microbatch: Microbatch) -> Tensor:
        part, share, first_row, rows = microbatch
        seen = nullcontext()
        if curvature is not None:
            seen = curvature.watching(microbatch, share * whole_weight, whole_weight, scale)
        # Compiled blocks are not watched: a mode would be compiled with them.
        with seen, parallel.draws.at(config.seed, step, first_row, rows, watch=not config.compile):
            value = loss(parallel.model, part)
        return value * share.to(torch.promote_types(value.dtype, torch.float32))

    sizes = [_rows(part) for part in parts]
    data_rank, rows = data_axis(parallel.whole_mesh).get_local_rank(), sum(sizes)
    first = data_rank * rows if state.elastic is None else state.elastic.first_row(data_rank, rows)
    first_rows = [first + before for before in accumulate([0, *sizes[:-1]])]
    shares = (weights / whole_weight).unbind()
    microbatches = [Microbatch(*each) for each in zip(parts, shares, first_rows, sizes, strict=True)]
    return microbatches, share_of_loss, weights, whole_weight


def _begun(
    state: TrainState,
    batch: dict[str, Tensor],
    loss: Loss,
    weight: Callable[[dict[str, Tensor]], Tensor],
    config: TrainConfig,
    step: int,
    late: int,
    stop_requested: Callable[[], bool],
) -> tuple[Work, StepTally]:
    """The same for a pipeline that runs ahead.  late: steps that its loss scale is old."""
    tally, ahead, update = StepTally(state.parallel, stop_requested), state.parallel.ahead, None
    microbatches, share_of_loss, *_ = _work(state, batch, loss, weight, config, step)
    if ahead is not None and ahead.updates_at_once:
        update = partial(_update_stage, state, config, _rates(state, batch, config, step), step)
    return Work(microbatches, share_of_loss, state.loss_scale.late(late), tally, update), tally


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


def _sample(parallel: ParallelModel, batches: Batches, loss: Loss, config: TrainConfig) -> Sample:
    """The losses of the run's first microbatches on this rank, for who wants to see a step before it runs."""

    def draw() -> list[Callable[[torch.nn.Module], Tensor]]:
        axis = data_axis(parallel.whole_mesh)
        parts = _microbatches(batches.batch(0, axis.get_local_rank(), axis.size()), config, parallel.device)
        return [lambda model, part=part: loss(model, part) for part in parts]

    return draw


def _evaluated(parallel: ParallelModel, evaluate: Evaluate) -> dict[str, float]:
    modes = [(module, module.training) for module in parallel.model.modules()]
    parallel.model.eval()
    with torch.no_grad(), nullcontext() if parallel.local is None else parallel.local.outer_weights():
        figures = dict(evaluate(parallel.model))
    for module, training in modes:
        module.training = training
    return figures
