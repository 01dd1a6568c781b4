"""DockQ, the quality of a complex's interfaces (Basu and Wallner 2016; Mirabello and Wallner 2024), as version 2.1.3.

1. chains correspond whose aligned sequences differ in no letter; gaps are allowed. Of all permutations of chains that
   are equal the one with the greatest sum over interfaces is taken; where there are too many to be sure (a dozen chains
   that lie wrong), the best that exchanging chains finds, and the result says so
2. an interface is a pair of the reference's chains with residues in contact: heavy atoms nearer than 5 Angstrom.
   Fnat is the share of these contacts that the prediction has
3. iRMSD is the RMSD of the backbone (N, CA, C, O) of residues with a heavy atom within 10 Angstrom of the other chain,
   superposed on themselves; LRMSD that of the shorter chain's backbone when the longer one's are superposed
4. DockQ = (Fnat + 1 / (1 + (iRMSD / 1.5)^2) + 1 / (1 + (LRMSD / 8.5)^2)) / 3; of the whole the mean over interfaces

What lies in only one of the files is left out, but the contacts of the whole reference count for Fnat.
"""

import itertools
from collections.abc import Iterator, Sequence
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
_STARTS = 20  # assignments, beside that of the files' order, in which chains are exchanged
_LOOKED_AT = 50_000  # assignments of some of the chains: seconds to a minute
_ROUNDING = 1e-9


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
    """dockq  the mean over interfaces; chains: those of the prediction by those of the reference

    certain  whether no other assignment of the chains is better; of many equal ones not all are looked at
    """

    dockq: float
    chains: dict[str, str]
    interfaces: tuple[Interface, ...]
    certain: bool = True


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
    best = _Assignments(pairs, counterparts, touching, len(predicted)).best()
    if best is None:
        equal = next((i for i, found in enumerate(counterparts) if len(found) < counterparts.count(found)), 0)
        raise UserError(_lacking(reference[equal], predicted, origins))
    chosen, certain = best
    found = tuple(pairs.interface(ends, (chosen[ends[0]], chosen[ends[1]])) for ends in touching)
    chains = {chain.name: predicted[j].name for chain, j in zip(reference, chosen)}
    return DockQ(float(np.mean([one.dockq for one in found])), chains, found, certain)


def _lacking(chain: Chain, predicted: Sequence[Chain], origins: tuple[Path, Path]) -> str:
    names = ", ".join(one.name for one in predicted)
    return (
        f"{origins[0]} has no chain left with the sequence of chain {chain.name} of {origins[1]} (it has {names}); "
        "give the whole complex, or name the reference's chains that count by --chain"
    )


class _Assignments:
    """The assignments of predicted chains to the reference's, and the sum of DockQ over the interfaces of each.

    n equal chains have n! of them. Chains are assigned one after another, and what cannot reach the best sum that is
    known is left: each chain that is not assigned yet would have to come as good as the best that is left for it. The
    sum that is known at first is what exchanging chains makes of some assignments.
    """

    def __init__(
        self,
        pairs: "_Pairs",
        counterparts: Sequence[Sequence[int]],
        touching: Sequence[tuple[int, int]],
        predicted: int,
    ):
        self._counterparts, self._touching = counterparts, touching
        self._allowed = np.full((len(counterparts), predicted), -np.inf)
        for i, found in enumerate(counterparts):
            self._allowed[i, list(found)] = 0.0
        self._scores = [np.full((predicted, predicted), -np.inf) for _ in touching]
        for scores, ends in zip(self._scores, touching):
            for two in itertools.product(counterparts[ends[0]], counterparts[ends[1]]):
                if two[0] != two[1]:
                    scores[two] = pairs.score(ends, two)

    def best(self) -> tuple[tuple[int, ...], bool] | None:
        """The predicted chain of each of the reference's with the greatest sum, and whether all were looked at or left.

        None: there are too few.
        """
        generator = np.random.default_rng(0)
        starts = [self._counterparts]
        starts += [[generator.permutation(found).tolist() for found in self._counterparts] for _ in range(_STARTS)]
        some = [found for start in starts if (found := _some_assignment(start)) is not None]
        if not some:
            return None
        self._best = max((self._exchanged(list(one)) for one in some), key=self._sum)  # of equal ones the first
        self._most, self._left = self._sum(self._best) + _ROUNDING, _LOOKED_AT
        self._extend({}, 0.0)
        return tuple(self._best), self._left > 0

    def _sum(self, chosen: Sequence[int]) -> float:
        return sum(float(scores[chosen[a], chosen[b]]) for scores, (a, b) in zip(self._scores, self._touching))

    def _exchanged(self, chosen: list[int]) -> list[int]:
        """What exchanging two chains at a time, or one for a chain that is left over, makes of an assignment."""
        most, before = self._sum(chosen), -np.inf
        while most > before + _ROUNDING:
            before = most
            for other in itertools.chain(self._exchanges(chosen), self._replacements(chosen)):
                if (total := self._sum(other)) > most + _ROUNDING:
                    chosen, most = other, total
                    break
        return chosen

    def _exchanges(self, chosen: list[int]) -> Iterator[list[int]]:
        for a, b in itertools.combinations(range(len(chosen)), 2):
            if chosen[b] in self._counterparts[a] and chosen[a] in self._counterparts[b]:
                other = list(chosen)
                other[a], other[b] = chosen[b], chosen[a]
                yield other

    def _replacements(self, chosen: list[int]) -> Iterator[list[int]]:
        for a, found in enumerate(self._counterparts):
            yield from ([*chosen[:a], j, *chosen[a + 1 :]] for j in found if j not in chosen)

    def _extend(self, chosen: dict[int, int], total: float) -> None:
        """Look at what goes on from an assignment of some chains, whose interfaces come to `total`."""
        self._left -= 1
        if self._left <= 0:
            return
        others = [i for i in range(len(self._counterparts)) if i not in chosen]
        if not others:
            if total > self._most:
                self._best, self._most = [chosen[i] for i in range(len(chosen))], total + _ROUNDING
            return
        free = [j for j in range(self._allowed.shape[1]) if j not in chosen.values()]
        here, gains = self._bounds(chosen, others, free)
        most = here.max(1)
        if total + min(most.sum(), np.sort(here.max(0))[-len(others) :].sum()) <= self._most:
            return
        row = int(np.argmax((gains > 0).any(1)))  # one that touches those that are assigned, if there is one
        for column in np.argsort(-here[row], kind="stable"):
            if total + most.sum() - most[row] + here[row, column] <= self._most:
                return
            self._extend({**chosen, others[row]: free[column]}, total + float(gains[row, column]))

    def _bounds(self, chosen: dict[int, int], others: list[int], free: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """[others, free] of chains that are not assigned and those that are left: the most that interfaces can come to,
        those between two of the others by half, and what those with assigned chains do."""
        gains = self._allowed[np.ix_(others, free)].copy()
        between, place = np.zeros_like(gains), {i: row for row, i in enumerate(others)}
        for scores, (a, b) in zip(self._scores, self._touching):
            if a in place and b in place:
                part = scores[np.ix_(free, free)]
                between[place[a]] += part.max(1) / 2
                between[place[b]] += part.max(0) / 2
            elif a in place:
                gains[place[a]] += scores[free, chosen[b]]
            elif b in place:
                gains[place[b]] += scores[chosen[a], free]
        return gains + between, gains


def _some_assignment(counterparts: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """A predicted chain for each of the reference's, the first that is free where one is; None: there are too few."""
    taken: dict[int, int] = {}

    def place(i: int, seen: set[int]) -> bool:
        found = next((j for j in counterparts[i] if j not in taken), None)
        for j in counterparts[i] if found is None else (found,):
            if j not in seen:
                seen.add(j)
                if j not in taken or place(taken[j], seen):
                    taken[j] = i
                    return True
        return False

    if not all(place(i, set()) for i in range(len(counterparts))):
        return None
    of = {i: j for j, i in taken.items()}
    return tuple(of[i] for i in range(len(counterparts)))


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
