"""Running a search tool: whether it is there, what it says, and what it says when it fails."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from core.config import UserError

# The process becomes the tool, after it has asked the kernel to be killed when the thread that began it ends, which
# waits for it (prctl(2), PR_SET_PDEATHSIG = 1, SIGKILL = 9). Whose parent has ended before does not begin.
_ENDS_WITH_ITS_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)


def found(program: str, install: str) -> str:
    """The program.  Raises UserError, with how to install it, where it is not on the PATH."""
    if shutil.which(program) is None:
        raise UserError(f"there is no {program} on the PATH; {install}")
    return program


def said_by(arguments: Sequence[str]) -> list[str]:
    """The lines that a command prints, whether or not it likes its options."""
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    return (done.stdout + done.stderr).splitlines()


def run(arguments: Sequence[str | Path], on: object) -> None:
    """Run a search to its end.  Raises UserError with the last that it said, where it fails.

    On Linux the search ends when this process does, however that ends. What the search itself began (stages of mmseqs)
    ends with its next step.
    """
    begun = [*_leash(), *arguments]
    done = subprocess.run(begun, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[-200:]
        raise UserError(f"{arguments[0]} failed on {on} (exit code {done.returncode}): {said}")


def _leash() -> list[str]:
    """What a command is put behind, so that it does not outlive us."""
    if sys.platform != "linux":
        return []
    return [sys.executable, "-I", "-S", "-c", _ENDS_WITH_ITS_PARENT, str(os.getpid())]
