"""mmCIF and PDB files as chains of residues in atom37, by biopython.

Of alternate locations the one with the highest occupancy is taken, also of several residues in one place; of several
models the first. Numbers of residues in a PDB file may go on behind 9999 in hybrid-36 (A000). Residues with an
insertion code are residues of their own. Modified amino acids count as their parents (selenomethionine as methionine,
its selenium as the sulfur), others as X; atoms that are missing are masked.
"""

import io
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from apps.fold.features.text import PACKED_SUFFIXES, read_text, unpacked_name
from apps.fold.model import residues
from core.config import UserError

ATOM_SLOTS = {name: slot for slot, name in enumerate(residues.ATOM37)}

# PDB files: records of atoms; those of which one stands before the atoms of a file that programs or archives write,
# and those of which one then stands behind them; columns where an atom's coordinates, B-factor and element end.
_ATOMS = {"ATOM", "HETATM"}
_HEADERS = {"HEADER", "TITLE", "CRYST1", "REMARK", "MODEL"}
_CLOSING = {"TER", "END", "ENDMDL", "MASTER", "CONECT"}
_COORDINATES_END, _B_FACTOR_END, _ELEMENT_END = 54, 66, 78
_NUMBER_BEGIN, _CODE = 22, 26  # columns, from 0, of a residue's number and of its insertion code
_HYBRID_36 = re.compile("[A-Z][0-9A-Z]{3}|[a-z][0-9a-z]{3}")
_THOUSANDS = 0xF0000  # a letter that no file has, from which on insertion codes say what of a number does not fit


@dataclass(frozen=True)
class Chain:
    """A chain of N residues, their numbers as in the file.

    positions[N, 37, 3] in Angstrom, mask[N, 37], b_factors[N] of CA
    """

    name: str
    sequence: str
    numbers: tuple[str, ...]
    positions: np.ndarray
    mask: np.ndarray
    b_factors: np.ndarray

    def __len__(self) -> int:
        return len(self.sequence)


@dataclass
class _Residue:
    """A residue as a file has it: name of three letters, number, atom -> (position, B-factor); whether HETATM."""

    name: str
    number: str
    atoms: dict[str, tuple[np.ndarray, float]]
    hetero: bool


def structure_of(entry: str, folder: Path) -> Path:
    """The path of an entry's mmCIF file in a folder of them: 1abc.cif, or ab/1abc.cif.

    Raises UserError where there is none.
    """
    for inside in (folder, folder / entry[1:3]):
        for name in (f"{entry}.cif", f"{entry.upper()}.cif", f"{entry}.mmcif"):
            for packed in ("", *PACKED_SUFFIXES):
                if (inside / f"{name}{packed}").is_file():
                    return inside / f"{name}{packed}"
    raise UserError(f"{folder} holds no {entry}.cif")


def read_structure(path: Path, *, hetero: bool = True) -> list[Chain]:
    """The protein chains of an mmCIF (.cif, .mmcif) or PDB file.

    hetero  with residues that the file calls HETATM, as modified amino acids mostly are

    Raises UserError when the file cannot be read or holds no protein.
    """
    found = _mmcif_residues(read_mmcif(path), path) if is_mmcif(path) else _pdb_residues(path)
    if not hetero:
        found = {name: [residue for residue in rows if not residue.hetero] for name, rows in found.items()}
    chains = [chain for name, rows in found.items() if (chain := _chain(name, rows, path)) is not None]
    if not chains:
        raise UserError(f"{path} holds no protein chain")
    return chains


def is_mmcif(path: Path) -> bool:
    return unpacked_name(path).suffix in (".cif", ".mmcif")


def read_structure_text(path: Path) -> str:
    """Raises UserError where there is none."""
    if not path.is_file():
        raise UserError(f"there is no structure at {path}; give an mmCIF or PDB file")
    return read_text(path, "an mmCIF or PDB file", otherwise="latin-1")


def read_mmcif(path: Path) -> dict[str, list[str]]:
    """Every column of an mmCIF file as text.  Raises UserError for a file that is none, or was cut off."""
    from Bio.PDB.MMCIF2Dict import MMCIF2Dict

    text = read_structure_text(path)
    try:
        content = dict(MMCIF2Dict(io.StringIO(text)))
    except Exception as error:  # the parser raises whatever a damaged line leads to
        raise _unreadable(path, str(error).splitlines()[0] if str(error) else type(error).__name__) from error
    lengths = {len(column) for name, column in content.items() if name.startswith("_atom_site.")}
    if len(lengths) > 1:
        raise _unreadable(path, f"its last atom, number {max(lengths)}, is cut off")
    _check_ends(text, content, path)
    return content


def _check_ends(text: str, content: dict[str, list[str]], path: Path) -> None:
    """Raises UserError for an mmCIF file that was cut off at the end of a line.

    The format has no last line. Those of the PDB, of AlphaFold and of most programs end every category with a line
    '#'; where there are none, the chains that the file announces have to be there.
    """
    lines = text.rstrip().splitlines()
    if any(line.rstrip() == "#" for line in lines):
        if lines[-1].rstrip() != "#":
            raise _unreadable(path, f"it is cut off at line {len(lines)}: its last category lacks the closing line '#'")
        return
    chains = set(content.get("_atom_site.label_asym_id", ()))
    missing = [name for name in content.get("_struct_asym.id", ()) if chains and name not in chains]
    if missing:
        raise _unreadable(path, f"it is cut off: it announces chain {missing[0]}, of which it holds no atom")


def _unreadable(path: Path, reason: object) -> UserError:
    return UserError(f"{path} cannot be read as a structure ({reason}); give a whole mmCIF or PDB file")


def check_finite(positions: np.ndarray, path: Path, chain: str) -> None:
    """Raises UserError for coordinates that are no finite numbers: they would spread through all that is computed."""
    if not np.isfinite(positions).all():
        raise _unreadable(path, f"chain {chain} has coordinates that are not finite")


def _mmcif_residues(content: dict[str, list[str]], path: Path) -> dict[str, list[_Residue]]:
    """chain -> residues of the first model, by the authors' names and numbers, where the file has these.

    Where several residues were seen in one place, as alternate locations, the one with the highest occupancy is taken.
    """

    if "_atom_site.label_atom_id" not in content:
        raise _unreadable(path, "it lacks _atom_site.label_atom_id")
    atom_names = content["_atom_site.label_atom_id"]

    def column(*names: str, absent: str) -> list[str]:
        found = (content[f"_atom_site.{name}"] for name in names if f"_atom_site.{name}" in content)
        return next(found, [absent] * len(atom_names))

    models = column("pdbx_PDB_model_num", absent="1")
    chains, part = column("auth_asym_id", "label_asym_id", absent="A"), column("label_asym_id", absent="A")
    numbers, codes = column("auth_seq_id", "label_seq_id", absent="?"), column("pdbx_PDB_ins_code", absent="?")
    kinds, shares = column("label_comp_id", absent="?"), column("occupancy", absent="1")
    records = column("group_PDB", absent="ATOM")
    b_factors, axes = column("B_iso_or_equiv", absent="0"), [column(f"Cartn_{axis}", absent="?") for axis in "xyz"]
    places: dict[tuple[str, ...], dict[str, list[int]]] = {}  # a residue's place -> its kinds -> rows
    for row, model in enumerate(models):
        if model == models[0]:
            place = (chains[row], part[row], numbers[row], codes[row])
            places.setdefault(place, {}).setdefault(kinds[row], []).append(row)
    found: dict[str, list[_Residue]] = {}
    for (chain, _, number, code), seen in places.items():
        kind = max(seen, key=lambda kind: max(number_of(shares[row]) for row in seen[kind]))
        rows = seen[kind]
        atoms: dict[str, tuple[np.ndarray, float]] = {}
        try:
            for row in sorted(rows, key=lambda row: -number_of(shares[row])):
                position = np.array([float(axis[row]) for axis in axes])
                atoms.setdefault(atom_names[row], (position, number_of(b_factors[row])))
        except ValueError as error:
            raise _unreadable(path, f"residue {number} of chain {chain}: {error}") from error
        found.setdefault(chain, []).append(
            _Residue(kind, number + code.strip("?."), atoms, records[rows[0]] == "HETATM")
        )
    return found


def number_of(text: str) -> float:
    """0 for what is none, as `?` is."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def _pdb_residues(path: Path) -> dict[str, list[_Residue]]:
    from Bio.PDB.PDBParser import PDBParser

    text = read_structure_text(path)
    _check_lines(text, path)
    text = _with_decimal_numbers(text, path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read: Any = PDBParser(QUIET=True).get_structure(path.stem, io.StringIO(text))
            model: Any = next(iter(read), ())
    except Exception as error:  # the parser raises whatever a damaged line leads to
        raise _unreadable(path, str(error).splitlines()[0] if str(error) else type(error).__name__) from error
    found: dict[str, list[_Residue]] = {}
    for chain in model:
        for residue in chain:
            if residue.is_disordered() == 2:  # several residues in one place
                residue = max(residue.disordered_get_list(), key=lambda r: max(a.get_occupancy() or 0 for a in r))
            atoms = {atom.get_name(): (atom.get_coord(), atom.get_bfactor()) for atom in residue}
            number, code = residue.id[1:]
            if ord(code) >= _THOUSANDS:
                tens_of_thousands, code = divmod(ord(code) - _THOUSANDS, 128)
                number, code = number + 10_000 * tens_of_thousands, chr(code)
            number = f"{number}{code.strip()}"
            found.setdefault(chain.id, []).append(
                _Residue(residue.get_resname().strip(), number, atoms, residue.id[0] != " ")
            )
    return found


def _with_decimal_numbers(text: str, path: Path) -> str:
    """The file with numbers in hybrid-36 as the parser reads them: four digits, and an insertion code for the others.

    Raises UserError for a number that is none.
    """
    lines = text.split("\n")
    for row, line in enumerate(lines):
        given = line[_NUMBER_BEGIN:_CODE]
        if line[:6].rstrip() not in _ATOMS or given.strip().removeprefix("-").isdecimal():
            continue
        if not _HYBRID_36.fullmatch(given):
            raise _unreadable(
                path,
                f"its line {row + 1}: {given!r} is no number of a residue, which are whole, -999 to 9999, and "
                "behind that hybrid-36, A000 to zzzz",
            )
        first = 10_000 - 10 * 36**3 if given[0].isupper() else 10_000 + 16 * 36**3
        tens_of_thousands, number = divmod(int(given, 36) + first, 10_000)
        code = chr(_THOUSANDS + 128 * tens_of_thousands + ord(line[_CODE]) % 128)
        lines[row] = f"{line[:_NUMBER_BEGIN]}{number:4}{code}{line[_CODE + 1 :]}"
    return "\n".join(lines)


def _check_lines(text: str, path: Path) -> None:
    """Raises UserError for a PDB file that was cut off, within a line or at its end.

    Atoms alone, as `grep ATOM` leaves them, are taken as they are; a file with a header says by its records (TER, END
    and what stands behind the atoms) that the atoms are all there, and one with SEQRES, of the PDB itself, by END.
    """
    lines = text.splitlines()
    records = [line[:6].rstrip() for line in lines]
    atoms = [number for number, record in enumerate(records) if record in _ATOMS]
    if not atoms:
        return
    widths = [len(lines[number].rstrip()) for number in atoms]
    of_last = min(max(widths), _B_FACTOR_END if text.endswith("\n") else _ELEMENT_END)
    for number, width in zip(atoms, widths):
        if width < (of_last if number == atoms[-1] == len(lines) - 1 else _COORDINATES_END):
            raise _unreadable(path, f"its line {number + 1}, an atom, is cut off at column {width}")
    if records[-1] not in _ATOMS and any(name.startswith(records[-1] or "-") for name in _ATOMS):
        raise _unreadable(path, f"its last line, {lines[-1]!r}, is cut off")
    behind = {record for record in records[atoms[-1] + 1 :] if record}
    if "SEQRES" in records and not behind & {"END"}:
        raise _unreadable(path, f"it is cut off at line {len(lines)}: it lacks the record END")
    if set(records[: atoms[0]]) & _HEADERS and not behind & _CLOSING:
        raise _unreadable(path, f"it is cut off at line {len(lines)}: no TER or END follows its last atom")


def _chain(name: str, rows: list[_Residue], path: Path) -> Chain | None:
    backbone = ("N", "CA", "C")
    found = [
        residue
        for residue in rows
        if all(atom in residue.atoms for atom in backbone)
        or (one_letter(residue.name) is not None and any(atom in residue.atoms for atom in backbone))
    ]
    if not found:
        return None
    positions = np.zeros((len(found), residues.NUM_ATOM37, 3), np.float32)
    mask = np.zeros((len(found), residues.NUM_ATOM37), np.float32)
    b_factors = np.zeros(len(found), np.float32)
    sequence = ""
    for row, residue in enumerate(found):
        sequence += one_letter(residue.name) or "X"
        for atom, (position, b_factor) in residue.atoms.items():
            slot = ATOM_SLOTS.get("SD" if atom == "SE" and sequence[-1] == "M" else atom)
            if slot is not None:
                positions[row, slot], mask[row, slot] = position, 1
            if atom == "CA":
                b_factors[row] = b_factor
        if sequence[-1] == "R":
            order_arginine(positions[row], mask[row])
    check_finite(positions, path, name)
    return Chain(name, sequence, tuple(residue.number for residue in found), positions, mask, b_factors)


def one_letter(three: str) -> str | None:
    """The letter of an amino acid, or of a modified one's parent; X for others with a letter, None for what is none."""
    from Bio.Data.PDBData import protein_letters_3to1_extended as letters

    letter = letters.get(three)
    return letter if letter is None or letter in residues.THREE_LETTERS else "X"


def order_arginine(positions: np.ndarray, mask: np.ndarray) -> None:
    """Swap NH1 and NH2 where NH2 is nearer to CD: by convention NH1 is; some files have it the other way."""
    cd, first, second = (ATOM_SLOTS[name] for name in ("CD", "NH1", "NH2"))
    if mask[[cd, first, second]].all():
        near, far = (np.linalg.norm(positions[slot] - positions[cd]) for slot in (first, second))
        if near > far:
            positions[[first, second]] = positions[[second, first]]
