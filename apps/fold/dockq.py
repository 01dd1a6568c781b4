"""DockQ, the quality of a complex's interfaces (Basu and Wallner 2016; Mirabello and Wallner 2024), as version 2.1.3.

1. chains correspond whose aligned sequences differ in no letter; gaps are allowed. Of chains that are equal all
   permutations are tried, and the one with the greatest sum over interfaces is taken
2. an interface is a pair of the reference's chains with residues in contact: heavy atoms nearer than 5 Angstrom.
   Fnat is the share of these contacts that the prediction has
3. iRMSD is the RMSD of the backbone (N, CA, C, O) of residues with a heavy atom within 10 Angstrom of the other chain,
   superposed on themselves; LRMSD that of the shorter chain's backbone when the longer one's are superposed
4. DockQ = (Fnat + 1 / (1 + (iRMSD / 1.5)^2) + 1 / (1 + (LRMSD / 8.5)^2)) / 3; of the whole the mean over interfaces

What lies in only one of the files is left out, but the contacts of the whole reference count for Fnat.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch

from apps.fold.features.structures import ATOM_SLOTS, Chain
from apps.fold.score import superpose
from core.config import UserError

_CONTACT, _INTERFACE, _CLASH = 5.0, 10.0, 2.0  # Angstrom, between heavy atoms
_IRMSD_SCALE, _LRMSD_SCALE = 1.5, 8.5  # Angstrom
_BACKBONE = [ATOM_SLOTS[name] for name in ("CA", "C", "N", "O")]
_AT_ONCE = 512  # residues, of whose atoms distances are in memory


@dataclass(frozen=True)
class Interface:
    """Two chains of the reference, those of the prediction, and their scores; RMSDs in Angstrom.

    contacts  of the reference, of which fnat is a share; fnonnat the share of the prediction's that are not among them
    """

    reference: tuple[str, str]
    predicted: tuple[str, str]
    dockq: float
    fnat: float
    irmsd: float
    lrmsd: float
    f1: float
    fnonnat: float
    contacts: int
    clashes: int


@dataclass(frozen=True)
class DockQ:
    """dockq  the mean over interfaces; chains: those of the prediction by those of the reference"""

    dockq: float
    chains: dict[str, str]
    interfaces: tuple[Interface, ...]


def dockq(predicted: Sequence[Chain], reference: Sequence[Chain], origins: tuple[Path, Path]) -> DockQ:
    """DockQ of the chains' best assignment.  origins: the two files, for what is said of them.

    Raises UserError for a chain of the reference that the prediction lacks, and where no two chains touch.
    """
    pairs = _Pairs(predicted, reference)
    counterparts = [
        [j for j in range(len(predicted)) if pairs.aligned(j, i) is not None] for i in range(len(reference))
    ]
    for chain, found in zip(reference, counterparts):
        if not found:
            raise UserError(_lacking(chain, predicted, origins))
    touching = [ends for ends in itertools.combinations(range(len(reference)), 2) if pairs.contacts(ends)]
    if not touching:
        raise UserError(
            f"no two chains of {origins[1]} have atoms within {_CONTACT:g} Angstrom: no interface to score; "
            "name other chains by --chain, or a single one to score it alone"
        )
    chosen = _best_assignment(pairs, counterparts, touching)
    if chosen is None:
        equal = next((i for i, found in enumerate(counterparts) if len(found) < counterparts.count(found)), 0)
        raise UserError(_lacking(reference[equal], predicted, origins))
    found = tuple(pairs.interface(ends, (chosen[ends[0]], chosen[ends[1]])) for ends in touching)
    chains = {chain.name: predicted[j].name for chain, j in zip(reference, chosen)}
    return DockQ(float(np.mean([one.dockq for one in found])), chains, found)


def _lacking(chain: Chain, predicted: Sequence[Chain], origins: tuple[Path, Path]) -> str:
    names = ", ".join(one.name for one in predicted)
    return (
        f"{origins[0]} has no chain left with the sequence of chain {chain.name} of {origins[1]} (it has {names}); "
        "give the whole complex, or name the reference's chains that count by --chain"
    )


def _best_assignment(
    pairs: "_Pairs", counterparts: Sequence[Sequence[int]], touching: Sequence[tuple[int, int]]
) -> tuple[int, ...] | None:
    """The predicted chain of each of the reference's with the greatest sum of DockQ; None: there are too few.

    Chains are assigned one after another; what cannot reach the best sum, were every interface to come as good as its
    best pair, is left: n equal chains have n! assignments.
    """
    most = {ends: max((pairs.score(ends, two) for two in _two(counterparts, ends)), default=0.0) for ends in touching}
    closed = [[ends for ends in touching if ends[1] == i] for i in range(len(counterparts))]
    rest = np.cumsum([0.0, *(sum(most[ends] for ends in group) for group in reversed(closed))])[::-1]
    best: tuple[float, tuple[int, ...] | None] = (-1.0, None)

    def assign(chosen: tuple[int, ...], total: float) -> None:
        nonlocal best
        i = len(chosen)
        if total + rest[i] <= best[0]:
            return
        if i == len(counterparts):
            best = total, chosen
            return
        for j in counterparts[i]:
            if j not in chosen:
                here = (*chosen, j)
                assign(here, total + sum(pairs.score(ends, (here[ends[0]], j)) for ends in closed[i]))

    assign((), 0.0)
    return best[1]


def _two(counterparts: Sequence[Sequence[int]], ends: tuple[int, int]) -> list[tuple[int, int]]:
    return [two for two in itertools.product(counterparts[ends[0]], counterparts[ends[1]]) if two[0] != two[1]]


class _Pairs:
    """Scores of pairs of chains, each computed once."""

    def __init__(self, predicted: Sequence[Chain], reference: Sequence[Chain]):
        self._predicted, self._reference = predicted, reference
        self._scores: dict[tuple[tuple[int, int], tuple[int, int]], Interface] = {}
        self._true: dict[tuple[int, int], np.ndarray] = {}
        self._found: dict[tuple[int, int], np.ndarray] = {}

    def aligned(self, j: int, i: int) -> tuple[np.ndarray, np.ndarray] | None:
        """The residues of predicted chain j and the reference's chain i that correspond; None for other sequences."""
        return _correspondence(self._predicted[j].sequence, self._reference[i].sequence)

    def contacts(self, ends: tuple[int, int]) -> int:
        return int((self._of_reference(ends) < _CONTACT).sum())

    def score(self, ends: tuple[int, int], two: tuple[int, int]) -> float:
        return self.interface(ends, two).dockq

    def _of_reference(self, ends: tuple[int, int]) -> np.ndarray:
        if ends not in self._true:
            self._true[ends] = _residue_distances(*(self._reference[i] for i in ends))
        return self._true[ends]

    def _of_predicted(self, two: tuple[int, int]) -> np.ndarray:
        if two not in self._found:
            self._found[two] = _residue_distances(*(self._predicted[j] for j in two))
            self._found[two[1], two[0]] = self._found[two].T
        return self._found[two]

    def interface(self, ends: tuple[int, int], two: tuple[int, int]) -> Interface:
        """ends: chains of the reference; two: those of the prediction."""
        if (ends, two) not in self._scores:
            self._scores[ends, two] = self._interface(ends, two)
        return self._scores[ends, two]

    def _interface(self, ends: tuple[int, int], two: tuple[int, int]) -> Interface:
        first, second = (self.aligned(j, i) for j, i in zip(two, ends))
        assert first is not None
        assert second is not None
        (here_a, there_a), (here_b, there_b) = first, second
        a, b = (self._predicted[j] for j in two)
        whole = self._of_reference(ends)
        true, found = whole[np.ix_(there_a, there_b)], self._of_predicted(two)[np.ix_(here_a, here_b)]
        native, ours = true < _CONTACT, found < _CONTACT
        contacts, kept, new = int((whole < _CONTACT).sum()), int((native & ours).sum()), int((ours & ~native).sum())
        near = true < _INTERFACE
        sides = [
            _Side(a, self._reference[ends[0]], here_a, there_a),
            _Side(b, self._reference[ends[1]], here_b, there_b),
        ]
        masks = (near.sum(1) > 0, near.sum(0) > 0) if near.any() else (here_a >= 0, here_b >= 0)
        x, y = (np.concatenate(points) for points in zip(*(side.backbone(mask) for side, mask in zip(sides, masks))))
        receptor, ligand = sides if len(sides[0].reference) > len(sides[1].reference) else sides[::-1]
        irmsd, lrmsd = superpose(x, y)[1], _ligand_rmsd(receptor, ligand)
        fnat = kept / contacts
        terms = fnat, 1 / (1 + (irmsd / _IRMSD_SCALE) ** 2), 1 / (1 + (lrmsd / _LRMSD_SCALE) ** 2)
        return Interface(
            reference=(sides[0].reference.name, sides[1].reference.name),
            predicted=(a.name, b.name),
            dockq=sum(terms) / 3,
            fnat=fnat,
            irmsd=irmsd,
            lrmsd=lrmsd,
            f1=2 * kept / (kept + new + contacts),
            fnonnat=new / max(1, int(ours.sum())),
            contacts=contacts,
            clashes=int((found < _CLASH).sum()),
        )


@dataclass(frozen=True)
class _Side:
    """A chain of an interface: here[n] and there[n] are residues of `predicted` and `reference` that correspond."""

    predicted: Chain
    reference: Chain
    here: np.ndarray
    there: np.ndarray

    def backbone(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Atoms [m, 3] of the chosen residues that both have, of the prediction and of the reference."""
        here, there = self.here[chosen][:, None], self.there[chosen][:, None]
        both = (self.predicted.mask[here, _BACKBONE] * self.reference.mask[there, _BACKBONE]) > 0
        return self.predicted.positions[here, _BACKBONE][both], self.reference.positions[there, _BACKBONE][both]

    @cached_property
    def whole(self) -> tuple[np.ndarray, np.ndarray]:
        return self.backbone(np.ones(len(self.here), bool))


def _ligand_rmsd(receptor: _Side, ligand: _Side) -> float:
    (x, y), (moving, fixed) = receptor.whole, ligand.whole
    moved, _ = superpose(
        np.concatenate([x, moving]), np.concatenate([y, fixed]), chosen=np.arange(len(x) + len(moving)) < len(x)
    )
    return float(np.sqrt(((moved[len(x) :] - fixed.astype(np.float64)) ** 2).sum(-1).mean()))


def _residue_distances(first: Chain, second: Chain) -> np.ndarray:
    """[residues, residues] the least distance of their heavy atoms, in Angstrom."""
    there = second.mask > 0
    theirs = torch.from_numpy(second.positions[there].astype(np.float64))
    starts = np.concatenate([[0], np.cumsum(there.sum(1))[:-1]])
    found = []
    for begin in range(0, len(first), _AT_ONCE):
        mask = first.mask[begin : begin + _AT_ONCE] > 0
        mine = torch.from_numpy(first.positions[begin : begin + _AT_ONCE][mask].astype(np.float64))
        atoms = torch.cdist(mine, theirs, compute_mode="donot_use_mm_for_euclid_dist").numpy()
        by_theirs = np.minimum.reduceat(atoms, starts, axis=1)
        found.append(np.minimum.reduceat(by_theirs, np.concatenate([[0], np.cumsum(mask.sum(1))[:-1]]), axis=0))
    return np.concatenate(found)


@lru_cache(maxsize=1024)
def _correspondence(predicted: str, reference: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Residues that a global alignment puts together (a match is 5, gaps -4 and -0.5); None where letters differ."""
    from Bio.Align import PairwiseAligner

    aligner = PairwiseAligner(mode="global", match_score=5, mismatch_score=0)
    aligner.open_gap_score, aligner.extend_gap_score = -4, -0.5
    blocks = aligner.align(predicted, reference)[0].aligned
    here, there = (np.concatenate([np.arange(*block) for block in blocks[side]]) for side in (0, 1))
    same = all(predicted[i] == reference[j] for i, j in zip(here, there))
    return (here, there) if same and len(here) else None
