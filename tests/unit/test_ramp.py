"""A growing global batch: its stages, and that the samples of all steps follow each other without gap or repeat."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import UserError
from core.data import BatchSize, MapBatches, RampConfig
from core.data.batches import _samples


def test_stages_of_a_worked_example():
    size = BatchSize(40, RampConfig(start=8, steps=12, increment=12))  # 8, 20, 32 for four steps each, then 40
    assert [size.rows(step) for step in range(14)] == [8] * 4 + [20] * 4 + [32] * 4 + [40] * 2
    assert [size.rows_before(step) for step in (0, 1, 4, 5, 12, 13)] == [0, 8, 32, 52, 240, 280]


def test_no_ramp_is_one_stage():
    assert BatchSize(24).stages == ((0, 24),)
    assert BatchSize(24, RampConfig(start=24, steps=5)).stages == ((0, 24),)
    assert BatchSize(24).rows_before(7) == 7 * 24


ramps = st.builds(RampConfig, st.integers(1, 30), st.integers(1, 20), st.none() | st.integers(1, 9))


@settings(deadline=None)
@given(full=st.integers(30, 60), ramp=ramps, step=st.integers(0, 40))
def test_rows_before_adds_up_and_batches_only_grow(full, ramp, step):
    size = BatchSize(full, ramp)
    rows = [size.rows(s) for s in range(step)]
    assert size.rows_before(step) == sum(rows)
    assert rows == sorted(rows)
    assert set(rows) <= {full, *range(ramp.start, full, ramp.increment or ramp.start)}
    assert (size.rows(0), size.rows(ramp.steps)) == (ramp.start, full)


@settings(deadline=None, max_examples=40)
@given(ramp=ramps, num_ranks=st.sampled_from([1, 2, 3]))
def test_samples_follow_each_other_over_steps_and_ranks(ramp, num_ranks):
    ramp = RampConfig(6 * ((ramp.start or 1) % 5 + 1), ramp.steps, 6)
    size = BatchSize(60, ramp)
    seen = [
        epoch * 7 + place
        for step in range(ramp.steps + 2)
        for rank in range(num_ranks)
        for epoch, place in _samples(step, rank, num_ranks, size, 7, seed=3)
    ]
    # Every epoch of 7 rows is complete before the next begins.
    whole = len(seen) // 7 * 7
    assert [sorted(seen[i : i + 7]) for i in range(0, whole, 7)] == [list(range(i, i + 7)) for i in range(0, whole, 7)]


def test_batches_have_the_rows_of_their_step():
    batches = MapBatches([{"x": i} for i in range(10)], BatchSize(8, RampConfig(start=2, steps=3)), seed=0)
    assert [len(batches.batch(step, 0, 1)["x"]) for step in range(5)] == [2, 4, 6, 8, 8]
    assert len(batches.batch(1, 1, 2)["x"]) == 2


@pytest.mark.parametrize(
    ("given_ramp", "message"),
    [
        (lambda: RampConfig(steps=5), "ramp start=None, steps=5.*give start"),
        (lambda: RampConfig(start=4), "ramp start=4, steps=0.*at least 1"),
        (lambda: RampConfig(start=4, steps=2, increment=0), "increment=0.*at least 1"),
        (lambda: BatchSize(8, RampConfig(start=9, steps=2)), "start=9 is more than the global batch of 8"),
    ],
)
def test_ramps_that_cannot_be(given_ramp, message):
    with pytest.raises(UserError, match=message):
        given_ramp()
