"""The ranks of a pipeline of which a step is estimated, and the microbatches that stand for all of them.

A rank runs its schedule's actions on its own stages, as in a run, alone: what other ranks send comes at once. The most
bytes are alive while as many microbatches are in flight as ever will be, beside gradients if these come before, so the
step is run with the fewest by which that is reached. Actions that come behind alike ones take alike much time and send
alike messages: a forward behind a backward gathers what is outside of the blocks anew, which that has let go of, and
one behind a forward finds it there (ZeRO-3). So a few actions tell of all, where those few have come behind the same.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from core.parallel.pipeline.schedule import Action, Kind, PipelineConfig, most_in_flight, schedule
from core.placement.stages import StageSplit

Sums = dict[Any, float]
"""FLOPs, seconds and bytes by kind; calls and bytes of messages, by operation and axis."""


def telling_ranks(split: StageSplit, config: PipelineConfig, num_microbatches: int) -> Sequence[int]:
    """Ranks of the pp axis of which one is the fullest: of those with alike stages, the ones with most in flight."""
    last = len(split.ranges) - 1
    telling: dict[int, tuple[Any, Sequence[float]]] = {}
    for rank in range(max(split.owners) + 1):
        stages = [(len(split.ranges[stage]), stage == 0, stage == last) for stage in split.own(rank)]
        flying = in_flight(split, config, rank, num_microbatches)
        others = (other for of, other in telling.values() if of == stages)
        if all(any(own > theirs for own, theirs in zip(flying, other)) for other in others):
            telling[rank] = stages, flying
    return list(telling)


def few_microbatches(split: StageSplit, config: PipelineConfig, rank: int, num_microbatches: int) -> int:
    """The fewest, three or more, that tell of all.

    With them as many are in flight on a rank as with all, also beside gradients, and each action comes behind such
    others as with all.
    """

    def fullest(number: int) -> tuple[Any, ...]:
        flying = [in_flight(split, config, rank, number, beside_gradients) for beside_gradients in (False, True)]
        return *flying, set(_kinds(actions_of(split, config, rank, number)))

    most, numbers = fullest(num_microbatches), range(min(3, num_microbatches), num_microbatches)
    return next((number for number in numbers if fullest(number) == most), num_microbatches)


def in_flight(
    split: StageSplit, config: PipelineConfig, rank: int, num_microbatches: int, beside_gradients: bool = False
) -> Sequence[float]:
    """The peaks of a rank's forwards whose backward is to come: of all its stages together and of each.

    beside_gradients  only behind the first gradients of all its stages' weights
    """
    actions = actions_of(split, config, rank, num_microbatches)
    own, behind = split.own(rank), 0
    if beside_gradients:
        gives = [action.stage if action.kind in (Kind.BACKWARD, Kind.WEIGHTS) else None for action in actions]
        behind = 1 + max(gives.index(stage) for stage in own)
    each = [lambda stage, one=one: float(stage == one) for one in own]
    return [most_in_flight(actions, weight, weight, behind=behind) for weight in (lambda _: 1.0, *each)]


def added(sums: Sums, more: Sums, times: int = 1) -> Sums:
    return {key: sums.get(key, 0) + times * more.get(key, 0) for key in {**sums, **more}}


def actions_of(split: StageSplit, config: PipelineConfig, rank: int, num_microbatches: int) -> Sequence[Action]:
    """What a rank does in a step, in order."""
    return schedule(config.schedule, max(split.owners) + 1, num_microbatches, config.chunks).ranks[rank]


def _kinds(actions: Sequence[Action]) -> Iterator[Hashable]:
    """Of each action of a rank what it is alike in: the one before it, and whether its microbatch begins or ends."""
    last = max(action.microbatch for action in actions)
    before = None
    for action in actions:
        yield action.kind, action.stage, before, action.microbatch == 0, action.microbatch == last
        before = action.kind


class ActionSums:
    """What the actions of a rank add to the sums of its step."""

    def __init__(self, begun: Sums):
        self._begun = self._before = begun
        self._actions: list[Action] = []
        self._sums: list[Sums] = []

    def note(self, action: Action, now: Sums) -> None:
        self._actions.append(action)
        self._sums.append(added(now, self._before, -1))
        self._before = now

    def left_out(self, actions: Sequence[Action], ended: Sums) -> Sums:
        """The sums of all of these actions of a step, less those of the ones that were run until `ended`.

        Of a step with fewer microbatches than were run those between the first and the last are more than it has.
        Messages between stages come between actions of any microbatch; each has as many.
        """
        few, number = 1 + max(action.microbatch for action in self._actions), 1 + max(a.microbatch for a in actions)
        whole = added(ended, self._begun, -1)
        between = {key: n / few for key, n in whole.items() if key[1:] in (("send", "pp"), ("recv", "pp"))}
        found: Sums = {}
        if number < few:
            for action, sums in zip(self._actions, self._sums, strict=True):
                found = added(found, sums, (number - few) * (action.microbatch == few - 2))
        else:
            run = list(_kinds(self._actions))
            of_kind = dict(zip(run, self._sums, strict=True))
            for kind, times in (Counter(_kinds(actions)) - Counter(run)).items():
                found = added(found, of_kind[kind], times)
        return added({key: n for key, n in found.items() if key not in between}, between, number - few)
