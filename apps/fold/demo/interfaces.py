"""The part of the demo about complexes: two small dimers that a model has learned by heart, scored by DockQ."""

import dataclasses
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from apps.fold.dockq import DockQ, dockq
from apps.fold.features.structures import read_structure
from apps.fold.predict import main as predict
from apps.fold.toy import DIMERS
from core.config import UserError

LEAST_DOCKQ = 0.8


def show_dimers(out: Path) -> int:
    """Fold the dimers with a finished run, and write and tell how their chains lie to each other.

    Exit code 1 when a DockQ falls short of what the demo is to show.
    """
    files = sorted(DIMERS.iterdir())
    sequences = {path.stem: ":".join(chain.sequence for chain in read_structure(path)) for path in files}
    fasta, folders = out / "dimers.fasta", out / "folded"
    fasta.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in sequences.items()))
    if predict([str(fasta), "--model", str(out / "model"), "--out", str(folders), "--overwrite"]):
        raise UserError(f"the demo's dimers were not folded with {out / 'model'}; what was wrong stands above")
    found = {path.stem: _score(folders / path.stem / "rank_1.cif", path) for path in files}
    wall_s = json.loads((out / "summary.json").read_text())["wall_s"]
    figures = {"dimers": {name: dataclasses.asdict(one) for name, one in found.items()}, "wall_s": wall_s}
    (out / "dimers.json").write_text(json.dumps(figures, indent=1) + "\n")
    _tell(found, wall_s)
    worst = min(one.dockq for one in found.values())
    if worst >= LEAST_DOCKQ:
        return 0
    print(f"fell short: DockQ of a memorised dimer {worst:.2f} (at least {LEAST_DOCKQ})", file=sys.stderr)
    return 1


def _score(predicted: Path, experiment: Path) -> DockQ:
    return dockq(read_structure(predicted), read_structure(experiment), (predicted, experiment))


def _tell(found: dict[str, DockQ], wall_s: float) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    table = Table("dimer", "", "DockQ", "Fnat", "iRMSD", "LRMSD")
    for name, one in found.items():
        (interface,) = one.interfaces
        numbers = (f"{value:.2f}" for value in (one.dockq, interface.fnat, interface.irmsd, interface.lrmsd))
        table.add_row(name, "memorised", *numbers)
    console.print(table)
    console.print(f"A model of complexes, trained on these two alone, in {wall_s:.0f} s", soft_wrap=True)
