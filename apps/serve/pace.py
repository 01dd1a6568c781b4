"""How many tokens of prompts go into a step beside those who write, so that the step takes at most so much longer.

A step's time is taken as linear: what the writers need, and a prompt's tokens times what one costs. Both are learned
from the steps themselves: the machine, the model and the number of writers decide, and all of them may change. On a CPU
one token of a prompt costs nearly what a writer's token does, so chunks are short; on a GPU a step of hundreds costs
hardly more than one of one.
"""

_NEW = 0.25
"""The share of the newest step in what is known."""
_AIM = 0.9
"""Of the time that a step may take: steps wander, and a prompt's later tokens cost more than those learned from."""


class Pace:
    """Learns from steps; says how long a chunk may be.

    stretch  what a step with a chunk may take, as a multiple of one without; above 1
    least    tokens of a chunk at least, so that prompts get on under any circumstances
    """

    def __init__(self, stretch: float, least: int = 4):
        self.stretch, self.least = stretch, least
        self._writer_s: float | None = None
        self._token_s: float | None = None

    def observe(self, num_writers: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step with so many sequences that wrote, and so many tokens of prompts, took so long."""
        if num_writers and not num_prompt_tokens:
            self._writer_s = _moved(self._writer_s, seconds)
        elif num_prompt_tokens:
            writers_s = (self._writer_s or 0.0) if num_writers else 0.0
            self._token_s = _moved(self._token_s, max(seconds - writers_s, 0.05 * seconds) / num_prompt_tokens)

    def chunk(self, most: int) -> int:
        """Tokens of prompts in the next step, if somebody writes: at most `most`, which it is until steps are known."""
        if self._writer_s is None or not self._token_s:
            return most
        allowed = int((_AIM * self.stretch - 1) * self._writer_s / self._token_s)
        return min(most, max(allowed, self.least))


def _moved(known: float | None, new: float) -> float:
    return new if known is None else known + _NEW * (new - known)
