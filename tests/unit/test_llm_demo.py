"""What the demo decides before it trains."""

import pytest

from apps.llm import demo
from apps.llm.recipes import demo as recipe


def test_a_machine_takes_as_many_steps_as_fit_into_its_minutes() -> None:
    tokens = recipe().data.global_batch * recipe().data.sequence_length
    assert demo.steps_that_fit(200.0, 10 * tokens) == recipe().steps, "never more than the recipe's"
    assert demo.steps_that_fit(200.0, tokens) == 200 - demo.EVALUATION_STEPS
    assert demo.steps_that_fit(-50.0, tokens) == recipe().steps // 10, "and on any machine enough to learn something"


@pytest.mark.parametrize(("units", "expected"), [(None, "fp32"), ("vector", "bf16"), ("matrix", "bf16")])
def test_bf16_only_where_it_is_fast(monkeypatch: pytest.MonkeyPatch, units: str | None, expected: str) -> None:
    monkeypatch.setattr(demo, "bf16_units", lambda device: units)
    assert demo.fastest_precision() == expected
