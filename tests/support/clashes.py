"""Structures with clashes that are planted, for the tests of relaxation."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from apps.fold.features.structures import Chain, read_structure
from apps.fold.model import residues
from apps.fold.output.confidence import Folded
from apps.fold.output.files import write_pdb
from apps.fold.relaxation.protocol import structure_of
from apps.fold.stereochemistry import Stereochemistry
from apps.fold.toy import STRUCTURES

_BACKBONE = (residues.N, residues.CA, residues.C, residues.CB, residues.O, residues.ATOM37.index("OXT"))


def chain(name: str) -> Chain:
    """The first chain of a structure that the package carries."""
    return read_structure(STRUCTURES / name)[0]


def rules_of(chains: list[Chain]) -> tuple[Stereochemistry, torch.Tensor]:
    """What the chains have to obey, and their atoms [N, 14, 3]."""
    structure = structure_of(chains)
    rules = Stereochemistry(structure.aatype_N, structure.exists_NA, structure.follows_N)
    return rules, torch.from_numpy(structure.atoms_NA3)


def num_clashes(chains: list[Chain]) -> int:
    rules, atoms = rules_of(chains)
    return rules.clashes(atoms, 0.0).pairs.shape[1]


def turned(chain: Chain, row: int, degrees: float) -> Chain:
    """A residue's side chain turned about CA-CB."""
    positions = chain.positions.copy()
    axis = positions[row, residues.CB] - positions[row, residues.CA]
    axis /= np.linalg.norm(axis)
    side = [slot for slot in range(residues.NUM_ATOM37) if chain.mask[row, slot] and slot not in _BACKBONE]
    arms, angle = positions[row, side] - positions[row, residues.CB], np.radians(degrees)
    along = axis * (arms @ axis)[:, None] * (1 - np.cos(angle))
    positions[row, side] = (
        positions[row, residues.CB] + arms * np.cos(angle) + np.cross(axis, arms) * np.sin(angle) + along
    )
    return replace(chain, positions=positions)


def clashing(chain: Chain, seed: int) -> Chain:
    """A side chain, the first in a random order for which that is possible, turned into others."""
    for row in np.random.default_rng(seed).permutation(len(chain)).tolist():
        worst = max((turned(chain, row, degrees) for degrees in range(30, 360, 30)), key=lambda one: num_clashes([one]))
        if num_clashes([worst]) > num_clashes([chain]) + 1:
            return worst
    raise AssertionError("no side chain clashes")


def one_chain_pdb(chain: Chain, path: Path) -> str:
    """Its text as PDB."""
    one = Folded(chain.sequence, chain.positions, chain.mask, chain.b_factors, None, None, None)
    write_pdb(path, one, "x")
    return path.read_text()


class Ticking:
    """A clock that goes on by a second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now
