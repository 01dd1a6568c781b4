"""Types that classes annotate, and values of JSON."""

import math
from typing import Any, Literal

import pytest

from apps.diffusion.annotations import annotated, fits, in_words, merged

FITTING = [
    (int, [0, -1, 10**12], [10**30, True, 1.0, "1", None, [1]]),
    (float, [0, 1, -2.5], [10**400, True, "1", None, math.nan, math.inf, [1.0]]),
    (bool, [True, False, None], [0, 1, "true", []]),
    (str | None, ["", "a", None], [1, ["a"], False]),
    (tuple[int], [[], [1], [1, 2]], [1, [1.5], ["1"], [True], {}]),
    (tuple[int, ...], [[1, 2, 3], (1, 2)], [[None]]),
    (int | tuple[int, int], [1, [1, 2]], [[1], [1, 2, 3], [1, "2"]]),
    (list[str | dict], [["a", {}], []], [[1], {}, "a"]),
    (tuple[tuple[int], ...], [[[1], [2, 3]]], [[1], [[1.5]]]),
    (dict[str, int], [{}, {"a": 1}], [{"a": "b"}, [], 1]),
    (Literal["a", "b"] | None, ["a", None], ["c", 1, ["a"]]),
    (float | Literal[-math.inf], [1, -math.inf], [math.inf, math.nan]),
    (Any, [None, 1, "a", []], []),
]


@pytest.mark.parametrize(("hint", "right", "wrong"), FITTING)
def test_values_are_of_a_type_or_not(hint, right, wrong) -> None:
    assert [value for value in right if not fits(value, hint)] == []
    assert [value for value in wrong if fits(value, hint)] == []


def test_a_message_says_what_is_taken() -> None:
    assert in_words(int) == "a whole number"
    assert in_words(int | tuple[int, int] | None) == "a whole number or [a whole number, a whole number] or null"
    assert in_words(tuple[str, ...]) == "a list of texts"
    assert in_words(int | float) == "a number"
    assert in_words(Literal["a", "b"] | object) == "'a' or 'b'"


class One:
    def __init__(self, kind: Literal["a", "b"] = "a", width: int = None, least: float = -math.inf):  # noqa: RUF013
        pass


class Other:
    def __init__(self, kind: str = "c", width: float = 1.0, more: bool = False):
        pass


def test_defaults_are_of_their_fields_types_and_classes_are_merged() -> None:
    assert fits(None, annotated(One)["width"])
    assert fits(-math.inf, annotated(One)["least"])
    both = merged([One, Other])
    assert both.keys() == {"kind", "width", "least", "more"}
    assert fits("b", both["kind"])
    assert not fits("c", both["kind"])
    assert fits(1.5, both["width"])
