"""Serving beside transformers: tokens a second, time to the first token and per token, at several concurrencies.

The same requests for all: prompts of random tokens and texts of exactly as many tokens as are asked for, lengths mixed,
from one seed; greedy; the same weights (random, of a published shape, through one folder); one thread a core. With
concurrency c, c clients ask at once, each its next request when it has its answer. In turns; medians over the rounds.

ours           the engine of apps.serve, without HTTP
ours, static   the same with batches that nobody joins until all have ended: a server without continuous batching
transformers   `generate` on padded batches of c requests, each until its longest text has ended
continuous     transformers' `generate_batch` (continuous batching over paged attention)

Memory: the weights' bytes, and the bytes of the pages that the load needs.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from apps.serve.bench import BenchConfig, Load, Served, figures, loads
from apps.serve.detokenize import Detokenizer
from apps.serve.engine import Engine
from apps.serve.model import page_bytes
from apps.serve.request import Delta, Request, Sampling
from apps.serve.runner import Runner
from apps.serve.scheduler import Limits
from benchmarks.result import Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import run_command
from core.models import SHAPES, Decoder, DecoderConfig, initialise, load_pretrained, save_pretrained
from core.precision import bf16_units

PAGE_SIZE = 16
_UNITS = {
    "tokens_per_s": "tokens/s",
    "first_token_p50_s": "s",
    "first_token_p99_s": "s",
    "per_token_p50_s": "s",
    "per_token_p99_s": "s",
}


@dataclass(frozen=True)
class Size:
    """What is measured: a shape, the load, and how often."""

    name: str
    model: DecoderConfig
    concurrencies: tuple[int, ...]
    requests_each: int
    prompt_tokens: tuple[int, int]
    max_tokens: tuple[int, int]
    rounds: int


def sizes(options: Options) -> list[Size]:
    if options.quick:
        tiny = replace(
            SHAPES["opt_125m"], vocab_size=512, dim=64, num_layers=2, num_heads=4, ffn_dim=256, max_length=128
        )
        return [Size("tiny", tiny, (1, 4), 2, (4, 24), (4, 12), 1)]
    shapes = ["opt_125m", "bloom_560m"] if options.full else ["opt_125m"]
    return [Size(name, SHAPES[name], (1, 8, 32), 3, (16, 256), (8, 64), 3) for name in shapes]


class _NoText:
    """The engine without text: what is measured is tokens."""

    end_ids: frozenset[int] = frozenset()

    def detokenizer(self, prompt: Any) -> Detokenizer:
        return Detokenizer(lambda ids: "", prompt)


@dataclass
class Contender:
    """`serve(load, concurrency)` -> what became of each request, and the seconds that all took."""

    name: str
    serve: Callable[[list[Load], int], tuple[list[Served], float]]


def ours(model: Decoder, *, static: bool = False) -> Contender:
    def serve(load: list[Load], concurrency: int) -> tuple[list[Served], float]:
        length = max(len(asked.prompt) + asked.max_tokens for asked in load)
        num_pages = concurrency * (-(-length // PAGE_SIZE) + 1)
        dtype = model.embedding.tokens.weight.dtype
        engine = Engine(
            Runner(model, num_pages, PAGE_SIZE, dtype), _NoText(), Limits(PAGE_SIZE, 2048, 512, concurrency),
            num_pages=num_pages, vocab_size=model.config.vocab_size, max_length=length,
        )  # fmt: skip
        waiting = [Request(str(n), a.prompt, a.max_tokens, Sampling(temperature=0)) for n, a in enumerate(load)]
        served = {request.id: Served(200, len(request.prompt)) for request in waiting}
        sent: dict[str, float] = {}
        began, under_way = time.perf_counter(), 0
        while waiting or engine.has_work:
            while waiting and under_way < concurrency and not (static and engine.running):
                request = waiting.pop(0)
                sent[request.id] = time.perf_counter()
                engine.submit(request)
                under_way += 1
            for event in engine.step():
                if isinstance(event, Delta):
                    one = served[event.request.id]
                    one.times_s.append(time.perf_counter() - sent[event.request.id])
                    one.tokens = event.num_tokens
                    under_way -= event.finish is not None
        return list(served.values()), time.perf_counter() - began

    return Contender("ours, static" if static else "ours", serve)


def transformers_generate(model: Any) -> Contender:
    def serve(load: list[Load], concurrency: int) -> tuple[list[Served], float]:
        began = time.perf_counter()
        for first in range(0, len(load), concurrency):
            batch = load[first : first + concurrency]
            width = max(len(asked.prompt) for asked in batch)
            ids = torch.tensor([[0] * (width - len(a.prompt)) + list(a.prompt) for a in batch])
            mask = torch.tensor([[0] * (width - len(a.prompt)) + [1] * len(a.prompt) for a in batch])
            longest = max(asked.max_tokens for asked in batch)
            lengths = {"max_new_tokens": longest, "min_new_tokens": longest}
            model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)
        elapsed = time.perf_counter() - began
        return [Served(200, len(a.prompt), [elapsed], a.max_tokens) for a in load], elapsed

    return Contender("transformers", serve)


def transformers_continuous(model: Any) -> Contender:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    def serve(load: list[Load], concurrency: int) -> tuple[list[Served], float]:
        longest = max(asked.max_tokens for asked in load)
        generation = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
        length = max(len(asked.prompt) for asked in load) + longest
        batching = ContinuousBatchingConfig(
            block_size=32, num_blocks=concurrency * (-(-length // 32) + 1), max_batch_tokens=512
        )
        began = time.perf_counter()
        # It takes one number of new tokens for all, so each writes as many as the longest; those asked for are counted.
        model.generate_batch(
            [list(asked.prompt) for asked in load], generation_config=generation, continuous_batching_config=batching
        )
        elapsed = time.perf_counter() - began
        return [Served(200, len(a.prompt), [elapsed], a.max_tokens) for a in load], elapsed

    return Contender("continuous", serve)


def contenders(size: Size, dtype: torch.dtype, folder: Path, options: Options) -> list[Contender]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    first = Decoder(size.model)
    initialise(first, 0)
    save_pretrained(first, size.model, folder)
    del first
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    found = [
        ours(load_pretrained(folder, dtype).eval()),
        ours(load_pretrained(folder, dtype).eval(), static=True),
        transformers_generate(theirs),
    ]
    return found if options.quick else [*found, transformers_continuous(theirs)]


def measure(options: Options) -> Measured:
    rows, targets = [], []
    dtypes = {"fp32": torch.float32} | ({"bf16": torch.bfloat16} if bf16_units(torch.device("cpu")) else {})
    for size in sizes(options):
        for precision, dtype in dtypes.items():
            with tempfile.TemporaryDirectory() as folder, torch.no_grad():
                found = contenders(size, dtype, Path(folder), options)
            for concurrency in size.concurrencies:
                measured = _rounds(size, found, concurrency)
                for name, numbers in measured.items():
                    case = {"shape": size.name, "precision": precision, "system": name, "concurrency": concurrency}
                    rows.append(Row(case, numbers | _memory(size, dtype, concurrency)))
                targets += _targets(size.name, precision, concurrency, measured)
    return Measured(tuple(rows), tuple(targets), (f"{torch.get_num_threads()} threads", "weights are random"))


def _rounds(size: Size, found: list[Contender], concurrency: int) -> dict[str, dict[str, Number]]:
    """Medians over the rounds; within a round the systems take turns."""
    config = BenchConfig(
        requests=concurrency * size.requests_each, prompt_tokens=size.prompt_tokens, max_tokens=size.max_tokens
    )
    load = loads(config)
    seen: dict[str, list[dict[str, float]]] = {contender.name: [] for contender in found}
    with torch.no_grad():
        for contender in found:
            contender.serve(load[:1], 1)
        for _ in range(size.rounds):
            for contender in found:
                seen[contender.name].append(figures(*contender.serve(load, concurrency)))
    medians = {}
    for name, rounds in seen.items():
        streams = name.startswith("ours")
        wanted = _UNITS if streams else {"tokens_per_s": _UNITS["tokens_per_s"]}
        medians[name] = {key: Number(statistics.median(r[key] for r in rounds), unit) for key, unit in wanted.items()}
    return medians


def _memory(size: Size, dtype: torch.dtype, concurrency: int) -> dict[str, Number]:
    length = size.prompt_tokens[1] + size.max_tokens[1]
    pages = concurrency * -(-length // PAGE_SIZE) * page_bytes(size.model, PAGE_SIZE, dtype)
    return {
        "weights_bytes": Number(size.model.num_parameters() * dtype.itemsize, "bytes"),
        "pages_bytes": Number(pages, "bytes"),
    }


def _targets(shape: str, precision: str, concurrency: int, measured: dict[str, dict[str, Number]]) -> list[Target]:
    rate = {name: numbers["tokens_per_s"].value for name, numbers in measured.items()}
    wanted = {"ours, static": 5.0, "continuous": 3.0} if concurrency > 1 else {"transformers": 1.0}
    load = f"{shape} {precision}, {concurrency} at once"
    return [
        Target(f"{load}: ours / {name}, tokens a second", least, rate["ours"] / rate[name])
        for name, least in wanted.items()
        if name in rate
    ]


BENCHMARK = Benchmark("serving", "Serving", measure)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="serving"), sys.argv[1:]))
