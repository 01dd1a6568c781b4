"""The figures at /metrics, in Prometheus' format. Names follow those of other servers where they have such."""

import time
from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from apps.serve.engine import Counts, Engine

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_COUNTERS = {
    "prompt_tokens": "tokens of prompts",
    "cached_tokens": "of them found in the cache",
    "written_tokens": "tokens written",
    "computed_tokens": "tokens put through the model",
    "preemptions": "sequences that gave their pages back and began again",
    "page_copies": "pages copied because a text left a shared one in its middle",
    "steps": "steps of the model",
}


class Rate:
    """Tokens a second over the last seconds."""

    def __init__(self, window_s: float = 5.0):
        self._window_s = window_s
        self._seen: deque[tuple[float, int]] = deque()

    def update(self, total: int) -> float:
        now = time.monotonic()
        self._seen.append((now, total))
        while now - self._seen[0][0] > self._window_s and len(self._seen) > 2:
            self._seen.popleft()
        (then, before), elapsed = self._seen[0], now - self._seen[0][0]
        return (total - before) / elapsed if elapsed > 0 and then < now else 0.0


class Metrics:
    """One registry for all models of a server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        label = ("model",)

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(f"serve_{name}", what, label, registry=self.registry)

        def seconds(name: str, what: str) -> Histogram:
            return Histogram(f"serve_{name}_seconds", what, label, registry=self.registry, buckets=_SECONDS)

        self._running = gauge("requests_running", "sequences that have pages")
        self._waiting = gauge("requests_waiting", "sequences that wait for pages")
        self._usage = gauge("cache_usage_ratio", "share of the pages that sequences hold")
        self._tokens_per_s = gauge("tokens_per_second", "tokens written a second, over the last seconds of work")
        self._first = seconds("time_to_first_token", "from arrival to the first token")
        self._token = seconds("time_per_output_token", "between tokens of a sequence")
        self._request = seconds("request", "from arrival to the end")
        self._finished = Counter(
            "serve_requests_finished", "requests by how they ended", ("model", "reason"), registry=self.registry
        )
        self._rejected = Counter(
            "serve_requests_rejected", "requests for which the queue was full", label, registry=self.registry
        )
        self._counters = {
            name: Counter(f"serve_{name}", what, label, registry=self.registry) for name, what in _COUNTERS.items()
        }
        self._seen: dict[str, Counts] = {}
        self._rates: dict[str, Rate] = {}

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def engine(self, model: str, engine: Engine) -> None:
        """Take the engine's figures after a step."""
        self._running.labels(model).set(len(engine.running))
        self._waiting.labels(model).set(len(engine.waiting))
        self._usage.labels(model).set(1 - engine.pages.num_free / engine.pages.num_pages)
        seen = self._seen.setdefault(model, Counts())
        for name, counter in self._counters.items():
            value = getattr(engine.counts, name)
            counter.labels(model).inc(value - getattr(seen, name))
            setattr(seen, name, value)
        rate = self._rates.setdefault(model, Rate())
        self._tokens_per_s.labels(model).set(rate.update(engine.counts.written_tokens))

    def first_token(self, model: str, seconds: float) -> None:
        self._first.labels(model).observe(seconds)

    def token(self, model: str, seconds: float) -> None:
        self._token.labels(model).observe(seconds)

    def finished(self, model: str, reason: str, seconds: float) -> None:
        self._finished.labels(model, reason).inc()
        self._request.labels(model).observe(seconds)

    def rejected(self, model: str) -> None:
        self._rejected.labels(model).inc()
