"""Schedules that run ahead, without a process: steps are cuts of one long schedule, with the published versions."""

from itertools import product

import pytest

from core.config import UserError
from core.parallel.pipeline.ahead import segment
from core.parallel.pipeline.messages import Step, with_messages
from core.parallel.pipeline.schedule import (
    SCHEDULES,
    Action,
    Kind,
    PipelineConfig,
    bubble_fraction,
    bubble_in_theory,
    schedule,
    simulate,
)

RANKS = range(2, 33)
AHEAD = [name for name, spec in SCHEDULES.items() if spec.runs_ahead]


def numbered(step: Step, first: int) -> tuple[tuple[Kind, int, int], ...]:
    """Its actions, each with the number of its microbatch in the whole run."""
    actions = [step] if isinstance(step, Action) else [message.action for message in step]
    return tuple((a.kind, first + a.microbatch, a.stage) for a in actions)


@pytest.mark.parametrize("name", AHEAD)
@pytest.mark.parametrize(("ranks", "number"), [(2, 2), (2, 5), (3, 3), (4, 4), (4, 7), (8, 8), (8, 11)])
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_steps_are_cuts_of_one_long_schedule(name, ranks: int, number: int, steps: int) -> None:
    """Also their messages: what a rank does is what it would do if nobody knew of steps."""
    whole = with_messages(schedule(name, ranks, number * steps))
    for rank in range(ranks):
        found = [
            numbered(step, index * number)
            for index in range(steps)
            for step in segment(name, ranks, number, index > 0, index < steps - 1)[rank]
        ]
        assert found == [numbered(step, 0) for step in whole[rank]]


@pytest.mark.parametrize("name", AHEAD)
@pytest.mark.parametrize("ranks", RANKS)
def test_versions_held_and_idle_slots(name, ranks: int) -> None:
    """From the first forward to the last backward of a step its version is held; a run idles once, not once a step."""
    for number, steps in product((ranks, 2 * ranks + 1), (1, 4)):
        of = schedule(name, ranks, number * steps)
        for actions in of.ranks:
            first, last = dict[int, int](), dict[int, int]()
            for place, action in enumerate(actions):
                step = action.microbatch // number
                first.setdefault(step, place)
                last[step] = place
            held = [sum(first[step] <= place <= last[step] for step in first) for place in range(len(actions))]
            assert max(held) <= SCHEDULES[name].versions
            # The update of a step is made before the first forward that needs it, and after its last backward.
            assert all(last[step] < first[step + 2] for step in range(steps - 2))
        times = simulate(of, lambda action: 2.0 if action.kind is Kind.BACKWARD else 1.0)
        theory = bubble_in_theory(name, ranks, number, steps=steps)
        assert bubble_fraction(of, times) == pytest.approx(theory, abs=1e-12)
        assert theory == pytest.approx((ranks - 1) / (number * steps + ranks - 1))
    assert bubble_in_theory("1f1b", ranks, ranks, steps=4) == bubble_in_theory("1f1b", ranks, ranks)


def test_too_few_microbatches_are_refused() -> None:
    PipelineConfig("2bw").check_microbatches(4, 4)
    PipelineConfig("1f1b").check_microbatches(1, 4)
    with pytest.raises(UserError, match=r"2bw with 3 microbatches a step on mesh.pp=4.*--pipeline.microbatches 4"):
        PipelineConfig("2bw").check_microbatches(3, 4)
