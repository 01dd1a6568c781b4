"""What a run in mode budget computes again: chosen before it starts, alike on every rank, by a trace of its step."""

from collections.abc import Callable, Sequence
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
from core.placement.style import Plan
from core.placement.table import NO_PLAN, ModelPlan, model_plan
from core.trace.chain import Chain, Simulated, stage_of
from core.trace.machine import Speed

TRIES = 4
"""Of a pipeline's stages, each a trace of all ranks' steps."""


def choose_segments(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    mesh: MeshConfig,
    parallel: ParallelConfig,
    speed: Speed,
    plan: ModelPlan | Plan = NO_PLAN,
    optimizer: OptimConfig | None = None,
    num_microbatches: int = 1,
) -> Checkpointing:
    """The fastest segments whose step keeps within `parallel.recompute.budget`; see `core.estimate.chain`.

    Of a pipeline each stage's are chosen alone, in what its rank has left beside for the microbatches in flight.

    Raises UserError where none do, and says the smallest budget that some do.
    """
    given = parallel.recompute.budget
    assert given is not None
    budget = size_in_bytes(given, "recompute.budget")
    step = _Step(model, loss, mesh, parallel, speed, model_plan(plan), optimizer, num_microbatches)
    if mesh.pp > 1:
        return step.of_stages(budget)
    choices = frontier(step.chain())
    return fastest(choices, budget) or step.refuse(choices[0].peak_bytes)


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
        return estimate_chain(*given)

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
    added = {name: sum(getattr(step, name) for step in steps) for name in ("seconds", "again_s", "again_flops")}
    runs, back = (tuple(n for step in steps for n in getattr(step, name)) for name in ("runs", "back_bytes"))
    most = max(step.forward_bytes for step in steps)
    segments = tuple(item for one in stages for item in one.segments)
    return Checkpointing(segments, Simulated(peak, most, runs=runs, back_bytes=back, **added))


def described(found: Checkpointing) -> str:
    """A line that says what is computed again, and what for."""
    again = [runs - 1 for runs in found.step.runs]
    longer = found.step.again_s / max(found.step.seconds - found.step.again_s, 1e-30)
    return (
        f"at most {in_words(found.peak_bytes)} in a step: {sum(map(bool, again))} of {len(again)} blocks run again, "
        f"{sum(again)} times together, which takes {longer:.0%} of a step's time in blocks"
    )
