"""Running a search tool: whether it is there, what it says, and what it says when it fails."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from core.config import UserError

# SIGKILL and SIGTERM: of the process between us and the tool, and of the tool as that process and a shell tell of it.
_KILLED = (-9, -15, 137, 143)
_STAGE_KILLED = re.compile(r"^(.*: line \d+: +\d+ )?(Killed|Terminated)\b", re.MULTILINE)  # a shell's word for it
# What stands between us and a tool, as a process of its own. Its guard, another one, ends the tool, and all that the
# tool began, as soon as nobody holds the other end of its standard input any more, which the system lets go of however
# we end, or as soon as it is gone itself: Ray kills the children of a worker, of which it is one, but not theirs.
# The guard is there before the tool, which joins its process group.
_LEASH = """
import os, select, signal, subprocess, sys

alive, held = os.pipe()
guard = os.fork()
if not guard:
    os.setpgid(0, 0)
    for file in (1, 2, held):
        os.close(file)
    select.select([0, alive], [], [])
    os.killpg(0, signal.SIGKILL)
os.setpgid(guard, guard)
tool = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, process_group=guard)
try:
    code = tool.wait()
except BaseException:
    os.killpg(guard, signal.SIGKILL)
    raise
os.kill(guard, signal.SIGKILL)
os.waitpid(guard, 0)
sys.exit(code if code >= 0 else 128 - code)
"""


class Killed(UserError):
    """A search was ended from outside, by a signal or for want of memory: begun again, it may well succeed."""


def found(program: str, install: str) -> str:
    """The program.  Raises UserError, with how to install it, where it is not on the PATH."""
    if shutil.which(program) is None:
        raise UserError(f"there is no {program} on the PATH; {install}")
    return program


def said_by(arguments: Sequence[str]) -> list[str]:
    """The lines that a command prints, whether or not it likes its options."""
    done = subprocess.run(
        arguments, capture_output=True, text=True, errors="replace", check=False, stdin=subprocess.DEVNULL
    )
    return (done.stdout + done.stderr).splitlines()


def run(arguments: Sequence[str | Path], on: object) -> None:
    """Run a search to its end.  Raises UserError with the last that it said, where it fails; Killed where it was ended.

    The search, and what it began itself (stages of mmseqs), ends when this process does, however that ends.
    """
    begun = [sys.executable, "-I", "-S", "-c", _LEASH, *arguments]
    ours, held = os.pipe()
    try:
        done = subprocess.run(begun, capture_output=True, text=True, errors="replace", check=False, stdin=ours)
    finally:
        os.close(ours)
        os.close(held)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[-200:]
        kind = Killed if done.returncode in _KILLED or _STAGE_KILLED.search(done.stderr) else UserError
        raise kind(f"{arguments[0]} failed on {on} (exit code {done.returncode}): {said}")
