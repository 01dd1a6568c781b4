"""Schedules that run ahead, without a process: steps are cuts of one long schedule, with the published versions."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from core.config import UserError
from core.parallel.pipeline.ahead import segment
from core.parallel.pipeline.messages import Meeting, Step, with_messages
from core.parallel.pipeline.schedule import (
    SCHEDULES,
    Action,
    Kind,
    PipelineConfig,
    ScheduleName,
    bubble_fraction,
    bubble_in_theory,
    most_in_flight,
    schedule,
    simulate,
)
from core.parallel.pipeline.versions import Ring

RANKS = range(2, 33)
AHEAD = [name for name, spec in SCHEDULES.items() if spec.runs_ahead]


def numbered(step: Step, first: int) -> tuple[tuple[Any, int, int], ...]:
    """Its actions, each with the number of its microbatch in the whole run."""
    if isinstance(step, Meeting):
        return (("meeting", first + step.microbatch, step.stage),)
    actions = [step] if isinstance(step, Action) else [message.action for message in step]
    return tuple((a.kind, first + a.microbatch, a.stage) for a in actions)


CUTS = [(2, 1), (2, 2), (2, 5), (3, 1), (3, 3), (4, 1), (4, 4), (4, 7), (5, 2), (8, 1), (8, 9)]


REPLICAS = [(2, 1), (1, 2), (3, 1), (1, 3), (2, 2), (2, 1, 1), (1, 2, 1), (2, 3), (3, 2, 1), (1, 1, 4), (4, 2)]
"""Ranks of each stage."""


def least(name: ScheduleName, replicas: tuple[int, ...]) -> int:
    """The fewest microbatches of a step."""
    turns = math.lcm(*replicas)
    return turns * -(-SCHEDULES[name].fewest(replicas) // turns)


@pytest.mark.parametrize(
    ("name", "replicas", "number"),
    [
        *(
            (name, (1,) * ranks, number)
            for name in AHEAD
            for ranks, number in CUTS
            if number >= SCHEDULES[name].fewest((1,) * ranks)
        ),
        *((name, of, least(name, of) + more * math.lcm(*of)) for name in AHEAD for of in REPLICAS for more in (0, 1)),
    ],
)
@pytest.mark.parametrize("rounds", [0.0, 1.5])
def test_steps_are_cuts_of_one_long_schedule(
    name: ScheduleName, replicas: tuple[int, ...], number: int, rounds: float
) -> None:
    """Also their messages: what a rank does is what it would do if nobody knew of steps."""
    depth, ranks = SCHEDULES[name].depth(len(replicas)), sum(replicas)
    steps = 1 + round(rounds * (ranks + depth))
    whole = with_messages(schedule(name, ranks, number, steps=steps, replicas=replicas))
    parts = [(index, min(depth, steps - 1 - index)) for index in range(max(1, steps - depth + 1))]
    for rank in range(ranks):
        found = [
            numbered(step, index * number)
            for index, following in parts
            for step in segment(name, replicas, number, index, following)[rank]
        ]
        assert found == [numbered(step, 0) for step in whole[rank]]


@dataclass
class Counted:
    """What a rank holds at most of the steps of a run, by its list of actions.

    full  (versions, gradients of whole steps) behind forwards, when activations are most
    """

    versions: int = 0
    gradients: int = 0
    together: int = 0
    at_an_end: int = 0
    full: set[tuple[int, int]] = field(default_factory=set)


def counted(name: ScheduleName, replicas: tuple[int, ...], rank: int, number: int, steps: int) -> Counted:
    """Walk a rank's actions: which versions steps need, which updates are made, and which gradients wait for them."""
    spec, found, stages = SCHEDULES[name], Counted(), len(replicas)
    of = schedule(name, sum(replicas), number, steps=steps, replicas=replicas)
    (stage,) = of.stages_of(rank)
    own = range(rank - of.owners[stage], number, replicas[stage])  # its microbatches of a step
    end, late = of.end, spec.delay(stage, stages)
    end += (own[0] - end) % replicas[stage]
    under_way: dict[int, int] = {}  # step -> its version
    waiting: set[int] = set()
    newest = 0
    for action in of.ranks[rank]:
        step, place = divmod(action.microbatch, number)
        if action.kind is Kind.FORWARD:
            if not spec.updates_at_once and action.microbatch >= end and (action.microbatch - end) % number == 0:
                waiting.remove(newest)
                newest += 1
            if place == own[0]:
                under_way[step] = max(step - late, 0)
                assert under_way[step] == newest, "a step takes what is newest when it enters the stage"
        else:
            waiting.add(step)
        versions = len({*under_way.values(), newest})
        if newest + spec.depth(stages) < steps:
            found.versions, found.gradients = max(found.versions, versions), max(found.gradients, len(waiting))
            found.together = max(found.together, versions + len(waiting))
            if action.kind is Kind.FORWARD:
                found.full.add((versions, len(waiting)))
        found.at_an_end = max(found.at_an_end, versions + len(waiting))
        if action.kind is Kind.BACKWARD and place == own[-1]:
            assert of.ends_step(action)
            del under_way[step]
            if spec.updates_at_once:
                waiting.remove(newest)
                newest += 1
    return found


@pytest.mark.parametrize("name", AHEAD)
@pytest.mark.parametrize("ranks", RANKS)
def test_versions_activations_and_idle_slots(name: ScheduleName, ranks: int) -> None:
    """Every rank's list holds what the record says; a run idles once, not once a step."""
    spec = SCHEDULES[name]
    fewest = spec.fewest((1,) * ranks)
    for number in (fewest, 2 * fewest + 1) if ranks < 10 else (fewest,):
        steps = 2 * spec.depth(ranks) + 2
        of = schedule(name, ranks, number, steps=steps)
        for rank, actions in enumerate(of.ranks):
            found = counted(name, (1,) * ranks, rank, number, steps)
            assert found.versions == spec.versions(rank, ranks)
            assert found.gradients == spec.gradients(rank, ranks)
            held = spec.held((1,) * ranks, rank, number)
            assert {versions + gradients for versions, gradients in held} == {found.together}
            assert all(any(v <= versions and g <= gradients for versions, gradients in held) for v, g in found.full)
            if name == "2bw":
                assert found.full.issuperset(held)
            # What is added up and the version that it is made with: a microbatch's gradients come before that goes.
            assert found.at_an_end <= spec.versions(rank, ranks) + spec.gradients(rank, ranks) + 1
            assert most_in_flight(actions) == spec.in_flight(ranks, rank, number, 2)
        times = simulate(of, lambda action: 2.0 if action.kind is Kind.BACKWARD else 1.0)
        theory = bubble_in_theory(name, ranks, number, steps=steps)
        assert bubble_fraction(of, times) == pytest.approx(theory, abs=1e-12)
        assert theory == pytest.approx((ranks - 1) / (number * steps + ranks - 1))
    assert bubble_in_theory("1f1b", ranks, ranks, steps=4) == bubble_in_theory("1f1b", ranks, ranks)


@pytest.mark.parametrize("name", AHEAD)
@pytest.mark.parametrize("replicas", REPLICAS)
def test_versions_and_activations_of_replicas(name: ScheduleName, replicas: tuple[int, ...]) -> None:
    """Replicas hold the versions of their stage, their part of its activations, and run all of it in turns."""
    spec, stages = SCHEDULES[name], len(replicas)
    number, steps = least(name, replicas), 2 * spec.depth(stages) + 2
    of = schedule(name, sum(replicas), number, steps=steps, replicas=replicas)
    for rank, actions in enumerate(of.ranks):
        (stage,) = of.stages_of(rank)
        found = counted(name, replicas, rank, number, steps)
        assert found.versions <= spec.versions(stage, stages)
        assert found.gradients <= spec.gradients(stage, stages)
        held = spec.held(replicas, stage, number)
        assert all(found.together <= versions + gradients for versions, gradients in held)
        assert all(any(v <= versions and g <= gradients for versions, gradients in held) for v, g in found.full)
        ahead = spec.ahead(replicas, stage, number)
        assert ahead % replicas[stage] == 0
        assert most_in_flight(actions) == ahead // replicas[stage] + 1
        assert {action.microbatch % replicas[stage] for action in actions} == {rank - of.owners[stage]}
    whole = {(action.microbatch, action.stage) for actions in of.ranks for action in actions}
    assert whole == {(microbatch, stage) for microbatch in range(number * steps) for stage in range(stages)}


@pytest.mark.parametrize(
    ("name", "replicas"),
    [(name, of) for name in AHEAD for of in REPLICAS[:10] if name != "2bw" or len(of) == 2],
)
def test_replicas_of_balanced_stages_are_never_idle(name: ScheduleName, replicas: tuple[int, ...]) -> None:
    """A stage of r replicas costs r times what one of a single rank does, and a step has two turns of each at least."""
    number = max(least(name, replicas), 2 * math.lcm(*replicas))

    def end(steps: int) -> float:
        of = schedule(name, sum(replicas), number, steps=steps, replicas=replicas)
        times = simulate(of, lambda a: replicas[a.stage] * (2.0 if a.kind is Kind.BACKWARD else 1.0))
        return max(end for _, end in times.values())

    assert end(24) - end(12) == pytest.approx(12 * number * 3.0)


def test_how_late_stages_are() -> None:
    names: list[ScheduleName] = ["1f1b", *AHEAD]
    late = {name: [SCHEDULES[name].delay(stage, 4) for stage in range(4)] for name in names}
    assert late == {"1f1b": [0] * 4, "2bw": [1] * 4, "pipedream": [3, 2, 1, 0], "pipedream_sync": [3] * 4}
    assert [SCHEDULES[name].depth(4) for name in names] == [0, 1, 4, 4]


def test_versions_in_a_ring() -> None:
    """Steps take those of as many updates before; what is skipped makes what was there, and what is needed stays."""
    model = nn.Linear(1, 1, bias=False)
    made = [{"weight": nn.Parameter(torch.tensor([[float(n)]]))} for n in range(6)]
    ring = Ring(model, {"weight": ["weight"]}, 2)
    ring.start(made[0])

    def seen(step: int | None) -> float:
        ring.install(step)
        return model.weight.item()

    assert [seen(step) for step in (0, 1, 2)] == [0, 0, 0]
    ring.put(1, made[1])
    ring.fill(2)
    ring.put(3, made[3])
    assert [seen(step) for step in (2, 3, 4, 5, None)] == [0, 1, 1, 3, 3]
    assert {age: version["weight"].item() for age, version in ring.older(3).items()} == {1: 1, 2: 1}
    assert ring.needs_newest
    for step in range(6):
        ring.drop(step)
    assert not ring.needs_newest


def test_too_few_microbatches_are_refused() -> None:
    PipelineConfig("2bw").check_microbatches(4, 4)
    PipelineConfig("1f1b").check_microbatches(1, 4)
    with pytest.raises(UserError, match=r"2bw with 3 microbatches a step on mesh.pp=4.*--pipeline.microbatches 4"):
        PipelineConfig("2bw").check_microbatches(3, 4)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"schedule": "1f1b", "replicas": (2, 1)},
            "replicas=2 1 with pipeline.schedule=1f1b: it has one rank for each",
        ),
        ({"replicas": (2, 0)}, "replicas=2 0; give each of two or more stages a positive number"),
        ({"replicas": (3,)}, "replicas=3; give each of two or more stages"),
    ],
)
def test_impossible_replicas_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        PipelineConfig(**{"schedule": "pipedream"} | options)


def test_replicas_that_do_not_fit_are_refused() -> None:
    config = PipelineConfig("pipedream", replicas=(2, 1))
    assert config.microbatch_rows(8, 3) == [4, 4]
    config.check_ranks(3)
    config.check_microbatches(4, 3)
    with pytest.raises(UserError, match=r"replicas=2 1 are 3 ranks, and mesh.pp=4; use --mesh.pp 3"):
        config.check_ranks(4)
    with pytest.raises(UserError, match=r"3 microbatches a step on mesh.pp=3: replicas take turns.* 4 or another"):
        config.check_microbatches(3, 3)
    two = PipelineConfig("2bw", replicas=(2, 1))
    two.check_microbatches(6, 3)
    with pytest.raises(UserError, match=r"2bw needs 5; use --pipeline.microbatches 6"):
        two.check_microbatches(2, 3)
    with pytest.raises(UserError, match=r"stages share 'head.weight'.*--model.no-tied-head"):
        config.check_shared("head.weight")
