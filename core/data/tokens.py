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
    index.json          dtype, counts, bytes of text, fingerprints of tokenizer and source, version

1. `ShardWriter` writes everything aside and renames the folder when it is complete.
2. `TokenShards` checks the index against the sizes of the files, then maps them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from core.config import UserError

FORMAT = "megalith token shards"
VERSION = 2
_OFFSET = np.dtype("<i8")


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
            self._tokens.write(now.astype(self._dtype).tobytes())
            self._files[-1]["num_tokens"] += len(now)
            self._num_tokens += len(now)
            tokens = tokens[len(now) :]

    def _next_file(self) -> None:
        if self._tokens is not None:
            _close(self._tokens)
        name = f"tokens-{len(self._files):05d}.bin"
        self._files.append({"name": name, "num_tokens": 0})
        self._tokens = open(self._aside / name, "wb")  # noqa: SIM115 (closed by the next one or by __exit__)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None and not (self._begin and self._num_tokens):
            self._append(np.array([self._separator]))
        for file in (self._tokens, self._documents, self._loss_starts):
            if file is not None:
                _close(file)
        if kind is not None:
            shutil.rmtree(self._aside)
            return
        facts = {**self._facts, "num_tokens": self._num_tokens, "files": self._files}
        with open(self._aside / "index.json", "wb") as file:
            file.write(json.dumps(facts, indent=1).encode())
            _close(file)
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self._aside.rename(self.folder)


def _close(file: BinaryIO) -> None:
    """Close once the bytes are on disk, so that a renamed folder is whole even after a power cut."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


class TokenShards:
    """A complete shard folder, mapped read-only. Raises UserError where it is missing, foreign or truncated."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        index = self._index()
        try:
            self.num_tokens: int = index["num_tokens"]
            self.num_documents: int = index["num_documents"]
            self.num_text_bytes: int = index["num_text_bytes"]
            self.vocab_size: int = index["vocab_size"]
            self.separator: int = index["separator"]
            self.begin: list[int] = index["begin"]
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

    def _index(self) -> dict[str, Any]:
        try:
            index = json.loads((self.folder / "index.json").read_bytes())
        except OSError as error:
            raise self._broken(f"index.json: {error.strerror}") from None
        except ValueError:
            raise self._broken("index.json is not JSON") from None
        if not isinstance(index, dict) or index.get("format") != FORMAT:
            raise self._broken("index.json is of something else")
        if index.get("version") != VERSION:
            raise self._broken(f"its version is {index.get('version')}, this program reads {VERSION}")
        return index

    def _map(self, name: str, dtype: np.dtype, count: int) -> np.ndarray:
        path = self.folder / name
        has_bytes = path.stat().st_size if path.is_file() else -1
        if has_bytes != count * dtype.itemsize:
            state = "is missing" if has_bytes < 0 else f"has {has_bytes} bytes instead of {count * dtype.itemsize}"
            raise self._broken(f"{name} {state}")
        return np.memmap(path, dtype, "r") if count else np.zeros(0, dtype)  # an empty file cannot be mapped

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
            out[done : done + len(piece)] = piece
            done += len(piece)
            file += 1
        return out
