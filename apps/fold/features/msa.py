"""An alignment as the network's features, as the original makes them (Jumper et al. 2021, supplement, 1.2.6 and 1.2.7).

    1. a random order of the rows behind the query; the first become cluster centres, the rest extra rows
    2. 15 % of the centres' letters (the model's `hidden_share`) are hidden: masked (0.7), drawn from the column's
       profile (0.1), drawn uniformly (0.1), or kept (0.1). So the network was trained, and so it predicts
    3. each extra row joins the centre that it agrees with in most letters (gaps do not count)
    4. of each cluster: the profile of its letters and its mean deletion
    5. a random choice of the extra rows goes into the extra stack

What is random is drawn first (`draw`), so that the rest (`features_of`) is a function of it. Padding to fixed sizes,
which the original adds, is left out: rows of padding are masked and change nothing.
"""

from dataclasses import dataclass

import numpy as np
import torch

from apps.fold.features.alignment import Alignment
from apps.fold.features.sequences import residue_types
from apps.fold.model import residues
from apps.fold.model.config import ModelConfig
from apps.fold.model.features import Features, TemplateFeatures

UNIFORM, PROFILE, SAME = 0.1, 0.1, 0.1  # of hidden letters
_STRIP = 512  # extra rows compared with the centres at once, of which
_COLUMNS = 16  # so many columns at a time
_CLUSTERS = 16  # clusters whose letters are counted at once


@dataclass(frozen=True)
class Draw:
    """The random choices of one iteration's features.

    order    all rows but the first, in random order
    letters  uint8[centres, N]: the centres' letters, some of them hidden
    extra    numbers of extra rows, in random order; the first of them are taken
    hidden   bool[centres, N]: which letters are hidden, those that were kept all the same included
    """

    order: np.ndarray
    letters: np.ndarray
    extra: np.ndarray
    hidden: np.ndarray


def num_centres(config: ModelConfig, alignment: Alignment) -> int:
    """Rows of the MSA: those of templates are reserved in models that have templates."""
    reserved = config.max_templates if config.templates is not None else 0
    return min(config.max_msa - reserved, len(alignment))


def draw(alignment: Alignment, config: ModelConfig, generator: np.random.Generator) -> Draw:
    """Random numbers for one iteration."""
    order = generator.permutation(np.arange(1, len(alignment)))
    count = num_centres(config, alignment)
    rows = alignment.letters[np.concatenate([[0], order[: count - 1]])]
    hidden = generator.random(rows.shape) < config.hidden_share
    probabilities = _replacements(alignment.letters, rows[hidden], np.nonzero(hidden)[1])
    cumulative = probabilities.cumsum(-1)
    drawn = (generator.random((len(cumulative), 1)) * cumulative[:, -1:] >= cumulative).sum(-1)
    letters = rows.copy()
    letters[hidden] = drawn
    return Draw(order, letters, generator.permutation(len(alignment) - count), hidden)


def _replacements(all_letters: np.ndarray, letters: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Probabilities [.., 23] of what takes the place of hidden letters."""
    profile = _profile(all_letters)[columns]
    probabilities = np.zeros((len(letters), 23))
    probabilities[:, :20] = UNIFORM / 20
    probabilities[:, :22] += PROFILE * profile
    probabilities[np.arange(len(letters)), letters] += SAME
    probabilities[:, residues.MASKED] = 1 - UNIFORM - PROFILE - SAME
    return probabilities


def _profile(letters: np.ndarray) -> np.ndarray:
    """Shares [N, 22] of the letters in each column."""
    counts = [np.count_nonzero(letters == letter, axis=0) for letter in range(22)]
    return np.stack(counts, -1) / len(letters)


def true_letters(alignment: Alignment, drawn: Draw) -> np.ndarray:
    """uint8[centres, N]: the centres' letters as they were before some were hidden."""
    return alignment.letters[np.concatenate([[0], drawn.order[: len(drawn.letters) - 1]])]


def features_of(
    sequence: str,
    alignment: Alignment,
    drawn: Draw,
    config: ModelConfig,
    templates: TemplateFeatures | None = None,
) -> Features:
    """The features of one iteration, with a batch of one.  The alignment's row 0 is the sequence's."""
    count, N = len(drawn.letters), alignment.letters.shape[1]
    centres = np.concatenate([[0], drawn.order[: count - 1]])
    others = drawn.order[count - 1 :]
    extra, extra_deletions = alignment.letters[others], alignment.deletions[others]
    deletions = alignment.deletions[centres].astype(np.float32)
    msa = np.zeros((count, N, 49), np.float32)  # filled in place: all its parts beside it are several times its bytes
    np.put_along_axis(msa, drawn.letters[..., None].astype(np.int64), 1, -1)
    msa[..., 23], msa[..., 24] = (channel[..., 0] for channel in _deletion_channels(deletions))
    _add_clusters(msa[..., 25:], drawn.letters, deletions, extra, extra_deletions)

    aatype = residue_types(sequence)
    target = np.concatenate([np.zeros((N, 1)), np.eye(21)[aatype]], -1)
    chosen = drawn.extra[: config.max_extra_msa]
    extra_mask = np.ones((len(chosen), N))
    extra, extra_deletions = extra[chosen], extra_deletions[chosen]
    if not len(chosen):  # one masked row: no stack without a row
        extra, extra_deletions, extra_mask = (np.zeros((1, N), np.uint8), np.zeros((1, N)), np.zeros((1, N)))
    has_deletion, deletion = (channel[..., 0] for channel in _deletion_channels(extra_deletions))

    def real(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.asarray(array, np.float32))[None]

    return Features(
        aatype_BN=torch.from_numpy(aatype)[None],
        residue_index_BN=torch.arange(N)[None],
        mask_BN=torch.ones(1, N),
        target_BNF=real(target),
        msa_BSNF=real(msa),
        msa_mask_BSN=torch.ones(1, count, N),
        extra_msa_BEN=torch.from_numpy(extra.astype(np.int64))[None],
        extra_has_deletion_BEN=real(has_deletion),
        extra_deletion_BEN=real(deletion),
        extra_mask_BEN=real(extra_mask),
        templates=templates,
    )


def squashed(deletions: np.ndarray) -> np.ndarray:
    """Lengths between 0 and 1."""
    return np.arctan(deletions / 3) * (2 / np.pi)


def _deletion_channels(deletions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[.., 1] each: whether there is a deletion, and its length between 0 and 1."""
    return np.clip(deletions, 0, 1)[..., None], squashed(deletions)[..., None]


def _add_clusters(
    channels: np.ndarray, centres: np.ndarray, deletions: np.ndarray, extra: np.ndarray, extra_deletions: np.ndarray
) -> None:
    """Into channels [S, N, 24]: the clusters' profile, the centre as it is after hiding included, and mean deletion.

    Counted in fp64, some clusters at a time.
    """
    S, N = centres.shape
    assigned = assign(centres, extra)
    order = np.argsort(assigned, kind="stable")
    ends = np.searchsorted(assigned[order], np.arange(S + 1))
    for first in range(0, S, _CLUSTERS):
        last = min(first + _CLUSTERS, S)
        rows, num = order[ends[first] : ends[last]], last - first
        cells = ((assigned[rows] - first)[:, None] * N + np.arange(N)).ravel()
        letters = np.bincount(cells * 23 + extra[rows].ravel(), minlength=num * N * 23).reshape(num, N, 23)
        skipped = np.bincount(cells, extra_deletions[rows].ravel(), minlength=num * N).reshape(num, N)
        sizes = 1e-6 + 1 + np.diff(ends[first : last + 1])[:, None]
        channels[first:last, :, :23] = (letters + np.eye(23)[centres[first:last]]) / sizes[..., None]
        channels[first:last, :, 23] = squashed((skipped + deletions[first:last]) / sizes)


def assign(centres: np.ndarray, extra: np.ndarray) -> np.ndarray:
    """The centre of each extra row: the first of those that it agrees with in most letters, gaps and masks aside."""
    seen = np.concatenate([np.ones(21), np.zeros(2)]).astype(np.float32)
    eye = np.eye(23, dtype=np.float32)
    chosen = [np.zeros(0, np.int64)]
    for first in range(0, len(extra), _STRIP):
        strip = extra[first : first + _STRIP]
        agreement = torch.zeros(len(strip), len(centres))  # whole numbers: their sums are exact in any order
        for at in range(0, centres.shape[1], _COLUMNS):
            ours, theirs = (rows[:, at : at + _COLUMNS] for rows in (strip, centres))
            compared = torch.from_numpy((eye * seen)[theirs].reshape(len(centres), -1))
            agreement.addmm_(torch.from_numpy(eye[ours].reshape(len(strip), -1)), compared.T)
        chosen.append(np.argmax(agreement.numpy(), axis=1))
    return np.concatenate(chosen)
