"""What a text begins with: the family's own rule, alike in training, evaluation, generation and serving."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from apps.llm.corpus import DataConfig, prepare
from apps.llm.generate import GenerateConfig, write
from apps.llm.tokenizer import byte_tokenizer, load_tokenizer
from apps.serve.text import load_text
from core.data import EvalBatches, PairBatches, TokenBatches
from core.models import Decoder, DecoderConfig

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def folder_of(family: str, folder: Path) -> Path:
    """A tokenizer as the family's folders on the hub describe it, with bytes for a vocabulary."""
    folder.mkdir()
    specials = {"gpt2": ["<|endoftext|>"], "opt": ["<pad>", "</s>"]}.get(family, ["<unk>", "<s>", "</s>", "<pad>"])
    vocab = {token: number for number, token in enumerate([*specials, *LETTERS])}
    fields = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    if family in ("gpt2", "opt"):
        (folder / "vocab.json").write_text(json.dumps(vocab))
        (folder / "merges.txt").write_text("#version: 0.2\n")
        end = specials[-1]
        fields = {"bos_token": end, "eos_token": end, "unk_token": end}
        fields |= {"tokenizer_class": "GPT2Tokenizer"} | ({"add_bos_token": True} if family == "opt" else {})
    else:
        backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(specials)
        kinds = {"bloom": "BloomTokenizerFast", "llama": "PreTrainedTokenizerFast", "mixtral": "LlamaTokenizer"}
        fields["tokenizer_class"] = kinds[family]
        if family == "bloom":
            backend.post_processor = processors.ByteLevel(trim_offsets=False)
        else:
            backend.post_processor = processors.TemplateProcessing(
                single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])]
            )
            fields |= {"add_bos_token": True, "add_eos_token": False}
        backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


@pytest.fixture(params=["gpt2", "opt", "bloom", "llama", "mixtral"])
def family(request, tmp_path) -> tuple[str, Path]:
    return request.param, folder_of(request.param, tmp_path / request.param)


def test_prompts_are_those_of_transformers(family):
    """In generation and in serving; begun with <s> or </s> where the family's texts are."""
    from transformers import AutoTokenizer

    name, folder = family
    theirs, ours, served = AutoTokenizer.from_pretrained(str(folder)), load_tokenizer(folder), load_text(folder)
    begin = {"gpt2": [], "bloom": [], "opt": [theirs.bos_token_id]}.get(name, [theirs.convert_tokens_to_ids("<s>")])
    for text in ("def f(x):", " naïve café", "a"):
        ids = theirs(text)["input_ids"]
        assert ids[: len(begin)] == begin
        assert len(ids) == len(begin) + len(theirs(text, add_special_tokens=False)["input_ids"])
        assert ours.encode_prompt(text) == ids
        assert served.encode(text) == ids
    assert ours.encode_prompt("") == served.encode("") == [theirs.bos_token_id]


def corpus_of(folder: Path, tmp_path: Path, **options):
    data = DataConfig(tokenizer=str(folder), heldout_fraction=0.0, cache=str(tmp_path / "cache"), **options)
    return prepare(data, tmp_path)


def test_documents_begin_as_prompts_do(family, tmp_path):
    """In training and evaluation. What a document begins with is read, and is no target."""
    texts = ["one", "and two", "3"]
    for number, text in enumerate(texts):
        (tmp_path / "text" / f"{number}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / "text" / f"{number}.txt").write_text(text)
    _, folder = family
    corpus = corpus_of(folder, tmp_path, path=str(tmp_path / "text"))
    tokenizer, shards = corpus.tokenizer, corpus.train
    # A family without a rule of its own reads the end of the document before.
    begin = tokenizer.begin_ids or [tokenizer.eos_id]
    stream = shards.read(0, shards.num_tokens).tolist()
    for text, start in zip(texts, shards.document_starts.tolist(), strict=True):
        wanted = [*begin, *tokenizer.encode(text).tolist(), tokenizer.eos_id]
        assert stream[start : start + len(wanted)] == wanted
    predicted = sum(len(tokenizer.encode(text)) + 1 for text in texts)
    rows = EvalBatches(shards, 4, 2, mask_documents=True)
    batches = [rows.batch(step, 0, 1) for step in range(rows.num_batches)]
    targets = torch.cat([batch["targets"].flatten() for batch in batches])
    assert rows.num_targets == int((targets != -100).sum()) == predicted
    if begin != [tokenizer.eos_id]:
        assert begin[0] not in targets
        whole = TokenBatches(shards, shards.num_tokens - 1, 1, 0, mask_documents=True).batch(0, 0, 1)
        assert whole["input_ids"][whole["positions"] == 0].tolist() == begin * len(texts)


def test_prompts_of_pairs_begin_as_prompts_do(family, tmp_path):
    pairs = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "say a", "completion": "aaaa"}]
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(pair) for pair in pairs))
    _, folder = family
    corpus = corpus_of(folder, tmp_path, path=str(tmp_path / "pairs.jsonl"), pairs=True)
    tokenizer = corpus.tokenizer
    learned = [token for pair in pairs for token in (*tokenizer.encode(pair["completion"]).tolist(), tokenizer.eos_id)]
    batch = PairBatches(corpus.train, 32, 1, 0).batch(0, 0, 1)
    assert batch["targets"][batch["targets"] != -100].tolist() == learned
    rows = EvalBatches(corpus.train, 32, 1)
    targets = rows.batch(0, 0, 1)["targets"]
    assert targets[targets != -100].tolist() == learned
    assert rows.num_targets == len(learned)
    starts = batch["input_ids"][batch["positions"] == 0][: len(pairs)]
    assert starts.tolist() == (tokenizer.begin_ids or [tokenizer.eos_id]) * len(pairs)


@pytest.mark.parametrize(("tokens", "text"), [((0xE2, 0x82), "\ufffd"), ((0x41, 0xC3), "A\ufffd"), ((0x41,), "A")])
def test_a_text_that_ends_amid_a_character_shows_so(tokens, text):
    """What is shown while it is written adds up to what is written."""
    model = Decoder(DecoderConfig(vocab_size=257, dim=8, num_layers=1, num_heads=1, ffn_dim=8, max_length=16)).eval()
    following = dict(zip((0x3E, *tokens), tokens))
    model.forward = lambda ids, *_: torch.tensor(np.eye(257)[[[following.get(int(ids[0, -1]), 0)]]])
    shown: list[str] = []
    config = GenerateConfig(prompt=">", max_new_tokens=len(tokens), temperature=0)
    assert write(model, byte_tokenizer(), config, seed=0, show=shown.append) == text
    assert "".join(shown) == text
