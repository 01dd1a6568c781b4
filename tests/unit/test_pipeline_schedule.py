"""Schedules without a process: complete, in order, free of deadlock, with the published bubble and memory."""

import random
from collections import Counter
from functools import partial
from typing import get_args

import pytest

from core.config import UserError
from core.gemini.config import GeminiConfig
from core.mesh import MeshConfig
from core.parallel.pipeline.messages import Meeting, Message, Step, message_of, with_messages
from core.parallel.pipeline.schedule import (
    SCHEDULES,
    Action,
    B,
    F,
    I,
    Kind,
    PipelineConfig,
    Schedule,
    ScheduleName,
    W,
    bubble_fraction,
    bubble_in_theory,
    in_flight_in_theory,
    most_in_flight,
    needs,
    schedule,
    simulate,
    span,
)
from core.placement.stages import Costs, split_by_cost, stage_ranges
from core.train import TrainConfig

NAMES = get_args(ScheduleName)
SIZES = [
    (2, 1),
    (2, 2),
    (2, 5),
    (2, 12),
    (3, 2),
    (3, 7),
    (4, 1),
    (4, 4),
    (4, 6),
    (4, 16),
    (5, 3),
    (8, 5),
    (8, 24),
    (8, 33),
]


def cost(action: Action) -> float:
    """F, I and W alike; B is I and W."""
    return 2.0 if action.kind is Kind.BACKWARD else 1.0


def every_schedule() -> list[tuple[ScheduleName, int, int, int]]:
    sizes = [(name, ranks, number, 2) for name in NAMES for ranks, number in SIZES]
    return sizes + [("interleaved", ranks, number, 3) for ranks, number in SIZES]


def test_a_small_one() -> None:
    first, second = schedule("1f1b", 2, 3).ranks
    assert first == (F(0, 0), F(1, 0), B(0, 0), F(2, 0), B(1, 0), B(2, 0))
    assert second == (F(0, 1), B(0, 1), F(1, 1), B(1, 1), F(2, 1), B(2, 1))
    assert schedule("zb-h1", 2, 2).ranks[1] == (F(0, 1), I(0, 1), F(1, 1), I(1, 1), W(0, 1), W(1, 1))
    assert repr(first[:2]) == "(F(0, 0), F(1, 0))"


@pytest.mark.parametrize(("name", "ranks", "number", "chunks"), every_schedule())
def test_every_microbatch_once_on_every_stage_and_nobody_waits_for_ever(name, ranks, number, chunks) -> None:
    of = schedule(name, ranks, number, chunks)
    kinds = (
        (Kind.FORWARD, Kind.INPUT, Kind.WEIGHTS) if SCHEDULES[name].splits_backward else (Kind.FORWARD, Kind.BACKWARD)
    )
    stages = ranks * {"interleaved": chunks, "zbv": 2}.get(name, 1)
    assert of.num_stages == stages
    done = Counter(action for actions in of.ranks for action in actions)
    assert done == Counter(Action(kind, n, stage) for kind in kinds for n in range(number) for stage in range(stages))
    for rank, actions in enumerate(of.ranks):
        assert {action.stage for action in actions} == set(of.stages_of(rank))
    times = simulate(of, cost)
    for action, (begin, _) in times.items():
        for before in needs(action, stages, SCHEDULES[name].splits_backward):
            assert times[before][1] <= begin


@pytest.mark.parametrize(
    "of", [*(partial(schedule, *sizes) for sizes in every_schedule()), *(
        partial(schedule, name, sum(of), 12, steps=3, replicas=of)
        for name in ("2bw", "pipedream", "pipedream_sync")
        for of in [(2, 1), (1, 2), (3, 1), (2, 3), (3, 2, 1), (1, 1, 4)]
    )]
)  # fmt: skip
def test_messages_arrive_where_every_exchange_stops_for_its_partners(of: partial[Schedule]) -> None:
    """The strictest reading: a message is sent when both sides are in the exchange, and who leaves it has sent all.

    Replicas of a stage leave a meeting when all are there, and what a stage says of a step is sent behind it.
    """
    name, of = of.args[0], of()
    ranks = len(of.ranks)
    steps, at = with_messages(of), [0] * ranks
    here: list[set[Action]] = [set() for _ in range(ranks)]  # what was computed on the rank, or sent to it
    done: set[Message] = set()
    met: set[tuple[int, Meeting]] = set()

    def step_of(rank: int) -> Step:
        return steps[rank][at[rank]] if at[rank] < len(steps[rank]) else ()

    while any(at[rank] < len(steps[rank]) for rank in range(ranks)):
        messages = [step if isinstance(step, tuple) else () for step in map(step_of, range(ranks))]
        done |= {m for one in messages for m in one if m in messages[m.sender] and m in messages[m.receiver]}
        alike = Counter(map(step_of, range(ranks)))
        going = [r for r in range(ranks) if at[r] < len(steps[r]) and done.issuperset(messages[r])]
        going = [
            r
            for r in going
            if not isinstance(step := step_of(r), Meeting) or alike[step] == of.num_replicas(step.stage)
        ]
        assert going, [step_of(rank) for rank in range(ranks)]
        for rank in going:
            step = step_of(rank)
            if isinstance(step, Action):
                assert set(needs(step, of.num_stages, SCHEDULES[name].splits_backward)) <= here[rank], step
                here[rank].add(step)
            if isinstance(step, Meeting):
                met.add((rank, step))
            for message in messages[rank]:
                assert message.sender != rank or message.action in here[rank]
                if message.sender == rank and of.ends_step(message.action) and not message.is_forward:
                    meeting = Meeting(message.action.microbatch, message.action.stage)
                    assert (rank, meeting) in met or (meeting.microbatch + 1) % of.step
                here[rank].add(message.action)
            at[rank] += 1
    sent = Counter(m for actions in of.ranks for a in actions if (m := message_of(a, of)) is not None)
    planned = Counter(m for step in sum(steps, ()) if isinstance(step, tuple) for m in step)
    assert planned == Counter(dict.fromkeys(sent, 2)), "each message at its sender and at its receiver"


def test_messages_between_stages_of_one_rank_are_not_sent() -> None:
    turn = schedule("zbv", 2, 4)
    assert turn.owners == (0, 1, 1, 0)
    assert message_of(F(0, 1), turn) is None
    assert message_of(I(0, 2), turn) is None
    assert message_of(F(0, 0), turn) == Message(F(0, 0), 0, 1)
    assert message_of(I(0, 3), turn) == Message(I(0, 3), 0, 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "number"), [(2, 4), (2, 12), (4, 8), (4, 16), (8, 16), (8, 24)])
def test_the_bubble_is_the_published_one(name: ScheduleName, ranks: int, number: int) -> None:
    for chunks in (2, 4) if name == "interleaved" else (2,):
        of = schedule(name, ranks, number, chunks)
        for again in (0.0, 1.0):

            def recomputed(action: Action, again: float = again) -> float:
                added = action.kind in (Kind.BACKWARD, Kind.INPUT)
                return cost(action) + added * again * cost(F(action.microbatch, action.stage))

            found, theory = simulate(of, recomputed), bubble_in_theory(name, ranks, number, chunks, again=again)
            assert bubble_fraction(of, found) == pytest.approx(theory, abs=1e-12)


def test_formulas_of_the_papers() -> None:
    assert bubble_in_theory("gpipe", 4, 8) == bubble_in_theory("1f1b", 4, 8) == pytest.approx(3 / 11)
    assert bubble_in_theory("interleaved", 4, 8, 2) == pytest.approx(3 / 19)
    assert bubble_in_theory("zb-h1", 4, 8) == pytest.approx(3 / 27)
    assert bubble_in_theory("zbv", 4, 8) == pytest.approx(3 / 51)
    assert bubble_in_theory("1f1b", 1, 8) == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "number"), [(2, 4), (3, 6), (4, 8), (8, 24)])
def test_activations_in_flight_are_the_published_ones(name: ScheduleName, ranks: int, number: int) -> None:
    of = schedule(name, ranks, number, steps=SCHEDULES[name].depth(ranks) + 1)
    found = [most_in_flight(actions) for actions in of.ranks]
    assert found == [in_flight_in_theory(name, ranks, number, rank) for rank in range(ranks)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "number"), [(2, 1), (3, 4), (4, 9)])
def test_the_fullest_moments_hold_for_whatever_a_stage_keeps(name: ScheduleName, ranks: int, number: int) -> None:
    of, drawn = schedule(name, ranks, number), random.Random(0)
    for _ in range(5):
        kept, waiting = ([drawn.randrange(9) for _ in of.owners] for _ in range(2))
        for actions, (behind_forwards, ever) in zip(of.ranks, of.moments, strict=True):
            for moments, kinds in ((behind_forwards, (Kind.FORWARD,)), (ever, tuple(Kind))):
                fullest = max(sum(n * kept[s] + m * waiting[s] for s, n, m in moment) for moment in moments)
                assert fullest == most_in_flight(actions, kept.__getitem__, waiting.__getitem__, kinds)
        assert span(of, cost, 0.5) == max(end for _, end in simulate(of, cost, 0.5).values())


def test_a_schedule_is_one_record() -> None:
    """What is offered is what there is, and what a schedule refuses is what the config refuses."""
    assert tuple(SCHEDULES) == NAMES
    given = {
        "zero=2": {"zero": 2},
        "zero=3": {"zero": 3},
        "compile": {"compile": True},
        "precision=fp16": {"precision": "fp16"},
        "gemini.budget": {"gemini": GeminiConfig("1MB")},
    }
    for name, spec in SCHEDULES.items():
        for option, values in given.items():
            config = partial(TrainConfig, mesh=MeshConfig(pp=2), pipeline=PipelineConfig(name), **values)
            if option in spec.refuses:
                with pytest.raises(UserError, match=f"pipeline.schedule={name}: {spec.refuses[option]}"):
                    config()
            else:
                config()
        assert set(spec.refuses) <= set(given)


def test_a_deadlock_is_seen() -> None:
    of = Schedule(((F(0, 0), B(0, 0), F(1, 0), B(1, 0)), (F(1, 1), B(1, 1), F(0, 1), B(0, 1))), (0, 1))
    with pytest.raises(ValueError, match=r"no rank can go on; they are at \[B\(0, 0\), F\(1, 1\)\]"):
        simulate(of, cost)


@pytest.mark.parametrize(
    ("blocks", "stages", "costs", "expected"),
    [
        (8, 4, Costs(), (2, 2, 2, 2)),
        (5, 2, Costs(), (2, 3)),
        (3, 3, Costs(), (1, 1, 1)),
        (8, 2, Costs(behind=2.0), (5, 3)),
        (8, 2, Costs(before=2.0), (3, 5)),
        (6, 3, Costs((1, 1, 1, 1, 1, 5)), (2, 3, 1)),
        (4, 2, Costs(behind=100.0), (3, 1)),
    ],
)
def test_stages_are_balanced_by_cost(blocks: int, stages: int, costs: Costs, expected: tuple[int, ...]) -> None:
    assert split_by_cost(blocks, stages, costs) == expected
    assert [n for blocks in stage_ranges(expected) for n in blocks] == list(range(blocks))


def test_rows_are_cut_nearly_evenly() -> None:
    assert PipelineConfig(microbatches=4).microbatch_rows(11, 2) == [3, 3, 3, 2]
    assert PipelineConfig().microbatch_rows(24, 2) == [3] * 8
    assert PipelineConfig().microbatch_rows(3, 2) == [1] * 3
    assert PipelineConfig("pipedream").microbatch_rows(24, 2) == [24]
    assert PipelineConfig("pipedream_sync", microbatches=2).microbatch_rows(3, 2) == [2, 1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"microbatches": 0}, "microbatches=0; give a positive number"),
        ({"chunks": 1}, "chunks=1: interleaved has at least 2"),
        ({"split": (2, 0)}, "split=2 0: every stage has at least one block"),
    ],
)
def test_impossible_options_are_refused_at_once(options: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        PipelineConfig(**options)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (PipelineConfig(), "mesh.pp=4 with pipeline.schedule=1f1b makes 4 stages.* 3 blocks; use mesh.pp=3 or less"),
        (PipelineConfig("zbv"), "makes 8 stages, and the model has 3 blocks; use fewer stages"),
        (PipelineConfig(split=(1, 2)), "makes 4 stages"),
    ],
)
def test_more_stages_than_blocks_are_refused(config: PipelineConfig, says: str) -> None:
    with pytest.raises(UserError, match=says):
        config.check_stages(4, 3)


def test_a_split_has_to_be_of_these_blocks() -> None:
    PipelineConfig(split=(1, 2)).check_stages(2, 3)
    for split in ((1, 3), (1, 1, 1)):
        with pytest.raises(UserError, match="2 stages and 3 blocks; give 2 numbers that add up to 3"):
            PipelineConfig(split=split).check_stages(2, 3)
