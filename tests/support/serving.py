"""Engines for tests: around a stand-in for the model that sees every mistake with pages, or around a real decoder."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from apps.serve.decode import Decode
from apps.serve.detokenize import Detokenizer
from apps.serve.engine import Engine, length_within
from apps.serve.machine import Machine, OnHost
from apps.serve.request import Delta, Event, PromptDone, Request, Sampling
from apps.serve.request import Sequence as Made
from apps.serve.runner import Runner, Step
from apps.serve.sampler import Sampled, Sampler
from apps.serve.scheduler import Limits
from core.models import Decoder

VOCAB = 50


class Letters:
    """The text of token i is letter i of an alphabet: stands for a tokenizer."""

    end_ids = frozenset()

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(0x100 + i) for i in ids)

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        return Detokenizer(self.decode, prompt)


def chained(before: int, token: int) -> int:
    """A number that stands for a text's last token with all before it."""
    return hash((before, token)) & 0xFFFFFFFFFFFF


def after(tokens: Iterable[int]) -> int:
    """The token that the stand-in writes after a text."""
    number = 0
    for token in tokens:
        number = chained(number, token)
    return number % VOCAB


def expected(prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(after(tokens))
    return tokens[len(prompt) :]


class StandIn:
    """A runner whose cache holds, in the place of a token, a number for the text up to it.

    It reads what came before a token from the pages, as attention does. So a page that was shared wrongly, given up too
    early, not copied or written to by two changes what is written from then on.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.page_size = page_size
        self.cache: list[int | None] = [None] * (num_pages * page_size)
        self.steps: list[Step] = []
        self.decode = None
        self.machine: Machine = OnHost(torch.device("cpu"))
        self.tokens: torch.Tensor | None = None

    def run(self, step: Step) -> torch.Tensor:
        self.steps.append(step)
        for index, source in enumerate(step.sources):
            if source >= 0:
                assert self.tokens is not None
                step.ids[index] = int(self.tokens[source])
        size = self.page_size
        for source, target in step.copies:
            self.cache[target * size : (target + 1) * size] = self.cache[source * size : (source + 1) * size]
        slots = step.slots
        assert len(set(slots)) == len(slots), "two tokens are written to one place"
        written, numbers = set(slots), []
        for table, length, begin, end in zip(step.tables, step.lengths, step.starts, step.starts[1:]):
            places = [table[p // size] * size + p % size for p in range(length)]
            assert places[length - (end - begin) :] == slots[begin:end]
            others = written - set(slots[begin:end])
            assert not others & set(places), "another sequence writes to what this one reads"
            for index in range(begin, end):
                position = step.positions[index]
                before = self.cache[places[position - 1]] if position else 0
                assert before is not None
                self.cache[places[position]] = chained(before, step.ids[index])
                numbers.append(self.cache[places[position]])
        logits_RV = torch.zeros(len(step.rows), VOCAB)
        for row, index in enumerate(step.rows):
            logits_RV[row, numbers[index] % VOCAB] = 1.0
        return logits_RV

    def share(self, count: int) -> None: ...

    def beat(self) -> None: ...

    def release(self) -> None: ...


def stand_in_engine(num_pages: int, limits: Limits, sharing: bool = True, ahead: bool = False) -> Engine:
    runner = StandIn(num_pages, limits.page_size)
    return Engine(
        runner, Letters(), limits, num_pages=num_pages, vocab_size=VOCAB, max_length=10**6, sharing=sharing, ahead=ahead
    )  # fmt: skip


def real_engine(
    model: Decoder,
    limits: Limits,
    num_pages: int,
    page_dtype: torch.dtype = torch.float32,
    graphs: bool = False,
    kinds: bool = True,
    **options,
) -> Engine:
    """graphs: steps in which all sequences decode are captured, and the next one is launched before they are read

    kinds: layers with a window have pages of their own beside those that see all
    """
    local_window = model.config.local_window if kinds else None
    limits = replace(limits, window=model.config.every_window, local_window=local_window)
    runner = Runner(model, num_pages, limits.page_size, page_dtype, local=limits.local(num_pages))
    max_length = options.pop("max_length", model.config.max_length)
    text = options.pop("text", Letters())
    if graphs:
        options["sampler"], options["ahead"] = Sampler(model.config.vocab_size, runner.machine), True
        longest = length_within(max_length, num_pages, limits)
        Decode(runner, options["sampler"], limits.max_running, longest)
    return Engine(
        runner, text, limits, num_pages=num_pages, vocab_size=model.config.vocab_size, max_length=max_length, **options
    )  # fmt: skip


def greedy(name: str, prompt: Iterable[int], max_tokens: int, **options) -> Request:
    return Request(name, tuple(prompt), max_tokens, Sampling(temperature=0), **options)


class Written:
    """Collects events: tokens, texts, reasons and prompts by request and index."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list] = {}
        self.texts: dict[tuple[str, int], str] = {}
        self.finish: dict[tuple[str, int], str] = {}
        self.prompts: dict[str, PromptDone] = {}

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, PromptDone):
                assert event.request.id not in self.prompts, "told once"
                self.prompts[event.request.id] = event
                continue
            assert isinstance(event, Delta)
            key = (event.request.id, event.index)
            assert key not in self.finish, "nothing comes after the end"
            self.tokens.setdefault(key, []).extend(event.tokens)
            self.texts[key] = self.texts.get(key, "") + event.text
            if event.finish:
                self.finish[key] = event.finish

    def ids(self, name: str, index: int = 0) -> list[int]:
        """Of the text, without the token that ended it."""
        return [token.id for token in self.tokens[name, index] if not token.ends]


def run(engine: Engine, requests: Iterable[Request] = ()) -> Written:
    """Submit, and step until nothing is left."""
    written = Written()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        written.take(engine.step())
    return written


def random_schedule(
    model: Decoder, asked: Sequence[Request], seed: int, prepare: Callable[[Runner], object] = id, graphs: bool = False
) -> tuple[dict[str, list[int]], int]:
    """What each request writes, and how often somebody was preempted, where everything else is random.

    That is: who comes when and beside whom, sizes of chunks, pages and steps, whether pages are shared and how scarce
    they are.

    prepare  what is done to the runner first
    graphs   see `real_engine`
    """
    dice = random.Random(seed)
    limits = Limits(dice.choice([1, 3, 4, 16]), dice.randint(9, 64), dice.randint(1, 20), dice.randint(1, 8))
    longest = max(len(request.prompt) + request.max_tokens for request in asked)
    engine = real_engine(
        model,
        limits,
        limits.pages(longest + 1) + 1 + dice.randint(0, 20),
        sharing=dice.random() < 0.7,
        graphs=graphs,
    )
    prepare(engine.runner)
    written, waiting = Written(), dice.sample(asked, len(asked))
    # A step computes a token at least; what is computed again after a preemption is not ten times all of them.
    steps = iter(range(10 * sum(len(request.prompt) + request.max_tokens for request in asked)))
    while waiting or engine.has_work:
        assert next(steps, None) is not None, "it does not come to an end"
        if waiting and dice.random() < 0.6:
            engine.submit(waiting.pop())
        written.take(engine.step())
    assert engine.pages.num_free == engine.pages.num_pages
    return {request.id: written.ids(request.id) for request in asked}, engine.counts.preemptions


def random_aborts(engine: Engine, num_requests: int, share: float = 0.3) -> Written:
    """Requests that come in heaps; a share of them is given up, at any time of its life. Until nothing is left."""
    dice, written, submitted, leaving = random.Random(0), Written(), 0, {}
    steps = 0
    while submitted < num_requests or engine.has_work:
        for _ in range(min(dice.randint(0, 30), num_requests - submitted)):
            prompt = [dice.randrange(3), dice.randrange(5), *range(dice.randrange(12))]
            engine.submit(greedy(str(submitted), prompt, dice.randint(1, 4)))
            if dice.random() < share:
                leaving.setdefault(steps + int(dice.expovariate(0.2)), []).append(str(submitted))
            submitted += 1
        for name in leaving.pop(steps, ()):
            engine.abort(name)
        written.take(engine.step())
        steps += 1
        assert steps < 10 * num_requests, "it does not come to an end"
    return written


def sample(logits_RV: torch.Tensor, sequences: Sequence[Made], ranked: Sequence[bool]) -> list[Sampled | None]:
    """The next token of each sequence from its row.

    ranked  whether a row's logprob is wanted beside those that its request asks for
    """
    sampler, asks = Sampler(logits_RV.shape[1], OnHost(torch.device("cpu"))), []
    for one, is_ranked in zip(sequences, ranked, strict=True):
        asks.append(sampler.ask(one, one.request.logprobs or 0 if is_ranked else one.request.logprobs))
    return sampler.sample(logits_RV, asks)()
