"""Hits of any tool as rows of an alignment with the query, and A3M files of them."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Hit:
    """A row of an alignment: its name with the part of the sequence, its letters as A3M, the higher the better."""

    name: str
    row: str
    score: float


def ranked(hits: Iterable[Hit], most: int) -> list[Hit]:
    """The best hits first, each row once: an order that does not depend on how a database was cut."""
    return sorted(set(hits), key=lambda hit: (-hit.score, hit.name))[:most]


def as_a3m(sequence: str, hits: Iterable[Hit]) -> str:
    """The alignment, the query first."""
    return "".join(f">{name}\n{row}\n" for name, row in [("query", sequence), *((h.name, h.row) for h in hits)])


def aligned_row(query: str, target: str, first: int, length: int) -> str:
    """A3M's row of a pair of aligned strings of equal length, gaps as '-'.

    first   of the query's residues that is aligned, from 0
    length  of the query
    """
    columns = "".join(t.upper() if q != "-" else t.lower() for q, t in zip(query, target, strict=True))
    covered = len(query) - query.count("-")
    return "-" * first + columns + "-" * (length - first - covered)
