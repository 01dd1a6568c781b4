"""`llm plan`: memory and time of a run before it runs, for any number of ranks; and the check that every run makes.

With --gpus it searches: `apps.llm.search`, of models that are not our decoder's `apps.llm.spread`.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from apps.llm.any_model import AnyModel
from apps.llm.check import check_run, show_check
from apps.llm.config import PretrainConfig, check_combination, resolved_mesh, run_shape
from apps.llm.foreign import ForeignModel
from apps.llm.links import compared as compared_forms
from apps.llm.links import is_compared, num_steps
from apps.llm.measure import measure_machine
from apps.llm.model import UnknownModel, find_model
from apps.llm.plan_config import LLMPlanConfig, PlannedGemini, is_traced
from apps.llm.recipes import RECIPES, default_recipe
from apps.llm.recompute import OwnModel, chosen
from apps.llm.residency import estimate_residency
from apps.llm.schedules import compared
from apps.llm.search import nearest_plan, show_plans
from apps.llm.spread import show_spread
from core.config import UserError, in_words, option, parse, recipe_of, size_in_bytes, time_in_words, typed
from core.estimate import (
    Machine,
    ModelShape,
    RunShape,
    StepEstimate,
    TimeEstimate,
    decoder_shape,
    draw_timelines,
    estimate_memory,
    estimate_step,
    estimate_time,
    require_fit,
    simulated_timeline,
)
from core.estimate.local import outer_in_words
from core.estimate.memory import host_activations_bytes
from core.gemini.tier import parse_bytes
from core.mesh import MeshConfig
from core.models.decoder import DecoderConfig
from core.models.shapes import SHAPES
from core.optim.build import without_size
from core.parallel.pipeline.schedule import SCHEDULES, bubble_in_theory
from core.runtime import device_kind
from core.trace.machine import described_bandwidth
from core.trace.segments import Segments
from core.train.segments import described

VALUES_ALONE = (
    *("model.norm_eps", "model.rope_theta", "model.moe.balance_weight"),
    *("model.moe.z_weight", "model.moe.jitter", "model.moe.second_expert"),
)
"""Options that say what is computed, and nothing of what that takes."""
WITHOUT_EFFECT = (
    *VALUES_ALONE,
    *("seed", "out", "resume", "device", "compile", "kernels", "shown_kernels", "hf", "hf_dtype", "hang_after"),
    "evaluate_every",
    *("matmul_precision", "noise_scale", "noise_scale_steps"),
    *("checkpoint.every", "checkpoint.keep", "checkpoint.asynchronous", "log.tensorboard", "log.wandb_project"),
    *("data.path", "data.format", "data.text_field", "data.pairs", "data.prompt_field", "data.completion_field"),
    *("data.suffixes", "data.tokenizer", "data.vocab_size", "data.mask_documents", "data.heldout_fraction"),
    "data.mask_token",
    *("data.on_error", "data.cache", "optim.lr", "optim.clip_norm", "optim.schedule.shape", "optim.schedule.final"),
    *("optim.schedule.warmup_steps", "optim.schedule.scaling"),
    *("pipeline.clip", "pipeline.correction_strength", "pipeline.correction_steps"),
    *("comm.start", "comm.settled", "comm.local_start", "comm.local_each", "comm.report_every", "local.report_every"),
    *("elastic.store", "elastic.min", "elastic.max", "elastic.buddy_every", "elastic.lost_after"),
    *("local.start", "local.outer_lr", "local.nesterov", "local.overlap", "local.mix"),
)
"""Options of the run that its plan is the same without: what is planned are optimizer steps and what they hold."""
WITH_A_BUDGET = ("compile", "data.mask_documents")
"""Those of them that a plan with a budget depends on: it traces the step."""


def _of_run(recipe: Callable[[], PretrainConfig]) -> LLMPlanConfig:
    config = recipe()
    own: dict[str, Any] = {item.name: getattr(config, item.name) for item in fields(config)}
    own["gemini"] = PlannedGemini(**vars(config.gemini))
    return LLMPlanConfig(**own)


def main(argv: list[str]) -> int:
    argv = _with_recipe(argv)
    recipe = recipe_of(argv, default_recipe(argv))
    config = parse(
        {name: partial(_of_run, recipe) for name, recipe in RECIPES.items()},
        argv,
        "megalith llm plan",
        recipe,
    )
    given = typed(argv, config)
    if config.measure is not None:
        return measure_machine(config, given, argv)
    if config.batch is not None:
        if "data.global_batch" in given:
            raise UserError(f"batch={config.batch} and --data.global-batch mean the same; give one of them")
        given = given - {"batch"} | {"data.global_batch"}
        config = replace(config, data=replace(config.data, global_batch=config.batch))
    foreign = None
    console = Console(width=None if sys.stdout.isatty() else 120)
    if config.source is not None:
        found = _model_of(config.source, given, config.gpus is not None)
        if isinstance(found, AnyModel):
            return show_spread(config, given, found, console)
        if isinstance(found, ForeignModel):
            foreign = found
        else:
            config = replace(config, model=found)
            PretrainConfig.check_positions(config)
    if config.gpus is not None:
        return show_plans(config, given, recipe, console)
    if config.check and foreign is not None:
        raise UserError(f"{foreign.refused}; --check holds the decoder's closed forms, so leave it out")
    checked = check_run(config) if config.check else None
    if config.recompute.mode == "budget":
        model = foreign or OwnModel(config)
        kind = "cuda" if config.gpu is not None else device_kind(config.device)
        link = described_bandwidth(config.speed, 1e9 * config.bandwidth_gb_s, 1)
        found = chosen(config, resolved_mesh(config), config.speed, model, kind, link)
        console.print(described(found))
        _show_traced(config, model, console, found.segments)
    elif config.gemini.budget is not None:
        _show_residency(config, foreign, console)
    elif foreign is not None:
        _show_traced(config, foreign, console)
    else:
        _show(config, given, console)
    if ignored := sorted(given & without_effect(config, foreign)):
        console.print(f"the plan is the same without {', '.join(map(option, ignored))}")
    return 0 if checked is None else show_check(checked, check_combination(config), console)


def _with_recipe(argv: list[str]) -> list[str]:
    """The words with --recipe NAME for --model NAME, of a shape and no folder.  Raises UserError beside --recipe."""
    words = []
    for before, word in zip(["", *argv], argv):
        name = word.removeprefix("--model=") if word.startswith("--model=") else word if before == "--model" else ""
        if name in SHAPES and not Path(name).exists():
            if any(one == "--recipe" or one.startswith(("--recipe=", "recipe=")) for one in argv):
                raise UserError(f"--model {name} beside --recipe: the name is that of a recipe, too; give one of them")
            words = words[:-1] if before == "--model" else words
            words += ["--recipe", name]
        else:
            words.append(word)
    return words


def _model_of(folder: Path, given: set[str], searched: bool) -> DecoderConfig | ForeignModel | AnyModel:
    """Raises UserError for a folder of no model, and for options of another shape beside it."""
    if shaped := sorted(name for name in given if name.startswith("model.")):
        raise UserError(f"{option(shaped[0])} beside --model: the shape is that of the folder; leave it out")
    try:
        return find_model(folder).config
    except UnknownModel as refused:
        return AnyModel(folder, refused) if searched else ForeignModel(folder, refused)


def without_effect(config: LLMPlanConfig, foreign: ForeignModel | None = None) -> set[str]:
    """Dotted names of the options that this plan does not depend on."""
    if config.gpus is not None:
        return set()  # they stand in the commands
    found = {*WITHOUT_EFFECT, *(f"optim.{name}" for name in without_size(config.optim))}
    if foreign is None and not is_traced(config):
        found.add("memory_gb_s")
    if foreign is None and config.machine is not None and is_compared(config, set()):  # by a run's mean step
        found -= {"comm.start", "comm.local_start", "comm.local_each"} if config.comm.compress is not None else set()
        found -= {"local.start"} if config.local.every else set()
    return found - set(WITH_A_BUDGET if is_traced(config) else ())


def _show(config: LLMPlanConfig, given: set[str], console: Console) -> None:
    run = run_shape(config)
    model = decoder_shape(config.model)
    memory = estimate_memory(model, run)
    console.print(_table(config, check_combination(config), model.num_parameters(), memory.table()))
    if (host_bytes := host_activations_bytes(model, run)) > 0:
        where = "host" if config.recompute.disk is None else "drive"
        console.print(
            f"{in_words(host_bytes)} of activations on the {where}; each microbatch's go there and come back once"
        )
    if config.model.moe.num_experts:
        console.print(f"{model.num_matmul_parameters:,} parameters multiply a token")
    machine = config.machine
    if machine is not None:
        _show_time(config, lambda rows: estimate_time(model, run_shape(config, rows), machine), console)
    if run.local_every:
        console.print(outer_in_words(model, run))
    if run.pp > 1:
        console.print("\n".join(compared(config, model, run, machine)))
    if machine is not None and is_compared(config, given):
        table, lines = compared_forms(config, model, machine)
        console.print(table)
        console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)
    if config.timeline is not None:
        console.print(draw_step(config, model, run, machine, config.timeline))
    if config.memory is not None:
        size = size_in_bytes(config.memory, "memory", "GiB")
        require_fit(model, run, size, lambda: nearest_plan(config, run, size, 0))
        console.print(f"fits {in_words(size)}")


def _show_traced(
    config: LLMPlanConfig, model: ForeignModel | OwnModel, console: Console, segments: Segments | None = None
) -> None:
    """The same of a model whose step is run on tensors without memory."""
    if config.timeline is not None:
        raise UserError("--timeline draws the stages of our decoder's pipelines; leave it out with this --model")
    mesh = resolved_mesh(config)

    def microbatches(rows: int | None) -> list[int]:
        return config.microbatch_rows((rows or config.data.global_batch) // mesh.data_ranks)

    @cache
    def step(rows: int | None = None) -> StepEstimate:
        """The step of a batch of `rows`, by default the full one."""
        loss = model.loss(max(microbatches(rows)), config.data.sequence_length)
        made = model.build(), loss, mesh, config, config.speed, replace(model.plan, recompute=segments)
        return estimate_step(*made, optimizer=config.optim, num_microbatches=len(microbatches(rows)))

    found, machine = step(), config.machine
    console.print(_table(config, mesh, model.num_parameters, found.table()))
    console.print("\n".join([f"{found.flops:.3g} FLOPs a rank and step", *found.messages()]))
    if machine is not None:

        def time_of(rows: int | None) -> TimeEstimate:
            of, tokens = step(rows), (rows or config.data.global_batch) * config.data.sequence_length
            pipeline, again = config.pipeline, float(config.recompute.mode == "full" or config.recompute.segmented)
            idle = 0.0  # once in a run where steps overlap
            if not SCHEDULES[pipeline.schedule].runs_ahead:
                number = len(microbatches(rows))
                idle = bubble_in_theory(pipeline.schedule, mesh.pp, number, pipeline.chunks, again=again)
            sending_s = of.sent.wire_bytes / machine.bandwidth
            return TimeEstimate(of.compute_s, sending_s, idle / (1 - idle) * of.compute_s, tokens)

        _show_time(config, time_of, console)
    advice = "try --zero 3 with more ranks, --recompute.mode full, --microbatch 1 or --gemini.budget"
    if (line := config.fits(found.peak_bytes, advice)) is not None:
        console.print(line)


def _table(config: PretrainConfig, mesh: MeshConfig, num_parameters: int, rows: Iterable[tuple[str, str]]) -> Table:
    ranks = mesh.data_ranks * mesh.tp * mesh.cp * mesh.pp
    run = f"{ranks} ranks ({mesh.describe()}), ZeRO {config.zero}, {config.precision}"
    table = Table("per rank", "bytes", title=f"{num_parameters:,} parameters, {run}")
    for row in rows:
        table.add_row(*row)
    return table


def _show_time(config: LLMPlanConfig, time_of: Callable[[int | None], TimeEstimate], console: Console) -> None:
    """time_of: rows of the global batch, None: the full one -> its step."""
    time = time_of(None)
    whole_s = sum(count * time_of(rows).step_s for count, rows in _stages(config))
    console.print(
        f"a step of {time.tokens:,} tokens: {time.step_s:.3g} s at {config.utilisation:.0%} of the peak "
        f"({time.compute_s:.3g} s computing, {time.communication_s:.3g} s communicating), "
        f"{time.tokens_per_s:,.0f} tokens/s, {num_steps(config):,} steps in {time_in_words(whole_s)}"
    )


def _stages(config: PretrainConfig) -> Iterator[tuple[int, int]]:
    """(steps, rows of the global batch) of each stage of a batch that grows."""
    stages, end = config.data.batch_size.stages, num_steps(config)
    for (first, rows), last in zip(stages, [*(first for first, _ in stages[1:]), end], strict=True):
        if (count := min(last, end) - first) > 0:
            yield count, rows


def _show_residency(config: LLMPlanConfig, foreign: ForeignModel | None, console: Console) -> None:
    """Print what Gemini makes of the run in its budget."""
    if config.timeline is not None or config.gemini.figure is not None:
        drawing = "--timeline" if config.timeline is not None else "--gemini.figure"
        raise UserError(
            f"{drawing} with gemini.budget={config.gemini.budget}: megalith llm plan does not draw it; leave it out"
        )
    machine = config.machine
    mesh = resolved_mesh(config) if foreign is not None else check_combination(config)
    given = config, mesh, config.speed, 1e9 * config.bandwidth_gb_s, foreign
    found = estimate_residency(*given, [config.drive] if config.drive is not None else None)
    parameters = decoder_shape(config.model).num_parameters() if foreign is None else foreign.num_parameters
    rows = [
        ("fullest moment of Gemini's plan", found.plan.device_peak_bytes),
        ("on the device", found.device_bytes),
        ("on the host", found.plan.host_bytes),
    ]
    if found.messages_bytes:
        rows.insert(0, ("messages between ranks", found.messages_bytes))
    console.print(_table(config, mesh, parameters, ((name, in_words(num_bytes)) for name, num_bytes in rows)))
    console.print(f"{found.plan.describe()}; the smallest budget is {in_words(found.least_bytes)}")
    if found.orders is not None:
        console.print(found.orders.describe())

    def num_microbatches(rows: int) -> int:
        return len(config.microbatch_rows(rows // mesh.data_ranks))

    most = num_microbatches(config.data.global_batch)
    if machine is not None:
        whole = sum(count * found.seconds_of(num_microbatches(rows)) for count, rows in _stages(config))
        console.print(
            f"{num_steps(config):,} steps of {most} microbatch{'es' * (most > 1)} in at least "
            f"{time_in_words(whole)}, messages between ranks left out"
        )
    if (line := config.fits(found.device_bytes, "try --gemini.budget {memory}")) is not None:
        console.print(line)


def draw_step(config: PretrainConfig, model: ModelShape, run: RunShape, machine: Machine | None, png: Path) -> str:
    """Draw a step of the pipeline as its stages are estimated.  Returns a line that says what it shows."""
    if run.pp == 1:
        raise UserError("--timeline draws the stages of a pipeline, and mesh.pp=1 has none; add --mesh.pp 2 or more")
    timeline = simulated_timeline(model, run, machine or Machine(1.0, bandwidth=float("inf"), utilisation=1.0))
    of = f"{config.pipeline.schedule}, {run.pp} ranks, {run.num_microbatches} microbatches"
    draw_timelines(png, {f"{of}, simulated": timeline}, "s" if machine is not None else "FLOPs")
    return (
        f"{of}: bubble {timeline.bubble:.1%} as the stages are estimated, {timeline.theory:.1%} in theory "
        f"(stages of equal cost); drawn in {png}"
    )


def warning(config: PretrainConfig, kind: str, device_bytes: int, host_bytes: int) -> str | None:
    """A line where the run is estimated to need more than a rank's device, or with a budget its host, has; else None.

    kind        cpu or cuda, of the device; on a CPU the host is the device
    host_bytes  of a rank
    """
    if config.recompute.mode == "budget":
        assert config.recompute.budget is not None
        if size_in_bytes(config.recompute.budget, "recompute.budget") <= device_bytes:
            return None
        has = in_words(device_bytes)
        return f"recompute.budget={config.recompute.budget} and the device has {has} for a rank; give at most that"
    model, run = decoder_shape(config.model), run_shape(config)
    if config.gemini.budget is None:
        try:
            require_fit(model, run, device_bytes, lambda: nearest_plan(config, run, device_bytes, host_bytes))
        except UserError as error:
            return str(error)
        return None
    budget = parse_bytes(config.gemini.budget)
    if budget > device_bytes:
        return (
            f"gemini.budget={config.gemini.budget} and the device has {in_words(device_bytes)} for a rank; give at "
            "most that"
        )
    found = estimate_memory(model, run)
    data = found.parameters_bytes + found.gradients_bytes + found.optimizer_bytes
    away = max(0, data - (budget if kind == "cuda" else 0))
    if away > host_bytes:
        return (
            f"{in_words(away)} of parameters, gradients and optimizer state a rank are more than the host's "
            f"{in_words(host_bytes)}; take more ranks with --zero 3, --optim.name adafactor, or a smaller model"
        )
    return None
