"""`llm plan` of a pipeline: schedules by the time of a step on a clock, and what old weights are expected to cost.

The clock is `core.estimate.pipeline`'s: the stages as they are estimated, messages by their bytes; of a schedule whose
steps overlap a step among many. Reductions over data-parallel ranks and the update are the same of all, and left out.
"""

from dataclasses import replace

from apps.llm.config import PretrainConfig
from core.config import UserError, time_in_words
from core.estimate import Machine, ModelShape, RunShape
from core.estimate.pipeline import simulated_step_s
from core.parallel.pipeline.schedule import SCHEDULES, PipelineConfig, ScheduleName

RANKED: tuple[ScheduleName, ...] = ("1f1b", "zbv", "2bw")
AS_GOOD = 0.03
"""Share of a step by which a schedule with the newest weights may be slower than 2bw and still be as good."""


PUBLISHED = {
    ("adamw", "none"): "more than 0.2",
    ("muon", "none"): "0.012",
    ("soap", "none"): "between Muon's 0.012 and AdamW's 0.2",
}
"""Optimizer and correction -> held-out nats beyond synchronous training's under one update of delay, of models of 360M:
Zmushko et al. 2026, arXiv:2606.30634."""
MEASURED: dict[tuple[str, str], tuple[str, float, float, float]] = {
    # measured: python -m tests.support.async_results
    ("adamw", "none"): ("async_gap", 0.090, 0.079, 0.100),
    ("adamw", "prediction"): ("async_pipeline", 0.061, -0.079, 0.201),
    ("adamw", "nesterov"): ("async_pipeline", 0.180, 0.121, 0.238),
    ("adamw", "dc_asgd"): ("async_pipeline", 0.322, 0.292, 0.352),
    ("adamw", "error_feedback"): ("async_gap", 0.035, 0.017, 0.054),
    ("muon", "none"): ("async_gap", 0.014, 0.007, 0.021),
    ("soap", "none"): ("async_pipeline", 0.022, -0.008, 0.052),
    ("muon", "prediction"): ("async_gap", 0.004, -0.003, 0.010),
    # end
}
"""The same of a byte under 2bw: benchmark (async_gap where it has judged the form), mean and 95 % interval."""


def ranked(
    config: PretrainConfig, model: ModelShape, run: RunShape, machine: Machine | None
) -> list[tuple[ScheduleName, float]]:
    """(schedule, seconds of a step), the shortest first; FLOPs without a machine. What is refused is left out."""
    found = []
    for name in RANKED:
        try:
            pipeline = _by_another(config.pipeline, name)
            pipeline.check_stages(run.pp, model.num_blocks)
            pipeline.check_microbatches(run.num_microbatches, run.pp)
            replace(config, pipeline=pipeline)
        except UserError:
            continue
        one = replace(run, pipeline=pipeline)
        found.append((name, simulated_step_s(model, one, machine or Machine(1.0, float("inf"), 1.0))))
    return sorted(found, key=lambda item: item[1])


def _by_another(pipeline: PipelineConfig, name: ScheduleName) -> PipelineConfig:
    """The same by another schedule, as far as that takes it.  Raises UserError where it refuses it."""
    spec = SCHEDULES[name]
    replicas = pipeline.replicas if spec.runs_ahead else ()
    alike = spec.stages_per_rank(pipeline.chunks) == pipeline.stages_per_rank and replicas == pipeline.replicas
    split = pipeline.split if alike else ()
    return replace(
        pipeline,
        schedule=name,
        replicas=replicas,
        split=split,
        correction="none",
        correction_strength=None,
        clip="stage",
    )


def compared(config: PretrainConfig, model: ModelShape, run: RunShape, machine: Machine | None) -> list[str]:
    """Lines that rank the schedules, and say what their old weights cost."""
    found = ranked(config, model, run, machine)
    if not found:
        return []
    least = found[0][1]
    each = [
        f"{name} {time_in_words(step) if step >= 120 else f'{step:.3g} s'}"
        if machine is not None
        else f"{name} {step / least:.3g}"
        for name, step in found
    ]
    unit = "forwards and backwards of a step" if machine is not None else "a step, as multiples of the shortest"
    lines = [f"schedules on a clock, {unit}: {', '.join(each)}"]
    times = dict(found)
    if "2bw" not in times:
        return lines
    fresh = {name: step for name, step in found if not SCHEDULES[name].runs_ahead}
    lines.append(penalty(config))
    if fresh and (best := min(fresh.values())) <= (1 + AS_GOOD) * times["2bw"]:
        name = min(fresh, key=lambda one: fresh[one])
        lines.append(as_good(name, best / times["2bw"]))
    return lines


def as_good(name: str, times: float) -> str:
    """A line: what learns from the newest weights in so many times the time of a step by 2bw."""
    takes = f"{abs(times - 1):.1%} {'less' if times < 1 else 'more'} time"
    return f"{name} is as good here: a step takes {takes} than by 2bw, and learns from the newest weights"


def penalty(config: PretrainConfig) -> str:
    """A line: what 2bw is expected to cost with the run's optimizer and correction."""
    optimizer, correction = config.optim.name, config.pipeline.correction
    published, measured = (known.get((optimizer, correction)) for known in (PUBLISHED, MEASURED))
    of = optimizer if correction == "none" else f"{optimizer} and {correction}"
    begin = f"2bw learns from weights that are one update old; expected with {of}"
    if published is None and measured is None:
        return f"{begin}: not known; benchmarks/async_pipeline.py measures it"
    said = [] if published is None else [f"{published} nats published (Zmushko et al. 2026, 360M)"]
    if measured is not None:
        name, mean, low, high = measured
        said.append(f"{mean:+.3f} nats a byte in benchmarks/results/{name}.json ({low:+.3f} to {high:+.3f})")
    return f"{begin}: {', '.join(said)} beyond synchronous training"
