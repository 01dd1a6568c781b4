"""Texts that come token by token: whole characters, exact sums, stop strings wherever they fall."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.llm.tokenizer import byte_tokenizer, train_bpe
from apps.serve.detokenize import Detokenizer, TextStream
from apps.serve.text import Text, plain_chat

many = settings(max_examples=100, deadline=None, derandomize=True, database=None)
BYTES = Text(byte_tokenizer().hf)
BPE = Text(train_bpe(["naïve café, 日本語 and 🙂🙃 for everyone " * 3], 290).hf)


def pieces(text, prompt, ids):
    detokenizer = text.detokenizer(prompt)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@many
@given(st.lists(st.integers(0, 256), max_size=40), st.lists(st.integers(0, 256), max_size=6))
def test_any_bytes_add_up(ids, prompt):
    """Whatever a model writes, after whatever prompt, one that ends inside a character too."""
    assert "".join(pieces(BYTES, prompt, ids)) == BYTES.decode(ids)


@many
@given(st.lists(st.integers(0, 288), max_size=40), st.lists(st.integers(0, 288), max_size=6))
def test_any_bpe_tokens_add_up(ids, prompt):
    assert "".join(pieces(BPE, prompt, ids)) == BPE.decode(ids)


@many
# One of each length in UTF-8, joined ones, and the one that stands for what is no character.
@given(st.text(st.sampled_from("aZ \n\x7fé߿ࠀ日￼\ufffd🙂\u200d🏽\U0010ffff"), max_size=20))
def test_characters_come_whole(written):
    ids = list(written.encode(errors="ignore"))
    shown = pieces(BYTES, [], ids)
    assert "".join(shown) == BYTES.decode(ids)
    assert "\ufffd" in written or not any("\ufffd" in piece for piece in shown)


def placed(text, ids):
    """Offsets of tokens that come one by one, each as soon as its text is shown; then they do not change any more."""
    detokenizer, offsets, shown = text.detokenizer(()), [], 0
    for token in ids:
        shown_offsets = [offset for offset in offsets if offset < shown]
        shown += len(detokenizer.push(token))
        offsets.append(0)
        offsets[-len(detokenizer.offsets) :] = detokenizer.offsets
        assert offsets[: len(shown_offsets)] == shown_offsets
    return offsets


class Fallback:
    """A decoder that shows each byte of half a character, as sentencepiece's do."""

    def decode(self, ids):
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return "".join(chr(i) if i < 128 else "\ufffd" for i in ids)

    def detokenizer(self, prompt):
        return Detokenizer(self.decode, prompt)


@pytest.mark.parametrize("text", [BYTES, Fallback()], ids=["bytes", "fallback"])
@pytest.mark.parametrize(
    ("ids", "offsets"),
    [
        ([240, 42, 43], [0, 1, 2]),
        ([240, 240, 42], [0, 1, 2]),
        ([42, 240, 42], [0, 1, 2]),
        ([*"é1日🙂x".encode()], [0, 0, 1, 2, 2, 2, 3, 3, 3, 3, 4]),
        ([0x80] * 30 + [42], list(range(31))),
    ],
)
def test_a_token_stands_where_its_text_begins(text, ids, offsets):
    assert placed(text, ids) == offsets


def test_tokens_of_one_broken_character_stand_together():
    assert placed(BYTES, [240, 159, 42]) == [0, 0, 1]


@many
@given(st.lists(st.integers(0, 288), max_size=40))
def test_offsets_are_those_of_the_whole_text(ids):
    """They never fall, and behind a token that ends a character stands the next one."""
    offsets = placed(BPE, ids)
    assert offsets == sorted(offsets)
    for k in range(1, len(ids)):
        if not BPE.decode(ids[:k]).endswith("\ufffd"):
            assert offsets[k] == len(BPE.decode(ids[:k]))


def test_a_prompt_that_ends_inside_a_character_does_not_come_back():
    prompt = [*b"The price is 5 ", 0xE2, 0x82]
    shown = pieces(BYTES, prompt, [0xAC, *b" only"])
    assert "".join(shown) == "\ufffd only"


def test_what_is_no_text_does_not_wait_forever():
    detokenizer = BYTES.detokenizer([])
    shown = "".join(detokenizer.push(0x80) for _ in range(100))
    assert len(shown) > 80


def test_bytes_of_no_character_break_none_before_them():
    """Of tokenizers that have a token for each byte beside others, such as Llama's."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"b": 256}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    made.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    smile, euro = [*"🙂".encode()], [*"€".encode()]
    for ids, written in (
        ([*smile, 0xC4], "🙂\ufffd"),
        ([*smile, 0xC4, 256], "🙂\ufffdb"),
        ([*smile, *euro[:2], 256, *euro], "🙂\ufffd\ufffdb€"),
        ([*smile, *euro], "🙂€"),
    ):
        detokenizer = Detokenizer(made.decode)
        assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == written


class Spaced:
    """A decoder that drops the space of the first token, as sentencepiece's do."""

    def decode(self, ids):
        return "".join(" " + "abcdefghij"[i] for i in ids)[1:]


def test_the_space_of_the_first_token_is_kept():
    detokenizer = Detokenizer(Spaced().decode, [1, 2])
    assert [detokenizer.push(i) for i in (3, 4)] == [" d", " e"]
    assert Detokenizer(Spaced().decode).push(3) == "d"


@pytest.mark.parametrize("include", [False, True])
@many
@given(data=st.data())
def test_stop_strings(include, data):
    """At every cut into pieces: the text up to the first stop string, and never anything that is taken back."""
    letters = st.text("ab.", max_size=14)
    written, stops = data.draw(letters), data.draw(st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3))
    stream, shown = TextStream(Detokenizer(lambda ids: "".join(map(chr, ids))), stops, include), ""
    for letter in written:
        shown += stream.push(ord(letter))
        assert written.startswith(shown)
        if stream.stopped:
            break
    shown += stream.finish()
    ends = [(written.find(s) + len(s), written.find(s)) for s in stops if s in written]
    if not ends:
        assert shown == written
        assert not stream.stopped
        return
    end, begin = min(ends)  # letters come one by one, so the one that is complete first ends it
    assert stream.stopped
    assert shown == written[: end if include else begin]


def test_a_stop_string_across_tokens_is_held_back():
    stream = TextStream(
        Detokenizer(lambda ids: "".join(["one ", "two ", "STO", "P th", "ree"][i] for i in ids)), ["STOP"]
    )
    assert [stream.push(i) for i in range(4)] == ["one ", "two ", "", ""]
    assert stream.stopped
    assert stream.finish() == ""
    assert stream.text == "one two "


def test_tokens_by_themselves():
    assert BYTES.token_text(ord("a")) == "a"
    assert BYTES.token_text(0xE2) == "bytes:\\xe2"
    assert BYTES.token_bytes(0xE2) == b"\xe2"
    assert BYTES.encode("") == [256]
    assert BPE.decode(BPE.encode("café")) == "café"


def test_plain_chat():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi "}]
    assert plain_chat(messages) == "Be brief.\nUser: Hi\nAssistant:"
    ids, stop = BYTES.encode_chat(messages, 1000, 60.0)
    assert BYTES.decode(ids).endswith("Assistant:")
    assert "\nUser:" in stop
