"""Self-distillation: structures that a model has predicted, as targets beside experiments (supplement, 1.3).

The set is a folder that `fold predict` wrote: of each record the first prediction, of a single chain.

1. a residue's confidence is its pLDDT; or, as in the paper, which knew none yet, how much its distances say, in nats:

       c_i = mean over j, 1 <= |i - j| <= 128, of KL(p of |i - j| || p_ij)

   where p_ij is the predicted distribution of the distance, and p of a separation the mean over all pairs of some
   predictions that are so far apart (the paper's 1,000 are of sequences drawn at random)
2. residues of less confidence than `least` have no atoms: they belong to the sequence, and are no targets
3. of the first n rows of a run floor(n share) are predictions; they and experiments go through epochs of their own
4. a row has at most `max_rows` of its alignment, drawn without replacement, on top of what else is drawn
5. pLDDT, PAE and whether an atom was seen are learned from experiments alone

How the paper chose its sequences (Uniclust30, 200 to 1,024 residues, 200 rows and more) is left to who makes the set.

Shapes: N residues, X bins of distances.
"""

import hashlib
import io
import zipfile
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from apps.fold.features.alignment import Alignment
from apps.fold.features.entries import Entry, read_entries
from apps.fold.output.unfinished import read_object
from core.config import UserError
from core.files import replace_file

By = Literal["plddt", "divergence"]
LEAST: dict[By, float] = {"plddt": 70.0, "divergence": 0.5}
"""Residues of at least so much confidence are targets, unless the user says otherwise: 1.3's of divergence."""
SEPARATION = 128
"""the largest distance in the sequence over which divergence is averaged"""
_STEM = "rank_1"
_SAMPLED = 1000
_LEAST_SHARE = 2.0**-24  # the smallest number of fp16, in which probabilities are kept


@dataclass(frozen=True)
class DistillConfig:
    """Predictions that are learned from beside experiments (self-distillation)."""

    predictions: Path | None = None
    """a folder that `megalith fold predict` wrote: of each record the first prediction of a single chain"""
    alignments: Path | None = None
    """a folder of their alignments, NAME.a3m or .sto, or several in NAME/; without: the sequences alone"""
    share: float = 0.75
    """of a run's rows; the others are of experiments"""
    confidence: By = "plddt"
    """what a residue is trusted by: its pLDDT, or the divergence of its distances from those of any residues, which
    takes predictions with --distogram"""
    least: float | None = None
    """residues of less confidence are no targets; by default 70 of pLDDT, 0.5 nats of divergence"""
    max_rows: int = 1000
    """rows of a prediction's alignment at most, drawn anew each time"""

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise UserError(f"distill.share={self.share}; give the share of predictions, above 0 and below 1")
        if self.least is not None and not 0 <= self.least <= (100 if self.confidence == "plddt" else np.inf):
            allowed = "0 to 100" if self.confidence == "plddt" else "0 or more nats"
            raise UserError(f"distill.least={self.least} with distill.confidence={self.confidence}; give {allowed}")
        if self.max_rows < 1:
            raise UserError(f"distill.max_rows={self.max_rows}; give at least 1 row")

    def unread(self) -> dict[str, str]:
        if self.predictions is not None:
            return {}
        why = "and no predictions are learned from; give --distill.predictions FOLDER"
        return dict.fromkeys(("alignments", "share", "confidence", "least", "max_rows"), why)


@dataclass(frozen=True)
class Confidence:
    """Which residues of a prediction are targets.

    reference  the file of the mean distances (`reference_of`), for divergence
    """

    by: By
    least: float
    reference: Path | None = None

    def of(self, path: Path) -> np.ndarray:
        """The confidence of each residue of a prediction, [N].  Raises UserError for one that lacks it."""
        if self.by == "plddt":
            found = read_object(beside_prediction(path, self.by)) or {}
            scores = found.get("plddt")
            if not isinstance(scores, list) or not all(isinstance(one, int | float) for one in scores):
                raise UserError(_lacks(path, self.by))
            return np.array(scores, np.float64)
        assert self.reference is not None
        return divergence(distances_of(path), _reference(self.reference))


def beside_prediction(path: Path, by: By) -> Path:
    """The file of a prediction's confidences."""
    return path.with_name(f"{_STEM}_confidence.json" if by == "plddt" else f"{_STEM}_distogram.npz")


def prediction_files(folder: Path) -> list[Path]:
    """The first prediction of each record.  Raises UserError for a folder that `fold predict` did not write."""
    if not folder.is_dir():
        raise UserError(f"distill.predictions={folder}: there is no such folder; give one that `fold predict` wrote")
    found = sorted(path for path in folder.glob(f"[!.]*/{_STEM}.cif"))
    if not found:
        raise UserError(
            f"distill.predictions={folder} holds no NAME/{_STEM}.cif; give the --out of `megalith fold predict`"
        )
    return found


def read_prediction(path: Path, confidence: Confidence) -> Entry:
    """A prediction without the atoms of residues of little confidence, called as its record.

    Raises UserError for a complex, and for one without confidences.
    """
    chains = read_entries(path)
    if len(chains) > 1:
        raise UserError(f"is a complex of {len(chains)} chains; predictions of single chains are learned from")
    (entry,), scores = chains, confidence.of(path)
    if len(scores) != len(entry):
        raise UserError(f"has {len(entry)} residues and the confidence of {len(scores)}; predict it again")
    kept = (scores >= confidence.least)[:, None]
    return replace(entry, name=path.parent.name, mask=entry.mask * kept, resolution=0.0)


def _lacks(path: Path, by: By) -> str:
    """What to do about a prediction without confidences."""
    name = beside_prediction(path, by).name
    if by == "plddt":
        return f"lacks the pLDDT of its residues, in {name}; predict it again"
    return f"lacks its distances, in {name}; predict it with --distogram, or give --distill.confidence plddt"


# --- divergence -------------------------------------------------------------------------------------------------------


def distances_of(path: Path) -> np.ndarray:
    """A prediction's distributions of distances, [N, N, X].  Raises UserError where it has none."""
    file = beside_prediction(path, "divergence")
    if not file.is_file():
        raise UserError(_lacks(path, "divergence"))
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return arrays["probabilities"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{file} cannot be read ({error}); predict it again") from error


def divergence(shares_NNX: np.ndarray, reference_DX: np.ndarray) -> np.ndarray:
    """c_i in nats, [N]; reference_DX are mean distances of pairs that are 1, 2, … apart, 0 where there were none."""
    N = len(shares_NNX)
    total, count = np.zeros(N), np.zeros(N)
    for apart, mean_X in enumerate(reference_DX[: N - 1], 1):
        if not mean_X.any():
            continue
        known = mean_X > 0
        entropy = float((mean_X[known] * np.log(mean_X[known])).sum())
        shares_PX = _pairs(shares_NNX, apart)
        found = entropy - np.log(np.maximum(shares_PX, _LEAST_SHARE)) @ mean_X
        for at in (slice(0, N - apart), slice(apart, N)):
            total[at] += found
            count[at] += 1
    return total / np.maximum(count, 1)


def _pairs(shares_NNX: np.ndarray, apart: int) -> np.ndarray:
    """Of the pairs that are so far apart, [N - apart, X]."""
    first = np.arange(len(shares_NNX) - apart)
    return shares_NNX[first, first + apart].astype(np.float64)


def reference_of(files: list[Path], cache: Path, *, write: bool) -> Path:
    """The file in the cache of the mean distances by separation of up to 1,000 of the predictions.

    write  whether to make it, where it is not there

    Raises UserError where no prediction has distances.
    """
    order = np.random.default_rng(0).permutation(len(files))
    known = [files[at] for at in order if beside_prediction(files[at], "divergence").is_file()][:_SAMPLED]
    if not known:
        folder, why = files[0].parent.parent, _lacks(files[0], "divergence")
        raise UserError(f"no prediction of {folder} can be used; the first {why}")
    stats = {path.parent.name: beside_prediction(path, "divergence").stat() for path in known}
    stamps = "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats.items())
    path = cache / f"distances-{hashlib.blake2b(stamps.encode(), digest_size=16).hexdigest()}.npy"
    if write and not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        np.save(content, _mean_distances(known))
        replace_file(path, content.getvalue())
    return path


def _mean_distances(files: list[Path]) -> np.ndarray:
    sums, counts = None, np.zeros(SEPARATION)
    for path in files:
        shares_NNX = distances_of(path)
        sums = np.zeros((SEPARATION, shares_NNX.shape[-1])) if sums is None else sums
        for apart in range(1, min(SEPARATION, len(shares_NNX) - 1) + 1):
            shares_PX = _pairs(shares_NNX, apart)
            sums[apart - 1] += shares_PX.sum(0)
            counts[apart - 1] += len(shares_PX)
    assert sums is not None
    return sums / np.maximum(sums.sum(-1, keepdims=True), 1e-9)


@lru_cache(1)
def _reference(path: Path) -> np.ndarray:
    return np.load(path, allow_pickle=False)


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turns:
    """Which rows of a run are predictions: of the first n rows floor(n share)."""

    share: Fraction

    def place(self, row: int) -> tuple[bool, int]:
        """Whether a row of the run, from 0, is a prediction, and its number among those of its kind."""
        before, after = (number * self.share.numerator // self.share.denominator for number in (row, row + 1))
        return after > before, before if after > before else row - before


def turns_of(share: float) -> Turns:
    """Turns of a share as it is typed: 0.1 is a tenth."""
    return Turns(Fraction(str(share)))


def some_of(alignment: Alignment, most: int, generator: np.random.Generator) -> Alignment:
    """The query and rows drawn without replacement, at most so many together, in their order."""
    if len(alignment) <= most:
        return alignment
    kept = [0, *np.sort(1 + generator.permutation(len(alignment) - 1)[: most - 1]).tolist()]
    names = tuple(alignment.names[row] for row in kept)
    return Alignment(alignment.letters[kept], alignment.deletions[kept], names)
