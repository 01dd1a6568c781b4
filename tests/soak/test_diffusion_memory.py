"""The memory of drawing and training at as many sizes as it takes to believe the plan: `make soak`."""

import pytest

from tests.support.diffusion_memory import measured, random_size

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2 * 3600)]


@pytest.mark.parametrize("seed", range(30))
def test_the_process_stays_within_the_plan(seed: int) -> None:
    found = measured(random_size(seed))
    assert found.code == 0
    assert found.rise <= found.planned, found
    assert found.planned <= found.allowed, found
