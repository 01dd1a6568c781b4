"""The MSA of a complex as AlphaFold-Multimer's network draws it, anew in each recycling iteration.

(Evans et al. 2021; the released code's modules_multimer.py)

    1. an order of the rows by Gumbel noise: first those that are kept (`cluster_bias`), then the others, then padding.
       The first become cluster centres, the rest extra rows, of which the network reads the first
    2. 15 % of the centres' letters (`hidden_share`) are hidden, as of monomers (msa.py)
    3. each extra row joins the centre that it agrees with in most letters (gaps do not count); where several are as
       near, it is shared by them. It counts as often as it has columns: so it was trained
    4. of each cluster: the profile of its letters and its mean deletion

What is random is drawn first (`draw_rows`), so that the rest (`features_of_complex`) is a function of it.

Shapes: N residues, S rows, C centres, E extra rows, T templates.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from apps.fold.features.arrays import template_features
from apps.fold.features.msa import PROFILE, SAME, UNIFORM, squashed
from apps.fold.model import residues
from apps.fold.model.config import MultimerConfig
from apps.fold.model.features import ChainIds, Features

_STRIP = 64  # extra rows that are counted at once
_EPS = 1e-6


@dataclass(frozen=True)
class Complex:
    """What the network is given of a complex, before rows are drawn.

    aatype, residue_index, asym_id, entity_id, sym_id     int64[N]; positions count within each chain
    mask                                                   float32[N], 1 where a residue is
    msa, deletions, msa_mask                               uint8[S, N] (0..21), float32[S, N], float32[S, N]
    cluster_bias                                           float32[S], 1 for rows that become centres in any case
    bert_mask                                              float32[S, N], 1 where a chain has a row of its own
    template_aatype, template_positions, template_mask     int64[T, N], float32[T, N, 37, 3], float32[T, N, 37]
    """

    aatype: np.ndarray
    residue_index: np.ndarray
    asym_id: np.ndarray
    entity_id: np.ndarray
    sym_id: np.ndarray
    mask: np.ndarray
    msa: np.ndarray
    deletions: np.ndarray
    msa_mask: np.ndarray
    cluster_bias: np.ndarray
    bert_mask: np.ndarray
    template_aatype: np.ndarray
    template_positions: np.ndarray
    template_mask: np.ndarray


@dataclass(frozen=True)
class Drawn:
    """The random choices of one iteration.

    order    all rows
    letters  uint8[C, N]: the centres' letters, some of them hidden
    hidden   bool[C, N]: which, those that were kept all the same included; None where nobody asks
    """

    order: np.ndarray
    letters: np.ndarray
    hidden: np.ndarray | None = None


def gumbel(uniform: np.ndarray) -> np.ndarray:
    """Noise of uniform numbers from 0 to below 1, in their format."""
    eps = uniform.dtype.type(_EPS)
    return -np.log(-np.log(uniform + eps) + eps)


def order_of_rows(one: Complex, noise_S: np.ndarray) -> np.ndarray:
    """All rows, the first drawn first."""
    shown = np.clip(one.msa_mask.sum(-1), 0, 1).astype(np.float32)
    logits = (shown - 1) * np.float32(1e6) + one.cluster_bias.astype(np.float32) * np.float32(1e6)
    return np.argsort(logits + noise_S.astype(np.float32), kind="stable")[::-1]


def replacements(letters: np.ndarray, profiles: np.ndarray) -> np.ndarray:
    """Logarithms [.., 23] of the probabilities of what takes the place of letters, by their columns' profiles."""
    probabilities = np.zeros((*letters.shape, 23), np.float32)
    probabilities[..., :20] = UNIFORM / 20
    probabilities[..., :22] += PROFILE * profiles
    probabilities[..., :22] += SAME * np.eye(22, dtype=np.float32)[letters]
    probabilities[..., residues.MASKED] = 1 - UNIFORM - PROFILE - SAME
    return np.log(probabilities + np.float32(_EPS))


def profile_of(one: Complex) -> np.ndarray:
    """Shares [N, 22] of the letters in each column, over all rows."""
    counts = [((one.msa == letter) * one.msa_mask).sum(0) for letter in range(22)]
    return (np.stack(counts, -1) / (1e-10 + one.msa_mask.sum(0))[:, None]).astype(np.float32)


def draw_rows(one: Complex, config: MultimerConfig, generator: np.random.Generator) -> Drawn:
    """Random numbers for one iteration."""
    order = order_of_rows(one, gumbel(generator.random(len(one.msa), dtype=np.float32)))
    centres = order[: config.max_msa]
    letters, mask = one.msa[centres].copy(), one.msa_mask[centres]
    hidden = (generator.random(letters.shape) < config.hidden_share) & (mask > 0)
    logits = replacements(letters[hidden], profile_of(one)[np.nonzero(hidden)[1]])
    noise = gumbel(generator.random(logits.shape, dtype=np.float32))
    letters[hidden] = (logits + noise).argmax(-1)
    letters[mask == 0] = 0
    return Drawn(order, letters, hidden)


def features_of_complex(one: Complex, drawn: Drawn, config: MultimerConfig) -> Features:
    """The features of one iteration, with a batch of one."""
    C, N = drawn.letters.shape
    centres, others = drawn.order[:C], drawn.order[C:]
    deletions, mask = one.deletions[centres], one.msa_mask[centres]
    msa = np.zeros((C, N, 49), np.float32)
    np.put_along_axis(msa, drawn.letters[..., None].astype(np.int64), 1, -1)
    msa[..., 23], msa[..., 24] = np.clip(deletions, 0, 1), squashed(deletions)
    profile, skipped = clusters(drawn.letters, deletions, mask, one.msa[others], one.deletions[others],
                                one.msa_mask[others])  # fmt: skip
    msa[..., 25:48], msa[..., 48] = profile, squashed(skipped)

    chosen = others[: config.max_extra_msa]
    extra, extra_deletions, extra_mask = one.msa[chosen], one.deletions[chosen], one.msa_mask[chosen]
    if not len(chosen):  # one masked row: no stack without a row
        extra, extra_deletions, extra_mask = (np.zeros((1, N), np.uint8), np.zeros((1, N)), np.zeros((1, N)))

    def real(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.float32))[None]

    def whole(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int64))[None]

    templates = template_features(
        whole(one.template_aatype),
        torch.ones(1, len(one.template_aatype)),
        real(one.template_positions),
        real(one.template_mask),
        backbone=True,
    )
    return Features(
        aatype_BN=whole(one.aatype),
        residue_index_BN=whole(one.residue_index),
        mask_BN=real(one.mask),
        target_BNF=real(np.eye(21)[one.aatype]),
        msa_BSNF=real(msa),
        msa_mask_BSN=real(mask),
        extra_msa_BEN=whole(extra),
        extra_has_deletion_BEN=real(np.clip(extra_deletions, 0, 1)),
        extra_deletion_BEN=real(squashed(extra_deletions)),
        extra_mask_BEN=real(extra_mask),
        templates=templates,
        chains=ChainIds(whole(one.asym_id), whole(one.entity_id), whole(one.sym_id)),
    )


def clusters(
    centres: np.ndarray, deletions: np.ndarray, mask: np.ndarray, extra: np.ndarray, extra_deletions: np.ndarray,
    extra_mask: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The clusters' profile [C, N, 23] and mean deletion [C, N], counted in fp64."""
    C, N = centres.shape
    letters = np.eye(23)[centres] * mask[..., None]
    sums, skipped, counts = letters.copy(), deletions.astype(np.float64), np.ones(C)
    seen = letters.copy()
    seen[..., residues.GAP :] = 0  # neither gaps nor hidden letters agree
    compared = torch.from_numpy(seen.reshape(C, -1).astype(np.float32))
    for first in range(0, len(extra), _STRIP):
        strip, strip_mask = extra[first : first + _STRIP], extra_mask[first : first + _STRIP]
        theirs = np.eye(23)[strip] * strip_mask[..., None]
        rows = torch.from_numpy(theirs.reshape(len(strip), -1).astype(np.float32))
        agreement = (rows @ compared.T).numpy()  # whole numbers: exact in any order
        nearest = agreement == agreement.max(1, keepdims=True)
        weights = nearest / nearest.sum(1, keepdims=True) * (strip_mask.astype(np.float64) @ mask.T)
        taken = np.flatnonzero(weights.any(0))
        part = weights[:, taken].T
        sums[taken] += (part @ theirs.reshape(len(strip), -1)).reshape(len(taken), N, 23)
        skipped[taken] += part @ (strip_mask * extra_deletions[first : first + _STRIP])
        counts += weights.sum(0)
    return sums / counts[:, None, None], skipped / counts[:, None]
