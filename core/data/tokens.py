"""Token shards: a tokenized corpus on disk, memory-mapped.

A corpus is one stream of token ids. Every document starts with the separator (the tokenizer's end-of-text token), and
one more separator closes the stream:

    <sep> document 0 <sep> document 1 … <sep> document n-1 <sep>

so each token of each document, and each document's end, is the target of exactly one prediction, and the separator
stands for "nothing came before" to a model that may not look into other documents. Of a model family that begins texts
with a token of its own (`begin`), that token stands there instead, and the separator ends the document:

    <begin> document 0 <sep> <begin> document 1 <sep> …

There <begin> is read and never predicted. A folder holds

    tokens-00000.bin …  the stream as raw little-endian uint16 (vocabularies up to 65,536) or uint32, cut by size
    documents.bin       int64 per document: the offset of its separator in the stream
    loss_starts.bin     int64 per document, only for prompt/completion pairs: the offset of the first token to predict
    checksums.bin       a CRC-32 of each 64 KiB of each file of tokens, as little-endian uint32, file after file
    index.json          dtype, counts, bytes of text, fingerprints of tokenizer and source, version, sizes and checksums
                        of the other files, and its own checksum

1. `ShardWriter` writes everything aside and renames the folder when it is complete.
2. `TokenShards` checks the index against the sizes of the files and all but the tokens against their checksums, then
   maps them. Tokens are checked where they are read: of a corpus that does not fit into memory, no more is read.

Version 1 is the same without checksums: it is read, and a line says so.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from core.config import UserError
from core.files import Damaged, check_stamp, naming, signed, stamp, sync, unsigned, write_file

FORMAT = "megalith token shards"
VERSION = 2
_WITHOUT_CHECKSUMS = 1
_OFFSET, _CHECKSUM = np.dtype("<i8"), np.dtype("<u4")
_CHECKED_BYTES = 1 << 16


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest stored type that holds every id below `vocab_size`."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class ShardWriter:
    """Writes a shard folder document by document; used as a context manager, complete (or absent) afterwards.

    Args:
        folder: what is created. An older shard folder there is replaced, anything else is refused.
        separator: token id between documents.
        begin: token ids in front of each document; none: the separator stands there.
        tokenizer, source: fingerprints, stored for whoever decides whether a folder can be used again.
        pairs: documents carry a prompt that bears no loss.
        shard_tokens: cut a .bin file at this many tokens.
    """

    def __init__(
        self,
        folder: Path,
        *,
        vocab_size: int,
        separator: int,
        begin: Sequence[int] = (),
        tokenizer: str = "",
        source: str = "",
        pairs: bool = False,
        shard_tokens: int = 1 << 28,
    ):
        self.folder = Path(folder)
        self._refuse_to_replace_what_is_not_ours()
        self._aside = self.folder.with_name(f"{self.folder.name}.partial-{os.getpid()}")
        self._dtype = token_dtype(vocab_size)
        self._separator, self._begin = separator, list(begin)
        self._shard_tokens = shard_tokens
        self._files: list[dict[str, Any]] = []
        self._tokens: BinaryIO | None = None
        self._num_tokens = 0
        self._checksums: list[_Checksums] = []
        self._facts: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self._dtype.name,
            "vocab_size": vocab_size,
            "separator": separator,
            "begin": list(begin),
            "tokenizer": tokenizer,
            "source": source,
            "pairs": pairs,
            "num_documents": 0,
            "num_text_bytes": 0,
        }

    def _refuse_to_replace_what_is_not_ours(self) -> None:
        if self.folder.exists() and not (self.folder / "index.json").is_file():
            raise UserError(f"{self.folder} exists and is not a token shard folder; choose another folder or remove it")

    def __enter__(self) -> ShardWriter:
        shutil.rmtree(self._aside, ignore_errors=True)
        self._aside.mkdir(parents=True)
        self._documents = open(self._aside / "documents.bin", "wb")
        self._loss_starts = open(self._aside / "loss_starts.bin", "wb") if self._facts["pairs"] else None
        return self

    def add(self, tokens: np.ndarray, *, text_bytes: int, num_prompt_tokens: int = 0) -> None:
        """Append one document: `tokens[n]` without separators, from `text_bytes` bytes of UTF-8 text.

        With `pairs`, its first `num_prompt_tokens` tokens are read and never predicted.
        """
        start = self._num_tokens
        with naming(self._aside):
            self._documents.write(_OFFSET.type(start).tobytes())
            if self._loss_starts is not None:
                before = len(self._begin) or 1
                self._loss_starts.write(_OFFSET.type(start + before + num_prompt_tokens).tobytes())
            end = [self._separator] if self._begin else []
            self._append(np.concatenate((self._begin or [self._separator], tokens, np.array(end, np.int64))))
        self._facts["num_documents"] += 1
        self._facts["num_text_bytes"] += text_bytes

    def _append(self, tokens: np.ndarray) -> None:
        while len(tokens):
            if self._tokens is None or self._files[-1]["num_tokens"] == self._shard_tokens:
                self._next_file()
            assert self._tokens is not None
            now = tokens[: self._shard_tokens - self._files[-1]["num_tokens"]]
            raw = now.astype(self._dtype).tobytes()
            self._tokens.write(raw)
            self._checksums[-1].add(raw)
            self._files[-1]["num_tokens"] += len(now)
            self._num_tokens += len(now)
            tokens = tokens[len(now) :]

    def _next_file(self) -> None:
        if self._tokens is not None:
            _close(self._tokens)
        name = f"tokens-{len(self._files):05d}.bin"
        self._files.append({"name": name, "num_tokens": 0})
        self._checksums.append(_Checksums())
        self._tokens = open(self._aside / name, "wb")  # noqa: SIM115 (closed by the next one or by __exit__)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                with naming(self._aside):
                    if not (self._begin and self._num_tokens):
                        self._append(np.array([self._separator]))
                    self._finish()
        finally:
            for file in (self._tokens, self._documents, self._loss_starts):
                if file is not None:
                    _abandon(file)
            shutil.rmtree(self._aside, ignore_errors=True)

    def _finish(self) -> None:
        for file in (self._tokens, self._documents, self._loss_starts):
            if file is not None:
                _close(file)
        write_file(self._aside / "checksums.bin", b"".join(found.stored() for found in self._checksums))
        stamped = ["documents.bin", "checksums.bin", *(["loss_starts.bin"] if self._loss_starts is not None else [])]
        facts = {**self._facts, "num_tokens": self._num_tokens, "files": self._files}
        facts["stamps"] = {name: stamp(self._aside / name) for name in stamped}
        write_file(self._aside / "index.json", signed(facts))
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self._aside.rename(self.folder)


class _Checksums:
    """CRC-32 of each `_CHECKED_BYTES` of a file that is written piece by piece."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._open, self._room = 0, _CHECKED_BYTES

    def add(self, raw: bytes) -> None:
        rest = memoryview(raw)
        while len(rest):
            now, rest = rest[: self._room], rest[self._room :]
            self._open, self._room = zlib.crc32(now, self._open), self._room - len(now)
            if not self._room:
                self._done.append(self._open)
                self._open, self._room = 0, _CHECKED_BYTES

    def stored(self) -> bytes:
        found = [*self._done, self._open] if self._room < _CHECKED_BYTES else self._done
        return np.array(found, _CHECKSUM).tobytes()


def _close(file: BinaryIO) -> None:
    """Close once the bytes are on disk, so that a renamed folder is whole even after a power cut."""
    sync(file)
    file.close()


def _abandon(file: BinaryIO) -> None:
    """Close a file of which nothing is kept: what it still holds need not find room on the disk."""
    with suppress(OSError):
        file.close()


class TokenShards:
    """A complete shard folder, mapped read-only. Raises UserError where it is missing, foreign, cut or damaged."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        index = self._index()
        try:
            self.num_tokens: int = index["num_tokens"]
            self.num_documents: int = index["num_documents"]
            self.num_text_bytes: int = index["num_text_bytes"]
            self.vocab_size: int = index["vocab_size"]
            self.separator: int = index["separator"]
            self.begin: list[int] = index.get("begin", [])
            self.tokenizer: str = index["tokenizer"]
            self.source: str = index["source"]
            self.pairs: bool = index["pairs"]
            dtype = np.dtype(index["dtype"]).newbyteorder("<")
            self._files = [self._map(file["name"], dtype, file["num_tokens"]) for file in index["files"]]
        except (KeyError, TypeError) as error:
            raise self._broken(f"index.json lacks or mistypes {error}") from None
        self._ends = np.cumsum([len(file) for file in self._files])
        if not len(self._ends) or self._ends[-1] != self.num_tokens:
            raise self._broken(f"index.json counts {self.num_tokens} tokens, its files differ")
        self.document_starts = self._map("documents.bin", _OFFSET, self.num_documents)
        self.loss_starts = self._map("loss_starts.bin", _OFFSET, self.num_documents) if self.pairs else None
        self._read_checksums(index)

    def _index(self) -> dict[str, Any]:
        try:
            raw = (self.folder / "index.json").read_bytes()
            index = json.loads(raw)
        except OSError as error:
            raise self._broken(f"index.json: {error.strerror}") from None
        except ValueError:
            raise self._broken("index.json is not JSON") from None
        if not isinstance(index, dict) or index.get("format") != FORMAT:
            raise self._broken("index.json is of something else")
        version = index.get("version")
        if version not in (VERSION, _WITHOUT_CHECKSUMS):
            raise self._broken(f"its version is {version}, this program reads {VERSION}")
        # A damaged digit must not make of a folder with checksums one without.
        if version == _WITHOUT_CHECKSUMS and not {"stamps", "crc32"} & index.keys():
            print(f"note: {self.folder} has no checksums, so damage in it is not seen; tokenize again", file=sys.stderr)
            return index
        try:
            return unsigned(raw)
        except Damaged as error:
            raise self._broken(f"index.json {error}") from None

    def _read_checksums(self, index: dict[str, Any]) -> None:
        """Check all files but the tokens, and take over the tokens' checksums."""
        self._checksums: list[np.ndarray] | None = None
        if index["version"] == _WITHOUT_CHECKSUMS:
            return
        try:
            for name, expected in index["stamps"].items():
                check_stamp(self.folder / name, expected)
        except Damaged as error:
            raise self._broken(str(error)) from None
        counts = [-(-file.nbytes // _CHECKED_BYTES) for file in self._files]
        found = self._map("checksums.bin", _CHECKSUM, sum(counts))
        self._checksums = np.split(found, np.cumsum(counts)[:-1])
        self._checked = [np.zeros(count, bool) for count in counts]

    def _map(self, name: str, dtype: np.dtype, count: int) -> np.ndarray:
        path = self.folder / name
        has_bytes = path.stat().st_size if path.is_file() else -1
        if has_bytes != count * dtype.itemsize:
            state = "is missing" if has_bytes < 0 else f"has {has_bytes} bytes instead of {count * dtype.itemsize}"
            raise self._broken(f"{name} {state}")
        return np.memmap(path, dtype, "r") if count else np.zeros(0, dtype)  # an empty file cannot be mapped

    def _check(self, file: int, first: int, num_tokens: int) -> None:
        """Compare what holds these tokens of a file with its checksums, unless that was done before."""
        if self._checksums is None:
            return
        size = self._files[file].itemsize
        start, stop = first * size // _CHECKED_BYTES, -(-(first + num_tokens) * size // _CHECKED_BYTES)
        if self._checked[file][start:stop].all():
            return
        raw = self._files[file].view(np.uint8)
        for number in range(start, stop):
            piece = raw[number * _CHECKED_BYTES : (number + 1) * _CHECKED_BYTES]
            if zlib.crc32(piece.data) != self._checksums[file][number]:
                raise self._broken(
                    f"tokens-{file:05d}.bin is damaged: its {_CHECKED_BYTES // 1024} KiB from byte "
                    f"{number * _CHECKED_BYTES} on have another checksum than when they were written"
                )
            self._checked[file][number] = True

    def _broken(self, why: str) -> UserError:
        return UserError(f"{self.folder} is not a complete token shard folder: {why}; remove it and tokenize again")

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream as int64, across files."""
        assert 0 <= start <= stop <= self.num_tokens
        out = np.empty(stop - start, np.int64)
        file = int(np.searchsorted(self._ends, start, side="right"))
        done = 0
        while done < len(out):
            first = start + done - (self._ends[file] - len(self._files[file]))
            piece = self._files[file][first : first + len(out) - done]
            self._check(file, int(first), len(piece))
            out[done : done + len(piece)] = piece
            done += len(piece)
            file += 1
        return out
