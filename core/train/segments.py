"""What a run in mode budget computes again: chosen before it starts, alike on every rank, by a trace of its step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

from torch import Tensor, nn

from core.auto.checkpointing import Checkpointing, fastest, frontier
from core.compose import ParallelConfig, with_stages
from core.config import UserError, in_words, size_in_bytes
from core.estimate.chain import estimate_chain
from core.estimate.step import estimate_places
from core.mesh import MeshConfig
from core.optim.build import OptimConfig
from core.parallel.pipeline.schedule import SCHEDULES, PipelineConfig
from core.parallel.pipeline.stages import split_into_stages
from core.parallel.recompute import RecomputeConfig
from core.placement.style import Plan
from core.placement.table import NO_PLAN, ModelPlan, model_plan
from core.trace.chain import Chain, Line, Simulated, stage_of
from core.trace.machine import Bandwidth, Speed
from core.trace.segments import Away, Form

TRIES = 4
"""Each a trace of the step, of a pipeline's stages of all ranks'."""
WHERE: Mapping[Form, str] = {"host": "on the host", "disk": "on the drive", "compressed": "in fewer bytes"}


def choose_segments(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    mesh: MeshConfig,
    parallel: ParallelConfig,
    speed: Speed,
    plan: ModelPlan | Plan = NO_PLAN,
    optimizer: OptimConfig | None = None,
    num_microbatches: int = 1,
    lines: Mapping[Form, Line] | None = None,
) -> Checkpointing:
    """The fastest segments whose step keeps within `parallel.recompute.budget`; see `core.estimate.chain`.

    lines  of copies to where activations may wait: `lines_of`. Without any they wait nowhere else

    Of a pipeline each stage's are chosen alone, in what its rank has left beside for the microbatches in flight; there
    everything is kept where it is, or computed again.

    Raises UserError where none do, and says the smallest budget that some do.
    """
    given = parallel.recompute.budget
    assert given is not None
    budget = size_in_bytes(given, "recompute.budget")
    step = _Step(model, loss, mesh, parallel, speed, model_plan(plan), optimizer, num_microbatches, lines)
    if mesh.pp > 1:
        return step.of_stages(budget)
    chain = step.chain()
    return step.traced(frontier(within(chain, parallel.recompute.room)), budget)


def lines_of(recompute: RecomputeConfig, kind: str, link: Bandwidth) -> dict[Form, Line]:
    """The lines to where activations of a run in mode budget may wait.

    kind  cpu or cuda, of the device. The memory of a CPU is its host's: nothing goes there unless an option says how
          much may
    link  with the drive of `recompute.disk`, if there is one
    """
    found: dict[Form, Line] = {}
    if kind != "cpu" or recompute.host is not None:
        found["host"] = Line(link.to_host, link.to_device, overlaps=kind != "cpu")
    if recompute.disk is not None:
        found["disk"] = Line(min(link.to_host, link.disk_write), min(link.to_device, link.disk_read), overlaps=True)
    return found


def within(chain: Chain, room: Mapping[Form, int]) -> Chain:
    """The chain of which no more bytes wait somewhere than there is room for: those of the first blocks may."""
    blocks, left = [], dict(room)
    for of in chain.blocks:
        away = {form: how for form, how in of.away.items() if how.away <= left.get(form, how.away)}
        for form, how in away.items():
            if form in left:
                left[form] -= how.away
        blocks.append(replace(of, away=away))
    return replace(chain, blocks=tuple(blocks))


@dataclass(frozen=True)
class _Step:
    """The step that segments are chosen for."""

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]
    mesh: MeshConfig
    parallel: ParallelConfig
    speed: Speed
    plan: ModelPlan
    optimizer: OptimConfig | None
    num_microbatches: int
    lines: Mapping[Form, Line] | None = None

    def traced(self, choices: Sequence[Checkpointing], budget: int) -> Checkpointing:
        """The fastest that keep within the budget.

        Where something waits elsewhere a trace of the very step says what it takes, which the simulator knows but
        nearly: blocks share what they save.
        """
        beside = 0
        for _ in range(TRIES):
            found = fastest(choices, budget - beside)
            if found is None:
                break
            if not any(isinstance(item, Away) for item in found.segments):
                return found
            (peak,) = self._peaks(self.plan, [found])
            if peak <= budget:
                return replace(found, step=replace(found.step, peak_bytes=peak))
            beside += max(1, peak - (budget - beside))
        here = [choice for choice in choices if not any(isinstance(item, Away) for item in choice.segments)]
        return fastest(here, budget) or self.refuse(choices[0].peak_bytes + beside)

    def refuse(self, least: int) -> NoReturn:
        raise UserError(
            f"recompute.budget={self.parallel.recompute.budget}: a step takes at least {in_words(least)} "
            f"({least} bytes), with as much computed again as helps; give that, a smaller --microbatch, or --zero 2 "
            "with more ranks"
        )

    def chain(self) -> Chain:
        """That of the whole model, on one stage."""
        own: dict[str, Any] = {f.name: getattr(self.parallel, f.name) for f in fields(ParallelConfig)}
        mesh = replace(self.mesh, pp=1)
        alone = ParallelConfig(**{**own, "pipeline": PipelineConfig()})
        given = self.model, self.loss, mesh, alone, self.speed, self.plan, self.optimizer, self.num_microbatches
        return estimate_chain(*given, None if self.mesh.pp > 1 else self.lines)

    def of_stages(self, budget: int) -> Checkpointing:
        """Those of a pipeline.

        1. Each stage's frontier comes from its part of the chain, for as many microbatches as its rank has in flight.
        2. The ranks' steps are traced with the smallest of each: what they take beside is the rest of their peaks.
        3. In the budget less that the fastest are taken, and traced again; where one takes more, it gets less.
        """
        pp, pipeline = self.mesh.pp, self.parallel.pipeline
        self.parallel.check_pipeline(pp)
        plan = with_stages(self.plan, self.model, pp)
        assert plan.pipeline is not None
        split = split_into_stages(self.model, plan.pipeline, pp, pipeline)
        chain, in_flight = self.chain(), SCHEDULES[pipeline.schedule].in_flight
        if len(chain.blocks) != split.ranges[-1].stop:
            raise UserError(
                f"recompute.mode=budget with mesh.pp={pp}: the model has blocks outside of its stages; use "
                "--recompute.mode full, sqrt or recursive"
            )
        choices = [
            frontier(stage_of(chain, blocks, in_flight(pp, rank, self.num_microbatches, pipeline.chunks)))
            for rank, blocks in enumerate(split.ranges)
        ]
        smallest = [of[0] for of in choices]
        least = self._peaks(plan, smallest)
        if max(least) > budget:
            self.refuse(max(least))
        beside = [peak - one.peak_bytes for peak, one in zip(least, smallest, strict=True)]
        for _ in range(TRIES):
            found = [fastest(of, budget - more) or of[0] for of, more in zip(choices, beside, strict=True)]
            peaks = self._peaks(plan, found)
            if max(peaks) <= budget:
                return _together(found, max(peaks))
            beside = [max(more, peak - one.peak_bytes) for more, peak, one in zip(beside, peaks, found, strict=True)]
        return _together(smallest, max(least))

    def _peaks(self, plan: ModelPlan, chosen: Sequence[Checkpointing]) -> list[int]:
        """What the ranks take, stage by stage."""
        plan = replace(plan, recompute=tuple(item for one in chosen for item in one.segments))
        given = self.model, self.loss, self.mesh, self.parallel, plan, self.optimizer or OptimConfig()
        stages = estimate_places(*given, self.num_microbatches, range(self.mesh.pp))
        return [estimate.peak_bytes for estimate in stages.values()]


def _together(stages: Sequence[Checkpointing], peak: int) -> Checkpointing:
    """The segments of all stages; times are those of one microbatch on its way through all."""
    steps = [one.step for one in stages]
    added = (sum(getattr(step, name) for step in steps) for name in ("seconds", "again_s", "again_flops"))
    runs, back = (tuple(n for step in steps for n in getattr(step, name)) for name in ("runs", "back_bytes"))
    most = max(step.forward_bytes for step in steps)
    segments = tuple(item for one in stages for item in one.segments)
    return Checkpointing(segments, Simulated(peak, most, *added, runs=runs, back_bytes=back))


def described(found: Checkpointing) -> str:
    """A line that says what is computed again, and what for."""
    again, step = [runs - 1 for runs in found.step.runs], found.step
    alone_s = max(step.seconds - step.again_s - step.waits_s, 1e-30)
    said = (
        f"at most {in_words(found.peak_bytes)} in a step: {sum(map(bool, again))} of {len(again)} blocks run again, "
        f"{sum(again)} times together, which takes {step.again_s / alone_s:.0%} of a step's time in blocks"
    )
    for form, where in WHERE.items():
        if blocks := sum(item.blocks for item in found.segments if isinstance(item, Away) and item.form == form):
            said += f"; of {blocks} what they save waits {where}"
            if form in step.away_bytes:
                said += f", {in_words(step.away_bytes[form])} of each microbatch"
    if step.away_bytes:
        said += f"; copies take {step.waits_s / alone_s:.0%} more"
    return said
