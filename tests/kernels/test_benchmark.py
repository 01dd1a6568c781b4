"""The kernel benchmark refuses to report on a family that computes something else."""

from dataclasses import replace

import pytest
import torch

from benchmarks import kernels
from core.config import UserError
from core.kernels import specs

SPEC = specs()["softmax"]


def test_a_red_family_is_not_timed() -> None:
    kernels.check_green(SPEC)
    with pytest.raises(UserError, match=r"softmax is off by 0.001.*no result"):
        kernels.check_green(replace(SPEC, function=lambda **inputs: SPEC.reference(**inputs) * 1.001))


def test_a_row_is_a_share_of_the_nearer_bound() -> None:
    roofline = kernels.Roofline(bandwidth=100.0, flops={torch.float32: 10.0})
    assert roofline.seconds(200, 10, torch.float32) == 2.0
    assert roofline.seconds(100, 50, torch.float32) == 5.0


def test_every_pass_is_measured() -> None:
    case = {"B": 1, "S": 2, "H": 1, "L": 2, "N": 8, "bias": True}
    roofline = kernels.Roofline(1e9, {torch.float32: 1e9})
    rows = kernels.rows_of(SPEC, case, torch.float32, roofline, compiled=False)
    assert [r.case["pass"] for r in rows if r.case["contender"] == "ours"] == ["forward", "backward"]
    assert all(r.numbers["time"].value > 0 for r in rows)
