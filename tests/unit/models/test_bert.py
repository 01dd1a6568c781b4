"""BERT against transformers' BertForMaskedLM: logits, gradients, folders both ways, on drawn configurations."""

import json

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from core.config import UserError
from core.models import Decoder, DecoderConfig, generate, load_pretrained, save_pretrained
from core.models.hf_config import config_from_hf, config_to_hf
from core.models.name_table import hf_to_ours
from core.nn.attention import StepContext
from tests.support.masked import bert
from tests.unit.models.test_pretrained import random_decoder, relative_error

few = settings(max_examples=12, deadline=None, derandomize=True, database=None)


@st.composite
def configs(draw):
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    num_heads, head = pick(1, 2, 3, 5), pick(2, 4, 8)
    return bert(
        vocab_size=pick(7, 61), dim=num_heads * head, num_layers=pick(1, 2), num_heads=num_heads, ffn_dim=pick(12, 50),
        max_length=pick(11, 24), token_types=pick(1, 2, 5), norm_eps=pick(1e-12, 1e-5),
        activation=pick("gelu", "gelu_tanh", "relu", "silu"),
    )  # fmt: skip


def in_transformers(model, folder):
    """The same weights as transformers loads them; nothing may be missing, unexpected or mismatched."""
    from transformers import AutoModelForMaskedLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    save_pretrained(model, model.config, folder)
    theirs, info = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    assert not any(info.values()), info
    assert type(theirs).__name__ == "BertForMaskedLM"
    return theirs.eval()


def batch(config):
    """ids[3, 11], and a mask with padding behind, in front, and of all but one token."""
    ids = torch.randint(0, config.vocab_size, (3, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 7:] = mask[1, :3] = mask[2, 1:] = 0
    return ids, mask


@few
@given(config=configs(), seed=st.integers(0, 99))
def test_logits(config, seed, tmp_path_factory):
    ours = random_decoder(config, seed)
    theirs = in_transformers(ours, tmp_path_factory.mktemp("hf"))
    ids, mask = batch(config)
    documents = torch.tensor([[0] * 4 + [1] * 7, [0] * 11, [0, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3]])
    places = torch.tensor([[*range(4), *range(7)], [*range(11)], [0, 0, 1, *range(5), *range(3)]])
    apart = (documents[:, :, None] == documents[:, None, :])[:, None]
    with torch.no_grad():
        assert relative_error(ours(ids), theirs(ids).logits) < 1e-10
        shown = mask.bool()
        assert relative_error(ours(ids, mask)[shown], theirs(ids, attention_mask=mask).logits[shown]) < 1e-10
        packed = ours(ids, positions=places, context=StepContext(documents))
        assert relative_error(packed, theirs(ids, attention_mask=apart, position_ids=places).logits) < 1e-10


def test_gradients(tmp_path):
    ours = random_decoder(bert())
    theirs = in_transformers(ours, tmp_path)
    ids, mask = batch(ours.config)
    targets = ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.6, -100)
    targets = targets.masked_fill(mask == 0, -100)
    loss = ours(ids, mask, targets=targets)
    loss.backward()
    logits = theirs(ids, attention_mask=mask).logits
    their_loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    their_loss.backward()
    assert abs(loss.item() / their_loss.item() - 1) < 1e-12
    their_grads = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    parameters = dict(ours.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in parameters.values())
    for entry in hf_to_ours(ours.config):
        error = (parameters[entry.name].grad - entry.read(their_grads)).abs().max() / largest
        assert error < 1e-10, (entry.name, error)


def test_round_trip_is_exact(tmp_path):
    """Ours, sharded on disk, read back; and again from what transformers itself saves."""
    ours = random_decoder(bert())
    save_pretrained(ours, ours.config, tmp_path / "ours", max_shard_bytes=10_000)
    in_transformers(ours, tmp_path / "once").save_pretrained(tmp_path / "theirs")
    for folder in ("ours", "theirs"):
        back = load_pretrained(tmp_path / folder)
        assert back.config == ours.config
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), back.parameters(), strict=True))
        assert back.head.weight is back.embedding.tokens.weight
    assert not (tmp_path / "ours" / "generation_config.json").exists()


@few
@given(config=configs())
def test_configuration_round_trip(config):
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


def rewritten(folder, change):
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_the_files_of_the_first_release(tmp_path):
    """Norms called gamma and beta, a pooler, a classifier of next sentences, and the tied head written out."""
    ours = random_decoder(bert())
    save_pretrained(ours, ours.config, tmp_path)

    def former(tensors):
        names = {k: k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
                 for k in tensors}  # fmt: skip
        renamed = {names[key]: value for key, value in tensors.items()}
        extra = ("bert.pooler.dense.weight", "bert.pooler.dense.bias", "cls.seq_relationship.weight",
                 "cls.seq_relationship.bias", "bert.embeddings.position_ids")  # fmt: skip
        renamed |= {key: torch.ones(2) for key in extra}
        head = {"weight": tensors["bert.embeddings.word_embeddings.weight"], "bias": tensors["cls.predictions.bias"]}
        return renamed | {f"cls.predictions.decoder.{key}": value.clone() for key, value in head.items()}

    rewritten(tmp_path, former)
    back = load_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), back.parameters(), strict=True))
    rewritten(tmp_path, lambda t: t | {"cls.predictions.decoder.weight": torch.ones(61, 24, dtype=torch.float64)})
    with pytest.raises(UserError, match=r"cls\.predictions\.decoder\.weight differs from the embedding; copy"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_decoder": True}, "is_decoder=True"),
        ({"add_cross_attention": True}, "add_cross_attention=True"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ({"hidden_act": "tanh"}, "'tanh'"),
        ({"type_vocab_size": 0}, "token_types is 0"),
    ],
)
def test_what_is_not_computed_is_named(change, message):
    with pytest.raises(UserError, match=message) as error:
        config_from_hf(config_to_hf(bert()) | change)
    assert "\n" not in str(error.value)


def test_dropout_is_not_part_of_the_function():
    content = config_to_hf(bert())
    assert (content["hidden_dropout_prob"], content["attention_probs_dropout_prob"]) == (0.0, 0.0)
    assert config_from_hf(content | {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}) == bert()


def test_a_causal_family_has_no_masked_head():
    shape = {"vocab_size": 61, "dim": 24, "num_layers": 1, "num_heads": 3, "ffn_dim": 96}
    for name, value in (("causal", False), ("mlm_head", True), ("token_types", 2)):
        with pytest.raises(UserError, match=f"{name} is {value}; a model of family gpt2"):
            DecoderConfig(**shape, **{name: value})


def test_generating_is_refused():
    with pytest.raises(UserError, match=r"family bert attends both ways .*does not continue text"):
        generate(Decoder(bert()), torch.zeros(1, 3, dtype=torch.int64), 2)
