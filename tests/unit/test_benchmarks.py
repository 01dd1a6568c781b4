"""Benchmarks: what they are, what they write, and that a contender which does not train alike is not timed."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import evoformer, sequence_parallel, tensor_parallel, train
from benchmarks import run as runner
from benchmarks.contenders import CONTENDERS, Turn, batch_of
from benchmarks.result import Measured, Number, Row, Target, beginning, read, result_of, show, validate, write
from benchmarks.serving import peer
from benchmarks.tensor_parallel_bytes import pair_bytes
from core.config import UserError

DATA = Path(__file__).parents[1] / "data" / "fold"
ROW = Row({"model": "tiny", "ranks": 2, "contender": "ours"}, {"throughput": Number(1234.5, "tokens/s")})
MEASURED = Measured((ROW,), (Target("ours / theirs", 1.3, 1.2),), ("a note",), {"deepspeed": "0.1"})


def a_result():
    return result_of("toy", "A toy", "python -m benchmarks.run toy", MEASURED, beginning())


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    result = a_result()
    path = write(result, tmp_path / "results")
    assert path == tmp_path / "results" / "toy.json"
    assert read(path) == result
    assert [p.name for p in path.parent.iterdir()] == ["toy.json"]  # nothing half written is left
    content = json.loads(path.read_text())
    assert content["targets"] == [{"what": "ours / theirs", "wanted": 1.3, "reached": 1.2, "met": False}]
    assert content["versions"]["deepspeed"] == "0.1"
    assert {"python", "torch", "numpy"} <= set(content["versions"])
    assert content["hardware"]["cores"] >= 1


def test_what_is_not_a_result_is_not_written(tmp_path: Path) -> None:
    write(a_result(), tmp_path)
    before = (tmp_path / "toy.json").read_text()
    for wrong, said in (
        (replace(a_result(), figures=()), "at least one figure"),
        (replace(a_result(), figures=(replace(ROW, numbers={"a": Number(float("nan"), "s")}),)), "finite"),
        (replace(a_result(), commit=None), "commit"),
    ):
        with pytest.raises(UserError, match=said):
            write(wrong, tmp_path)
    assert (tmp_path / "toy.json").read_text() == before


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "toy"}'])
def test_a_foreign_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "toy.json").write_text(text)
    with pytest.raises(UserError, match=r"toy\.json is no benchmark result"):
        read(tmp_path / "toy.json")


def test_the_table_shows_every_number_and_what_was_missed() -> None:
    console = Console(record=True, width=160)
    show(a_result(), console)
    text = console.export_text()
    for part in ("throughput", "[tokens/s]", "1,234", "ours", "MISSED ours / theirs: 1.20 (wanted 1.30)", "a note"):
        assert part in text


def test_committed_results_are_results() -> None:
    for path in runner.RESULTS.glob("*.json"):
        name, _, _machine = path.stem.partition("-")
        assert read(path).name == name


def test_benchmarks_are_found_by_listing() -> None:
    assert runner.known()["train"] is train.BENCHMARK


@pytest.mark.parametrize("form", ["1d", "2d", "2.5d", "3d"])
def test_tensor_parallelism_is_counted_and_equals_its_closed_form(form: str) -> None:
    sizes = tensor_parallel.Sizes(256, 64, 128)
    rows = []
    for mesh, is_real in tensor_parallel.meshes(quick=True):
        if mesh.tp_mode == form and not is_real:
            found = tensor_parallel.on_a_fake_group(mesh, sizes)
            rows.append(tensor_parallel._row(mesh, sizes, is_real, found))
            assert found.bytes == pair_bytes(mesh, 256, 64, 128, itemsize=4)
            assert found.flops * mesh.tp == 6 * 256 * 2 * 64 * 128
            assert found.parameter_bytes * mesh.tp == 4 * 2 * 64 * 128 * mesh.tp_depth
    exponent = tensor_parallel.exponent(form, rows)
    assert len(rows) == 1 if exponent is None else exponent == pytest.approx(tensor_parallel.EXPONENTS[form][1])


def test_a_result_names_the_tree_that_it_was_measured_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.result._git", lambda *arguments: "before")

    def measure(options: runner.Options) -> Measured:
        monkeypatch.setattr("benchmarks.result._git", lambda *arguments: "after")
        return MEASURED

    runner.run(runner.Benchmark("toy", "A toy", measure), runner.Options(), tmp_path, "command")
    assert read(tmp_path / "toy.json").commit == "before"


def test_an_unknown_name_is_one_line_and_exit_code_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", "trian"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: no benchmark 'trian'; the benchmarks are ")
    assert done.stderr.count("\n") == 1


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A benchmark that takes no time, and a folder in place of benchmarks/results."""
    benchmark = runner.Benchmark("toy", "A toy", lambda options: MEASURED)
    monkeypatch.setattr(runner, "known", lambda: {"toy": benchmark})
    monkeypatch.setattr(runner, "RESULTS", tmp_path / "results")
    return tmp_path


def test_quick_writes_only_where_it_is_told(toy: Path) -> None:
    assert runner.main(["--quick", "toy"]) == 0
    assert not list(toy.iterdir())
    runner.main(["--quick", "--out", str(toy / "here")])
    assert read(toy / "here" / "toy.json").command == "python -m benchmarks.run --quick --out PATH"
    runner.main([], only="toy")
    assert read(toy / "results" / "toy.json").command == "python -m benchmarks.toy"


def a_setting(precision: str = "fp32") -> train.Setting:
    return train.Setting(train.TINY, 1, 1, precision, ("ours", "transformers"), num_rounds=2, num_steps=2)


def turns_stand_in(monkeypatch: pytest.MonkeyPatch, their_loss: float) -> list[tuple[str, bool]]:
    """Turns that take no time; returns the list in which they are noted."""
    taken = []

    def take_turn(turn: Turn, python: Path) -> dict:
        taken.append((turn.contender, turn.account))
        loss = 5.0 if turn.contender == "ours" else their_loss
        return {"losses": [loss] * turn.num_warmup, "seconds": [1.0, 2.0]}

    monkeypatch.setattr(train, "take_turn", take_turn)
    return taken


def test_contenders_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = turns_stand_in(monkeypatch, 5.00001)
    found = train._rounds(a_setting(), ["ours", "transformers"], Path("weights"), runner.Options())
    assert taken == [("ours", True), ("transformers", True), ("ours", False), ("transformers", False)]
    assert len(found["ours"]) == 2


@pytest.mark.parametrize("loss", [5.001, float("nan")])
def test_a_contender_that_trains_otherwise_is_not_timed(monkeypatch: pytest.MonkeyPatch, loss: float) -> None:
    taken = turns_stand_in(monkeypatch, loss)
    with pytest.raises(UserError, match="transformers does not train as ours does"):
        train._rounds(a_setting(), ["ours", "transformers"], Path("weights"), runner.Options())
    assert len(taken) == 2


def test_targets_compare_like_with_like() -> None:
    speeds = {"ours zero 0": 9.0, "ours zero 3": 6.0, "DDP": 10.0, "FSDP2": 5.0, "DeepSpeed zero 3": 4.0}
    rows = [
        Row({"model": "m", "ranks": 2, "contender": name}, {"throughput": Number(speed, "tokens/s")})
        for name, speed in speeds.items()
    ]
    found = {t.what: (t.wanted, t.reached, t.met) for t in train.targets(rows)}
    assert found == {
        "ours zero 0 / DDP, m, 2 ranks": (1.0, 0.9, False),
        "ours zero 3 / FSDP2, m, 2 ranks": (1.0, 1.2, True),
        "ours zero 3 / DeepSpeed zero 3, m, 2 ranks": (1.2, 1.5, True),
    }


def test_every_setting_names_contenders_and_each_peer_has_an_opponent() -> None:
    for setting in (*train.settings(True, False), *train.settings(False, False), *train.settings(False, True)):
        assert set(setting.contenders) <= set(CONTENDERS)
        for name in setting.contenders:
            assert train.opponent(name) in setting.contenders or name.startswith("ours")
        assert setting.size.rows % setting.num_ranks == 0


def test_a_batch_does_not_depend_on_the_ranks() -> None:
    whole = batch_of(train.TINY, 3, 0, 1)["input_ids"]
    halves = [batch_of(train.TINY, 3, rank, 2)["input_ids"] for rank in (0, 1)]
    assert whole.tolist() == [row for half in halves for row in half.tolist()]
    targets = batch_of(train.TINY, 3, 0, 1)["targets"]
    assert targets[:, :-1].tolist() == whole[:, 1:].tolist()
    assert (targets[:, -1] == -100).all()


def test_a_turn_survives_its_json() -> None:
    turn = Turn("ours", "bf16", train.TINY, 2, 1, 3, 4, True, "weights")
    assert Turn.from_json(turn.to_json()) == turn


def test_a_rank_that_dies_ends_its_turn(tmp_path: Path) -> None:
    turn = Turn("nobody", "fp32", train.TINY, 1, 1, 0, 0, False, str(tmp_path))
    with pytest.raises(UserError, match=r"nobody at fp32 failed on rank 0: .*KeyError"):
        train.take_turn(turn, Path(sys.executable))


def test_without_deepspeed_the_result_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "deepspeed" in str(train._deepspeed_missing(None))  # not a dependency of this project
    with pytest.raises(UserError, match="does not exist"):
        train._deepspeed_missing(Path("/nowhere/python"))


def test_validation_names_the_first_fault() -> None:
    with pytest.raises(UserError, match="the fields of a result"):
        validate({"name": "toy"})


def test_an_engine_that_is_not_there_is_named(tmp_path: Path) -> None:
    """It says so instead of serving, and the benchmark leaves it out with that reason."""
    with (
        pytest.raises(UserError, match="CTranslate2 int8: PackageNotFoundError"),
        peer("CTranslate2 int8", Path(sys.executable), tmp_path, tmp_path),
    ):
        raise AssertionError("it does not get here")


def test_the_evoformers_contenders_have_one_weight_each_and_are_compared_before_they_are_timed() -> None:
    cpu, fp32 = torch.device("cpu"), torch.float32
    names = json.loads((DATA / "openfold_model_1_ptm.json").read_text())
    prefix = "evoformer.blocks.0."
    expected = {n.removeprefix("evoformer."): tuple(s) for n, s in names.items() if n.startswith(prefix)}
    state = evoformer.openfold_state(evoformer.blocks_of(1, cpu, fp32))
    assert {name: tuple(value.shape) for name, value in state.items()} == expected
    inputs = evoformer.inputs_of(3, 7, cpu, fp32)
    with torch.no_grad():
        ours = evoformer.run_blocks(evoformer.blocks_of(1, cpu, fp32), inputs)
        plain = evoformer.run_blocks(evoformer.as_written(evoformer.blocks_of(1, cpu, fp32)), inputs)
    evoformer.require_equal("reference", plain, ours, fp32)
    with pytest.raises(UserError, match="reference computes another z than ours"):
        evoformer.require_equal("reference", (ours[0], 1.001 * ours[1]), ours, fp32)


@pytest.mark.parametrize("longest", [0, 48, 96, 144, 1008, 8160])
def test_the_longest_sequence_is_found_in_few_steps(longest: int) -> None:
    """Memory need not be affine in the length; 8160 is the model's limit in units of 48."""
    size, tried = replace(sequence_parallel.USUAL, budget_bytes=100), []

    def peak_bytes(length: int) -> int:
        tried.append(length)
        return 100 if length <= longest else 101

    assert sequence_parallel.longest_within(size, peak_bytes) == longest
    assert len(tried) <= 16
    assert max(tried) <= 8192
