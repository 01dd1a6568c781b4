"""Running a search tool: whether it is there, what it says, and what it says when it fails."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from core.config import UserError


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
    """Run a search to its end.  Raises UserError with the last that it said, where it fails."""
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[-200:]
        raise UserError(f"{arguments[0]} failed on {on} (exit code {done.returncode}): {said}")
