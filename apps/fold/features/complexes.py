"""The chains of a complex as one input of the network, as the original makes it (Evans et al. 2021, section 7.2).

    1. chains of one sequence are an entity; they stand side by side, in the order in which entities first come
    2. rows of alignments that belong together are paired, if there are two entities or more (pairing.py): at most 1,024
    3. a chain's other rows, less those that are among its paired ones, up to 2,048 with the paired ones that are not
       gaps alone
    4. copies of an entity have their rows side by side, entities theirs on a diagonal of blocks, below the paired rows;
       everything else is gaps
    5. the first row (of a homomer the same) becomes a cluster centre in any case
    6. four templates of each chain; those that are not there are zeros, and count

Rows of padding up to 512, which the original adds, are left out: they are masked and change nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from apps.fold.features.alignment import Alignment
from apps.fold.features.pairing import PairedRows, pair_rows
from apps.fold.features.sampling import Complex
from apps.fold.features.sequences import residue_types
from apps.fold.features.templates import Template
from apps.fold.model import residues

MOST_ROWS = 2048  # of a chain
_MOST_PAIRED = MOST_ROWS // 2


@dataclass(frozen=True)
class ChainInput:
    """A chain with its alignments, each with the chain first.

    own     its rows
    paired  rows of which species may be known, for pairing; the chain alone where there are none
    """

    sequence: str
    own: Alignment
    paired: Alignment
    templates: tuple[Template, ...] = ()


@dataclass(frozen=True)
class Assembly:
    """A complex, and how it came about.

    complex  what the network is given
    chains   int64[chains]: the input's chain of each of the network's, from 0
    pairs    the paired rows; None of a homomer
    """

    complex: Complex
    chains: np.ndarray
    pairs: PairedRows | None

    def input_order(self) -> np.ndarray:
        """int64[N]: the network's residue of each residue of the input."""
        return np.concatenate([np.flatnonzero(self.complex.asym_id == at + 1) for at in np.argsort(self.chains)])


def assemble(chains: Sequence[ChainInput], most_templates: int, pairs: PairedRows | None = None) -> Assembly:
    """The complex of these chains.

    most_templates  of each chain
    pairs           rows of the chains' `paired` alignments, in the input's order; by default they are paired by species
    """
    sequences = list(dict.fromkeys(chain.sequence for chain in chains))
    order = np.array([n for one in sequences for n, chain in enumerate(chains) if chain.sequence == one])
    ordered = [chains[number] for number in order]
    entity = [sequences.index(chain.sequence) + 1 for chain in ordered]
    copies = [entity[: at + 1].count(number) for at, number in enumerate(entity)]
    if len(sequences) == 1:
        pairs = None
        letters, deletions = _beside([_Rows.of(chain.own)[:MOST_ROWS] for chain in ordered])
        bert = np.ones(letters.shape, np.float32)
    else:
        if pairs is None:
            pairs = pair_rows([chain.paired for chain in ordered])
        else:
            pairs = PairedRows(pairs.rows[:, order], pairs.species)
        paired = [_Rows.of(chain.paired).at(pairs.rows[:, at]) for at, chain in enumerate(ordered)]
        letters, deletions, bert = _diagonal(ordered, paired, entity)
    lengths = [len(chain.sequence) for chain in ordered]

    def of_each(values: Sequence[int]) -> np.ndarray:
        return np.repeat(np.array(values, np.int64), lengths)

    templates = [_templates(chain, most_templates) for chain in ordered]
    aatype = np.concatenate([residue_types(chain.sequence) for chain in ordered])
    return Assembly(
        Complex(
            aatype=aatype,
            residue_index=np.concatenate([np.arange(length) for length in lengths]),
            asym_id=of_each(range(1, len(ordered) + 1)),
            entity_id=of_each(entity),
            sym_id=of_each(copies),
            mask=np.ones(len(aatype), np.float32),
            msa=letters,
            deletions=deletions.astype(np.float32),
            msa_mask=np.ones(letters.shape, np.float32),
            cluster_bias=np.eye(1, len(letters), dtype=np.float32)[0],
            bert_mask=bert,
            template_aatype=np.concatenate([one[0] for one in templates], 1),
            template_positions=np.concatenate([one[1] for one in templates], 1),
            template_mask=np.concatenate([one[2] for one in templates], 1),
        ),
        order,
        pairs,
    )


@dataclass(frozen=True)
class _Rows:
    """letters uint8[S, N] and deletions int32[S, N] of a chain."""

    letters: np.ndarray
    deletions: np.ndarray

    @staticmethod
    def of(alignment: Alignment) -> "_Rows":
        return _Rows(alignment.letters, alignment.deletions)

    def __getitem__(self, at: slice | np.ndarray) -> "_Rows":
        return _Rows(self.letters[at], self.deletions[at])

    def at(self, numbers: np.ndarray) -> "_Rows":
        """The rows of these numbers, of gaps for -1."""
        there = numbers[:, None] >= 0
        found = self[numbers]
        return _Rows(np.where(there, found.letters, np.uint8(residues.GAP)), np.where(there, found.deletions, 0))


def _beside(rows: Sequence[_Rows]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([one.letters for one in rows], 1), np.concatenate([one.deletions for one in rows], 1)


def _diagonal(
    chains: Sequence[ChainInput], paired: Sequence[_Rows], entity: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Letters, deletions and the mask of what is a chain's own row: paired rows, then a block of each entity."""
    cut = [rows[:_MOST_PAIRED] for rows in paired]
    letters, deletions = ([part] for part in _beside(cut))
    shape = letters[0].shape
    bert: list[np.ndarray] = [np.ones(shape, np.float32)]
    N, first = shape[1], 0
    for number in sorted(set(entity)):
        mine = [at for at, one in enumerate(entity) if one == number]
        block, skipped = _beside([_unpaired(chains[at].own, paired[at], cut[at]) for at in mine])
        here = slice(first, first := first + block.shape[1])
        for whole, fill, part in ((letters, residues.GAP, block), (deletions, 0, skipped), (bert, 0, 1)):
            wide = np.full((len(block), N), fill, whole[0].dtype)
            wide[:, here] = part
            whole.append(wide)
    return np.concatenate(letters), np.concatenate(deletions), np.concatenate(bert)


def _unpaired(own: Alignment, paired: _Rows, cut: _Rows) -> _Rows:
    """A chain's rows that are not among its paired ones."""
    known = {row.tobytes() for row in paired.letters}
    kept = np.array([row.tobytes() not in known for row in own.letters])
    room = max(0, MOST_ROWS - int((cut.letters != residues.GAP).any(1).sum()))
    return _Rows.of(own)[np.flatnonzero(kept)[:room]]


def _templates(chain: ChainInput, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Residue types [most, N], positions [most, N, 37, 3] and their mask, 0 for templates that are not there."""
    N = len(chain.sequence)
    aatype, mask = np.zeros((most, N), np.int64), np.zeros((most, N, residues.NUM_ATOM37), np.float32)
    positions = np.zeros((most, N, residues.NUM_ATOM37, 3), np.float32)
    for number, one in enumerate(chain.templates[:most]):
        aatype[number], positions[number], mask[number] = one.aatype, one.positions, one.mask
    return aatype, positions, mask
