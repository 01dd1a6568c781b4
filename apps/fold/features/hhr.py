"""hhsearch's results (.hhr): which structures resemble a sequence, and which residues correspond.

A file has a table of hits, then a section for each: a line `No 1`, its name behind `>`, a line of numbers, and the
alignment in blocks of lines `Q name 12 LETTERS 91 (120)` and `T name …`, beside lines of consensus and of secondary
structure. Numbers of residues count from 1, gaps are '-'.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from apps.fold.features.text import read_text
from core.config import UserError

_NUMBERS = re.compile(r"(\w+)=\s*([-+.\deE]+)%?")
_LINE = re.compile(r"([QT]) (\S+)\s+(\d+) (\S+)\s+(\d+) \((\d+)\)\s*$")
_CHAIN = re.compile(r"([0-9a-zA-Z]{4})_([0-9a-zA-Z.]+)(?=\s|$)")
_ASIDE = ("Consensus", "ss_pred", "ss_dssp", "ss_conf", "sa_dssp")


@dataclass(frozen=True)
class TemplateHit:
    """A chain that resembles the query.

    entry, chain     of the structure, 1abc and A
    columns          aligned pairs, as hhsearch counts them
    sum_probs        the expected number of pairs that are right: hits are ranked by it
    e_value, score   hhsearch's
    identity         the share of pairs of equal letters, from 0 to 1
    begins           the first aligned residue of the chain as hhsearch counts them, from 0
    sequence         the part of the chain that is aligned
    query            the part of the query, which begins at `first`, from 0
    pairs            int64[n, 2]: residues of the whole query and of `sequence`, from 0
    """

    entry: str
    chain: str
    columns: int
    sum_probs: float
    sequence: str
    query: str
    first: int
    pairs: np.ndarray
    e_value: float = 0.0
    score: float = 0.0
    identity: float = 0.0
    begins: int = 0


def read_hhr(path: Path) -> list[TemplateHit]:
    """The hits of a file, the best first.  Raises UserError for a file that is none, with the hit that is damaged."""
    lines = read_text(path, "a result of hhsearch", "latin-1").splitlines()
    if not lines or not lines[0].startswith("Query"):
        raise UserError(f"{path} does not begin with 'Query'; give a result of hhsearch (.hhr)")
    starts = [number for number, line in enumerate(lines) if re.fullmatch(r"No \d+\s*", line)]
    ends = [*starts[1:], len(lines)]
    hits = [_hit(lines[a:b], f"{path}, {lines[a].strip()}") for a, b in zip(starts, ends)]
    return sorted((hit for hit in hits if len(hit.pairs)), key=lambda hit: -hit.sum_probs)


def check_hits(hits: list[TemplateHit], sequence: str, origin: object) -> None:
    """Raises UserError where a hit is one of another query (X stands for any letter)."""
    for hit in hits:
        part = sequence[hit.first : hit.first + len(hit.query)]
        if len(part) < len(hit.query) or any(a != b and "X" not in (a, b) for a, b in zip(part, hit.query)):
            raise UserError(f"{origin} is the search of another query: its hit {hit.entry}_{hit.chain} does not fit")


def _hit(lines: list[str], where: str) -> TemplateHit:
    if len(lines) < 3 or not lines[1].startswith(">"):
        raise UserError(f"{where}: no name behind '>'; the file is damaged")
    chain = _CHAIN.match(lines[1][1:])
    if chain is None:
        raise UserError(f"{where}: {lines[1][1:21]!r} is no chain of the PDB (1abc_A); search PDB70, or its like")
    numbers = {name: _number(f"{name}={text}", text, where) for name, text in _NUMBERS.findall(lines[2])}
    rows = {"Q": "", "T": ""}
    first = {"Q": 0, "T": 0}
    for line in lines[3:]:
        found = _LINE.match(line)
        if found is None or found[2] in _ASIDE:
            continue
        side, letters = found[1], found[4]
        if not rows[side].replace("-", ""):
            first[side] = int(found[3]) - 1
        rows[side] += letters
    if len(rows["Q"]) != len(rows["T"]) or "Aligned_cols" not in numbers:
        raise UserError(f"{where}: its lines of query and template do not fit; the file is damaged")
    here, there = (np.cumsum([letter != "-" for letter in rows[side]], dtype=np.int64) - 1 for side in "QT")
    both = [q != "-" and t != "-" for q, t in zip(rows["Q"], rows["T"])]
    pairs = np.stack([here + first["Q"], there], 1)[np.array(both, bool)]
    return TemplateHit(
        chain[1].lower(),
        chain[2],
        int(numbers["Aligned_cols"]),
        numbers.get("Sum_probs", 0.0),
        rows["T"].replace("-", "").upper(),
        rows["Q"].replace("-", "").upper(),
        first["Q"],
        pairs,
        numbers.get("value", 0.0),
        numbers.get("Score", 0.0),
        numbers.get("Identities", 0.0) / 100,
        first["T"],
    )


def _number(given: str, text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{where}: {given} is no number; the file is damaged") from None
