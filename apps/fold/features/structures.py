"""mmCIF and PDB files as chains of residues in atom37, by biopython.

Of alternate locations the one with the highest occupancy is taken; of several models the first. Residues with an
insertion code are residues of their own. Modified amino acids count as their parents (selenomethionine as methionine,
its selenium as the sulfur), others as X; atoms that are missing are masked.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from apps.fold.model import residues
from core.config import UserError

ATOM_SLOTS = {name: slot for slot, name in enumerate(residues.ATOM37)}


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


def read_structure(path: Path) -> list[Chain]:
    """The protein chains of an mmCIF (.cif, .mmcif) or PDB file.

    Raises UserError when the file cannot be read or holds no protein.
    """
    from Bio.PDB.MMCIFParser import MMCIFParser
    from Bio.PDB.PDBParser import PDBParser

    if not path.is_file():
        raise UserError(f"there is no structure at {path}; give an mmCIF or PDB file")
    parser = MMCIFParser(QUIET=True) if path.suffix in (".cif", ".mmcif") else PDBParser(QUIET=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = next(iter(parser.get_structure(path.stem, str(path))))
    except Exception as error:  # the parsers raise whatever a damaged line leads to
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} cannot be read as a structure ({reason}); give an mmCIF or PDB file") from error
    chains = [chain for chain in map(_chain, model) if chain is not None]
    if not chains:
        raise UserError(f"{path} holds no protein chain")
    return chains


def _chain(chain) -> Chain | None:
    from Bio.Data.PDBData import protein_letters_3to1_extended as letters

    found = [residue for residue in chain if residue.get_resname().strip() in letters or _is_peptide(residue)]
    found = [residue for residue in found if "CA" in residue or "N" in residue or "C" in residue]
    if not found:
        return None
    positions = np.zeros((len(found), residues.NUM_ATOM37, 3), np.float32)
    mask = np.zeros((len(found), residues.NUM_ATOM37), np.float32)
    b_factors = np.zeros(len(found), np.float32)
    sequence, numbers = [], []
    for row, residue in enumerate(found):
        letter = letters.get(residue.get_resname().strip(), "X")
        sequence.append(letter if letter in residues.THREE_LETTERS else "X")
        numbers.append(f"{residue.id[1]}{residue.id[2].strip()}")
        for atom in residue:
            name = atom.get_name()
            if name == "SE" and sequence[-1] == "M":
                name = "SD"
            if name in ATOM_SLOTS:
                positions[row, ATOM_SLOTS[name]] = atom.get_coord()
                mask[row, ATOM_SLOTS[name]] = 1
            if name == "CA":
                b_factors[row] = atom.get_bfactor()
        if sequence[-1] == "R":
            order_arginine(positions[row], mask[row])
    return Chain(chain.id, "".join(sequence), tuple(numbers), positions, mask, b_factors)


def _is_peptide(residue) -> bool:
    return residue.id[0] != "W" and all(name in residue for name in ("N", "CA", "C"))


def order_arginine(positions: np.ndarray, mask: np.ndarray) -> None:
    """By convention NH1 is the nearer one to CD; some files have it the other way."""
    cd, first, second = (ATOM_SLOTS[name] for name in ("CD", "NH1", "NH2"))
    if mask[[cd, first, second]].all():
        near, far = (np.linalg.norm(positions[slot] - positions[cd]) for slot in (first, second))
        if near > far:
            positions[[first, second]] = positions[[second, first]]
