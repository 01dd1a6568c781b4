"""The bridge between connections, which are coroutines, and the engine's thread.

ticket = Ticket(loop, requests)
ticket.submit()
try:
    event = await ticket.next(1.0)      # None after a second without news
finally:
    ticket.end()                        # aborts what is still under way
"""

import asyncio
from collections.abc import Sequence

from apps.serve.loop import EngineLoop, Failed
from apps.serve.request import Event, Request


class EngineFailed(Exception):
    """The engine gave up, or was stopped, while this was under way."""


class Ticket:
    """The requests of one call, and what becomes known of all of them."""

    def __init__(self, loop: EngineLoop, requests: Sequence[Request]):
        self._loop, self._requests = loop, requests
        self._events: asyncio.Queue[Event | Failed] = asyncio.Queue()

    def submit(self) -> None:
        """All of them or none.  Raises as `EngineLoop.submit` does."""
        here = asyncio.get_running_loop()

        def listener(event: Event | Failed) -> None:
            if not here.is_closed():
                here.call_soon_threadsafe(self._events.put_nowait, event)

        try:
            for request in self._requests:
                self._loop.submit(request, listener)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Abort what is still under way; may be called again."""
        for request in self._requests:
            self._loop.abort(request.id)

    async def next(self, timeout_s: float) -> Event | None:
        """The next event; None when there was none for so long.  Raises EngineFailed."""
        try:
            # Not by wait_for: before Python 3.12 that forgets a cancellation which comes with an event, so a client
            # that leaves while a token comes would be written to until the end.
            async with asyncio.timeout(timeout_s):
                event = await self._events.get()
        except TimeoutError:
            return None
        if isinstance(event, Failed):
            raise EngineFailed(event.reason)
        return event

    def position(self) -> int | None:
        """Requests to begin before the first of these; None when it has begun."""
        return self._loop.position(self._requests[0].id)
