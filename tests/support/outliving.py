"""Ranks that would go on for ever: `python -m tests.support.outliving FOLDER` launches two, each notes itself there."""

import os
import signal
import sys
import time
from pathlib import Path


def main(folder: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / os.environ["RANK"]).touch()
    time.sleep(600)


def alive(word: str) -> list[int]:
    """Processes with a word among their arguments, zombies aside."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words, state = path.read_bytes().decode().split("\0"), path.with_name("stat").read_text()
        except (OSError, UnicodeDecodeError):
            continue
        if word in words and state.rpartition(")")[2].split()[0] != "Z":
            found.append(int(path.parent.name))
    return found


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(Path(sys.argv[1]))
    else:
        from core.runtime import launch

        sys.exit(launch(2, "tests.support.outliving", sys.argv[1:]))
