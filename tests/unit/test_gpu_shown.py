"""The table of what kernels have shown, from results of a and b: what counts as right, as fast, and as one GPU's."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import shown
from benchmarks.gpu.__main__ import main
from benchmarks.result import RESULTS, Beginning, Measured, Number, Row, result_of, write
from core.kernels import shown_right, specs


def error(kernel: str, dtype: str, value: float) -> Row:
    return Row({"kernel": kernel, "dtype": dtype}, {"error": Number(value, "of what is allowed")})


def time(kernel: str, contender: str, which: str, us: float, case: str = "N=1") -> Row:
    said: dict[str, str | int] = {
        "kernel": kernel,
        "case": case,
        "dtype": "bfloat16",
        "pass": which,
        "contender": contender,
    }
    return Row(said, {"time": Number(us, "us"), "share": Number(0.5, "of the roofline")})


def right(kernel: str) -> list[Row]:
    return [error(kernel, str(dtype).removeprefix("torch."), 0.5) for dtype in specs()[kernel].dtypes]


def keep(path: Path, figures: list[Row], gpus: list[str]) -> Path:
    began = Beginning("c0ffee", False, {}, "2026-01-01T00:00:00+00:00", 0.0)
    result = result_of(path.stem, "a title", "a command", Measured(tuple(figures)), began)
    return write(replace(result, hardware=result.hardware | {"gpus": gpus}), path.parent)


def test_torch_at_its_best_and_the_slowest_pass_count() -> None:
    timed = [
        *(time("rms_norm", who, "forward", us) for who, us in (("ours", 10), ("eager", 40), ("torch fused", 20))),
        *(time("rms_norm", who, "backward", us) for who, us in (("ours", 10), ("eager", 15), ("Liger", 1))),
        *(time("attention", who, "forward", us) for who, us in (("ours", 10), ("eager", 90), ("SDPA, cuDNN", 6))),
    ]
    found, lacking = shown.families_of([*right("rms_norm"), *right("attention"), *right("rope"), *timed])
    assert found == {"rms_norm": {"right": True, "speedup": 1.5}, "attention": {"right": True, "speedup": 0.6}}
    assert lacking["rope"] == "no time beside torch's"
    assert lacking["swiglu"] == "neither"


def test_right_means_in_all_formats_and_the_last_result_counts() -> None:
    timed = [time("rope", "ours", "forward", 1), time("rope", "eager", "forward", 2)]
    some = [*right("rope")[:-1], *timed]
    assert shown.families_of(some)[0]["rope"]["right"] is False
    assert shown.families_of([*some, *right("rope")])[0]["rope"]["right"] is True
    assert shown.families_of([*right("rope"), *timed, error("rope", "float32", 1.1)])[0]["rope"]["right"] is False
    slower = shown.families_of([*right("rope"), *timed, time("rope", "ours", "forward", 4)])[0]
    assert slower["rope"]["speedup"] == 0.5
    assert shown.families_of(timed)[1]["rope"] == "no check"


def test_the_command_writes_the_table_of_the_chip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timed = [time("rope", "ours", "forward", 1), time("rope", "eager", "forward", 2)]
    a, b = keep(tmp_path / "a.json", right("rope"), ["NVIDIA H200"]), keep(tmp_path / "b.json", timed, ["NVIDIA H200"])
    assert main(["shown", "--out", str(tmp_path / "shown"), str(a), str(b)]) == 0
    table = json.loads((tmp_path / "shown" / "sm_90.json").read_text())
    assert (table["device"], table["results"]) == ("NVIDIA H200", ["a.json", "b.json"])
    assert table["families"] == {"rope": {"right": True, "speedup": 2.0}}
    capsys.readouterr()
    for gpus, said in (
        (["NVIDIA H100"], "b.json: NVIDIA H100; the results of one table are of one GPU"),
        ([], "no GPU"),
    ):
        other = keep(tmp_path / "b.json", timed, gpus)
        assert main(["shown", str(a), str(other), "--out", str(tmp_path)]) == 2
        assert said in capsys.readouterr().err
    alone = keep(tmp_path / "b.json", timed, ["NVIDIA H200"])
    assert main(["shown", str(alone), "--out", str(tmp_path)]) == 2
    assert "no family has both" in capsys.readouterr().err


def test_results_and_other_commands_are_not_mixed_up(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["shown"], ["b", "x.json", "--out", "y"]):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == 2
        assert "shown RESULT ... takes the files" in capsys.readouterr().err


def test_a_committed_table_is_that_of_committed_results(tmp_path: Path) -> None:
    for path in shown_right.FOLDER.glob("*.json"):
        results = json.loads(path.read_text())["results"]
        shown.main([RESULTS / name for name in results], tmp_path)
        assert (tmp_path / path.name).read_text() == path.read_text()
