"""The body of a request, up to a limit and within a time, and whether its end is told once."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

BODY_S = 30.0
# A client reads the refusal only when it has sent its body, so up to so many times the limit are read and dropped.
_PATIENCE = 16


class BodyTooLarge(Exception):
    """The body has more bytes than are taken."""


async def whole_body(receive: Receive, limit_bytes: int) -> bytes:
    """All bytes of a body.  Raises BodyTooLarge, and TimeoutError where it is not there within `BODY_S`."""
    body, size = bytearray(), 0
    async with asyncio.timeout(BODY_S):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            piece = message.get("body", b"")
            size += len(piece)
            if size <= limit_bytes:
                body += piece
            elif size > _PATIENCE * limit_bytes:
                break
            if not message.get("more_body", False):
                break
    if size > limit_bytes:
        raise BodyTooLarge
    return bytes(body)


def is_framed_twice(http_version: str, headers: Mapping[str, bytes]) -> bool:
    """Whether a proxy before this server may have seen another end of the body (request smuggling).

    headers  by their names in lower case
    """
    return "transfer-encoding" in headers and ("content-length" in headers or http_version == "1.0")
