"""Chunks of prompts by what steps took: the step beside writers stays within the stretch, whatever tokens cost."""

import pytest

from apps.serve.pace import Pace


@pytest.mark.parametrize(("writers_s", "token_s"), [(0.02, 0.001), (0.5, 0.004), (0.01, 0.00001), (0.001, 0.01)])
@pytest.mark.parametrize("stretch", [1.5, 2.0, 4.0])
def test_steps_stay_within_the_stretch(writers_s: float, token_s: float, stretch: float) -> None:
    pace, most, least = Pace(stretch, least=8), 512, 8
    assert pace.chunk(most) == most  # nothing is known yet
    pace.observe(0, 300, 300 * token_s)  # a prompt while nobody writes
    for _ in range(3):
        pace.observe(4, 0, writers_s)
    for _ in range(30):
        chunk = pace.chunk(most)
        taken = writers_s + chunk * token_s
        assert least <= chunk <= most
        assert taken <= stretch * writers_s * 1.001 or chunk == least
        pace.observe(4, chunk, taken)
    assert chunk in (least, most) or taken > 0.8 * stretch * writers_s  # and is not shorter than it needs to be


def test_it_follows_what_changes() -> None:
    pace = Pace(2.0)
    for _ in range(10):
        pace.observe(1, 0, 0.010)
        pace.observe(1, 100, 0.020)
    assert pace.chunk(512) == pytest.approx(80, abs=2)
    for _ in range(30):  # more writers: a step without prompts takes longer, so chunks may, too
        pace.observe(32, 0, 0.040)
        pace.observe(32, 100, 0.050)
    assert pace.chunk(512) == pytest.approx(320, abs=8)
    for _ in range(30):
        pace.observe(32, 50, 0.640)
    assert pace.chunk(512) == 4
