"""Alignments with a query: A3M and Stockholm files as letters and deletions.

Columns are the query's residues. What a sequence has between two of them (lower case in A3M, a column with a gap in
Stockholm's query) is a deletion and counted at the residue that follows.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from apps.fold.features.text import read_text
from apps.fold.model.residues import LETTERS, RESTYPES
from core.config import UserError

_CODES = np.full(256, 255, np.uint8)
for _letter, _code in LETTERS.items():
    _CODES[ord(_letter)] = _code
_NAMES = f"{RESTYPES}X-"
_OWN = "give the sequence's own alignment, or none"


@dataclass(frozen=True)
class Alignment:
    """letters uint8[S, N] (0..21, 21 a gap), deletions int32[S, N], names[S]. Row 0 is the query."""

    letters: np.ndarray
    deletions: np.ndarray
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.letters)


def single_sequence(sequence: str) -> Alignment:
    """The query alone."""
    letters = _CODES[np.frombuffer(sequence.encode(), np.uint8)][None]
    return Alignment(letters, np.zeros(letters.shape, np.int32), ("query",))


def read_alignment(path: Path) -> Alignment:
    """The alignment of an .a3m, .sto or .fasta file (A3M without insertions), recognised by what it begins with.

    Raises UserError for a file that is none, with the row and what is wrong with it.
    """
    text = read_alignment_text(path, "an A3M or Stockholm file")
    if text.lstrip().startswith("# STOCKHOLM"):
        return parse_stockholm(text, path)
    if text.lstrip().startswith((">", "#")):
        return parse_a3m(text, path)
    raise UserError(f"{path} begins neither with '>' (A3M) nor with '# STOCKHOLM'; give one of these")


def read_alignment_text(path: Path, wanted: str) -> str:
    """The text of a file, without the NUL that ColabFold's server puts behind each part of an A3M.

    wanted  what the file should be, for the line that says why it cannot be read

    Raises UserError for a NUL elsewhere, which a damaged disk or an interrupted copy leaves.
    """
    text = re.sub(r"(?m)^\0(?=>|\s*\Z)", "", read_text(path, wanted))
    before, found, _ = text.partition("\0")
    if found:
        raise UserError(f"{path}, line {before.count(chr(10)) + 1}: a NUL byte; the file is damaged, give {wanted}")
    return text


def parse_a3m(text: str, origin: object = "the A3M") -> Alignment:
    """Upper case and '-' are columns, lower case is inserted before the next column, '.' is nothing."""
    names: list[str] = []
    rows: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith(">"):
            names.append(line[1:].strip())
            rows.append([])
        elif line.strip() and not line.startswith("#"):
            if not rows:
                raise UserError(f"{origin}: letters before the first '>' line; give an A3M file")
            rows[-1].append(line.strip())
    if not rows:
        raise UserError(f"{origin} holds no sequence; its first must be the query")
    pairs = [_columns("".join(parts)) for parts in rows]
    described, length = complex_lengths(text), len(pairs[0][0])
    if described is not None and (sum(described[0]) != length or len(described[0]) != len(described[1])):
        line = text.lstrip().partition("\n")[0].rstrip()
        raise UserError(
            f"{origin}: its first line, {line!r}, describes another query than the row below, of {length} residues; "
            "the file is damaged, give the alignment as it was"
        )
    return _aligned(names, [kept for kept, _ in pairs], [skipped for _, skipped in pairs], origin)


def complex_lengths(text: str) -> tuple[list[int], list[int]] | None:
    """Lengths and copies of the sequences of a complex's A3M of ColabFold (`#59,58<tab>1,1`); None for any other."""
    first, _, _ = text.lstrip().partition("\n")
    found = re.fullmatch(r"#(\d+(?:,\d+)*)\t(\d+(?:,\d+)*)\s*", first)
    if found is None:
        return None
    lengths, copies = ([int(number) for number in group.split(",")] for group in found.groups())
    return lengths, copies


def _columns(row: str) -> tuple[str, list[int]]:
    kept, skipped, count = [], [], 0
    for letter in row:
        if letter.islower():
            count += 1
        elif letter != ".":
            kept.append(letter)
            skipped.append(count)
            count = 0
    return "".join(kept), skipped


def parse_stockholm(text: str, origin: object = "the Stockholm file") -> Alignment:
    """Columns are those where the first sequence has a residue; '.' is a gap, case does not matter."""
    rows: dict[str, list[str]] = {}
    lines, ended = text.splitlines(), False
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if ended:
            raise UserError(f"{origin}, line {number}: more behind the closing line '//'; give a file of one alignment")
        ended = line.rstrip() == "//"
        if ended or line.startswith("#"):
            continue
        fields = line.split()
        if len(fields) != 2:
            raise UserError(f"{origin}: the line {line[:40]!r} is not a name and letters; give a Stockholm file")
        rows.setdefault(fields[0], []).append(fields[1])
    if not ended:
        raise UserError(f"{origin} is cut off at line {len(lines)}: it lacks the closing line '//'; give a whole file")
    if not rows:
        raise UserError(f"{origin} holds no sequence; its first must be the query")
    whole = ["".join(parts).upper().replace(".", "-") for parts in rows.values()]
    for name, row in zip(rows, whole):
        if len(row) != len(whole[0]):
            raise UserError(
                f"{origin}: {name} has {len(row)} columns and the query {len(whole[0])}; the file is damaged"
            )
    is_column = np.frombuffer(whole[0].encode("latin-1", "replace"), np.uint8) != ord("-")
    kept, skipped = [], []
    for row in whole:
        codes = np.frombuffer(row.encode("latin-1", "replace"), np.uint8)
        inserted = np.cumsum((codes != ord("-")) & ~is_column)[is_column]
        kept.append(codes[is_column].tobytes().decode("latin-1"))
        skipped.append(np.diff(inserted, prepend=0).tolist())
    return _aligned(list(rows), kept, skipped, origin)


def _aligned(names: list[str], rows: list[str], deletions: list[list[int]], origin: object) -> Alignment:
    length = len(rows[0])
    if length == 0:
        raise UserError(
            f"{origin}: the first sequence, the query, has no columns, which in A3M are capitals; "
            "give the alignment with its query first"
        )
    letters = np.empty((len(rows), length), np.uint8)
    for number, (name, row) in enumerate(zip(names, rows), 1):
        if len(row) != length:
            raise UserError(
                f"{origin}: row {number} ({name}) has {len(row)} columns and the query {length}; the file is damaged"
            )
        codes = _CODES[np.frombuffer(row.encode("latin-1", "replace"), np.uint8)]
        if (codes == 255).any():
            column = int(np.argmax(codes == 255))
            raise UserError(
                f"{origin}: row {number} ({name}) has {row[column]!r} in column {column + 1}, no amino acid; "
                "use one-letter codes, X where unknown"
            )
        letters[number - 1] = codes
    return Alignment(letters, np.array(deletions, np.int32), tuple(names))


def merge(alignments: Iterable[Alignment]) -> Alignment:
    """Alignments of one query below each other, each distinct row once, in its first place (its first deletions)."""
    seen: set[bytes] = set()
    letters, deletions, names = [], [], []
    for alignment in alignments:
        for row, skipped, name in zip(alignment.letters, alignment.deletions, alignment.names):
            key = row.tobytes()
            if key not in seen:
                seen.add(key)
                letters.append(row)
                deletions.append(skipped)
                names.append(name)
    return Alignment(np.stack(letters), np.stack(deletions), tuple(names))


def check_query(alignment: Alignment, sequence: str, origin: object) -> None:
    """Raises UserError when the alignment's first row is not this sequence (X stands for any letter)."""
    given, expected = alignment.letters[0], single_sequence(sequence).letters[0]
    if len(given) != len(expected):
        raise UserError(
            f"{origin} is the alignment of a query of {len(given)} residues, not of {len(expected)}; {_OWN}"
        )
    unknown = LETTERS["X"]
    differs = (given != expected) & (given != unknown) & (expected != unknown)
    if differs.any():
        at = int(np.argmax(differs))
        theirs, ours = (_NAMES[row[at]] for row in (given, expected))
        raise UserError(
            f"{origin} is the alignment of another query: its residue {at + 1} is {theirs} and not {ours}; {_OWN}"
        )
