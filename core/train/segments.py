"""What a run in mode budget computes again: chosen before it starts, alike on every rank, by a trace of its step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

from torch import Tensor, nn

from core.auto.checkpointing import Checkpointing, RankBytes, fastest, frontier
from core.compose import ParallelConfig, with_stages
from core.config import UserError, in_words, size_in_bytes
from core.estimate.chain import estimate_chain
from core.estimate.stages import actions_of, in_flight
from core.estimate.step import estimate_places
from core.gemini.direct import drive_speeds, with_drives
from core.mesh import MeshConfig
from core.optim.build import OptimConfig
from core.parallel.pipeline.schedule import PipelineConfig, most_in_flight
from core.parallel.pipeline.stages import split_into_stages
from core.parallel.recompute import RecomputeConfig
from core.placement.stages import StageSplit
from core.placement.style import Plan
from core.placement.table import NO_PLAN, ModelPlan, model_plan
from core.precision import compute_dtype
from core.runtime import device_of, leads
from core.trace.chain import Chain, Line, Simulated, stage_of
from core.trace.machine import Bandwidth, Speed, bandwidth_of, speed_of
from core.trace.segments import Away, Form, Segments, num_blocks_of

TRIES = 4
"""Each a trace of the step, of a pipeline's stages of all ranks'."""
MOST_OF_A_STAGE = 48
"""Of the choices of each stage, so many are joined with those of a rank's other stages."""
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
    *,
    averaged: bool = False,
) -> Checkpointing:
    """The fastest segments whose step keeps within `parallel.recompute.budget`; see `core.estimate.chain`.

    lines     of copies to where activations may wait: `lines_of`. Without any they wait nowhere else
    averaged  whether a moving average of the weights is on the device, too

    Of a pipeline each rank's are chosen alone, in what it has left beside for the microbatches that its stages have in
    flight; of as many something waits elsewhere.

    Raises UserError where none do, and says the smallest budget that some do.
    """
    given = parallel.recompute.budget
    assert given is not None
    budget = size_in_bytes(given, "recompute.budget")
    step = _Step(model, loss, mesh, parallel, speed, model_plan(plan), optimizer, num_microbatches, lines, averaged)
    if mesh.pp > 1:
        return step.of_stages(budget)
    chain = within(step.chain(), parallel.recompute.room)
    choices = [replace(choice, segments=chain.of_model(choice.segments)) for choice in frontier(chain)]
    return step.traced(choices, budget)


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


def lines_here(recompute: RecomputeConfig, kind: str, link: Bandwidth) -> dict[Form, Line]:
    """The same with the drive as it is measured, where it is here; link: without one."""
    folders = [] if recompute.disk is None else [recompute.disk]
    return lines_of(recompute, kind, with_drives(link, drive_speeds(folders)))


def chosen_first(
    device: str, parallel: ParallelConfig, choose: Callable[[Speed, str, Bandwidth], Checkpointing]
) -> Segments | None:
    """What a run in mode budget computes again or sends elsewhere, chosen before there are ranks: traces pretend some.

    choose  by the speed of the device, its kind and its link to the host. The first rank says what is chosen

    None in other modes. Ranks may choose unlike: one's choice is to be taken by all.
    """
    if parallel.recompute.mode != "budget":
        return None
    here = device_of(device)
    found = choose(speed_of(here, compute_dtype(parallel.precision)), here.type, bandwidth_of(here, 1))
    if leads():
        print(described(found))
    return found.segments


def within(chain: Chain, room: Mapping[Form, int]) -> Chain:
    """The chain of which no more bytes wait somewhere than there is room for: those of the first blocks may.

    Of a pipeline's stage those of each microbatch in flight do.
    """
    return _taking(chain, dict(room))


def _taking(chain: Chain, left: dict[Form, int]) -> Chain:
    """The same; what its blocks may send is taken from what is left."""
    blocks = []
    for of in chain.blocks:
        sent = {form: chain.flying * how.away for form, how in of.away.items()}
        away = {form: how for form, how in of.away.items() if sent[form] <= left.get(form, sent[form])}
        for form in left.keys() & away.keys():
            left[form] -= sent[form]
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
    averaged: bool = False

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
            (peak,) = self._peaks(self.plan, found.segments)
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
        """That of the whole model, as on one stage."""
        own: dict[str, Any] = {f.name: getattr(self.parallel, f.name) for f in fields(ParallelConfig)}
        mesh = replace(self.mesh, pp=1)
        alone = ParallelConfig(**{**own, "pipeline": PipelineConfig()})
        given = self.model, self.loss, mesh, alone, self.speed, self.plan, self.optimizer, self.num_microbatches
        return estimate_chain(*given, self.lines, averaged=self.averaged)

    def of_stages(self, budget: int) -> Checkpointing:
        """Those of a pipeline.

        1. Each stage's frontier comes from its part of the chain, for as many microbatches as its rank has in flight of
           it; a rank's comes from those of its stages.
        2. The ranks' steps are traced with the smallest of each: what they take beside is the rest of their peaks.
        3. In the budget less that the fastest are taken, and traced again; where one takes more, it gets less.
        4. Where that finds none, the same is done once more with nothing elsewhere.
        """
        pp, pipeline = self.mesh.pp, self.parallel.pipeline
        self.parallel.check_pipeline(pp)
        plan = with_stages(self.plan, self.model, pp)
        assert plan.pipeline is not None
        split = split_into_stages(self.model, plan.pipeline, pp, pipeline)
        chain, least = self.chain(), list[int]()
        if len(chain.blocks) != split.ranges[-1].stop:
            raise UserError(
                f"recompute.mode=budget with mesh.pp={pp}: the model has blocks outside of its stages; use "
                "--recompute.mode full, sqrt or recursive"
            )
        here = replace(chain, blocks=tuple(replace(of, away={}) for of in chain.blocks), lines={})
        for of in (chain, here) if any(block.away for block in chain.blocks) else (chain,):
            choices = [self._of_rank(of, split, rank) for rank in range(pp)]
            found, peaks = self._within(choices, plan, budget)
            if max(peaks) <= budget:
                return self._together(found, peaks, split)
            least.append(max(peaks))
        return self.refuse(min(least))

    def _within(
        self, choices: Sequence[Sequence["_OfRank"]], plan: ModelPlan, budget: int
    ) -> tuple[list["_OfRank"], list[int]]:
        """Of each rank the fastest that keeps to the budget, and what it takes; the smallest where none does."""
        smallest = [of[0] for of in choices]
        least = self._peaks(plan, _segments(smallest))
        if max(least) > budget:
            return smallest, least
        beside = [peak - one.peak_bytes for peak, one in zip(least, smallest, strict=True)]
        for _ in range(TRIES):
            found = [fastest(of, budget - more) or of[0] for of, more in zip(choices, beside, strict=True)]
            peaks = self._peaks(plan, _segments(found))
            if max(peaks) <= budget:
                return found, peaks
            beside = [max(more, peak - one.peak_bytes) for more, peak, one in zip(beside, peaks, found, strict=True)]
        return smallest, least

    def _of_rank(self, chain: Chain, split: StageSplit, rank: int) -> list["_OfRank"]:
        """What a rank of a pipeline may do: the smallest first, each larger one faster."""
        _, *flying = in_flight(split, self.parallel.pipeline, rank, self.num_microbatches)
        left, found = dict(self.parallel.recompute.room), [_OfRank({})]
        for stage, number in zip(split.own(rank), flying, strict=True):
            own = frontier(_taking(stage_of(chain, split.ranges[stage], int(number)), left))
            if len(flying) > 1:  # the smallest and the fastest among them
                own = [own[0], *own[: 0 : -(len(own) // MOST_OF_A_STAGE + 1)][::-1]]
            found = _smaller_or_faster([one.with_stage(stage, choice) for one in found for choice in own])
        return found

    def _peaks(self, plan: ModelPlan, segments: Segments) -> list[int]:
        """What the ranks take."""
        plan = replace(plan, recompute=segments)
        given = self.model, self.loss, self.mesh, self.parallel, plan, self.optimizer or OptimConfig()
        stages = estimate_places(*given, self.num_microbatches, range(self.mesh.pp))
        return [one.peak_bytes + (one.average_bytes if self.averaged else 0) for one in stages.values()]

    def _together(self, ranks: Sequence["_OfRank"], peaks: Sequence[int], split: StageSplit) -> Checkpointing:
        """The segments of all stages; times are those of one microbatch on its way through all."""
        stages = _in_order(ranks)
        steps = [one.step for one in stages]
        names = ("seconds", "again_s", "again_flops")
        added = (sum(getattr(step, name) for step in steps) for name in names)
        runs, back = (tuple(n for step in steps for n in getattr(step, name)) for name in ("runs", "back_bytes"))
        sent: dict[Form, list[int]] = {}
        for form in WHERE:
            if any(form in step.away_bytes for step in steps):
                sent[form] = [step.away_bytes.get(form, 0) for step in steps]
        taken = []
        for rank, peak in enumerate(peaks):
            actions = actions_of(split, self.parallel.pipeline, rank, self.num_microbatches)
            away: dict[Form, int] = {}
            for form, of in sent.items():
                if num_bytes := int(most_in_flight(actions, lambda stage, of=of: of[stage])):
                    away[form] = num_bytes
            taken.append(RankBytes(peak, away))
        step = Simulated(
            max(peaks),
            max(step.forward_bytes for step in steps),
            *added,
            runs=runs,
            back_bytes=back,
            waits_s=sum(step.waits_s for step in steps),
            away_bytes={form: sum(of) for form, of in sent.items()},
        )
        return Checkpointing(_segments(ranks), step, tuple(taken))


@dataclass(frozen=True)
class _OfRank:
    """What a rank of a pipeline does with its stages: the choice of each.

    standing  bytes of all stages' microbatches in flight; above: the most that a stage at work takes beside its own
    """

    stages: Mapping[int, Checkpointing]
    standing: int = 0
    above: int = 0
    seconds: float = 0.0

    @property
    def peak_bytes(self) -> int:
        return self.standing + self.above

    def with_stage(self, stage: int, choice: Checkpointing) -> "_OfRank":
        step = choice.step
        above = step.peak_bytes - step.standing_bytes
        return _OfRank(
            {**self.stages, stage: choice},
            self.standing + step.standing_bytes,
            max(self.above, above) if self.stages else above,
            self.seconds + step.seconds,
        )


def _smaller_or_faster(choices: Sequence[_OfRank]) -> list[_OfRank]:
    """Those that no other one is both than, the smallest first."""
    found: list[_OfRank] = []
    for one in sorted(choices, key=lambda one: (one.peak_bytes, one.seconds)):
        if not found or one.seconds < found[-1].seconds:
            found.append(one)
    return found


def _in_order(ranks: Sequence[_OfRank]) -> list[Checkpointing]:
    """The choices of all stages, in the model's order."""
    stages = {stage: choice for one in ranks for stage, choice in one.stages.items()}
    return [stages[stage] for stage in sorted(stages)]


def _segments(ranks: Sequence[_OfRank]) -> Segments:
    return tuple(item for one in _in_order(ranks) for item in one.segments)


def described(found: Checkpointing) -> str:
    """A line that says what is computed again, and what for."""
    again, step = [runs - 1 for runs in found.step.runs], found.step
    alone_s = max(step.seconds - step.again_s - step.waits_s, 1e-30)
    said = (
        f"at most {in_words(found.peak_bytes)} in a step: {sum(map(bool, again))} of {len(again)} blocks run again, "
        f"{sum(again)} times together, which takes {step.again_s / alone_s:.0%} of a step's time in blocks"
    )
    if alone := num_blocks_of(found.segments) - len(again):
        said += f"; {alone} others, which a forward calls several times, run again in each call"
    for form, where in WHERE.items():
        if blocks := sum(item.blocks for item in found.segments if isinstance(item, Away) and item.form == form):
            said += f"; of {blocks} what they save waits {where}"
            if form in step.away_bytes:
                said += f", {in_words(step.away_bytes[form])} of each microbatch"
    if step.away_bytes:
        said += f"; copies take {step.waits_s / alone_s:.0%} more"
    for rank, of in enumerate(found.ranks):
        sent = "".join(f", and {in_words(num_bytes)} {WHERE[form]}" for form, num_bytes in of.away.items())
        said += f"; rank {rank} of the pipeline takes {in_words(of.device)}{sent}"
    return said
