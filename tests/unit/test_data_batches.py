"""Batches are pure functions of (step, rank, num_ranks): coverage, mesh independence, resume, masks."""

import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import UserError
from core.data import EvalBatches, GlobalBatches, MapBatches, PairBatches, Prefetch, ShardWriter, TokenBatches
from core.data.batches import IGNORED, shuffled
from core.data.tokens import TokenShards

SEPARATOR = 0
documents_of = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("shards") / "shards"


def write(folder: Path, lengths: list[int], prompts: list[int] | None = None, shard_tokens: int = 7) -> TokenShards:
    """Documents whose tokens are all different, 1, 2, 3 …, so that a token says where in the stream it lies."""
    pairs = prompts is not None
    with ShardWriter(folder, vocab_size=70_000, separator=SEPARATOR, pairs=pairs, shard_tokens=shard_tokens) as writer:
        first = 1
        for length, prompt in zip(lengths, prompts or [0] * len(lengths)):
            writer.add(np.arange(first, first + length), text_bytes=2 * length, num_prompt_tokens=prompt)
            first += length
    return TokenShards(folder)


def whole_stream(shards: TokenShards) -> np.ndarray:
    return shards.read(0, shards.num_tokens)


def predictions(batches: list[dict[str, torch.Tensor]]) -> list[tuple[int, int]]:
    """All (input, target) that bear a loss, in order."""
    return [
        (int(i), int(t))
        for batch in batches
        for i, t in zip(batch["input_ids"].flatten(), batch["targets"].flatten())
        if t != IGNORED
    ]


@settings(deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(-5, 2**40), epoch=st.integers(0, 9))
def test_shuffled_is_a_permutation(size, seed, epoch):
    order = shuffled(np.arange(size), size, seed, epoch)
    assert sorted(order) == list(range(size))
    if size > 20:
        assert list(order) != list(range(size))
        assert list(order) != list(shuffled(np.arange(size), size, seed, epoch + 1))
        assert list(order) != list(shuffled(np.arange(size), size, seed + 1, epoch))


def test_shuffled_spreads_neighbours_evenly():
    """The place of item 0 is uniform over keys: chi-square of 16 bins, 4,000 draws, far tail of 15 degrees."""
    places = [int(shuffled(np.array([0]), 1000, seed, 0)[0]) * 16 // 1000 for seed in range(4000)]
    counts = np.bincount(places, minlength=16)
    assert ((counts - 250) ** 2 / 250).sum() < 50


@settings(max_examples=25, deadline=None)
@given(lengths=documents_of, L=st.integers(1, 8), seed=st.integers(0, 5), epoch=st.integers(0, 2))
def test_an_epoch_predicts_each_target_once(folder, lengths, L, seed, epoch):
    shards = write(folder, lengths)
    stream = whole_stream(shards).tolist()
    if len(stream) <= L:
        return
    batches = TokenBatches(shards, L, 1, seed)
    n = batches.num_sequences
    seen = predictions([batches.batch(step, 0, 1) for step in range(epoch * n, (epoch + 1) * n)])
    assert len(seen) == len(set(seen)) == n * L
    assert len(stream) - 1 - len(seen) < L
    assert set(seen) <= set(pairwise(stream))


def test_the_cut_moves_so_that_no_target_is_left_out_for_good(folder):
    shards = write(folder, [3, 4, 5])
    stream = whole_stream(shards).tolist()
    batches = TokenBatches(shards, 6, 1, seed=0)
    seen = set(predictions([batches.batch(step, 0, 1) for step in range(20 * batches.num_sequences)]))
    assert seen == set(pairwise(stream))


@settings(max_examples=12, deadline=None)
@given(lengths=documents_of, step=st.integers(0, 50), mask=st.booleans())
def test_ranks_together_hold_what_one_rank_holds(folder, lengths, step, mask):
    shards = write(folder, lengths, prompts=[n // 2 for n in lengths])
    for batches in (
        TokenBatches(shards, 1, 24, seed=1, mask_documents=mask),
        EvalBatches(shards, 3, 24, mask_documents=mask),
        PairBatches(shards, 10, 24, seed=1, packed=mask),
    ):
        whole = batches.batch(step, 0, 1)
        for num_ranks in (2, 3, 4, 6, 8):
            parts = [batches.batch(step, rank, num_ranks) for rank in range(num_ranks)]
            assert all(len(part["input_ids"]) == 24 // num_ranks for part in parts)
            for name, tensor in whole.items():
                assert torch.equal(torch.cat([part[name] for part in parts]), tensor)


def test_a_batch_that_does_not_divide_names_what_would(folder):
    batches = TokenBatches(write(folder, [9]), 2, 6, seed=0)
    with pytest.raises(
        UserError, match=r"batch of 6 does not divide over 4 .* use 1, 2, 3, 6 ranks, or .* multiple of 4"
    ):
        batches.batch(0, 0, 4)


def test_too_little_text_is_told_with_numbers(folder):
    shards = write(folder, [3])
    with pytest.raises(UserError, match=r"has 5 tokens, fewer than one sequence \(5 \+ 1\).* at most 4"):
        TokenBatches(shards, 5, 1, seed=0)
    assert TokenBatches(shards, 4, 1, seed=0).num_sequences == 1


@settings(max_examples=25, deadline=None)
@given(lengths=documents_of, L=st.integers(1, 8), global_batch=st.integers(1, 5), mask=st.booleans())
def test_evaluation_sees_every_target_once_in_order(folder, lengths, L, global_batch, mask):
    shards = write(folder, lengths)
    stream = whole_stream(shards).tolist()
    batches = EvalBatches(shards, L, global_batch, mask_documents=mask)
    seen = predictions([batches.batch(step, 0, 1) for step in range(batches.num_batches)])
    assert seen == list(pairwise(stream))
    assert batches.num_targets == len(seen)
    assert batches.num_text_bytes == 2 * sum(lengths)
    assert not predictions([batches.batch(batches.num_batches, 0, 1)])


@settings(max_examples=25, deadline=None)
@given(lengths=documents_of, L=st.integers(1, 12), step=st.integers(0, 9))
def test_masks_follow_the_separators(folder, lengths, L, step):
    shards = write(folder, lengths)
    if shards.num_tokens <= L:
        return
    batch = TokenBatches(shards, L, 2, seed=0, mask_documents=True).batch(step, 0, 1)
    for tokens, documents, positions in zip(batch["input_ids"], batch["documents"], batch["positions"]):
        document = position = 0
        for t in range(L):
            if t and tokens[t] == SEPARATOR:
                document, position = document + 1, 0
            assert (documents[t], positions[t]) == (document, position)
            position += 1


def test_rows_that_are_padded_keep_padding_apart(folder):
    batch = EvalBatches(write(folder, [2, 1]), 8, 2, mask_documents=True).batch(0, 0, 1)
    assert batch["input_ids"].tolist() == [[0, 1, 2, 0, 3, 0, 0, 0], [0] * 8]
    assert batch["targets"].tolist() == [[1, 2, 0, 3, 0, -100, -100, -100], [-100] * 8]
    assert batch["documents"].tolist()[0] == [0, 0, 0, 1, 1, 2, 2, 2]
    assert batch["positions"].tolist()[0] == [0, 1, 2, 0, 1, 0, 1, 2]
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


@settings(max_examples=25, deadline=None)
@given(st.data(), documents_of, st.integers(1, 20), st.booleans())
def test_pairs_predict_completions_only(folder, data, lengths, L, packed):
    prompts = [data.draw(st.integers(0, n)) for n in lengths]
    shards = write(folder, lengths, prompts)
    stream = whole_stream(shards).tolist()
    fits = [n + 1 <= L for n in lengths]
    if not any(fits):
        with pytest.raises(UserError, match="longer than a sequence"):
            PairBatches(shards, L, 1, seed=0, packed=packed, on_error="skip")
        return
    batches = PairBatches(shards, L, 1, seed=0, packed=packed, on_error="skip")
    assert batches.num_too_long == fits.count(False)
    seen = predictions([batches.batch(step, 0, 1) for step in range(batches.num_rows)])
    expected = []
    for start, length, prompt, fit in zip(shards.document_starts.tolist(), lengths, prompts, fits):
        first = start + prompt
        if fit:
            expected += zip(stream[first : start + length + 1], stream[first + 1 : start + length + 2])
    assert sorted(seen) == sorted(expected)


def test_pairs_pack_until_a_row_is_full_and_do_not_see_each_other(folder):
    batches = PairBatches(write(folder, [2, 3, 4], [1, 1, 1]), 7, 1, seed=0)
    rows = sorted((batches.batch(step, 0, 1) for step in range(batches.num_rows)), key=lambda b: -b["input_ids"][0, 1])
    assert rows[1]["input_ids"].tolist() == [[0, 1, 2, 0, 3, 4, 5]]
    assert rows[1]["targets"].tolist() == [[-100, 2, 0, -100, 4, 5, 0]]
    assert rows[1]["documents"].tolist() == [[0, 0, 0, 1, 1, 1, 1]]
    assert rows[1]["positions"].tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert rows[0]["targets"].tolist() == [[-100, 7, 8, 9, 0, -100, -100]]


def test_pairs_too_long_are_named_or_counted(folder):
    shards = write(folder, [2, 9, 3], [1, 1, 1])
    with pytest.raises(
        UserError, match=r"1 of 3 pairs .*the longest has 10, the first is number 2.*--data.on-error skip"
    ):
        PairBatches(shards, 5, 1, seed=0)
    with pytest.raises(UserError, match="plain text"):
        PairBatches(write(folder, [3]), 5, 1, seed=0)


def test_evaluation_of_pairs_counts_completions(folder):
    batches = EvalBatches(write(folder, [2, 9, 3], [1, 4, 2]), 6, 2)
    seen = predictions([batches.batch(step, 0, 1) for step in range(batches.num_batches)])
    assert len(seen) == batches.num_targets == 2 + 6 + 2
    assert [target for _, target in seen] == [2, 0, 7, 8, 9, 10, 11, 0, 14, 0]


def test_map_batches_visit_each_sample_once_an_epoch():
    batches = MapBatches([{"x": torch.tensor(i)} for i in range(10)], 4, seed=3)
    seen = torch.cat([batches.batch(step, 0, 1)["x"] for step in range(5)]).tolist()
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert torch.equal(torch.cat([batches.batch(2, r, 2)["x"] for r in (0, 1)]), batches.batch(2, 0, 1)["x"])
    with pytest.raises(UserError, match="no samples"):
        MapBatches([], 4, seed=3)


def test_a_plain_function_is_sliced_by_rank():
    batches = GlobalBatches(lambda step: {"x": torch.arange(4) + step})
    assert batches.batch(1, 1, 2)["x"].tolist() == [3, 4]


def test_prefetch_resumes_exactly_and_stops(folder):
    batches = TokenBatches(write(folder, [9, 8, 7]), 3, 2, seed=0)
    with Prefetch(batches, depth=3) as ahead:
        first = [next(ahead)["input_ids"] for _ in range(5)]
        assert ahead.state() == {"step": 5}
        following = next(ahead)["input_ids"]
        ahead.load_state({"step": 5})
        assert torch.equal(next(ahead)["input_ids"], following)
        ahead.load_state({"step": 0})
        assert all(torch.equal(next(ahead)["input_ids"], batch) for batch in first)
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_prefetch_raises_at_the_batch_that_failed_and_not_before():
    def function(step):
        if step == 2:
            raise UserError("step 2 is broken")
        return {"x": torch.tensor([step])}

    ahead = Prefetch(GlobalBatches(function), depth=4)
    assert [next(ahead)["x"].item() for _ in range(2)] == [0, 1]
    for _ in range(2):
        with pytest.raises(UserError, match="step 2"):
            next(ahead)
    assert ahead.state() == {"step": 2}
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]
