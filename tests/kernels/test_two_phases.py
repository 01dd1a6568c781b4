"""Sums in two phases, with so few programs that each has several tiles, the last of them short.

The SPECs' cases are small: there every program has one tile, and what is carried from tile to tile would go untested.
"""

from types import ModuleType

import pytest
import torch

from core.kernels import group_norm, rows, softmax, triangle
from tests.kernels.test_specs import SPECS, check


@pytest.mark.parametrize(
    ("module", "constant", "name", "index", "num_programs"),
    [
        (rows, "PROGRAMS", "bias_gelu", 3, 2),
        (rows, "PROGRAMS", "gated_residual", 3, 2),
        (softmax, "PROGRAMS", "softmax", 0, 1),
        (softmax, "PROGRAMS", "softmax", 0, 2),
        (group_norm, "_PROGRAMS", "group_norm", 0, 1024),
        (group_norm, "_PROGRAMS", "group_norm", 2, 1),
        (group_norm, "_PROGRAMS", "group_norm", 3, 1),
        (triangle, "_PROGRAMS", "norm_channels_last", 1, 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_programs_with_many_tiles(
    module: ModuleType, constant: str, name: str, index: int, num_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, constant, num_programs)
    monkeypatch.setattr(group_norm, "LARGEST_GROUP", 0)
    check(SPECS[name], SPECS[name].cases[index], torch.float32)
