"""The files of an answer, made of the results of searches, and the searches that are still to be done for them.

uniref.a3m          of each record its own line and its rows, and a NUL byte behind them
bfd.….a3m           the same of environmental databases, where the mode asks for them
pdb70.m8            a line for each hit among structures, the best first
pair.a3m            as many rows for each record, those of one species side by side; gaps where a chain has none
msa.sh              what made them, to be read

Equal queries make equal bytes.
"""

import gzip
import io
import os
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from apps.fold.features.alignment import merge, parse_a3m, single_sequence
from apps.fold.features.hhr import TemplateHit, read_hhr
from apps.fold.features.pairing import pair_rows
from apps.fold.features.structures import structure_of
from apps.fold.search.hhsearch import ProfileJob
from apps.fold.search.jobs import Search, SearchedDatabase, Searches, aligned, jobs_of
from apps.fold.search.program import run
from apps.fold.service.databases import Databases
from apps.fold.service.protocol import Query
from core.config import UserError

UNIREF, ENVIRONMENTAL = "uniref.a3m", "bfd.mgnify30.metaeuk30.smag30.a3m"
STRUCTURES, PAIRED, SCRIPT = "pdb70.m8", "pair.a3m", "msa.sh"
_FILTERED_FROM = 1000  # rows, as ColabFold's server
_FILTER = ("-id", "95", "-diff", "3000", "-maxseq", "1000000", "-v", "0")
_GAPS = "DUMMY"  # the name of a row of gaps

Rows = list[tuple[str, str]]


def to_search(query: Query, databases: Databases, searches: Searches) -> list[Search]:
    """The searches that are to be done next: those among structures begin with what the others have found."""
    mode = query.wanted
    missing: list[Search] = _missing(searches, jobs_of(query.sequences, _sources(query, databases)))
    if missing or not mode.templates or not databases.structures:
        return missing
    return _missing(searches, _profile_jobs(query, databases, searches))


def _missing(searches: Searches, jobs: Iterable[Search]) -> list[Search]:
    """Those without a result; the others' are marked as used, since the oldest are removed where a disk is full."""
    missing = []
    for job in jobs:
        try:
            os.utime(searches.path(job))
        except FileNotFoundError:
            missing.append(job)
    return missing


def _sources(query: Query, databases: Databases) -> list[SearchedDatabase]:
    of_kind = databases.uniref if query.kind == "msa" else databases.pairing
    return [*of_kind, *(databases.environmental if query.wanted.env else ())]


def _profile_jobs(query: Query, databases: Databases, searches: Searches) -> list[ProfileJob]:
    jobs = []
    for sequence in dict.fromkeys(query.sequences):
        a3m = aligned(searches, sequence, databases.uniref[0], databases.max_rows).a3m
        jobs += [ProfileJob(sequence, a3m, *one) for one in databases.structures]
    return jobs


def files(query: Query, databases: Databases, searches: Searches) -> dict[str, bytes]:
    """The files of an answer, of which `to_search` has nothing left."""
    mode = query.wanted
    found = {SCRIPT: _script(query, databases)}
    if query.kind == "pair":
        return {PAIRED: _paired(query, databases, searches).encode()} | found
    texts = {UNIREF: _unpaired(query, databases.uniref, databases, searches)}
    if mode.env:
        texts[ENVIRONMENTAL] = _unpaired(query, databases.environmental, databases, searches)
    if mode.templates:
        texts[STRUCTURES] = "".join(_hits(query, databases, searches))
    return {name: text.encode() for name, text in texts.items()} | found


def packed(contents: Mapping[str, bytes]) -> bytes:
    """A tar.gz without times and owners."""
    plain, out = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=3, mtime=0, filename="") as file:
        file.write(plain.getvalue())
    return out.getvalue()


def _rows(sequence: str, sources: Sequence[SearchedDatabase], databases: Databases, searches: Searches) -> Rows:
    """Names and letters of all databases' rows, the sequence's own left out, each once."""
    found: dict[tuple[str, str], None] = {}
    for source in sources:
        lines = aligned(searches, sequence, source, databases.max_rows).a3m.split("\n")[2:-1]
        found |= dict.fromkeys(zip((line[1:] for line in lines[::2]), lines[1::2], strict=True))
    return list(found)


def _text(rows: Iterable[tuple[str, str]]) -> str:
    return "".join(f">{name}\n{letters}\n" for name, letters in rows)


def _unpaired(query: Query, sources: Sequence[SearchedDatabase], databases: Databases, searches: Searches) -> str:
    parts = []
    for name, sequence in query.records:
        rows = [(name, sequence), *_rows(sequence, sources, databases, searches)]
        if query.wanted.filtered and len(rows) > _FILTERED_FROM:
            rows = _filtered(rows, databases.hhfilter, searches.folder)
        parts.append(_text(rows) + "\0")
    return "".join(parts)


def _filtered(rows: Rows, hhfilter: str, scratch: Path) -> Rows:
    """Without rows that agree in 95 % with another, and of the rest the 3,000 that differ most, by hhfilter."""
    with tempfile.TemporaryDirectory(prefix="hhfilter-", dir=scratch) as folder:
        given, kept = Path(folder, "given.a3m"), Path(folder, "kept.a3m")
        # Numbers in the place of names, which hhfilter may cut.
        given.write_text(_text((str(number), letters) for number, (_, letters) in enumerate(rows)), encoding="utf-8")
        run([hhfilter, "-i", given, "-o", kept, *_FILTER], given)
        numbers = [line[1:].split()[0] for line in kept.read_text(encoding="utf-8").splitlines() if line[:1] == ">"]
    return [rows[number] for number in sorted({0, *(int(text) for text in numbers if text.isdigit())})]


def _paired(query: Query, databases: Databases, searches: Searches) -> str:
    """AlphaFold-Multimer's pairing by species, as `fold predict` does it of the same rows."""
    sequences = query.sequences
    texts: list[Rows] = []
    alignments = []
    for name, sequence in query.records:
        rows = [(name, sequence), *_rows(sequence, _sources(query, databases), databases, searches)]
        whole = parse_a3m(_text(rows), name)
        first = {row.tobytes(): number for number, row in reversed(list(enumerate(whole.letters)))}
        alignment = merge([single_sequence(sequence), whole])  # each distinct row once
        texts.append([rows[first[row.tobytes()]] for row in alignment.letters])
        alignments.append(alignment)
    paired = pair_rows(alignments).rows if len(set(sequences)) > 1 else np.zeros((1, len(sequences)), np.int64)
    if query.wanted.complete:
        paired = paired[(paired >= 0).all(1)]
    parts = []
    for column, rows in enumerate(texts):
        gaps = _GAPS, "-" * len(sequences[column])
        parts.append(_text(gaps if number < 0 else rows[number] for number in paired[:, column]) + "\0")
    return "".join(parts)


def _hits(query: Query, databases: Databases, searches: Searches) -> Iterator[str]:
    """Lines as `mmseqs convertalis` writes them, of structures that this server can send."""
    jobs = _profile_jobs(query, databases, searches) if databases.structures else []
    for name, sequence in query.records:
        hits = [hit for job in jobs if job.sequence == sequence for hit in read_hhr(searches.path(job))]
        for hit in sorted(hits, key=lambda hit: -hit.sum_probs):
            try:
                structure_of(hit.entry, databases.templates or Path())
            except UserError:
                continue
            yield _line(name, hit)


def _line(name: str, hit: TemplateHit) -> str:
    same, pairs = round(hit.identity * hit.columns), hit.columns
    ours, theirs = hit.pairs[:, 0], hit.pairs[:, 1]
    steps = np.stack([np.diff(ours), np.diff(theirs)]) > 1
    columns = [
        *(name, f"{hit.entry}_{hit.chain}", f"{hit.identity:.3f}", pairs, pairs - same, int(steps.any(0).sum())),
        *(ours[0] + 1, ours[-1] + 1, hit.begins + 1, hit.begins + theirs[-1] + 1),
        *(f"{hit.e_value:.3E}", round(hit.score), _cigar(ours, theirs)),
    ]
    return "\t".join(map(str, columns)) + "\n"


def _cigar(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Pairs as M, residues of the query alone as I, those of the structure alone as D."""
    parts: list[tuple[int, str]] = [(1, "M")]
    for here, there in zip(np.diff(ours), np.diff(theirs)):
        skipped = [(int(here) - 1, "I"), (int(there) - 1, "D")]
        for count, kind in (*(one for one in skipped if one[0]), (1, "M")):
            if parts[-1][1] == kind:
                parts[-1] = parts[-1][0] + count, kind
            else:
                parts.append((count, kind))
    return "".join(f"{count}{kind}" for count, kind in parts)


def _script(query: Query, databases: Databases) -> bytes:
    lines = ["#!/bin/sh", "# made by megalith fold msa-server, with the mode " + (query.mode or "all")]
    for source in _sources(query, databases):
        of_tool = ", ".join(f"{name} {value}" for name, value in source.tool.depends_on().items())
        lines.append(f"# {source.database.name}: {of_tool}")
    return ("\n".join(lines) + "\n").encode()
