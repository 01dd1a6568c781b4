"""A client's leaving and the engine's next word at the same moment: the client has left."""

import asyncio
from typing import Any

import pytest

from apps.serve.request import Delta, Request
from apps.serve.tickets import Ticket

REQUEST = Request("a", (1,), 1)


class Loop:
    """In place of an engine's loop: keeps the listener, and what was aborted."""

    def __init__(self) -> None:
        self.listener: Any = None
        self.aborted: list[str] = []

    def submit(self, request: Request, listener: Any) -> None:
        self.listener = listener

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


async def until_waiting(loop: Any) -> tuple[Ticket, asyncio.Task]:
    ticket = Ticket(loop, [REQUEST])
    ticket.submit()
    task = asyncio.create_task(ticket.next(1000.0))
    for _ in range(5):
        await asyncio.sleep(0)
    return ticket, task


def test_an_event_does_not_undo_that_the_client_left() -> None:
    async def both() -> None:
        loop = Loop()
        _, task = await until_waiting(loop)
        loop.listener(Delta(REQUEST, 0, "x", (), 1))
        await asyncio.sleep(0)  # the event is there, who waits for it has not been told
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(both())


def test_next() -> None:
    """The event; None when the time is up; and what comes later is not lost."""

    async def one_after_another() -> None:
        loop, event = Loop(), Delta(REQUEST, 0, "x", (), 1)
        ticket, task = await until_waiting(loop)
        loop.listener(event)
        assert await task == event
        assert await ticket.next(0.0) is None
        assert await ticket.next(0.001) is None
        loop.listener(event)
        await asyncio.sleep(0)
        assert await ticket.next(0.0) == event
        ticket.end()
        assert loop.aborted == ["a"]

    asyncio.run(one_after_another())
