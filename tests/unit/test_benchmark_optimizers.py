"""benchmarks/optimizers.py: where losses cross, intervals, and figures that a cut run had kept."""

from pathlib import Path

import pytest

from benchmarks import run as runner
from benchmarks.optimizers import QUICK, Study, crossing, interval
from benchmarks.result import Measured, Number, Row, read


@pytest.mark.parametrize(
    ("losses", "goal", "expected"),
    [
        ({5: 4.0, 6: 3.0}, 3.5, 5.5),
        ({6: 3.0, 7: 2.0, 5: 5.0}, 2.5, 6.5),
        ({5: 4.0, 6: 3.0}, 2.5, 6.5),  # of one seed behind the tenths that have the mean between them
        ({5: 4.0, 6: 3.0}, 4.5, 4.5),
        ({5: 3.0, 6: 3.5}, 3.2, 5.0),
        ({5: 3.0, 6: 3.5}, 2.0, 6.0),
        ({7: 3.0}, 2.0, 7.0),
    ],
)
def test_where_a_loss_is_reached(losses: dict[int, float], goal: float, expected: float) -> None:
    assert crossing(losses, goal) == pytest.approx(expected)


def test_intervals_are_students() -> None:
    """Of 1, 2, 3: standard error 1 / sqrt(3), and 4.303 of it at two degrees of freedom."""
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5))
    assert interval([2.0]) == (2.0, 2.0, 2.0)


def test_tenths_are_tried_until_the_goal_is_between_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses that fall by 0.1 a tenth, at the goal of 2.0 after 5.5 tenths; AdamW's steps take half of the time."""
    tried: list[int] = []

    def loss(study: Study, what: str, name: str, setting: dict, seed: int, steps: int) -> float:
        tried.append(steps)
        return 2.0 + 0.1 * (5.5 - steps) + 0.01 * seed

    class Words:
        sizes = QUICK

    monkeypatch.setattr(Study, "loss", loss)
    monkeypatch.setattr(Study, "_slower", lambda *given: Number(2.0, "of AdamW's"))
    study = Study(Words(), runner.Options())  # pyright: ignore[reportArgumentType]
    row = study.compared("shampoo", {"lr": 0.1}, {}, {1: 2.01})
    assert tried == [8, 7, 6, 5]
    assert row.numbers["share of steps"].value == pytest.approx(0.55)
    assert row.numbers["share of seconds"].value == pytest.approx(1.1)
    row = study.compared("galore", {"lr": 0.1}, {}, {1: 0.0})
    assert tried[4:] == [10, 11, 12]
    assert row.case["what"] == "above AdamW's loss after 1.2 of its steps"


def rows(count: int) -> list[Row]:
    return [Row({"run": index}, {"loss": Number(float(index), "nats")}) for index in range(count)]


def test_a_cut_run_goes_on_from_what_it_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    code = {"tree": "one"}
    monkeypatch.setattr("benchmarks.result.git", lambda *arguments: "" if arguments[0] == "status" else code["tree"])
    monkeypatch.setattr("benchmarks.result._differs", lambda: False)

    def measure(options: runner.Options) -> Measured:
        given.append(len(options.earlier))
        for row in rows(4)[len(options.earlier) :]:
            options.kept(row)
            if row.case["run"] == 1 and not options.earlier:
                raise KeyboardInterrupt
        return Measured(tuple(rows(4)))

    def run(resumes: bool) -> None:
        benchmark = runner.Benchmark("toy", "A toy", measure, ("core",), resumes=resumes)
        with pytest.raises(KeyboardInterrupt):
            runner.run(benchmark, runner.Options(), tmp_path, "command")
        with (tmp_path / "toy.partial.jsonl").open("a") as lines:
            lines.write('{"case": {"run"')  # cut
        runner.run(benchmark, runner.Options(), tmp_path, "command")

    run(resumes=True)
    assert given == [0, 2]
    assert len(read(tmp_path / "toy.json").figures) == 4
    assert not (tmp_path / "toy.partial.jsonl").exists()
    with pytest.raises(KeyboardInterrupt):
        run(resumes=False)  # the second run begins anew, and is cut as the first
    code["tree"] = "another"
    benchmark = runner.Benchmark("toy", "A toy", measure, ("core",), resumes=True)
    with pytest.raises(KeyboardInterrupt):
        runner.run(benchmark, runner.Options(), tmp_path, "command")
    assert given[2:] == [0, 0, 0]
