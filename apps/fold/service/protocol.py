"""What clients of ColabFold's protocol ask: POST ticket/msa or ticket/pair with a form of `q`, FASTA, and `mode`.

The names of records, numbers from 101, come back as the first header of each record's part of an answer. A mode is
words joined by '-'. Words of other servers (taxonomy, m8output, pairwise, …) are refused by name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import parse_qsl

from apps.fold.features.sequences import parse_fasta
from core.config import UserError

Kind = Literal["msa", "pair"]
Status = Literal["UNKNOWN", "RATELIMIT", "PENDING", "RUNNING", "COMPLETE", "ERROR", "MAINTENANCE"]

MODES: Mapping[Kind, str] = {
    "msa": "all, env, nofilter and env-nofilter, each also with -notemplates",
    "pair": "pairgreedy and paircomplete, each also with -env",
}
_WORDS: Mapping[Kind, frozenset[str]] = {
    "msa": frozenset(("all", "env", "nofilter", "notemplates")),
    "pair": frozenset(("pairgreedy", "paircomplete", "env")),
}
_APART = ("all", "env"), ("pairgreedy", "paircomplete")
_NAME = re.compile(r"[!-~]{1,80}")


@dataclass(frozen=True)
class Mode:
    """What a ticket is to hold.

    env        rows of environmental databases, too
    filtered   rows that are much like others left out
    templates  hits among structures
    complete   of paired rows those alone in which every chain has one
    """

    env: bool
    filtered: bool
    templates: bool
    complete: bool


@dataclass(frozen=True)
class Query:
    """What a ticket is for: records by the client's names, as they were given."""

    kind: Kind
    mode: str
    records: tuple[tuple[str, str], ...]

    @property
    def sequences(self) -> list[str]:
        return [sequence for _, sequence in self.records]

    @property
    def wanted(self) -> Mode:
        return mode_of(self.kind, self.mode)

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "mode": self.mode, "records": [list(record) for record in self.records]}

    @staticmethod
    def of_json(content: Mapping[str, Any]) -> "Query":
        return Query(content["kind"], content["mode"], tuple((name, letters) for name, letters in content["records"]))


def mode_of(kind: Kind, text: str) -> Mode:
    """Raises UserError for a mode that is not served."""
    words = [word for word in text.split("-") if word]
    foreign = next((word for word in words if word not in _WORDS[kind]), None)
    both = next((pair for pair in _APART if set(pair) <= set(words)), None)
    if foreign is not None or both is not None:
        what = (
            f"this server has no {(foreign or '')[:40]!r}"
            if both is None
            else f"{' and '.join(both)} exclude each other"
        )
        raise UserError(f"mode={text[:80]!r}: {what}; ticket/{kind} takes {MODES[kind]}")
    return Mode(
        env="env" in words,
        filtered="nofilter" not in words,
        templates=kind == "msa" and "notemplates" not in words,
        complete="paircomplete" in words,
    )


def query_of(kind: Kind, form: bytes, max_sequences: int, max_residues: int) -> Query:
    """The query of a form (application/x-www-form-urlencoded).  Raises UserError for what is not served."""
    try:
        fields = parse_qsl(form.decode("ascii"), keep_blank_values=True, strict_parsing=True, max_num_fields=16)
    except ValueError:
        raise UserError("the body is no form; send q=FASTA&mode=MODE as application/x-www-form-urlencoded") from None
    given = dict(fields)
    other = next((name for name in given if name not in ("q", "mode")), None)
    if other is not None or len(given) < len(fields):
        raise UserError(f"the form has {'a field twice' if other is None else repr(other[:40])}; send q and mode")
    if not given.get("q", "").strip():
        raise UserError("the form has no q; send FASTA, a line '>101', then the letters")
    mode = given.get("mode", "")
    mode_of(kind, mode)
    records, refused = parse_fasta(given["q"], "q", proteins=True)
    if refused:
        raise UserError(f"q, {refused[0]}")
    if joined := next((record for record in records if record.chains), None):
        raise UserError(f"q, record {joined.name}: chains are records of their own here, not joined by ':'")
    if unnamed := next((record for record in records if not _NAME.fullmatch(record.name)), None):
        raise UserError(f"q, record {unnamed.number}: give it a name of up to 80 ASCII characters")
    if len(records) > max_sequences:
        raise UserError(f"{len(records)} sequences; this server takes {max_sequences} a ticket")
    residues = sum(len(record.sequence) for record in records)
    if residues > max_residues:
        raise UserError(f"{residues} residues; this server takes {max_residues} a ticket")
    return Query(kind, mode, tuple((record.name, record.sequence) for record in records))


def said(answer: Mapping[str, Any]) -> str:
    """Why a ticket is as it is, in a line."""
    found = answer.get("message") or answer.get("reason") or answer.get("status") or "no reason is given"
    return " ".join(str(found).split())[:300]
