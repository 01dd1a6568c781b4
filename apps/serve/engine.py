"""The engine: sequences, pages and model, a step at a time. No threads, no text but the sequences' own, and no clock
but the one that paces prompts beside those who write.

A step: schedule; give back, claim and grow pages; run the model over all new tokens; draw the next token of each
sequence whose tokens are all computed; end those that are done; report what is new.
"""

import itertools
import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass

from torch import Tensor

from apps.serve import sampler
from apps.serve.detokenize import TextStream
from apps.serve.pace import Pace
from apps.serve.pages import Match, Pages
from apps.serve.request import (
    Delta,
    Event,
    FieldError,
    FinishReason,
    PromptDone,
    Request,
    Sequence,
    State,
    Token,
    too_long,
)
from apps.serve.runner import Runner, Step
from apps.serve.scheduler import Job, Limits, schedule
from apps.serve.text import Text
from core.config import UserError


@dataclass
class Counts:
    """What has happened since the engine was made."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    page_copies: int = 0
    finished: int = 0
    aborted: int = 0


class Engine:
    """Serves one model. Not thread-safe: `apps.serve.loop` gives it a thread.

    max_length  tokens that prompt and text may have together
    pace        when prompts are computed beside those who write, and how long their chunks are; None: in each step,
                `limits.prefill_chunk`
    """

    def __init__(
        self,
        runner: Runner,
        text: Text,
        limits: Limits,
        *,
        num_pages: int,
        vocab_size: int,
        max_length: int,
        sharing: bool = True,
        pace: Pace | None = None,
    ):
        self.pace = pace
        self.runner, self.text, self.limits = runner, text, limits
        self.vocab_size = vocab_size
        self.pages = Pages(num_pages, limits.page_size, sharing)
        # One page more than a sequence needs: a page that is copied is held while its copy is made.
        self.max_length = min(max_length, (num_pages - 1) * limits.page_size)
        if self.max_length < 2:
            raise UserError(
                f"{num_pages} pages of {limits.page_size} tokens hold no sequence; give more by --engine.cache"
            )
        self.counts = Counts()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._held: dict[str, list[Sequence]] = {}
        self._numbers = itertools.count()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def check(self, request: Request) -> None:
        """Raises FieldError for what this engine can never do."""
        length = len(request.prompt)
        if length == 0:
            raise FieldError("the prompt is empty; give at least one token", "prompt")
        for field, tokens in (
            ("prompt", request.prompt),
            ("logit_bias", request.sampling.logit_bias),
            ("stop_token_ids", request.stop_ids),
        ):
            for token in (min(tokens), max(tokens)) if tokens else ():
                if not 0 <= token < self.vocab_size:
                    outside = f"token {token} is outside 0 … {self.vocab_size - 1}, which this model has"
                    raise FieldError(f"{field}: {outside}", field)
        if request.min_tokens and len(request.stop_ids) >= self.vocab_size:
            message = "every token ends the text, and min_tokens forbids that; give fewer stop_token_ids"
            raise FieldError(message, "stop_token_ids")
        if length + request.max_tokens > self.max_length:
            wanted = f"you requested {length + request.max_tokens} tokens ({length} in the prompt)"
            raise FieldError(too_long(self.max_length, wanted), "max_tokens")

    def submit(self, request: Request) -> None:
        """Take a request into the queue.  Raises FieldError for what this engine can never do."""
        self.check(request)
        sequences = [self._sequence(request, index) for index in range(request.num_sequences)]
        first, *others = sequences
        for sequence in others:
            sequence.state = State.HELD
        if others:
            self._held[request.id] = others
        self.waiting.append(first)
        self.counts.prompt_tokens += len(request.prompt)

    def abort(self, request_id: str) -> bool:
        """End all sequences of a request; their pages are free at once.  Returns whether there were any."""
        mine = [s for s in (*self.waiting, *self.running) if s.request.id == request_id]
        mine += self._held.pop(request_id, [])
        for sequence in mine:
            self._leave(sequence)
        self.counts.aborted += bool(mine)
        return bool(mine)

    def position(self, request_id: str) -> int | None:
        """How many requests are to begin before it; None when it has begun."""
        ids = list(dict.fromkeys(s.request.id for s in self.waiting if not s.prompt_reported))
        return ids.index(request_id) if request_id in ids else None

    def step(self) -> list[Event]:
        """Compute one step.  Returns what became known by it."""
        matches: dict[int, Match] = {}
        limits = self.limits
        chunk = None if self.pace is None else self.pace.chunk(limits.prefill_chunk, self._num_pending())
        scarce = self.pages.num_free < limits.most_new_pages(len(self.running))
        running = [self._running_job(sequence, scarce) for sequence in self.running]
        batch = schedule(self._waiting_jobs(matches), running, self.pages.num_free, limits, chunk)
        if not batch.parts and chunk == 0:  # those who write lack pages that a prompt before them holds
            batch = schedule(self._waiting_jobs(matches), running, self.pages.num_free, limits)
        by_number = {s.number: s for s in (*self.running, *self.waiting)}
        for number in batch.preempted:
            self._preempt(by_number[number])
        copies = self._admit([(by_number[number], matches[number]) for number in batch.admitted])
        parts = [(by_number[number], count) for number, count in batch.parts]
        if not parts:
            return []
        step, asked = self._plan(parts, copies)
        began = time.perf_counter()
        logits_RV = self.runner.run(step)
        self.counts.steps += 1
        self.counts.computed_tokens += len(step.ids)
        for sequence, count in parts:
            sequence.num_computed += count
            assert sequence.held is not None
            self.pages.commit(sequence.held, sequence.tokens, sequence.num_computed)
        events = self._read(asked, logits_RV)
        if self.pace is not None:
            self.runner.wait()  # a chunk of which nothing is read would seem to take no time, and the next step more
            writers = sum(count == 1 for _, count in parts)
            self.pace.observe(writers, len(step.ids) - writers, time.perf_counter() - began)
        return events

    # --- what the scheduler sees --------------------------------------------------------------------------------------

    def _waiting_jobs(self, matches: dict[int, Match]) -> Iterator[Job]:
        for sequence in self.waiting:
            match = Match() if sequence.wants_prompt_logprobs else self.pages.match(sequence.tokens)
            matches[sequence.number] = match
            yield Job(
                sequence.number,
                len(sequence.tokens),
                self.pages.num_tokens(match),
                len(match.path),
                claims=self.pages.num_idle(match),
            )

    def _num_pending(self) -> int:
        """Tokens of prompts that are to be computed; no more are counted than a step takes."""
        pending = 0
        for sequence in itertools.chain(self.running, self.waiting):
            remaining = len(sequence.tokens) - sequence.num_computed
            pending += remaining if remaining > 1 or sequence.held is None else 0
            if pending >= self.limits.max_batch_tokens:
                break
        return pending

    def _running_job(self, sequence: Sequence, scarce: bool) -> Job:
        """scarce: somebody may be preempted; otherwise nobody's pages are looked at one by one"""
        assert sequence.held is not None
        num_pages, returns = len(sequence.held.pages), self.pages.num_returned(sequence.held) if scarce else 0
        return Job(sequence.number, len(sequence.tokens), sequence.num_computed, num_pages, returns=returns)

    # --- pages --------------------------------------------------------------------------------------------------------

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.held is not None
        self.pages.give_back(sequence.held)
        sequence.held, sequence.num_computed = None, 0
        sequence.prompt_tokens.clear()
        sequence.move(State.WAITING)
        self.running.remove(sequence)
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda s: s.number)
        self.counts.preemptions += 1

    def _admit(self, admitted: Many[tuple[Sequence, Match]]) -> list[tuple[int, int]]:
        """Claim first what all of them share, then make copies: making room could give up what another one matched."""
        copies = []
        for sequence, match in admitted:
            sequence.held = self.pages.claim(match)
            sequence.num_computed = self.pages.num_tokens(match)
            sequence.move(State.RUNNING)
            self.waiting.remove(sequence)
            self.running.append(sequence)
            if sequence.num_cached is None:
                sequence.num_cached = sequence.num_computed
                self.counts.cached_tokens += sequence.num_computed
        for sequence, match in admitted:
            if match.source is not None:
                assert sequence.held is not None
                copies.append(self.pages.copy(sequence.held, match))
        self.counts.page_copies += len(copies)
        self.running.sort(key=lambda s: s.number)
        return copies

    def _leave(self, sequence: Sequence) -> None:
        if sequence.held is not None:
            self.pages.give_back(sequence.held)
            sequence.held = None
        sequence.move(State.FINISHED)
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)

    # --- the step -----------------------------------------------------------------------------------------------------

    def _plan(
        self, parts: Many[tuple[Sequence, int]], copies: list[tuple[int, int]]
    ) -> tuple[Step, list[tuple[Sequence, range]]]:
        """The step in numbers, and whose logits are asked for: (sequence, places in its tokens), in the rows' order."""
        step, asked, size = Step(copies=copies), [], self.limits.page_size
        for sequence, count in parts:
            held, first = sequence.held, sequence.num_computed
            assert held is not None
            self.pages.grow(held, first + count)
            places = range(first, first + count)
            begin = len(step.ids)
            step.ids.extend(sequence.tokens[first : first + count])
            step.positions.extend(places)
            step.slots.extend(held.pages[place // size] * size + place % size for place in places)
            step.tables.append(list(held.pages))
            step.lengths.append(first + count)
            step.starts.append(begin + count)
            wanted = range(places.stop - 1, places.stop) if places.stop == len(sequence.tokens) else range(0)
            if sequence.wants_prompt_logprobs:
                wanted = places
            if wanted:
                step.rows.extend(begin + place - first for place in wanted)
                asked.append((sequence, wanted))
        return step, asked

    def _read(self, asked: Many[tuple[Sequence, range]], logits_RV: Tensor) -> list[Event]:
        """Draw the tokens of those that are computed to their end, and report."""
        events: list[Event] = []
        ready, rows, row = [], [], 0
        for sequence, places in asked:
            if sequence.wants_prompt_logprobs:
                self._read_prompt(sequence, places, logits_RV[row : row + len(places)])
            row += len(places)
            if places.stop == len(sequence.tokens):
                ready.append(sequence)
                rows.append(row - 1)
        for sequence in ready:
            events += self._report_prompt(sequence)
        writing = [(s, r) for s, r in zip(ready, rows) if s.state is State.RUNNING]
        if writing:
            sequences = [s for s, _ in writing]
            ranked = [s.request.num_sequences > 1 for s in sequences]
            wanted = [r for _, r in writing]
            picked = logits_RV if wanted == list(range(len(logits_RV))) else logits_RV[wanted]  # the latter is a copy
            for sequence, sampled in zip(sequences, sampler.sample(picked, sequences, ranked)):
                events.append(self._fail(sequence) if sampled is None else self._append(sequence, sampled))
        return events

    def _read_prompt(self, sequence: Sequence, places: range, logits_RV: Tensor) -> None:
        request = sequence.request
        finite = logits_RV.max(-1).values.isfinite().tolist()
        sequence.is_broken |= not all(finite)
        for place, logits_V, sound in zip(places, logits_RV, finite):
            if place + 1 < len(request.prompt) and not sound:
                sequence.prompt_tokens.append(Token(request.prompt[place + 1], 0))
            elif place + 1 < len(request.prompt):
                found = sampler.report(logits_V, request.prompt[place + 1], request.prompt_logprobs or 0)
                sequence.prompt_tokens.append(Token(found.id, 0, found.logprob, found.top))

    def _report_prompt(self, sequence: Sequence) -> list[Event]:
        """Once, when the prompt is in the pages: say so, and let the others of the request begin."""
        if sequence.prompt_reported:
            return []
        request = sequence.request
        events: list[Event] = []
        if sequence.index == 0:
            tokens = () if request.prompt_logprobs is None else (Token(request.prompt[0], 0), *sequence.prompt_tokens)
            events.append(PromptDone(request, sequence.num_cached or 0, tokens))
        sequence.prompt_reported = True
        for other in self._held.pop(request.id, []):
            other.move(State.WAITING)
            self.waiting.append(other)
            self.waiting.sort(key=lambda s: s.number)
        if sequence.is_broken:
            events.append(self._fail(sequence))
        elif request.max_tokens == 0:
            events.append(self._delta(sequence, "", "length"))
        return events

    def _append(self, sequence: Sequence, sampled: sampler.Sampled) -> Delta:
        """The new token: into the sequence, into the text; and whether it was the last."""
        request, stream = sequence.request, sequence.stream
        sequence.tokens.append(sampled.id)
        sequence.written[sampled.id] += 1
        self.counts.written_tokens += 1
        finish: FinishReason | None = None
        if sampled.id in request.stop_ids:
            finish = "stop"
            text = stream.finish()
            sequence.pending.append(Token(sampled.id, len(stream.text), sampled.logprob, sampled.top, ends=True))
        else:
            token = Token(sampled.id, len(stream.text), sampled.logprob, sampled.top)
            sequence.pending.append(token)
            text = stream.push(sampled.id)
            if stream.stopped:
                finish = "stop"
            elif sequence.num_written >= request.max_tokens:
                finish = "length"
                text += stream.finish()
                if stream.stopped:
                    finish = "stop"
        return self._delta(sequence, text, finish)

    def _fail(self, sequence: Sequence) -> Delta:
        """No token can follow, since the model's logits are no numbers: this sequence ends, and only this one.

        What it wrote to its pages is not kept for requests that begin alike: they would read the same.
        """
        assert sequence.held is not None
        self.pages.forget(sequence.held)
        return self._delta(sequence, sequence.stream.finish(), "error")

    def _delta(self, sequence: Sequence, text: str, finish: FinishReason | None) -> Delta:
        """Tokens go with the text that they begin in; those behind the end of a stopped text are dropped."""
        stream = sequence.stream
        until = len(stream.text) if stream.stopped else float("inf") if finish else stream.released
        ready = [token for token in sequence.pending if token.offset < until]
        sequence.pending = [] if finish else [token for token in sequence.pending if token.offset >= until]
        if finish is not None:
            self._leave(sequence)
            self.counts.finished += 1
        return Delta(sequence.request, sequence.index, text, tuple(ready), sequence.num_written, finish)

    def _sequence(self, request: Request, index: int) -> Sequence:
        stream = TextStream(self.text.detokenizer(request.prompt), request.stop, request.include_stop)
        return Sequence(request, index, next(self._numbers), stream, list(request.prompt))
