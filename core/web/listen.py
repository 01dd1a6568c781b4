"""An address that is bound before minutes are spent, and uvicorn whose signals are its caller's."""

import asyncio
import errno
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from core.config import UserError
from core.web.wire import HEAD_BYTES, Protocol


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens at an address, so that nobody else gets it; who connects waits until somebody accepts.

    Raises UserError where the address is taken or not ours.
    """
    if not 0 <= port < 1 << 16:
        raise UserError(f"port={port}; give one from 0 (any that is free) to 65535")
    listening = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()  # with SO_REUSEADDR, which restarts need, another process could bind it too until then
    except OSError as error:
        if listening is not None:
            listening.close()
        raise not_ours(host, port, error) from None
    return listening


def not_ours(host: str, port: int, error: OSError) -> UserError:
    """The line for the user about an address that cannot be listened at."""
    if error.errno == errno.EADDRINUSE:
        return UserError(f"port {port} of {host} is in use; give another --port, or 0 for any that is free")
    return UserError(f"cannot listen at port {port} of {host} ({error.strerror}); give another --host or --port")


def address_of(host: str, port: int) -> str:
    """The address of a server as a URL."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def config_of(app: Any, **where: Any) -> uvicorn.Config:
    """How every server of ours is run.

    where  host and port, for servers that do not hand over a socket or tell where they are
    """
    return uvicorn.Config(
        app, log_level="warning", access_log=False, http=Protocol, h11_max_incomplete_event_size=HEAD_BYTES, ws="none",
        timeout_graceful_shutdown=5, **where,
    )  # fmt: skip


class Listener(uvicorn.Server):
    """uvicorn, but signals are its caller's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def until_stopped(
        self, listening: socket.socket, started: Callable[[], None], stopping: asyncio.Event | None = None
    ) -> "asyncio.Future[None]":
        """Answer at a bound socket until SIGTERM or SIGINT, until `stopping`, or until it has ended by itself.

        Returns what it ends with, which may have been before it has `started`: whoever waits for it lets what is under
        way end, and sets `should_exit`.

        started  called when it answers
        """
        here, stopping = asyncio.get_running_loop(), stopping or asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            here.add_signal_handler(number, stopping.set)
        serving = asyncio.ensure_future(self.serve(sockets=[listening]))
        while not self.started and not serving.done():
            await asyncio.sleep(0.01)
        if self.started:
            started()
            stop = asyncio.ensure_future(stopping.wait())
            await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
        return serving

    @property
    def port(self) -> int:
        """The port that it listens at, once it has `started`."""
        return self.servers[0].sockets[0].getsockname()[1]
