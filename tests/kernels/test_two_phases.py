"""Sums in two phases, with so few programs that each has several tiles, the last of them short.

The SPECs' cases are small: there every program has one tile, and what is carried from tile to tile would go untested.
"""

from types import ModuleType

import pytest
import torch

from core.kernels import activations, gated_output, group_norm, triangle
from tests.kernels.test_specs import SPECS, check


@pytest.mark.parametrize(
    ("module", "name", "index", "num_programs"),
    [
        (activations, "bias_gelu", 3, 2),
        (gated_output, "gated_residual", 3, 2),
        (group_norm, "group_norm", 2, 1),
        (group_norm, "group_norm", 3, 1),
        (triangle, "norm_channels_last", 1, 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_programs_with_many_tiles(
    module: ModuleType, name: str, index: int, num_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PROGRAMS", num_programs)
    check(SPECS[name], SPECS[name].cases[index], torch.float32)
