"""`fold relax FILE`: the same structure without clashes and with the bonds of proteins, as mmCIF with a report."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from apps.fold.features.entries import read_entries
from apps.fold.features.structures import Chain, is_mmcif, read_mmcif, read_structure
from apps.fold.features.text import unpacked_name
from apps.fold.output.confidence import Folded
from apps.fold.output.files import fits_pdb, write_mmcif, write_pdb
from apps.fold.relaxation.amber import INSTALL, Amber, find_openmm, lone_residue
from apps.fold.relaxation.protocol import Limit, Minimizer, Relaxed, Structure, Tell, relax
from apps.fold.relaxation.violations import Violations, drawn_apart
from core.config import UserError, parse
from core.files import replace_file, replacing

Method = Literal["auto", "amber", "violations"]
TIME_LIMIT = 600.0  # s

_ENDINGS = (".cif", ".mmcif", ".pdb")


@dataclass(frozen=True)
class RelaxConfig:
    input: Path | None = None
    """an mmCIF or PDB file, or a folder of such files; `megalith fold relax FILE` means the same"""
    out: Path = Path("relaxed")
    """a folder for NAME_relaxed.cif and NAME_relaxation.json"""
    method: Method = "auto"
    """amber: AlphaFold's, by OpenMM; violations: without a force field, by torch; auto: amber where it
    is installed, and where it knows the structure"""
    platform: str = "CPU"
    """OpenMM's, for amber: CPU, Reference, and what else is installed, such as CUDA"""
    time_limit: float = TIME_LIMIT
    """seconds that a structure may take; what was reached by then is written, be it the structure as it was given, or
    with atoms that lay on each other drawn apart"""

    def __post_init__(self) -> None:
        check_limit(self.time_limit, "time_limit")

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        return {"platform": "by --method violations; give --method amber"} if self.method == "violations" else {}


def check_limit(seconds: float, name: str) -> None:
    if not seconds > 0:
        raise UserError(f"{name}={seconds}; give seconds above 0")


def main(argv: list[str]) -> int:
    """Exit code 2 when a structure could not be relaxed; the others are."""
    config = parse({"default": RelaxConfig}, argv, "megalith fold relax", default="default", places=("input",))
    if config.input is None:
        raise UserError("megalith fold relax needs an mmCIF or PDB file, or a folder of these")
    paths = _files(config.input)
    minimizer = chosen(config.method, config.platform)
    config.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(soft_wrap=True, highlight=False), transient=True) as progress:
        task = progress.add_task("relaxing", total=len(paths))
        for path in paths:
            stem = unpacked_name(path).stem
            tell = partial(_describe, progress, task, stem)
            try:
                found = relax_file(path, config.out, stem, minimizer, config.time_limit, tell)
                progress.console.print(f"{stem}: {said(found)}", markup=False)
            except (UserError, OSError, MemoryError) as error:
                failed += 1
                lines = str(error).splitlines() or [type(error).__name__]
                prefix = "" if str(path) in lines[0] else f"{path}: "
                print(f"error: {prefix}{lines[0]}", file=sys.stderr)
            progress.advance(task)
    return 2 if failed else 0


def _describe(progress: Progress, task: TaskID, stem: str, text: str) -> None:
    progress.update(task, description=f"{stem}: {text}")


def _files(given: Path) -> list[Path]:
    """Raises UserError where there is none, or two of one name."""
    if not given.is_dir():
        return [given]
    found: dict[str, Path] = {}
    for path in sorted(given.iterdir(), key=lambda path: (not is_mmcif(path), path.name)):
        name = unpacked_name(path)
        if name.suffix in _ENDINGS and not name.stem.endswith("_relaxed"):
            found.setdefault(name.stem, path)  # of a structure in both formats its mmCIF
    if not found:
        raise UserError(f"{given} holds no file that ends in {', '.join(_ENDINGS)}")
    return [found[stem] for stem in sorted(found)]


def chosen(method: Method, platform: str = "CPU") -> Callable[[Structure, Limit], Minimizer]:
    """The minimizer.  Raises UserError for amber where OpenMM is not installed; auto says so, and takes the other.

    auto also takes the other for a structure in which a residue stands alone.
    """
    if method == "violations":
        return Violations
    try:
        find_openmm()
    except UserError as error:
        if method == "amber":
            raise
        reason = str(error).partition(";")[0]
        print(f"{reason}: atoms are moved by violations alone, without a force field; {INSTALL}", file=sys.stderr)
        return Violations
    amber = partial(Amber, platform=platform)
    return amber if method == "amber" else partial(_as_it_can, amber)


def _as_it_can(amber: Callable[[Structure, Limit], Minimizer], structure: Structure, limit: Limit) -> Minimizer:
    """By amber, or, where a residue stands alone, by violations, which is said."""
    lone = lone_residue(structure)
    if lone is None:
        return amber(structure, limit)
    print(f"{lone}: atoms are moved by violations alone, without a force field", file=sys.stderr)
    return Violations(structure, limit)


def relax_file(
    path: Path,
    folder: Path,
    stem: str,
    minimizer: Callable[[Structure, Limit], Minimizer],
    limit_s: float,
    tell: Tell = lambda text: None,
    name: str = "",
    pdb: bool = False,
) -> Relaxed:
    """Write folder/STEM_relaxed.cif, with `pdb` also .pdb, and last STEM_relaxation.json.

    name  of the entry; by default the stem

    B-factors, which are pLDDT where it was predicted, chains and numbers are those of the file; what is no protein in
    it is left out.

    Raises UserError for a file that cannot be read, for residues without atoms, and for what is none of the twenty.
    """
    chains = read_structure(path)
    if is_mmcif(path):
        _check_complete(path)
    found = relax(chains, minimizer, limit_s, tell, drawn_apart)
    title = f"{_title(path)}, relaxed ({found.method})"
    one = Folded(
        "".join(chain.sequence for chain in found.chains),
        np.concatenate([chain.positions for chain in found.chains]),
        np.concatenate([chain.mask for chain in found.chains]),
        np.concatenate([chain.b_factors for chain in found.chains]),
        None,
        None,
        None,
        tuple(map(len, found.chains)) if len(found.chains) > 1 else (),
    )
    with replacing(folder / f"{stem}_relaxed.cif") as aside:
        write_mmcif(aside, one, name or stem, title, found.atoms, _authors(found.chains))
    if pdb and fits_pdb(one, len(found.atoms)):
        with replacing(folder / f"{stem}_relaxed.pdb") as aside:
            write_pdb(aside, one, title, found.atoms)
    replace_file(folder / f"{stem}_relaxation.json", json.dumps(found.report(), indent=1).encode() + b"\n")
    return found


def _check_complete(path: Path) -> None:
    """Raises UserError for a residue of the sequence without atoms: a force field knows no half of a chain."""
    for entry in read_entries(path):
        there = entry.mask.any(1)
        if not there.all():
            number = int(np.argmin(there))
            raise UserError(
                f"{path}: residue {number + 1} ({entry.sequence[number]}) of chain {entry.name.rpartition('_')[2]} "
                "has no atoms, and cannot be relaxed; give a structure whose residues all have atoms"
            )


def _title(path: Path) -> str:
    """As the file says it; without one its name."""
    title = read_mmcif(path).get("_struct.title", ["?"])[0] if is_mmcif(path) else "?"
    return title if title.strip("?. ") else unpacked_name(path).stem


def _authors(chains: tuple[Chain, ...]) -> list[tuple[str, str, str]]:
    """Of each residue its chain's name, its number and its insertion code, as the file has them."""
    found = []
    for chain in chains:
        for number in chain.numbers:
            digits = re.match(r"-?\d*", number)
            assert digits is not None
            found.append((chain.name.strip() or "A", digits[0] or "?", number[digits.end() :] or "?"))
    return found


def said(found: Relaxed) -> str:
    """One line for the user."""
    rounds = f"{len(found.rounds)} round{'s' if len(found.rounds) != 1 else ''}, {found.seconds:.1f} s"
    before, after = len(found.violations_before), len(found.violations_after)
    text = f"{found.method}, {rounds}; residues with violations {before} -> {after}, RMSD {found.rmsd:.2f} Å"
    if found.rounds:
        text += f", {_energy(found.rounds[0].energy_before)} -> {_energy(found.rounds[-1].energy_after)} kcal/mol"
    if found.drawn_apart:
        text += "; atoms that lay on each other were drawn apart first"
    if not found.rounds:
        return f"{text}; the limit of time passed before the first round"
    return f"{text}; stopped by the limit of time" if found.cut_short else text


def _energy(value: float) -> str:
    return f"{value:,.0f}" if abs(value) < 1e7 else f"{value:.0e}"
