"""The memory of predictions at as many sizes as it takes to believe that a budget holds: `make soak`."""

import pytest

from tests.support.fold_memory import FOUND, Size, random_size, rise

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2 * 3600)]


@pytest.mark.parametrize("seed", range(30))
def test_the_process_stays_within_its_budget(seed: int) -> None:
    _stays_within(random_size(seed))


@pytest.mark.parametrize("size", FOUND)
def test_the_process_stays_within_budgets_that_it_did_not_stay_within(size: Size) -> None:
    _stays_within(size)


def _stays_within(size: Size) -> None:
    found = rise(size)
    assert found.code == 0
    assert found.rise <= size.budget, found
