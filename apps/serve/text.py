"""Text and tokens: the tokenizer of a served folder, its chat template, and what ends a text.

Prompts are tokenized as `transformers` does, special tokens and all. Nothing is fetched from a network; no code of the
folder is run (chat templates are Jinja in a sandbox, in a process with limits: `apps.serve.template`).
"""

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from apps.serve.detokenize import Detokenizer
from apps.serve.template import ChatTemplate, Message
from core.config import UserError, importing
from core.weights import read_json

# For models that bring no template: what few-shot dialogues of base models look like.
_ROLES = {"system": "", "developer": "", "user": "User: ", "assistant": "Assistant: "}
PLAIN_STOP = ("\nUser:", "\nAssistant:")


class Text:
    """A tokenizer.

    vocab_size     one more than the largest id
    longest_token  characters of the longest one: no text has fewer tokens than its length divided by it
    end_ids        tokens that end a text
    begin_id       what stands for an empty prompt
    """

    def __init__(self, hf: Any, end_ids: Iterable[int] = ()):
        self.hf = hf
        self.end_ids = frozenset(end_ids) | ({hf.eos_token_id} if hf.eos_token_id is not None else set())
        vocab = hf.get_vocab()
        self.vocab_size = max(vocab.values()) + 1
        self.longest_token = max(map(len, vocab))
        begin = hf.bos_token_id if hf.bos_token_id is not None else hf.eos_token_id
        self.begin_id: int | None = begin
        backend = getattr(hf, "backend_tokenizer", None)
        if backend is not None:
            backend.no_truncation()  # either may be stored in a tokenizer.json
            backend.no_padding()
        self._byte_level = backend is not None and "ByteLevel" in str(backend.decoder)
        self.token_bytes = lru_cache(1 << 16)(self._token_bytes)

    def encode(self, text: str) -> list[int]:
        ids = self.hf(text, add_special_tokens=True)["input_ids"]
        if ids:
            return ids
        if self.begin_id is None:
            raise UserError("the prompt is empty, and this model has no token to begin a text with; give some text")
        return [self.begin_id]

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template; None where the model brings none."""
        if self.hf.chat_template is None:
            return None
        return ChatTemplate(self.hf.get_chat_template(), self.hf.special_tokens_map)

    def start(self) -> None:
        """Start what the first dialogue would have to wait for."""
        if self.template is not None:
            self.template.start()

    def encode_chat(
        self, messages: Sequence[Message], max_characters: int, timeout_s: float
    ) -> tuple[list[int], tuple[str, ...]]:
        """The tokens of a dialogue up to where the assistant speaks, and the strings that end its turn.

        Raises as `ChatTemplate.render` does.
        """
        if self.template is None:
            return self.encode(plain_chat(messages)), PLAIN_STOP
        text = self.template.render(messages, max_characters, timeout_s)
        ids = self.hf(text, add_special_tokens=False)["input_ids"]
        return (ids or self.encode("")), ()

    def decode(self, ids: Sequence[int]) -> str:
        return self.hf.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        return Detokenizer(self.decode, prompt)

    def token_text(self, token: int) -> str:
        """A token by itself; one that is no whole character as bytes:\\x…, as OpenAI's API writes it."""
        raw = self.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for."""
        piece = self.hf.convert_ids_to_tokens(token)
        if piece is None:  # a row of the model's vocabulary that the tokenizer does not use
            return b""
        if token in self.hf.all_special_ids:
            return piece.encode()
        if self._byte_level and all(letter in _BYTE_OF_LETTER for letter in piece):
            return bytes(_BYTE_OF_LETTER[letter] for letter in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()


def plain_chat(messages: Sequence[Message]) -> str:
    """A dialogue as plain text: instructions first, then `User: …` and `Assistant: …`, a line each."""
    lines = [_ROLES.get(message["role"], "User: ") + message["content"].strip() for message in messages]
    return "\n".join([*lines, "Assistant:"])


def _byte_letters() -> dict[str, int]:
    """GPT-2's printable letter of each byte: itself, or one from 256 up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


_BYTE_OF_LETTER = _byte_letters()


def load_text(folder: Path) -> Text:
    """The tokenizer of a Hugging Face folder.

    Raises UserError where there is none that loads, and where it brings several chat templates and none is the default.
    """
    with importing():
        from transformers import AutoTokenizer

    known = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model", "spiece.model")
    if not any((folder / name).is_file() for name in known):
        raise UserError(f"{folder} holds no tokenizer (tokenizer.json …); copy it there from where the model came")
    try:
        hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{folder} holds no tokenizer that loads ({why})") from None
    if isinstance(hf.chat_template, dict) and "default" not in hf.chat_template:
        raise UserError(
            f"{folder}: the tokenizer's chat templates are {', '.join(hf.chat_template)}, and none is called default; "
            "rename one to default in tokenizer_config.json"
        )
    return Text(hf, _end_ids(folder))


def _end_ids(folder: Path) -> set[int]:
    """eos_token_id of generation_config.json, else of config.json.  Raises UserError for what is no such file."""
    for path in (folder / "generation_config.json", folder / "config.json"):
        if not path.is_file():
            continue
        found = read_json(path).get("eos_token_id")
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
                raise UserError(f"{path}: eos_token_id is {found!r}; give a token's number, or a list of some")
            return set(ids)
    return set()
