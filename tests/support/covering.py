"""Tables of combinations: the few rows that every change is tried on, and all of them in `make soak`.

A row is told by its factors, such as {"schedule": "zbv", "zero": 2}. Nearly every fault needs one value or two that
meet (Kuhn, Wallace and Gallo 2004), so the rows that are kept hold every pair of values that any row of the table
holds. They are chosen greedily, the row with the most pairs that are still missing for what it costs first, and the
first of equals, so the choice depends on the table alone.
"""

from collections.abc import Collection, Hashable, Mapping
from itertools import combinations, product
from typing import Any

import pytest

FEW, MANY = 3, 10
"""Steps of training. Three have a warm-up, moments that are used, and what a step leaves to the next."""

Factors = Mapping[str, Hashable]
Meeting = frozenset[tuple[str, Hashable]]
"""Values of factors that one row has: (factor, value), …"""


def covering(rows: Mapping[str, Factors], strength: int = 2, costs: Mapping[str, float] | None = None) -> list[str]:
    """Names of few rows that have every `strength` values of different factors that any row has; in the table's order.

    strength  1: each value is in a row; 2: each pair of values that any row has
    costs     of each row, such as its number of ranks; None: all cost the same
    """
    cost = dict(costs or dict.fromkeys(rows, 1.0))
    met = {name: meetings(factors, strength) for name, factors in rows.items()}
    missing, chosen = set[Meeting]().union(*met.values()), set[str]()
    while missing:
        best = max(met, key=lambda name: len(met[name] & missing) / cost[name])
        chosen.add(best)
        missing -= met[best]
    for name in sorted(rows, key=cost.__getitem__, reverse=True):  # what later choices made superfluous
        if name in chosen and met[name] <= set[Meeting]().union(*(met[other] for other in chosen - {name})):
            chosen.remove(name)
    return [name for name in rows if name in chosen]


def meetings(factors: Factors, strength: int) -> set[Meeting]:
    """Every `strength` values of a row, or all of them where it has fewer."""
    values = sorted(factors.items(), key=lambda value: value[0])
    return set(map(frozenset, combinations(values, min(strength, len(values)))))


def products(**factors: Collection[Any]) -> dict[str, Factors]:
    """The table of all combinations, each under the name of its values."""
    rows = (dict(zip(factors, values, strict=True)) for values in product(*factors.values()))
    return {"-".join(map(str, row.values())): row for row in rows}


def few_rows(rows: Mapping[str, Factors], strength: int = 2) -> list[Any]:
    """The names as parameters of a test: all that are not among the covering rows are for `make soak`."""
    kept = covering(rows, strength)
    return [pytest.param(name, id=name, marks=() if name in kept else pytest.mark.soak) for name in rows]


def few_steps(
    rows: Mapping[str, Factors],
    many: Collection[str] = (),
    strength: int = 2,
    costs: Mapping[str, float] | None = None,
) -> list[Any]:
    """Parameters (name, steps) of a test: the covering rows with few steps; `many`, and in `make soak` all, with many.

    Raises KeyError for a name in `many` that no row has.
    """
    if unknown := set(many) - rows.keys():
        raise KeyError(*unknown)
    few = [name for name in covering(rows, strength, costs) if name not in many]
    quick = [pytest.param(name, MANY if name in many else FEW, id=name) for name in rows if name in {*few, *many}]
    rest = [name for name in rows if name not in many]
    return quick + [pytest.param(name, MANY, id=f"{name}-{MANY}-steps", marks=pytest.mark.soak) for name in rest]
