"""Raw text to token shards, as `llm tokenize` does it, and every run on a corpus that was not tokenized before.

1. A key is made of the corpus (paths, sizes, times), the tokenizer and the options; under it lies the cached result.
2. Where there is none, the process that gets the lock makes it and the others wait: documents are read, split into
   train and held-out by a hash of their name, a BPE is trained on the train documents (unless a tokenizer was given),
   and both splits are encoded into shards.
3. The folder is renamed to its final name when all of it is written. Every process then maps the same files.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from apps.llm.tokenizer import NUM_BYTES, Tokenizer, load_tokenizer, train_bpe
from core.config import UserError, option
from core.data import BatchSize, Document, Faults, RampConfig, ShardWriter, TextSource, TokenShards, split_of
from core.files import Damaged, check_stamps, signed, stamp, unsigned, write_file

STDLIB = "stdlib"
_VERSION = 2
_NO_SOURCE_OF_OURS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_BATCH_CHARS = 1 << 20
_TRAIN_CHARS = 1 << 29
_WORD_END = re.compile(r"(?<=\S)[ \n]")


@dataclass(frozen=True)
class DataConfig:
    """The text to train on, and how it becomes batches."""

    path: str = STDLIB
    """A text, JSONL (also .gz, .zst) or Parquet file, a folder of those, a Hugging Face datasets folder, or `stdlib`:
    the source of this Python's own standard library."""
    format: Literal["auto", "text", "jsonl", "parquet", "datasets"] = "auto"
    """What the files are; auto goes by their suffixes."""
    text_field: str = "text"
    """The field of a record that holds its text."""
    pairs: bool = False
    """Read prompt/completion pairs, of which only the completions are learned."""
    prompt_field: str = "prompt"
    """The field of a pair that holds its prompt."""
    completion_field: str = "completion"
    """The field of a pair that holds its completion."""
    suffixes: tuple[str, ...] = ()
    """Of a folder read only files that end so, such as .txt .md; all by default."""
    tokenizer: str = "bpe"
    """`bpe` trains one on this corpus, `byte` takes bytes; or a tokenizer.json or Hugging Face tokenizer folder."""
    vocab_size: int = 8192
    """Size of the vocabulary that `bpe` learns."""
    mask_token: bool = False
    """Give `bpe` or `byte` a mask token, which masked language models hide others by."""
    sequence_length: int = 256
    """Tokens in a training sequence."""
    global_batch: int = 24
    """Sequences in one optimizer step, over all ranks."""
    ramp: RampConfig = field(default_factory=RampConfig)
    mask_documents: bool = False
    """Keep attention within a document where several share a sequence."""
    heldout_fraction: float = 0.05
    """Share of the documents, chosen by a hash of their names, that is kept out of training."""
    on_error: Literal["raise", "skip"] = "raise"
    """Stop at the first broken record, or skip broken records and count them by reason."""
    cache: str = ""
    """Folder for tokenized corpora; by default beside the run."""

    def __post_init__(self) -> None:
        if not self.path:
            raise UserError("--data.path is empty; give a file, a folder, or stdlib")
        for name in ("sequence_length", "global_batch"):
            if getattr(self, name) < 1:
                raise UserError(f"{option(f'data.{name}')} is {getattr(self, name)}; it must be at least 1")
        _ = self.batch_size  # refuses a ramp that does not lead to it
        if not 0 <= self.heldout_fraction < 1:
            raise UserError(f"--data.heldout-fraction is {self.heldout_fraction}; it must be in [0, 1)")
        least = NUM_BYTES + 1 + self.mask_token
        if self.tokenizer == "bpe" and self.vocab_size < least:
            raise UserError(f"--data.vocab-size is {self.vocab_size}; a bpe needs at least {least}")

    def unread(self) -> dict[str, str]:
        found = {}
        if self.tokenizer not in ("bpe", "byte"):
            found["mask_token"] = f"with data.tokenizer={self.tokenizer}, which has one or has none; leave it out"
        if self.tokenizer != "bpe":
            found["vocab_size"] = f"with data.tokenizer={self.tokenizer}, which has its own; give --data.tokenizer bpe"
        if self.pairs:
            found["text_field"] = "with data.pairs; give --data.prompt-field and --data.completion-field"
        else:
            found |= dict.fromkeys(("prompt_field", "completion_field"), "without pairs; give --data.pairs")
        if self.path == STDLIB:
            why = f"with data.path={STDLIB}, whose files are known; give another --data.path"
            found |= dict.fromkeys(("format", "text_field", "pairs", "suffixes"), why)
        return found

    @property
    def batch_size(self) -> BatchSize:
        return BatchSize(self.global_batch, self.ramp)


@dataclass(frozen=True)
class Corpus:
    """A tokenized corpus. `heldout` is None where no document fell into it; `skipped` is one line, or empty."""

    train: TokenShards
    heldout: TokenShards | None
    tokenizer: Tokenizer
    skipped: str


def source_of(config: DataConfig) -> TextSource:
    if config.path == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        return TextSource(root, format="text", suffixes=(".py",), exclude=_NO_SOURCE_OF_OURS)
    return TextSource(
        Path(config.path),
        format=config.format,
        text_field=config.text_field,
        pairs=config.pairs,
        prompt_field=config.prompt_field,
        completion_field=config.completion_field,
        suffixes=config.suffixes,
    )


def stdlib_corpus() -> list[Path]:
    """The standard library's own .py files, without its tests."""
    return source_of(DataConfig(path=STDLIB)).files(Faults())


def heldout_bytes(config: DataConfig) -> bytes:
    """The held-out documents one after the other, for comparing with what compressors make of the same bytes."""
    documents = source_of(config).documents(_faults(config))
    return b"".join(d.text.encode() for d in documents if split_of(d.name, config.heldout_fraction) == "heldout")


def prepare(
    config: DataConfig, folder: Path, *, progress: Callable[[str, int], None] | None = None, timeout_s: float = 3600
) -> Corpus:
    """The corpus as token shards, from the cache where it was made before. Every rank may call it at once.

    Args:
        folder: where results are cached unless `config.cache` says otherwise; the same for all ranks of a machine.
        progress: called with what is being done and the bytes of text done so far.
        timeout_s: how long to wait for another process that is making the same corpus.
    """
    source = source_of(config)
    given = None if config.tokenizer == "bpe" else load_tokenizer(config.tokenizer, mask=config.mask_token)
    cache = Path(config.cache or folder)
    fingerprint = source.fingerprint()
    key = _key(config, fingerprint, given)
    if not (cache / key).is_dir():
        with _lock(cache, key, timeout_s):
            if not (cache / key).is_dir():
                _make(config, source, fingerprint, given, cache / key, progress or (lambda what, num_bytes: None))
    return _open(cache / key)


def _key(config: DataConfig, fingerprint: str, given: Tokenizer | None) -> str:
    tokenizer = given.fingerprint if given else f"bpe {config.vocab_size}{' mask' * config.mask_token}"
    parts = [_VERSION, fingerprint, tokenizer, config.heldout_fraction, config.on_error]
    return f"{Path(config.path).stem}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}"


@contextmanager
def _lock(cache: Path, key: str, timeout_s: float) -> Iterator[None]:
    """Held by one process at a time; the system releases it when that process ends, however it ends."""
    path = cache / f"{key}.lock"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        file = open(path, "w")  # noqa: SIM115 (held open while the lock is)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; choose another folder with --data.cache") from None
    with file:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    what = f"another process has held {path} for {timeout_s:g} s"
                    raise UserError(f"{what}; end it, or choose another folder with --data.cache") from None
                time.sleep(0.1)
        yield


def _make(
    config: DataConfig,
    source: TextSource,
    fingerprint: str,
    given: Tokenizer | None,
    folder: Path,
    progress: Callable[[str, int], None],
) -> None:
    aside = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    tokenizer = given or _train(config, source, progress)
    faults = _faults(config)
    shared = {
        "vocab_size": tokenizer.vocab_size,
        "separator": tokenizer.eos_id,
        "begin": [] if tokenizer.begin_ids == [tokenizer.eos_id] else tokenizer.begin_ids,
        "tokenizer": tokenizer.fingerprint,
        "source": fingerprint,
        "pairs": source.pairs,
    }
    num_bytes = 0
    with ShardWriter(aside / "train", **shared) as train, ShardWriter(aside / "heldout", **shared) as heldout:
        for document, prompt, text in _encoded(source.documents(faults), tokenizer):
            split = train if split_of(document.name, config.heldout_fraction) == "train" else heldout
            text_bytes = len(document.text.encode())
            split.add(np.concatenate((prompt, text)), text_bytes=text_bytes, num_prompt_tokens=len(prompt))
            num_bytes += text_bytes
            progress("tokenizing", num_bytes)
    _check_train(TokenShards(aside / "train"), config)
    tokenizer.save(aside / "tokenizer")
    stamps = {path.name: stamp(path) for path in sorted((aside / "tokenizer").iterdir())}
    report = {"skipped": str(faults), "examples": faults.examples(), "tokenizer": stamps}
    write_file(aside / "report.json", signed(report))
    aside.rename(folder)


def _check_train(train: TokenShards, config: DataConfig) -> None:
    if not train.num_documents:
        raise UserError(
            f"every document of {config.path} falls into the held-out split; "
            "give more documents or --data.heldout-fraction 0"
        )


def _open(folder: Path) -> Corpus:
    train, heldout = TokenShards(folder / "train"), TokenShards(folder / "heldout")
    try:
        report = _checked_report(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is not a complete tokenized corpus: {error}; remove it and tokenize again") from None
    return Corpus(
        train, heldout if heldout.num_documents else None, load_tokenizer(folder / "tokenizer"), report["skipped"]
    )


def _checked_report(folder: Path) -> dict[str, Any]:
    """The contents of report.json, once it and the tokenizer's files are what was written.

    Those of the version before have no checksums of them. Raises Damaged, and OSError.
    """
    path = folder / "report.json"
    raw = path.read_bytes()
    try:
        report = json.loads(raw)
        if {"crc32", "tokenizer"} & report.keys():
            report = unsigned(raw)
    except ValueError as error:
        raise Damaged(f"{path.name} {error if isinstance(error, Damaged) else 'is not JSON'}") from None
    check_stamps(folder / "tokenizer", report.get("tokenizer", {}))
    return report


def _faults(config: DataConfig) -> Faults:
    return Faults("skip" if config.path == STDLIB else config.on_error)  # a few of its files are not UTF-8 on purpose


def _train(config: DataConfig, source: TextSource, progress: Callable[[str, int], None]) -> Tokenizer:
    """A BPE of the train documents, of the first 2^29 characters where there are more."""

    def texts() -> Iterator[str]:
        num_chars = 0
        for document in source.documents(_faults(config)):
            if split_of(document.name, config.heldout_fraction) == "train":
                yield document.prompt + document.text
                num_chars += len(document.prompt) + len(document.text)
                progress("training the tokenizer", num_chars)
                if num_chars > _TRAIN_CHARS:
                    return

    return train_bpe(texts(), config.vocab_size, mask=config.mask_token)


def _encoded(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[tuple[Document, np.ndarray, np.ndarray]]:
    """(document, ids of its prompt, ids of its text) in order, a batch at a time."""
    for batch in _batched(documents):
        texts = [_pieces(text) for document in batch for text in (document.prompt, document.text)]
        pieces = iter(tokenizer.encode_batch([piece for text in texts for piece in text]))
        ids = iter([np.concatenate([np.zeros(0, np.uint32), *islice(pieces, len(text))]) for text in texts])
        yield from ((document, next(ids), next(ids)) for document in batch)


def _batched(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, num_chars = [], 0
    for document in documents:
        batch.append(document)
        num_chars += len(document.prompt) + len(document.text)
        if num_chars >= _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _pieces(text: str, size: int = _BATCH_CHARS) -> list[str]:
    """A long text in pieces, so that encoding a record of 100 MB does not take gigabytes.

    Cut where a space or newline follows a word: in GPT-2's scheme no token goes from a letter on to a space, so the
    tokens are those of the whole. (A tokenizer that marks the start of a text sees one more start at each cut.)
    """
    pieces, start = [], 0
    while len(text) - start > size:
        cut = _WORD_END.search(text, start + size // 2, start + size)
        stop = cut.start() if cut else start + size
        pieces.append(text[start:stop])
        start = stop
    return [*pieces, text[start:]] if start < len(text) else pieces
