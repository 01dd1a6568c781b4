"""The benchmarks of 8-bit activations and of torchft's DiLoCo: what is made of their curves and seconds."""

import pytest

from benchmarks import coded_activations, diloco
from benchmarks.diloco import Found, Given, Tokens
from benchmarks.result import Missing, Number, Row
from benchmarks.run import Options


def a_curve(code: str, seed: int, *bits: float) -> Row:
    case = coded_activations.case("stages", code, seed)
    return Row(case, {f"after {10 * (place + 1)}": Number(of, "bits/byte") for place, of in enumerate(bits)})


def test_8_bits_cost_what_their_mean_curve_needs_more() -> None:
    rows = [a_curve("whole", 0, 4.0, 2.0), a_curve("whole", 1, 4.0, 2.0)]
    rows += [a_curve("8 bits", 0, 5.0, 2.0), a_curve("8 bits", 1, 5.0, 3.0)]
    numbers = coded_activations.of_form("stages", rows).numbers
    assert numbers["loss"].value == pytest.approx(0.25)
    assert (numbers["least"].value, numbers["most"].value) == (0.0, 0.5)
    assert numbers["steps"].value == pytest.approx(20 / 17.5 - 1)  # to 2.5 bits, which whole ones pass at 17.5


def test_the_end_of_a_round_is_beyond_other_steps() -> None:
    """The first round, which makes state, left out."""
    assert diloco.end_s(Found([0.0, 0.0, 1.0, 4.0, 1.5, 3.0], 0.0), 2) == pytest.approx(2.0)


def test_workers_of_both_have_their_own_rows() -> None:
    given = Given("sgd", "debug", 2, 2, 2)
    own = [Tokens(given).batch(3, worker, 2)["input_ids"] for worker in range(2)]
    whole = Tokens(given).batch(3, 0, 1)["input_ids"]
    assert own[0].tolist() + own[1].tolist() == whole.tolist()


def test_without_torchft_it_is_missing() -> None:
    with pytest.raises(Missing, match="torchft: --peers-python"):
        diloco.measure(Options(quick=True))
