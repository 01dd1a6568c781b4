"""`serve --model DIR …`: load models, listen, and leave in order when told to."""

import asyncio
import errno
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import uvicorn

from apps.serve.config import ServeConfig
from apps.serve.loop import EngineLoop
from apps.serve.metrics import Metrics
from apps.serve.model import ModelFolder, build_engines, find_model
from apps.serve.server import Server, build_app, read_key
from apps.serve.wire import Protocol
from core.config import UserError, in_words, parse
from core.mesh import MeshConfig
from core.quant import stored_bytes
from core.runtime import launch, launched, start

log = logging.getLogger("serve")


def main(argv: list[str]) -> int:
    config = parse({"default": ServeConfig}, argv, "megalith serve", default="default")
    sources = _sources(config)
    read_key(config)
    if config.tp > 1 and not launched():
        return launch(config.tp, "apps.serve", argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    return _run(config, sources)


def _sources(config: ServeConfig) -> list[ModelFolder]:
    """The models that are to be served.  Raises UserError before minutes are spent."""
    if not config.model:
        raise UserError(
            "no model is given; megalith serve --model DIR, a Hugging Face folder or a run of megalith llm pretrain"
        )
    sources = [find_model(folder) for folder in config.model]
    names = [source.name for source in sources]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UserError(f"two models are called {twice.pop()}; rename a folder, so that clients can tell them apart")
    if config.tp > 1:
        from core.models.plan import decoder_table  # what it imports, one rank need not wait for

        for source in sources:
            decoder_table(source.config, MeshConfig(tp=config.tp).resolve(config.tp))
    return sources


def _run(config: ServeConfig, sources: list[ModelFolder]) -> int:
    with start(config.device) as runtime, torch.no_grad():
        axis = runtime.mesh(MeshConfig(tp=config.tp))["tp"]
        listening = bind(config.host, config.port) if runtime.leads else None  # refused before minutes are spent
        metrics, device = Metrics(), str(runtime.device)
        engines = build_engines(sources, config.engine, device, axis, config.scheme())
        if not runtime.leads:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # the first rank says when it is over
            for engine in engines.values():
                engine.runner.follow()
            return 0
        for engine in engines.values():
            engine.text.start()
        loops = {name: EngineLoop(name, engine, config.max_queue, metrics) for name, engine in engines.items()}
        assert listening is not None
        return asyncio.run(listen(Server(loops, config, metrics), listening))


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
        raise _not_ours(host, port, error) from None
    return listening


def _not_ours(host: str, port: int, error: OSError) -> UserError:
    if error.errno == errno.EADDRINUSE:
        return UserError(f"port {port} of {host} is in use; give another --port, or 0 for any that is free")
    return UserError(f"cannot listen at port {port} of {host} ({error.strerror}); give another --host or --port")


def uvicorn_config(server: Server) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(server),
        host=server.config.host,
        port=server.config.port,
        log_level="warning",
        access_log=False,
        http=Protocol,
        ws="none",
        timeout_graceful_shutdown=5,
    )


async def listen(server: Server, listening: socket.socket) -> int:
    """Serve at a bound socket until SIGTERM or SIGINT, or until an engine has failed, then finish what is under way.

    Returns the exit code: 1 where an engine has failed, so that whoever started the server starts it again. Raises
    UserError where nothing can listen there.
    """
    listener = Listener(uvicorn_config(server))
    here, stopping = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        here.add_signal_handler(number, stopping.set)
    for engine_loop in server.loops.values():
        engine_loop.on_failure = partial(here.call_soon_threadsafe, stopping.set)
    serving = asyncio.ensure_future(listener.serve(sockets=[listening]))
    while not listener.started and not serving.done():
        await asyncio.sleep(0.01)
    if serving.done():
        await server.drain()  # lets the other ranks go
        try:
            await serving
        except OSError as error:
            raise _not_ours(server.config.host, server.config.port, error) from None
        return 1
    _announce(server, listener)
    stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
    log.info("finishing %d requests", server.num_open)
    await server.drain()
    listener.should_exit = True
    await serving
    return 0 if server.failure is None else 1


def _announce(server: Server, listener: "uvicorn.Server") -> None:
    port = listener.servers[0].sockets[0].getsockname()[1]
    for name, loop in server.loops.items():
        engine = loop.engine
        log.info(
            "%s: weights %s a rank, computed in %s; %d pages of %d tokens, prompt and text up to %d tokens",
            name,
            in_words(stored_bytes(engine.runner.model)),
            str(engine.runner.dtype).removeprefix("torch."),
            engine.pages.num_pages,
            engine.limits.page_size,
            engine.max_length,
        )
    host = server.config.host
    shown = f"[{host}]" if ":" in host else host
    print(f"serving {', '.join(server.loops)} at http://{shown}:{port}/  (API: /v1)", flush=True)


class Listener(uvicorn.Server):
    """uvicorn, but signals are `listen`'s."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
