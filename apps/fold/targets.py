"""What is to be folded: a sequence with its alignment and its templates, found by name."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from apps.fold.features.alignment import Alignment, check_query, merge, read_alignment, single_sequence
from apps.fold.features.msa import draw, features_of
from apps.fold.features.sequences import Record
from apps.fold.features.templates import read_templates
from apps.fold.model.config import ModelConfig
from apps.fold.model.features import Features, TemplateFeatures
from core.config import UserError

ALIGNMENTS = (".a3m", ".sto", ".stockholm", ".fasta", ".aln")
STRUCTURES = (".cif", ".mmcif", ".pdb", ".ent")


@dataclass(frozen=True)
class Target:
    """A record with everything that is known of it."""

    record: Record
    alignment: Alignment
    templates: TemplateFeatures | None
    files: tuple[Path, ...]

    @property
    def sequence(self) -> str:
        return self.record.sequence

    def digest(self) -> str:
        """Changes with the sequence and with the contents of the files."""
        found = hashlib.blake2b(self.sequence.encode(), digest_size=16)
        for path in self.files:
            found.update(path.read_bytes())
        return found.hexdigest()

    def iterations(self, config: ModelConfig, seed: int) -> list[Features]:
        """Features of every recycling iteration, each drawn anew; a function of the target and the seed."""
        generator = np.random.default_rng(seed)
        templates = self.templates if config.templates is not None else None
        drawn = [draw(self.alignment, config, generator) for _ in range(config.num_recycles + 1)]
        return [features_of(self.sequence, self.alignment, one, config, templates) for one in drawn]


def find_target(record: Record, msa: Path | None, templates: Path | None, alone: bool) -> Target:
    """The record with its files.

    msa, templates  a file (for a record that is `alone`), or a folder that holds NAME.a3m or NAME.sto (several: a
                    folder NAME of them), and NAME.cif or a folder NAME of structures

    Raises UserError for files that do not fit the sequence.
    """
    alignments = _files(msa, record, alone, ALIGNMENTS, "--msa")
    structures = _files(templates, record, alone, STRUCTURES, "--templates")
    read = [read_alignment(path) for path in alignments]
    for path, alignment in zip(alignments, read):
        check_query(alignment, record.sequence, path)
    merged = merge([single_sequence(record.sequence), *read])
    found = read_templates(structures, record.sequence)
    return Target(record, merged, found, (*alignments, *structures))


def _files(where: Path | None, record: Record, alone: bool, suffixes: Iterable[str], option: str) -> list[Path]:
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
    names = {record.name, record.safe_name}
    inside = [where / name for name in names if "/" not in name and (where / name).is_dir()]
    found = [path for folder in inside[:1] for path in sorted(folder.iterdir()) if path.suffix in suffixes]
    found += [path for path in sorted(where.iterdir()) if path.stem in names and path.suffix in suffixes]
    if not found and alone:
        found = [path for path in sorted(where.iterdir()) if path.suffix in suffixes]
    return found
