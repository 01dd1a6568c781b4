"""Readers: every kind of corpus in, and every kind of bad input told by file and record, or counted."""

import gzip
import json
import os
import tempfile
from pathlib import Path

import pytest
import zstandard

from core.config import UserError
from core.data import Document, Faults, TextSource, split_of


def read(path: Path, on_error: str = "raise", **options) -> tuple[list[Document], Faults]:
    faults = Faults(on_error)
    return list(TextSource(path, **options).documents(faults)), faults


def texts(path: Path, **options) -> list[str]:
    return [document.text for document in read(path, **options)[0]]


def zst(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def jsonl(*records) -> bytes:
    return b"".join(record if isinstance(record, bytes) else json.dumps(record).encode() + b"\n" for record in records)


GOOD = jsonl({"text": "a", "n": 1}, b"\n", {"text": "é\u2028\n"})


def test_a_folder_is_read_in_order_without_hidden_entries(tmp_path):
    for name in ("b/two.txt", "b/one.txt", "a.txt", ".git/x.txt", "c.py", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() + b"\r\n")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "b" / "again").symlink_to(tmp_path)  # must not go round in circles
    documents, faults = read(tmp_path)
    assert [document.name for document in documents] == ["a.txt", "b/one.txt", "b/two.txt", "c.py"]
    assert documents[0].text == "a.txt\r\n"
    assert str(faults) == "skipped 1 record: 1 empty"
    assert texts(tmp_path, suffixes=("*.py",)) == texts(tmp_path, suffixes=("py",)) == ["c.py\r\n"]
    assert texts(tmp_path, exclude=frozenset({"b"})) == ["a.txt\r\n", "c.py\r\n"]


def test_a_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert texts(tmp_path / "a.txt") == ["hello"]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.jsonl", GOOD),
        ("x.jsonl.gz", gzip.compress(GOOD[:5]) + gzip.compress(GOOD[5:])),
        ("x.jsonl.zst", zst(GOOD)),
        ("x.jsonl.zst", zst(GOOD[:9]) + zst(b"") + zst(GOOD[9:])),
    ],
    ids=["plain", "gzip in two members", "zstandard", "zstandard in three frames"],
)
def test_jsonl_plain_and_compressed(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    (tmp_path / "README.md").write_text("about the records")
    for path in (tmp_path, tmp_path / name):
        documents, _ = read(path)
        assert documents == [Document(f"{name}:1", "a"), Document(f"{name}:3", "é\u2028\n")]


def test_large_zstd_streams_in_pieces(tmp_path):
    data = jsonl(*({"text": os.urandom(50_000).hex()} for _ in range(20)))
    (tmp_path / "x.jsonl.zst").write_bytes(zst(data))
    assert "".join(texts(tmp_path)) == "".join(json.loads(line)["text"] for line in data.splitlines())


def test_parquet_and_datasets_folders(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"body": ["one", "", "trois é"], "id": [1, 2, 3]})
    table.to_parquet(tmp_path / "p" / "x.parquet")
    table.save_to_disk(tmp_path / "d")
    assert read(tmp_path / "p", text_field="body")[0] == [
        Document("x.parquet:1", "one"),
        Document("x.parquet:3", "trois é"),
    ]
    assert read(tmp_path / "d", text_field="body")[0] == [Document("1", "one"), Document("3", "trois é")]
    for folder in ("p", "d"):
        with pytest.raises(
            UserError, match=r"record 1 has no field 'text' \(its fields: body, id\).*--data.text-field"
        ):
            read(tmp_path / folder)
        with pytest.raises(UserError, match="record 1: field 'id' is int, not a string"):
            read(tmp_path / folder, text_field="id")
    datasets.DatasetDict(train=table, test=table).save_to_disk(tmp_path / "dd")
    with pytest.raises(UserError, match="splits train, test; give one"):
        read(tmp_path / "dd")
    assert texts(tmp_path / "dd" / "test", text_field="body") == ["one", "trois é"]
    (tmp_path / "dd" / "test" / "state.json").write_text("{")
    with pytest.raises(UserError, match="not a readable datasets folder"):
        read(tmp_path / "dd" / "test", text_field="body")


def test_parquet_with_a_null(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a", None, "c"]}), tmp_path / "x.parquet")
    documents, faults = read(tmp_path, on_error="skip")
    assert documents == [Document("x.parquet:1", "a"), Document("x.parquet:3", "c")]
    assert str(faults) == "skipped 1 record: 1 wrong type"


def test_parquet_with_broken_text_or_pages(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    raw = pa.StringArray.from_buffers(
        3, pa.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0\6\0\0\0"), pa.py_buffer(b"ok\xff\xfeok")
    )
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": raw}), path)
    with pytest.raises(UserError, match=r"x.parquet: record 2 is not UTF-8"):
        read(path)
    documents, faults = read(path, on_error="skip")
    assert [document.text for document in documents] == ["ok", "ok"]
    assert str(faults) == "skipped 1 record: 1 invalid UTF-8"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"x.parquet: truncated or damaged after record 0"):
        read(path)


def test_pairs(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(jsonl({"prompt": "2+2=", "completion": "4"}, {"prompt": "", "completion": "b"}))
    documents, _ = read(tmp_path, pairs=True)
    assert documents == [Document("x.jsonl:1", "4", "2+2="), Document("x.jsonl:2", "b", "")]
    with pytest.raises(UserError, match=r"no field 'question' .*--data.prompt-field"):
        read(tmp_path, pairs=True, prompt_field="question")
    (tmp_path / "t.txt").write_text("x")
    with pytest.raises(UserError, match="plain text and holds no pairs"):
        read(tmp_path / "t.txt", pairs=True)


LIMIT = 60
BAD_LINES = {
    "invalid UTF-8": (b'{"text": "\xff"}\n', "record 2 is not UTF-8"),
    "half a surrogate": (b'{"text": "\\ud800"}\n', "half a surrogate pair"),
    "malformed JSON": (b'{"text": "a\n', "record 2 is not JSON"),
    "deep JSON": (b"[" * LIMIT + b"\n", "record 2 is not JSON"),
    "not an object": (b'["text"]\n', "record 2 is a JSON list, not an object"),
    "missing field": (b'{"body": "a"}\n', "record 2 has no field 'text' (its fields: body)"),
    "null": (b'{"text": null}\n', "record 2: field 'text' is NoneType, not a string"),
    "wrong type": (b'{"text": 3}\n', "record 2: field 'text' is int, not a string"),
    "too large": (b'{"text": "' + b"a" * LIMIT + b'"}\n', f"record 2 is larger than {LIMIT} bytes"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_record_is_named_or_skipped(tmp_path, name):
    line, message = BAD_LINES[name]
    (tmp_path / "x.jsonl").write_bytes(jsonl({"text": "first"}, line, {"text": "third"}))
    with pytest.raises(UserError) as caught:
        read(tmp_path, max_record_bytes=LIMIT)
    assert f"x.jsonl: {message}" in str(caught.value) or message in str(caught.value)
    assert "--data.on-error skip" in str(caught.value)
    assert "\n" not in str(caught.value)
    documents, faults = read(tmp_path, on_error="skip", max_record_bytes=LIMIT)
    assert [(document.name, document.text) for document in documents] == [
        ("x.jsonl:1", "first"),
        ("x.jsonl:3", "third"),
    ]
    assert faults.counts.total() == 1
    assert "x.jsonl: record 2" in faults.examples()[0]


def test_a_deeply_nested_record_does_not_end_the_program(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"[" * 300_000 + b"\n" + jsonl({"text": "a"}))
    documents, faults = read(tmp_path, on_error="skip")
    assert (len(documents), str(faults)) == (1, "skipped 1 record: 1 malformed JSON")


def test_faults_are_counted_by_reason(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(jsonl(b'{"text": "\xff"}\n', {"text": "a"}, {"tex": "a"}, b"\xfe\n"))
    _, faults = read(tmp_path, on_error="skip")
    assert str(faults) == "skipped 3 records: 2 invalid UTF-8, 1 missing field"


@pytest.mark.parametrize("size", [LIMIT, LIMIT + 1])
def test_the_limit_holds_for_text_files_too(tmp_path, size):
    (tmp_path / "x.txt").write_bytes(b"a" * size)
    if size <= LIMIT:
        assert texts(tmp_path, max_record_bytes=LIMIT) == ["a" * size]
    else:
        with pytest.raises(UserError, match=r"x.txt: record 1 is larger than 60 bytes; split it"):
            read(tmp_path, max_record_bytes=LIMIT)


def test_text_that_is_not_utf8_is_named_with_its_byte(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"x.txt: record 1 is not UTF-8 \(byte 0xe9 at offset 3\); convert it"):
        read(tmp_path)
    with pytest.raises(UserError, match=r"has no text: skipped 1 record: 1 invalid UTF-8 \(first: .*x.txt"):
        read(tmp_path, on_error="skip")


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".zst", zst)])
@pytest.mark.parametrize("damage", ["truncated", "bad checksum"])
def test_damaged_compression_is_named_and_what_came_before_is_kept(tmp_path, suffix, compress, damage):
    whole = compress(jsonl(*({"text": os.urandom(5000).hex()} for _ in range(40))))
    path = tmp_path / f"x.jsonl{suffix}"
    path.write_bytes(whole[:-9] if damage == "truncated" else whole[:-4] + bytes(255 - byte for byte in whole[-4:]))
    with pytest.raises(UserError, match=rf"x.jsonl{suffix}: truncated or damaged after record \d+ \(.+\); copy"):
        read(tmp_path)
    documents, faults = read(tmp_path, on_error="skip")
    assert 0 < len(documents) <= 40
    assert faults.counts == {"damaged file": 1}
    path.write_bytes(b"not compressed at all")
    with pytest.raises(UserError, match="truncated or damaged after record 0"):
        read(tmp_path)


def test_missing_and_empty_places(tmp_path):
    with pytest.raises(UserError, match="nowhere: No such file or directory; give"):
        read(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds no files; check --data\.path"):
        read(tmp_path)
    (tmp_path / "a.txt").touch()
    with pytest.raises(UserError, match=r"has no text: skipped 1 record: 1 empty .* at least one document"):
        read(tmp_path)
    with pytest.raises(UserError, match=r"holds no files that end in .md or .rst"):
        read(tmp_path, suffixes=(".md", "rst"))
    (tmp_path / "gone.txt").symlink_to("nothing")
    with pytest.raises(UserError, match=r"gone\.txt: a broken link"):
        read(tmp_path)


def test_unknown_options(tmp_path):
    with pytest.raises(UserError, match="'csv' is not known; use one of auto, text"):
        TextSource(tmp_path, format="csv")
    with pytest.raises(UserError, match="'ignore'; use raise or skip"):
        Faults("ignore")


def test_both_kinds_of_records_in_one_folder_need_a_choice(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(GOOD)
    (tmp_path / "x.parquet").write_bytes(b"")
    with pytest.raises(UserError, match="both JSONL and Parquet; choose"):
        read(tmp_path)
    assert len(texts(tmp_path, format="jsonl")) == 2


@pytest.fixture
def nobody():
    """Become a user whom permissions bind, where tests run as root; gives a folder that this user can reach."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)
        if os.getuid() == 0:
            os.seteuid(0)


@pytest.mark.parametrize("name", ["locked", "a.txt"])
def test_without_permission(nobody, name):
    (nobody / "locked").mkdir()
    (nobody / "a.txt").write_text("a")
    (nobody / "b.txt").write_text("b")
    (nobody / name).chmod(0)
    if os.getuid() == 0:
        os.seteuid(65534)
    with pytest.raises(UserError, match=rf"{name}: Permission denied; allow reading it, or count and skip"):
        read(nobody)
    documents, faults = read(nobody, on_error="skip")
    assert documents[-1].name == "b.txt"
    assert str(faults) == f"skipped 1 record: 1 unreadable {'folder' if name == 'locked' else 'file'}"


def test_fingerprint_follows_files_and_options(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    first = TextSource(tmp_path).fingerprint()
    assert TextSource(tmp_path).fingerprint() == first
    assert TextSource(tmp_path, format="text").fingerprint() != first
    (tmp_path / "b.txt").write_text("b")
    second = TextSource(tmp_path).fingerprint()
    assert second != first
    (tmp_path / "b.txt").write_text("bb")
    third = TextSource(tmp_path).fingerprint()
    assert third != second
    os.utime(tmp_path / "b.txt", ns=(0, 1))
    assert TextSource(tmp_path).fingerprint() != third


def test_split_depends_on_the_name_alone_and_keeps_its_fraction():
    names = [f"folder/file{i}.py" for i in range(5000)]
    heldout = {name for name in names if split_of(name, 0.1) == "heldout"}
    assert 400 < len(heldout) < 600  # 500 expected, standard deviation 21
    assert heldout < {name for name in names if split_of(name, 0.2) == "heldout"}
    assert not [name for name in names if split_of(name, 0.0) == "heldout"]
    assert split_of("stable", 0.5) == "train"
    assert split_of("caf\udce9", 1.0) == "heldout"
