"""Tokenizers: byte-level BPE trained here, plain bytes, or any tokenizer.json or Hugging Face tokenizer folder.

All are one class around a Hugging Face tokenizer, so what is trained here is saved as a folder that
`transformers.AutoTokenizer` loads. BPE: Sennrich, Haddow and Birch, 2016; over bytes with GPT-2's splitting of text
into words: Radford et al., 2019.

Text is only text: a document that contains the characters of a special token gets those characters, not the token.
Nothing is fetched from a network and no code out of a tokenizer folder is run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from core.config import UserError, importing
from core.files import naming

END_OF_TEXT = "<|endoftext|>"
MASK = "<|mask|>"
NUM_BYTES = 256
_MASKS = (MASK, "[MASK]", "<mask>")
_ENDS_OF_TEXT = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "[SEP]")


class Tokenizer:
    """Text to token ids and back.

    vocab_size  one more than the largest id
    eos_id      the end-of-text token, which also separates documents
    mask_id     the token that hides another, of a masked language model; None: it has none
    begin_ids   what the family puts in front of every text: its tokenizer's post-processor says so (Llama and Mixtral
                <s>, OPT </s>, GPT-2 and BLOOM nothing)
    """

    def __init__(self, hf: Any):
        self.hf = hf
        self._backend = hf.backend_tokenizer if hf.is_fast else None
        if self._backend is not None:
            self._backend.encode_special_tokens = True
            self._backend.no_truncation()  # either may be stored in a tokenizer.json
            self._backend.no_padding()
        self.eos_id: int = _eos_id(hf)
        self.mask_id: int | None = None if hf.mask_token is None else hf.mask_token_id
        self.vocab_size: int = max(hf.get_vocab().values()) + 1
        self.begin_ids: list[int] = _begin_ids(self._whole("a"), self.encode("a").tolist())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids [num_tokens] uint32 of each text, without any special token."""
        if self._backend is not None:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
            return [np.array(encoding.ids, np.uint32) for encoding in encodings]
        ids = [self.hf.encode(text, add_special_tokens=False, split_special_tokens=True) for text in texts]
        return [np.array(one, np.uint32) for one in ids]

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def _whole(self, text: str) -> list[int]:
        """The ids of a text, with the special tokens that the family adds."""
        if self._backend is not None:  # the tokenizer's own call would let texts hold special tokens from then on
            return self._backend.encode(text, add_special_tokens=True).ids
        return self.hf.encode(text, add_special_tokens=True, split_special_tokens=True)

    def encode_prompt(self, text: str) -> list[int]:
        """The ids with which a text to be continued begins; of an empty one the token that stands for its beginning."""
        begin = self.begin_ids or (
            [] if text else [self.eos_id if self.hf.bos_token_id is None else self.hf.bos_token_id]
        )
        return [*begin, *self.encode(text).tolist()]

    def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special_tokens: bool = False) -> str:
        ids = [int(token) for token in ids]
        return self.hf.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def save(self, folder: Path) -> None:
        """Write a Hugging Face tokenizer folder."""
        with naming(folder):
            self.hf.save_pretrained(str(folder))
            path = Path(folder) / "tokenizer_config.json"
            config = json.loads(path.read_text())
            if config["tokenizer_class"] == "TokenizersBackend":  # transformers 5's name, which 4 does not know
                config["tokenizer_class"] = "PreTrainedTokenizerFast"
                path.write_text(json.dumps(config, indent=2))

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of all that decides which ids a text gets."""
        vocab = sorted(self.hf.get_vocab().items())
        whole = self._backend.to_str() if self._backend is not None else json.dumps([type(self.hf).__name__, vocab])
        return hashlib.sha256(f"{self.eos_id} {whole}".encode()).hexdigest()


def _eos_id(hf: Any) -> int:
    vocab = hf.get_vocab()
    known = [token for token in (hf.eos_token, *_ENDS_OF_TEXT) if token in vocab]
    if not known:
        raise UserError(
            f"the tokenizer {hf.name_or_path or ''} has no end-of-text token, which separates documents; "
            f"set eos_token in its tokenizer_config.json, or add one of {', '.join(_ENDS_OF_TEXT)}"
        )
    return vocab[known[0]]


def _begin_ids(whole: list[int], own: list[int]) -> list[int]:
    """The tokens in front of a text's own, where special ones are added."""
    places = (place for place in range(len(whole)) if whole[place : place + len(own)] == own)
    return whole[: next(places, 0)]


def train_bpe(texts: Iterable[str], vocab_size: int, *, mask: bool = False) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` tokens; <|endoftext|> is id 0 and every byte has a token.

    mask  <|mask|> is id 1

    The same texts give the same tokenizer. Memory grows with the number of different words, not with the text.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    special = [END_OF_TEXT, MASK] if mask else [END_OF_TEXT]
    if vocab_size < NUM_BYTES + len(special):
        needed = f"256 bytes and {' and '.join(special)} need {NUM_BYTES + len(special)}"
        raise UserError(f"a vocabulary of {vocab_size} tokens is too small; {needed}")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _of_backend(backend)


def byte_tokenizer(*, mask: bool = False) -> Tokenizer:
    """Ids 0 … 255 are the bytes of UTF-8, 256 is <|endoftext|>. A BPE without merges, so it is saved like one.

    mask  257 is <|mask|>
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE(vocab={letter: byte for byte, letter in enumerate(_byte_letters())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = (END_OF_TEXT, MASK) if mask else (END_OF_TEXT,)
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return _of_backend(backend)


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte in GPT-2's vocabulary: itself, or one from 256 up."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    rest = [byte for byte in range(NUM_BYTES) if byte not in printable]
    return [chr(byte) if byte in printable else chr(NUM_BYTES + rest.index(byte)) for byte in range(NUM_BYTES)]


def _of_backend(backend: Any) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    named = {"eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT, "mask_token": _first_of(_MASKS, backend)}
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **named))


def _first_of(tokens: Iterable[str], backend: Any) -> str | None:
    vocab = backend.get_vocab()
    return next((token for token in tokens if token in vocab), None)


def load_tokenizer(name: str | Path, *, mask: bool = False) -> Tokenizer:
    """`byte`, a tokenizer.json, or a Hugging Face tokenizer folder. UserError where it is none of these.

    mask  `byte` has a mask token
    """
    if str(name) == "byte":
        return byte_tokenizer(mask=mask)
    path = Path(name)
    if not path.exists():
        raise UserError(f"no tokenizer at {name}; give bpe, byte, a tokenizer.json or a Hugging Face tokenizer folder")
    is_lone_file = path.is_file() and not (path.parent / "tokenizer_config.json").is_file()
    try:
        return Tokenizer(_load_file(path) if is_lone_file else _load_folder(path if path.is_dir() else path.parent))
    except UserError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} holds no tokenizer that loads ({why}); give another, or bpe to train one") from None


def _load_file(path: Path) -> Any:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    backend = Backend.from_file(str(path))
    eos, mask = _first_of(_ENDS_OF_TEXT, backend), _first_of(_MASKS, backend)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token=eos, mask_token=mask)


def _load_folder(path: Path) -> Any:
    with importing():
        from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
