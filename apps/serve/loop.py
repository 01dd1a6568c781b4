"""A thread that steps an engine while there is work, and what others may ask of it.

Everything that touches the engine happens in its thread: requests and aborts go through an inbox that is emptied before
each step, so a client that leaves has its pages back within one step. Events go to each request's listener.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from apps.serve.engine import Engine
from apps.serve.metrics import Metrics
from apps.serve.request import Delta, Event, PromptDone, Request

log = logging.getLogger("serve")
# Other ranks of a model wait for the next step no longer than the process group's limit; this tells them to go on.
_HEARTBEAT_S = 60.0


class Overloaded(Exception):
    """The queue is full; it may be worth trying again after some seconds."""

    def __init__(self, retry_after_s: int):
        super().__init__(f"the queue is full; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class Unavailable(Exception):
    """The engine is stopping, or has failed."""


@dataclass(frozen=True)
class Failed:
    """The engine failed, and the request with it."""

    reason: str


Listener = Callable[[Event | Failed], None]


@dataclass
class _Client:
    """A request under way."""

    request: Request
    listener: Listener
    arrived: float
    sequences_left: int
    begun: float | None = None
    last: float | None = None


class EngineLoop:
    """An engine with its thread.  `submit` and `abort` may be called from any other."""

    def __init__(self, name: str, engine: Engine, max_queue: int, metrics: Metrics):
        self.name, self.engine, self.max_queue, self.metrics = name, engine, max_queue, metrics
        self.failure: str | None = None
        self.on_failure: Callable[[], object] | None = None  # called from the engine's thread
        self.created = int(time.time())
        self._wake = threading.Condition()
        self._inbox: list[Request | str] = []  # to be submitted, or the id of one to be aborted
        self._clients: dict[str, _Client] = {}
        self._stopping = False
        self._durations_s = 1.0
        # OpenMP counts threads per calling thread, so the engine's has to be told what this one was told.
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name=f"engine {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End what is under way, then the thread."""
        with self._wake:
            self._stopping = True
            self._inbox += self._clients
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def num_open(self) -> int:
        """Requests under way, waiting ones too."""
        return len(self._clients)

    @property
    def num_queued(self) -> int:
        """Requests whose prompt is not computed yet."""
        return sum(client.begun is None for client in list(self._clients.values()))

    def position(self, request_id: str) -> int | None:
        """The number of requests that came before this one and wait still; None when it has begun."""
        client = self._clients.get(request_id)
        if client is None or client.begun is not None:
            return None
        waiting = (c for c in list(self._clients.values()) if c.begun is None)
        return sum(1 for _ in itertools.takewhile(lambda c: c is not client, waiting))

    def submit(self, request: Request, listener: Listener) -> None:
        """Take a request; `listener` is called from the engine's thread.

        Raises UserError for what the engine can never do, Overloaded when the queue is full, Unavailable.
        """
        self.engine.check(request)
        with self._wake:
            if self.failure is not None or self._stopping:
                raise Unavailable(self.failure or "the server is stopping")
            queued = self.num_queued
            if queued >= self.max_queue:
                self.metrics.rejected(self.name)
                raise Overloaded(self._retry_after_s(queued))
            self._clients[request.id] = _Client(request, listener, time.monotonic(), request.num_sequences)
            self._inbox.append(request)
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        """End a request, if it is still under way."""
        with self._wake:
            if request_id in self._clients:
                self._inbox.append(request_id)
                self._wake.notify()

    def _retry_after_s(self, queued: int) -> int:
        """When the queue may have moved: its length by how fast requests have been served."""
        rounds = queued / self.engine.limits.max_running
        return min(60, max(1, round(self._durations_s * rounds)))

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            while self._wait():
                self._tick()
            self.engine.runner.release()
        except Exception as error:  # the model failed; nobody else is to wait for it
            log.exception("the engine of %s failed", self.name)
            self._fail(f"{type(error).__name__}: {error}")

    def _wait(self) -> bool:
        """Until there is something to do.  Returns False when it is time to end."""
        with self._wake:
            while not self._inbox and not self.engine.has_work:
                if self._stopping:
                    return False
                if not self._wake.wait(_HEARTBEAT_S):
                    self.engine.runner.beat()
        return True

    def _tick(self) -> None:
        with self._wake:
            inbox, self._inbox = self._inbox, []
        for subject in inbox:
            if isinstance(subject, Request):
                self.engine.submit(subject)
            elif self.engine.abort(subject):
                self._ended(subject, "abort")
        if self.engine.has_work:
            for event in self.engine.step():
                self._deliver(event)
        self.metrics.engine(self.name, self.engine)

    def _deliver(self, event: Event) -> None:
        client = self._clients.get(event.request.id)
        if client is None:
            return
        now = time.monotonic()
        if isinstance(event, PromptDone):
            client.begun = now
        elif isinstance(event, Delta):
            self._measure(client, event, now)
        client.listener(event)
        if isinstance(event, Delta) and event.finish is not None:
            client.sequences_left -= 1
            if client.sequences_left == 0:
                self._ended(event.request.id, event.finish)

    def _measure(self, client: _Client, delta: Delta, now: float) -> None:
        if client.last is None:
            self.metrics.first_token(self.name, now - client.arrived)
        elif delta.index == 0 and delta.num_tokens > 1:
            self.metrics.token(self.name, now - client.last)
        if delta.index == 0 or client.last is None:
            client.last = now

    def _ended(self, request_id: str, reason: str) -> None:
        with self._wake:
            client = self._clients.pop(request_id, None)
        if client is None:
            return
        if reason == "abort":
            client.listener(Failed("aborted"))
        duration_s = time.monotonic() - client.arrived
        self._durations_s += 0.1 * (duration_s - self._durations_s)
        self.metrics.finished(self.name, reason, duration_s)
        log.info(
            "%s %s: %d prompt tokens, %s after %.2f s",
            self.name,
            request_id,
            len(client.request.prompt),
            reason,
            duration_s,
        )

    def _fail(self, reason: str) -> None:
        with self._wake:
            self.failure = reason
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.listener(Failed(reason))
        if self.on_failure is not None:
            self.on_failure()
