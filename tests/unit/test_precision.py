"""Formats, and dynamic loss scaling."""

import pytest
import torch

from core.precision import LossScale, LossScaleConfig, Precision, compute_dtype, master_dtype


@pytest.mark.parametrize(
    ("precision", "computed", "kept"),
    [
        ("fp64", torch.float64, torch.float64),
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.float32),
        ("fp16", torch.float16, torch.float32),
    ],
)
def test_formats(precision: Precision, computed: torch.dtype, kept: torch.dtype) -> None:
    assert compute_dtype(precision) == computed
    assert master_dtype(precision) == kept


def test_the_scale_halves_on_overflow_and_doubles_after_a_quiet_while() -> None:
    scale = LossScale("fp16", LossScaleConfig(initial=8.0, growth_interval=3, minimum=2.0))
    factors = []
    for finite in (True, True, True, True, False, True, True, True, False, False, False, False):
        assert scale.update(finite) is finite
        factors.append(scale.factor)
    assert factors == [8, 8, 16, 16, 8, 8, 8, 16, 8, 4, 2, 2]
    assert scale.skipped_steps == 5


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_other_formats_skip_without_a_scale(precision: Precision) -> None:
    scale = LossScale(precision, LossScaleConfig(initial=8.0, growth_interval=1))
    assert scale.update(True)
    assert not scale.update(False)
    assert scale.factor == 1.0
    assert scale.skipped_steps == 1


def test_state_goes_on_where_it_was() -> None:
    config = LossScaleConfig(initial=8.0, growth_interval=3)
    scale, other = LossScale("fp16", config), LossScale("fp16", config)
    for finite in (False, True, True):
        scale.update(finite)
    other.load_state(scale.state())
    for one in (scale, other):
        one.update(True)
        assert (one.factor, one.good_steps, one.skipped_steps) == (8.0, 3, 1)
