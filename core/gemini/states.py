"""The states of a parameter under Gemini, and the moves between them.

    FREE              no memory on the device; its value is in the shards
    HOLD              on the device, not in use
    COMPUTE           in use: a forward or backward of a module that owns it is running
    HOLD_AFTER_FWD    on the device, and the backward will want it
    HOLD_AFTER_BWD    on the device; the backward of its module is over, its gradient is not there (a frozen parameter
                      has none, a shared one waits for its other modules)
    READY_TO_REDUCE   its gradient stands in its place; from here there is only the reduction

What Colossal-AI calls these five (Gemini's slides; its sixth is READY_FOR_REDUCE). There an illegal move is passed over
in silence; here it is an error that names both states and the parameter.
"""

from enum import Enum


class State(Enum):
    FREE = "FREE"
    HOLD = "HOLD"
    COMPUTE = "COMPUTE"
    HOLD_AFTER_FWD = "HOLD_AFTER_FWD"
    HOLD_AFTER_BWD = "HOLD_AFTER_BWD"
    READY_TO_REDUCE = "READY_TO_REDUCE"


FREE, HOLD, COMPUTE = State.FREE, State.HOLD, State.COMPUTE
HOLD_AFTER_FWD, HOLD_AFTER_BWD, READY_TO_REDUCE = State.HOLD_AFTER_FWD, State.HOLD_AFTER_BWD, State.READY_TO_REDUCE

MOVES: frozenset[tuple[State, State]] = frozenset(
    {
        (FREE, HOLD),  # fetched
        (HOLD, FREE),  # evicted
        (HOLD, COMPUTE),  # a module begins
        (HOLD, READY_TO_REDUCE),  # a gradient from outside of any module's backward
        (COMPUTE, HOLD),  # the module ends, and no backward will come
        (COMPUTE, HOLD_AFTER_FWD),  # the module ends
        (COMPUTE, HOLD_AFTER_BWD),  # the module's backward ends
        (COMPUTE, READY_TO_REDUCE),  # the gradient is there
        (HOLD_AFTER_FWD, COMPUTE),  # used again, or its backward begins
        (HOLD_AFTER_FWD, FREE),  # evicted between forward and backward
        (HOLD_AFTER_FWD, HOLD),  # the step is over, or was given up
        (HOLD_AFTER_FWD, READY_TO_REDUCE),
        (HOLD_AFTER_BWD, COMPUTE),  # another use of it has its backward
        (HOLD_AFTER_BWD, FREE),
        (HOLD_AFTER_BWD, HOLD),
        (HOLD_AFTER_BWD, READY_TO_REDUCE),
        (READY_TO_REDUCE, FREE),  # reduced, or given up with its step
    }
)


class IllegalMove(RuntimeError):
    """A parameter was asked to go where its state does not lead: a fault of Gemini's, not of the user's."""

    def __init__(self, name: str, state: State, to: State):
        allowed = ", ".join(sorted(end.name for begin, end in MOVES if begin is state))
        super().__init__(f"{name}: {state.name} -> {to.name}; from {state.name} a parameter goes to {allowed}")


def require_move(name: str, state: State, to: State) -> State:
    """`to`, if a parameter may go there from `state`.  Raises IllegalMove otherwise."""
    if (state, to) not in MOVES:
        raise IllegalMove(name, state, to)
    return to
