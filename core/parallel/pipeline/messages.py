"""The messages of a schedule between its actions, in an order in which no rank can wait for ever.

NCCL takes messages in the order in which they are handed to it, and a send returns only when the other side receives:
two ranks that both send first would stand still. So the order is planned: on a clock (forward 1, backward 2; on
each of r replicas of a stage r times that, since the stage has as much more work) every message belongs to the moment
at which its action ends, and each rank hands over all messages of a moment at once, moment after moment. If every rank
stopped at every moment until its partners are there, those at the earliest moment at which some rank stops could always
go on; and what an action needs was sent at a moment before it begins.

Where stages have replicas, the steps of the plan stand apart in time: each rank begins what comes behind a step's end
(`Schedule.end`) when all have done what comes before it, so that every step has the same exchanges.

Of steps that overlap, a rank has a `Meeting` behind its last backward of each: a stage's gradients of the step are
complete when all of its replicas have come there. It is such a stop, too, before the messages of its moment.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from core.parallel.pipeline.schedule import Action, B, Kind, Schedule, Times, simulate

MOST_UNFINISHED = 4
"""Sends of a rank that may be on their way before it waits for the oldest: they hold on to what they send."""


@dataclass(frozen=True, order=True)
class Message:
    """The message of `action`: activations to the next stage, or gradients to the one before."""

    action: Action
    sender: int
    receiver: int

    @property
    def is_forward(self) -> bool:
        return self.action.kind is Kind.FORWARD

    @property
    def cut(self) -> int:
        """The cut that it passes: between this stage and the next."""
        return self.action.stage if self.is_forward else self.action.stage - 1


@dataclass(frozen=True)
class Meeting:
    """The end of a step's backwards on all ranks of a stage; microbatch: the last one of the step."""

    microbatch: int
    stage: int


Exchange = tuple[Message, ...]
"""What a rank sends and receives at once."""
Step = Action | Exchange | Meeting


def message_of(action: Action, of: Schedule) -> Message | None:
    """The message that an action sends to another rank; None where nobody or the same rank waits for it."""
    if action.kind is Kind.FORWARD:
        other = action.stage + 1
    elif action.passes_on_gradients:
        other = action.stage - 1
    else:
        return None
    if not 0 <= other < of.num_stages:
        return None
    sender, receiver = of.rank_of(action), of.rank_of(replace(action, stage=other))
    return None if sender == receiver else Message(action, sender, receiver)


@lru_cache
def with_messages(of: Schedule) -> tuple[tuple[Step, ...], ...]:
    """The actions of each rank, and between them its exchanges and meetings."""
    times = simulate(of, lambda action: _cost(of, action), earliest=lambda action: _earliest(of, action))
    moments: dict[float, list[Message]] = defaultdict(list)
    for action, (_, end) in times.items():
        if (message := message_of(action, of)) is not None:
            if action.passes_on_gradients and of.step and (action.microbatch + 1) % of.step == 0:
                end = _met(of, times, action)  # what the stage says of the step goes along
            moments[end].append(message)
    ranks = []
    for rank, actions in enumerate(of.ranks):
        mine = [
            (moment, tuple(sorted(m for m in messages if rank in (m.sender, m.receiver))))
            for moment, messages in moments.items()
        ]
        exchanges = [(moment, exchange) for moment, exchange in mine if exchange]
        # An action that has begun before a moment comes before its messages: it does not need them.
        placed = [(times[action][0], 1, index, action) for index, action in enumerate(actions)]
        placed += [(moment, 0, index, exchange) for index, (moment, exchange) in enumerate(exchanges)]
        placed += [(moment, -1, index, meeting) for index, (moment, meeting) in enumerate(_meetings(of, times, rank))]
        ranks.append(tuple(step for *_, step in sorted(placed, key=lambda p: p[:3])))
    return tuple(ranks)


def _cost(of: Schedule, action: Action) -> float:
    return of.num_replicas(action.stage) * (2.0 if action.kind is Kind.BACKWARD else 1.0)


def _earliest(of: Schedule, action: Action) -> float:
    """Behind a step's end a time by which all that comes before it is done, even if one rank ran at a time."""
    if max(of.replicas, default=1) == 1 or action.kind is not Kind.FORWARD or action.microbatch < of.end:
        return 0.0
    steps, place = divmod(action.microbatch - of.end, of.step)
    if place >= of.num_replicas(action.stage):
        return 0.0
    return (of.num_stages + 1 + steps) * 3.0 * of.step * len(of.ranks)


def _meetings(of: Schedule, times: Times, rank: int) -> Iterator[tuple[float, Meeting]]:
    """Moments and meetings of a rank."""
    for action in of.ranks[rank]:
        if of.ends_step(action):
            last = action.microbatch - action.microbatch % of.step + of.step - 1
            yield _met(of, times, B(last, action.stage)), Meeting(last, action.stage)


def _met(of: Schedule, times: Times, action: Action) -> float:
    """When the last rank of an action's stage is through with its step."""
    return max(times[last][1] for last in of.meeting(action))
