"""`fold doctor`: does this installation compute what the original code computed?"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from apps.fold.golden import compare, examine
from apps.fold.search.on_ray import installed_ray
from core.config import UserError, parse
from core.precision import compute_dtype
from core.runtime import device_kind


@dataclass(frozen=True)
class DoctorConfig:
    golden: Path | None = None
    """a folder with params.npz, batch.npz, out.npz and config.json of a run of the original code"""
    device: str = "auto"
    """cpu or cuda; auto: CUDA where there is one"""
    limit: float | None = None
    """the largest relative difference from the original in fp32 that passes; by default what rounding makes of this
    run, as our own fp32 beside our own fp64 has it"""

    def __post_init__(self) -> None:
        if self.limit is not None and not self.limit > 0:
            raise UserError(f"limit={self.limit}; give a positive number such as 1e-5, or leave it out")


def main(argv: list[str]) -> int:
    """Exit code 1 when an output differs by more than rounding explains, or than the limit that was given."""
    config = parse({"default": DoctorConfig}, argv, "megalith fold doctor", default="default")
    if config.golden is None:
        raise UserError("megalith fold doctor needs a golden run; give --golden DIR (docs/fold.md says what it holds)")
    config = replace(config, device=device_kind(config.device))
    sick = _by_rounding(config) if config.limit is None else _by_limit(config, config.limit)
    within = "what rounding explains" if config.limit is None else f"{config.limit:g}"
    verdict = f"differs beyond {within}: {', '.join(sick)}" if sick else f"equal within {within}"
    print(f"fold msa --ray: {installed_ray()}")
    print(f"torch {torch.__version__} on {config.device}: {verdict}")
    return 1 if sick else 0


def _by_rounding(config: DoctorConfig) -> list[str]:
    """Print a table; the outputs that differ."""
    assert config.golden is not None
    found = examine(config.golden, config.device)
    table = Table("output", "difference", "by rounding at most", "largest rounding of fp32", "")
    for name, one in found.items():
        numbers = (f"{value:.2e}" for value in (one.difference, one.limit, one.rounding))
        table.add_row(name, *numbers, "" if one.well else "DIFFERS")
    Console().print(table)
    return [name for name, one in found.items() if not one.well]


def _by_limit(config: DoctorConfig, limit: float) -> list[str]:
    """Print a table; the outputs that differ."""
    assert config.golden is not None
    differences = compare(config.golden, config.device, compute_dtype("fp32"))
    table = Table("output", "largest relative difference", "")
    for name, difference in differences.items():
        table.add_row(name, f"{difference:.2e}", "" if difference <= limit else "DIFFERS")
    Console().print(table)
    return [name for name, difference in differences.items() if not difference <= limit]
