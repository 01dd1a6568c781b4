"""The targets of folding that are complexes: their chains' alignments and templates, found by name.

A chain's own files are found as those of a protein alone (targets.py), by the chain's name: NAME_A, NAME_B, … of a
record NAME, or the name of its own record. For pairing it has an alignment with UniProt beside them: one in its folder
whose name begins with `uniprot` (AlphaFold's uniprot_hits.sto, or what `fold msa` makes of a database uniprot.fasta),
or CHAIN.uniprot.a3m. Instead of all that a complex may have an A3M of ColabFold's, NAME.a3m, whose rows are paired as
they stand.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from apps.fold.features.alignment import (
    Alignment,
    check_query,
    complex_lengths,
    merge,
    parse_a3m,
    read_alignment,
    read_alignment_text,
    single_sequence,
)
from apps.fold.features.complexes import Assembly, ChainInput, assemble
from apps.fold.features.pairing import PairedRows
from apps.fold.features.sampling import Complex, Drawn, draw_rows, features_of_complex
from apps.fold.features.sequences import Record
from apps.fold.features.sequences import alone as searched_for
from apps.fold.features.templates import ANY, Allowed
from apps.fold.features.text import unpacked_name
from apps.fold.model import residues
from apps.fold.model.config import ModelConfig, MultimerConfig
from apps.fold.model.features import Features
from apps.fold.output.confidence import Folded, of_chains
from apps.fold.targets import ALIGNMENTS, Target, files_of, find_target
from core.config import UserError

_MOST_UNIPROT = 50_000  # rows that are looked at for pairing
_TOLD = 5  # species, by name


@dataclass(frozen=True)
class ComplexTarget:
    """A complex with everything that is known of it; see `Target`.

    pairs       the chains' paired rows; None where species are to pair them
    alignments  how many files of alignments were read
    """

    record: Record
    chains: tuple[ChainInput, ...]
    files: tuple[Path, ...]
    pairs: PairedRows | None = None
    said: tuple[str, ...] = ()
    alignments: int = 0

    @cached_property
    def assembly(self) -> Assembly:
        return assemble(self.chains, MultimerConfig.max_templates, self.pairs)

    @property
    def sequence(self) -> str:
        return self.record.sequence

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(chain.sequence) for chain in self.chains)

    @property
    def letters(self) -> np.ndarray:
        """uint8[S, N] of all rows, chains as they were given."""
        return self.assembly.complex.msa[:, self.assembly.input_order()]

    @property
    def species(self) -> Counter[str]:
        """Paired rows by species."""
        return Counter() if self.assembly.pairs is None else self.assembly.pairs.counts()

    @property
    def num_rows(self) -> int:
        return len(self.assembly.complex.msa)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of how its parts were found, and paired."""
        pairs = self.assembly.pairs
        if pairs is None:
            return self.said
        counts = pairs.counts()
        some = ", ".join(f"{species} {count}" for species, count in counts.most_common(_TOLD))
        more = ", …" if len(counts) > _TOLD else ""
        by_species = f" of {len(counts)} species ({some}{more})" if counts else ""
        return (*self.said, f"{len(pairs.rows) - 1} rows of several chains are paired{by_species}")

    def digest(self) -> str:
        """Changes with the sequences and with the contents of the files."""
        found = hashlib.blake2b(":".join(chain.sequence for chain in self.chains).encode(), digest_size=16)
        for path in self.files:
            found.update(path.read_bytes())
        return found.hexdigest()

    def sizes(self, config: ModelConfig) -> tuple[int, int, int, int]:
        """Residues, rows of the MSA, extra rows and templates that `iterations` will have."""
        rows = min(config.max_msa, self.num_rows)
        extra = max(1, min(config.max_extra_msa, self.num_rows - rows))
        return len(self.sequence), rows, extra, MultimerConfig.max_templates

    def iterations(self, config: ModelConfig, seed: int) -> "ComplexIterations":
        """Features of every recycling iteration, each drawn anew; a function of the target and the seed."""
        assert isinstance(config, MultimerConfig)
        generator, one = np.random.default_rng(seed), self.assembly.complex
        drawn = tuple(draw_rows(one, config, generator) for _ in range(config.num_recycles + 1))
        return ComplexIterations(one, config, drawn)


def in_input_order(one: Folded, target: ComplexTarget) -> Folded:
    """The prediction with chains as they were given; the network has those of one sequence side by side."""
    return of_chains(one, target.lengths, target.assembly.input_order(), target.assembly.chains)


@dataclass(frozen=True)
class ComplexIterations(Sequence[Features]):
    """Features of one iteration each, made from what was drawn for it when they are asked for."""

    complex: Complex
    config: MultimerConfig
    drawn: tuple[Drawn, ...]

    def __len__(self) -> int:
        return len(self.drawn)

    def __getitem__(self, index):
        return features_of_complex(self.complex, self.drawn[index], self.config)


def find_complex(
    record: Record, msa: Path | None, templates: Path | None, alone: bool, allowed: Allowed = ANY, own: bool = False
) -> ComplexTarget:
    """The record with its files; see the module's docstring, and for `own` `find_target`.

    Raises UserError for files that do not fit the sequences.
    """
    whole = [] if msa is None else files_of(msa, record, (alone or own) and msa.is_file(), (".a3m",), "--msa")
    colabfold = [path for path in whole if complex_lengths(_text(path)) is not None]
    if whole and not colabfold and msa == whole[0]:
        raise UserError(
            f"--msa {msa} is no A3M of a complex, which begins with its lengths (#59,58<tab>1,1); "
            "give one, or a folder with the chains' alignments"
        )
    by_name = None if colabfold else msa
    found = {
        chain.sequence: find_target(chain, by_name, templates, False, allowed, lambda path: not is_uniprot(path))
        for chain in searched_for([record])
    }
    files = {path: None for target in found.values() for path in target.files}
    said = [f"{target.record.name}: {note}" for target in found.values() for note in target.notes]
    if colabfold:
        chains, pairs = read_complex(colabfold[0], record)
        chains = [ChainInput(one.sequence, one.own, one.paired, found[one.sequence].templates) for one in chains]
        return ComplexTarget(record, tuple(chains), (colabfold[0], *files), pairs, tuple(said), 1)
    paired = {target.sequence: _for_pairing(target, by_name) for target in found.values()}
    files |= {path: None for _, paths in paired.values() for path in paths}
    lacking = [target.record.name for target in found.values() if not paired[target.sequence][1]]
    if lacking and len(found) > 1:
        said.append(f"no alignment with UniProt of {', '.join(sorted(lacking))}, whose rows cannot be paired")
    chains = [
        ChainInput(one.sequence, found[one.sequence].alignment, paired[one.sequence][0], found[one.sequence].templates)
        for one in record.chains
    ]
    read = sum(target.alignments for target in found.values()) + sum(len(paths) for _, paths in paired.values())
    return ComplexTarget(record, tuple(chains), tuple(files), None, tuple(said), read)


def is_uniprot(path: Path) -> bool:
    """Whether an alignment is one with UniProt, by whose species rows are paired."""
    name = unpacked_name(path).name.lower()
    return name.startswith("uniprot") or unpacked_name(path).stem.lower().endswith(".uniprot")


def _for_pairing(target: Target, msa: Path | None) -> tuple[Alignment, list[Path]]:
    """The chain's alignment with UniProt, and its files."""
    chain, alone = target.record, single_sequence(target.sequence)
    if msa is None:
        return alone, []
    beside = Record(chain.number, f"{chain.name}.uniprot", chain.sequence)
    paths = [path for path in files_of(msa, chain, False, ALIGNMENTS, "--msa") if is_uniprot(path)]
    paths += files_of(msa, beside, False, ALIGNMENTS, "--msa")
    return read_for_pairing(chain.sequence, paths), paths


def read_for_pairing(sequence: str, paths: Sequence[Path]) -> Alignment:
    """The rows of alignments with UniProt that are looked at, the chain first."""
    read = []
    for path in paths:
        alignment = read_alignment(path)
        check_query(alignment, sequence, path)
        rows = slice(_MOST_UNIPROT)
        read.append(Alignment(alignment.letters[rows], alignment.deletions[rows], alignment.names[rows]))
    return merge([single_sequence(sequence), *read])


def _text(path: Path) -> str:
    return read_alignment_text(path, "an A3M file")


def read_complex(path: Path, record: Record) -> tuple[list[ChainInput], PairedRows | None]:
    """The chains of an A3M of ColabFold's, whose columns are those of its sequences one behind the other.

    Rows with residues of two sequences or more are paired as they stand, the others are a sequence's own.

    Raises UserError where it is another complex's.
    """
    text = _text(path)
    described = complex_lengths(text)
    assert described is not None
    sequences = list(dict.fromkeys(chain.sequence for chain in record.chains))
    letters_of = [chain.sequence for chain in record.chains]
    wanted = [len(one) for one in sequences], [letters_of.count(one) for one in sequences]
    if described != wanted:
        raise UserError(
            f"{path} is of sequences of {_listed(described)}, and {record.name} has {_listed(wanted)}; "
            "give the complex's own alignment"
        )
    whole = parse_a3m(text, path)
    check_query(whole, "".join(sequences), path)
    ends = np.cumsum(wanted[0])[:-1]
    letters, deletions = np.split(whole.letters, ends, 1), np.split(whole.deletions, ends, 1)
    there = np.stack([(part != residues.GAP).any(1) for part in letters], 1)
    together = there.sum(1) > 1
    rows = np.where(there[together], np.arange(together.sum())[:, None], -1)
    found = {}
    for at, sequence in enumerate(sequences):
        part = Alignment(letters[at], deletions[at], whole.names)
        own = merge([single_sequence(sequence), _chosen(part, there[:, at] & ~together)])
        found[sequence] = (at, ChainInput(sequence, own, _chosen(part, together) if together.any() else own))
    chains = [found[sequence][1] for sequence in letters_of]
    if len(sequences) == 1:
        return chains, None
    columns = [found[sequence][0] for sequence in letters_of]
    return chains, PairedRows(rows[:, columns], ("",) * len(rows))


def _listed(described: tuple[list[int], list[int]]) -> str:
    return " and ".join(f"{length} residues ({copies})" for length, copies in zip(*described))


def _chosen(alignment: Alignment, rows: np.ndarray) -> Alignment:
    names = tuple(name for name, one in zip(alignment.names, rows) if one)
    return Alignment(alignment.letters[rows], alignment.deletions[rows], names)
