"""The scheduler: which sequences compute how many tokens in the next step, as a pure function of counts.

1. Sequences that run, oldest first. One that decodes gets its one token; one whose prompt is not computed yet gets a
   chunk of it. Where pages lack, the youngest is preempted: its pages go back, and it will compute its tokens again.
2. If nobody was preempted, waiting sequences in order of arrival, each only when pages for all its tokens are free
   beyond what the running ones still need for theirs. Nobody overtakes, so nobody starves.

Prompts are cut into chunks: the decode batch waits for at most one chunk (Agrawal et al., "Sarathi-Serve", 2024).
Continuous batching: Yu et al., "Orca" (2022). Pages: Kwon et al. (2023), section 4.5, for preemption by recomputation.

The oldest sequence always advances: all pages but its own can be taken from others, and `Limits` demands that a
sequence fits the pool.

Where all layers have a window, what a sequence holds does not grow with its text (`apps.serve.pages` drops the rest):
it is admitted when there are pages for its window and a chunk, however long its prompt is.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from apps.serve.pages import Local, most_local_pages
from core.config import UserError


@dataclass(frozen=True)
class Limits:
    """The most that a step may hold.

    max_batch_tokens  tokens of all sequences in one step
    prefill_chunk     of them of prompts, while sequences decode
    max_running       sequences at once
    window            of all layers of the model, where they have one
    local_window      of the layers with one, where others see all; their pages are of their own, and never lack
    """

    page_size: int = 16
    max_batch_tokens: int = 2048
    prefill_chunk: int = 512
    max_running: int = 64
    window: int | None = None
    local_window: int | None = None

    def __post_init__(self) -> None:
        for name in ("page_size", "prefill_chunk", "max_running"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_batch_tokens <= self.max_running:
            raise UserError(
                f"max_batch_tokens is {self.max_batch_tokens} for {self.max_running} running sequences; each of them "
                f"takes a token a step and prompts need some too, so give at least {self.max_running + 1}"
            )

    def pages(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def local(self, num_pages: int) -> Local | None:
        """The pages of layers with a window, beside so many of those that see all."""
        if self.local_window is None:
            return None
        most = most_local_pages(self.local_window, self.page_size, self.max_running, self.max_batch_tokens)
        return Local(min(num_pages, most), self.local_window)  # who holds one holds one of the other kind

    @property
    def least_pages(self) -> int:
        """Pages with which anything runs: those of a prompt and a text of a token each, and one more.

        A page that is copied is held while its copy is made.
        """
        return self.pages(2) + 1

    def held_pages(self, num_tokens: int) -> int:
        """Pages that a sequence of so many tokens needs at once: all of them, or what its window and a chunk lie on."""
        if self.window is None:
            return self.pages(num_tokens)
        return min(self.pages(num_tokens), self.pages(self.window) + self.pages(self.prefill_chunk) + 1)

    def most_new_pages(self, num_running: int) -> int:
        """Pages that a step of so many sequences can take: each may begin one, and fill others."""
        return min(num_running, self.max_batch_tokens) + self.pages(self.max_batch_tokens)


@dataclass(frozen=True)
class SequenceCounts:
    """The scheduler's view of a sequence: counts of tokens and pages.

    num_tokens    known: the prompt and what was written
    num_computed  of them with keys and values in pages; for a waiting one those that it would share
    num_pages     held, those too that a window has let it drop; for a waiting one those that it would share
    claims        waiting: how many free pages its shared ones are, which admission takes out of the free ones
    returns       running: pages that are free for certain once it is preempted; not asked for where the free ones are
                  `Limits.most_new_pages`
    """

    number: int
    num_tokens: int
    num_computed: int = 0
    num_pages: int = 0
    claims: int = 0
    returns: int = 0

    @property
    def remaining(self) -> int:
        return self.num_tokens - self.num_computed


@dataclass(frozen=True)
class Batch:
    """The next step.

    parts      (number, tokens to compute) of each sequence that takes part, those just admitted too
    admitted   numbers of waiting sequences that run from now on
    preempted  numbers of running sequences that give their pages back
    """

    parts: tuple[tuple[int, int], ...]
    admitted: tuple[int, ...]
    preempted: tuple[int, ...]


def schedule(
    waiting: Iterable[SequenceCounts],
    running: Iterable[SequenceCounts],
    free_pages: int,
    limits: Limits,
    prompt_tokens: int | None = None,
) -> Batch:
    """The next step.

    waiting        in order of arrival; read only as far as sequences are admitted
    running        in order of arrival
    free_pages     that are unused, or only kept for whom they may serve later
    prompt_tokens  of prompts at most while sequences decode, none too; None: `limits.prefill_chunk`
    """
    chunk = limits.prefill_chunk if prompt_tokens is None else prompt_tokens
    step = _Step(list(running), free_pages, limits, chunk)
    step.continue_running()
    if not step.preempted:
        step.admit(waiting)
    return Batch(tuple(step.parts), tuple(step.admitted), tuple(step.preempted))


class _Step:
    """The decision in the making: what is left of pages and tokens, and who got what."""

    def __init__(self, running: list[SequenceCounts], free_pages: int, limits: Limits, chunk: int):
        self.running, self.free, self.limits = running, free_pages, limits
        self.decoding_after = sum(sequence.remaining == 1 for sequence in running)  # the one that is looked at
        self.tokens_left = limits.max_batch_tokens
        self.prompt_tokens_left = chunk if self.decoding_after else limits.max_batch_tokens
        self.parts: list[tuple[int, int]] = []
        self.admitted: list[int] = []
        self.preempted: list[int] = []
        self.promised = 0  # pages that running sequences still need for tokens they know

    def continue_running(self) -> None:
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            self.decoding_after -= sequence.remaining == 1
            wanted = self._wanted(sequence)
            while self._lacking(sequence, wanted) > 0 and len(self.running) > index + 1:
                victim = self.running.pop()
                self.decoding_after -= victim.remaining == 1
                self.preempted.append(victim.number)
                self.free += victim.returns
            room = (sequence.num_pages + self.free) * self.limits.page_size - sequence.num_computed
            self._grant(sequence, min(wanted, room))
            index += 1

    def admit(self, waiting: Iterable[SequenceCounts]) -> None:
        num_running = len(self.running)
        if num_running >= self.limits.max_running:
            return
        for sequence in waiting:
            whole = min(
                self.limits.pages(sequence.num_tokens + 1) - sequence.num_pages + sequence.claims,
                self.limits.held_pages(sequence.num_tokens + 1) + 1,  # and one that is copied
            )
            wanted = self._wanted(sequence)
            if wanted == 0 or whole > self.free - self.promised:
                return
            self.free -= sequence.claims
            self._grant(sequence, wanted)
            self.admitted.append(sequence.number)
            num_running += 1
            if num_running == self.limits.max_running:
                return

    def _wanted(self, sequence: SequenceCounts) -> int:
        if sequence.remaining == 1:
            return min(1, self.tokens_left)
        return max(0, min(sequence.remaining, self.prompt_tokens_left, self.tokens_left - self.decoding_after))

    def _lacking(self, sequence: SequenceCounts, num_tokens: int) -> int:
        return self.limits.pages(sequence.num_computed + num_tokens) - sequence.num_pages - self.free

    def _grant(self, sequence: SequenceCounts, num_tokens: int) -> None:
        new_pages = max(0, self.limits.pages(sequence.num_computed + num_tokens) - sequence.num_pages)
        later = self.limits.pages(sequence.num_tokens + 1) - sequence.num_pages - new_pages
        self.promised += max(0, min(later, self.limits.held_pages(sequence.num_tokens + 1)))
        if num_tokens <= 0:
            return
        self.free -= new_pages
        self.tokens_left -= num_tokens
        if sequence.remaining > 1:
            self.prompt_tokens_left -= num_tokens
        self.parts.append((sequence.number, num_tokens))
