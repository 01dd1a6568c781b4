"""The engine: sequences, pages and model, a step at a time. No threads, no text but the sequences' own, and no clock
but the one that paces prompts beside the decode batch.

A step: schedule; give back, claim and grow pages; run the model over all new tokens; draw the next token of each
sequence whose tokens are all computed; end those that are done; report what is new.

Where the device computes beside the host the engine is a step ahead: the next step is planned and launched before the
last one's tokens are read, which it takes from where they were drawn. What ends meanwhile has computed a token too
many, and nobody hears of it. Where the last step's tokens decide what comes next (pages run out, or a prompt is
scored), they are read first.
"""

import itertools
import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from torch import Tensor

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
    placed,
    too_long,
)
from apps.serve.runner import Runner, Step
from apps.serve.sampler import Ask, Reading, Sampled, Sampler
from apps.serve.scheduler import Batch, Limits, SequenceCounts, schedule
from apps.serve.text import Text
from core.config import UserError


@dataclass
class Counts:
    """Counts of events since the engine was made."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    page_copies: int = 0
    finished: int = 0
    aborted: int = 0


def length_within(max_length: int, num_pages: int, limits: Limits) -> int:
    """Tokens that a sequence may have: in all pages but one, for a page is held while its copy is made."""
    if limits.held_pages(max_length) < num_pages:
        return max_length
    return min(max_length, (num_pages - 1) * limits.page_size)


@dataclass
class Flight:
    """A step that is launched and not read.

    parts    its sequences, and how many tokens of each it computes
    until    of each, how many are computed then
    asked    whose logits it has: (sequence, places in its tokens), in the rows' order
    drawn    those whose next token it draws
    began    seconds on the clock
    reading  what waits for the tokens, or where none is drawn for the step's end
    prompts  what waits for the logprobs of prompts, by the number of the sequence
    """

    parts: list[tuple[Sequence, int]]
    until: list[int]
    asked: list[tuple[Sequence, range]]
    drawn: list[Sequence]
    began: float
    num_tokens: int
    reading: Reading = list
    prompts: dict[int, Reading] = field(default_factory=dict)


class Engine:
    """Serves one model. Not thread-safe: `apps.serve.loop` gives it a thread.

    max_length  tokens that prompt and text may have together
    pace        when prompts are computed beside the decode batch, and how long their chunks are; None: in each step,
                `limits.prefill_chunk`
    sampler     that of the runner's `decode`, where it has one
    ahead       whether the next step is launched before the last one is read
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
        sampler: Sampler | None = None,
        ahead: bool = False,
    ):
        self.pace, self.ahead = pace, ahead
        self.sampler = sampler or Sampler(vocab_size, runner.machine, limits.max_running if ahead else 0)
        if ahead and runner.tokens is None:
            runner.tokens = self.sampler.tokens
        self._flight: Flight | None = None
        self._settled_at = 0.0
        self.runner, self.text, self.limits = runner, text, limits
        self.vocab_size = vocab_size
        self.pages = Pages(num_pages, limits.page_size, sharing, limits.window, limits.local(num_pages))
        self.max_length = length_within(max_length, num_pages, limits)
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
        return bool(self.waiting or self.running or self._flight)

    def check(self, request: Request) -> None:
        """Raises FieldError for what this engine can never do."""
        length = len(request.prompt)
        if length == 0:
            raise FieldError("the prompt is empty; give at least one token", "prompt")
        for name, tokens in (
            ("prompt", request.prompt),
            ("logit_bias", request.sampling.logit_bias),
            ("stop_token_ids", request.stop_ids),
        ):
            for token in (min(tokens), max(tokens)) if tokens else ():
                if not 0 <= token < self.vocab_size:
                    outside = f"token {token} is outside 0 … {self.vocab_size - 1}, which this model has"
                    raise FieldError(f"{name}: {outside}", name)
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
        """The number of requests that begin before it; None when it has begun."""
        ids = list(dict.fromkeys(s.request.id for s in self.waiting if not s.prompt_reported))
        return ids.index(request_id) if request_id in ids else None

    def step(self) -> list[Event]:
        """Compute one step.  Returns what became known by it; where the engine is ahead, by the one before."""
        last, self._flight = self._flight, None
        if last is None:
            self._flight = self._launch()
            return [] if self.ahead else self._settled()
        self._flight = self._launch_ahead(last)
        events = self._settle(last)
        if self._flight is None:
            self._flight = self._launch()
        return events

    def _settled(self) -> list[Event]:
        flight, self._flight = self._flight, None
        return [] if flight is None else self._settle(flight)

    def _launch_ahead(self, last: Flight) -> Flight | None:
        """The step after one that is not read; None where what that says decides on it."""
        if any(sequence.wants_prompt_logprobs for sequence, _ in last.asked):
            return None
        return self._launch(may_preempt=False)

    def _launch(self, may_preempt: bool = True) -> Flight | None:
        """Begin a step; None where there is nothing to compute, or somebody would have to be preempted for it."""
        matches: dict[int, Match] = {}
        batch = self._decided(matches)
        if batch.preempted and not may_preempt:
            return None
        by_number = {s.number: s for s in (*self.running, *self.waiting)}
        for number in batch.preempted:
            self._preempt(by_number[number])
        copies = self._admit([(by_number[number], matches[number]) for number in batch.admitted])
        parts = [(by_number[number], count) for number, count in batch.parts]
        if not parts:
            return None
        step, asked, drawn = self._plan(parts, copies)
        flight = Flight(parts, [], asked, drawn, time.perf_counter(), len(step.ids))
        self._begin(flight, step)
        self.counts.steps += 1
        self.counts.computed_tokens += len(step.ids)
        for sequence, count in parts:
            sequence.num_computed += count
            flight.until.append(sequence.num_computed)
        return flight

    def _decided(self, matches: dict[int, Match]) -> Batch:
        limits = self.limits
        chunk = None if self.pace is None else self.pace.chunk(limits.prefill_chunk, self._num_pending())
        scarce = self.pages.num_free < limits.most_new_pages(len(self.running))
        running = [self._running_counts(sequence, scarce) for sequence in self.running]
        batch = schedule(self._waiting_counts(matches), running, self.pages.num_free, limits, chunk)
        if not batch.parts and chunk == 0:  # decoding sequences lack pages that a prompt before them holds
            batch = schedule(self._waiting_counts(matches), running, self.pages.num_free, limits)
        return batch

    def _begin(self, flight: Flight, step: Step) -> None:
        """Let the device compute the step, and draw from it."""
        decode, scores = self.runner.decode, any(sequence.wants_prompt_logprobs for sequence, _ in flight.asked)
        way = None if decode is None or scores else decode.way(step)
        if decode is not None and way is not None:
            flight.reading = decode.launch(step, way)
        else:
            self._compute(flight, step)
        if self.ahead:
            for row, sequence in enumerate(flight.drawn):
                sequence.unread = row

    def _compute(self, flight: Flight, step: Step) -> None:
        logits_RV, row = self.runner.run(step), 0
        for sequence, places in flight.asked:
            if sequence.wants_prompt_logprobs:
                self._tell_prompt(flight, sequence, places, logits_RV[row : row + len(places)])
            row += len(places)
        if step.drawn:
            every = step.drawn == list(range(len(logits_RV)))
            # An index that Python holds would be copied to the device, and waited for.
            places_R = step.drawn if step.drawn_R is None else step.drawn_R
            picked_RV = logits_RV if every else logits_RV[places_R]
            flight.reading = self.sampler.sample(picked_RV, step.asks, step.numbers)
            if self.ahead:
                self.runner.share(len(step.drawn))
        elif not flight.prompts:  # a chunk of which nothing is read would seem to take no time, and the next step more
            flight.reading = self._over()

    def _over(self) -> Reading:
        wait = self.runner.machine.mark()
        return lambda: wait() or []

    def _tell_prompt(self, flight: Flight, sequence: Sequence, places: range, logits_RV: Tensor) -> None:
        prompt = sequence.request.prompt
        following = [prompt[place + 1] for place in places if place + 1 < len(prompt)]
        # The last place's token is not known; whether its logits are numbers is.
        following += [0] * (len(places) - len(following))
        count = sequence.request.prompt_logprobs or 0
        flight.prompts[sequence.number] = self.sampler.score(logits_RV, following, count)

    def _settle(self, flight: Flight) -> list[Event]:
        """Wait for a step, put what it computed into the pages' books, and report what it drew."""
        sampled = flight.reading()
        scored = {number: reading() for number, reading in flight.prompts.items()}
        now = time.perf_counter()
        later = () if self._flight is None else self._flight.drawn
        for sequence in flight.drawn:
            if sequence not in later:
                sequence.unread = None
        if self.pace is not None:
            decoding = sum(count == 1 for _, count in flight.parts)
            self.pace.observe(decoding, flight.num_tokens - decoding, now - max(flight.began, self._settled_at))
        self._settled_at = now
        for (sequence, _), until in zip(flight.parts, flight.until, strict=True):
            if sequence.held is not None:
                self.pages.commit(sequence.held, sequence.tokens, until)
                self.pages.drop(sequence.held, until)
        return self._read(flight, sampled, scored)

    # --- what the scheduler sees --------------------------------------------------------------------------------------

    def _waiting_counts(self, matches: dict[int, Match]) -> Iterator[SequenceCounts]:
        for sequence in self.waiting:
            match = Match() if sequence.wants_prompt_logprobs else self.pages.match(sequence.tokens)
            matches[sequence.number] = match
            yield SequenceCounts(
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
            remaining = sequence.num_tokens - sequence.num_computed
            pending += remaining if remaining > 1 or sequence.held is None else 0
            if pending >= self.limits.max_batch_tokens:
                break
        return pending

    def _running_counts(self, sequence: Sequence, scarce: bool) -> SequenceCounts:
        """scarce: somebody may be preempted; otherwise nobody's pages are looked at one by one"""
        assert sequence.held is not None
        num_pages, returns = len(sequence.held.pages), self.pages.num_returned(sequence.held) if scarce else 0
        computed = sequence.num_computed
        num_tokens = computed if sequence.unread is not None and sequence.is_last else sequence.num_tokens
        return SequenceCounts(sequence.number, num_tokens, computed, num_pages, returns=returns)

    # --- pages --------------------------------------------------------------------------------------------------------

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.held is not None
        assert sequence.unread is None
        self.pages.give_back(sequence.held)
        self.sampler.histories.release(sequence)
        sequence.held, sequence.num_computed = None, 0
        sequence.prompt_tokens.clear()
        sequence.move(State.WAITING)
        self.running.remove(sequence)
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda s: s.number)
        self.counts.preemptions += 1

    def _admit(self, admitted: Many[tuple[Sequence, Match]]) -> list[list[tuple[int, int]]]:
        """Claim first what all of them share, then make copies: making room could give up what another one matched.

        Returns the copies to make, (from, to) of each kind of layers.
        """
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
        self.sampler.histories.release(sequence)
        sequence.move(State.FINISHED)
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)

    # --- the step -----------------------------------------------------------------------------------------------------

    def _plan(
        self, parts: Many[tuple[Sequence, int]], copies: list[list[tuple[int, int]]]
    ) -> tuple[Step, list[tuple[Sequence, range]], list[Sequence]]:
        """The step in numbers; whose logits are asked for, as (sequence, places in its tokens); who draws from them."""
        step, asked, drawn, size = Step(), [], [], self.limits.page_size
        step.copies, step.local_copies = ([one[kind] for one in copies if kind < len(one)] for kind in range(2))
        unread = any(sequence.unread is not None for sequence, _ in parts)
        for sequence, count in parts:
            held, first = sequence.held, sequence.num_computed
            assert held is not None
            self.pages.grow(held, first + count)
            places = range(first, first + count)
            begin = len(step.ids)
            ids = sequence.tokens[first : first + count]
            if unread:
                drawn_at = -1 if sequence.unread is None or len(ids) == count else sequence.unread
                step.sources.extend([-1] * (count - 1) + [drawn_at])
            step.ids.extend(ids if len(ids) == count else [*ids, 0])
            step.positions.extend(places)
            kinds = ((step.slots, step.tables), (step.local_slots, step.local_tables))
            for mine, (slots, tables) in zip(held.kinds, kinds, strict=False):
                slots.extend(mine.pages[place // size] * size + place % size for place in places)
                tables.append(list(mine.pages))
            step.lengths.append(first + count)
            step.starts.append(begin + count)
            wanted = range(places.stop - 1, places.stop) if places.stop == sequence.num_tokens else range(0)
            if sequence.wants_prompt_logprobs:
                wanted = places
            if wanted:
                step.rows.extend(begin + place - first for place in wanted)
                asked.append((sequence, wanted))
            if wanted and places.stop == sequence.num_tokens and sequence.request.max_tokens:
                step.drawn.append(len(step.rows) - 1)
                step.asks.append(self._ask(sequence))
                drawn.append(sequence)
        return step, asked, drawn

    def _ask(self, sequence: Sequence) -> Ask:
        request = sequence.request
        num_logprobs = request.logprobs if request.num_sequences == 1 else request.logprobs or 0  # the best need them
        return self.sampler.ask(sequence, num_logprobs, int(sequence.unread is not None))

    def _read(
        self, flight: Flight, sampled: list[Sampled | None], scored: dict[int, list[Sampled | None]]
    ) -> list[Event]:
        """Report what a step has brought."""
        events: list[Event] = []
        ready = []
        for sequence, places in flight.asked:
            if sequence.number in scored and sequence.state is State.RUNNING:
                self._read_prompt(sequence, places, scored[sequence.number])
            if sequence.state is State.RUNNING and places.stop == len(sequence.tokens):
                ready.append(sequence)
        for sequence in ready:
            events += self._report_prompt(sequence)
        for sequence, found in zip(flight.drawn, sampled, strict=True):
            if sequence.state is State.RUNNING:
                events.append(self._fail(sequence) if found is None else self._append(sequence, found))
        return events

    def _read_prompt(self, sequence: Sequence, places: range, scored: list[Sampled | None]) -> None:
        request = sequence.request
        sequence.is_broken |= None in scored
        for place, found in zip(places, scored, strict=True):
            if place + 1 < len(request.prompt) and found is None:
                sequence.prompt_tokens.append(Token(request.prompt[place + 1], 0))
            elif found is not None and place + 1 < len(request.prompt):
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

    def _append(self, sequence: Sequence, sampled: Sampled) -> Delta:
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
            text = stream.push(sampled.id)
            *others, offset = stream.offsets
            token = Token(sampled.id, offset, sampled.logprob, sampled.top)
            sequence.pending = [*placed(sequence.pending, others), token]
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
