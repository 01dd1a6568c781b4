"""FASTA: the records of a file, and one line for each that cannot be folded.

Letters: the 20 amino acids; X (unknown), B, Z, U, O and J, which the network sees as X (the MSA's first row has B as
aspartate, Z as glutamate, U as cysteine, as the original). Lower case is taken as upper case, a final * is dropped.
The file may be packed (.gz, .bz2, .xz) and in UTF-8, UTF-16 or UTF-32.
"""

import os
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from apps.fold.features.text import read_text
from apps.fold.model import residues
from core.config import UserError

SUMMARY = "summary.csv"  # what `fold predict` writes beside the records' folders
_LETTERS = set(residues.RESTYPES) | set("BJOUXZ")
_NUCLEOTIDES = set("ACGTUN")
_LONGEST_NAME = 150  # bytes of a file's name, which may have 255 with what is added
_OURS = {SUMMARY}  # files beside the records' folders, in small letters, as some file systems compare names
_LIKELY_NUCLEOTIDES = 20  # residues from which on a sequence of these letters alone is taken for DNA or RNA


@dataclass(frozen=True)
class Record:
    """name: the first word after >; safe_name fits a file name, none of ours; number counts from 1.

    chains  of a complex, whose sequence is theirs one behind the other; empty for a protein alone
    """

    number: int
    name: str
    sequence: str
    chains: tuple["Record", ...] = ()

    @property
    def safe_name(self) -> str:
        name = in_file_names(self.name).lstrip("-._").rstrip("._")
        name = name.encode()[:_LONGEST_NAME].decode(errors="ignore")
        name = name or f"record_{self.number}"  # what begins with - would be read as an option
        return f"{name}_" if name.lower() in _OURS else name


def in_file_names(name: str) -> str:
    """The name with _ for all but letters, digits and marks of any script, and `._-`; ASCII where files take no more.

    Composed, since some file systems take a letter and its accent for the letter with the accent.
    """
    name = unicodedata.normalize("NFC", name)
    name = re.sub(" +", "_", "".join(c if c in "._-" or unicodedata.category(c)[0] in "LMN" else " " for c in name))
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return re.sub(r"[^\x21-\x7e]+", "_", name)
    return name


@dataclass(frozen=True)
class Refused:
    """A record that cannot be folded, and why."""

    number: int
    name: str
    reason: str

    def __str__(self) -> str:
        return f"record {self.number} ({self.name or 'no name'}): {self.reason}"


def read_fasta(path: Path, *, proteins: bool = False) -> tuple[list[Record], list[Refused]]:
    """The records of a file in their order, and those that are refused.

    proteins  whether records of nucleotides' letters alone are proteins, too

    Raises UserError when the file cannot be read or holds no record at all.
    """
    return parse_fasta(read_text(path, "a FASTA file"), path, proteins=proteins)  # a wrong letter is its record's fault


def parse_fasta(text: str, origin: object, *, proteins: bool = False) -> tuple[list[Record], list[Refused]]:
    """The same of a text, which `origin` names."""
    entries = _entries(text, origin)
    records, refused, seen = [], [], {}
    for number, (name, letters) in enumerate(entries, 1):
        parts = [part.removesuffix("*") for part in letters.upper().split(":")]
        record = Record(number, name, "".join(parts), _chains(number, name, parts))
        reason = _wrong_parts(parts, proteins) or _repeated(record, seen)
        if reason:
            refused.append(Refused(number, name, reason))
        else:
            seen[record.safe_name] = number
            records.append(record)
    return records, refused


def _entries(text: str, origin: object) -> list[tuple[str, str]]:
    entries: list[tuple[str, list[str]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if line.startswith(">"):
            entries.append(((line[1:].split() or [""])[0], []))
        elif line and not line.startswith(";"):
            if not entries and re.search("[\0\ufffd]", line):
                raise UserError(f"{origin}, line {number}: bytes that are no text; give a FASTA file")
            if not entries:
                raise UserError(f"{origin}, line {number}: a sequence before the first > line; give a FASTA file")
            entries[-1][1].append("".join(line.split()))
    if not entries:
        raise UserError(f"{origin} holds no sequence; give a FASTA file: a line '>name', then the letters")
    return [(name, "".join(parts)) for name, parts in entries]


def chain_id(number: int) -> str:
    """The name of a chain, from 1: A to Z, then AA, BA, …, as mmCIF files have them."""
    letters = ""
    while number > 0:
        number, letter = divmod(number - 1, 26)
        letters += chr(ord("A") + letter)
    return letters


def _chains(number: int, name: str, parts: list[str]) -> tuple[Record, ...]:
    if len(parts) == 1:
        return ()
    return tuple(Record(number, f"{name}_{chain_id(at)}", part) for at, part in enumerate(parts, 1))


def one_complex(records: list[Record], name: str) -> Record:
    """The complex of which each record is a chain."""
    return Record(1, name, "".join(record.sequence for record in records), tuple(records))


def alone(records: Iterable[Record]) -> list[Record]:
    """What is searched for: each protein, of a complex each sequence once, by its first chain."""
    found = []
    for record in records:
        chains: dict[str, Record] = {}
        for chain in record.chains or (record,):
            chains.setdefault(chain.sequence, chain)
        found += chains.values()
    return found


def _wrong_parts(parts: list[str], proteins: bool) -> str | None:
    reasons = [_wrong(part, proteins) for part in parts]
    if len(parts) == 1:
        return reasons[0]
    return next((f"chain {at}: {reason}" for at, reason in enumerate(reasons, 1) if reason), None)


def _wrong(sequence: str, proteins: bool) -> str | None:
    if not sequence:
        return "the sequence is empty"
    if "-" in sequence or "." in sequence:
        return "the sequence holds gaps; give it without alignment, or the alignment as --msa"
    bad = next(((i, letter) for i, letter in enumerate(sequence, 1) if letter not in _LETTERS), None)
    if bad is not None:
        return f"letter {bad[1]!r} at position {bad[0]} is no amino acid; use one-letter codes, X where unknown"
    if not set(sequence) & set(residues.RESTYPES):
        return "none of its residues is known; give a sequence of amino acids, X only where one is unknown"
    several = len(set(sequence)) > 1  # of one letter alone it is a protein's: poly-alanine, poly-glycine
    if not proteins and several and len(sequence) >= _LIKELY_NUCLEOTIDES and set(sequence) <= _NUCLEOTIDES:
        letters = " ".join(sorted(set(sequence)))
        return f"only the letters {letters}: DNA or RNA; give the protein's sequence, or --proteins if it is one"
    return None


def _repeated(record: Record, seen: dict[str, int]) -> str | None:
    if record.safe_name in seen:
        return f"its files would be named like those of record {seen[record.safe_name]}; rename one of them"
    return None


def residue_types(sequence: str) -> np.ndarray:
    """Residue types 0..20 of a sequence; all but the 20 amino acids are X."""
    lookup = {letter: index for index, letter in enumerate(residues.RESTYPES)}
    return np.array([lookup.get(letter, residues.UNKNOWN) for letter in sequence], np.int64)
