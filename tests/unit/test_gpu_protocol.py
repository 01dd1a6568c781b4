"""The protocol: figures as they come, within a budget, whatever becomes of an entry; every command runs on a CPU."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path

import pytest

from benchmarks.gpu import entries, protocol
from benchmarks.gpu.protocol import Entry, Phase, Where
from benchmarks.result import ROOT, Number, Row, read

CPU = Where("cpu", quick=True)


def figure(number: float) -> Row:
    return Row({"what": "number"}, {"value": Number(number, "")})


def fine(where: Where) -> Iterator[Row]:
    yield figure(1.0)
    yield figure(2.0)


def failing(where: Where) -> Iterator[Row]:
    yield figure(3.0)
    raise ValueError("no such thing\nat all")


def dying(where: Where) -> Iterator[Row]:
    yield figure(4.0)
    os._exit(7)


def hanging(where: Where) -> Iterator[Row]:
    yield figure(5.0)
    time.sleep(600)


AWKWARD = [
    Entry("failing", failing), Entry("dying", dying), Entry("hanging", hanging, most_s=8.0),
    Entry("long", fine, least_s=10_000.0), Entry("fine", fine),
]  # fmt: skip


def phases(where: Where) -> list[Phase]:
    """Of this file as a module of entries: `benchmarks.gpu.tested` in the worker."""
    return [Phase(AWKWARD)]


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of the entries above, in this process and in its workers."""
    monkeypatch.setattr(entries, "phases", lambda command, where: phases(where))
    monkeypatch.setattr(entries, "targets_of", lambda command: lambda figures: [])
    program = (
        "import sys; from benchmarks.gpu import entries; from tests.unit import test_gpu_protocol as tested; "
        "entries.phases = lambda command, where: tested.phases(where); "
        "from benchmarks.gpu import worker; worker.main(sys.argv[1:])"
    )
    started = subprocess.Popen

    def popen(line: list[str], **options):
        return started([sys.executable, "-c", program, *line[3:]], **options)

    monkeypatch.setattr(protocol.subprocess, "Popen", popen)


@pytest.mark.usefixtures("tested")
def test_an_entry_that_fails_dies_or_hangs_takes_no_other_with_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert protocol.main("a", tmp_path, CPU) == 1
    result = read(tmp_path / "gpu_a.json")
    found = [(row.case["entry"], row.numbers["value"].value) for row in result.figures]
    assert found == [("failing", 3.0), ("dying", 4.0), ("hanging", 5.0), ("fine", 1.0), ("fine", 2.0)]
    assert result.notes[0] == "failing: ValueError: no such thing at all"
    assert result.notes[1] == "dying: its process ended with exit code 7"
    assert result.notes[2].startswith("hanging was stopped after 8 s")
    assert result.notes[3].startswith("long is left out")
    assert len(result.notes) == 4
    said = capfd.readouterr().out
    assert "FAILED failing: ValueError" in said
    assert said.index("number: value 3") < said.index("FAILED failing")


@pytest.mark.usefixtures("tested")
def test_the_budget_holds_for_all_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_s = chain([300.0, 300.0, 5.0], repeat(0.0))  # before the entry and its process, for the entry, and then
    monkeypatch.setattr(protocol.Record, "left_s", property(lambda record: next(left_s)))
    record = protocol.Record("a", CPU, tmp_path, lambda figures: [])
    protocol.run_phase(Phase([Entry("hanging", hanging, most_s=1000.0), Entry("fine", fine)]), record)
    assert any("hanging was stopped after 5 s" in note for note in record.notes)
    assert any("fine is left out" in note for note in record.notes)


def test_entries_of_a_command_have_names_of_their_own() -> None:
    for command in entries.MODULES:
        for where in (CPU, Where("cuda", quick=False)):
            found = entries.phases(command, where)
            names = [entry.name for phase in found for entry in phase.entries]
            assert len(set(names)) == len(names)
            assert all(phase.workers == 1 for phase in found) or command == "a"


def test_where_there_is_no_gpu_one_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("is about a machine without a GPU; runs there")
    assert protocol.main("b", tmp_path, Where("cuda", quick=False)) == 2
    said = capsys.readouterr().err
    assert said == "error: torch finds no CUDA device; --device cpu --quick shows that the command runs\n"


@pytest.mark.parametrize("command", ["a", "b", "c"])
def test_every_command_runs_on_a_cpu(command: str, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "benchmarks.gpu", command, "--out", str(tmp_path), "--device", "cpu", "--quick"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = read(tmp_path / f"gpu_{command}.json")
    assert [note for note in result.notes if "stopped" in note or "left out" in note] == []
    seen = {str(row.case["entry"]) for row in result.figures}
    assert seen == {entry.name for phase in entries.phases(command, CPU) for entry in phase.entries}
    assert json.loads((tmp_path / f"gpu_{command}.json").read_text())["command"].startswith("python -m benchmarks.gpu")


def test_options_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.gpu.__main__ import main

    for argv, said in (
        (["a"], "a needs --out FOLDER"),
        (["a", "--out", "x", "--device", "cpu"], "give --quick with it"),
        (["d", "--out", "x"], "invalid choice: 'd'"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
