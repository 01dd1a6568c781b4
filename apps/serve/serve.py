"""`serve --model DIR …`: load models, listen, and leave in order when told to."""

import asyncio
import logging
import signal
import socket
import sys
from functools import partial

import torch
import uvicorn

from apps.serve.config import ServeConfig
from apps.serve.loop import EngineLoop
from apps.serve.metrics import Metrics
from apps.serve.model import ModelFolder, build_engines, find_model
from apps.serve.server import Server, build_app
from core.config import UserError, in_words, parse
from core.mesh import MeshConfig
from core.quant import stored_bytes
from core.runtime import launch, launched, start
from core.web.key import read_key
from core.web.listen import Listener, address_of, bind, config_of, not_ours

log = logging.getLogger("serve")


def main(argv: list[str]) -> int:
    config = parse({"default": ServeConfig}, argv, "megalith serve", default="default")
    sources = _sources(config)
    read_key(config.api_key_file)
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


def uvicorn_config(server: Server) -> uvicorn.Config:
    return config_of(build_app(server), host=server.config.host, port=server.config.port)


async def listen(server: Server, listening: socket.socket) -> int:
    """Serve at a bound socket until SIGTERM or SIGINT, or until an engine has failed, then finish what is under way.

    Returns the exit code: 1 where an engine has failed, so that whoever started the server starts it again. Raises
    UserError where nothing can listen there.
    """
    listener = Listener(uvicorn_config(server))
    here, failed = asyncio.get_running_loop(), asyncio.Event()
    for engine_loop in server.loops.values():
        engine_loop.on_failure = partial(here.call_soon_threadsafe, failed.set)
    serving = await listener.until_stopped(listening, partial(_announce, server, listener), failed)
    if not listener.started:
        await server.drain()  # lets the other ranks go
        try:
            await serving
        except OSError as error:
            raise not_ours(server.config.host, server.config.port, error) from None
        return 1
    log.info("finishing %d requests", server.num_open)
    await server.drain()
    listener.should_exit = True
    await serving
    return 0 if server.failure is None else 1


def _announce(server: Server, listener: Listener) -> None:
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
    address = address_of(server.config.host, listener.port)
    print(f"serving {', '.join(server.loops)} at {address}/  (API: /v1)", flush=True)
