"""uvicorn's HTTP/1.1, with four things that it leaves to a proxy.

- A connection has so long for each request's headers, from its first moment on and however many of them come.
- A request's line and headers have at most `HEAD_BYTES` (uvicorn's option h11_max_incomplete_event_size); what is
  longer is answered 414 or 431. h11 measures what has come and is not complete, so it is given little at a time.
- A client that closes its side of the connection after a request still gets the answer.
- Such a client looks like one that has left: both send the same. So when an answer takes longer, the server writes
  something: the next piece of a stream, or an interim `100 Continue`, which clients skip (RFC 9110, 15.2). Of one that
  has left the system then says so, and its request is given up.
"""

import asyncio
import socket
import sys
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 10.0
HEAD_BYTES = 1 << 16
PATIENCE_S = 1.0
_PIECE_BYTES = 1 << 12
_LOOK_S = 0.2


class Protocol(H11Protocol):
    """One connection."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._headers_due: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._headers_due, self._look, self._closing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            if self._closing is not None or self.transport.is_closing():
                return
            super().data_received(data[start : start + _PIECE_BYTES])
        self._expect_headers()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request. A client reads that its head is too long only when it has sent all of it, so what
        comes is dropped for a while before the connection is closed."""
        error = sys.exception()
        if not isinstance(error, h11.RemoteProtocolError) or error.error_status_hint != 431:
            super().send_400_response(msg)
            return
        in_line = b"\n" not in self.conn.trailing_data[0]
        status = HTTPStatus.REQUEST_URI_TOO_LONG if in_line else HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        what = "the URL is" if in_line else "the headers are"
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        for event in (
            h11.Response(status_code=status, headers=headers, reason=status.phrase.encode()),
            h11.Data(data=f"{what} too long; this server takes {HEAD_BYTES} bytes of both together".encode()),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.write_eof()
        self._closing = self.loop.call_later(PATIENCE_S, self.transport.close)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_headers()

    def _expect_headers(self) -> None:
        """Set the time limit where headers are awaited, and lift it where they are there."""
        awaited = self.conn.their_state is h11.IDLE
        if awaited and self._headers_due is None:
            self._headers_due = self.loop.call_later(HEADERS_S, self.transport.abort)
        elif not awaited and self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open: when a whole request is being answered."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        cycle.keep_alive = False
        self._look = self.loop.call_later(PATIENCE_S, self._ask)
        return True

    def _ask(self) -> None:
        cycle = self.cycle
        if not cycle.response_started and cycle.scope["http_version"] == "1.1" and not self.transport.is_closing():
            self.transport.write(
                self.conn.send(h11.InformationalResponse(status_code=100, headers=[], reason="Continue"))
            )
        self._look_for_them()

    def _look_for_them(self) -> None:
        """asyncio reads no more from this connection, so it does not notice its end."""
        if self.cycle.response_complete or self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._look = self.loop.call_later(_LOOK_S, self._look_for_them)
