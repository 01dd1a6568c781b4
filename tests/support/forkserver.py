"""The process that test processes are forked from: it has imported what takes long, and has no threads."""

import gc
import importlib
import logging
import multiprocessing
import os
import select
import sys
import traceback
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext

PRELOADED = ["tests.support.preloaded"]
"""Modules; tests that hand cases to ranks add their own."""


def context() -> ForkServerContext:
    """For `context().Process(...)`; the server starts with the first process and ends with the session."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    return server


_servers_parent: int | None = None


def fork_server() -> None:
    """Make the server a fork of this process, which has imported the tests already, as an interpreter would once more.

    To be called before the first test, while nothing computes. What else is to be there it imports when it is needed.
    A fork of a process that has a server needs one of its own, since it may not wait for another's child.
    """
    global _servers_parent
    if _servers_parent not in (None, os.getpid()):
        forkserver._forkserver.__init__()
    _servers_parent = os.getpid()
    resource_tracker.ensure_running()
    spawn = util.spawnv_passfds

    def fork(path: bytes, arguments: Sequence[str], passed: Sequence[int]) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            util.spawnv_passfds = spawn
            _serve(*passed)
        except Exception:
            traceback.print_exc()  # whoever asked it only hears that it is gone
            raise
        finally:
            os._exit(1)

    util.spawnv_passfds = fork
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn


def _serve(listener: int, alive: int) -> None:
    """Be the server: once somebody connects to `listener`, until nobody holds the other end of the pipe `alive`."""
    pipe = os.fstat(alive).st_ino
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if number != alive and os.fstat(number).st_ino == pipe:
                os.close(number)  # this process's own copy of the other end
        except OSError:  # the listing's own
            continue
    # pytest has its own streams here, which go elsewhere than to 1 and 2.
    sys.stdin, sys.stdout = open(os.devnull), open(1, "w", closefd=False)  # noqa: SIM115
    logging.root.handlers.clear()
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115  as Python's own
    asked, _, _ = select.select([listener, alive], [], [])
    if alive in asked:
        os._exit(0)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    forkserver.main(listener, alive, [])
