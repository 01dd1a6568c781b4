"""A record's folder while its predictions are made: each is written when it is there, and only its row stays in memory.

    1. OUT/.NAME.part holds key.json: what the record's predictions depend on
    2. of each prediction its files, prediction_N_…, and when these are whole its row, prediction_N.json; beside them
       later, where it is asked for, the prediction relaxed
    3. when the last is there: ranks in the place of numbers, ranking.json, and the folder gets its name

A run that was stopped goes on with the predictions whose rows are there, if it has the same key.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.files import replace_file

Row = dict[str, Any]


def read_object(path: Path) -> dict[str, Any] | None:
    """The object of a json file; None where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


_SUFFIXES = {"pdb": ".pdb", "plots": "_plddt.png", "distogram": "_distogram.npz"}
"""of what is written on request, by the names in a key's "files", a file that each prediction has"""


def lacking(done: dict[str, Any], folder: Path, key: dict[str, Any]) -> list[str] | None:
    """Files asked for in key["files"] that a finished folder, whose ranking is `done`, lacks; None: another's folder.

    What it holds beyond that is no matter. Without a word of its files, as once, it has what lies in it.
    """
    stored = done.get("key")
    if not isinstance(stored, dict) or _without_files(stored) != _without_files(key):
        return None
    held = stored.get("files", [name for name, suffix in _SUFFIXES.items() if any(folder.glob(f"rank_1{suffix}"))])
    return [name for name in key["files"] if name not in held]


def _without_files(key: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in key.items() if name != "files"}


class Unfinished:
    """Predictions of one record, numbered from 0.  rows: those that are there, `left` by an earlier run or new.

    Of ranks that share predictions the first one reads and writes, and tells the others the rows: a slower one would
    read files that are no longer there.
    """

    def __init__(self, folder: Path, key: dict[str, Any]):
        self.folder, self.key = folder.with_name(f".{folder.name}.part"), key
        self._named = folder
        self.rows: dict[int, Row] = {}

    def left(self) -> dict[int, Row]:
        """The rows that an earlier run with the same key left."""
        rows: dict[int, Row] = {}
        if (read_object(self.folder / "key.json") or {}).get("key") == self.key:
            for path in self.folder.glob("prediction_*.json"):
                number, row = path.stem.removeprefix("prediction_"), read_object(path)
                if number.isdecimal() and row is not None:
                    rows[int(number)] = row
        return rows

    def write(self, number: int, row: Row, files: Callable[[Path, str], None]) -> None:
        """files(folder, stem) writes the prediction's; `row` is what is kept of it."""
        if not self.rows:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
            replace_file(self.folder / "key.json", json.dumps({"key": self.key}).encode())
        files(self.folder, self.stem(number))
        replace_file(self.folder / f"{self.stem(number)}.json", json.dumps(row).encode())
        self.rows[number] = row

    def finish(self, order: list[int], ranking: dict[str, Any]) -> None:
        """Name the files by their ranks, which `order` gives, and the folder as it is to be called."""
        for rank, number in enumerate(order, 1):
            stem = self.stem(number)
            (self.folder / f"{stem}.json").unlink()
            for path in sorted(self.folder.glob(f"{stem}[._]*")):
                path.rename(self.folder / f"rank_{rank}{path.name.removeprefix(stem)}")
            confidence = self.folder / f"rank_{rank}_confidence.json"
            ranked = {"rank": rank, **(read_object(confidence) or {})}
            replace_file(confidence, json.dumps(ranked, indent=1).encode() + b"\n")
        (self.folder / "key.json").unlink()
        replace_file(self.folder / "ranking.json", json.dumps(ranking, indent=1).encode() + b"\n")
        shutil.rmtree(self._named, ignore_errors=True)
        os.replace(self.folder, self._named)

    def leave(self) -> None:
        """Clean up after a failure: nothing is left but predictions that are whole."""
        if not self.rows:
            shutil.rmtree(self.folder, ignore_errors=True)

    def stem(self, number: int) -> str:
        """What the names of a prediction's files begin with."""
        return f"prediction_{number}"
