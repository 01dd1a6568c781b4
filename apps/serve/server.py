"""The HTTP application: OpenAI's completions and chat completions, the models, health, metrics, and the demo page.

A call: body -> `Call` (api) -> `Ticket` (the engine works) -> `Answer` (pieces or whole). A client that leaves, a time
limit and an error all leave the ticket's block, which aborts what is under way.

Nothing of prompts or texts is logged.
"""

import asyncio
import json
import logging
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, PlainTextResponse
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from apps.serve.answer import Answer
from apps.serve.api import ApiError, Call, ErrorBody, chat_call, completion_call
from apps.serve.config import HttpConfig
from apps.serve.fields import ChatBody, CompletionBody
from apps.serve.guard import Guard, Receive, Scope, Send
from apps.serve.loop import EngineLoop, Overloaded, Unavailable
from apps.serve.metrics import Metrics
from apps.serve.template import MAX_PROCESSES
from apps.serve.tickets import EngineFailed, Ticket
from core.config import UserError, size_in_bytes
from core.web.key import read_key

log = logging.getLogger("serve")
Result = TypeVar("Result")
PAGE = Path(__file__).parent / "page"
# A comment in a stream without news, with the place in the queue: keeps proxies from closing it.
_QUIET_S = 1.0
# Sizes to which pieces of a stream are padded, where a client asks for that.
_SIZE_STEP = 128
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": what}
    for status, what in (
        (400, "the request cannot be served as it is"),
        (401, "the key is missing or wrong"),
        (403, "the server does not answer for this host"),
        (404, "no such model"),
        (413, "the body is too large"),
        (415, "the body is not JSON"),
        (429, "the queue is full; Retry-After says when to come again"),
        (503, "the server is stopping"),
        (504, "the request took longer than the server allows"),
    )
} | {"default": {"model": ErrorBody, "description": "an error"}}


class Server:
    """The models that are served, and whether new requests are taken."""

    def __init__(self, loops: Mapping[str, EngineLoop], config: HttpConfig, metrics: Metrics):
        self.loops, self.config, self.metrics = dict(loops), config, metrics
        self.draining = False
        self._dialogues = CapacityLimiter(2 * MAX_PROCESSES)

    def loop(self, name: str | None) -> EngineLoop:
        """The model of that name; the first without one.  Raises ApiError."""
        if self.draining:
            raise ApiError(503, "the server is stopping", kind="server_error", headers={"Retry-After": "5"})
        if name is None:
            return next(iter(self.loops.values()))
        if name not in self.loops:
            known = ", ".join(self.loops)
            raise ApiError(
                404, f"no model of this name is served; the models are {known}", param="model", code="model_not_found"
            )
        return self.loops[name]

    @property
    def num_open(self) -> int:
        return sum(loop.num_open for loop in self.loops.values())

    @property
    def failure(self) -> str | None:
        return next((loop.failure for loop in self.loops.values() if loop.failure is not None), None)

    async def drain(self) -> None:
        """Take nothing new, and wait until what is under way has ended, or its time is over."""
        self.draining = True
        deadline = time.monotonic() + self.config.drain_s
        while self.num_open and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for loop in self.loops.values():
            await run_in_threadpool(loop.stop)

    async def answer(self, build: Callable[..., Call], body: Any, request: Request) -> Response:
        loop, deadline = self.loop(body.model), time.monotonic() + self.config.timeout_s
        call = await self._built(build, body, loop)
        ticket = Ticket(loop, call.requests)
        try:
            ticket.submit()
        except Overloaded as error:
            retry = {"Retry-After": str(error.retry_after_s), "retry-after-ms": str(1000 * error.retry_after_s)}
            raise ApiError(429, str(error), kind="rate_limit_error", code="queue_full", headers=retry) from None
        except Unavailable as error:
            raise ApiError(503, str(error), kind="server_error", headers={"Retry-After": "5"}) from None
        except UserError as error:
            raise ApiError(400, str(error)) from None
        headers = {"x-request-id": call.id, "Cache-Control": "no-cache"}
        if call.stream:
            return EventStream(self._pieces(call, ticket, deadline), ticket, headers)
        try:
            return _json(await unless_left(self._whole(call, ticket, deadline), request.receive), headers=headers)
        except EngineFailed as error:
            raise _failed(error) from None
        except ClientLeft:
            return Response(status_code=499)  # which nobody reads
        finally:
            ticket.end()

    async def _built(self, build: Callable[..., Call], body: Any, loop: EngineLoop) -> Call:
        """The call, made in a thread, because texts take time; dialogues have threads of their own."""
        limiter = self._dialogues if isinstance(body, ChatBody) else None
        arguments = (body, loop.name, loop.engine, self.config, self.config.timeout_s)
        try:
            async with asyncio.timeout(self.config.timeout_s):
                return await to_thread.run_sync(build, *arguments, abandon_on_cancel=True, limiter=limiter)
        except TimeoutError:
            raise self._too_long() from None

    async def _whole(self, call: Call, ticket: Ticket, deadline: float) -> dict[str, Any]:
        answer = Answer(call)
        while not answer.complete:
            event = await ticket.next(max(0.0, deadline - time.monotonic()))
            if event is None:
                raise self._too_long()
            answer.take(event)
        return answer.whole()

    async def _pieces(self, call: Call, ticket: Ticket, deadline: float) -> AsyncIterator[str]:
        answer = Answer(call)
        try:
            while not answer.complete:
                event = await ticket.next(_QUIET_S)
                if time.monotonic() > deadline:
                    raise self._too_long()
                if event is None:
                    position = ticket.position()
                    yield ": working\n\n" if position is None else f": queued behind {position}\n\n"
                    continue
                for piece in answer.take(event):
                    if call.obfuscated:
                        piece |= {"obfuscation": _padding(json.dumps(piece))}
                    yield f"data: {json.dumps(piece)}\n\n"
            if call.include_usage:
                yield f"data: {json.dumps(answer.usage_chunk())}\n\n"
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield f"data: {json.dumps(error.body)}\n\n"
        except EngineFailed as error:
            yield f"data: {json.dumps(_failed(error).body)}\n\n"

    def _too_long(self) -> ApiError:
        return ApiError(
            504,
            f"the request took longer than the {self.config.timeout_s:g} s that this server allows",
            kind="server_error",
            code="timeout",
            headers={"x-should-retry": "false"},
        )


def _padding(piece: str) -> str:
    """Random letters that make a piece's size a multiple of a number that hides what is said in it."""
    size = -len(piece) % _SIZE_STEP
    return secrets.token_hex(_SIZE_STEP)[:size]


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


class EventStream(Response):
    """Server-sent events as they come. Whatever ends it, the client's leaving too, ends what is under way."""

    def __init__(self, pieces: AsyncIterator[str], ticket: Ticket, headers: Mapping[str, str]):
        super().__init__(headers=dict(headers), media_type="text/event-stream")
        del self.headers["content-length"]
        self._pieces, self._ticket = pieces, ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_left(self._send(send), receive)
        except ClientLeft:
            pass
        finally:
            self._ticket.end()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_left(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """Return the work's result; cancel it, and raise ClientLeft, when the client leaves before."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _failed(error: EngineFailed) -> ApiError:
    return ApiError(500, f"the engine gave up: {error}", kind="server_error")


def _json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON in ASCII, which holds any text, half characters too."""
    return Response(json.dumps(content), status, dict(headers or {}), "application/json")


def build_app(server: Server) -> FastAPI:
    """The application.  Its lifespan starts and ends the engines' threads."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for loop in server.loops.values():
            loop.start()
        yield
        for loop in server.loops.values():
            await run_in_threadpool(loop.stop)

    app = FastAPI(title="Megalith serve", version=_version(), lifespan=lifespan, docs_url=None, redoc_url=None)
    config = server.config
    hosts = (config.host, *config.allow_host)
    app.add_middleware(
        Guard, key=read_key(config.api_key_file), hosts=hosts, max_body_bytes=size_in_bytes(config.max_body, "max_body")
    )
    if server.config.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(server.config.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    _add_errors(app)
    _add_api(app, server)
    _add_health(app, server)
    _add_page(app)
    return app


def _add_api(app: FastAPI, server: Server) -> None:
    @app.post("/v1/completions", responses=_ERRORS)
    async def completions(body: CompletionBody, request: Request) -> Any:
        """Continue texts."""
        return await server.answer(completion_call, body, request)

    @app.post("/v1/chat/completions", responses=_ERRORS)
    async def chat_completions(body: ChatBody, request: Request) -> Any:
        """Answer in a dialogue."""
        return await server.answer(chat_call, body, request)

    @app.get("/v1/models", responses={401: _ERRORS[401]})
    async def models() -> Any:
        """The models that are served; max_model_len is of prompt and text, chat_template whether it has one."""
        return _json({"object": "list", "data": [_described(loop) for loop in server.loops.values()]})

    @app.get("/v1/models/{name}", responses={401: _ERRORS[401], 404: _ERRORS[404]})
    async def model(name: str) -> Any:
        """One of them."""
        return _json(_described(server.loop(name)))


def _described(loop: EngineLoop) -> dict[str, Any]:
    return {
        "id": loop.name,
        "object": "model",
        "created": loop.created,
        "owned_by": "megalith",
        "max_model_len": loop.engine.max_length,
        "chat_template": loop.engine.text.hf.chat_template is not None,
    }


def _add_health(app: FastAPI, server: Server) -> None:
    unwell: dict[int | str, dict[str, Any]] = {503: {"description": "not now"}}

    @app.get("/health", responses=unwell)
    async def health() -> Any:
        """Say whether the engines work."""
        failed = server.failure is not None
        return _json({"status": "failed" if failed else "ok"}, 503 if failed else 200)

    @app.get("/ready", responses=unwell)
    async def ready() -> Any:
        """Say whether new requests are taken."""
        fine = server.failure is None and not server.draining
        return _json({"status": "ready" if fine else "draining" if server.draining else "failed"}, 200 if fine else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Any:
        """For Prometheus."""
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def about() -> Any:
        return _json({"version": _version()})


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Any:
        return FileResponse(PAGE / "index.html", headers=_PAGE_HEADERS)

    app.mount("/page", StaticFiles(directory=PAGE))


def _add_errors(app: FastAPI) -> None:
    async def api_error(_: Request, error: ApiError) -> Response:
        return _json(error.body, error.status, error.headers)

    async def invalid(_: Request, error: RequestValidationError) -> Response:
        param, message = _complaint(error)
        return _json(ApiError(400, f"{param}: {message}" if param else message, param=param).body, 400)

    async def http_error(request: Request, error: HTTPException) -> Response:
        if error.__cause__ is not None:  # FastAPI's of a body that Python's JSON refuses by another error than its own
            return _json(ApiError(400, _unreadable(error.__cause__)).body, 400)
        what = _no_such_path(request) if error.status_code in (404, 405) else str(error.detail)
        return _json(ApiError(error.status_code, what).body, error.status_code, error.headers)

    async def unexpected(_: Request, error: Exception) -> Response:
        log.error("unexpected %s", type(error).__name__, exc_info=error)
        return _json(ApiError(500, "an error of the server's", kind="server_error").body, 500)

    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        ApiError: api_error,
        RequestValidationError: invalid,
        HTTPException: http_error,
        Exception: unexpected,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _no_such_path(request: Request) -> str:
    """The answer that clients of other parts of OpenAI's API read, such as those of /v1/embeddings."""
    answered = (one for one in request.app.routes if isinstance(one, APIRoute) and one.include_in_schema)
    known = ", ".join(f"{method} {one.path}" for one in answered for method in sorted(one.methods or ()))
    return f"this server has no {request.method} {request.url.path[:100]}; it answers {known}"


def _unreadable(cause: BaseException) -> str:
    """What is wrong with a body that cannot be read as JSON."""
    if isinstance(cause, UnicodeDecodeError):
        return f"the body is not UTF-8: its byte {cause.start} is of no character; send JSON in UTF-8"
    if isinstance(cause, RecursionError):
        return "the body's lists and objects are nested too deeply; no field of this server's is so deep"
    if isinstance(cause, ValueError):  # Python's limit on digits
        return f"the body has a whole number of more than {sys.get_int_max_str_digits()} digits; give a smaller one"
    return "the body cannot be read as JSON"


def _complaint(error: RequestValidationError) -> tuple[str | None, str]:
    """The field, as a path, and what is wrong with it. Of several forms the one that fits furthest."""
    found = []
    for one in error.errors():
        if one["type"] == "json_invalid":
            return None, "the body is not valid JSON"
        found.append((_path(one["loc"], error.body, one["type"] == "missing"), one))
    if not error.body and all(one["type"] == "missing" and len(one["loc"]) == 1 for _, one in found):
        return None, "the body is empty; send a JSON object, with the fields of this call"
    path, one = max(found, key=lambda pair: (len(pair[0]), not pair[1]["type"].endswith("_type")))
    message = "this server has no such field" if one["type"] == "extra_forbidden" else one["msg"]
    if not path:
        message = "the body is no JSON object; send one, with the fields of this call"
    shown = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    return shown or None, message


def _path(place: Sequence[int | str], body: Any, is_missing: bool) -> list[int | str]:
    """The part of pydantic's place that the client wrote: without "body" and the names of a field's possible forms."""
    path: list[int | str] = []
    for number, part in enumerate(place[1:], 2):
        inside: Any = body if isinstance(body, dict) else dict(enumerate(body)) if isinstance(body, list) else {}
        if part in inside or (is_missing and number == len(place)):
            path.append(part)
            body = inside.get(part)
    return path


def _version() -> str:
    return version("megalith")
