"""Sums in two phases, with so few programs that each has several tiles, the last of them short.

The SPECs' cases are small: there every program has one tile, and what is carried from tile to tile would go untested.
"""

from types import ModuleType
from unittest.mock import patch

import pytest
import torch

from core.kernels import group_norm, rows, softmax, triangle
from tests.kernels.test_specs import SPECS, check

pytestmark = pytest.mark.usefixtures("device")

FEW_PROGRAMS = [
    (rows, "PROGRAMS", "gated_residual", 3, 2),
    (softmax, "PROGRAMS", "softmax", 0, 1),
    (softmax, "PROGRAMS", "softmax", 0, 2),
    (group_norm, "_PROGRAMS", "group_norm", 0, 1024),
    (group_norm, "_PROGRAMS", "group_norm", 2, 1),
    (group_norm, "_PROGRAMS", "group_norm", 3, 1),
    (triangle, "_PROGRAMS", "norm_channels_last", 1, 2),
]


def check_with_programs(module: ModuleType, constant: str, name: str, index: int, num_programs: int) -> None:
    with patch.object(module, constant, num_programs), patch.object(group_norm, "LARGEST_GROUP", 0):
        check(SPECS[name], SPECS[name].cases[index], torch.float32)


@pytest.mark.parametrize("case", FEW_PROGRAMS, ids=lambda case: f"{case[2]}-{case[3]}-{case[4]}")
def test_programs_with_many_tiles(case: tuple[ModuleType, str, str, int, int]) -> None:
    check_with_programs(*case)
