"""`fold doctor`: does this installation compute what the original code computed?"""

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from apps.fold.golden import compare
from core.config import UserError, parse
from core.precision import compute_dtype


@dataclass(frozen=True)
class DoctorConfig:
    golden: Path | None = None
    """a folder with params.npz, batch.npz, out.npz and config.json of a run of the original code"""
    device: str = "cpu"
    limit: float = 1e-5
    """the largest relative difference that passes"""


def main(argv: list[str]) -> int:
    """Exit code 1 when an output differs by more than the limit."""
    config = parse({"default": DoctorConfig}, argv, "fold doctor", default="default")
    if config.golden is None:
        raise UserError("fold doctor needs a golden run; give --golden DIR (docs/fold.md says what it holds)")
    differences = compare(config.golden, config.device, compute_dtype("fp32"))
    table = Table("output", "largest relative difference", "")
    for name, difference in differences.items():
        table.add_row(name, f"{difference:.2e}", "" if difference <= config.limit else "DIFFERS")
    Console().print(table)
    sick = [name for name, difference in differences.items() if not difference <= config.limit]
    verdict = f"differs beyond {config.limit:g}: {', '.join(sick)}" if sick else f"equal within {config.limit:g}"
    print(f"torch {torch.__version__} on {config.device}: {verdict}")
    return 1 if sick else 0
