"""The rows of a table of combinations that the suite keeps: every pair of values is among them, and few rows are."""

from itertools import combinations

import pytest

from tests.support.covering import FEW, MANY, covering, few_rows, few_steps, products

CUBE = products(a=range(3), b="xyz", c=[None, False, True], d=range(3))


def pairs(rows):
    return {frozenset(pair) for row in rows for pair in combinations(row.items(), 2)}


def test_every_pair_of_a_row_is_in_a_row_that_is_kept() -> None:
    kept = covering(CUBE)
    assert pairs(CUBE[name] for name in kept) == pairs(CUBE.values())
    assert 9 <= len(kept) <= 14  # of 81; 9 pairs of two factors need 9 rows
    ragged = {"one": {"a": 1, "b": 2}, "two": {"a": 1, "c": 3}, "three": {"a": 1, "b": 2}, "four": {"d": 1}}
    assert covering(ragged) == ["one", "two", "four"]


def test_pairs_that_no_row_has_are_not_asked_for() -> None:
    rows = {name: row for name, row in CUBE.items() if (row["a"], row["b"]) != (0, "x")}
    kept = covering(rows)
    assert pairs(rows[name] for name in kept) == pairs(rows.values())


def test_strength_one_has_each_value() -> None:
    kept = covering(CUBE, strength=1)
    assert len(kept) == 3
    for factor in "abcd":
        assert {CUBE[name][factor] for name in kept} == {row[factor] for row in CUBE.values()}


def test_a_row_that_costs_less_is_preferred() -> None:
    rows = {
        "dear": {"a": 1, "b": 2, "c": 3},
        "cheap": {"a": 1, "b": 2},
        "others": {"a": 1, "c": 3},
        "rest": {"b": 2, "c": 3},
    }
    assert covering(rows) == ["dear"]
    assert covering(rows, costs={"dear": 8, "cheap": 1, "others": 1, "rest": 1}) == ["cheap", "others", "rest"]


def test_the_choice_depends_on_the_table_alone() -> None:
    assert covering(CUBE) == covering(dict(CUBE))
    assert covering({}) == []


def test_no_row_is_kept_that_others_make_superfluous() -> None:
    for without in covering(CUBE):
        left = [CUBE[name] for name in covering(CUBE) if name != without]
        assert pairs(left) != pairs(CUBE.values()), without


def marked(parameter) -> bool:
    return any(mark.name == "soak" for mark in parameter.marks)


def test_all_rows_are_run_with_many_steps_and_few_of_them_quickly() -> None:
    many = ["0-x-None-0", "0-x-None-1"]
    cells = few_steps(CUBE, many)
    assert len({cell.id for cell in cells}) == len(cells)
    quick, soak = ([cell.values for cell in cells if marked(cell) is wanted] for wanted in (False, True))
    assert {name for name, _ in quick} == {*covering(CUBE), *many}
    assert all(steps == (MANY if name in many else FEW) for name, steps in quick)
    assert {name for name, steps in [*quick, *soak] if steps == MANY} == CUBE.keys()
    with pytest.raises(KeyError, match="0-x"):
        few_steps(CUBE, ["0-x"])


def test_the_rows_that_are_left_out_are_for_the_soak() -> None:
    rows = few_rows(CUBE)
    assert [row.values[0] for row in rows] == list(CUBE)
    assert [row.values[0] for row in rows if not marked(row)] == covering(CUBE)
