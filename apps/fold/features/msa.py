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

_UNIFORM, _PROFILE, _SAME = 0.1, 0.1, 0.1
_STRIP = 512  # extra rows compared with the centres at once


@dataclass(frozen=True)
class Draw:
    """What is random in one iteration's features.

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
    probabilities[:, :20] = _UNIFORM / 20
    probabilities[:, :22] += _PROFILE * profile
    probabilities[np.arange(len(letters)), letters] += _SAME
    probabilities[:, residues.MASKED] = 1 - _UNIFORM - _PROFILE - _SAME
    return probabilities


def _profile(letters: np.ndarray) -> np.ndarray:
    """Shares [N, 22] of the letters in each column."""
    N = letters.shape[1]
    counts = np.bincount((np.arange(N) * 22 + letters).ravel(), minlength=N * 22)
    return counts.reshape(N, 22) / len(letters)


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
    profile, mean_deletion = _clusters(drawn.letters, deletions, extra, extra_deletions)

    aatype = residue_types(sequence)
    target = np.concatenate([np.zeros((N, 1)), np.eye(21)[aatype]], -1)
    msa = [np.eye(23)[drawn.letters], *_deletion_channels(deletions), profile, _squashed(mean_deletion)[..., None]]
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
        msa_BSNF=real(np.concatenate(msa, -1)),
        msa_mask_BSN=torch.ones(1, count, N),
        extra_msa_BEN=torch.from_numpy(extra.astype(np.int64))[None],
        extra_has_deletion_BEN=real(has_deletion),
        extra_deletion_BEN=real(deletion),
        extra_mask_BEN=real(extra_mask),
        templates=templates,
    )


def _squashed(deletions: np.ndarray) -> np.ndarray:
    return np.arctan(deletions / 3) * (2 / np.pi)


def _deletion_channels(deletions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[.., 1] each: whether there is a deletion, and its length between 0 and 1."""
    return np.clip(deletions, 0, 1)[..., None], _squashed(deletions)[..., None]


def _clusters(
    centres: np.ndarray, deletions: np.ndarray, extra: np.ndarray, extra_deletions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Profile [S, N, 23] and mean deletion [S, N] of the clusters, the centre as it is after hiding included."""
    S, N = centres.shape
    assigned = assign(centres, extra)
    cells = (assigned[:, None] * N + np.arange(N)).ravel()
    letters = np.bincount(cells * 23 + extra.ravel(), minlength=S * N * 23).reshape(S, N, 23)
    skipped = np.bincount(cells, extra_deletions.ravel(), minlength=S * N).reshape(S, N)
    sizes = 1e-6 + 1 + np.bincount(assigned, minlength=S)[:, None]
    return (letters + np.eye(23)[centres]) / sizes[..., None], (skipped + deletions) / sizes


def assign(centres: np.ndarray, extra: np.ndarray) -> np.ndarray:
    """The centre of each extra row: the first of those that it agrees with in most letters, gaps and masks aside."""
    seen = np.concatenate([np.ones(21), np.zeros(2)]).astype(np.float32)
    eye = np.eye(23, dtype=np.float32)
    compared = torch.from_numpy((eye * seen)[centres].reshape(len(centres), -1))
    chosen = [np.zeros(0, np.int64)]
    for first in range(0, len(extra), _STRIP):
        strip = extra[first : first + _STRIP]
        agreement = torch.from_numpy(eye[strip].reshape(len(strip), -1)) @ compared.T
        chosen.append(np.argmax(agreement.numpy(), axis=1))
    return np.concatenate(chosen)
