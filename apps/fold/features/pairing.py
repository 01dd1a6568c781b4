"""Rows of the chains' alignments that belong together, by species (Evans et al. 2021, section 7.2; the released code).

1. the species of a row from its name in UniProt: tr|A0A146SKV9|A0A146SKV9_FUNHE/1-99 is of FUNHE
2. of each species that at least two chains have, in order: each chain's rows by their identity to the chain,
   the best first, as many as the chain with the fewest has; chains without the species get a row of gaps. A species
   of which a chain has more than 600 rows is left out
3. first the row of the chains themselves; then those of most chains, and of these the ones nearer the top of their
   alignments (by the product of their numbers)
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from apps.fold.features.alignment import Alignment

_MOST_OF_SPECIES = 600
_UNIPROT = re.compile(
    r"(?:tr|sp)\|[A-Za-z0-9]{6,10}(?:_\d)?\|[A-Za-z0-9]+_(?P<species>[A-Za-z0-9]{1,5})(?:_\d+)?",
)


@dataclass(frozen=True)
class PairedRows:
    """rows int64[P, chains] of each chain's alignment, -1 for a row of gaps; the species of each, "" of the first."""

    rows: np.ndarray
    species: tuple[str, ...]

    def counts(self) -> Counter[str]:
        """Paired rows of each species."""
        return Counter(filter(None, self.species))


def species_of(name: str) -> str:
    """The species of a row by its name; empty where the name is not UniProt's."""
    words = name.split()
    found = _UNIPROT.fullmatch(words[0].partition("/")[0]) if words else None
    return "" if found is None else found["species"]


def pair_rows(alignments: Sequence[Alignment]) -> PairedRows:
    """The paired rows of chains, whose alignments have the chain first."""
    by_species = [_species_rows(alignment) for alignment in alignments]
    chains = len(alignments)
    groups: dict[int, list[tuple[np.ndarray, str]]] = {number: [] for number in range(chains, -1, -1)}
    groups[chains].append((np.zeros(chains, np.int64), ""))
    for species in sorted(set().union(*by_species)):
        rows = [found.get(species) for found in by_species]
        there = [one for one in rows if one is not None]
        if len(there) < 2 or any(len(one) > _MOST_OF_SPECIES for one in there):
            continue
        count = min(map(len, there))
        columns = [np.full(count, -1) if one is None else one[:count] for one in rows]
        groups[len(there)] += [(row, species) for row in np.stack(columns, 1)]
    ordered: list[tuple[np.ndarray, str]] = []
    for group in groups.values():
        # Python's numbers: of many chains a product has more than 64 bits, which numpy would wrap around.
        ordered += sorted(group, key=lambda one: abs(math.prod(one[0].tolist())))
    return PairedRows(np.stack([row for row, _ in ordered]), tuple(species for _, species in ordered))


def _species_rows(alignment: Alignment) -> dict[str, np.ndarray]:
    """Row numbers of each species, those most like the chain first."""
    similarity = (alignment.letters[0] == alignment.letters).mean(-1, dtype=np.float32)
    rows: dict[str, list[int]] = {}
    for number, name in enumerate(alignment.names):
        if species := species_of(name):
            rows.setdefault(species, []).append(number)
    return {
        species: np.array(numbers)[np.argsort(-similarity[numbers], kind="stable")] for species, numbers in rows.items()
    }
