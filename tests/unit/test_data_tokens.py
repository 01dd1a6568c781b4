"""Token shards: what is written is read, and nothing else is taken for a shard folder."""

import json

import numpy as np
import pytest

from core.config import UserError
from core.data import ShardWriter, TokenShards
from core.data import tokens as tokens_module
from core.files import signed
from tests.support.checkpoints import flipped
from tests.support.full_disk import limited_files


def write(folder, documents, vocab_size=300, **options):
    with ShardWriter(folder, vocab_size=vocab_size, separator=256, **options) as writer:
        for document in documents:
            writer.add(np.array(document), text_bytes=len(document))


def read_all(folder):
    shards = TokenShards(folder)
    return shards.read(0, shards.num_tokens)


def stops_after_one():
    yield [2]
    raise ValueError("stopped")


@pytest.mark.parametrize(("vocab_size", "dtype"), [(300, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_round_trip_over_several_files(tmp_path, vocab_size, dtype):
    biggest = vocab_size - 1
    write(tmp_path / "s", [[1, 2, biggest], [], [4] * 9], vocab_size, shard_tokens=4, tokenizer="t", source="s")
    shards = TokenShards(tmp_path / "s")
    expected = [256, 1, 2, biggest, 256, 256, *[4] * 9, 256]
    assert shards.read(0, shards.num_tokens).tolist() == expected
    for start in range(len(expected)):
        for stop in range(start, len(expected) + 1):
            assert shards.read(start, stop).tolist() == expected[start:stop]
    assert shards.document_starts.tolist() == [0, 4, 5]
    assert (shards.num_documents, shards.num_text_bytes, shards.tokenizer, shards.source) == (3, 12, "t", "s")
    assert json.loads((tmp_path / "s" / "index.json").read_text())["dtype"] == dtype
    assert len(list((tmp_path / "s").glob("tokens-*.bin"))) == 4


def test_an_interrupted_write_leaves_nothing_and_the_old_folder_alone(tmp_path):
    write(tmp_path / "s", [[1]])
    with pytest.raises(ValueError, match="stopped"):
        write(tmp_path / "s", stops_after_one())
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert TokenShards(tmp_path / "s").read(0, 3).tolist() == [256, 1, 256]


def test_only_shard_folders_are_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="not a token shard folder; choose another"):
        ShardWriter(tmp_path, vocab_size=300, separator=256)


def edit(folder, **changes):
    """Change fields of the index (None: remove them), which then has the right checksum of what it says."""
    index = json.loads((folder / "index.json").read_text())
    del index["crc32"]
    index.update(changes)
    (folder / "index.json").write_bytes(signed({k: v for k, v in index.items() if v is not None}))


BREAKS = {
    "no index": (lambda f: (f / "index.json").unlink(), "No such file"),
    "truncated index": (lambda f: (f / "index.json").write_text("{"), "not JSON"),
    "foreign index": (lambda f: (f / "index.json").write_text('{"weight_map": {}}'), "something else"),
    "index is a list": (lambda f: (f / "index.json").write_text("[]"), "something else"),
    "later version": (lambda f: edit(f, version=3), "version is 3, this program reads 2"),
    "lost key": (lambda f: edit(f, num_tokens=None), "lacks or mistypes 'num_tokens'"),
    "odd type": (lambda f: edit(f, dtype="uint13"), "lacks or mistypes"),
    "wrong total": (lambda f: edit(f, num_tokens=99), "counts 99 tokens"),
    "truncated tokens": (lambda f: (f / "tokens-00000.bin").write_bytes(b"\1"), "has 1 bytes instead of 10"),
    "lost tokens": (lambda f: (f / "tokens-00000.bin").unlink(), "tokens-00000.bin is missing"),
    "truncated documents": (lambda f: (f / "documents.bin").write_bytes(b""), "documents.bin has 0 bytes"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_folder_gets_one_clear_line(tmp_path, name):
    damage, message = BREAKS[name]
    write(tmp_path / "s", [[1, 2, 3]])
    damage(tmp_path / "s")
    with pytest.raises(UserError, match="not a complete token shard folder") as caught:
        TokenShards(tmp_path / "s")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pairs", [False, True])
def test_no_flipped_byte_is_accepted(tmp_path, monkeypatch, pairs):
    """Of any file, in the corpus itself where the damaged tokens are read."""
    monkeypatch.setattr(tokens_module, "_CHECKED_BYTES", 16)
    write(tmp_path / "s", [[1, 2, 3], list(range(40)), [7]], shard_tokens=30, pairs=pairs)
    for path in sorted((tmp_path / "s").iterdir()):
        for at in range(path.stat().st_size):
            with flipped(path, at, 1 << at % 8), pytest.raises(UserError, match="not a complete token") as caught:
                read_all(tmp_path / "s")
            assert path.name in str(caught.value) or path.name == "index.json"
            assert "\n" not in str(caught.value)


def test_tokens_are_checked_where_they_are_read_and_once(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens_module, "_CHECKED_BYTES", 16)
    write(tmp_path / "s", [list(range(40))])
    whole = TokenShards(tmp_path / "s").read(0, 42).tolist()
    with flipped(tmp_path / "s" / "tokens-00000.bin", 50, 1):  # token 25, of the fourth 16 bytes
        shards = TokenShards(tmp_path / "s")
        assert shards.read(0, 24).tolist() == whole[:24]
        assert shards.read(32, 42).tolist() == whole[32:]
        for start, stop in ((24, 25), (31, 32), (0, 42)):
            with pytest.raises(UserError, match="from byte 48 on"):
                shards.read(start, stop)
    compared = []
    crc32 = tokens_module.zlib.crc32
    monkeypatch.setattr(tokens_module.zlib, "crc32", lambda *data: compared.append(1) or crc32(*data))
    shards = TokenShards(tmp_path / "s")
    compared.clear()
    for _ in range(3):
        assert shards.read(0, 42).tolist() == whole
    assert len(compared) == 6


def test_folders_without_checksums_are_read_with_a_line(tmp_path, capsys):
    write(tmp_path / "s", [[1, 2, 3]])
    index = json.loads((tmp_path / "s" / "index.json").read_text())
    del index["crc32"], index["stamps"]
    (tmp_path / "s" / "index.json").write_text(json.dumps(index | {"version": 1}, indent=1))
    (tmp_path / "s" / "checksums.bin").unlink()
    assert TokenShards(tmp_path / "s").read(0, 5).tolist() == [256, 1, 2, 3, 256]
    assert "has no checksums" in capsys.readouterr().err


@pytest.mark.parametrize("room", [0, 3, 40])
def test_a_full_disk_is_one_error_with_a_name_and_leaves_nothing(tmp_path, room):
    """Whether the disk is full while documents are added or when the files are closed."""
    with pytest.raises(OSError, match="File too large") as caught, limited_files(room):
        write(tmp_path / "s", [[1, 2, 3]] * (1 if room else 9000))
    assert str(tmp_path) in str(caught.value.filename)
    assert not list(tmp_path.iterdir())
