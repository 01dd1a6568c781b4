"""A short run of what `make soak` does for long."""

from tests.support.gemini_soak import require_flat, soak


def test_steps_that_throw_leave_nothing_behind() -> None:
    require_flat(soak(120, budget_bytes=150_000), 120)
