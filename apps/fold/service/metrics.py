"""The figures at /metrics, in Prometheus' format."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 4 * 3600)


class Metrics:
    """The registry of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._tickets = Counter(
            "msa_server_tickets", "tickets that ended, by kind and how", ("kind", "status"), registry=self.registry
        )
        self._refused = Counter(
            "msa_server_refused", "requests that made no ticket, by why", ("reason",), registry=self.registry
        )
        self._searches = Counter(
            "msa_server_searches", "searches that tickets needed, run or failed", ("how",), registry=self.registry
        )
        self._seconds = Histogram(
            "msa_server_ticket_seconds",
            "from asking to the result",
            ("kind",),
            registry=self.registry,
            buckets=_SECONDS,
        )

    def gauge(self, name: str, what: str, value: Callable[[], float]) -> None:
        """A figure that is asked for when it is read."""
        Gauge(f"msa_server_{name}", what, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def ended(self, kind: str, status: str, seconds: float) -> None:
        self._tickets.labels(kind, status).inc()
        self._seconds.labels(kind).observe(seconds)

    def refused(self, reason: str) -> None:
        """reason: queue, key, request, maintenance"""
        self._refused.labels(reason).inc()

    def searched(self, run: int, failed: int) -> None:
        self._searches.labels("run").inc(run)
        self._searches.labels("failed").inc(failed)
