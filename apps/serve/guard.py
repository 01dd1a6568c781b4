"""The guard before the application: the size of bodies, the key, the host and origin of calls. Plain ASGI.

Bodies are read here, up to the limit and within a time, and handed on whole.
"""

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from apps.serve.api import ApiError
from core.web.body import BODY_S, BodyTooLarge, Receive, is_framed_twice, whole_body
from core.web.hosts import Hosts

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """Refuses what is too large, comes without the key or for another host, is framed in two ways, or is not JSON.

    key    that calls under /v1 must bring; None: none is asked for
    hosts  names and addresses, beside this machine's own, under which the server is called while it asks for no key
    """

    def __init__(self, app: App, key: str | None, hosts: Sequence[str], max_body_bytes: int):
        self._app, self._key, self._max = app, key, max_body_bytes
        self._hosts = Hosts(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value for name, value in scope["headers"]}
        try:
            _check_framing(scope, headers)
            self._check_host(headers)
            self._check_key(scope, headers)
            if scope["method"] == "POST":
                receive = await self._whole_body(headers, receive)
        except ApiError as error:
            await answer(send, error)
            return
        await self._app(scope, receive, send)

    def _check_host(self, headers: dict[str, bytes]) -> None:
        if self._key is not None or "host" not in headers:  # browsers always send it
            return
        name = self._hosts.refused(headers["host"])
        if name is None:
            return
        raise ApiError(
            403,
            f"this server does not answer for {name}; call it by its address, or start it with --allow-host NAME",
            code="host_not_allowed",
        )

    def _check_key(self, scope: Scope, headers: dict[str, bytes]) -> None:
        if self._key is None or not scope["path"].startswith("/v1/") or scope["method"] == "OPTIONS":
            return
        kind, _, given = headers.get("authorization", b"").partition(b" ")
        fits = hmac.compare_digest(given.strip(), self._key.encode())
        if kind.lower() != b"bearer" or not fits:
            raise ApiError(
                401,
                "this server asks for a key: send it as 'Authorization: Bearer KEY'",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _whole_body(self, headers: dict[str, bytes], receive: Receive) -> Receive:
        kind = headers.get("content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":  # what a foreign web page may send without asking is not taken
            raise ApiError(415, "bodies are JSON: send them with 'Content-Type: application/json'")
        try:
            body = await whole_body(receive, self._max)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_S:.0f} s") from None
        except BodyTooLarge:
            close = {"Connection": "close"}
            raise ApiError(
                413, f"the body is larger than {self._max} bytes", code="body_too_large", headers=close
            ) from None
        whole = {"type": "http.request", "body": body, "more_body": False}
        handed_on = False

        async def again() -> MutableMapping[str, Any]:
            nonlocal handed_on
            if not handed_on:
                handed_on = True
                return whole
            return await receive()

        return again


def _check_framing(scope: Scope, headers: dict[str, bytes]) -> None:
    """Raises ApiError where the end of the body is told in two ways."""
    if is_framed_twice(scope["http_version"], headers):
        raise ApiError(
            400,
            "the length of the body is told in two ways; send Content-Length or Transfer-Encoding",
            headers={"Connection": "close"},
        )


async def answer(send: Send, error: ApiError) -> None:
    """The error as a response."""
    body = json.dumps(error.body).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))} | error.headers
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
