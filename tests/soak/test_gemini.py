"""Gemini for as many steps as it takes to believe that nothing leaks: `make soak`; SOAK_STEPS sets how many."""

import os

import pytest

from tests.support.gemini_soak import require_flat, soak

pytestmark = [pytest.mark.soak, pytest.mark.timeout(4 * 3600)]


def test_fifty_thousand_steps_of_random_shapes_of_which_some_throw() -> None:
    num_steps = int(os.environ.get("SOAK_STEPS", "50000"))
    found = soak(num_steps, budget_bytes=150_000)
    print(found.early, found.late, dict(found.thrown), "thrown,", found.num_evictions, "evictions")
    require_flat(found, num_steps)
