"""AlphaFold's relaxation (Jumper et al. 2021, supplement, 1.8.6), whichever minimizer does its rounds.

    1. every heavy atom is held where it was predicted by a spring; the energy is minimized
    2. while residues violate stereochemistry, and at most three times: the same from where the atoms are now, and the
       residues that violated it in any round before are held no longer

Other than there a round ends also at a plateau of its energy, and all of them together at a limit of time: then the
best that was reached is the result, and the report says so. Where the limit passes before the first round, that is the
structure as it was given, with its missing atoms if the minimizer had placed them, and there are no rounds. Where atoms
lie on each other, so that a force field's energy is no number, they are drawn apart before the first round, which the
report says, too; where the limit passes then, the result is how far they came.

Shapes: N residues, A = 14 atoms.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch

from apps.fold.features.structures import Chain
from apps.fold.model import residues
from apps.fold.output.files import Atom
from apps.fold.stereochemistry import Stereochemistry
from core.config import UserError

MAX_ROUNDS = 3
STIFFNESS = 10.0  # of the springs, kcal/mol/Angstrom^2
_BOND_REACH = 2.5  # Angstrom between C and N, beyond which residues whose numbers are not consecutive are not bonded
_BUSY_S, _BUSY = 2.0, 0.05  # of a limit at most, for when the machine is busy with something else at the end

End = Literal["converged", "plateau", "limit of time"]
Clock = Callable[[], float]
"""Tells the time in seconds, from any moment on."""
Tell = Callable[[str], None]
"""Is told how far a minimization is, now and then."""


class OutOfTime(Exception):
    """A limit of time has passed."""


class Limit:
    """A limit of time: `seconds` from now on, by the clock."""

    def __init__(self, seconds: float, clock: Clock = time.monotonic):
        self.clock, self._end = clock, clock() + seconds

    def passed(self, ahead: float = 0.0) -> bool:
        """Whether it has, or will have in so many seconds."""
        return self.clock() + ahead >= self._end

    def left(self) -> float:
        """Seconds until then, 0 where it has passed."""
        return max(0.0, self._end - self.clock())

    def check(self) -> None:
        """Raises OutOfTime where it has passed."""
        if self.passed():
            raise OutOfTime

    def keep(self, seconds: float) -> None:
        """Keep so many seconds of it for what comes at the end."""
        self._end -= seconds


@dataclass(frozen=True)
class Structure:
    """Chains one behind the other.

    aatype_N, atoms_NA3 in Angstrom (float64), exists_NA
    follows_N  whether a residue is bonded to the one before it; chain_N its chain, from 0
    """

    aatype_N: np.ndarray
    atoms_NA3: np.ndarray
    exists_NA: np.ndarray
    follows_N: np.ndarray
    chain_N: np.ndarray


@dataclass(frozen=True)
class Round:
    """A minimization: energies in kcal/mol with those of the springs, its iterations, and why it ended."""

    energy_before: float
    energy_after: float
    iterations: int
    end: End


class Unstable(UserError):
    """Atoms lie on each other, and the energy is no number."""


class Minimizer(Protocol):
    """Keeps a structure's atoms and moves them; raises Unstable where they lie on each other.

    It is made of a structure and a limit, and raises OutOfTime where that passes before it is.

    method  its name, for reports
    minimize(held_N, limit, tell)  moves them, those of residues of held_N held where they are now; ends by the limit
    placed_NA  the atoms that it has: all, or those that were given
    positions()  [N, A, 3] in Angstrom
    atoms()  all that it has, hydrogens too, by residues
    """

    method: str
    placed_NA: np.ndarray

    def minimize(self, held_N: np.ndarray, limit: Limit, tell: Tell) -> Round: ...

    def positions(self) -> np.ndarray: ...

    def atoms(self) -> list[Atom]: ...


@dataclass(frozen=True)
class Relaxed:
    """The result.  chains with the atoms moved; violations before and after: numbers of residues, from 0; rmsd in
    Angstrom over the heavy atoms that were there; drawn_apart: whether atoms lay on each other, and moved first."""

    chains: tuple[Chain, ...]
    atoms: tuple[Atom, ...]
    method: str
    rounds: tuple[Round, ...]
    violations_before: tuple[int, ...]
    violations_after: tuple[int, ...]
    rmsd: float
    seconds: float
    drawn_apart: bool = False

    @property
    def cut_short(self) -> bool:
        return not self.rounds or self.rounds[-1].end == "limit of time"

    def report(self) -> dict[str, Any]:
        """For a json file."""
        rounds = [
            {
                "energy_before_kcal_mol": round(one.energy_before, 3),
                "energy_after_kcal_mol": round(one.energy_after, 3),
                "iterations": one.iterations,
                "end": one.end,
            }
            for one in self.rounds
        ]
        numbers = [(chain.name, number) for chain in self.chains for number in chain.numbers]
        return {
            "method": self.method,
            "drawn_apart": self.drawn_apart,
            "rounds": rounds,
            "cut_short": self.cut_short,
            "violating_residues_before": len(self.violations_before),
            "violating_residues_after": len(self.violations_after),
            "still_violating": [" ".join(numbers[row]) for row in self.violations_after],
            "rmsd": round(self.rmsd, 4),
            "seconds": round(self.seconds, 3),
        }


def relax(
    chains: Sequence[Chain],
    minimizer: Callable[[Structure, Limit], Minimizer],
    limit_s: float,
    tell: Tell = lambda text: None,
    drawn_apart: Callable[[Structure, Limit], tuple[Structure, bool]] | None = None,
    clock: Clock = time.monotonic,
) -> Relaxed:
    """Chains relaxed, in at most limit_s seconds.

    A step ends before the limit where it takes no longer than the longest one before it: so an iteration, a look at
    violations. What takes long to make a minimizer (Amber: placing atoms) is ended at the limit.

    drawn_apart(structure, limit)  a structure to begin with where the minimizer finds the given one Unstable, and
                                   whether it was done in time

    Raises UserError for a residue that is none of the twenty amino acids, and for what the minimizer cannot take.
    """
    begun, limit = clock(), Limit(limit_s, clock)
    structure = structure_of(chains)
    rules = Stereochemistry(structure.aatype_N, structure.exists_NA, structure.follows_N)
    before = rules.violating(torch.from_numpy(structure.atoms_NA3))
    limit.keep(
        2 * (clock() - begun) + min(_BUSY_S, _BUSY * limit_s)
    )  # to look once more behind a round, and at the end
    moving, rounds, at, moved_before = _Given(structure), [], clock(), False
    try:
        with suppress(OutOfTime):
            moving = minimizer(structure, limit)
            rounds = _rounds(moving, structure, limit, tell)
    except Unstable:
        if drawn_apart is None:
            raise
        tell("drawing atoms apart that lie on each other")
        made_s = clock() - at  # what it takes to make a minimizer, at most
        with suppress(OutOfTime):
            apart, done = drawn_apart(structure, limit)
            moving, moved_before = _Given(apart), True
            if done and not limit.passed(made_s):
                moving = minimizer(apart, limit)
                rounds = _rounds(moving, structure, limit, tell)
    rules = Stereochemistry(structure.aatype_N, moving.placed_NA, structure.follows_N)
    final = moving.positions()
    there = structure.exists_NA.astype(bool)
    shift = ((final - structure.atoms_NA3)[there] ** 2).sum(-1)
    return Relaxed(
        _moved(chains, final, moving.placed_NA, structure.aatype_N),
        tuple(moving.atoms()),
        moving.method,
        tuple(rounds),
        tuple(np.nonzero(before)[0].tolist()),
        tuple(np.nonzero(rules.violating(torch.from_numpy(final)))[0].tolist()),
        float(np.sqrt(shift.mean())),
        clock() - begun,
        moved_before,
    )


def _rounds(moving: Minimizer, structure: Structure, limit: Limit, tell: Tell) -> list[Round]:
    rules = Stereochemistry(structure.aatype_N, moving.placed_NA, structure.follows_N)
    rounds: list[Round] = []
    violating, free = np.ones(len(structure.aatype_N), bool), np.zeros(len(structure.aatype_N), bool)
    while violating.any() and len(rounds) < MAX_ROUNDS and not limit.passed():
        rounds.append(moving.minimize(~free, limit, _numbered(tell, len(rounds) + 1)))
        if rounds[-1].end == "limit of time":
            break
        violating = rules.violating(torch.from_numpy(moving.positions()))
        free |= violating
    return rounds


class _Given:
    """A minimizer that was not made in time: the structure as it is."""

    method = "none"

    def __init__(self, structure: Structure):
        self._structure, self.placed_NA = structure, structure.exists_NA

    def minimize(self, held_N: np.ndarray, limit: Limit, tell: Tell) -> Round:
        raise OutOfTime

    def positions(self) -> np.ndarray:
        return self._structure.atoms_NA3

    def atoms(self) -> list[Atom]:
        return heavy_atoms(self._structure, self._structure.atoms_NA3)


def heavy_atoms(structure: Structure, atoms_NA3: np.ndarray) -> list[Atom]:
    """Those that a structure has, where they are now."""
    return [
        Atom(row, name, atoms_NA3[row, slot])
        for row, restype in enumerate(structure.aatype_N)
        for slot, name in enumerate(residues.atoms_of(residues.RESTYPES[restype]))
        if structure.exists_NA[row, slot]
    ]


def _numbered(tell: Tell, number: int) -> Tell:
    return lambda text: tell(f"round {number}, {text}")


def structure_of(chains: Sequence[Chain]) -> Structure:
    """Raises UserError for a residue that is none of the twenty amino acids."""
    for chain in chains:
        if "X" in chain.sequence:
            number = chain.numbers[chain.sequence.index("X")]
            raise UserError(
                f"residue {number} of chain {chain.name} is none of the twenty amino acids, and cannot be relaxed; "
                "leave it out, or replace it"
            )
    aatype = np.array([residues.RESTYPES.index(letter) for chain in chains for letter in chain.sequence])
    slots = residues.ATOM14_TO_ATOM37[aatype]
    positions = np.concatenate([chain.positions for chain in chains]).astype(np.float64)
    mask = np.concatenate([chain.mask for chain in chains])
    exists = np.take_along_axis(mask, slots, 1) * residues.ATOM14_MASK[aatype]
    atoms = np.take_along_axis(positions, slots[..., None], 1) * exists[..., None]
    chain_N = np.repeat(np.arange(len(chains)), [len(chain) for chain in chains])
    follows = np.concatenate([_following(chain) for chain in chains])
    return Structure(aatype, atoms, exists, follows, chain_N)


def _following(chain: Chain) -> np.ndarray:
    """bool[N]: residues that are bonded to the one before: those that the numbers say are next, or that are near."""
    follows = np.ones(len(chain), bool)
    follows[0] = False
    for row in range(1, len(chain)):
        before, number = chain.numbers[row - 1], chain.numbers[row]
        consecutive = before.lstrip("-").isdecimal() and number == str(int(before) + 1)
        known = chain.mask[row - 1, residues.C] * chain.mask[row, residues.N]
        apart = np.linalg.norm(chain.positions[row - 1, residues.C] - chain.positions[row, residues.N])
        follows[row] = consecutive or (known > 0 and apart < _BOND_REACH)
    return follows


def _moved(
    chains: Sequence[Chain], atoms_NA3: np.ndarray, placed_NA: np.ndarray, aatype_N: np.ndarray
) -> tuple[Chain, ...]:
    """The chains with the atoms of atom14 where they are now, and no others."""
    to14, has = residues.ATOM37_TO_ATOM14[aatype_N], residues.ATOM37_MASK[aatype_N]
    mask = (np.take_along_axis(placed_NA, to14, 1) * has).astype(np.float32)
    positions = (np.take_along_axis(atoms_NA3, to14[..., None], 1) * mask[..., None]).astype(np.float32)
    ends = np.cumsum([len(chain) for chain in chains])
    return tuple(
        replace(chain, positions=positions[end - len(chain) : end], mask=mask[end - len(chain) : end])
        for chain, end in zip(chains, ends)
    )
