"""Gemini for as many steps as it takes to believe that nothing leaks, and what it takes of its process: `make soak`.

SOAK_STEPS sets how many steps.
"""

import os

import pytest

from tests.support.gemini_memory import SIZES, Size, measured
from tests.support.gemini_soak import require_flat, soak

pytestmark = [pytest.mark.soak, pytest.mark.timeout(4 * 3600)]


def test_fifty_thousand_steps_of_random_shapes_of_which_some_throw() -> None:
    num_steps = int(os.environ.get("SOAK_STEPS", "50000"))
    found = soak(num_steps, budget_bytes=150_000)
    print(found.early, found.late, dict(found.thrown), "thrown,", found.num_evictions, "evictions")
    require_flat(found, num_steps)


@pytest.mark.parametrize("size", SIZES)
def test_the_process_takes_what_the_account_and_the_plan_of_the_host_say(size: Size) -> None:
    assert measured(size).ratio == pytest.approx(1, abs=0.1)
