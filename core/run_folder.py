"""The folder of a run: one run at a time writes into it, and what a program replaces there it has made itself.

`hold` locks a folder for as long as a run lasts. The system releases the lock when the process ends, however it ends,
so nothing is left to clean up after a crash; the file `.lock` then only tells who was there.

`made_anew` is for programs that make a folder from scratch each time, such as the demos: what was put there or changed
by anybody else is never removed.
"""

import errno
import fcntl
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from core.config import UserError, in_one_line
from core.files import Damaged, naming, replace_file, signed, unsigned

_LOCK, _MADE = ".lock", ".made"


@contextmanager
def behind_checkpoint(step: int, then: str) -> Iterator[None]:
    """What a finished run writes: where the disk is full, the line says what is saved and how to go on."""
    try:
        yield
    except OSError as error:
        if in_one_line(error) is None:
            raise
        where = "" if error.filename is None else f"{error.filename}: "
        raise UserError(f"{where}{error.strerror}; the checkpoint of step {step} is saved: {then}") from None


@contextmanager
def hold(folder: Path, option: str = "--out") -> Iterator[None]:
    """Keep other runs out of a folder, which is made, for the length of the block.

    option  that the folder was given by

    Raises UserError, naming the other process and when it began, where a run holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _LOCK
    with path.open("ab+", buffering=0) as file:  # so that closing has nothing to write
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{folder} is in use by {_holder(path)}; wait for it, end it, or give another {option}"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):
                raise
            print(f"warning: {folder} lies where files cannot be locked; start no second run there", file=sys.stderr)
        began = time.strftime("%Y-%m-%d %H:%M:%S")
        with naming(path):
            file.truncate(0)
            holder = {"process": os.getpid(), "host": socket.gethostname(), "began": began}
            file.write(json.dumps(holder).encode() + b"\n")
        yield


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
        return f"process {holder['process']} on {holder['host']}, a run that began {holder['began']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another run, which has just begun"


@contextmanager
def made_anew(folder: Path) -> Iterator[None]:
    """Note what the block writes into a folder, however it ends, so that the next one removes it.

    Raises UserError, and removes nothing, where the folder holds files that were not made so or were changed since, or
    where a run holds it.
    """
    _remove_made(folder)
    try:
        yield
    finally:
        if folder.is_dir():
            replace_file(folder / _MADE, signed({"files": _files(folder)}))


def _remove_made(folder: Path) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    what_to_do = "move it away, or give another --out"
    try:
        noted = unsigned((folder / _MADE).read_bytes())["files"]
    except (OSError, Damaged):
        raise UserError(f"{folder} holds something that this program did not leave there whole; {what_to_do}") from None
    there = _files(folder)
    other = sorted(name for name in there if there[name] != noted.get(name))
    if other:
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        raise UserError(f"{folder / other[0]}{more} came there or was changed after this program left; {what_to_do}")
    with hold(folder):
        shutil.rmtree(folder)


def _files(folder: Path) -> dict[str, list[int]]:
    """Path within the folder -> size and time of change, of all files and links but this module's own."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if (path.is_symlink() or not path.is_dir()) and path.parent / path.name not in (folder / _LOCK, folder / _MADE):
            stat = path.lstat()
            found[str(path.relative_to(folder))] = [stat.st_size, stat.st_mtime_ns]
    return found
