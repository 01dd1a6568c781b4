"""The process that test processes are forked from: it has imported what takes long, and has no threads."""

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOADED = ["tests.support.preloaded"]
"""Modules; tests that hand cases to ranks add their own."""


def context() -> ForkServerContext:
    """For `context().Process(...)`; the server starts with the first process and ends with the session."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    return server
