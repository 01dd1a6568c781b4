"""Residues and their atoms: names, indices, rigid groups, ideal geometry. Plain data, as numpy arrays.

A residue type is a number 0..19 in the order of `RESTYPES` (alphabetical by three-letter code), 20 for X (unknown) and,
in alignments, 21 for a gap and 22 for a masked letter. Atoms have two layouts (Jumper et al. 2021, supplement, 1.2.9
and 1.8.4):

    atom37  one slot for each of the 37 heavy-atom names that occur, `ATOM37`
    atom14  the atoms of the residue itself, at most 14, in a fixed order of its own

Every heavy atom moves with one of eight rigid groups (supplement, table 2): 0 the backbone, 1 pre-omega and 2 phi
(hydrogens only, so empty), 3 psi (the oxygen), 4 to 7 chi1 to chi4. `_ATOMS` gives each atom's group and its position
in the group's frame, in Angstrom: the origin is the end of the rotation's axis, x points along the axis, and the atom
that defines the angle lies in the half-plane y > 0. The values are the ideal geometries that AlphaFold was trained
with, so weights only fit these.
"""

import numpy as np

RESTYPES = "ARNDCQEGHILKMFPSTWYV"
UNKNOWN, GAP, MASKED = 20, 21, 22
BACKBONE, PRE_OMEGA, PHI, PSI, CHI1 = 0, 1, 2, 3, 4
NUM_GROUPS, NUM_TORSIONS = 8, 7

_ATOM37 = """
N CA C CB O CG CG1 CG2 OG OG1 SG CD CD1 CD2 ND1 ND2 OD1 OD2 SD CE CE1 CE2 CE3 NE NE1 NE2 OE1 OE2 CH2 NH1 NH2 OH CZ CZ2
CZ3 NZ OXT
"""
ATOM37: list[str] = [*_ATOM37.split()]
N, CA, C, CB, O = range(5)  # of atom37; atom14 begins with N, CA, C, O, CB
NUM_ATOM37, NUM_ATOM14 = 37, 14

# Residue: atom group x y z; …, in the order of atom14.
_ATOMS = """
ALA: N 0 -0.525 1.363 0; CA 0 0 0 0; C 0 1.526 0 0; O 3 0.627 1.062 0; CB 0 -0.529 -0.774 -1.205
ARG: N 0 -0.524 1.362 0; CA 0 0 0 0; C 0 1.525 0 0; O 3 0.626 1.062 0; CB 0 -0.524 -0.778 -1.209; CG 4 0.616 1.39 0;
     CD 5 0.564 1.414 0; NE 6 0.539 1.357 0; CZ 7 0.758 1.093 0; NH1 7 0.206 2.301 0; NH2 7 2.078 0.978 0
ASN: N 0 -0.536 1.357 0; CA 0 0 0 0; C 0 1.526 0 0; O 3 0.625 1.062 0; CB 0 -0.531 -0.787 -1.2; CG 4 0.584 1.399 0;
     OD1 5 0.633 1.059 0; ND2 5 0.593 -1.188 0.001
ASP: N 0 -0.525 1.362 0; CA 0 0 0 0; C 0 1.527 0 0; O 3 0.626 1.062 0; CB 0 -0.526 -0.778 -1.208;
     CG 4 0.593 1.398 0; OD1 5 0.61 1.091 0; OD2 5 0.592 -1.101 -0.003
CYS: N 0 -0.522 1.362 0; CA 0 0 0 0; C 0 1.524 0 0; O 3 0.625 1.062 0; CB 0 -0.519 -0.773 -1.212; SG 4 0.728 1.653 0
GLN: N 0 -0.526 1.361 0; CA 0 0 0 0; C 0 1.526 0 0; O 3 0.626 1.062 0; CB 0 -0.525 -0.779 -1.207;
     CG 4 0.615 1.393 0; CD 5 0.587 1.399 0; OE1 6 0.634 1.06 0; NE2 6 0.593 -1.189 -0.001
GLU: N 0 -0.528 1.361 0; CA 0 0 0 0; C 0 1.526 0 0; O 3 0.626 1.062 0; CB 0 -0.526 -0.781 -1.207;
     CG 4 0.615 1.392 0; CD 5 0.6 1.397 0; OE1 6 0.607 1.095 0; OE2 6 0.589 -1.104 -0.001
GLY: N 0 -0.572 1.337 0; CA 0 0 0 0; C 0 1.517 0 0; O 3 0.626 1.062 0
HIS: N 0 -0.527 1.36 0; CA 0 0 0 0; C 0 1.525 0 0; O 3 0.625 1.063 0; CB 0 -0.525 -0.778 -1.208; CG 4 0.6 1.37 0;
     ND1 5 0.744 1.16 0; CD2 5 0.889 -1.021 0.003; CE1 5 2.03 0.851 0.002; NE2 5 2.145 -0.466 0.004
ILE: N 0 -0.493 1.373 0; CA 0 0 0 0; C 0 1.527 0 0; O 3 0.627 1.062 0; CB 0 -0.536 -0.793 -1.213;
     CG1 4 0.534 1.437 0; CG2 4 0.54 -0.785 -1.199; CD1 5 0.619 1.391 0
LEU: N 0 -0.52 1.363 0; CA 0 0 0 0; C 0 1.525 0 0; O 3 0.625 1.063 0; CB 0 -0.522 -0.773 -1.214; CG 4 0.678 1.371 0;
     CD1 5 0.53 1.43 0; CD2 5 0.535 -0.774 1.2
LYS: N 0 -0.526 1.362 0; CA 0 0 0 0; C 0 1.526 0 0; O 3 0.626 1.062 0; CB 0 -0.524 -0.778 -1.208; CG 4 0.619 1.39 0;
     CD 5 0.559 1.417 0; CE 6 0.56 1.416 0; NZ 7 0.554 1.387 0
MET: N 0 -0.521 1.364 0; CA 0 0 0 0; C 0 1.525 0 0; O 3 0.625 1.062 0; CB 0 -0.523 -0.776 -1.21; CG 4 0.613 1.391 0;
     SD 5 0.703 1.695 0; CE 6 0.32 1.786 0
PHE: N 0 -0.518 1.363 0; CA 0 0 0 0; C 0 1.524 0 0; O 3 0.626 1.062 0; CB 0 -0.525 -0.776 -1.212;
     CG 4 0.607 1.377 0; CD1 5 0.709 1.195 0; CD2 5 0.706 -1.196 0; CE1 5 2.102 1.198 0; CE2 5 2.098 -1.201 0;
     CZ 5 2.794 -0.003 -0.001
PRO: N 0 -0.566 1.351 0; CA 0 0 0 0; C 0 1.527 0 0; O 3 0.621 1.066 0; CB 0 -0.546 -0.611 -1.293;
     CG 4 0.382 1.445 0; CD 5 0.477 1.424 0
SER: N 0 -0.529 1.36 0; CA 0 0 0 0; C 0 1.525 0 0; O 3 0.626 1.062 0; CB 0 -0.518 -0.777 -1.211; OG 4 0.503 1.325 0
THR: N 0 -0.517 1.364 0; CA 0 0 0 0; C 0 1.526 0 0; O 3 0.626 1.062 0; CB 0 -0.516 -0.793 -1.215;
     OG1 4 0.472 1.353 0; CG2 4 0.55 -0.718 -1.228
TRP: N 0 -0.521 1.363 0; CA 0 0 0 0; C 0 1.525 0 0; O 3 0.627 1.062 0; CB 0 -0.523 -0.776 -1.212; CG 4 0.609 1.37 0;
     CD1 5 0.824 1.091 0; CD2 5 0.854 -1.148 -0.005; NE1 5 2.14 0.69 -0.004; CE2 5 2.186 -0.678 -0.007;
     CE3 5 0.622 -2.53 -0.007; CZ2 5 3.283 -1.543 -0.011; CZ3 5 1.715 -3.389 -0.011; CH2 5 3.028 -2.89 -0.013
TYR: N 0 -0.522 1.362 0; CA 0 0 0 0; C 0 1.524 0 0; O 3 0.627 1.062 0; CB 0 -0.522 -0.776 -1.213;
     CG 4 0.607 1.382 0; CD1 5 0.716 1.195 0; CD2 5 0.713 -1.194 -0.001; CE1 5 2.107 1.2 -0.002;
     CE2 5 2.104 -1.201 -0.003; CZ 5 2.791 -0.001 -0.003; OH 5 4.168 -0.002 -0.005
VAL: N 0 -0.494 1.373 0; CA 0 0 0 0; C 0 1.527 0 0; O 3 0.627 1.062 0; CB 0 -0.533 -0.795 -1.213;
     CG1 4 0.54 1.429 0; CG2 4 0.533 -0.776 1.203
"""

# The four atoms of each chi angle beyond N CA CB: chi1 is N CA CB and the first, chi2 CA CB and the first two, ….
_CHI_ATOMS = {
    "ARG": "CG CD NE CZ",
    "ASN": "CG OD1",
    "ASP": "CG OD1",
    "CYS": "SG",
    "GLN": "CG CD OE1",
    "GLU": "CG CD OE1",
    "HIS": "CG ND1",
    "ILE": "CG1 CD1",
    "LEU": "CG CD1",
    "LYS": "CG CD CE NZ",
    "MET": "CG SD CE",
    "PHE": "CG CD1",
    "PRO": "CG CD",
    "SER": "OG",
    "THR": "OG1",
    "TRP": "CG CD1",
    "TYR": "CG CD1",
    "VAL": "CG1",
}

# Atoms whose names may be exchanged, because the residue looks the same turned by pi about its last chi axis.
SWAPS = {
    "ASP": (("OD1", "OD2"),),
    "GLU": (("OE1", "OE2"),),
    "PHE": (("CD1", "CD2"), ("CE1", "CE2")),
    "TYR": (("CD1", "CD2"), ("CE1", "CE2")),
}

# Single letter of an alignment -> residue type. B and Z are taken for the acid, U for cysteine, J and O are unknown.
LETTERS = {letter: index for index, letter in enumerate(RESTYPES)} | {
    "B": RESTYPES.index("D"),
    "Z": RESTYPES.index("E"),
    "U": RESTYPES.index("C"),
    "J": UNKNOWN,
    "O": UNKNOWN,
    "X": UNKNOWN,
    "-": GAP,
}


def _parse() -> dict[str, list[tuple[str, int, tuple[float, ...]]]]:
    residues: dict[str, list[tuple[str, int, tuple[float, ...]]]] = {}
    for entry in _ATOMS.replace("\n     ", " ").strip().splitlines():
        name, _, atoms = entry.partition(": ")
        fields = [atom.split() for atom in atoms.split(";")]
        residues[name] = [(atom, int(group), tuple(map(float, xyz))) for atom, group, *xyz in fields]
    return residues


_RESIDUES = _parse()
THREE_LETTERS = dict(
    zip(
        RESTYPES,
        "ALA ARG ASN ASP CYS GLN GLU GLY HIS ILE LEU LYS MET PHE PRO SER THR TRP TYR VAL".split(),  # noqa: SIM905
        strict=True,
    )
)
ONE_LETTER = {three: one for one, three in THREE_LETTERS.items()}
CHI_ATOMS = {
    name: [["N", "CA", "CB", *atoms.split()][i : i + 4] for i in range(len(atoms.split()))]
    for name, atoms in _CHI_ATOMS.items()
}


def atoms_of(letter: str) -> list[str]:
    """Names of the heavy atoms of a residue, in the order of atom14; none for X."""
    return [atom for atom, _, _ in _RESIDUES[THREE_LETTERS[letter]]] if letter in THREE_LETTERS else []


def _atom_tables() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    to37 = np.zeros((21, NUM_ATOM14), np.int64)
    mask14 = np.zeros((21, NUM_ATOM14), np.float32)
    group14 = np.zeros((21, NUM_ATOM14), np.int64)
    position14 = np.zeros((21, NUM_ATOM14, 3), np.float32)
    for restype, letter in enumerate(RESTYPES):
        for slot, (atom, group, xyz) in enumerate(_RESIDUES[THREE_LETTERS[letter]]):
            to37[restype, slot] = ATOM37.index(atom)
            mask14[restype, slot] = 1
            group14[restype, slot] = group
            position14[restype, slot] = xyz
    return to37, mask14, group14, position14


# Of each residue type (the last is X, without atoms): the atom37 slot of each atom14 slot, whether there is an atom,
# its rigid group, its position in the group's frame.
ATOM14_TO_ATOM37, ATOM14_MASK, ATOM14_GROUP, ATOM14_POSITION = _atom_tables()


def _inverse() -> tuple[np.ndarray, np.ndarray]:
    to14 = np.zeros((21, NUM_ATOM37), np.int64)
    mask37 = np.zeros((21, NUM_ATOM37), np.float32)
    for restype, slot in zip(*np.nonzero(ATOM14_MASK)):
        to14[restype, ATOM14_TO_ATOM37[restype, slot]] = slot
        mask37[restype, ATOM14_TO_ATOM37[restype, slot]] = 1
    return to14, mask37


ATOM37_TO_ATOM14, ATOM37_MASK = _inverse()


def _chi_tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    atoms = np.zeros((21, 4, 4), np.int64)
    mask = np.zeros((21, 4), np.float32)
    periodic = np.zeros((21, 4), np.float32)
    for name, chis in CHI_ATOMS.items():
        restype = RESTYPES.index(ONE_LETTER[name])
        for chi, four in enumerate(chis):
            atoms[restype, chi] = [ATOM37.index(atom) for atom in four]
            mask[restype, chi] = 1
        periodic[restype, len(chis) - 1] = name in SWAPS
    return atoms, mask, periodic


# Of each residue type: the atom37 slots of the four atoms of each chi, whether it has that chi, whether turning it by
# pi changes nothing.
CHI_ATOM37, CHI_MASK, CHI_PI_PERIODIC = _chi_tables()


def _frame(x_axis: np.ndarray, xy_plane: np.ndarray, origin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rotation and translation of a frame with x along `x_axis` and `xy_plane` in the half-plane y > 0."""
    x = x_axis / np.linalg.norm(x_axis)
    y = xy_plane - np.dot(xy_plane, x) * x
    y /= np.linalg.norm(y)
    return np.stack([x, y, np.cross(x, y)], axis=1), origin


def _group_frames() -> tuple[np.ndarray, np.ndarray]:
    """Rotation [21, 8, 3, 3] and translation [21, 8, 3] from each group's frame, its angle being 0, to its parent's.

    The parent of chi2 to chi4 is the chi before; of all others it is the backbone. Groups that a residue lacks are the
    identity.
    """
    rotation = np.tile(np.eye(3), (21, NUM_GROUPS, 1, 1))
    translation = np.zeros((21, NUM_GROUPS, 3))
    for restype, letter in enumerate(RESTYPES):
        name = THREE_LETTERS[letter]
        at = {atom: np.array(xyz) for atom, _, xyz in _RESIDUES[name]}
        frames = {
            PHI: _frame(at["N"] - at["CA"], np.array([1.0, 0, 0]), at["N"]),
            PSI: _frame(at["C"] - at["CA"], at["CA"] - at["N"], at["C"]),
        }
        for chi, (first, second, third, _) in enumerate(CHI_ATOMS.get(name, [])):
            if chi == 0:
                frames[CHI1] = _frame(at[third] - at[second], at[first] - at[second], at[third])
            else:
                frames[CHI1 + chi] = _frame(at[third], np.array([-1.0, 0, 0]), at[third])
        for group, (turn, shift) in frames.items():
            rotation[restype, group], translation[restype, group] = turn, shift
    return rotation.astype(np.float32), translation.astype(np.float32)


GROUP_ROTATION, GROUP_TRANSLATION = _group_frames()
