"""Text out of tokens as they come: never half a character, never the beginning of a stop string.

A character's bytes may come in several tokens, and until they are complete a decoder shows U+FFFD. So what ends in it
waits. Decoders may also treat the first token differently (dropping its space), so tokens are decoded behind a few that
came before them, and what those give by themselves is cut off. If the prompt ends inside a character, it is not shown
to the decoder: what completes that character cannot be shown without the half that the client has.

The text of a sequence is what its deltas add up to, by construction.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

_INCOMPLETE = "\ufffd"
_CONTEXT_TOKENS = 4
# Tokens after which a text that still ends in U+FFFD is taken for bytes that are no UTF-8.
_MOST_WAITING = 8


class Detokenizer:
    """`decode` is a tokenizer's: ids -> text.

    offsets  of the tokens pushed last, whose text was not known before the last of them: characters of the text before
             each. Where a token goes on with a character it is the character's.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()):
        self._decode = decode
        self._ids = list(prompt[-_CONTEXT_TOKENS:])
        if decode(self._ids).endswith(_INCOMPLETE):
            self._ids = []
        self._context = len(self._ids)  # the first ids, whose text is known
        self._shown = 0  # characters shown beyond the context's
        self._num_before = 0  # characters of the text up to there
        self._prefixes = [""]  # the new text before each token, and behind the last
        self.offsets: list[int] = []

    def push(self, token: int) -> str:
        """The characters that this token completes."""
        self._ids.append(token)
        text = self._new_text()
        self._prefixes = [*self._prefixes[-_MOST_WAITING - 1 :], text]
        places = (_begin(before, after, text) for before, after in pairwise(self._prefixes))
        self.offsets = [self._num_before + place for place in places]
        if not text.endswith(_INCOMPLETE):
            new = text[self._shown :]
            if text:  # what was just shown is context for what comes
                self._ids, self._context, self._shown = self._ids[self._context :], len(self._ids) - self._context, 0
                self._num_before += len(text)
                self._prefixes = [""]
            return new
        if len(self._ids) - self._context <= _MOST_WAITING:
            return ""
        new = text[self._shown : -1]
        self._shown = max(self._shown, len(text) - 1)
        return new

    def flush(self) -> str:
        """Return the text that still waits, at the end."""
        new = self._new_text()[self._shown :]
        self._shown += len(new)
        return new

    def _new_text(self) -> str:
        known = self._decode(self._ids[: self._context]) if self._context else ""
        whole = self._decode(self._ids)
        if whole.startswith(known):
            return whole[len(known) :]
        # Decoders with a token for each byte (Llama's) show bytes that lie side by side all as broken, where some are.
        return self._decode(self._ids[self._context :])


def _begin(before: str, after: str, text: str) -> int:
    """Where in a text a token begins, which made `after` of `before`, the text's beginning as it looked then."""
    differs = (k for k, (one, other) in enumerate(zip(before, text)) if one != other)
    common = len(before) if text.startswith(before) else next(differs, len(text))
    goes_on = before == after and before.endswith(_INCOMPLETE) and common == len(before)
    return common - 1 if goes_on else common


class TextStream:
    """The text of one sequence, released as far as no stop string can begin in what is released."""

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = (), include_stop: bool = False):
        self._detokenizer, self._stop, self._include_stop = detokenizer, tuple(stop), include_stop
        self._longest = max(map(len, stop), default=0)
        self.text = ""
        self.released = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """Take a token; return what may be shown now. `stopped`: a stop string is complete, and the text ends there."""
        return self._grow(self._detokenizer.push(token))

    @property
    def offsets(self) -> list[int]:
        """See `Detokenizer`."""
        return self._detokenizer.offsets

    def finish(self) -> str:
        """Return the text that is left; a stop string may be complete only now."""
        if self.stopped:
            return ""
        return self._grow(self._detokenizer.flush(), last=True)

    def _grow(self, new: str, last: bool = False) -> str:
        before = len(self.text)
        self.text += new
        if new and (end := self._end_of_text(before)) is not None:
            self.stopped = True
            self.text = self.text[:end]
        until = len(self.text) if last or self.stopped else len(self.text) - self._begun()
        released = self.text[self.released : until]
        self.released = max(self.released, until)
        return released

    def _end_of_text(self, before: int) -> int | None:
        """Where the text ends, if a stop string is complete since it was `before` characters long: at the first one."""
        first = max(0, before - self._longest + 1)
        found = [(self.text.find(stop, first), stop) for stop in self._stop]
        found = [(at, stop) for at, stop in found if at >= 0]
        if not found:
            return None
        at, stop = min(found, key=lambda pair: (pair[0], len(pair[1])))
        return at + len(stop) if self._include_stop else at

    def _begun(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            tail = self.text[-length:]
            if any(stop.startswith(tail) and len(stop) > length for stop in self._stop):
                return length
        return 0
