"""The folder of a run: one run at a time, and nothing is removed that was not made by who removes it."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

import apps.fold.demo.__main__ as fold_demo
from apps.llm import demo as llm_demo
from apps.llm.recipes import RECIPES
from core.config import UserError
from core.run_folder import hold, made_anew
from core.runtime import start
from core.train import open_run
from tests.support.small import config_of


def holding(folder: Path) -> int:
    """A child that holds the folder until it is killed."""
    child = os.fork()
    if child == 0:
        with hold(folder):
            (folder / "held").touch()
            signal.pause()
    while not (folder / "held").exists():
        pass
    return child


def test_a_folder_is_one_runs_until_its_process_ends(tmp_path: Path) -> None:
    child = holding(tmp_path / "run")
    try:
        line = rf"run is in use by process {child} on .*, a run that began \d{{4}}-\d\d-\d\d .*; wait .*--out"
        for _ in range(2):
            with pytest.raises(UserError, match=line), hold(tmp_path / "run"):
                pass
        with (
            start("cpu") as runtime,
            pytest.raises(UserError, match=line),
            open_run(config_of(tmp_path / "run"), runtime),
        ):
            pass
        assert not (tmp_path / "run" / "config.json").exists()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with hold(tmp_path / "run"):
        holder = json.loads((tmp_path / "run" / ".lock").read_text())
    assert holder["process"] == os.getpid()
    with hold(tmp_path / "run"):
        pass


def make(folder: Path) -> None:
    with made_anew(folder):
        (folder / "hf").mkdir(parents=True)
        (folder / "hf" / "weights").write_text("1")
        (folder / "log").write_text("2")


def make_half(folder: Path) -> None:
    with made_anew(folder):
        folder.mkdir()
        (folder / "half").touch()
        raise KeyboardInterrupt


def test_what_was_made_is_made_anew(tmp_path: Path) -> None:
    make(tmp_path / "demo")
    (tmp_path / "demo" / "log").unlink()  # nothing is lost by what is there no more
    make(tmp_path / "demo")
    assert (tmp_path / "demo" / "log").read_text() == "2"
    with pytest.raises(KeyboardInterrupt):
        make_half(tmp_path / "demo")
    make(tmp_path / "demo")
    assert not (tmp_path / "demo" / "half").exists()


def contents(folder: Path) -> dict[Path, tuple[int, ...]]:
    """Without the time of the last reading, which is no change."""
    stats = {path: path.lstat() for path in folder.rglob("*")}
    return {path: (s.st_ino, s.st_mode, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for path, s in stats.items()}


def changed(folder: Path) -> None:
    (folder / "log").write_text("more of it")


TOUCHED = {
    "a file beside": (lambda folder: (folder / "thesis.tex").write_text("years of work"), "thesis.tex came there"),
    "a file inside": (lambda folder: (folder / "hf" / "mine").touch(), "hf/mine came there"),
    "a link": (lambda folder: (folder / "data").symlink_to("/"), "data came there"),
    "another content": (changed, "log came there or was changed"),
    "a run that went on": (lambda folder: [changed(folder), (folder / "new").touch()], "log and 1 more"),
    "a damaged note": (lambda folder: (folder / ".made").write_text("{}"), "did not leave there whole"),
    "no note": (lambda folder: (folder / ".made").unlink(), "did not leave there whole"),
}


@pytest.mark.parametrize("name", TOUCHED)
def test_what_others_made_is_never_removed(tmp_path: Path, name: str) -> None:
    touch, said = TOUCHED[name]
    make(tmp_path / "demo")
    touch(tmp_path / "demo")
    before = contents(tmp_path / "demo")
    with pytest.raises(UserError, match=rf"{said}.*; move it away, or give another --out"):
        make(tmp_path / "demo")
    assert contents(tmp_path / "demo") == before


def test_a_run_that_goes_on_in_the_folder_is_not_removed(tmp_path: Path) -> None:
    make(tmp_path / "demo")
    child = holding(tmp_path / "demo")
    try:
        (tmp_path / "demo" / "held").unlink()
        with pytest.raises(UserError, match="is in use by process"):
            make(tmp_path / "demo")
        assert (tmp_path / "demo" / "log").exists()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_the_demo_is_not_where_its_recipe_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make demo` keeps runs/demo, which the README serves from, and removes no run of `llm pretrain --recipe demo`."""
    assert Path("runs/demo") == llm_demo.OUT
    assert all(llm_demo.OUT not in (recipe().out, *recipe().out.parents) for recipe in RECIPES.values())
    monkeypatch.chdir(tmp_path)
    mine = Path("runs/demo/precious.txt")
    mine.parent.mkdir(parents=True)
    mine.write_text("years of work")
    monkeypatch.setattr(llm_demo, "pretrain", lambda options: pytest.fail("the demo began"))
    with pytest.raises(UserError, match="runs/demo holds something"):
        llm_demo.main([])
    assert mine.exists()


@pytest.mark.parametrize("spelled", [["--out", "x"], ["--out=x"], ["out=x"], []])
def test_the_demo_reads_where_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelled: list[str]) -> None:
    """Trial, run, summary and what is shown lie in --out."""
    monkeypatch.chdir(tmp_path)
    out = Path("x") if spelled else llm_demo.OUT
    runs, shown = [], []

    def pretrain(options: list[str]) -> int:
        folder = llm_demo.parse(RECIPES, options, "llm pretrain", default="demo").out
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json").write_text(json.dumps({"tokens_per_s": 1e6}))
        runs.append(folder)
        return 0

    monkeypatch.setattr(llm_demo, "pretrain", pretrain)
    monkeypatch.setattr(llm_demo, "heldout_bytes", lambda data: b"text")
    monkeypatch.setattr(llm_demo, "show", lambda summary, folder: shown.append((summary["tokens_per_s"], folder)))
    for _ in range(2):
        runs.clear()
        assert llm_demo.main(spelled) == 0
        assert runs == [out / "trial", out]
        assert shown.pop() == (1e6, out)
    assert {path.name for path in out.iterdir()} == {"summary.json", ".made"}
    assert {path.parts[0] for path in Path().iterdir()} == {out.parts[0]}


@pytest.mark.parametrize("options", [["--no-hf"], ["--stop-after", "3"], ["--data.heldout-fraction", "0"]])
def test_the_demo_refuses_what_it_could_not_show_after_training(options: list[str]) -> None:
    with pytest.raises(UserError, match="leave out --no-hf, --stop-after"):
        llm_demo.main(options)


def test_the_demo_of_folding_keeps_to_its_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "fold_tiny").mkdir(parents=True)
    trained, shown = [], []

    def train(options: list[str]) -> int:
        config = fold_demo.parse(fold_demo.RECIPES, options, "fold train", default="tiny")
        config.out.mkdir(parents=True)
        trained.append((config.out, config.model))
        return 0

    monkeypatch.setattr(fold_demo, "train", train)
    monkeypatch.setattr(fold_demo, "show", lambda *runs: shown.append(runs) or 0)
    monkeypatch.setattr(fold_demo, "show_dimers", lambda run: shown.append((run,)) or 0)
    assert fold_demo.main(["--out", "x", "--steps", "3"]) == 0
    first, second, third = (Path("x") / name for name in ("tiny", "tiny_confidence", "tiny_complexes"))
    assert [out for out, _ in trained] == [first, second, third]
    assert [model for _, model in trained[1:]] == [str(first / "model"), "demo_multimer"]
    assert shown == [(second, first), (third,)]
    assert (tmp_path / "runs" / "fold_tiny").exists()
    shutil.rmtree("x/tiny_confidence")
    (Path("x") / "mine").touch()
    with pytest.raises(UserError, match="mine came there"):
        fold_demo.main(["--out", "x"])
    assert first.exists()
