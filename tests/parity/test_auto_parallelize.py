"""core.auto.parallelize: a module that is spread learns what the untouched one does, whatever the plan."""

from typing import Any
from unittest.mock import patch

import pytest

from core.auto import exchange
from core.comm.collectives import take_shard
from tests.support.spread import CASES, trained

TOLERANCE = 1e-10
FEW = ("gpt2", "bert", "resnet")
"""On two ranks in `make test`; all else is soak's."""


def right(found: list[dict[str, Any]]) -> None:
    for rank, of in enumerate(found):
        print(f"rank {rank}: losses {of['losses']:.1e} apart, {of['worst']} {of['apart']:.1e}, {len(of['cut'])} cut")
        assert of["is_cut"]
        assert of["losses"] <= TOLERANCE
        assert of["apart"] <= TOLERANCE, of["worst"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FEW else pytest.mark.soak) for n in CASES])
def test_two_ranks_learn_as_one(ranks, name: str) -> None:
    found = ranks(2).run(trained, name, (2,))
    right(found)
    if "dropout" not in name:
        assert found[0]["sent"]


@pytest.mark.soak
@pytest.mark.parametrize("sizes", [(3,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_more_ranks_learn_as_one(ranks, name: str, sizes: tuple[int, ...]) -> None:
    """Three and four leave parts that are uneven; two axes cut dims in either order."""
    count = 4 if len(sizes) == 2 else sizes[0]
    right(ranks(count).run(trained, name, sizes))


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=() if (name, seed) == ("gpt2", 0) else pytest.mark.soak)
        for name in CASES
        for seed in range(3)
    ],
)
def test_any_plan_is_the_same_step(ranks, name: str, seed: int) -> None:
    """Strategies drawn at random: partial sums, every cut, every change of layout."""
    right(ranks(2).run(trained, name, (2,), seed=seed, steps=2, clip=None))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_any_plan_on_two_axes(ranks, name: str, seed: int) -> None:
    right(ranks(4).run(trained, name, (2, 2), seed=seed, steps=2, clip=None))


def test_sgd_learns_as_one(ranks) -> None:
    right(ranks(2).run(trained, "resnet", (2,), optimizer="sgd", steps=3))


def without_sums(name: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    """A rank's term of a partial sum is taken for the sum."""
    with (
        patch.object(exchange, "all_reduce", lambda x, _: x.clone()),
        patch.object(exchange, "reduce_scatter", take_shard),
    ):
        return trained(name, sizes, steps=2)


def test_a_sum_that_is_left_out_is_seen(ranks) -> None:
    found = ranks(2).run(without_sums, "gpt2", (2,))
    assert max(of["apart"] for of in found) > 1e-3
