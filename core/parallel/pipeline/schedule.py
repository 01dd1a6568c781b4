"""Pipeline schedules: which rank computes what, in which order. Pure data: no tensor, no process, no model.

    schedule("1f1b", num_ranks=2, num_microbatches=3).ranks
    ((F(0, 0), F(1, 0), B(0, 0), F(2, 0), B(1, 0), B(2, 0)),      rank 0: stage 0
     (F(0, 1), B(0, 1), F(1, 1), B(1, 1), F(2, 1), B(2, 1)))      rank 1: stage 1

An action belongs to a microbatch and a stage. F is the forward and B the backward; zero-bubble schedules split B into
I, the gradient of the stage's input, which another stage waits for, and W, the gradients of its weights, which no stage
waits for: W fills what would be a bubble.

    gpipe        all forwards, then all backwards (Huang et al. 2019, GPipe, section 2.3)
    1f1b         as many forwards as there are stages behind, then a forward and a backward in turn: the same bubble,
                 activations of at most as many microbatches as stages (Narayanan et al. 2021, Megatron-LM, 2.2.1)
    interleaved  1f1b with several stages a rank, dealt out in rounds: the bubble is divided by their number, the
                 messages are multiplied by it (Narayanan et al. 2021, section 2.2.2)
    zb-h1        1f1b with W put off, on rank r by r microbatches: a third of the bubble, and on every rank the memory
                 of 1f1b's first (Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2.3)
    zbv          two stages a rank, the first on the way there and the second on the way back (a V): with F, I and W of
                 equal cost only the start is idle; the memory of 1f1b (Qi et al. 2023, section 6)
    2bw          1f1b that goes on with the next step's microbatches where it would idle, on weights that are one update
                 old: without a bubble, with two versions of the weights (Narayanan et al. 2021, Memory-Efficient
                 Pipeline-Parallel DNN Training, section 3.1)
    pipedream    the same with stages that each update when they have a step's gradients, on weights that are as many
                 updates old as there are stages behind (Narayanan et al. 2019, PipeDream, section 3.3, weight stashing)
    pipedream_sync  the same with weights of one update on all stages: that which the first had when the step entered
                 (PipeDream, section 3.3, vertical sync)

Under the last three a stage may have several ranks, its replicas, which hold the same weights: microbatch b of stage s
runs, both ways, on replica b mod r_s (Narayanan et al. 2019, section 3.2, 1F1B-RR). Behind a step's last backwards they
meet and add up their gradients, so that a step is an update on every stage.

`simulate` runs a schedule on a clock. It raises where ranks would wait for one another for ever.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import accumulate, dropwhile
from typing import Literal

from torch import Tensor

from core.config import UserError
from core.parallel.correction import CORRECTIONS, Correction, CorrectionName

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "2bw", "pipedream", "pipedream_sync"]
MICROBATCHES_PER_STAGE = 4


@dataclass(frozen=True)
class PipelineConfig:
    """The way of a step through the stages of --mesh.pp ranks."""

    schedule: ScheduleName = "1f1b"
    """order of forwards and backwards: gpipe, 1f1b, interleaved; without most of the bubble zb-h1 and zbv; without any
    and with gradients of weights that are one update old 2bw, as many as there are stages behind pipedream, alike on
    all stages pipedream_sync"""
    microbatches: int | None = None
    """microbatches of a step on one rank; None: as --microbatch cuts the rows, or else four a stage, of pipedream and
    pipedream_sync one"""
    chunks: int = 2
    """stages of one rank under interleaved; zbv has two, the others one"""
    split: tuple[int, ...] = ()
    """blocks of each stage, first to last; empty: balanced by cost"""
    cost: Literal["estimated", "measured"] = "estimated"
    """what stages are balanced by: FLOPs of blocks, embedding and head, or their times on this machine at the start"""
    clip: Literal["stage", "last"] = "stage"
    """norm that optim.clip_norm looks at under pipedream, whose stages do not wait for one another's: stage, of its own
    gradients; last, of all stages' in the latest step that all know, as many steps before as there are stages"""
    replicas: tuple[int, ...] = ()
    """ranks of each stage, first to last, under a schedule whose steps overlap: they take its microbatches in turn and
    hold the same weights, so that a stage may have more blocks than others; empty: one each"""
    correction: CorrectionName = "none"
    """against gradients of old weights, where the schedule has them: lr_by_delay, prediction, nesterov, dc_asgd or
    error_feedback (docs/async_pipelines.md)"""
    correction_strength: float | None = None
    """gamma of nesterov (None: 0.99), lambda of dc_asgd (0.04) and of error_feedback (1)"""
    correction_steps: int = 1000
    """updates after which lr_by_delay has given the whole rate back"""

    def __post_init__(self) -> None:
        if self.microbatches is not None and self.microbatches < 1:
            raise UserError(f"pipeline.microbatches={self.microbatches}; give a positive number")
        if self.chunks < 2:
            raise UserError(
                f"pipeline.chunks={self.chunks}: interleaved has at least 2 stages a rank; "
                "give 2 or more, or use --pipeline.schedule 1f1b"
            )
        if any(blocks < 1 for blocks in self.split):
            raise UserError(f"pipeline.split={_spaced(self.split)}: every stage has at least one block")
        if self.replicas:
            self._check_replicas()
        self._check_correction()

    def _check_replicas(self) -> None:
        given = f"pipeline.replicas={_spaced(self.replicas)}"
        if any(ranks < 1 for ranks in self.replicas) or len(self.replicas) < 2:
            raise UserError(f"{given}; give each of two or more stages a positive number of ranks, such as 2 1")
        if not SCHEDULES[self.schedule].runs_ahead:
            raise UserError(
                f"{given} with pipeline.schedule={self.schedule}: it has one rank for each of its stages; use "
                f"--pipeline.schedule {_ahead_names()}, or --mesh.dp-replicate for copies of all stages"
            )

    def _check_correction(self) -> None:
        """Raises UserError for a correction of a schedule whose weights are not late, and for values out of range."""
        given = f"pipeline.correction={self.correction}"
        if self.correction != "none" and not SCHEDULES[self.schedule].runs_ahead:
            raise UserError(
                f"{given} with pipeline.schedule={self.schedule}: its gradients are of the newest weights; leave "
                f"it out, or use --pipeline.schedule {_ahead_names()}"
            )
        strength, most = self.correction_strength, CORRECTIONS[self.correction].most
        if strength is not None and not 0 < strength < most:
            raise UserError(
                f"pipeline.correction_strength={strength} with {given}; give a number above 0"
                + (f" and below {most:g}" if most < float("inf") else "")
            )
        if self.correction_steps < 1:
            raise UserError(f"pipeline.correction_steps={self.correction_steps}; give a positive number")

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        found = {}
        if self.schedule != "interleaved":
            found["chunks"] = f"with pipeline.schedule={self.schedule}; give --pipeline.schedule interleaved"
        if self.split:
            found["cost"] = "with pipeline.split, which says what each stage has; leave one of them out"
        if not SCHEDULES[self.schedule].updates_at_once:
            found["clip"] = f"with pipeline.schedule={self.schedule}, which knows the norm of all stages; leave it out"
        if CORRECTIONS[self.correction].strength is None:
            found["correction_strength"] = f"with pipeline.correction={self.correction}, which has none; leave it out"
        if self.correction != "lr_by_delay":
            found["correction_steps"] = f"with pipeline.correction={self.correction}; leave it out"
        return found

    @property
    def stages_per_rank(self) -> int:
        return SCHEDULES[self.schedule].stages_per_rank(self.chunks)

    def num_stages(self, num_ranks: int) -> int:
        return len(self.replicas) or num_ranks * self.stages_per_rank

    def replicas_of(self, num_ranks: int) -> tuple[int, ...]:
        """Ranks of each stage, of a schedule whose steps overlap."""
        return self.replicas or (1,) * num_ranks

    @property
    def has_replicas(self) -> bool:
        return max(self.replicas, default=1) > 1

    @property
    def turns(self) -> int:
        """The microbatches of a step are a multiple of it: so all replicas of a stage have alike many."""
        return math.lcm(*self.replicas)

    def microbatch_rows(self, rows: int, num_ranks: int) -> list[int]:
        """Rows of each microbatch of a rank's `rows`: as many as asked for, as far as there are rows, nearly equal."""
        usual = self.turns * -(-SCHEDULES[self.schedule].microbatches(num_ranks) // self.turns)
        number = min(rows, self.microbatches or usual)
        return [rows // number + (index < rows % number) for index in range(number)]

    def check_microbatches(self, number: int, num_ranks: int) -> None:
        """Raises UserError where a step has too few for the schedule, or its replicas cannot take turns."""
        fewest = SCHEDULES[self.schedule].fewest(self.replicas_of(num_ranks))
        has = f"with {number} microbatch{'es' * (number > 1)} a step on mesh.pp={num_ranks}"
        if number < fewest and not self.replicas:
            raise UserError(
                f"pipeline.schedule={self.schedule} {has}: it needs one for each stage; use --pipeline.microbatches "
                f"{fewest} or more (and as many rows on each rank), or --pipeline.schedule 1f1b"
            )
        if number < fewest or number % self.turns:
            least = self.turns * -(-max(fewest, number) // self.turns)
            raise UserError(
                f"pipeline.replicas={_spaced(self.replicas)} with pipeline.schedule={self.schedule} {has}: replicas "
                f"take turns, and {self.schedule} needs {fewest}; use --pipeline.microbatches {least} or another "
                f"multiple of {self.turns} from there (and as many rows on each rank)"
            )

    def check_ranks(self, num_ranks: int) -> None:
        """Raises UserError for replicas that are not these ranks."""
        if self.replicas and sum(self.replicas) != num_ranks:
            raise UserError(
                f"pipeline.replicas={_spaced(self.replicas)} are {sum(self.replicas)} ranks, and mesh.pp={num_ranks}; "
                f"use --mesh.pp {sum(self.replicas)}, or numbers that add up to {num_ranks}"
            )

    def check_shared(self, name: str) -> None:
        """Raises UserError for a parameter that stages share, where these have replicas."""
        if self.has_replicas:
            raise UserError(
                f"pipeline.replicas={_spaced(self.replicas)}: stages share '{name}', whose gradients would be those of "
                "several replicas on each; use one rank a stage, or a model without it (--model.no-tied-head)"
            )

    def check_delays(self, num_ranks: int) -> None:
        """Raises UserError for a correction that changes nothing at the delays of the stages."""
        delay = SCHEDULES[self.schedule].delay
        stages = self.num_stages(num_ranks)
        most = max(delay(stage, stages) for stage in range(stages))
        if CORRECTIONS[self.correction].needs_delays and most <= 1:
            raise UserError(
                f"pipeline.correction={self.correction} with pipeline.schedule={self.schedule} on mesh.pp={num_ranks}: "
                "it divides the rate by the delay, which is one update at most; leave it out, or use "
                "--pipeline.correction error_feedback"
            )

    def correct(self, masters: Mapping[str, Tensor], stage: int, stages: int) -> Correction:
        """What corrects the masters of a stage."""
        spec = CORRECTIONS[self.correction]
        strength = spec.strength if self.correction_strength is None else self.correction_strength
        delay = SCHEDULES[self.schedule].delay(stage, stages)
        return spec.make(masters, delay, strength or 0.0, self.correction_steps)

    def check_stages(self, num_ranks: int, num_blocks: int) -> None:
        """Raises UserError where the blocks do not make the stages."""
        stages = self.num_stages(num_ranks)
        if stages > num_blocks:
            most = num_blocks // self.stages_per_rank
            fits = f"use mesh.pp={most} or less" if most > 1 else "use fewer stages"
            raise UserError(
                f"mesh.pp={num_ranks} with pipeline.schedule={self.schedule} makes {stages} stages, and the model has "
                f"{num_blocks} blocks; {fits}"
            )
        if self.split and (len(self.split) != stages or sum(self.split) != num_blocks):
            raise UserError(
                f"pipeline.split={_spaced(self.split)} is {len(self.split)} stages of {sum(self.split)} blocks, and "
                f"there are {stages} stages and {num_blocks} blocks; give {stages} numbers that add up to {num_blocks}"
            )


def _spaced(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def _ahead_names() -> str:
    return " or ".join(name for name, spec in SCHEDULES.items() if spec.runs_ahead)


class Kind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHTS = "W"


@dataclass(frozen=True, order=True)
class Action:
    kind: Kind
    microbatch: int
    stage: int

    def __repr__(self) -> str:
        return f"{self.kind}({self.microbatch}, {self.stage})"

    @property
    def passes_on_gradients(self) -> bool:
        """True where the stage before can go on from here."""
        return self.kind in (Kind.BACKWARD, Kind.INPUT)

    @property
    def releases(self) -> bool:
        """True where the microbatch's activations can go after it."""
        return self.kind in (Kind.BACKWARD, Kind.WEIGHTS)


def F(microbatch: int, stage: int = 0) -> Action:
    return Action(Kind.FORWARD, microbatch, stage)


def B(microbatch: int, stage: int = 0) -> Action:
    return Action(Kind.BACKWARD, microbatch, stage)


def I(microbatch: int, stage: int = 0) -> Action:  # noqa: E743  # the papers' letter
    return Action(Kind.INPUT, microbatch, stage)


def W(microbatch: int, stage: int = 0) -> Action:
    return Action(Kind.WEIGHTS, microbatch, stage)


@dataclass(frozen=True)
class Schedule:
    """Actions, and who runs them.

    ranks     the actions of each rank, in order
    owners    the first rank of each stage
    replicas  ranks of each stage, which follow that one; empty: one each
    step      microbatches of a step of several that overlap; 0: of all
    end       the microbatch before whose forward the first of them ends on every stage
    """

    ranks: tuple[tuple[Action, ...], ...]
    owners: tuple[int, ...]
    replicas: tuple[int, ...] = ()
    step: int = 0
    end: int = 0

    @property
    def num_stages(self) -> int:
        return len(self.owners)

    def num_replicas(self, stage: int) -> int:
        return self.replicas[stage] if self.replicas else 1

    def stages_of(self, rank: int) -> list[int]:
        return [s for s, first in enumerate(self.owners) if first <= rank < first + self.num_replicas(s)]

    def rank_of(self, action: Action) -> int:
        """The rank that runs it: replicas of a stage take microbatches in turn."""
        return self.owners[action.stage] + action.microbatch % self.num_replicas(action.stage)

    def ends_step(self, action: Action) -> bool:
        """True of a rank's last backward of a step, of steps that overlap."""
        if not self.step or action.kind is not Kind.BACKWARD:
            return False
        return action.microbatch % self.step >= self.step - self.num_replicas(action.stage)

    def meeting(self, action: Action) -> list[Action]:
        """The last backwards of an action's step on all replicas of its stage: when they end, gradients are whole."""
        end = action.microbatch - action.microbatch % self.step + self.step
        return [B(microbatch, action.stage) for microbatch in range(end - self.num_replicas(action.stage), end)]

    def _needed(self, action: Action, before: Action | None, split: bool) -> list[Action]:
        """What an action waits for; before: the one before it on its rank."""
        found = needs(action, self.num_stages, split)
        if before is not None and self.num_replicas(before.stage) > 1 and self.ends_step(before):
            found += self.meeting(before)
        behind = action.stage + 1
        tells = self.step and action.kind is Kind.BACKWARD and (action.microbatch + 1) % self.step == 0
        if tells and behind < self.num_stages and self.num_replicas(behind) > 1:
            found += self.meeting(B(action.microbatch, behind))  # whose numbers travel with this gradient
        return found

    @cached_property
    def order(self) -> "tuple[Due, ...]":
        """All actions, each behind those that it needs.  Raises ValueError where ranks would wait for ever."""
        split = any(action.kind is Kind.INPUT for actions in self.ranks for action in actions)
        order: list[Due] = []
        places: dict[Action, int] = {}
        position = [0] * len(self.ranks)
        moved = True
        while moved:
            moved = False
            for rank, actions in enumerate(self.ranks):
                while position[rank] < len(actions):
                    action = actions[position[rank]]
                    needed = self._needed(action, actions[position[rank] - 1] if position[rank] else None, split)
                    if not all(before in places for before in needed):
                        break
                    waits = tuple((places[before], self.rank_of(before) != rank) for before in needed)
                    places[action] = len(order)
                    order.append((action, rank, waits))
                    position[rank] += 1
                    moved = True
        stuck = [actions[p] for actions, p in zip(self.ranks, position, strict=True) if p < len(actions)]
        if stuck:
            raise ValueError(f"no rank can go on; they are at {stuck}")
        return tuple(order)

    @cached_property
    def goes_on(self) -> tuple[bool, ...]:
        """Of each rank, whether it runs a forward when it has gradients of an earlier backward."""
        kinds = ([action.kind for action in actions] for actions in self.ranks)
        return tuple(
            any(kind is Kind.FORWARD for kind in dropwhile(lambda kind: kind is Kind.FORWARD, of)) for of in kinds
        )

    @cached_property
    def moments(self) -> "tuple[tuple[tuple[Moment, ...], tuple[Moment, ...]], ...]":
        """Of each rank the moments of which one is the fullest, whatever its stages keep: behind forwards; at all."""
        return tuple(_moments(actions) for actions in self.ranks)

    @cached_property
    def in_flight(self) -> "tuple[tuple[tuple[Counts, ...], ...], ...]":
        """The same as counts of each of a rank's stages, in their order, so that ranks can be compared."""

        def counts(moment: Moment) -> Counts:
            return tuple(n for _, *both in sorted(moment) for n in both)

        return tuple(tuple(tuple(map(counts, moments)) for moments in of_rank) for of_rank in self.moments)

    @cached_property
    def heads_waiting(self) -> int:
        """The most forwards of the last stage whose gradient is still to be passed on."""
        waiting = most = 0
        for action in self.ranks[self.owners[-1]]:
            if action.stage == self.num_stages - 1:
                waiting += (action.kind is Kind.FORWARD) - action.passes_on_gradients
                most = max(most, waiting)
        return most


Due = tuple[Action, int, tuple[tuple[int, bool], ...]]
"""An action, its rank, and what it needs: places in the order, and whether that comes from another rank."""
Moment = tuple[tuple[int, int, int], ...]
"""(stage, forwards whose backward is to come, inputs' gradients whose weights' are to come), of a rank's stages."""
Counts = tuple[int, ...]
"""A moment without the stages."""


@lru_cache
def schedule(
    name: ScheduleName,
    num_ranks: int,
    num_microbatches: int,
    chunks: int = 2,
    steps: int = 1,
    replicas: tuple[int, ...] = (),
) -> Schedule:
    """Make the schedule of a step, or of several of a schedule that runs ahead, their microbatches numbered through.

    num_microbatches  of a step; a multiple of the replicas of each stage
    chunks            stages of a rank under `interleaved`
    replicas          ranks of each stage of a schedule that runs ahead; empty: one each
    """
    spec = SCHEDULES[name]
    assert spec.runs_ahead or (steps == 1 and not replicas), f"steps of {name} do not overlap"
    if not spec.runs_ahead:
        made = (spec.actions(num_ranks, rank, num_microbatches, chunks) for rank in range(num_ranks))
        return Schedule(tuple(map(tuple, made)), owners(name, num_ranks, chunks))
    of = replicas or (1,) * num_ranks
    assert sum(of) == num_ranks, (of, num_ranks)
    assert not any(num_microbatches % one for one in of), (of, num_microbatches)
    made = (
        _overlapping(spec, of, stage, place, num_microbatches, steps)
        for stage, ranks in enumerate(of)
        for place in range(ranks)
    )
    end = spec.end_of_step(of, num_microbatches)
    return Schedule(tuple(map(tuple, made)), owners(name, num_ranks, chunks, of), of, num_microbatches, end)


def owners(name: ScheduleName, num_ranks: int, chunks: int = 2, replicas: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The first rank of each stage: round after round, in a V there and back."""
    if replicas:
        return tuple(accumulate(replicas[:-1], initial=0))
    there = tuple(range(num_ranks))
    rounds = SCHEDULES[name].stages_per_rank(chunks)
    return there + there[::-1] if SCHEDULES[name].turns_back else there * rounds


def _gpipe(num_ranks: int, rank: int, num_microbatches: int, chunks: int) -> Iterator[Action]:
    yield from (F(n, rank) for n in range(num_microbatches))
    yield from (B(n, rank) for n in range(num_microbatches))


def _one_f_one_b(num_ranks: int, rank: int, num_microbatches: int, chunks: int) -> Iterator[Action]:
    forwards = [F(n, rank) for n in range(num_microbatches)]
    backwards = [B(n, rank) for n in range(num_microbatches)]
    return _in_turn(forwards, backwards, num_ranks - 1 - rank)


def _overlapping(
    spec: "ScheduleSpec", replicas: tuple[int, ...], stage: int, place: int, number: int, steps: int
) -> Iterator[Action]:
    """1f1b of a replica's microbatches of many steps, with the forwards ahead that the schedule says."""
    own = range(place, number * steps, replicas[stage])
    ahead = spec.ahead(replicas, stage, number) // replicas[stage]
    return _in_turn([F(n, stage) for n in own], [B(n, stage) for n in own], ahead)


def _as_many_as_behind(replicas: Sequence[int], stage: int) -> int:
    """Microbatches that keep the ranks behind a stage busy, also where they meet, in whole turns of its own."""
    return replicas[stage] * -(-sum(2 * number - 1 for number in replicas[stage + 1 :]) // replicas[stage])


def _interleaved(num_ranks: int, rank: int, num_microbatches: int, chunks: int) -> Iterator[Action]:
    """Groups of `num_ranks` microbatches go through all chunks of a rank; a last group that is smaller has gaps."""
    starts = range(0, num_microbatches, num_ranks)
    groups = [range(start, start + num_ranks) for start in starts]
    forwards = [F(n, c * num_ranks + rank) for group in groups for c in range(chunks) for n in group]
    backwards = [B(n, c * num_ranks + rank) for group in groups for c in reversed(range(chunks)) for n in group]
    ahead = (chunks - 1) * num_ranks + 2 * (num_ranks - 1 - rank)
    # Microbatches are left out whole, so the others' actions keep their order and their times.
    return (action for action in _in_turn(forwards, backwards, ahead) if action.microbatch < num_microbatches)


def _in_turn(forwards: list[Action], backwards: list[Action], ahead: int) -> Iterator[Action]:
    """Run `ahead` forwards, then a forward and a backward in turn as long as there are both."""
    yield from forwards[:ahead]
    rest = forwards[ahead:]
    for index, backward in enumerate(backwards):
        yield from rest[index : index + 1]
        yield backward


def _zb_h1(num_ranks: int, rank: int, num_microbatches: int, chunks: int) -> Iterator[Action]:
    forwards = [F(n, rank) for n in range(num_microbatches)]
    inputs = [I(n, rank) for n in range(num_microbatches)]
    for action in _in_turn(forwards, inputs, num_ranks - 1 - rank):
        yield action
        if action.kind is Kind.INPUT and action.microbatch >= rank:
            yield W(action.microbatch - rank, rank)
    yield from (W(n, rank) for n in range(max(0, num_microbatches - rank), num_microbatches))


def _zbv(num_ranks: int, rank: int, num_microbatches: int, chunks: int) -> Iterator[Action]:
    """Build the order for enough microbatches to fill the pipeline; missing ones are left out."""
    number = max(num_microbatches, 2 * num_ranks - 1)
    there, back = rank, 2 * num_ranks - 1 - rank
    behind = num_ranks - rank
    to_there = [(Kind.FORWARD, there)]
    whole_there = [(Kind.INPUT, there), (Kind.WEIGHTS, there)]
    whole_back = [(Kind.FORWARD, back), (Kind.INPUT, back), (Kind.WEIGHTS, back)]
    order = (
        to_there * (2 * behind - 1)
        + [(Kind.FORWARD, back), *to_there] * rank
        + whole_back * behind
        + [*to_there, *whole_there, *whole_back] * (number - 2 * num_ranks + rank + 1)
        + [*whole_there, *whole_back] * (behind - 1)
        + [(Kind.INPUT, there), (Kind.INPUT, back)] * rank
        + whole_there * behind
        + [(Kind.WEIGHTS, back)] * rank
        + [(Kind.WEIGHTS, there)] * rank
    )
    counts: dict[tuple[Kind, int], int] = {}
    for kind, stage in order:
        microbatch = counts.setdefault((kind, stage), 0)
        counts[kind, stage] += 1
        if microbatch < num_microbatches:
            yield Action(kind, microbatch, stage)


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule's facts and its builder.

    actions          (ranks, rank, microbatches, chunks) -> the actions of a rank, in order; of steps that overlap
                     `ahead` says them
    idle             (cost of a backward, chunks) -> the published bubble, in forwards, for each rank beyond the first
    in_flight        (ranks, rank, microbatches, chunks) -> the published peak of forwards whose backward is to come, in
                     microbatches of a stage; of interleaved and zbv with at least as many (twice as many)
                     microbatches as ranks
    stages_per_rank  chunks -> stages of a rank
    turns_back       the stages go there and back over the ranks, not round after round
    splits_backward  into the gradient of a stage's input and those of its weights
    delay            (stage, stages) -> updates that the weights are old with which a stage computes a step, both ways:
                     step t takes those of max(t - delay, 0) updates. More than 0: its steps overlap (`.ahead`)
    ahead            (ranks of each stage, stage, microbatches of a step) -> forwards that the ranks of a stage have
                     made when they begin their first backward, of steps that overlap; a multiple of these ranks
    versions         (stage, stages) -> versions of the weights that it holds: of the steps whose backward is to come,
                     and the newest
    gradients        (stage, stages) -> gradients of whole steps that it holds: what is added up, and what waits for the
                     norm of all stages. Where nothing is to follow, the steps that are under way all wait, each in the
                     place of a version: together the two are as many as before
    together         (stage, stages) -> versions and gradients that it holds at once while it computes, if not the most
                     of both
    updates_at_once  each stage when it has a step's gradients, without the norm of all
    fewest           ranks of each stage -> microbatches that a step has at least
    microbatches     ranks -> those that it has unless it is said
    refuses          option -> why it does not go with the schedule
    """

    actions: Callable[[int, int, int, int], Iterator[Action]]
    idle: Callable[[float, int], float]
    in_flight: Callable[[int, int, int, int], int]
    stages_per_rank: Callable[[int], int] = lambda chunks: 1
    turns_back: bool = False
    splits_backward: bool = False
    delay: Callable[[int, int], int] = lambda stage, stages: 0
    ahead: Callable[[Sequence[int], int, int], int] = lambda replicas, stage, number: 0
    versions: Callable[[int, int], int] = lambda stage, stages: 1
    gradients: Callable[[int, int], int] = lambda stage, stages: 1
    together: Callable[[int, int], int] | None = None
    updates_at_once: bool = False
    fewest: Callable[[Sequence[int]], int] = lambda replicas: 1
    microbatches: Callable[[int], int] = lambda ranks: MICROBATCHES_PER_STAGE * ranks
    refuses: Mapping[str, str] = field(default_factory=dict)

    @property
    def runs_ahead(self) -> bool:
        """True where a step begins before the one before it ends, so that its actions are those of a long run."""
        return self.delay(0, 2) > 0

    def depth(self, stages: int) -> int:
        """Steps after the one that runs of which something was computed or received when that one ends."""
        return (stages + self.ahead((1,) * stages, 0, stages)) // stages if self.runs_ahead else 0

    def held(self, replicas: Sequence[int], stage: int, number: int) -> tuple[tuple[int, int], ...]:
        """(versions, gradients of whole steps) of a stage's ranks, of which they have one when activations are most.

        While they update they have the most of both. Gradients that wait beside none yet of the step that runs make
        nothing fuller: a version comes in their place.
        """
        stages = len(replicas)
        versions, gradients = self.versions(stage, stages), self.gradients(stage, stages)
        together = versions + gradients if self.together is None else self.together(stage, stages)
        ahead = self.ahead(replicas, 0, number) - self.ahead(replicas, stage, number)
        backwards = -(-ahead // replicas[stage])  # while they wait
        most = ((versions, together - versions), (together - gradients, gradients))
        return most if backwards > 1 else most[:1]

    def end_of_step(self, replicas: Sequence[int], number: int) -> int:
        """The microbatch, counted from a step's first, before whose forward the step ends on every stage."""
        return number + self.ahead(replicas, 0, number)


_SPLIT_BACKWARD = {
    "zero=3": "parameters are let go before their gradients are computed",
    "gemini.budget": "parameters leave before their gradients are computed",
    "compile": "a compiled block computes both parts of its backward at once",
}
_VERSIONS = {
    "zero=2": "gradients of two steps are added up at once, and it has no place for the second",
    "zero=3": "it keeps one version of the parameters",
    "gemini.budget": "it keeps one version of the parameters",
    "compile": "the graphs of a compiled block are of one version of the parameters",
}
SCHEDULES: dict[ScheduleName, ScheduleSpec] = {
    "gpipe": ScheduleSpec(_gpipe, lambda backward, _: 1 + backward, lambda ranks, rank, number, _: number),
    "1f1b": ScheduleSpec(
        _one_f_one_b, lambda backward, _: 1 + backward, lambda ranks, rank, number, _: min(number, ranks - rank)
    ),
    "interleaved": ScheduleSpec(
        _interleaved,
        lambda backward, chunks: (1 + backward) / chunks,
        lambda ranks, rank, number, chunks: min(chunks * number, (chunks + 1) * ranks - 2 * rank - 1),
        stages_per_rank=lambda chunks: chunks,
    ),
    "zb-h1": ScheduleSpec(
        _zb_h1,
        lambda _b, _c: 1.0,
        lambda ranks, rank, number, _: min(number, ranks),
        splits_backward=True,
        refuses=_SPLIT_BACKWARD,
    ),
    "zbv": ScheduleSpec(
        _zbv,
        lambda _b, _c: 0.5,
        lambda ranks, rank, number, _: 2 * min(number, ranks),
        stages_per_rank=lambda _: 2,
        turns_back=True,
        splits_backward=True,
        refuses=_SPLIT_BACKWARD,
    ),
    "2bw": ScheduleSpec(
        _one_f_one_b,
        lambda backward, _: 1 + backward,
        lambda ranks, rank, number, _: min(number, ranks - rank),
        delay=lambda stage, stages: 1,
        ahead=lambda replicas, stage, number: _as_many_as_behind(replicas, stage),
        versions=lambda stage, stages: 2,
        gradients=lambda stage, stages: 1 + (stage > 0),
        together=lambda stage, stages: 3,  # a step's gradients wait until its update makes the second version
        fewest=lambda replicas: _as_many_as_behind(replicas, 0) + 2 * max(replicas) - 1,
        refuses=_VERSIONS,
    ),
    "pipedream": ScheduleSpec(
        _one_f_one_b,
        lambda backward, _: 1 + backward,
        lambda ranks, rank, number, _: (ranks - 1 - rank) * number + 1,
        delay=lambda stage, stages: stages - 1 - stage,
        ahead=lambda replicas, stage, number: (len(replicas) - 1 - stage) * number,
        versions=lambda stage, stages: stages - stage,
        updates_at_once=True,
        microbatches=lambda ranks: 1,
        refuses=_VERSIONS
        | {
            "zero=2": "gradients stay whole until the update, which follows a step's last backward at once",
            "precision=fp16": "a stage has updated before another one's overflow is known",
        },
    ),
    "pipedream_sync": ScheduleSpec(
        _one_f_one_b,
        lambda backward, _: 1 + backward,
        lambda ranks, rank, number, _: (ranks - 1 - rank) * number + 1,
        delay=lambda stage, stages: stages - 1,
        ahead=lambda replicas, stage, number: (len(replicas) - 1 - stage) * number,
        versions=lambda stage, stages: stages - stage,
        gradients=lambda stage, stages: stage + 1,
        microbatches=lambda ranks: 1,
        refuses=_VERSIONS,
    ),
}


# --- on a clock -------------------------------------------------------------------------------------------------------


def needs(action: Action, num_stages: int, split: bool) -> list[Action]:
    """The actions whose results an action takes; `split`: the backward is I and W."""
    n, stage = action.microbatch, action.stage
    if action.kind is Kind.FORWARD:
        return [F(n, stage - 1)] if stage else []
    if action.kind is Kind.WEIGHTS:
        return [I(n, stage)]
    behind = [I(n, stage + 1) if split else B(n, stage + 1)] if stage < num_stages - 1 else []
    return [F(n, stage), *behind]


Times = dict[Action, tuple[float, float]]


def simulate(
    of: Schedule,
    cost: Callable[[Action], float],
    message: float = 0.0,
    earliest: Callable[[Action], float] = lambda action: 0.0,
) -> Times:
    """Run a schedule on a clock: each action begins when its rank is free and its inputs are there.  Returns its times.

    cost      action -> how long it takes
    message   how long a result takes to another rank
    earliest  action -> when it may begin
    Raises ValueError, with each rank's wait, where no rank can go on.
    """
    actions = (action for action, *_ in of.order)
    return dict(zip(actions, _clock(of, cost, message, earliest)))


def span(of: Schedule, cost: Callable[[Action], float], message: float = 0.0) -> float:
    """The time at which the last action of `simulate` ends."""
    return max(end for _, end in _clock(of, cost, message))


def _clock(
    of: Schedule,
    cost: Callable[[Action], float],
    message: float,
    earliest: Callable[[Action], float] = lambda action: 0.0,
) -> list[tuple[float, float]]:
    """Beginning and end of each action, in their order."""
    free, times = [0.0] * len(of.ranks), list[tuple[float, float]]()
    for action, rank, waits in of.order:
        begin = max(free[rank], earliest(action))
        for before, crosses in waits:
            begin = max(begin, times[before][1] + message if crosses else times[before][1])
        free[rank] = begin + cost(action)
        times.append((begin, free[rank]))
    return times


def bubble_fraction(of: Schedule, times: Times) -> float:
    """The idle share of all ranks' time, from the first beginning to the last end."""
    span = max(end for _, end in times.values()) - min(begin for begin, _ in times.values())
    busy = sum(end - begin for begin, end in times.values())
    return 1 - busy / (span * len(of.ranks))


def bubble_in_theory(
    name: ScheduleName,
    num_ranks: int,
    num_microbatches: int,
    chunks: int = 2,
    backward: float = 2.0,
    again: float = 0.0,
    steps: int = 1,
) -> float:
    """The published bubble as a share of the step, of stages of equal cost and messages that take no time.

    backward  cost of B = I + W in units of F, I and W alike
    again     what recomputation adds to I, or to B; a rank of zb-h1 idles for F + I - W, and one of zbv for half of it
    steps     that follow each other without a pause, of a schedule that runs ahead: it idles once in all of them
    A schedule may idle for longer with fewer microbatches than ranks (interleaved: with no multiple of them; zbv: with
    fewer than twice as many, or where a backward does not cost two forwards).
    """
    spec, step = SCHEDULES[name], num_microbatches * (1 + backward + again)
    step *= steps if spec.runs_ahead else 1
    idle = spec.idle(backward, chunks) * (1 + again) if spec.splits_backward else spec.idle(backward + again, chunks)
    idle *= num_ranks - 1
    return idle / (step + idle)


def most_in_flight(
    actions: Sequence[Action],
    weight: Callable[[int], float] = lambda stage: 1.0,
    pending: Callable[[int], float] = lambda stage: 0.0,
    kinds: Collection[Kind] = tuple(Kind),
    behind: int = 0,
) -> float:
    """The peak of forwards whose backward is to come.

    weight   of the activations of a microbatch on a stage
    pending  of what I adds to them until W
    kinds    of actions behind which it is looked for
    behind   so many actions at the beginning it is not looked for
    """
    held = most = 0.0
    for index, action in enumerate(actions):
        if action.kind is Kind.FORWARD:
            held += weight(action.stage)
        elif action.kind is Kind.INPUT:
            held += pending(action.stage)
        if index >= behind and action.kind in kinds:
            most = max(most, held)
        if action.releases:
            held -= weight(action.stage) + pending(action.stage) * (action.kind is Kind.WEIGHTS)
    return most


def in_flight_in_theory(name: ScheduleName, num_ranks: int, num_microbatches: int, rank: int, chunks: int = 2) -> int:
    """The published peak of a rank: `ScheduleSpec.in_flight`."""
    return SCHEDULES[name].in_flight(num_ranks, rank, num_microbatches, chunks)


def _moments(actions: Sequence[Action]) -> tuple[tuple[Moment, ...], tuple[Moment, ...]]:
    """`Schedule.moments` of one rank: what `most_in_flight` sums, before it is known what a stage keeps."""
    places = {stage: place for place, stage in enumerate(dict.fromkeys(action.stage for action in actions))}
    held, pending = [0] * len(places), [0] * len(places)
    behind_forwards, ever = dict[tuple[int, ...], None](), dict[tuple[int, ...], None]()
    for action in actions:
        place = places[action.stage]
        held[place] += action.kind is Kind.FORWARD
        pending[place] += action.kind is Kind.INPUT
        if action.kind is Kind.FORWARD:
            behind_forwards[(*held, *pending)] = None
        ever[(*held, *pending)] = None
        if action.releases:
            held[place] -= 1
            pending[place] -= action.kind is Kind.WEIGHTS

    def named(counts: tuple[int, ...]) -> Moment:
        return tuple((stage, counts[place], counts[len(places) + place]) for stage, place in places.items())

    return tuple(map(named, _largest(behind_forwards))), tuple(map(named, _largest(ever)))


def _largest(counts: Collection[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Those than which no other one is at least as large in all places."""
    found: list[tuple[int, ...]] = []
    for one in sorted(counts, key=sum, reverse=True):
        if not any(all(a >= b for a, b in zip(other, one, strict=True)) for other in found):
            found.append(one)
    return found
