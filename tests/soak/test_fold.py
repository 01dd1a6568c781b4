"""The memory of predictions at as many sizes as it takes to believe that a budget holds: `make soak`."""

import pytest

from tests.support.fold_memory import rise

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2 * 3600)]


@pytest.mark.parametrize("seed", range(30))
def test_the_process_stays_within_its_budget(seed: int) -> None:
    found = rise(seed)
    assert found.code == 0
    assert found.rise <= found.budget, found
