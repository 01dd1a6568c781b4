"""Microbatches by blocks on several ranks: bit for bit what the same ranks learn with microbatches in turn."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.compose import ParallelConfig
from core.parallel.recompute import RecomputeConfig
from tests.unit.gemini.test_vertical import GPT, learned


def both(case: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return learned(replace(case, order="horizontal")), learned(replace(case, order="vertical"))


@pytest.mark.parametrize(("zero", "precision", "host"), [(0, "fp32", None), (3, "bf16", None), (3, "bf16", "140KB")])
def test_ranks_learn_what_they_learn_in_turn(
    ranks, tmp_path: Path, zero: Any, precision: Any, host: str | None
) -> None:
    parallel = ParallelConfig(zero=zero, precision=precision, recompute=RecomputeConfig("full"))
    case = replace(GPT, parallel=parallel, microbatch=4, budget="150KB", host=host)
    if host is not None:
        case = replace(case, disk=tmp_path / "disk", clip=None)
    for in_turn, by_blocks in ranks(2).run(both, case):
        assert by_blocks["by_blocks"]
        assert by_blocks["losses"] == in_turn["losses"]
        for name, master in in_turn["masters"].items():
            assert torch.equal(by_blocks["masters"][name], master), name
