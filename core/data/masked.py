"""Batches of a masked language model: some tokens are hidden, and those are the targets, each where it stands.

Training (Devlin et al. 2019, section 3.1): of each row's tokens 15 %, at least one, are chosen; of these 80 % become
the mask token, 10 % a token drawn from the vocabulary, and 10 % stay. Evaluation: each token is hidden once, in one of
several passes over its row, always by the mask token; with as many passes as places, that is the pseudo-log-likelihood
of Salazar et al. 2020 (Masked Language Model Scoring).

What stands between documents (the separator, and what a family begins texts with) is neither chosen nor counted.

All draws are functions of (seed, step, place in the global batch) alone, by SplitMix64's finaliser as a counter-based
generator, so neither the mesh nor a resume changes them.

Shapes: B rows of this rank, L sequence length.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from core.config import UserError
from core.data.batches import IGNORED, Batches, EvalBatches, mix
from core.data.tokens import TokenShards

SHARE = 0.15
EVALUATION_PASSES = 7
"""of an evaluation: a seventh of the tokens is hidden at a time, about as many as in training"""
_MASKED, _REPLACED = 0.8, 0.9
"""of the chosen tokens: below the first they are masked, below the second replaced, above it kept"""


class MaskedBatches:
    """Batches of text, as a masked language model is trained on them.

    batches  their `targets` are not read
    mask_id  the mask token; vocab_size: tokens below it are drawn
    """

    def __init__(self, batches: Batches, shards: TokenShards, seed: int, *, mask_id: int):
        self.batches, self.seed, self.mask_id = batches, seed, mask_id
        self.global_batch = getattr(batches, "global_batch", None)
        self.special, self.vocab_size = special_tokens(shards), shards.vocab_size

    def batch(self, step: int, rank: int, num_ranks: int) -> dict[str, Tensor]:
        batch = self.batches.batch(step, rank, num_ranks)
        ids_BL = batch["input_ids"].numpy()
        order_BL, way_BL, token_BL = draws(self.seed, step, rank * len(ids_BL), ids_BL.shape, 3)
        chosen_BL = _least(order_BL, ~np.isin(ids_BL, self.special))
        shown_BL = np.where(way_BL < _MASKED, self.mask_id, (token_BL * self.vocab_size).astype(np.int64))
        shown_BL = np.where(chosen_BL & (way_BL < _REPLACED), shown_BL, ids_BL)
        return _predicting(batch, ids_BL, shown_BL, chosen_BL)


class MaskedEvalBatches:
    """Every token of the text hidden once: batch n is pass n % num_passes over the rows of batch n // num_passes."""

    def __init__(self, batches: EvalBatches, *, mask_id: int, num_passes: int = EVALUATION_PASSES):
        if not 1 <= num_passes <= batches.sequence_length:
            raise UserError(
                f"{num_passes} passes over sequences of {batches.sequence_length} tokens; give 1 to that many"
            )
        self.batches, self.mask_id, self.num_passes = batches, mask_id, num_passes
        self.special = special_tokens(batches.shards)
        self.num_batches = batches.num_batches * num_passes

    def batch(self, step: int, rank: int, num_ranks: int) -> dict[str, Tensor]:
        rows, number = divmod(step, self.num_passes)
        batch = self._apart(self.batches.batch(rows, rank, num_ranks), self.batches.lengths(rows, rank, num_ranks))
        ids_BL = batch["input_ids"].numpy()
        (order_BL,) = draws(0, rows, rank * len(ids_BL), ids_BL.shape, 1)
        eligible_BL = ~np.isin(ids_BL, self.special)
        chosen_BL = eligible_BL & (_ranked(order_BL, eligible_BL) % self.num_passes == number)
        return _predicting(batch, ids_BL, np.where(chosen_BL, self.mask_id, ids_BL), chosen_BL)

    def _apart(self, batch: dict[str, Tensor], lengths: Sequence[int]) -> dict[str, Tensor]:
        """The batch with padding as a document of its own, for nothing else hides it from tokens before it."""
        length = self.batches.sequence_length
        if "documents" in batch or min(lengths) == length:
            return batch
        return batch | {"documents": (torch.arange(length) >= torch.tensor(lengths)[:, None]).long()}


def special_tokens(shards: TokenShards) -> Sequence[int]:
    """What stands between the documents' own tokens."""
    return [shards.separator, *shards.begin]


def draws(seed: int, step: int, first_row: int, shape: tuple[int, ...], count: int) -> np.ndarray:
    """fp64[count, B, L] in [0, 1), uniform, for the places of rows first_row … of the global batch."""
    num_rows, length = shape
    keys = np.random.SeedSequence([seed % 2**64, step]).generate_state(count, np.uint64)
    place_BL = np.arange(first_row * length, (first_row + num_rows) * length, dtype=np.uint64).reshape(shape)
    bits = mix(keys[:, None, None] + mix(place_BL + np.uint64(1)))
    return (bits >> np.uint64(11)) * 2.0**-53


def _ranked(order_BL: np.ndarray, eligible_BL: np.ndarray) -> np.ndarray:
    """The number, from 0, of each eligible place of a row when they are put in order; the others come behind."""
    return np.where(eligible_BL, order_BL, 1.0).argsort(1, kind="stable").argsort(1, kind="stable")


def _least(order_BL: np.ndarray, eligible_BL: np.ndarray) -> np.ndarray:
    """bool[B, L]: SHARE of each row's eligible places, at least one, that come first."""
    number_B1 = np.maximum(np.rint(SHARE * eligible_BL.sum(1, keepdims=True)), 1)
    return eligible_BL & (_ranked(order_BL, eligible_BL) < number_B1)


def _predicting(
    batch: dict[str, Tensor], ids_BL: np.ndarray, shown_BL: np.ndarray, chosen_BL: np.ndarray
) -> dict[str, Tensor]:
    targets_BL = np.where(chosen_BL, ids_BL, IGNORED)
    return batch | {"input_ids": torch.from_numpy(shown_BL), "targets": torch.from_numpy(targets_BL)}
