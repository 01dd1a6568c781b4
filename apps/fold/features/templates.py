"""Structures as templates: a chain aligned with the sequence, residue by residue.

Two ways lead to one:

- a structure file that is given for a sequence. The alignment is global (Needleman and Wunsch with affine gaps and
  BLOSUM62, ends free), so any file serves without a search
- a hit of hhsearch (hhr.py), whose structure lies in a folder of mmCIF files. Hits are taken as the original takes
  them (Jumper et al. 2021, supplement, 1.2.3): the best by `sum_probs` first, at most 20, without those that are
  aligned to a tenth of the sequence or less, have fewer than 10 residues, or are all but the sequence itself. Where
  the structure's sequence is not the hit's, the two are aligned, by kalign as in the original if it is installed, else
  as above, and have to agree in 90 % of the shorter one

A prediction is given the first `max_templates` of these. In training a random number of random ones is (`drawn`), so
that the network does not rely on them.

Residues of the sequence without a partner are gaps.
"""

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from apps.fold.features.arrays import template_features
from apps.fold.features.entries import Entry, read_entries
from apps.fold.features.hhr import TemplateHit
from apps.fold.features.structures import Chain, read_structure, structure_of
from apps.fold.features.text import unpacked_name
from apps.fold.model import residues
from apps.fold.model.features import TemplateFeatures
from apps.fold.search.kalign import align_by_kalign, has_kalign
from core.config import UserError

MOST = 20  # hits that are kept
T = TypeVar("T")

_FEWEST = 10  # aligned residues of a template
_ALIGNED_SHARE, _SAME_SHARE = 0.1, 0.95  # of the sequence
_IDENTITY = 0.9  # of a hit's sequence with its structure's
_FEWEST_ATOMS = 5
_LONGEST_STEP = 150.0  # Angstrom between the CAs of neighbours; beyond, a structure is damaged
_DAYS_BEFORE = 60  # that a template of a training chain is older than the chain


@dataclass(frozen=True)
class Template:
    """A structure laid on a sequence of N residues: aatype int64[N] (21 a gap), atom37 in Angstrom, its mask.

    positions[N, 37, 3] and mask[N, 37] are float32.
    """

    name: str
    aatype: np.ndarray
    positions: np.ndarray
    mask: np.ndarray


@dataclass(frozen=True)
class Allowed:
    """The hits that may be templates.

    latest     the last day on which a structure may have been published, as 2018-04-30; empty: any
    without    an entry that may not be one (1abc): in training the chain's own
    """

    latest: str = ""
    without: str = ""

    def __post_init__(self) -> None:
        if self.latest and not is_date(self.latest):
            raise UserError(f"{self.latest!r} is no date; give it as 2018-04-30")

    def before(self, entry: Entry) -> "Allowed":
        """Restrict hits for a chain that is learned from: none of its own entry, none published later than it was.

        The original takes what was published 60 days before it.
        """
        latest = self.latest
        if is_date(entry.released):
            day = datetime.date.fromisoformat(entry.released) - datetime.timedelta(days=_DAYS_BEFORE)
            latest = min(latest or day.isoformat(), day.isoformat())
        return Allowed(latest, entry.name.rpartition("_")[0].lower())


ANY = Allowed()


def is_date(text: str) -> bool:
    try:
        return bool(re.fullmatch(r"\d{4}-\d\d-\d\d", text) and datetime.date.fromisoformat(text))
    except ValueError:
        return False


# --- structures that are given ----------------------------------------------------------------------------------------


def read_templates(paths: Sequence[Path], sequence: str) -> list[Template]:
    """One template for each file, of the chain that matches best.

    Raises UserError for a file that holds no chain like the sequence.
    """
    return [_read_template(path, sequence) for path in paths]


def _read_template(path: Path, sequence: str) -> Template:
    candidates = [(align(sequence, chain.sequence), chain) for chain in read_structure(path)]
    pairs, chain = max(candidates, key=lambda c: _identities(sequence, c[1].sequence, c[0]))
    if len(pairs) < _FEWEST:
        raise UserError(f"{path} is no template: only {len(pairs)} of its residues align with the sequence")
    return _on_sequence(f"{unpacked_name(path).stem}_{chain.name}", len(sequence), chain, pairs, chain.sequence)


def align(query: str, other: str) -> np.ndarray:
    """Pairs [n, 2] of residue numbers, from 0, that a global alignment puts below each other."""
    from Bio.Align import PairwiseAligner, substitution_matrices

    aligner = PairwiseAligner()
    aligner.mode = "global"
    aligner.substitution_matrix = substitution_matrices.load("BLOSUM62")
    aligner.open_gap_score, aligner.extend_gap_score = -11, -1
    aligner.end_gap_score = 0
    first, second = ("".join(c if c in residues.THREE_LETTERS else "X" for c in s) for s in (query, other))
    blocks = np.array(aligner.align(first, second)[0].aligned)
    pairs = [np.stack([np.arange(*a), np.arange(*b)], 1) for a, b in zip(*blocks)]
    return np.concatenate([np.zeros((0, 2), np.int64), *pairs])


def _identities(query: str, other: str, pairs: np.ndarray) -> int:
    return sum(query[i] == other[j] for i, j in pairs)


def _on_sequence(name: str, length: int, chain: Chain | Entry, pairs: np.ndarray, letters: str) -> Template:
    """letters  of the chain's residues, as they are told to the network"""
    aatype = np.full(length, residues.GAP, np.int64)
    positions = np.zeros((length, residues.NUM_ATOM37, 3), np.float32)
    mask = np.zeros((length, residues.NUM_ATOM37), np.float32)
    here, there = pairs.T
    aatype[here] = [residues.LETTERS[letters[number]] for number in there]
    positions[here], mask[here] = chain.positions[there], chain.mask[there]
    return Template(name, aatype, positions, mask)


# --- hits -------------------------------------------------------------------------------------------------------------


def templates_of_hits(
    hits: Sequence[TemplateHit], sequence: str, folder: Path, allowed: Allowed = ANY, most: int = MOST
) -> tuple[list[Template], list[str]]:
    """The templates of the best hits, and why better ones than the last of them are none, a line each.

    folder  of mmCIF files: 1abc.cif, or ab/1abc.cif
    """
    found: list[Template] = []
    left_out: list[str] = []
    for hit in hits:
        if len(found) == most:
            break
        try:
            found.append(_template_of(hit, sequence, folder, allowed))
        except UserError as error:
            left_out.append(f"{hit.entry}_{hit.chain}: {error}")
    return found, left_out


def _template_of(hit: TemplateHit, sequence: str, folder: Path, allowed: Allowed) -> Template:
    """Raises UserError with the reason why the hit is no template."""
    if hit.entry == allowed.without:
        raise UserError("it is the sequence's own entry")
    if hit.columns <= _ALIGNED_SHARE * len(sequence):
        raise UserError(f"only {hit.columns} residues are aligned")
    if hit.sequence in sequence and len(hit.sequence) > _SAME_SHARE * len(sequence):
        raise UserError("it is the sequence itself")
    if len(hit.sequence) < _FEWEST:
        raise UserError(f"it has only {len(hit.sequence)} residues")
    path = structure_of(hit.entry, folder)
    chains = _chains_of(path, path.stat().st_mtime_ns)
    if allowed.latest and chains[0].released > allowed.latest:
        raise UserError(f"it was published on {chains[0].released}, after {allowed.latest}")
    entry, there, letters = _located(hit, chains)
    of_hit = hit.pairs[:, 1]
    pairs = np.stack([hit.pairs[:, 0], there[of_hit]], 1)[there[of_hit] >= 0]
    _check_steps(entry)
    found = _on_sequence(f"{hit.entry}_{hit.chain}", len(sequence), entry, pairs, letters)
    if found.mask.sum() < _FEWEST_ATOMS:
        raise UserError("none of its aligned residues was seen")
    return found


@lru_cache(32)
def _chains_of(path: Path, changed_ns: int) -> list[Entry]:
    return read_entries(path)


def _located(hit: TemplateHit, chains: list[Entry]) -> tuple[Entry, np.ndarray, str]:
    """The structure's chain; for each residue of the hit its number there, -1 where there is none; the chain's letters.

    The chain of the hit's name if it has the hit's sequence, else any that has it, else any that has it but for X,
    whose letters the hit then gives, else, of the chain of the name (or the only one), what aligns with it.
    """
    named = [chain for chain in chains if chain.name.rpartition("_")[2] == hit.chain]
    wanted = re.compile("".join("." if letter == "X" else f"(?:{letter}|X)" for letter in hit.sequence))
    numbers, length = np.arange(len(hit.sequence)), len(hit.sequence)
    for chain in (*named, *chains):
        if (first := chain.sequence.find(hit.sequence)) >= 0:
            return chain, numbers + first, chain.sequence
    for chain in chains:
        if found := wanted.search(chain.sequence):
            first = found.start()
            return chain, numbers + first, chain.sequence[:first] + hit.sequence + chain.sequence[first + length :]
    if not named and len(chains) > 1:
        raise UserError(f"its structure has no protein chain {hit.chain}")
    chain = (*named, *chains)[0]
    pairs = (align_by_kalign if has_kalign() else align)(hit.sequence, chain.sequence)
    same, shorter = _identities(hit.sequence, chain.sequence, pairs), min(length, len(chain))
    if same < _IDENTITY * shorter:
        raise UserError(f"its structure has another sequence: {same} of {shorter} residues agree")
    there = np.full(length, -1)
    there[pairs[:, 0]] = pairs[:, 1]
    return chain, there, chain.sequence


def _check_steps(entry: Entry) -> None:
    seen = entry.mask[:, residues.CA] > 0
    steps = np.linalg.norm(np.diff(entry.positions[:, residues.CA], axis=0), axis=-1)
    if (steps * (seen[1:] & seen[:-1]) > _LONGEST_STEP).any():
        raise UserError(f"neighbours in its structure are more than {_LONGEST_STEP:g} Angstrom apart")


# --- for the network --------------------------------------------------------------------------------------------------


def drawn(templates: Sequence[T], most: int, generator: np.random.Generator) -> tuple[T, ...]:
    """The templates of a training step: of n templates min(n', most) random ones, n' uniform from 0 to n (1.2.3)."""
    first = int(generator.integers(len(templates) + 1))
    order = generator.permutation(len(templates))[first : first + most]
    return tuple(templates[number] for number in order)


def features_of_templates(templates: Sequence[Template]) -> TemplateFeatures | None:
    """The network's features of templates, with a batch of one; None where there are none."""
    if not templates:
        return None
    parts = [(one.aatype, one.positions, one.mask) for one in templates]
    aatype, positions, mask = (torch.from_numpy(np.stack(arrays))[None] for arrays in zip(*parts))
    return template_features(aatype, torch.ones(1, len(templates)), positions, mask)
