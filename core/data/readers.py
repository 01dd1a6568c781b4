"""Readers: documents, one at a time, from text, JSONL, Parquet and Hugging Face `datasets` folders.

1. `TextSource.files` lists what will be read: a file, or a folder walked in sorted order without hidden entries.
2. `TextSource.documents` streams their documents; memory is bounded by the largest record, not by the corpus.
3. Whatever is wrong with the input goes to `Faults`, by reason, with file and record (1-based): the first one raises
   UserError, or all are counted and skipped.

Not done: guessing encodings (text is UTF-8), fetching anything from a network.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from core.config import UserError

FORMATS = ("auto", "text", "jsonl", "parquet", "datasets")
_JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz", ".json.zst")
_SKIP_HINT = "or count and skip what is broken with --data.on-error skip"


@dataclass(frozen=True)
class Document:
    """`name` says where it came from: its file's path below the corpus root, with ":record" where a file holds many.

    `prompt` is what comes before the text of a prompt/completion pair and bears no loss.
    """

    name: str
    text: str
    prompt: str = ""


class Faults:
    """Faults of the input. on_error="raise" ends at the first; "skip" counts them by reason."""

    def __init__(self, on_error: str = "raise"):
        if on_error not in ("raise", "skip"):
            raise UserError(f"on_error is {on_error!r}; use raise or skip")
        self._raises = on_error == "raise"
        self.counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def report(self, reason: str, what: str, remedy: str) -> None:
        """`what` names file and record; `remedy` says what to do."""
        what = what.encode("utf-8", "backslashreplace").decode()  # a file's name need not be UTF-8
        if self._raises:
            raise UserError(f"{what}; {remedy}, {_SKIP_HINT}")
        self.note(reason, what)

    def note(self, reason: str, what: str) -> None:
        """Count something that is left out without being a mistake, such as an empty file."""
        self.counts[reason] += 1
        self._first.setdefault(reason, what)

    def __str__(self) -> str:
        """One line, for example `skipped 3 records: 2 invalid UTF-8, 1 missing field`; empty when nothing was."""
        total = self.counts.total()
        by_reason = ", ".join(f"{count:,} {reason}" for reason, count in self.counts.most_common())
        return f"skipped {total:,} record{'s' if total > 1 else ''}: {by_reason}" if total else ""

    def examples(self) -> list[str]:
        """The first of each reason."""
        return [self._first[reason] for reason, _ in self.counts.most_common()]


def split_of(name: str, heldout_fraction: float) -> str:
    """ "train" or "heldout", by a hash of a document's name alone: adding documents moves none of the others."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") < heldout_fraction * 2**64 else "train"


@dataclass(frozen=True)
class TextSource:
    """A source of documents.

    path          a file, a folder, or a folder made by `datasets.Dataset.save_to_disk`
    format        one of FORMATS; auto goes by suffixes: .jsonl and .json (also .gz, .zst), .parquet, anything else text
    text_field    the field or column that holds the text
    pairs         read prompt_field and completion_field instead: prompt/completion pairs
    suffixes      of a folder read only files that end so; empty: all
    exclude       names of files and folders, anywhere below the root, that are not read
    """

    path: Path
    format: str = "auto"
    text_field: str = "text"
    pairs: bool = False
    prompt_field: str = "prompt"
    completion_field: str = "completion"
    suffixes: tuple[str, ...] = ()
    exclude: frozenset[str] = frozenset()
    max_record_bytes: int = 100_000_000

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UserError(f"data format {self.format!r} is not known; use one of {', '.join(FORMATS)}")
        try:
            self.path.stat()
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}; give a file or folder that can be read") from None

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.prompt_field, self.completion_field) if self.pairs else (self.text_field,)

    def files(self, faults: Faults) -> list[Path]:
        """Every file that will be read, in order. UserError where a folder holds none."""
        if not self.path.is_dir():
            return [self.path]
        suffixes = tuple("." + suffix.lstrip("*.") for suffix in self.suffixes) or ("",)
        found = [file for file in _walk(self.path, self.exclude, faults, set()) if file.name.endswith(suffixes)]
        formats = {_format_of(file) for file in found}
        if self.format == "auto" and {"jsonl", "parquet"} <= formats:
            raise UserError(f"{self.path} holds both JSONL and Parquet; choose with --data.format jsonl or parquet")
        kind = self.format
        if kind == "auto":
            kind = next((records for records in ("jsonl", "parquet") if records in formats), "text")
        if kind != "text":  # text files beside records are notes about them
            found = [file for file in found if _format_of(file) == kind] or found
        if not found:
            ending = f" that end in {' or '.join(suffixes)}" if self.suffixes else ""
            hint = f" ({faults})" if str(faults) else ""
            raise UserError(f"{self.path} holds no files{ending}{hint}; check --data.path and --data.suffixes")
        return found

    def documents(self, faults: Faults) -> Iterator[Document]:
        """Stream all documents. UserError where, after all, there was none."""
        num_documents = 0
        for document in self._read(faults):
            if document.text:
                num_documents += 1
                yield document
            else:
                faults.note("empty", f"{document.name}: empty")
        if not num_documents:
            reason = f": {faults} (first: {faults.examples()[0]})" if str(faults) else ""
            raise UserError(f"{self.path} has no text{reason}; give a corpus with at least one document")

    def fingerprint(self) -> str:
        """Changes when the options, or any file's path, size or time of change does."""
        faults = Faults("skip")
        files = [path for path in self.path.rglob("*") if path.is_file()] if self._is_dataset else self.files(faults)
        lines = [repr((self.format, self.fields, self.max_record_bytes)), str(faults)]
        for file in sorted(files):
            try:
                lines.append(f"{file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns}")
            except OSError as error:
                lines.append(f"{file} {error.strerror}")
        return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()

    @property
    def _is_dataset(self) -> bool:
        marks = ("dataset_info.json", "dataset_dict.json")
        return self.format == "datasets" or (
            self.format == "auto" and self.path.is_dir() and any((self.path / mark).is_file() for mark in marks)
        )

    def _read(self, faults: Faults) -> Iterator[Document]:
        if self._is_dataset:
            yield from _read_dataset(self, faults)
            return
        root = self.path if self.path.is_dir() else self.path.parent
        for file in self.files(faults):
            name = file.relative_to(root).as_posix()
            kind = _format_of(file) if self.format == "auto" else self.format
            if self.pairs and kind == "text":
                raise UserError(f"{file} is plain text and holds no pairs; give JSONL, Parquet or a datasets folder")
            yield from _READERS[kind](self, file, name, faults)


def _format_of(file: Path) -> str:
    name = file.name.lower()
    return "jsonl" if name.endswith(_JSONL_SUFFIXES) else "parquet" if name.endswith(".parquet") else "text"


def _walk(folder: Path, exclude: frozenset[str], faults: Faults, above: set[tuple[int, int]]) -> Iterator[Path]:
    """Files below `folder`, sorted by name; links are followed except to a folder `above`, which would not end."""
    try:
        here = folder.stat()
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        faults.report("unreadable folder", f"{folder}: {error.strerror}", "allow reading it")
        return
    for entry in entries:
        path = folder / entry.name
        if entry.name.startswith(".") or entry.name in exclude:
            continue
        if entry.is_dir():
            if _identity(path.stat()) not in above | {_identity(here)}:
                yield from _walk(path, exclude, faults, above | {_identity(here)})
        elif entry.is_file():
            yield path
        else:
            faults.report("not a file", f"{path}: a broken link or a device", "remove it")


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _read_text(source: TextSource, file: Path, name: str, faults: Faults) -> Iterator[Document]:
    """One document: the file, without a byte order mark."""
    limit = source.max_record_bytes
    try:
        with _open(file) as stream:
            data = stream.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        _report_damage(file, 0, error, faults)
        return
    if len(data) > limit:
        remedy = "split it, or write it as JSONL with a record a document"
        faults.report("too large", f"{file}: record 1 is larger than {limit:,} bytes", remedy)
        return
    try:
        yield Document(name, data.decode().removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        where = f"{file}: record 1 is not UTF-8 (byte 0x{data[error.start]:02x} at offset {error.start:,})"
        faults.report("invalid UTF-8", where, "convert it to UTF-8, choose files with --data.suffixes")


def _read_jsonl(source: TextSource, file: Path, name: str, faults: Faults) -> Iterator[Document]:
    """One document a line; blank lines are passed over. A record's number is its line's."""
    number = 0
    try:
        with _open(file) as stream:
            for number, line in enumerate(_lines(stream, source.max_record_bytes), start=1):
                where = f"{file}: record {number}"
                if line is None:
                    what = f"{where} is larger than {source.max_record_bytes:,} bytes"
                    faults.report("too large", what, "split it")
                elif line.strip():
                    record = _parse(line, where, faults)
                    document = None if record is None else _document(record, f"{name}:{number}", where, source, faults)
                    if document:
                        yield document
    except (OSError, EOFError, zlib.error) as error:
        _report_damage(file, number, error, faults)


def _lines(stream: BinaryIO, limit: int) -> Iterator[bytes | None]:
    """Lines of at most `limit` bytes; None for a longer one, which is never held whole."""
    while line := stream.readline(limit + 1):
        if len(line) <= limit or line.endswith(b"\n"):
            yield line
            continue
        while (rest := stream.readline(1 << 20)) and not rest.endswith(b"\n"):
            pass
        yield None


def _parse(line: bytes, where: str, faults: Faults) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode().removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        faults.report("invalid UTF-8", f"{where} is not UTF-8 (at its byte {error.start:,})", "convert it to UTF-8")
    except (ValueError, RecursionError) as error:
        faults.report("malformed JSON", f"{where} is not JSON ({error})", "write one JSON object on each line")
    else:
        if isinstance(record, dict):
            return record
        what = f"{where} is a JSON {type(record).__name__}, not an object"
        faults.report("malformed JSON", what, "write one JSON object on each line")
    return None


def _document(record: dict[str, Any], name: str, where: str, source: TextSource, faults: Faults) -> Document | None:
    """The document in a record, or None once what is wrong with it was reported."""
    for field in source.fields:
        value = record.get(field)
        if field not in record:
            has = ", ".join(map(str, list(record)[:10])) or "none"
            remedy = f"name the right field with --data.{'prompt-field' if source.pairs else 'text-field'}"
            faults.report("missing field", f"{where} has no field {field!r} (its fields: {has})", remedy)
            return None
        if not isinstance(value, str):
            what = f"{where}: field {field!r} is {type(value).__name__}, not a string"
            faults.report("wrong type", what, "make it a string, or name another field with --data.text-field")
            return None
        try:
            num_bytes = len(value.encode())
        except UnicodeEncodeError:
            faults.report(
                "invalid UTF-8", f"{where}: field {field!r} holds half a surrogate pair", "repair its escapes"
            )
            return None
        if num_bytes > source.max_record_bytes:
            faults.report("too large", f"{where} is larger than {source.max_record_bytes:,} bytes", "split it")
            return None
    values = [record[field] for field in source.fields]
    return Document(name, values[-1], values[0] if source.pairs else "")


def _read_parquet(source: TextSource, file: Path, name: str, faults: Faults) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = [0]
    try:
        with pq.ParquetFile(file) as table:
            columns = [field for field in source.fields if field in table.schema_arrow.names]
            if len(columns) < len(source.fields):
                _document(dict.fromkeys(table.schema_arrow.names, ""), name, f"{file}: record 1", source, faults)
                return
            batches = table.iter_batches(batch_size=64, columns=columns)
            yield from _read_arrow(batches, number, f"{name}:", file, source, faults)
    except (OSError, pa.ArrowException) as error:
        _report_damage(file, number[0], error, faults)


def _read_dataset(source: TextSource, faults: Faults) -> Iterator[Document]:
    import datasets

    try:
        dataset = datasets.load_from_disk(str(source.path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{source.path} is not a readable datasets folder ({_first_line(error)})"
        raise UserError(f"{what}; give what Dataset.save_to_disk wrote") from None
    if isinstance(dataset, datasets.DatasetDict):
        raise UserError(
            f"{source.path} holds the splits {', '.join(map(str, dataset))}; give one, as {source.path}/NAME"
        )
    missing = [field for field in source.fields if field not in dataset.column_names]
    if missing:
        _document(dict.fromkeys(dataset.column_names, ""), "", f"{source.path}: record 1", source, faults)
        return
    tables = dataset.select_columns(list(source.fields)).with_format("arrow").iter(batch_size=64)
    batches = (batch for table in tables for batch in cast(Any, table).to_batches())
    yield from _read_arrow(batches, [0], "", source.path, source, faults)


def _read_arrow(
    batches: Iterable[Any], number: list[int], prefix: str, file: Path, source: TextSource, faults: Faults
) -> Iterator[Document]:
    """Documents of Arrow record batches; `number[0]` follows the record, for whoever has to report damage."""
    for batch in batches:
        for row in range(batch.num_rows):
            number[0] += 1
            where = f"{file}: record {number[0]}"
            try:
                record = {field: batch.column(field)[row].as_py() for field in source.fields}
            except UnicodeDecodeError as error:
                faults.report("invalid UTF-8", f"{where} is not UTF-8 (at its byte {error.start:,})", "convert it")
                continue
            document = _document(record, f"{prefix}{number[0]}", where, source, faults)
            if document:
                yield document


_READERS = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet}


def _report_damage(file: Path, num_read: int, error: Exception, faults: Faults) -> None:
    """A file that cannot be opened, or ends or breaks after `num_read` records."""
    if isinstance(error, OSError) and error.strerror:
        faults.report("unreadable file", f"{file}: {error.strerror}", "allow reading it")
    else:
        what = f"{file}: truncated or damaged after record {num_read} ({_first_line(error)})"
        faults.report("damaged file", what, "copy or make it again")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _open(file: Path) -> BinaryIO:
    if file.suffix == ".gz":
        return cast(BinaryIO, gzip.open(file))
    raw = open(file, "rb")  # noqa: SIM115 (the caller closes it)
    return cast(BinaryIO, io.BufferedReader(_Zstd(raw), 1 << 20)) if file.suffix == ".zst" else raw


class _Zstd(io.RawIOBase):
    """Decompressed frames, one after the other. Unlike zstandard's own reader it notices a frame that stops short."""

    def __init__(self, raw: BinaryIO):
        import zstandard

        self._raw = raw
        self._new = zstandard.ZstdDecompressor().decompressobj
        self._error = zstandard.ZstdError
        self._frame = None
        self._ahead = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ahead:
            # Small bites: one of zeros may open to ten thousand times its size.
            data = (self._frame.unused_data if self._frame and self._frame.eof else b"") or self._raw.read(1 << 14)
            if not data:
                if self._frame and not self._frame.eof:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._new()
            try:
                self._ahead = self._frame.decompress(data)
            except self._error as error:
                raise EOFError(str(error)) from None
        count = min(len(buffer), len(self._ahead))
        buffer[:count], self._ahead = self._ahead[:count], self._ahead[count:]
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()
