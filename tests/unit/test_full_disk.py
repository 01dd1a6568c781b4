"""A full disk is told with the name of what could not be written, whatever is written."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from apps.llm.tokenizer import byte_tokenizer
from core.config import in_one_line
from core.files import save_figure
from core.metrics import RunLog, plot_loss
from core.run_folder import hold
from tests.support.full_disk import limited_files

ROOT = Path(__file__).parents[2]


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
    summarise: "summary.json",
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


def test_a_full_disk_leaves_the_older_picture(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")
    png = plot_loss(tmp_path / "rows.jsonl", tmp_path / "loss.png")
    before = png.read_bytes()
    with limited_files(1000), pytest.raises(OSError, match="File too large"):
        plot_loss(tmp_path / "rows.jsonl", png)
    assert png.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "rows.jsonl"]


def test_pictures_are_written_by_one_function() -> None:
    """Which is the one that leaves none half there."""
    code = [path for room in ("core", "apps", "benchmarks") for path in (ROOT / room).rglob("*.py")]
    assert [str(path.relative_to(ROOT)) for path in code if ".savefig(" in path.read_text()] == ["core/files.py"]


def test_a_figure_has_the_format_that_its_name_ends_in(tmp_path: Path) -> None:
    for name, begin in (("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.b", b"\x89PNG"), ("new/a", b"\x89PNG")):
        save_figure(Figure(figsize=(1, 1)), tmp_path / name, 50)
        assert (tmp_path / name).read_bytes().startswith(begin)
