"""What the demo decides before it trains."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from apps.llm import demo
from apps.llm.recipes import demo as recipe


def test_a_machine_takes_as_many_steps_as_fit_into_its_minutes() -> None:
    tokens = recipe().data.global_batch * recipe().data.sequence_length
    assert demo.steps_that_fit(recipe(), 200.0, 10 * tokens) == recipe().steps, "never more than the recipe's"
    assert demo.steps_that_fit(recipe(), 200.0, tokens) == 200 - demo.EVALUATION_STEPS
    assert demo.steps_that_fit(recipe(), -50.0, tokens) == recipe().steps // 10, "enough to learn something anywhere"


@pytest.mark.parametrize(("name", "value"), [("global_batch", 64), ("sequence_length", 64)])
def test_the_steps_that_fit_are_those_of_the_options(
    name: str, value: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options are those of the run, whose trial says how many tokens a second it takes."""
    data = replace(recipe().data, **{name: value})
    config = replace(recipe(), data=data, out=tmp_path)
    tokens = data.global_batch * data.sequence_length

    def trained(options: list[str]) -> int:
        folder = Path(options[options.index("--out") + 1])
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps({"tokens_per_s": 400.0 * tokens / (60 * demo.MINUTES)}))
        return 0

    monkeypatch.setattr(demo, "pretrain", trained)
    monkeypatch.setattr(demo.time, "process_time", lambda: 0.0)
    assert 350 <= demo.trial(config, []) <= 400 - demo.EVALUATION_STEPS


@pytest.mark.parametrize(("units", "expected"), [(None, "fp32"), ("vector", "bf16"), ("matrix", "bf16")])
def test_bf16_only_where_it_is_fast(monkeypatch: pytest.MonkeyPatch, units: str | None, expected: str) -> None:
    monkeypatch.setattr(demo, "bf16_units", lambda device: units)
    assert demo.fastest_precision() == expected
