"""Requests to the engine, the sequences that answer them, and the events that come back.

A request has `num_sequences` sequences: n, or best_of where more are written than returned. The first one computes the
prompt; the others are held back until it is in the pages, and find it there.
"""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Literal

from apps.serve.detokenize import TextStream
from apps.serve.pages import Held
from core.config import UserError

FinishReason = Literal["stop", "length", "abort", "error"]
"""error: the model's logits were no numbers, so no token could follow."""
MAX_LOGPROBS = 20
"""Alternatives that a request may have reported beside each token."""


@dataclass(frozen=True)
class Sampling:
    """The settings that draw the next token; see `apps.serve.sampler`.

    temperature         0 takes the likeliest
    top_k, top_p, min_p keep the k likeliest; those that together reach p; those within a factor of the likeliest
    repetition_penalty  divides positive logits (multiplies negative ones) of tokens in prompt and text
    presence_penalty, frequency_penalty  subtracted once, and per occurrence, from tokens already written
    logit_bias          token -> what is added to its logit
    seed                of the draws: the same seed and prompt give the same tokens, whatever else is being served
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0, 100),
            ("top_p", 0, 1),
            ("min_p", 0, 1),
            ("repetition_penalty", 0.01, 100),
            ("presence_penalty", -100, 100),
            ("frequency_penalty", -100, 100),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise UserError(f"{name} is {value}; it lies between {low} and {high}")
        if self.top_p == 0:
            raise UserError("top_p is 0, which leaves no token; use temperature 0 for the likeliest")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}; it is at least 1, or left out")


@dataclass(frozen=True)
class Request:
    """A request, in tokens.

    max_tokens       most tokens of each sequence; 0 only looks at the prompt
    stop, stop_ids   strings and tokens that end the text; include_stop keeps the string
    min_tokens       none of stop_ids before so many
    logprobs         alternatives that are reported beside each token; None: nothing is
    prompt_logprobs  the same for the prompt's tokens
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    min_tokens: int = 0
    num_sequences: int = 1
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True)
class Token:
    """A token with what the model thought of it: natural logarithms, before temperature and penalties.

    offset   characters of the text before it
    logprob  None where it was not asked for, and for the first token of all
    top      the likeliest tokens at its place
    ends     whether it is the token that ended the text, of which it is no part
    """

    id: int
    offset: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    ends: bool = False


def placed(tokens: Ordered[Token], offsets: Ordered[int]) -> list[Token]:
    """The tokens, the last of them with these offsets; of more offsets than tokens the last ones count."""
    count = min(len(tokens), len(offsets))
    first = len(tokens) - count
    last = (replace(token, offset=offset) for token, offset in zip(tokens[first:], offsets[len(offsets) - count :]))
    return [*tokens[:first], *last]


@dataclass(frozen=True)
class PromptDone:
    """The prompt is in the pages.

    cached_tokens  of it were there already
    tokens         with logprobs, where they were asked for; the first has none
    """

    request: Request
    cached_tokens: int
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True)
class Delta:
    """A sequence's new tokens and text since its last delta; the texts of all deltas add up to its text."""

    request: Request
    index: int
    text: str
    tokens: tuple[Token, ...]
    num_tokens: int
    finish: FinishReason | None = None


Event = PromptDone | Delta


class FieldError(UserError):
    """A refusal of what the engine can never do, with the field that asks for it, as clients call it."""

    def __init__(self, message: str, field: str):
        super().__init__(message)
        self.field = field


def too_long(max_length: int, what: str) -> str:
    """The message to a request that the model cannot hold, in the words that clients look for."""
    return (
        f"This model's maximum context length is {max_length} tokens. However, {what}. "
        "Please shorten the prompt, or ask for fewer tokens."
    )


class State(Enum):
    HELD = auto()  # until the first sequence of the request has computed the prompt
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


MOVES = {
    (State.HELD, State.WAITING),
    (State.WAITING, State.RUNNING),
    (State.RUNNING, State.WAITING),  # preempted
    (State.RUNNING, State.FINISHED),
    (State.WAITING, State.FINISHED),  # aborted
    (State.HELD, State.FINISHED),
}


@dataclass(eq=False)
class Sequence:
    """One text in the making.

    number      order of arrival, and its name for the scheduler
    tokens      the prompt and what was written
    written     how often each token was written
    held        its pages while it runs; `num_computed` of its tokens have their keys and values there
    pending     tokens whose text is not released yet
    num_cached  tokens of the prompt that were in the pages when it first ran
    is_broken   whether logits of its prompt were no numbers
    unread      the row of the last step that drew its next token, which is not read yet; None: all are in `tokens`
    """

    request: Request
    index: int
    number: int
    stream: TextStream
    tokens: list[int] = field(default_factory=list)
    state: State = State.WAITING
    held: Held | None = None
    num_computed: int = 0
    written: Counter[int] = field(default_factory=Counter)
    prompt_tokens: list[Token] = field(default_factory=list)
    pending: list[Token] = field(default_factory=list)
    prompt_reported: bool = False
    num_cached: int | None = None
    is_broken: bool = False
    unread: int | None = None

    def move(self, to: State) -> None:
        assert (self.state, to) in MOVES, f"a sequence does not go from {self.state} to {to}"
        self.state = to

    @property
    def num_written(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def num_tokens(self) -> int:
        """The number of `tokens`, and the one that is drawn and not read yet."""
        return len(self.tokens) + (self.unread is not None)

    @property
    def is_last(self) -> bool:
        """True where nothing can follow the tokens that are drawn already."""
        return self.num_tokens - len(self.request.prompt) >= self.request.max_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.index == 0 and self.request.prompt_logprobs is not None and not self.prompt_reported
