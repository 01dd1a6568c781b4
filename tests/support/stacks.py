"""Where processes stand when their time is over: a hang is a failure that says where.

Python prints the stacks of a process that gets SIGABRT, of all its threads, to its stderr, where `faulthandler` is
enabled (PYTHONFAULTHANDLER=1, or pytest). So what hangs is ended by that signal, ranks before those who launched them.
"""

import contextlib
import os
import signal
import time
from pathlib import Path


def end_with_stacks(process: int, wait_s: float = 10.0) -> None:
    """End a process and all that it has started; each prints its stacks.

    One after the other: they may share a stderr, where `faulthandler` writes word by word, so that two at once mix
    their words. All are stopped before, so that none acts on another's end.
    """
    family = [*reversed(descendants(process)), process]
    for member in family:
        _send(signal.SIGSTOP, member)
    for member in family:
        _send(signal.SIGABRT, member)
        _send(signal.SIGCONT, member)
        _wait(member, wait_s)
        _send(signal.SIGKILL, member)
    for member in family:
        _wait(member, wait_s)


def _send(number: signal.Signals, process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _wait(process: int, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while runs(process) and time.monotonic() < deadline:
        time.sleep(0.02)


def descendants(process: int) -> list[int]:
    """The processes that this one has started, those that they have started, and so on; parents first."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            number, parent = int(path.parent.name), int(_fields(path)[1])
            children.setdefault(parent, []).append(number)
    found = [process]
    for member in found:
        found += children.get(member, [])
    return found[1:]


def runs(process: int) -> bool:
    """Whether it is there and has not ended yet (a zombie has)."""
    try:
        return _fields(Path(f"/proc/{process}/stat"))[0] not in "ZX"
    except OSError:
        return False


def _fields(stat: Path) -> list[str]:
    """State, parent, … of a process; its name before them may hold anything."""
    return stat.read_text().rpartition(")")[2].split()
