"""Batches: pure functions of (step, rank, num_ranks), so data order does not depend on the mesh and resume is a number.

1. A corpus is a list of rows: spans of the token stream of at most L targets each (`TokenBatches`, `EvalBatches`,
   `PairBatches`), or the samples of a map-style dataset (`MapBatches`).
2. Global sample g = (rows of all steps before) + row belongs to epoch g // num_rows; within an epoch a keyed
   permutation (`shuffled`) says which row it is. The permutation is computed from the index alone: nothing to store,
   nothing to replay.
3. Rank r of n gets rows [r * B/n, (r + 1) * B/n) of the global batch. Concatenated over ranks it is what one rank gets.
4. `Prefetch` turns such a function into an iterator with a background thread; its state is the next step.

Shapes: B rows of this rank, L sequence length. Batches are dicts of CPU tensors:
`input_ids[B, L]`, `targets[B, L]` (targets[t] follows input_ids[t]; -100 = not predicted) and, when attention must not
cross documents, `documents[B, L]` (0, 1, … within a row) and `positions[B, L]` (restarting in each document).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from core.config import UserError
from core.data.ramp import BatchSize, batch_size
from core.data.tokens import TokenShards

IGNORED = -100
_FEISTEL_ROUNDS = 6


class Batches(Protocol):
    """All that training asks of data. Anything with this method will do."""

    def batch(self, step: int, rank: int, num_ranks: int) -> dict[str, Tensor]:
        """Rows of data-parallel `rank` of `num_ranks` at `step` (0-based). Must depend on the arguments alone."""
        ...


def rows_of_rank(global_batch: int, rank: int, num_ranks: int) -> range:
    """The rows of the global batch that `rank` holds; UserError where they do not divide evenly."""
    if global_batch % num_ranks:
        divisors = [n for n in range(1, global_batch + 1) if global_batch % n == 0]
        raise UserError(
            f"a global batch of {global_batch} does not divide over {num_ranks} data-parallel ranks; "
            f"use {', '.join(map(str, divisors))} ranks, or a global batch that is a multiple of {num_ranks}"
        )
    rows = global_batch // num_ranks
    return range(rank * rows, (rank + 1) * rows)


def rows_of_step(batches: Batches, step: int) -> int:
    """The rows of the global batch of a step; of batches that do not tell their size, by reading it."""
    size = getattr(batches, "global_batch", None)
    if isinstance(size, BatchSize):
        return size.rows(step)
    return len(next(iter(batches.batch(step, 0, 1).values())))


def some_rows(batches: Batches, step: int, rows: range, num_rows: int) -> dict[str, Tensor]:
    """Any rows of a step's global batch, which has `num_rows`: those of so many ranks that each has a part of them."""
    size = math.gcd(rows.start, len(rows), num_rows)
    parts = [batches.batch(step, row // size, num_rows // size) for row in rows[::size]]
    return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def shuffled(index: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of [0, size) keyed by (seed, epoch), at `index[n]`, in O(1) memory.

    A Feistel network permutes [0, 4^k) ⊇ [0, size); walking its cycles until they re-enter [0, size) restricts it
    (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, section 3).
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.SeedSequence([seed % 2**64, epoch]).generate_state(_FEISTEL_ROUNDS, np.uint64)
    out = index.astype(np.uint64)
    outside = np.arange(len(out))
    while len(outside):
        left, right = out[outside] >> half, out[outside] & mask
        for key in keys:
            left, right = right, left ^ (mix(right + key) & mask)
        out[outside] = left << half | right
        outside = outside[out[outside] >= size]
    return out.astype(np.int64)


def mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea, Flood, 2014): each output bit depends on every input bit."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def _samples(
    step: int, rank: int, num_ranks: int, global_batch: BatchSize, size: int, seed: int
) -> list[tuple[int, int]]:
    """(epoch, row) of each of this rank's samples when every epoch visits `size` rows in its own order."""
    rows = rows_of_rank(global_batch.rows(step), rank, num_ranks)
    sample = np.arange(rows.start, rows.stop) + global_batch.rows_before(step)
    epoch, row = sample // size, sample % size
    for e in np.unique(epoch):
        row[epoch == e] = shuffled(row[epoch == e], size, seed, int(e))
    return list(zip(epoch.tolist(), row.tolist()))


class TokenBatches:
    """Endless shuffled epochs over token shards: documents packed end to end, cut into sequences of L targets.

    An epoch goes through num_sequences * L of the num_tokens - 1 targets once each; the fewer than L left over are
    another few in each epoch, as the cut starts at an offset drawn from (seed, epoch).
    """

    def __init__(
        self,
        shards: TokenShards,
        sequence_length: int,
        global_batch: int | BatchSize,
        seed: int,
        *,
        mask_documents: bool = False,
    ):
        self.shards = shards
        self.sequence_length = sequence_length
        self.global_batch = batch_size(global_batch)
        self.seed = seed
        self.mask_documents = mask_documents
        self.num_sequences, self._slack = divmod(shards.num_tokens - 1, sequence_length)
        if not self.num_sequences:
            raise UserError(
                f"{shards.folder} has {shards.num_tokens} tokens, fewer than one sequence "
                f"({sequence_length} + 1); use more text or a sequence length of at most {shards.num_tokens - 1}"
            )

    def batch(self, step: int, rank: int, num_ranks: int) -> dict[str, Tensor]:
        L = self.sequence_length
        samples = _samples(step, rank, num_ranks, self.global_batch, self.num_sequences, self.seed)
        spans = [(self._offset(epoch) + row * L, L) for epoch, row in samples]
        return _rows(self.shards, spans, L, self.mask_documents)

    def _offset(self, epoch: int) -> int:
        return int(np.random.default_rng([self.seed % 2**64, epoch]).integers(self._slack + 1))


class EvalBatches:
    """Every target of the shards exactly once, in order, in `num_batches` batches; what is left of the last is padding.

    Bits per byte over all batches = sum of token losses / ln 2 / num_text_bytes, exactly: the stream also predicts
    each document's end, which the text pays for. Of prompt/completion pairs the completions (and their bytes) count,
    and a row holds whole pairs as long as they fit.
    """

    def __init__(self, shards: TokenShards, sequence_length: int, global_batch: int, *, mask_documents: bool = False):
        if not shards.num_documents:
            raise UserError(f"{shards.folder} holds no document to evaluate on; use more text or a larger fraction")
        self.shards = shards
        self.sequence_length = sequence_length
        self.global_batch = global_batch
        self.mask_documents = mask_documents
        self._num_places = shards.num_tokens - 1
        unpredicted = len(shards.begin) * shards.num_documents  # the first of them has no token before it
        self.num_targets = self._num_places - max(unpredicted - 1, 0)
        self.num_text_bytes = shards.num_text_bytes
        self._pairs: list[tuple[int, int]] | None = None
        num_rows = -(-self._num_places // sequence_length)
        if shards.loss_starts is not None:
            starts = _pair_starts(shards)
            ends = np.append(starts[1:-1] - bool(shards.begin), starts[-1])  # of each its last target
            self.num_targets = int((ends - shards.loss_starts + 1).sum())
            pieces = [
                (piece, min(stop - piece, sequence_length))
                for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist())
                for piece in range(start, stop, sequence_length)
            ]
            self._pairs = _pack(pieces, sequence_length)
            num_rows = len(self._pairs)
        self.num_batches = -(-num_rows // global_batch)

    def batch(self, step: int, rank: int, num_ranks: int) -> dict[str, Tensor]:
        return _rows(self.shards, self._spans(step, rank, num_ranks), self.sequence_length, self.mask_documents)

    def lengths(self, step: int, rank: int, num_ranks: int) -> list[int]:
        """Of each row of the batch the places that are not padding."""
        return [length for _, length in self._spans(step, rank, num_ranks)]

    def _spans(self, step: int, rank: int, num_ranks: int) -> list[tuple[int, int]]:
        first = step * self.global_batch
        return [self._span(first + row) for row in rows_of_rank(self.global_batch, rank, num_ranks)]

    def _span(self, row: int) -> tuple[int, int]:
        if self._pairs is not None:
            return self._pairs[row] if row < len(self._pairs) else (0, 0)
        start = row * self.sequence_length
        return start, min(max(self._num_places - start, 0), self.sequence_length)


class PairBatches:
    """Endless shuffled epochs over prompt/completion pairs; only completions and their ends are predicted.

    With `packed`, neighbouring pairs share a row as long as they fit (next-fit in stored order) and do not attend to
    each other; otherwise each row holds one pair. A pair longer than a row raises UserError, or with on_error="skip"
    is left out and counted in `num_too_long`.
    """

    def __init__(
        self,
        shards: TokenShards,
        sequence_length: int,
        global_batch: int | BatchSize,
        seed: int,
        *,
        packed: bool = True,
        on_error: str = "raise",
    ):
        if shards.loss_starts is None:
            raise UserError(f"{shards.folder} holds plain text, not prompt/completion pairs; tokenize it as pairs")
        self.shards = shards
        self.sequence_length = sequence_length
        self.global_batch = batch_size(global_batch)
        self.seed = seed
        self._packed = packed
        starts = _pair_starts(shards)
        lengths = np.diff(starts)
        self.num_too_long = int((lengths > sequence_length).sum())
        if self.num_too_long and (on_error == "raise" or self.num_too_long == len(lengths)):
            raise UserError(
                f"{self.num_too_long} of {len(lengths)} pairs in {shards.folder} are longer than a sequence of "
                f"{sequence_length} tokens (the longest has {lengths.max()}, the first is number "
                f"{int((lengths > sequence_length).argmax()) + 1}); use longer sequences, or leave them out with "
                "--data.on-error skip"
            )
        spans = [
            (start, length) for start, length in zip(starts.tolist(), lengths.tolist()) if length <= sequence_length
        ]
        self._spans = _pack(spans, sequence_length) if packed else spans
        self.num_rows = len(self._spans)

    def batch(self, step: int, rank: int, num_ranks: int) -> dict[str, Tensor]:
        samples = _samples(step, rank, num_ranks, self.global_batch, self.num_rows, self.seed)
        return _rows(self.shards, [self._spans[row] for _, row in samples], self.sequence_length, self._packed)


def _pair_starts(shards: TokenShards) -> np.ndarray:
    """Where each pair starts, and where the last ends: a pair predicts as many targets as it has tokens, shifted."""
    return np.append(shards.document_starts, shards.num_tokens - 1)


def _pack(pieces: list[tuple[int, int]], room: int) -> list[tuple[int, int]]:
    """Join (start, length) pieces of the stream into spans: one joins the span before it if they adjoin and fit."""
    spans: list[tuple[int, int]] = []
    for start, length in pieces:
        if spans and sum(spans[-1]) == start and spans[-1][1] + length <= room:
            spans[-1] = (spans[-1][0], spans[-1][1] + length)
        else:
            spans.append((start, length))
    return spans


def _rows(shards: TokenShards, spans: Sequence[tuple[int, int]], L: int, mask_documents: bool) -> dict[str, Tensor]:
    """One row per span (start, number of targets <= L), padded with separators that are not predicted."""
    input_BL = np.full((len(spans), L), shards.separator, np.int64)
    target_BL = np.full((len(spans), L), IGNORED, np.int64)
    for b, (start, length) in enumerate(spans):
        tokens = shards.read(start, start + length + 1) if length else np.zeros(1, np.int64)
        input_BL[b, :length], target_BL[b, :length] = tokens[:-1], tokens[1:]
    batch = {"input_ids": input_BL, "targets": target_BL}
    if mask_documents or shards.begin or shards.loss_starts is not None:
        start_B1 = np.array([start for start, _ in spans])[:, None]
        length_B1 = np.array([length for _, length in spans])[:, None]
        offset_BL = start_B1 + np.arange(L)
        document_BL = np.searchsorted(shards.document_starts, offset_BL, side="right") - 1
        if shards.begin:  # what a document begins with is read, and never predicted
            following_BL = np.searchsorted(shards.document_starts, offset_BL + 1, side="right") - 1
            target_BL[offset_BL + 1 - shards.document_starts[following_BL] < len(shards.begin)] = IGNORED
        if shards.loss_starts is not None:
            target_BL[offset_BL + 1 < shards.loss_starts[document_BL]] = IGNORED
        if mask_documents:
            padding_BL = np.arange(L) >= length_B1
            begin_BL = np.maximum(shards.document_starts[document_BL], start_B1)
            document_BL = document_BL - document_BL[:, :1]
            batch["documents"] = np.where(padding_BL, document_BL.max(1, keepdims=True) + 1, document_BL)
            batch["positions"] = np.where(padding_BL, np.arange(L) - length_B1, offset_BL - begin_BL)
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in batch.items()}


class MapBatches:
    """A map-style dataset (`len`, `dataset[i]`) in endless shuffled epochs, the same on every mesh.

    `collate` turns a list of samples into a dict of tensors; torch's default_collate unless given.
    """

    def __init__(
        self,
        dataset: Any,
        global_batch: int | BatchSize,
        seed: int,
        collate: Callable[[list[Any]], dict[str, Tensor]] = torch.utils.data.default_collate,
    ):
        if not len(dataset):
            raise UserError("the dataset has no samples; give one with at least one")
        self.dataset = dataset
        self.global_batch = batch_size(global_batch)
        self.seed = seed
        self.collate = collate

    def batch(self, step: int, rank: int, num_ranks: int) -> dict[str, Tensor]:
        samples = _samples(step, rank, num_ranks, self.global_batch, len(self.dataset), self.seed)
        return self.collate([self.dataset[row] for _, row in samples])


class GlobalBatches:
    """A function step -> global batch (a dict of tensors with rows in dim 0), of which each rank gets its rows."""

    def __init__(self, function: Callable[[int], dict[str, Tensor]]):
        self.function = function

    def batch(self, step: int, rank: int, num_ranks: int) -> dict[str, Tensor]:
        whole = self.function(step)
        rows = rows_of_rank(len(next(iter(whole.values()))), rank, num_ranks)
        return {name: tensor[rows.start : rows.stop] for name, tensor in whole.items()}
