"""Forty models as they are, each by one line: right, or refused by name."""

import pytest

from core.config import UserError
from tests.parity.test_auto_parallelize import right
from tests.support.auto_models import MODELS
from tests.support.spread import trained

REFUSED: dict[str, str] = {}
"""Models that cannot be spread, and what is said."""


def outcome(name: str, sizes: tuple[int, ...]) -> object:
    try:
        return trained(name, sizes)
    except UserError as error:
        return str(error)


@pytest.mark.soak
@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_as_on_one_rank(ranks, name: str, sizes: tuple[int, ...]) -> None:
    found = ranks(4 if len(sizes) == 2 else sizes[0]).run(outcome, name, sizes)
    if name in REFUSED:
        assert all(REFUSED[name] in said for said in found)
    else:
        right(found)
