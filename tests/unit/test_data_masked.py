"""Batches of masked language models: how many tokens are hidden and how, on any mesh; in an evaluation each once."""

import numpy as np
import pytest
import torch

from core.config import UserError
from core.data import EvalBatches, MaskedBatches, MaskedEvalBatches, ShardWriter, TokenBatches, TokenShards

SEPARATOR, BEGIN, MASK, VOCAB = 250, 251, 252, 253


def shards(folder, begin=()) -> TokenShards:
    """Documents of 1 to 60 tokens below 250."""
    generator = np.random.default_rng(0)
    with ShardWriter(folder / "shards", vocab_size=VOCAB, separator=SEPARATOR, begin=begin) as writer:
        for _ in range(300):
            writer.add(generator.integers(0, 250, generator.integers(1, 60)), text_bytes=3)
    return TokenShards(folder / "shards")


def masked(of: TokenShards, rows=24, length=40, seed=5, **options) -> MaskedBatches:
    return MaskedBatches(TokenBatches(of, length, rows, seed, **options), of, seed, mask_id=MASK)


def test_fifteen_in_a_hundred_of_each_row_of_which_eight_tenths_are_masked(tmp_path) -> None:
    of = shards(tmp_path, begin=(BEGIN,))
    batches = masked(of)
    same = replaced = hidden = 0
    for step in range(120):
        plain, batch = batches.batches.batch(step, 0, 1)["input_ids"], batches.batch(step, 0, 1)
        chosen = batch["targets"] != -100
        special = (plain == SEPARATOR) | (plain == BEGIN)
        assert not (chosen & special).any()
        assert torch.equal(chosen.sum(1), (0.15 * (~special).sum(1)).round().clamp(min=1).long())
        assert torch.equal(batch["targets"][chosen], plain[chosen])
        assert torch.equal(batch["input_ids"][~chosen], plain[~chosen])
        shown = batch["input_ids"][chosen]
        hidden += int((shown == MASK).sum())
        same += int((shown == plain[chosen]).sum())
        replaced += int(((shown != MASK) & (shown != plain[chosen])).sum())
    total = hidden + same + replaced
    # Of about 15,000 draws the standard deviation is 0.0033 and 0.0025.
    assert hidden / total == pytest.approx(0.8, abs=0.012)
    assert same / total == pytest.approx(0.1 + 0.1 / VOCAB, abs=0.009)


def test_draws_are_those_of_the_place_in_the_global_batch(tmp_path) -> None:
    """Any number of ranks, and a run that begins at that step; other steps and seeds draw otherwise."""
    of = shards(tmp_path)
    whole = masked(of).batch(7, 0, 1)
    for num_ranks in (2, 3, 8):
        parts = [masked(of, mask_documents=True).batch(7, rank, num_ranks) for rank in range(num_ranks)]
        for name in ("input_ids", "targets"):
            assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])
    hidden = whole["targets"] != -100
    for other in (masked(of).batch(8, 0, 1), masked(of, seed=6).batch(7, 0, 1)):
        assert 0.05 < float(((other["targets"] != -100) & hidden).sum() / hidden.sum()) < 0.3
    assert len({tuple(row.nonzero().flatten().tolist()) for row in hidden}) == len(hidden)


def test_documents_and_positions_are_handed_on(tmp_path) -> None:
    of = shards(tmp_path)
    plain, batch = (of_.batch(0, 0, 1) for of_ in (TokenBatches(of, 40, 24, 5, mask_documents=True),
                                                   masked(of, mask_documents=True)))  # fmt: skip
    for name in ("documents", "positions"):
        assert torch.equal(batch[name], plain[name])


@pytest.mark.parametrize("num_passes", [1, 7, 32])
def test_an_evaluation_hides_every_token_once(tmp_path, num_passes: int) -> None:
    of = shards(tmp_path, begin=(BEGIN,))
    plain = EvalBatches(of, 32, 6)
    batches = MaskedEvalBatches(plain, mask_id=MASK, num_passes=num_passes)
    for rows in range(plain.num_batches):
        ids, seen = plain.batch(rows, 0, 1)["input_ids"], 0
        padding = (torch.arange(6 * 32).view(6, 32) + rows * 6 * 32 >= of.num_tokens - 1).long()
        for number in range(num_passes):
            batch = batches.batch(rows * num_passes + number, 0, 1)
            chosen = batch["targets"] != -100
            assert bool((batch["input_ids"][chosen] == MASK).all())
            assert torch.equal(batch["targets"][chosen], ids[chosen])
            assert torch.equal(batch["input_ids"][~chosen], ids[~chosen])
            assert num_passes < 32 or bool((chosen.sum(1) <= 1).all())
            assert torch.equal(batch["documents"], padding) if bool(padding.any()) else "documents" not in batch
            halves = [batches.batch(rows * num_passes + number, rank, 2)["targets"] for rank in range(2)]
            assert torch.equal(torch.cat(halves), batch["targets"])
            seen = seen + chosen.long()
        assert torch.equal(seen, ((ids != SEPARATOR) & (ids != BEGIN)).long())


def test_bad_input(tmp_path) -> None:
    of = shards(tmp_path)
    with pytest.raises(UserError, match="33 passes over sequences of 32 tokens; give 1 to that many"):
        MaskedEvalBatches(EvalBatches(of, 32, 6), mask_id=MASK, num_passes=33)
