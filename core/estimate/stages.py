"""The ranks of a pipeline of which a step is estimated, and the microbatches that stand for all of them.

A rank runs its schedule's actions on its own stages, as in a run, alone: what other ranks send comes at once. The most
bytes are alive while as many microbatches are in flight as ever will be, beside gradients if these come before, so the
step is run with the fewest by which that is reached, and all but the first and the last of them take alike much time
and send alike messages.
"""

from collections.abc import Sequence
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
        flying = _in_flight(split, config, rank, num_microbatches)
        others = (other for of, other in telling.values() if of == stages)
        if all(any(own > theirs for own, theirs in zip(flying, other)) for other in others):
            telling[rank] = stages, flying
    return list(telling)


def few_microbatches(split: StageSplit, config: PipelineConfig, rank: int, num_microbatches: int) -> int:
    """The fewest, three or more, with which as many are in flight on a rank as with all, also beside gradients."""

    def fullest(number: int) -> list[Sequence[float]]:
        return [_in_flight(split, config, rank, number, beside_gradients) for beside_gradients in (False, True)]

    most, numbers = fullest(num_microbatches), range(min(3, num_microbatches), num_microbatches)
    return next((number for number in numbers if fullest(number) == most), num_microbatches)


def _in_flight(
    split: StageSplit, config: PipelineConfig, rank: int, num_microbatches: int, beside_gradients: bool = False
) -> Sequence[float]:
    """The peaks of a rank's forwards whose backward is to come: of all its stages together and of each.

    beside_gradients  only behind the first gradients of all its stages' weights
    """
    actions = schedule(config.schedule, max(split.owners) + 1, num_microbatches, config.chunks).ranks[rank]
    own, behind = split.own(rank), 0
    if beside_gradients:
        gives = [action.stage if action.kind in (Kind.BACKWARD, Kind.WEIGHTS) else None for action in actions]
        behind = 1 + max(gives.index(stage) for stage in own)
    each = [lambda stage, one=one: float(stage == one) for one in own]
    return [most_in_flight(actions, weight, weight, behind=behind) for weight in (lambda _: 1.0, *each)]


def added(sums: Sums, more: Sums, times: int = 1) -> Sums:
    return {key: sums.get(key, 0) + times * more.get(key, 0) for key in {**sums, **more}}


class ActionSums:
    """What a rank's actions add to the sums of its step, by microbatch."""

    def __init__(self, begun: Sums):
        self._begun = self._before = begun
        self._of: dict[int, Sums] = {}

    def note(self, action: Action, now: Sums) -> None:
        self._of[action.microbatch] = added(self._of.get(action.microbatch, {}), added(now, self._before, -1))
        self._before = now

    def left_out(self, num_microbatches: int, ended: Sums) -> Sums:
        """The sums of all microbatches less those of the ones that were run until `ended`.

        Messages between stages come between actions of any microbatch; each has as many.
        """
        few = len(self._of)
        if few == num_microbatches:
            return {}
        whole = added(ended, self._begun, -1)
        between = {key: n / few for key, n in whole.items() if key[1:] in (("send", "pp"), ("recv", "pp"))}
        return added({}, {**self._of[few - 2], **between}, num_microbatches - few)
