"""The protocol: figures as they come, within a budget, whatever becomes of an entry; every command runs on a CPU."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import decoding, entries, protocol, unmeasured, worker
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.protocol import Entry, Phase, Where
from benchmarks.result import ROOT, Number, Row, read
from tests.support.forkserver import context

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
    Entry("failing", failing), Entry("dying", dying), Entry("hanging", hanging, most_s=3.0),
    Entry("long", fine, least_s=10_000.0), Entry("fine", fine),
]  # fmt: skip


def phases(where: Where) -> list[Phase]:
    """Of this file as a module of entries: `benchmarks.gpu.tested` in the worker."""
    return [Phase(AWKWARD)]


class Forked:
    """A worker that is forked from what has imported torch: as much of a Popen as the protocol uses.

    prepare  what it changes of its process before it works
    """

    def __init__(self, line: list[str], prepare: Callable[[], None]) -> None:
        asked, ask = Pipe(duplex=False)
        answer, answers = Pipe(duplex=False)
        self._process = context().Process(target=_work, args=(line[3:], asked, answers, prepare))
        self._process.start()
        self.pid = self._process.pid
        self.stdin, self.stdout = os.fdopen(os.dup(ask.fileno()), "w"), os.fdopen(os.dup(answer.fileno()))
        for end in (asked, ask, answer, answers):
            end.close()

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode


def _work(argv: list[str], asked: Connection, answers: Connection, prepare: Callable[[], None]) -> None:
    os.setsid()
    for number, end in enumerate((asked, answers)):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin = os.fdopen(0)
    prepare()
    worker.main(argv)


def _fork_workers(monkeypatch: pytest.MonkeyPatch, prepare: Callable[[], None]) -> None:
    started = subprocess.Popen

    def popen(line: list[str], **options: Any) -> Any:
        return Forked(line, prepare) if "benchmarks.gpu.worker" in line else started(line, **options)

    monkeypatch.setattr(protocol.subprocess, "Popen", popen)


def _has_entries_above() -> None:
    worker.phases = lambda command, where: phases(where)


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of the entries above, in this process and in its workers."""
    monkeypatch.setattr(entries, "phases", lambda command, where: phases(where))
    monkeypatch.setattr(entries, "targets_of", lambda command: lambda figures: [])
    _fork_workers(monkeypatch, _has_entries_above)


@pytest.mark.usefixtures("tested")
def test_an_entry_that_fails_dies_or_hangs_takes_no_other_with_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert protocol.main("a", tmp_path, CPU, protocol.Part()) == 1
    result = read(tmp_path / "gpu_a.json")
    found = [(row.case["entry"], row.numbers["value"].value) for row in result.figures]
    assert found == [("failing", 3.0), ("dying", 4.0), ("hanging", 5.0), ("fine", 1.0), ("fine", 2.0)]
    assert result.notes[0] == "failing: ValueError: no such thing at all"
    assert result.notes[1] == "dying: its process ended with exit code 7"
    assert result.notes[2].startswith("hanging was stopped after 3 s")
    assert result.notes[3].startswith("long is left out")
    assert len(result.notes) == 4
    said = capfd.readouterr().out
    assert "FAILED failing: ValueError" in said
    assert said.index("number: value 3") < said.index("FAILED failing")


@pytest.mark.usefixtures("tested")
def test_the_budget_holds_for_all_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_s = chain([300.0, 300.0, 3.0], repeat(0.0))  # before the entry and its process, for the entry, and then
    monkeypatch.setattr(protocol.Record, "left_s", property(lambda record: next(left_s)))
    record = protocol.Record("a", CPU, protocol.Part(), tmp_path, lambda figures: [])
    protocol.run_phase(Phase([Entry("hanging", hanging, most_s=1000.0), Entry("fine", fine)]), record)
    assert any("hanging was stopped after 3 s" in note for note in record.notes)
    assert any("fine is left out" in note for note in record.notes)
    assert record.left_out == ["hanging", "fine"]  # which the command names for another call


@pytest.mark.usefixtures("tested")
def test_only_some_entries_in_the_minutes_that_are_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert protocol.main("a", tmp_path, CPU, protocol.Part(2.0, ("fine", "dyin"))) == 1
    result = read(tmp_path / "gpu_a.json")
    assert [row.case["entry"] for row in result.figures] == ["dying", "fine", "fine"]
    assert result.command.endswith("--device cpu --quick --minutes 2 --only fine dyin")
    assert protocol.main("a", tmp_path, CPU, protocol.Part(only=("finest",))) == 2
    assert "--only finest: no entry has that in its name; they are: failing, dying" in capsys.readouterr().err
    assert protocol.Part(2.0).budget_s == 105


def test_entries_of_a_command_have_names_of_their_own() -> None:
    for command in entries.MODULES:
        for where in (CPU, Where("cuda", quick=False)):
            found = entries.phases(command, where)
            names = [entry.name for phase in found for entry in phase.entries]
            assert len(set(names)) == len(names)
            assert all(phase.workers == 1 for phase in found) or command == "a"


def test_what_no_gpu_has_measured_comes_in_the_order_of_its_worth() -> None:
    """All of it once; the tests first, and kernels with fresh rates last."""
    (phase,) = entries.phases("d", Where("cuda", quick=False))
    names = [entry.name for entry in phase.entries]
    assert names[0] == "tests of a GPU"
    assert phase.entries[0].most_s < 300  # of ten minutes
    wanted = ("few rows of quantized weights", "llama_7b, int4", "Evoformer block, 256 residues", "Gemini", "Stable")
    assert [any(name.startswith(one) for name in names) for one in wanted] == [True] * len(wanted)
    oldest = [f"{name}, speed" for name in unmeasured.oldest_first()]
    assert [name for name in names if name in oldest] == oldest
    assert names[-1] == oldest[-1]


def test_a_decoding_step_s_time_is_told_by_what_its_kernels_do() -> None:
    by_kernel = {
        "_int4_words": (2e-3, 128.0),
        "nvjet_hsh_128x64": (5e-4, 1.0),
        "_decode": (3e-4, 32.0),
        "_rope": (2e-4, 64.0),
        "void at::native::elementwise_kernel": (1e-4, 3.0),
    }
    found = {kind: number.value for kind, number in decoding.spent(by_kernel, 4e-3).items()}
    assert found == pytest.approx({"products": 2.5, "attention": 0.3, "others": 0.3, "idle": 0.9})
    assert decoding.longest(by_kernel).startswith(
        "_int4_words 2000 us, 128 runs; nvjet_hsh_128x64 500 us, 1 runs; _decode"
    )


def test_where_there_is_no_gpu_one_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("is about a machine without a GPU; runs there")
    assert protocol.main("b", tmp_path, Where("cuda", quick=False), protocol.Part()) == 2
    said = capsys.readouterr().err
    assert said == "error: torch finds no CUDA device; --device cpu --quick shows that the command runs\n"


FEW = {
    "a": ("tests of a GPU",),
    "b": ("roofline", "softmax, speed", "llama_7b, bf16", "bloom_7b1, int4"),
    "c": (
        *("pretrain gpt3_1_3b, our kernels", "Gemini", "Evoformer block, 16 residues", "Evoformer block, the longest"),
        "Stable Diffusion",
    ),
    "d": (
        *("roofline", "block sizes of few rows", "few rows of quantized weights", "activations elsewhere"),
        *("Gemini on a drive", "GPT-2 by core.auto"),
    ),
}
"""One entry of each kind: families of kernels are run one by one in tests/kernels and in the benchmark `kernels`."""


def _starts_nothing() -> None:
    """Runs in processes of their own are runs here; the quick benchmarks `gemini` and `dreambooth` start theirs."""
    from benchmarks import dreambooth_run
    from benchmarks.gpu import pictures, training
    from benchmarks.offload import Ran, Turn, take_turn

    def attempt(turn: Turn, python: Path) -> Ran:
        return take_turn(turn)

    def watched(command: list[str], figures: Path) -> dict[str, Any]:
        assert dreambooth_run.main([str(figures), *command[1:]]) == 0
        return json.loads(figures.read_text())

    training.attempt, pictures.watched = attempt, watched


@pytest.mark.parametrize("command", FEW)
def test_every_command_runs_on_a_cpu(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """b by a worker that starts anew, with Triton's interpreter."""
    if command != "b":
        _fork_workers(monkeypatch, _starts_nothing)
    of_command = entries.phases(command, CPU)
    few = [Phase([entry for entry in phase.entries if entry.name in FEW[command]]) for phase in of_command]
    monkeypatch.setattr(entries, "phases", lambda command, where: few)
    assert main([command, "--out", str(tmp_path), "--device", "cpu", "--quick"]) == 0
    assert _entries_seen(command, tmp_path) == {*FEW[command]}


@pytest.mark.soak
@pytest.mark.parametrize("command", FEW)
def test_every_entry_of_every_command_runs_on_a_cpu(command: str, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "benchmarks.gpu", command, "--out", str(tmp_path), "--device", "cpu", "--quick"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert _entries_seen(command, tmp_path) == {e.name for p in entries.phases(command, CPU) for e in p.entries}


def _entries_seen(command: str, out: Path) -> set[str]:
    """Names of the entries that gave a figure; none was stopped or left out."""
    result = read(out / f"gpu_{command}.json")
    assert [note for note in result.notes if "stopped" in note or "left out" in note] == []
    written = json.loads((out / f"gpu_{command}.json").read_text())
    assert written["command"].startswith(f"python -m benchmarks.gpu {command} --out PATH --device cpu --quick")
    return {str(row.case["entry"]) for row in result.figures}


def test_options_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, said in (
        (["a"], "a needs --out FOLDER"),
        (["a", "--out", "x", "--device", "cpu"], "give --quick with it"),
        (["e", "--out", "x"], "invalid choice: 'e'"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
