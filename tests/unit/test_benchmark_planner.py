"""The planner beside published tables: what was copied multiplies out, and one constant predicts another row."""

from dataclasses import replace

import pytest

from benchmarks import planner
from core.auto.machines import gpu_named
from core.config import UserError
from core.estimate import decoder_shape
from core.models.shapes import SHAPES


def test_a_row_that_was_copied_wrongly_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    planner.check_arithmetic()
    monkeypatch.setattr(planner, "GPT3", (*planner.GPT3[:3], replace(planner.GPT3[3], throughput=1.37)))
    with pytest.raises(UserError, match=r"152\.1 samples a step, and the batch is 192"):
        planner.check_arithmetic()


def test_the_constant_of_one_row_predicts_another_of_the_same_system() -> None:
    model, gpu = decoder_shape(SHAPES["gpt3_175b"]), gpu_named("a100-40gb")
    share = planner.fitted(model, gpu)
    rows, targets = planner.gpt3(model, gpu, share)
    assert 0.3 < share < 0.8
    off = [row.numbers["off"].value for row in rows]
    assert abs(off[1]) < 1e-3
    assert abs(off[2]) < 100 * planner.WITHIN
    assert [target.what[:5] for target in targets] == ["row 3", "row 4"]
