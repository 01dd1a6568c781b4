"""What DockQ 2.1.3 makes of small complexes, beside which `fold evaluate`'s is held.

    python -m tests.support.dockq_numbers DOCKQ     # the command of DockQ==2.1.3, installed anywhere: writes NUMBERS

The package is no dependency: its numbers are in tests/unit/fold/dockq.json. Complexes are made of the demo's
structures, copies laid side by side; a prediction is the same with chains moved, atoms shaken, residues and atoms
left out.
"""

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from apps.fold.features.structures import Chain, read_structure
from apps.fold.model import residues

NUMBERS = Path(__file__).parents[1] / "unit" / "fold" / "dockq.json"
VERSION = "2.1.3"
STRUCTURES = Path(__file__).parents[2] / "apps" / "fold" / "demo" / "structures"
FILES = {"u": STRUCTURES / "1ubi.pdb", "a": STRUCTURES / "1a8o.cif", "e": STRUCTURES / "1ejg.pdb"}


@dataclass(frozen=True)
class Problem:
    """A reference of copies of structures (letters of FILES), chains A, B, …, and a prediction of it.

    order    the reference's chains of the prediction's, which are called A, B, … too
    shake    Angstrom by which atoms are moved; slip: Angstrom by which the prediction's later chains are
    cut      residues that the prediction lacks, of each chain of the reference; lost: residues that the reference lacks
    bare     atoms beyond the backbone are left out of the prediction's every third residue
    named    the reference's chains that count; empty: all
    hetero   methionines of the reference are selenomethionines, which HETATM records describe
    """

    copies: str
    order: str
    shake: float = 0.0
    slip: float = 0.0
    cut: Mapping[str, slice] = field(default_factory=dict)
    lost: Mapping[str, slice] = field(default_factory=dict)
    bare: bool = False
    named: str = ""
    hetero: bool = False


PROBLEMS = {
    "itself": Problem("ua", "AB"),
    "shaken": Problem("ua", "AB", shake=1.2),
    "of equal length": Problem("uu", "AB", shake=0.4, slip=2.5),
    "exchanged": Problem("uu", "BA", shake=0.3, slip=1.0),
    "cut": Problem("ue", "BA", shake=0.3, slip=1.5, cut={"A": slice(0, 9)}, lost={"B": slice(20, 25)}, bare=True),
    "selenomethionine": Problem("ae", "AB", shake=0.5, slip=0.7, hetero=True),
    "of four": Problem("eaea", "DCBA", shake=0.6, slip=1.2),
    "of three that are equal": Problem("eee", "CAB", shake=0.4, slip=1.0),
    "a chain more": Problem("eea", "CBA", shake=0.4, slip=0.8, named="AB"),
    "far away": Problem("ea", "AB", slip=40.0),
}


def _waves(*shape: int, phase: float) -> np.ndarray:
    """Numbers of mean square one, the same everywhere: they must not depend on a generator's version."""
    index = np.arange(math.prod(shape), dtype=np.float64)
    return (math.sqrt(2) * np.sin(1.7 * index + 0.3 * index**2 + phase)).reshape(shape)


def _turned(x: np.ndarray, phase: float) -> np.ndarray:
    q, _ = np.linalg.qr(_waves(3, 3, phase=phase))
    return x @ (q * np.linalg.det(q))


def _chains(problem: Problem) -> list[Chain]:
    """The reference's: each copy turned, and pushed along a direction of its own until it is no longer in another."""
    found: list[Chain] = []
    for number, letter in enumerate(problem.copies):
        chain = read_structure(FILES[letter])[0]
        there = chain.mask > 0
        atoms = _turned(chain.positions[there].astype(np.float64), float(number))
        atoms -= atoms.mean(0)
        direction = _waves(3, phase=0.9 * number)
        direction /= np.linalg.norm(direction)
        others = np.concatenate([one.positions[one.mask > 0] for one in found]) if found else None
        while others is not None and np.linalg.norm(atoms[:, None] - others, axis=-1).min() < 1.5:
            atoms += 0.5 * direction
        positions = np.zeros(chain.positions.shape)
        positions[there] = atoms
        found.append(Chain("ABCDEF"[number], chain.sequence, chain.numbers, positions, chain.mask, chain.b_factors))
    return found


def _without(chain: Chain, cut: slice | None) -> Chain:
    keep = np.ones(len(chain), bool)
    keep[cut if cut is not None else slice(0)] = False
    sequence = "".join(letter for letter, kept in zip(chain.sequence, keep) if kept)
    numbers = tuple(number for number, kept in zip(chain.numbers, keep) if kept)
    return Chain(chain.name, sequence, numbers, chain.positions[keep], chain.mask[keep], chain.b_factors[keep])


def write_problem(problem: Problem, folder: Path) -> tuple[Path, Path]:
    """The PDB files of the prediction and of the reference."""
    truth, predicted = _chains(problem), []
    for number, name in enumerate(problem.order):
        chain = _without(truth["ABCDEF".index(name)], problem.cut.get(name))
        moved = chain.positions + problem.shake / math.sqrt(3) * _waves(*chain.positions.shape, phase=number)
        moved = moved + problem.slip * number * np.array([0.6, 0.0, 0.8])
        mask = chain.mask.copy()
        if problem.bare:
            mask[::3, 5:] = 0
        predicted.append(Chain("ABCDEF"[number], chain.sequence, chain.numbers, moved, mask, chain.b_factors))
    files = folder / "predicted.pdb", folder / "reference.pdb"
    files[0].write_text(_pdb(predicted, False))
    files[1].write_text(_pdb([_without(chain, problem.lost.get(chain.name)) for chain in truth], problem.hetero))
    return files


def _pdb(chains: list[Chain], hetero: bool) -> str:
    lines, serial = [], 0
    for chain in chains:
        for row, letter in enumerate(chain.sequence):
            record, name = "ATOM  ", residues.THREE_LETTERS[letter]
            if hetero and letter == "M":
                record, name = "HETATM", "MSE"
            for slot in np.flatnonzero(chain.mask[row]):
                serial += 1
                atom = residues.ATOM37[slot]
                x, y, z = chain.positions[row, slot]
                lines.append(
                    f"{record}{serial:5d} {f' {atom}':<4} {name} {chain.name}{row + 1:4d}    "
                    f"{x:8.3f}{y:8.3f}{z:8.3f}{1:6.2f}{0:6.2f}          {atom[0]:>2}"
                )
        lines.append("TER")
    return "\n".join([*lines, "END", ""])


def measured(command: str, problem: Problem) -> dict[str, object]:
    """DockQ's numbers: of the whole, and of each interface by the names of the reference's chains."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        named = ["--mapping", f":{problem.named}"] if problem.named else []
        arguments = [*map(str, write_problem(problem, Path(folder))), "--json", str(out), "--n_cpu", "1", *named]
        subprocess.run([command, *arguments], check=True, capture_output=True)
        found = json.loads(out.read_text())
    wanted = ("DockQ", "fnat", "iRMSD", "LRMSD", "F1", "fnonnat", "nat_total", "clashes", "chain1", "chain2")
    interfaces = {name: {key: one[key] for key in wanted} for name, one in found["best_result"].items()}
    return {"whole": found["GlobalDockQ"], "chains": found["best_mapping"], "interfaces": interfaces}


def main() -> int:
    if len(sys.argv) != 2:
        print(f"give the command of DockQ=={VERSION}", file=sys.stderr)
        return 2
    found = {name: measured(sys.argv[1], problem) for name, problem in PROBLEMS.items()}
    NUMBERS.write_text(json.dumps({"version": VERSION, "problems": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
