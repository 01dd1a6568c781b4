"""HTTP: ColabFold's protocol, health and metrics.

POST /ticket/msa, /ticket/pair     {"id", "status"}, and "message" where there is something to say
GET  /ticket/ID                    the same
GET  /result/download/ID           tar.gz
GET  /template/1abc_A,2def_B       tar.gz
GET  /queue                        {"queued": tickets that wait}

What is refused has the status ERROR and a message, and HTTP's 4xx. Nothing of sequences is logged.
"""

import asyncio
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, PlainTextResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from apps.fold.service.keys import Keys, Owner
from apps.fold.service.metrics import Metrics
from apps.fold.service.protocol import Kind, query_of
from apps.fold.service.store import is_name
from apps.fold.service.templates import Templates
from apps.fold.service.tickets import Ticket, Tickets
from core.config import UserError
from core.web.body import BODY_S, BodyTooLarge, Receive, is_framed_twice, whole_body
from core.web.hosts import Hosts

log = logging.getLogger("msa-server")
Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGI = Callable[[Scope, Receive, Send], Awaitable[None]]

FORM = "application/x-www-form-urlencoded"
# A client asks again only after 5 s, so one that can be answered within this time is.
_AT_ONCE_S = 0.5
_LOOK_S = 0.03
_OPEN = re.compile(r"/(health|ready|metrics)$")  # asked without a key
_AGAIN = {"Retry-After": "10"}
_HTTP = {"RATELIMIT": 429, "MAINTENANCE": 503}


@dataclass(frozen=True)
class HttpLimits:
    """Bytes of a body; sequences and residues of a ticket; hosts that are answered beside this machine's own."""

    max_body_bytes: int
    max_sequences: int
    max_residues: int
    hosts: tuple[str, ...]


class Guard:
    """Refuses calls for other hosts, of web pages of others, without a key, or with a body that is too large."""

    def __init__(self, app: ASGI, keys: Keys, limits: HttpLimits):
        self._app, self._keys, self._limits = app, keys, limits
        self._hosts = Hosts(limits.hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Clients put "/ticket/msa" behind an address that may end with a slash, as ours does where it is announced.
        scope["path"] = "/" + scope["path"].lstrip("/")
        headers = {name.decode("latin-1").lower(): value for name, value in scope["headers"]}
        refusal = self._refused(scope, headers)
        if refusal is None and scope["method"] == "POST":
            try:
                scope["body"] = await whole_body(receive, self._limits.max_body_bytes)
            except TimeoutError:
                refusal = _error(408, f"the body did not arrive within {BODY_S:.0f} s")
            except BodyTooLarge:
                refusal = _error(413, f"the body is larger than {self._limits.max_body_bytes} bytes")
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _refused(self, scope: Scope, headers: dict[str, bytes]) -> Response | None:
        if is_framed_twice(scope["http_version"], headers):
            return _error(400, "the length of the body is told in two ways; send Content-Length or Transfer-Encoding")
        scope["owner"] = owner = self._keys.owner(headers)
        if owner is None and not _OPEN.match(scope["path"]):
            given = "send it as 'Authorization: Bearer KEY', as X-API-Key, or in the URL: http://user:KEY@host"
            return _error(401, f"this server asks for a key: {given}", {"WWW-Authenticate": 'Basic realm="msa-server"'})
        name = None if self._keys.asked_for else self._hosts.refused(headers.get("host", b"localhost"))
        if name is not None:
            return _error(403, f"this server does not answer for {name}; start it with --allow-host NAME")
        if "origin" in headers and self._hosts.refused(headers["origin"].partition(b"//")[2]) is not None:
            return _error(403, "web pages of others cannot ask this server")
        return None


def build_app(
    tickets: Tickets, keys: Keys, metrics: Metrics, limits: HttpLimits, templates: Templates | None
) -> FastAPI:
    app = FastAPI(title="Megalith msa-server", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, keys=keys, limits=limits)
    _add_tickets(app, tickets, metrics, limits)
    _add_files(app, tickets, templates)
    _add_health(app, tickets, metrics)

    async def no_such(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = (
            "POST /ticket/msa, POST /ticket/pair, GET /ticket/ID, GET /result/download/ID, GET /template/…, GET /queue"
        )
        what = f"this server has no {request.method} {request.url.path[:80]}; it answers {known}"
        return _error(error.status_code, what if error.status_code in (404, 405) else str(error.detail))

    async def unexpected(_: Request, error: Exception) -> Response:
        log.error("unexpected %s", type(error).__name__, exc_info=error)
        return _error(500, "an error of the server's")

    app.add_exception_handler(HTTPException, no_such)
    app.add_exception_handler(Exception, unexpected)
    return app


def _add_tickets(app: FastAPI, tickets: Tickets, metrics: Metrics, limits: HttpLimits) -> None:
    async def ask(kind: Kind, request: Request) -> Response:
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != FORM:
            metrics.refused("request")
            return _error(415, f"tickets are forms: send q=FASTA&mode=MODE as {FORM}")
        owner: Owner = request.scope["owner"]
        began = time.monotonic()
        try:
            query = query_of(kind, request.scope["body"], limits.max_sequences, limits.max_residues)
        except UserError as error:
            metrics.refused("request")
            return _error(400, str(error))
        try:
            ticket = await run_in_threadpool(tickets.submit, owner, query)
        except OSError as error:
            log.error("a ticket cannot be kept: %s", error)
            return _error(503, "the server cannot keep tickets now", _AGAIN)
        while ticket.status in ("PENDING", "RUNNING") and time.monotonic() - began < _AT_ONCE_S:
            await asyncio.sleep(_LOOK_S)
            ticket = tickets.ticket(owner, ticket.id)  # which waits for nobody
        return _said(ticket)

    @app.post("/ticket/msa")
    async def msa(request: Request) -> Response:
        return await ask("msa", request)

    @app.post("/ticket/pair")
    async def pair(request: Request) -> Response:
        return await ask("pair", request)

    @app.get("/ticket/{name}")
    async def ticket(name: str, request: Request) -> Response:
        found = await run_in_threadpool(tickets.ticket, request.scope["owner"], name if is_name(name) else "")
        return _said(Ticket(name[:80], found.status, found.message), 404 if found.status == "UNKNOWN" else 200)

    @app.get("/queue")
    async def queue() -> Response:
        return _json({"queued": tickets.num_waiting})


def _add_files(app: FastAPI, tickets: Tickets, templates: Templates | None) -> None:
    @app.get("/result/download/{name}")
    async def result(name: str, request: Request) -> Response:
        path = await run_in_threadpool(tickets.result, request.scope["owner"], name if is_name(name) else "")
        if path is None:
            return _error(404, "no ticket of this name is complete; ask GET /ticket/ID how it is")
        return FileResponse(path, media_type="application/octet-stream", filename=f"mmseqs_results_{name}.tar.gz")

    @app.get("/template/{names}")
    async def template(names: str) -> Response:
        if templates is None:
            return _error(404, "this server has no templates; start it with --hhsearch-databases and --templates")
        try:
            chosen = await run_in_threadpool(templates.chosen, names)
        except UserError as error:
            return _error(404, str(error))
        attached = {"Content-Disposition": 'attachment; filename="templates.tar.gz"'}
        return StreamingResponse(templates.packed(chosen), media_type="application/octet-stream", headers=attached)


def _add_health(app: FastAPI, tickets: Tickets, metrics: Metrics) -> None:
    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        return _json({"status": "draining" if tickets.draining else "ready"}, 503 if tickets.draining else 200)

    @app.get("/metrics")
    async def figures() -> Response:
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _said(ticket: Ticket, status: int = 200) -> Response:
    body = {"id": ticket.id, "status": ticket.status} | ({"message": ticket.message} if ticket.message else {})
    return _json(body, _HTTP.get(ticket.status, status), _AGAIN if ticket.status in _HTTP else {})


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return _json({"id": "", "status": "ERROR", "message": message}, status, headers)


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(body), status, {"Cache-Control": "no-store", **(headers or {})}, "application/json")
