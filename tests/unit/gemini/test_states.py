"""The table of moves."""

import itertools

import pytest

from core.gemini.states import MOVES, IllegalMove, State, require_move


def test_every_state_is_reached_and_left() -> None:
    assert {begin for begin, _ in MOVES} == {end for _, end in MOVES} == set(State)
    assert all(begin is not end for begin, end in MOVES)


@pytest.mark.parametrize(
    ("begin", "end"), [pair for pair in itertools.product(State, State) if pair not in MOVES], ids=str
)
def test_an_illegal_move_names_states_and_parameter(begin: State, end: State) -> None:
    with pytest.raises(IllegalMove, match=rf"h\.0\.bias: {begin.name} -> {end.name}"):
        require_move("h.0.bias", begin, end)


def test_a_gradient_is_never_taken_for_a_parameter() -> None:
    """From READY_TO_REDUCE there is only the reduction; what is on no device is not used."""
    assert [end for begin, end in MOVES if begin is State.READY_TO_REDUCE] == [State.FREE]
    assert [end for begin, end in MOVES if begin is State.FREE] == [State.HOLD]
