"""A full disk is told with the name of what could not be written, whatever is written."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from apps.llm.tokenizer import byte_tokenizer
from core.config import in_one_line
from core.metrics import RunLog, plot_loss
from core.run_folder import hold
from tests.support.full_disk import limited_files


def lock(folder: Path) -> None:
    with hold(folder / "run"):
        pass


def log(folder: Path) -> None:
    with RunLog(folder, active=True, tensorboard=False) as run:
        run.write({"step": 1, "loss": 1.0})


def summarise(folder: Path) -> None:
    with RunLog(folder, active=True, tensorboard=False) as run:
        run.summarise({"step": 1})


def plot(folder: Path) -> None:
    plot_loss(folder.parent / "rows.jsonl", folder / "loss.png")


WRITERS: dict[Callable[[Path], None], str] = {
    lock: "run/.lock",
    log: "metrics.jsonl",
    summarise: ".summary.json",
    plot: "loss.png",
    lambda folder: byte_tokenizer().save(folder / "tokenizer"): "tokenizer",
}


@pytest.mark.parametrize("write", WRITERS)
def test_what_did_not_find_room_is_named(write: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")
    (folder := tmp_path / "full").mkdir()
    with limited_files(0), pytest.raises(OSError, match=r"\w") as caught:
        write(folder)
    said = in_one_line(caught.value)
    assert said is not None
    assert said.startswith(f"{folder}/{WRITERS[write]}")
    assert said.endswith("File too large; free space, or choose another path")
