"""`serve bench`: what a running server gives its clients: tokens a second, time to the first token, time per token.

Requests come at random times (a Poisson process) or as fast as a number of clients ask, with prompts and texts of mixed
lengths, from a seed; so two servers, or one before and after a change, can be given the very same load.
"""

import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from core.config import UserError, parse
from core.files import replace_file


@dataclass(frozen=True)
class BenchConfig:
    """Measure a running server."""

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    """one of those served; by default the first"""
    requests: int = 64
    clients: int = 8
    """that ask at once, each its next request when it has its answer"""
    rate: float | None = None
    """requests a second at random times, instead of clients"""
    prompt_tokens: tuple[int, int] = (16, 128)
    """least and most"""
    max_tokens: tuple[int, int] = (8, 64)
    """least and most; each text has exactly as many as are asked for"""
    shared_prefix: int = 0
    """tokens with which all prompts begin alike"""
    vocabulary: int = 256
    """prompts are random tokens below this"""
    seed: int = 0
    out: Path | None = None
    """file for the figures, as JSON"""

    def __post_init__(self) -> None:
        if self.requests < 1 or self.clients < 1 or (self.rate is not None and self.rate <= 0):
            raise UserError(f"requests={self.requests}, clients={self.clients}, rate={self.rate}; all are positive")
        for name in ("prompt_tokens", "max_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise UserError(f"{name} is {low} {high}; give the least, at least 1, and the most")

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        return (
            {} if self.rate is None else {"clients": "with a rate, at which requests come by themselves; leave out one"}
        )


@dataclass(frozen=True)
class Load:
    """One request: when it comes (seconds after the beginning; None: when a client is free), and what it asks."""

    at_s: float | None
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass
class Served:
    """The outcome of a request. Times in seconds after it was sent."""

    status: int = 0
    prompt_tokens: int = 0
    times_s: list[float] = field(default_factory=list)
    tokens: int = 0


def loads(config: BenchConfig) -> list[Load]:
    """The load of a configuration: the same each time."""
    dice, at = random.Random(config.seed), 0.0
    prefix = [dice.randrange(config.vocabulary) for _ in range(config.shared_prefix)]
    found = []
    for _ in range(config.requests):
        if config.rate is not None:
            at += dice.expovariate(config.rate)
        length = dice.randint(*config.prompt_tokens)
        prompt = prefix + [dice.randrange(config.vocabulary) for _ in range(length)]
        found.append(Load(at if config.rate is not None else None, tuple(prompt), dice.randint(*config.max_tokens)))
    return found


async def measure(url: str, model: str | None, load: list[Load], clients: int) -> tuple[list[Served], float]:
    """Send the load.  Returns each request's outcome, and the seconds that all took."""
    began, turn = time.perf_counter(), asyncio.Semaphore(clients)

    async def one(asked: Load) -> Served:
        if asked.at_s is not None:
            await asyncio.sleep(max(0.0, asked.at_s - (time.perf_counter() - began)))
            return await request(url, model, asked)
        async with turn:
            return await request(url, model, asked)

    served = await asyncio.gather(*(one(asked) for asked in load))
    return list(served), time.perf_counter() - began


async def request(url: str, model: str | None, asked: Load) -> Served:
    """One streamed completion; a time for each event that brings text or tokens."""
    parts = urlsplit(url)
    body = {"prompt": list(asked.prompt), "max_tokens": asked.max_tokens, "ignore_eos": True, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    if model is not None:
        body["model"] = model
    raw, served, sent = json.dumps(body).encode(), Served(), time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    except OSError as error:
        raise UserError(f"no answer from {url} ({error}); start one with megalith serve --model DIR") from None
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    async for line in reader:
        if line.startswith(b"HTTP/1.1 "):
            served.status = int(line.split()[1])
        elif line.startswith(b"data: {"):
            event = json.loads(line[6:])
            usage = event.get("usage") or {}
            before, served.tokens = served.tokens, usage.get("completion_tokens", served.tokens)
            served.prompt_tokens = usage.get("prompt_tokens", served.prompt_tokens)
            served.times_s += [time.perf_counter() - sent] * (served.tokens - before)
    writer.close()
    return served


def figures(served: list[Served], elapsed_s: float) -> dict[str, float]:
    """Throughput, and the median and the 99th percentile of the latencies."""
    done = [one for one in served if one.status == 200 and one.times_s]
    if not done:
        raise UserError(f"none of {len(served)} requests was served (status {served[0].status}); see the server's log")
    first = [one.times_s[0] for one in done]
    between = [b - a for one in done for a, b in zip(one.times_s, one.times_s[1:])]
    return {
        "requests": len(served),
        "refused": len(served) - len(done),
        "elapsed_s": elapsed_s,
        "tokens_per_s": sum(one.tokens for one in done) / elapsed_s,
        "prompt_tokens_per_s": sum(one.prompt_tokens for one in done) / elapsed_s,
        "first_token_p50_s": quantile(first, 0.5),
        "first_token_p99_s": quantile(first, 0.99),
        "per_token_p50_s": quantile(between, 0.5) if between else 0.0,
        "per_token_p99_s": quantile(between, 0.99) if between else 0.0,
    }


def quantile(values: list[float], share: float) -> float:
    """Linear between the two nearest; of a single value that value."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=1000, method="inclusive")[max(0, min(998, round(1000 * share) - 1))]


def main(argv: list[str]) -> int:
    config = parse({"default": BenchConfig}, argv, "megalith serve bench", default="default")
    parts = urlsplit(config.url)
    if parts.scheme != "http" or not parts.hostname:
        raise UserError(f"{config.url} is no address to measure; give one such as http://127.0.0.1:8000")
    found = figures(*asyncio.run(measure(config.url, config.model, loads(config), config.clients)))
    table = Table("", "", title=f"{config.requests} requests to {config.url}", show_header=False)
    for name, value in found.items():
        table.add_row(name, f"{value:,.4g}")
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    if config.out is not None:
        replace_file(config.out, json.dumps(found, indent=1).encode() + b"\n")
    return 0
