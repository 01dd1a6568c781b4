"""Blocks: the default until somebody tuned, then what the folder holds, which processes add to."""

import json
from pathlib import Path

import pytest

from core.kernels import blocks, specs, tune
from core.kernels.operator import forced
from tests.support.device import DEVICE

pytestmark = pytest.mark.usefixtures("device")
KEY, DEFAULT, WINNER = (64, "bf16"), {"BLOCK": 32}, {"BLOCK": 64}


def chosen() -> blocks.Blocks:
    return blocks.choose("kernel", KEY, DEFAULT, [WINNER], run=lambda _: pytest.fail("nothing is tuned without a GPU"))


def test_winners_are_read_and_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_winners", {})
    monkeypatch.setattr(blocks, "_folder", None)
    monkeypatch.setattr(blocks.torch.cuda, "is_available", lambda: False)
    assert chosen() == DEFAULT
    path = tmp_path / "sm_90.json"
    path.write_text(json.dumps({"kernel 64 bf16": WINNER}))
    blocks.autotune(tmp_path)
    assert chosen() == WINNER
    blocks._winners.clear()
    blocks._winners["other"] = DEFAULT
    blocks._keep(path)
    assert json.loads(path.read_text()) == {"kernel 64 bf16": WINNER, "other": DEFAULT}


def test_what_is_shipped_for_a_chip_is_its_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sm_80.json").write_text(json.dumps({"kernel 64 bf16": WINNER}))
    monkeypatch.setattr(blocks, "SHIPPED", tmp_path)
    monkeypatch.setattr(blocks, "_winners", {})
    for chip, expected in (("sm_80", WINNER), ("sm_90", DEFAULT)):
        with blocks.compiling_for(chip):
            assert chosen() == expected


def test_nothing_tunes_but_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU that could time, too: no step and no request waits."""
    monkeypatch.setattr(blocks, "_can_time", lambda: True)
    monkeypatch.setattr(blocks, "_winners", {})
    assert chosen() == DEFAULT


def test_the_command_chooses_and_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_can_time", lambda: True)
    monkeypatch.setattr(blocks, "_winners", {})
    monkeypatch.setattr(blocks, "_folder", None)
    monkeypatch.setattr(blocks, "_fastest", lambda candidates, run: candidates[-1])
    blocks.autotune(tmp_path)
    spec = specs()["softmax"]
    with forced():
        said = list(tune.tune(spec, spec.cases[:1], DEVICE))
    assert said
    kept = json.loads((tmp_path / f"{blocks.chip()}.json").read_text())
    assert kept == blocks.winners()
    assert all(name.startswith("softmax") for name in kept)


def test_the_command_says_where_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["no_such"]) == 2
    assert "no kernel 'no_such'; the kernels are" in capsys.readouterr().err
    if DEVICE == "cpu":
        assert tune.main([]) == 2
        assert capsys.readouterr().err == (
            "error: there is no GPU here, and block sizes are chosen by time; run it on one\n"
        )


def test_a_chip_that_is_compiled_for_is_the_chip() -> None:
    with blocks.compiling_for("gfx942"):
        assert blocks.chip() == "gfx942"


def test_alternatives_change_one_value(monkeypatch: pytest.MonkeyPatch) -> None:
    offered, ran = [], []

    def second(kernel: str, key: tuple, default: blocks.Blocks, others: list[blocks.Blocks], run) -> blocks.Blocks:
        offered.extend([default, *others])
        return others[1]

    monkeypatch.setattr(blocks, "choose", second)
    blocks.tuned("kernel", KEY, {"BLOCK": 32, "num_warps": 4}, ran.append, BLOCK=(16, 32), num_warps=(4, 8))
    assert offered == [{"BLOCK": b, "num_warps": w} for b, w in ((32, 4), (16, 4), (32, 8))]
    assert ran == [{"BLOCK": 32, "num_warps": 8}]


def test_tuning_ends_in_time_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that a candidate takes six of the ten seconds of: two are timed, and never again."""
    clock, timed = [0.0], []

    def seconds_of(run, **_) -> float:
        clock[0] += 6.0
        run()
        return 10.0 - len(timed)

    monkeypatch.setattr(blocks, "_winners", {})
    monkeypatch.setattr(blocks, "_folder", tmp_path)
    monkeypatch.setattr(blocks, "_can_time", lambda: True)
    monkeypatch.setattr(blocks.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr("triton.testing.do_bench", seconds_of)
    for _ in range(2):
        found = blocks.choose("kernel", KEY, {"B": 0}, [{"B": n} for n in range(1, 9)], timed.append)
        assert found == {"B": 1}
        assert timed == [{"B": 0}, {"B": 1}]
    assert json.loads((tmp_path / f"{blocks.chip()}.json").read_text()) == {"kernel 64 bf16": {"B": 1}}


def test_winners_are_of_the_chip_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_winners", {"kernel 64 bf16": WINNER})
    assert chosen() == WINNER
    with blocks.compiling_for("gfx942"):
        assert chosen() == DEFAULT
