"""The targets of folding: a sequence with its alignment and its templates, found by name."""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from apps.fold.features.alignment import Alignment, check_query, merge, read_alignment, single_sequence
from apps.fold.features.hhr import check_hits, read_hhr
from apps.fold.features.msa import Draw, draw, features_of, num_centres
from apps.fold.features.sequences import Record
from apps.fold.features.structures import structure_of
from apps.fold.features.templates import (
    ANY,
    Allowed,
    Template,
    features_of_templates,
    read_templates,
    templates_of_hits,
)
from apps.fold.features.text import unpacked_name
from apps.fold.model.config import ModelConfig
from apps.fold.model.features import Features, TemplateFeatures
from core.config import UserError

HITS = (".hhr",)
ALIGNMENTS = (".a3m", ".sto", ".stockholm", ".fasta", ".aln")
STRUCTURES = (".cif", ".mmcif", ".pdb", ".ent")
_TOLD = 5  # hits that are no templates, a line each


@dataclass(frozen=True)
class Target:
    """A record with everything that is known of it, and what a user should know of how that was found.

    alignments  how many files of alignments were read
    """

    record: Record
    alignment: Alignment
    templates: tuple[Template, ...]
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()
    alignments: int = 0

    @property
    def sequence(self) -> str:
        return self.record.sequence

    @property
    def lengths(self) -> tuple[int, ...]:
        return (len(self.sequence),)

    @property
    def letters(self) -> np.ndarray:
        """uint8[S, N] of the alignment's rows."""
        return self.alignment.letters

    @property
    def species(self) -> Counter[str]:
        """Paired rows by species: none of a single chain."""
        return Counter()

    @property
    def num_rows(self) -> int:
        """Rows of the alignment, the sequence's included."""
        return len(self.alignment)

    def digest(self) -> str:
        """Changes with the sequence and with the contents of the files."""
        found = hashlib.blake2b(self.sequence.encode(), digest_size=16)
        for path in self.files:
            found.update(path.read_bytes())
        return found.hexdigest()

    def sizes(self, config: ModelConfig) -> tuple[int, int, int, int]:
        """Residues, rows of the MSA, extra rows and templates that `iterations` will have."""
        rows = num_centres(config, self.alignment)
        extra = max(1, min(config.max_extra_msa, len(self.alignment) - rows))
        templates = min(len(self.templates), config.max_templates) if config.templates is not None else 0
        return len(self.sequence), rows, extra, templates

    def iterations(self, config: ModelConfig, seed: int) -> "Iterations":
        """Features of every recycling iteration, each drawn anew; a function of the target and the seed."""
        generator = np.random.default_rng(seed)
        taken = self.templates[: config.max_templates] if config.templates is not None else ()
        templates = features_of_templates(taken)
        drawn = [draw(self.alignment, config, generator) for _ in range(config.num_recycles + 1)]
        return Iterations(self, config, tuple(drawn), templates)


@dataclass(frozen=True)
class Iterations(Sequence[Features]):
    """Features of one iteration each, made from what was drawn for it when they are asked for."""

    target: Target
    config: ModelConfig
    drawn: tuple[Draw, ...]
    templates: TemplateFeatures | None

    def __len__(self) -> int:
        return len(self.drawn)

    def __getitem__(self, index):
        one = self.drawn[index]
        return features_of(self.target.sequence, self.target.alignment, one, self.config, self.templates)


def find_target(
    record: Record,
    msa: Path | None,
    templates: Path | None,
    alone: bool,
    allowed: Allowed = ANY,
    takes: Callable[[Path], bool] = lambda path: True,
    own: bool = False,
) -> Target:
    """The record with its files.

    msa, templates  a file (for a record that is `alone`), or a folder that holds NAME.a3m or NAME.sto (several: a
                    folder NAME of them), and NAME.cif or a folder NAME of structures. Where the first holds NAME.hhr,
                    the second is a folder of mmCIF files by the entries' names, for its hits
    takes           which alignments are taken
    own             whether the first is a file of this record's, though there may be others

    Raises UserError for files that do not fit the sequence.
    """
    alignments = [path for path in files_of(msa, record, alone or own, ALIGNMENTS, "--msa") if takes(path)]
    hits = files_of(msa, record, alone, HITS, "--msa") if msa is not None and msa.is_dir() else []
    read = [read_alignment(path) for path in alignments]
    for path, alignment in zip(alignments, read):
        check_query(alignment, record.sequence, path)
    merged = merge([single_sequence(record.sequence), *read])
    if hits:
        found, structures, notes = _found_by_hits(hits, record, templates, allowed)
    else:
        structures = files_of(templates, record, alone, STRUCTURES, "--templates")
        found = read_templates(structures, record.sequence)
        notes = [] if structures or templates is None else [f"no template: {templates} holds none by its name"]
    return Target(record, merged, tuple(found), (*alignments, *hits, *structures), tuple(notes), len(read))


def _found_by_hits(
    files: list[Path], record: Record, folder: Path | None, allowed: Allowed
) -> tuple[list[Template], list[Path], list[str]]:
    """Templates, their structures, and notes."""
    if folder is None:
        return [], [], [f"{files[0]} names templates; give --templates, a folder of their mmCIF files, to use them"]
    if not folder.is_dir():
        raise UserError(f"--templates {folder} is to be a folder of mmCIF files, since {files[0]} names its entries")
    hits = []
    for path in files:
        hits += read_hhr(path)
        check_hits(hits, record.sequence, path)
    hits.sort(key=lambda hit: -hit.sum_probs)
    found, left_out = templates_of_hits(hits, record.sequence, folder, allowed)
    structures = [structure_of(one.name.partition("_")[0], folder) for one in found]
    notes = [f"{len(found)} templates of {len(hits)} hits" + (f": {found[0].name}, …" if found else "")]
    notes += [f"no template: {line}" for line in left_out[:_TOLD]]
    if len(left_out) > _TOLD:
        notes.append(f"no template: {len(left_out) - _TOLD} hits more")
    return found, structures, notes


def files_of(where: Path | None, record: Record, alone: bool, suffixes: Iterable[str], option: str) -> list[Path]:
    """The record's files of these kinds; see `find_target`."""
    if where is None:
        return []
    if where.is_file():
        if not alone:
            raise UserError(
                f"{option} {where} is one file and there are several sequences; give a folder of NAME files"
            )
        return [where]
    if not where.is_dir():
        raise UserError(f"{option} {where} does not exist; give a file or a folder")
    names = {_composed(record.name), record.safe_name}
    there = sorted(where.iterdir())
    inside = [path for path in there if _composed(path.name) in names and path.is_dir()]
    found = [
        path for folder in inside[:1] for path in sorted(folder.iterdir()) if unpacked_name(path).suffix in suffixes
    ]
    fitting = [path for path in there if unpacked_name(path).suffix in suffixes]
    found += [path for path in fitting if _composed(unpacked_name(path).stem) in names]
    return found or (fitting if alone else [])


def _composed(name: str) -> str:
    """Letters with their accents, which some file systems keep apart."""
    return unicodedata.normalize("NFC", name)
