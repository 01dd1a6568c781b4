"""Tokenizers: lossless, deterministic, loadable by transformers; what is not a tokenizer is told in one line."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.llm.tokenizer import END_OF_TEXT, byte_tokenizer, load_tokenizer, train_bpe
from core.config import UserError

TEXTS = ["def f(x):\n    return x + 1\n" * 20, "naïve café 東京 \U0001f680", "the cat and the hat and the bat " * 10]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXTS, 300)


@pytest.fixture(scope="module")
def plain():
    return byte_tokenizer()


@settings(max_examples=50, deadline=None)
@given(text=st.text() | st.sampled_from([END_OF_TEXT, f"a{END_OF_TEXT}b", " \n\t  x", "\r\n", "\0"]))
def test_text_survives_and_is_never_a_special_token(bpe, plain, text):
    for tokenizer in (bpe, plain):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eos_id not in ids
        assert all(ids < tokenizer.vocab_size)
    assert plain.encode(text).tolist() == list(text.encode())


def test_vocabularies(bpe, plain):
    assert (plain.vocab_size, plain.eos_id) == (257, 256)
    assert (bpe.vocab_size, bpe.eos_id) == (300, 0)
    assert len(bpe.encode(TEXTS[0])) < len(TEXTS[0]) / 2
    assert bpe.decode([bpe.eos_id]) == END_OF_TEXT
    assert bpe.decode([bpe.eos_id], skip_special_tokens=True) == ""
    with pytest.raises(UserError, match="256 tokens is too small"):
        train_bpe(TEXTS, 256)


def test_training_is_deterministic_between_processes(bpe):
    program = f"from apps.llm.tokenizer import train_bpe; print(train_bpe({TEXTS!r}, 300).fingerprint)"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert other.stdout.split()[-1] == bpe.fingerprint
    assert train_bpe(TEXTS[:2], 300).fingerprint != bpe.fingerprint


@pytest.mark.parametrize("kind", ["bpe", "plain"])
def test_saved_folders_load_in_transformers_and_here(tmp_path, request, kind):
    from transformers import AutoTokenizer

    tokenizer = request.getfixturevalue(kind)
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    for text in TEXTS:
        assert theirs(text)["input_ids"] == tokenizer.encode(text).tolist()
    assert theirs.decode(theirs(TEXTS[1])["input_ids"]) == TEXTS[1]
    assert theirs.eos_token_id == tokenizer.eos_id
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_tokenizer(path).fingerprint == tokenizer.fingerprint


def test_a_lone_tokenizer_json_with_another_end_of_text_and_stored_truncation(tmp_path, bpe):
    bpe.save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    path = tmp_path / "tokenizer.json"
    stored = json.loads(path.read_text().replace(END_OF_TEXT, "</s>"))
    stored["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(stored))
    tokenizer = load_tokenizer(path)
    assert tokenizer.eos_id == 0
    assert np.array_equal(tokenizer.encode(TEXTS[0]), bpe.encode(TEXTS[0]))
    path.write_text(json.dumps(stored).replace("</s>", "<sep>"))
    with pytest.raises(UserError, match="no end-of-text token"):
        load_tokenizer(path)


def test_a_tokenizer_written_in_python(tmp_path):
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(str(tmp_path))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("</s>a").tolist() == [byte + 3 for byte in b"</s>a"]
    assert (tokenizer.decode(tokenizer.encode("é")), tokenizer.eos_id) == ("é", 1)
    assert tokenizer.fingerprint == load_tokenizer(tmp_path).fingerprint


@pytest.mark.parametrize("content", [None, "", "{", "{}", '{"model": {"type": "nothing"}}'])
@pytest.mark.parametrize("name", ["tokenizer.json", "folder"])
def test_what_is_not_a_tokenizer_is_told_in_one_line(tmp_path, name, content):
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    if content is not None:
        (path / "tokenizer.json" if name == "folder" else path).write_text(content)
    with pytest.raises(UserError) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
