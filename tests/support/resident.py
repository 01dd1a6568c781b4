"""Resident memory of a process on Linux: how far it rises while something runs, measured in a child of its own."""

from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.forkserver import context


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a new process, whose memory nobody has used before."""
    receiving, sending = context().Pipe(duplex=False)
    child = context().Process(target=_send, args=(function, arguments, sending))
    child.start()
    sending.close()
    try:
        return receiving.recv()
    finally:
        child.join()


def _send(function: Callable[..., Any], arguments: tuple[Any, ...], sending: Connection) -> None:
    sending.send(function(*arguments))


def rise_of(run: Callable[[], Any]) -> tuple[int, Any]:
    """The most resident bytes while it runs, beyond those before it; and what it returns."""
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # from here on the peak counts
    returned = run()
    return _resident("VmHWM") - before, returned


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
