"""From raw text to shards: nothing lost, nothing in both splits, cached, and made by one process only."""

import fcntl
import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from apps.llm import corpus
from apps.llm.corpus import DataConfig, heldout_bytes, prepare, stdlib_corpus
from apps.llm.tokenizer import train_bpe
from core.config import UserError
from core.data import TokenShards, split_of
from tests.support.checkpoints import flipped, flips
from tests.support.stacks import end_with_stacks


@pytest.fixture
def config(tmp_path) -> DataConfig:
    for i in range(30):
        (tmp_path / "text" / f"{i}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / "text" / f"{i}.txt").write_text(f"document {i} é\n" * (i + 1))
    return DataConfig(path=str(tmp_path / "text"), tokenizer="byte", heldout_fraction=0.3)


def documents(shards: TokenShards, tokenizer) -> list[str]:
    stream = shards.read(0, shards.num_tokens)
    assert stream[0] == stream[-1] == tokenizer.eos_id
    ends = [*shards.document_starts[1:], shards.num_tokens - 1]
    return [tokenizer.decode(stream[start + 1 : end]) for start, end in zip(shards.document_starts, ends)]


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_every_document_is_in_the_split_of_its_name(config, tmp_path, tokenizer):
    made = prepare(replace(config, tokenizer=tokenizer, vocab_size=280), tmp_path / "cache")
    files = sorted((tmp_path / "text").iterdir())
    for split, shards in (("train", made.train), ("heldout", made.heldout)):
        expected = [file.read_text() for file in files if split_of(file.name, 0.3) == split]
        assert len(expected) > 3
        assert documents(shards, made.tokenizer) == expected
        assert shards.num_text_bytes == len("".join(expected).encode())
    assert made.heldout.num_text_bytes == len(heldout_bytes(config))
    assert made.skipped == ""


def test_documents_keep_their_order_over_batches_and_pieces(config, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "_BATCH_CHARS", 50)
    made = prepare(replace(config, heldout_fraction=0), tmp_path / "cache")
    assert documents(made.train, made.tokenizer) == [file.read_text() for file in sorted((tmp_path / "text").iterdir())]


def test_a_bpe_learns_from_the_train_split_only(config, tmp_path):
    made = prepare(replace(config, tokenizer="bpe", vocab_size=280), tmp_path / "cache")
    files = sorted((tmp_path / "text").iterdir())
    train = [file.read_text() for file in files if split_of(file.name, 0.3) == "train"]
    assert made.tokenizer.fingerprint == made.train.tokenizer == train_bpe(train, 280).fingerprint


def test_a_second_run_reads_the_cache_until_something_changes(config, tmp_path, monkeypatch):
    runs = []
    make = corpus._make
    monkeypatch.setattr(corpus, "_make", lambda *args: (runs.append(1), make(*args)))
    cache = tmp_path / "cache"
    for _ in range(2):
        prepare(config, cache)
    prepare(replace(config, sequence_length=9), cache)  # decides nothing that is stored
    assert len(runs) == 1
    prepare(replace(config, heldout_fraction=0.5), cache)
    prepare(replace(config, on_error="skip"), cache)
    assert len(runs) == 3
    (tmp_path / "text" / "new.txt").write_text("new")
    prepare(config, cache)
    assert len(runs) == 4
    prepare(replace(config, cache=str(tmp_path / "elsewhere")), cache)
    assert len(list((tmp_path / "elsewhere").glob("*/train/index.json"))) == 1


def test_what_was_skipped_is_told_by_the_cache_too(config, tmp_path):
    (tmp_path / "text" / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"bad.txt: record 1 is not UTF-8"):
        prepare(config, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*/report.json"))
    for _ in range(2):
        made = prepare(replace(config, on_error="skip"), tmp_path / "cache")
        assert made.skipped == "skipped 1 record: 1 invalid UTF-8"


def test_pairs_keep_where_their_completions_start(tmp_path):
    pairs = [{"prompt": "p" * i, "completion": f"{i}é"} for i in range(6)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    config = DataConfig(path=str(tmp_path / "x.jsonl"), tokenizer="byte", pairs=True, heldout_fraction=0)
    made = prepare(config, tmp_path / "cache")
    assert made.heldout is None
    assert documents(made.train, made.tokenizer) == [pair["prompt"] + pair["completion"] for pair in pairs]
    assert (made.train.loss_starts - made.train.document_starts).tolist() == [i + 1 for i in range(6)]
    assert made.train.num_text_bytes == 6 * 3


def test_no_train_documents(tmp_path):
    name = next(f"{i}.txt" for i in range(1000) if split_of(f"{i}.txt", 0.1) == "heldout")
    (tmp_path / name).write_text("alone")
    config = DataConfig(path=str(tmp_path / name), tokenizer="byte", heldout_fraction=0.1)
    with pytest.raises(UserError, match=r"every document .* held-out split; .*--data.heldout-fraction 0"):
        prepare(config, tmp_path / "cache")
    assert prepare(replace(config, heldout_fraction=0), tmp_path / "cache").train.num_documents == 1


def test_a_truncated_cache_gets_one_clear_line(config, tmp_path):
    prepare(config, tmp_path / "cache")
    [tokens] = (tmp_path / "cache").glob("*/train/tokens-00000.bin")
    os.truncate(tokens, 10)
    with pytest.raises(UserError, match=r"not a complete token shard folder: tokens-00000.bin has 10 bytes"):
        prepare(config, tmp_path / "cache")


def _prepare_and_say_if_made(config, cache, start, results):
    make, made = corpus._make, []
    corpus._make = lambda *args: (made.append(1), make(*args))
    start.wait()
    results.put((prepare(config, cache).train.num_tokens, len(made)))


def test_no_flipped_byte_in_what_is_cached_is_accepted(config, tmp_path):
    """Beside the shards, of which tests/unit/test_data_tokens.py looks at every byte."""
    prepare(config, tmp_path / "cache")
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    for path, at, mask in flips([folder / "report.json", *sorted((folder / "tokenizer").iterdir())], 60, seed=0):
        with flipped(path, at, mask), pytest.raises(UserError, match="not a complete tokenized corpus") as caught:
            prepare(config, tmp_path / "cache")
        assert path.name in str(caught.value)
        assert "\n" not in str(caught.value)
    prepare(config, tmp_path / "cache")


def test_a_cache_of_the_version_without_checksums_of_tokenizers_is_read(config, tmp_path):
    prepare(config, tmp_path / "cache")
    (report,) = (tmp_path / "cache").glob("*/report.json")
    content = json.loads(report.read_text())
    report.write_text(json.dumps({name: content[name] for name in ("skipped", "examples")}))
    assert prepare(config, tmp_path / "cache").skipped == ""


def test_only_one_of_several_processes_makes_it(config, tmp_path):
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(3), context.SimpleQueue()
    arguments = (config, tmp_path / "cache", start, results)
    ranks = [context.Process(target=_prepare_and_say_if_made, args=arguments) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        if rank.is_alive() and rank.pid is not None:
            end_with_stacks(rank.pid)
    said = [results.get() for _ in ranks if not results.empty()]
    assert len(said) == 3
    assert len({num_tokens for num_tokens, _ in said}) == 1
    assert sum(made for _, made in said) == 1


def test_waiting_for_another_process_ends_with_a_clear_line(config, tmp_path):
    prepare(config, tmp_path / "cache")
    [lock] = (tmp_path / "cache").glob("*.lock")
    (tmp_path / "cache" / lock.stem).rename(tmp_path / "gone")
    with open(lock) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"another process has held .*\.lock for 0 s"):
            prepare(config, tmp_path / "cache", timeout_s=0)


def test_progress_is_told(config, tmp_path):
    calls = []
    made = prepare(config, tmp_path / "cache", progress=lambda what, num_bytes: calls.append((what, num_bytes)))
    assert calls[-1] == ("tokenizing", made.train.num_text_bytes + made.heldout.num_text_bytes)


def test_long_texts_are_encoded_in_pieces_to_the_same_tokens():
    text = Path(corpus.__file__).read_text()
    pieces = corpus._pieces(text, 500)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 500 < len(text) / 10
    tokenizer = train_bpe([text], 600)
    assert np.array_equal(np.concatenate(tokenizer.encode_batch(pieces)), tokenizer.encode(text))
    assert corpus._pieces("", 5) == []
    assert corpus._pieces("a" * 12, 5) == ["aaaaa", "aaaaa", "aa"]


def test_the_standard_library_is_there_without_its_tests():
    files = stdlib_corpus()
    names = {file.name for file in files}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert len(files) > 300
    assert not [file for file in files if {"test", "tests", "site-packages"} & set(file.parts)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"path": ""}, "--data.path is empty"),
        ({"sequence_length": 0}, "--data.sequence-length is 0; it must be at least 1"),
        ({"global_batch": -1}, "--data.global-batch is -1"),
        ({"heldout_fraction": 1.0}, r"--data.heldout-fraction is 1.0; it must be in \[0, 1\)"),
        ({"heldout_fraction": float("nan")}, "--data.heldout-fraction is nan"),
        ({"vocab_size": 256}, "--data.vocab-size is 256; a bpe needs at least 257"),
    ],
)
def test_impossible_options(wrong, message):
    with pytest.raises(UserError, match=message):
        DataConfig(**wrong)
