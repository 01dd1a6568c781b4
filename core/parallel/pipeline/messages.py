"""The messages of a schedule between its actions, in an order in which no rank can wait for ever.

NCCL takes messages in the order in which they are handed to it, and a send returns only when the other side receives:
two ranks that both send first would stand still. So the order is planned: on a clock (forward 1, backward 2) every
message belongs to the moment at which its action ends, and each rank hands over all messages of a moment at once,
moment after moment. If every rank stopped at every moment until its partners are there, those at the earliest moment at
which some rank stops could always go on; and what an action needs was sent at a moment before it begins.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

from core.parallel.pipeline.schedule import Action, Kind, Schedule, simulate

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


Exchange = tuple[Message, ...]
"""What a rank sends and receives at once."""
Step = Action | Exchange


def message_of(action: Action, of: Schedule) -> Message | None:
    """The message that an action sends to another rank; None where nobody or the same rank waits for it."""
    if action.kind is Kind.FORWARD:
        other = action.stage + 1
    elif action.passes_on_gradients:
        other = action.stage - 1
    else:
        return None
    if not 0 <= other < of.num_stages or of.owners[other] == of.owners[action.stage]:
        return None
    return Message(action, of.owners[action.stage], of.owners[other])


@lru_cache
def with_messages(of: Schedule) -> tuple[tuple[Step, ...], ...]:
    """The actions of each rank, and between them its exchanges."""
    times = simulate(of, lambda action: 2.0 if action.kind is Kind.BACKWARD else 1.0)
    moments: dict[float, list[Message]] = defaultdict(list)
    for action, (_, end) in times.items():
        if (message := message_of(action, of)) is not None:
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
        ranks.append(tuple(step for *_, step in sorted(placed, key=lambda p: p[:3])))
    return tuple(ranks)
