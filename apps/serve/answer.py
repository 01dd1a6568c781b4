"""The answer to a client: the engine's events as OpenAI's completion and chat completion objects, whole or in pieces.

Both forms are made of the same pieces by the same functions, so what a stream adds up to is what the whole answer is,
logprobs and all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from apps.serve.api import Call
from apps.serve.request import Delta, Event, PromptDone, Token
from apps.serve.text import Text


@dataclass
class Choice:
    """A text as far as it is known. `offset`: characters of an echoed prompt in front of it."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None
    num_tokens: int = 0
    offset: int = 0
    begun: bool = False

    @property
    def mean_logprob(self) -> float:
        return sum(token.logprob or 0.0 for token in self.tokens) / max(1, len(self.tokens))


class Answer:
    """All choices of a call: those of the first prompt, then those of the second, …"""

    def __init__(self, call: Call):
        self.call = call
        self.choices = [[Choice() for _ in range(r.num_sequences)] for r in call.requests]
        self.cached_tokens = 0
        self._place = {request.id: place for place, request in enumerate(call.requests)}
        self._echoed: dict[int, list[Token]] = {}

    @property
    def complete(self) -> bool:
        return all(choice.finish for choices in self.choices for choice in choices)

    def take(self, event: Event) -> list[dict[str, Any]]:
        """Note what happened.  Returns the pieces of a stream that it makes."""
        place = self._place[event.request.id]
        if isinstance(event, PromptDone):
            self.cached_tokens += event.cached_tokens
            if self.call.echoes is not None and self.call.logprobs is not None:
                self._echoed[place] = _with_offsets(self.call.text, event.tokens)
            return []
        choice = self.choices[place][event.index]
        choice.text += event.text
        choice.tokens += event.tokens
        choice.num_tokens = event.num_tokens
        choice.finish = event.finish
        return self._pieces(place, choice, event)

    def _pieces(self, place: int, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        index = place * self.call.num_choices + delta.index
        pieces = []
        if not choice.begun:
            choice.begun = True
            pieces += self._beginning(place, index, choice)
        if delta.text or delta.tokens or delta.finish:
            logprobs = self._logprobs(delta.tokens, choice.offset)
            pieces.append(self._piece(index, delta.text, logprobs, delta.finish))
        return pieces

    def _beginning(self, place: int, index: int, choice: Choice) -> list[dict[str, Any]]:
        """The beginning of a text: the role in a chat, the prompt where it is echoed."""
        if self.call.is_chat:
            return [self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})]
        if self.call.echoes is None:
            return []
        choice.offset = len(self.call.echoes[place])
        echoed = self._logprobs(self._echoed.get(place, ()), 0)
        return [self._piece(index, self.call.echoes[place], echoed, None)]

    def _piece(self, index: int, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
        if self.call.is_chat:
            delta = {"content": text} if text else {}
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        else:
            choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return self._chunk(choice)

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.call.is_chat else "text_completion"
        usage = {"usage": self.usage() if self.call.tells_usage else None} if self.call.include_usage else {}
        return self._head(kind) | {"choices": [choice]} | usage

    def usage_chunk(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.call.is_chat else "text_completion"
        return self._head(kind) | {"choices": [], "usage": self.usage()}

    def whole(self) -> dict[str, Any]:
        """The answer in one piece; of more texts than are asked for the likeliest per token."""
        n, choices = self.call.num_choices, []
        for place, written in enumerate(self.choices):
            best = written if len(written) == n else sorted(written, key=lambda c: -c.mean_logprob)[:n]
            choices += [self._whole(place, place * n + i, choice) for i, choice in enumerate(best)]
        kind = "chat.completion" if self.call.is_chat else "text_completion"
        return self._head(kind) | {"choices": choices, "usage": self.usage()}

    def _whole(self, place: int, index: int, choice: Choice) -> dict[str, Any]:
        text, tokens = choice.text, choice.tokens
        if self.call.is_chat:
            message = {"role": "assistant", "content": text, "refusal": None}
            logprobs = self._logprobs(tokens, 0)
            return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}
        logprobs = self._logprobs(tokens, choice.offset)
        if self.call.echoes is not None:
            text = self.call.echoes[place] + text
            logprobs = _joined(self._logprobs(self._echoed.get(place, ()), 0), logprobs)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish}

    def usage(self) -> dict[str, Any]:
        prompt = sum(len(request.prompt) for request in self.call.requests)
        written = sum(choice.num_tokens for choices in self.choices for choice in choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.call.id, "object": kind, "created": self.call.created, "model": self.call.model}

    def _logprobs(self, tokens: Sequence[Token], offset: int) -> dict[str, Any] | None:
        if self.call.logprobs is None:
            return None
        text = self.call.text
        if self.call.is_chat:  # whose logprobs are those of the message's content
            return {"content": [_chat_logprob(text, token) for token in tokens if not token.ends], "refusal": None}
        return {
            "tokens": [text.token_text(token.id) for token in tokens],
            "token_logprobs": [_known(token, token.logprob) for token in tokens],
            "top_logprobs": [_known(token, _alternatives(text, token)) for token in tokens],
            "text_offset": [offset + token.offset for token in tokens],
        }


def _known(token: Token, value: Any) -> Any:
    """The first token of a prompt has no logprob: nothing stands before it."""
    return None if token.logprob is None else value


def _alternatives(text: Text, token: Token) -> dict[str, float | None]:
    """By text; of tokens that read alike the likeliest is told."""
    top: dict[str, float | None] = {}
    for other, logprob in sorted((*token.top, (token.id, token.logprob or 0.0)), key=lambda pair: -pair[1]):
        top.setdefault(text.token_text(other), logprob)
    return top


def _chat_logprob(text: Text, token: Token) -> dict[str, Any]:
    top = [_named_logprob(text, other, logprob) for other, logprob in token.top]
    return _named_logprob(text, token.id, token.logprob) | {"top_logprobs": top}


def _named_logprob(text: Text, token: int, logprob: float | None) -> dict[str, Any]:
    return {"token": text.token_text(token), "logprob": logprob, "bytes": list(text.token_bytes(token))}


def _joined(a: dict[str, Any] | None, b: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if a is None or b is None else {key: a[key] + b[key] for key in a}


def _with_offsets(text: Text, tokens: Sequence[Token]) -> list[Token]:
    """A prompt's tokens with the place of each in its text."""
    detokenizer, offsets = text.detokenizer(()), []
    for token in tokens:
        detokenizer.push(token.id)
        offsets.append(0)
        offsets[-len(detokenizer.offsets) :] = detokenizer.offsets
    return [replace(token, offset=offset) for token, offset in zip(tokens, offsets, strict=True)]
