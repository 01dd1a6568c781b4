import pytest
import torch

from core.config import UserError
from core.models import generate
from core.models.generate import CachedAttend, cached
from core.models.rope import RopeScaling
from tests.unit.models.test_decoder import CONFIGS, DEBUG, built
from tests.unit.models.test_pretrained import FAMILIES, example, in_transformers, random_decoder


def left_padded(vocab_size, seed=0):
    ids = torch.randint(0, vocab_size, (3, 6), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, :2], mask[2, :5] = 0, 0
    return ids, mask


@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_equals_no_cache(family):
    config = CONFIGS[family]
    model, (ids, mask) = built(config), left_padded(config.vocab_size)
    batched = generate(model, ids, 7, attention_mask=mask)
    for row, first in enumerate((0, 2, 5)):
        tokens = ids[row : row + 1, first:]
        for _ in range(7):
            tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), 1)
        assert torch.equal(batched[row, first:], tokens[0])
        assert torch.equal(generate(model, ids[row : row + 1, first:], 7), tokens)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [False, True])
def test_greedy_equals_transformers(family, padded, tmp_path):
    config = example(family)
    ours = random_decoder(config)
    theirs = in_transformers(ours, tmp_path).float()
    ids, mask = left_padded(config.vocab_size)
    mask = mask if padded else torch.ones_like(mask)
    expected = theirs.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(generate(ours.float(), ids, 8, attention_mask=mask if padded else None), expected)


LONGROPE = RopeScaling(
    kind="longrope", original_max_length=8, short_factor=(1.0, 1.5, 2.0), long_factor=(2.0, 3.0, 5.0)
)


@pytest.mark.parametrize(
    ("family", "scaling", "length"),
    [("llama", RopeScaling(3.0, kind="dynamic"), 5), ("phi3", LONGROPE, 9)],
    ids=["dynamic", "longrope"],
)
def test_texts_longer_than_the_pretraining(family, scaling, length, tmp_path):
    """Keys that are kept stay turned as they were, as in transformers."""
    ours = random_decoder(example(family, max_length=8, rope_scaling=scaling))
    theirs = in_transformers(ours, tmp_path).float()
    ids = torch.randint(0, 61, (1, length), generator=torch.Generator().manual_seed(1))
    expected = theirs.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert torch.equal(generate(ours.float(), ids, 9), expected)


def test_a_text_that_outgrows_its_short_factors_is_refused():
    model = random_decoder(example("phi3", rope_scaling=LONGROPE)).float()
    ids = torch.zeros(1, 6, dtype=torch.long)
    assert generate(model, ids, 3).shape[1] == 9  # the last token is not looked at
    with pytest.raises(UserError, match=r"prompt and new tokens are 10; with more than 8 .* kind longrope"):
        generate(model, ids, 4)
    padded = torch.zeros(1, 9, dtype=torch.long)
    with pytest.raises(UserError, match="prompt and new tokens are 10; with more than 8"):
        generate(model, padded, 4, attention_mask=(torch.arange(9) > 2).long()[None])


@torch.no_grad()
def test_cached_logits_in_pieces():
    """A prompt in several pieces, then single tokens: the logits of the whole sequence at once."""
    for family, config in CONFIGS.items():
        model, ids = built(config), torch.randint(0, config.vocab_size, (2, 9))
        whole = model(ids)
        attend = model.blocks[0].attention.attend
        with cached(model, 9):
            assert isinstance(model.blocks[0].attention.attend, CachedAttend)
            for first, stop in ((0, 3), (3, 7), (7, 8), (8, 9)):
                mask = torch.ones(2, stop, dtype=torch.long)
                logits = model(ids[:, first:stop], mask, torch.arange(first, stop)[None])
                torch.testing.assert_close(logits[:, 0], whole[:, stop - 1], rtol=1e-11, atol=1e-11, msg=family)
        assert model.blocks[0].attention.attend is attend
        assert torch.equal(model(ids), whole)


def test_end_of_text_and_stream():
    model, ids = built(DEBUG), torch.randint(0, DEBUG.vocab_size, (2, 4))
    free = generate(model, ids, 10)
    eos, seen = int(free[0, 6]), []
    ended = generate(model, ids, 10, eos_id=eos, stream=seen.append)
    first = int((free[0, 4:] == eos).nonzero()[0]) + 4
    assert torch.equal(ended[0, : first + 1], free[0, : first + 1])
    assert (ended[0, first:] == eos).all()
    assert torch.equal(torch.stack(seen, 1), ended[:, 4:])
    assert generate(model, ids[:1], 10, eos_id=eos).shape[1] == first + 1


def test_sampling():
    model, ids = built(DEBUG), torch.randint(0, DEBUG.vocab_size, (1, 4)).expand(512, 4)
    sample = lambda **how: generate(model, ids, 1, **{"seed": 0, "temperature": 1.0} | how)[:, -1]  # noqa: E731
    probs = (model(ids[:1])[0, -1] / 1.0).softmax(-1)
    likeliest = probs.argsort(descending=True)
    assert torch.equal(sample(), sample())
    assert not torch.equal(sample(), sample(seed=1))
    assert set(sample(top_k=3).tolist()) == set(likeliest[:3].tolist())
    num = int((probs[likeliest].cumsum(0) < 0.3).sum()) + 1
    assert set(sample(top_p=0.3).tolist()) <= set(likeliest[:num].tolist())
    assert set(sample(top_p=1e-9).tolist()) == {int(likeliest[0])}
    assert set(sample(temperature=1e-4).tolist()) == {int(likeliest[0])}
    counts = torch.bincount(sample(), minlength=DEBUG.vocab_size).double() / 512
    assert (counts - probs).abs().max() < 5 * (0.25 / 512) ** 0.5


def test_mistakes():
    model = built(DEBUG)
    for ids, mask, message in (
        (torch.zeros(1, 120, dtype=torch.long), None, "130; this model has positions for 128"),
        (torch.zeros(1, 0, dtype=torch.long), None, "empty"),
        (torch.zeros(1, 3, dtype=torch.long), torch.tensor([[1, 1, 0]]), "on the left"),
    ):
        with pytest.raises(UserError, match=message):
            generate(model, ids, 10, attention_mask=mask)
