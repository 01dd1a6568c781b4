"""Steps in which every sequence decodes one token, as one launch: over buffers that stay where they are.

A GPU takes such a step's many small kernels faster than a host can launch them one by one. So the step is captured at
the start, for some numbers of sequences and some ways of drawing, and then launched as a whole:

1. The step's numbers are written into one buffer on the host, and copied in one piece. A step of fewer sequences than a
   graph was captured for is filled up with rows whose length is 0 and whose slot is -1: they read and keep nothing.
2. The graph takes ids from the last step's tokens where the host has not read them yet, computes the decoder, draws a
   token for each row, keeps the tokens for the next step, and sends them to the other ranks, if there are any.
3. One copy brings the results back. Meanwhile the host decides on the next step.

Page tables stand transposed, so that the part of them which a step uses is one piece, however long texts may be. What
is captured once and replayed on a GPU is called again on a CPU, over the same buffers.

Shapes: R rows, P pages of a sequence, V vocabulary.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from apps.serve.packet import Layout
from apps.serve.request import MAX_LOGPROBS
from apps.serve.runner import DECODE, HEADER, PagedContext, Runner, Step
from apps.serve.sampler import NEUTRAL, NUM_NUMBERS, Reading, Sampler, Way, joined, pick, read, slab_rows

WAYS = (
    Way(draws=False, sorts=False, adjusts=False, num_logprobs=None),
    Way(draws=True, sorts=False, adjusts=False, num_logprobs=None),
    Way(draws=True, sorts=True, adjusts=True, num_logprobs=None),
    Way(draws=True, sorts=True, adjusts=True, num_logprobs=MAX_LOGPROBS),
)
"""Those that are captured, the least first."""


def buckets(most: int) -> list[int]:
    """Numbers of sequences that steps are captured for: powers of two, then each 16th, and the most."""
    return sorted({n for n in (1, 2, 4, 8, *range(16, most, 16)) if n < most} | {most})


def warm_up(runner: Runner, max_tokens: int, max_length: int) -> None:
    """Steps of 1, 2, 4, … tokens of prompts, of the most, and of the longest text, so that no request waits for a
    kernel to be compiled.

    They are written to the first pages, which nobody has yet. All ranks call it: it sends nothing.

    max_tokens  of a step
    max_length  tokens of a text at most; a step of more has several
    """
    size, num_pages = runner.page_size, min(len(pages.k) for pages in runner.pages if not pages.local)
    longest = min(max_length, size * num_pages)
    texts = num_pages // -(-longest // size)
    most = min(max_tokens, texts * longest)
    for count in sorted({*(1 << power for power in range(most.bit_length())), most}):
        runner.compute(_of_prompts(runner, count, longest))
    few = min(2, most)  # two are a prompt's, which may be behind any text
    runner.compute(_of_prompts(runner, few, longest, before=longest - few))


def _of_prompts(runner: Runner, count: int, longest: int, before: int = 0) -> Step:
    """So many tokens: of one prompt behind `before` others, or, where they are more than `longest`, of several."""
    step, size, page = Step(), runner.page_size, 0
    while (left := count - len(step.ids)) > 0:
        new = min(left, longest - before)
        places, pages = range(before, before + new), range(page, page - (-(before + new) // size))
        step.ids += [0] * new
        step.positions += places
        step.slots += (page * size + place for place in places)
        step.tables.append([*pages])
        step.lengths.append(before + new)
        step.starts.append(len(step.ids))
        step.rows.append(len(step.ids) - 1)
        page = pages.stop
    if runner.kinds > 1:  # of layers with a window there are fewer pages
        there = min(len(pages.k) for pages in runner.pages if pages.local)
        step.local_slots = [slot % (there * size) for slot in step.slots]
        step.local_tables = [[page % there for page in table] for table in step.tables]
    return step


class Decode:
    """Captured steps of a runner.

    sampler      None on ranks that follow: the first one draws. They compute as often as it, whatever the way
    max_running  sequences of a step at most
    max_length   tokens of a sequence at most
    """

    def __init__(self, runner: Runner, sampler: Sampler | None, max_running: int, max_length: int):
        self.runner, self.sampler, self.machine = runner, sampler, runner.machine
        self.max_length, self.max_pages = max_length, -(-max_length // runner.page_size)
        self.buckets = buckets(max_running)
        num_logprobs = min(MAX_LOGPROBS, runner.model.config.vocab_size)
        self.ways = [replace(way, num_logprobs=None if way.num_logprobs is None else num_logprobs) for way in WAYS]
        self.tokens = runner.tokens = torch.zeros(max_running, dtype=torch.int64, device=runner.device)
        if sampler is not None:
            sampler.tokens = self.tokens
            sampler.histories.reserve(max_running)
            sampler.histories.stays = True
        self._layouts = {bucket: self._layout(bucket) for bucket in self.buckets}
        most = self._layouts[max_running]
        self._inputs = torch.zeros(most.num_words, dtype=torch.int32, device=runner.device)
        # One for each way: a copy to the host is one only of what lies in one piece.
        self._results = [
            torch.zeros(max_running, way.width, dtype=torch.int64, device=runner.device) for way in self.ways
        ]
        self._tables = {bucket: _Tables(self.max_pages, runner.kinds * bucket) for bucket in self.buckets}
        self._graphs = self._captured()
        runner.decode = self

    def _layout(self, bucket: int) -> Layout:
        long, short = torch.int64, torch.int32
        return Layout((
            ("header", short, HEADER), ("ids", long, bucket), ("positions", long, bucket), ("slots", long, bucket),
            ("sources", long, bucket), ("numbers", torch.float64, NUM_NUMBERS * bucket), ("lengths", short, bucket),
            ("local_slots", long, (self.runner.kinds - 1) * bucket),
            ("tables", short, self.max_pages * self.runner.kinds * bucket),
        ))  # fmt: skip

    @torch.inference_mode()
    def _captured(self) -> dict[tuple[int, int], Callable[[], None]]:
        """The largest first, so that the smaller ones find memory that is there."""
        graphs = {}
        for bucket in reversed(self.buckets):
            words = self._filled(Step(), bucket)
            self._inputs[: len(words)].copy_(words, non_blocking=True)
            for place, way in enumerate(self.ways):
                graphs[bucket, place] = self.machine.capture(self._step(bucket, way, self._results[place]))
        return graphs

    def _step(self, bucket: int, way: Way, results: Tensor) -> Callable[[], None]:
        """The captured step: see the module's docstring, 2."""
        layout, runner = self._layouts[bucket], self.runner

        def of(name: str) -> Tensor:
            return layout.tensor(self._inputs, name)

        most = slab_rows(runner.device.type, runner.model.config.vocab_size)
        slabs = [slice(at, min(at + most, bucket)) for at in range(0, bucket, most)]

        @torch.inference_mode()
        def compute() -> None:
            tables_BP = of("tables").view(self.max_pages, runner.kinds * bucket).T
            context = PagedContext(
                tables_BP=tables_BP[:bucket],
                lengths_B=of("lengths"),
                slots_T=of("slots"),
                max_length=self.max_length,
                local_tables_BP=tables_BP[bucket:],
                local_slots_T=of("local_slots"),
            )
            ids_R = runner.fed(of("ids"), of("sources"))
            logits_RV = runner.logits(ids_R[None], of("positions")[None], context)
            if self.sampler is not None:
                numbers = of("numbers").view(NUM_NUMBERS, bucket)
                for rows in slabs:
                    results[rows] = pick(logits_RV[rows], numbers[:, rows], way, self.sampler.histories)
                torch.clamp(results[:bucket, 0], min=0, out=self.tokens[:bucket])
            runner.share(bucket)

        return compute

    def way(self, step: Step) -> int | None:
        """The captured way that a step goes; None where there is none."""
        if not step.writes_only or len(step.ids) > self.buckets[-1]:
            return None
        wanted = joined(ask.way for ask in step.asks)
        return next((place for place, way in enumerate(self.ways) if way.covers(wanted)), None)

    def launch(self, step: Step, way: int) -> Reading:
        """Begin a step that goes this way; what is returned waits for its tokens."""
        count = len(step.ids)
        bucket = next(bucket for bucket in self.buckets if bucket >= count)
        words = self._filled(step, bucket)
        self._layouts[bucket].array(words, "header")[2:4] = bucket, way
        self.runner.send(DECODE, words)
        self._replay(words, bucket, way)
        asks, fetched = step.asks, self.machine.fetch(self._results[way][:count])
        return lambda: read(asks, [(range(count), fetched)])

    def follow(self, words: Tensor) -> None:
        """Run, on another rank, the step that the first one has sent."""
        self._replay(words, int(words[2]), int(words[3]))

    @torch.inference_mode()
    def _replay(self, words: Tensor, bucket: int, way: int) -> None:
        self._inputs[: len(words)].copy_(words, non_blocking=True)
        self._graphs[bucket, way]()

    def _filled(self, step: Step, bucket: int) -> Tensor:
        """The numbers of a step, up to the columns of the page tables that it uses."""
        layout, count, tables = self._layouts[bucket], len(step.ids), self._tables[bucket]
        width, start = tables.hold(step.tables), layout.start("tables")
        tables.hold(step.local_tables, bucket)
        words = self.machine.words(start + width * self.runner.kinds * bucket)
        empty = {"ids": 0, "positions": 0, "slots": -1, "sources": -1, "lengths": 0, "local_slots": -1}
        for name, nothing in empty.items():
            field = layout.array(words, name)
            given = getattr(step, name)
            field[len(given) :] = nothing
            field[: len(given)] = given
        numbers = layout.array(words, "numbers").reshape(NUM_NUMBERS, bucket).T
        numbers[count:] = NEUTRAL
        if count:
            numbers[:count] = [ask.numbers for ask in step.asks]
        words.numpy()[start:] = tables.pages_PR[:width].reshape(-1)
        return words


class _Tables:
    """Page tables of the last step of a bucket, transposed: most pages of the next step stand there already."""

    def __init__(self, max_pages: int, rows: int):
        self.pages_PR = np.zeros((max_pages, rows), dtype=np.int32)
        self._held: list[list[int]] = [[] for _ in range(rows)]

    def hold(self, tables: Many[list[int]], first: int = 0) -> int:
        """Have these in the columns from `first` on.  Returns how many pages the longest has."""
        for row, table in enumerate(tables, first):
            known = len(self._held[row])
            if self._held[row] != table[:known]:
                known = 0
            if known < len(table):
                self.pages_PR[known : len(table), row] = table[known:]
            self._held[row] = table
        return max(map(len, tables), default=0)
