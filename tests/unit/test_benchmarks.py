"""Benchmarks: what they are, what they write, and that a contender which does not train alike is not timed."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import (
    evoformer,
    long_sequence,
    noise_scale,
    sequence_parallel,
    serving,
    slow_links,
    stale,
    tensor_parallel,
    train,
)
from benchmarks import run as runner
from benchmarks.contenders import CONTENDERS, OPTIM, Turn, batch_of, peers_adamw
from benchmarks.limits import SAME_ARITHMETIC, SAME_BYTES
from benchmarks.result import (
    ROOT,
    Measured,
    Missing,
    Number,
    Result,
    Row,
    Target,
    beginning,
    read,
    result_of,
    show,
    validate,
    write,
)
from benchmarks.serving import peer
from benchmarks.tensor_parallel_bytes import pair_bytes
from core.config import UserError
from core.mesh import MeshConfig
from core.optim.build import build_optimizer
from tests.support.command import run

DATA = Path(__file__).parents[1] / "data" / "fold"
ROW = Row({"model": "tiny", "ranks": 2, "contender": "ours"}, {"throughput": Number(1234.5, "tokens/s")})
MEASURED = Measured((ROW,), (Target("ours / theirs", 1.3, 1.2, "the same bytes"),), ("a note",), {"deepspeed": "0.1"})


def a_result():
    return result_of("toy", "A toy", "python -m benchmarks.run toy", MEASURED, beginning())


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    result = a_result()
    path = write(result, tmp_path / "results")
    assert path == tmp_path / "results" / "toy.json"
    assert read(path) == result
    assert [p.name for p in path.parent.iterdir()] == ["toy.json"]  # nothing half written is left
    content = json.loads(path.read_text())
    target = {"what": "ours / theirs", "wanted": 1.3, "reached": 1.2, "limit": "the same bytes", "met": False}
    assert content["targets"] == [target]
    assert content["versions"]["deepspeed"] == "0.1"
    assert {"python", "torch", "numpy"} <= set(content["versions"])
    assert content["hardware"]["cores"] >= 1


def test_what_pairs_of_steps_differ_by_is_found_among_bursts() -> None:
    """1 % of a step, where a tenth of all steps take half as long again and all wander by 2 %."""
    drawn = random.Random(0)

    def steps(cost: float) -> list[float]:
        return [1 + cost + 0.02 * drawn.random() + 0.5 * (drawn.random() < 0.1) for _ in range(300)]

    for cost in (0.01, 0.0, 0.03):
        share, low, high = noise_scale.share_of(steps(0.0), steps(cost))
        assert low < cost / 1.01 < high < low + 0.01
        assert low < share < high


def test_a_curve_passes_a_loss_on_the_line_between_two_evaluations() -> None:
    """The first time; at its first evaluation where that is below already; one that does not is refused."""
    curve = {300: 1.0, 100: 3.0, 200: 2.0, 400: 1.5, 500: 0.9}
    assert slow_links.steps_to(curve, 2.0) == 200
    assert slow_links.steps_to(curve, 1.25) == 275
    assert slow_links.steps_to(curve, 3.5) == 100
    with pytest.raises(ValueError, match="ends above"):
        slow_links.steps_to(curve, 0.5)


def test_forms_on_slow_links_are_trained_once_where_workers_do_not_matter() -> None:
    forms = slow_links.forms((2, 4))
    trained = [(form.name, form.workers) for form in dict.fromkeys(form.curve for form in forms)]
    feedback = "ZeRO++ with feedback"
    assert trained == [
        ("ZeRO-3", 2), ("ZeRO++", 2), (feedback, 2), ("PowerSGD", 2), ("DiLoCo", 2), ("DiLoCo", 4), ("2bw", 2),
    ]  # fmt: skip
    assert [form.learners for form in dict.fromkeys(form.curve for form in forms)] == [1, 2, 2, 1, 2, 4, 2]


def test_a_part_is_kept_for_the_run_that_does_the_rest(tmp_path: Path) -> None:
    """A part that a benchmark does not have is refused, and one that it has writes no result."""
    options = runner.Options(part="bytes")
    with pytest.raises(UserError, match="--part bytes: slow_links has the parts losses and times"):
        slow_links.measure(options)
    with pytest.raises(UserError, match=r"--part bytes: evoformer has the parts 128x256-fp32, .*, 32x128-bf16"):
        evoformer.measure(options)
    with pytest.raises(UserError, match=r"--part bytes: long_sequence has the parts counted, .*, measured, blocks"):
        long_sequence.measure(options)
    with pytest.raises(UserError, match=r"--part: msa does not read it; .*benchmarks\.slow_links"):
        runner.main(["--part", "losses", "slow_links", "msa"])  # the first of the two does
    toy = replace(slow_links.BENCHMARK, name="toy", measure=lambda options: options.kept(ROW))
    runner.run(toy, runner.Options(part="losses"), tmp_path, "a command")
    assert [path.name for path in tmp_path.iterdir()] == ["toy.partial.jsonl"]


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
    for part in (
        "throughput",
        "[tokens/s]",
        "1,234",
        "ours",
        "MISSED ours / theirs: 1.20 (wanted 1.30; the same bytes)",
        "a note",
    ):
        assert part in text


def test_committed_results_are_results() -> None:
    for path in runner.RESULTS.glob("*.json"):
        name, _, _machine = path.stem.partition("-")
        assert read(path).name == name


@pytest.mark.parametrize("change", ["none", "measures", "resumes", "cut"])
def test_an_interrupted_benchmark_goes_on_from_what_it_kept(tmp_path: Path, change: str) -> None:
    """Where the code that it measures is as it was; of a line that was being written nothing is taken."""
    made, interrupted = list[int](), list[int]()

    def measure(options: runner.Options) -> Measured:
        kept = {int(row.case["number"]): row for row in options.earlier}
        rows = []
        for number in range(3):
            if number == 2 and not interrupted:
                interrupted.append(number)
                raise UserError("interrupted")
            if number not in kept:
                made.append(number)
                kept[number] = Row({"number": number}, {"square": Number(number**2, "")})
                options.kept(kept[number])
            rows.append(kept[number])
        return Measured(tuple(rows))

    benchmark = runner.Benchmark("toy", "A toy", measure, ("benchmarks/run.py",), resumes=True)
    began = replace(beginning(benchmark.measures), dirty=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "beginning", lambda _: began)
        with pytest.raises(UserError, match="interrupted"):
            runner.run(benchmark, runner.Options(), tmp_path, "command")
        if change == "measures":
            patch.setattr(runner, "beginning", lambda _: replace(began, measures={"benchmarks/run.py": "another"}))
        if change == "cut":
            (tmp_path / "toy.partial.jsonl").open("a").write('{"case": {"num')
        runner.run(replace(benchmark, resumes=change != "resumes"), runner.Options(), tmp_path, "command")
    assert made == ([0, 1, 2] if change in ("none", "cut") else [0, 1, 0, 1, 2])
    assert len(read(tmp_path / "toy.json").figures) == 3
    assert not (tmp_path / "toy.partial.jsonl").exists()


def test_benchmarks_are_found_by_listing() -> None:
    assert "train" in runner.known()
    assert not {"result", "run", "contenders", "ranks"} & set(runner.known())
    assert runner.load("train") is train.BENCHMARK


@pytest.mark.parametrize("name", runner.known())
def test_a_benchmark_names_what_it_measures(name: str) -> None:
    """Files and folders that are there, its own and those of this package that it imports or starts among them."""
    path = ROOT / "benchmarks" / f"{name}.py"
    assert re.search(rf'^BENCHMARK = Benchmark\(\s*"{name}"', path.read_text(), re.MULTILINE)
    named = runner.load(name).measures
    assert [one for one in named if not (ROOT / one).exists()] == []
    assert any(one.startswith(("core/", "apps/")) for one in named)
    found = re.findall(r"benchmarks\.(\w+)", re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL))
    used = {one for one in found if (ROOT / "benchmarks" / f"{one}.py").exists()} - {"result", "run", "limits", name}
    used -= {"stable_diffusion"} if name == "dreambooth" else set()  # takes a function that writes random weights
    assert {f"benchmarks/{one}.py" for one in used | {name}} <= set(named)


@pytest.mark.parametrize("form", ["1d", "2d", "2.5d", "3d"])
def test_tensor_parallelism_is_counted_and_equals_its_closed_form(form: str) -> None:
    sizes = tensor_parallel.Sizes(256, 64, 128)
    rows = []
    for mesh, is_real in tensor_parallel.meshes(quick=True):
        if mesh.tp_mode == form and not is_real:
            found = tensor_parallel.on_a_fake_group(mesh, sizes)
            rows.append(tensor_parallel._row(mesh, sizes, is_real, found))
            assert found.bytes == pair_bytes(mesh, tensor_parallel.plan_of(form), 256, 64, 128, itemsize=4)
            assert found.flops * mesh.tp == 6 * 256 * 2 * 64 * 128
            assert found.parameter_bytes * mesh.tp == 4 * 2 * 64 * 128 * mesh.tp_depth
    exponent = tensor_parallel.exponent(form, rows)
    assert len(rows) == 1 if exponent is None else exponent == pytest.approx(tensor_parallel.EXPONENTS[form][1])


def test_a_grid_with_one_axis_is_counted_under_that_axis() -> None:
    mesh = MeshConfig(tp=2, tp_mode="2.5d", tp_depth=2)
    found = tensor_parallel.on_a_fake_group(mesh, tensor_parallel.Sizes(256, 64, 128))
    assert found.bytes == pair_bytes(mesh, tensor_parallel.plan_of("2.5d"), 256, 64, 128, itemsize=4)
    assert {axis for _, axis in found.bytes} == {"tp_depth"}


def test_a_result_names_the_tree_that_it_was_measured_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.result.git", lambda *arguments: "before")

    def measure(options: runner.Options) -> Measured:
        monkeypatch.setattr("benchmarks.result.git", lambda *arguments: "after")
        return MEASURED

    runner.run(runner.Benchmark("toy", "A toy", measure, ()), runner.Options(), tmp_path, "command")
    assert read(tmp_path / "toy.json").commit == "before"


def test_stale_runs_nothing() -> None:
    with pytest.raises(UserError, match="--stale runs nothing; leave out --quick"):
        runner.main(["--stale", "--quick"])


def test_an_unknown_name_is_one_line_and_exit_code_2() -> None:
    done = run("-m", "benchmarks.run", "trian", timeout_s=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no benchmark 'trian'; the benchmarks are ")
    assert done.stderr.count("\n") == 1


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A benchmark that takes no time, and a folder in place of benchmarks/results."""
    benchmark = runner.Benchmark("toy", "A toy", lambda options: MEASURED, ())
    monkeypatch.setattr(runner, "known", lambda: ["toy"])
    monkeypatch.setattr(runner, "load", lambda name: benchmark)
    monkeypatch.setattr(runner, "RESULTS", tmp_path / "results")
    return tmp_path


def test_quick_writes_only_where_it_is_told(toy: Path) -> None:
    assert runner.main(["--quick", "toy"]) == 0
    assert not list(toy.iterdir())
    runner.main(["--quick", "--out", str(toy / "here")])
    assert read(toy / "here" / "toy.json").command == "python -m benchmarks.run --quick --out PATH"
    runner.main([], only="toy")
    assert read(toy / "results" / "toy.json").command == "python -m benchmarks.toy"


def test_several_run_all_the_same_where_one_fails(capsys: pytest.CaptureFixture, monkeypatch) -> None:
    """Each says a line; the failed are named, with what they said; what hangs is killed with all that it started."""
    monkeypatch.setattr(runner, "QUICK_LIMIT_S", 6)

    def fine() -> int:
        print("- DeepSpeed is left out: no package\na figure")
        return 0

    def broken() -> int:
        subprocess.run(["echo", "what went wrong"], check=True)
        return 2

    def hangs() -> int:
        print("begun", flush=True)
        return subprocess.call(["sleep", "60"])

    began = time.monotonic()
    failed = runner._quickly({"fine": fine, "broken": broken, "hangs": hangs})
    assert time.monotonic() - began < 30
    said = capsys.readouterr().out
    assert failed == ["broken", "hangs"]
    assert re.search(r"^ran fine, \d+ s\n  DeepSpeed is left out: no package$", said, re.MULTILINE)
    assert re.search(r"^what went wrong\n\nFAILED broken, exit code 2, \d+ s$", said, re.MULTILINE)
    assert re.search(r"^begun\n\nnot done after 6 s\nFAILED hangs, exit code -9", said, re.MULTILINE)
    assert "a figure" not in said


def test_a_quick_run_that_is_interrupted_leaves_nothing_running(tmp_path: Path) -> None:
    sleeper = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    # As from a terminal: what a shell starts in the background ignores the signal, and so does what that starts.
    script = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    script += f"from benchmarks import run; run._quickly({{'sleeps': lambda: exec({sleeper!r})}})"
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE) as process:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_failure_among_several_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(runner, "_quickly", lambda benchmarks: asked.update(benchmarks) or ["train"])
    assert runner.main(["--quick", "--peers-python", "/p", "kernels", "train"]) == 1
    assert capsys.readouterr().err == "error: of 2 benchmarks 1 failed: train\n"
    assert asked["train"].args == (runner.main, ["--quick", "--peers-python", "/p", "train"])
    monkeypatch.setattr(runner, "_quickly", lambda benchmarks: [])
    assert runner.main(["--quick", "kernels", "train"]) == 0


def test_what_cannot_run_without_a_program_is_left_out_of_a_quick_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def measure(options: runner.Options) -> Measured:
        raise Missing("there is no jackhmmer; install hmmer")

    monkeypatch.setattr(runner, "load", lambda name: runner.Benchmark("msa", "Searches", measure, ()))
    assert runner.main(["--quick", "msa"]) == 0
    assert capsys.readouterr().out == "msa is left out: there is no jackhmmer; install hmmer\n"
    with pytest.raises(Missing):
        runner.main(["msa"])


def test_every_benchmark_runs_in_the_suite() -> None:
    """`make test` ends with all of them, quickly."""
    done = subprocess.run(["make", "-n", "-C", ROOT, "test"], capture_output=True, text=True, check=True)
    assert "-m benchmarks.run --quick\n" in done.stdout


def test_the_peers_take_the_same_optimizer_as_ours() -> None:
    """Options that OPTIM leaves open have the optimizer's defaults, in both."""
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    ours = build_optimizer(OPTIM, {"matrix": matrix, "vector": vector})
    for mine, theirs in zip(ours.param_groups, peers_adamw([matrix, vector]).param_groups, strict=True):
        assert mine["params"][0] is theirs["params"][0]
        for option in ("lr", "betas", "eps", "weight_decay"):
            assert mine[option] == theirs[option]


# --- which results are of the code as it is ---------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A repository of two files in place of this one; what it gives runs git there."""

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=e@e", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *who, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    monkeypatch.setattr("benchmarks.result.ROOT", tmp_path)
    for name in ("core/measured.py", "core/other.py", "benchmarks/results/toy.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    return git


MEASURES = ("core/measured.py",)


def commit(git: Callable[..., str], tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("2\n")
    git("commit", "-qam", f"another {name}")


def measured_now(measures: tuple[str, ...] = MEASURES) -> Result:
    return result_of("toy", "A toy", "python -m benchmarks.run toy", MEASURED, beginning(measures))


def test_a_result_of_the_code_as_it_is(repository: Callable[..., str], tmp_path: Path) -> None:
    result = measured_now()
    assert result.commit == repository("rev-parse", "HEAD")
    assert result.measures == {"core/measured.py": repository("rev-parse", "HEAD:core/measured.py")}
    assert stale.reasons(result, MEASURES) == []
    commit(repository, tmp_path, "core/other.py")  # which it does not measure
    assert stale.reasons(result, MEASURES) == []


def test_a_result_that_is_older_than_what_it_measures(repository: Callable[..., str], tmp_path: Path) -> None:
    result, without = measured_now(), replace(measured_now(), measures={})
    commit(repository, tmp_path, "core/measured.py")
    for one in (result, without):  # results of before they named what they measure are compared by their commit
        assert stale.reasons(one, MEASURES) == [f"code changed since {result.commit[:9]}: core/measured.py"]


def test_words_about_the_code_age_no_result(repository: Callable[..., str], tmp_path: Path) -> None:
    """Comments, docstrings and layout. Code that is changed, new or gone does, and a file that is none of Python's."""
    file = tmp_path / "core" / "measured.py"

    def says(text: str, name: str = "measured.py") -> None:
        (file.parent / name).write_text(text)
        repository("add", ".")
        repository("commit", "-qm", "another")

    says('"""It."""\n\ndef f(x):\n    """Adds."""\n    return x + 1\n')
    for measures in (MEASURES, ("core",)):
        result = measured_now(measures)
        says('"""It, in other words."""\nclass C:\n    """Holds."""\n')
        assert stale.reasons(result, measures), "code is gone"
        says('"""It, anew."""\n# why\ndef f(x):\n    """Adds one."""\n    return (\n        x + 1  # here\n    )\n')
        assert stale.reasons(result, measures) == []
        says('"""It."""\n\ndef f(x):\n    """Adds."""\n    return x + 2\n')
        assert stale.reasons(result, measures) == [f"code changed since {result.commit[:9]}: {measures[0]}"]
        says('"""It."""\n\ndef f(x):\n    """Adds."""\n    return x + 1\n')
    result = measured_now(("core",))
    says("a table", "table.txt")
    assert stale.reasons(result, ("core",))
    result = measured_now(("core",))
    says("another table", "table.txt")
    assert stale.reasons(result, ("core",))


def test_a_result_of_a_changed_tree(repository: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "benchmarks/results/toy.json").write_text("another result\n")
    assert not measured_now().dirty  # the result before it is no code
    (tmp_path / "core/new.py").write_text("nobody committed it\n")
    assert measured_now().dirty
    (tmp_path / "core/new.py").unlink()
    (tmp_path / "core/other.py").write_text("changed\n")
    assert stale.reasons(measured_now(), MEASURES) == ["measured on a tree with changes that no commit has"]


def test_a_result_of_a_commit_that_is_not_in_the_history(repository: Callable[..., str], tmp_path: Path) -> None:
    repository("checkout", "-qb", "aside")
    commit(repository, tmp_path, "core/other.py")
    result = measured_now()
    repository("checkout", "-q", "-")
    assert stale.reasons(result, MEASURES) == [f"its commit {result.commit[:9]} is not in the history"]
    gone = replace(result, commit="0" * 40)
    assert stale.reasons(gone, MEASURES) == ["its commit 000000000 is not in the history"]


def test_the_list_of_stale_results(
    repository: Callable[..., str], toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Each with its reasons, other machines' too; the exit code is that of a check."""
    benchmark = runner.Benchmark("toy", "A toy", lambda options: MEASURED, MEASURES)
    monkeypatch.setattr(stale, "load", lambda name: benchmark)
    folder = toy / "results"
    path = write(measured_now(), folder)
    assert runner.main(["--stale"]) == 0
    assert capsys.readouterr().out == "0 of 1 results are stale\n"
    path.rename(folder / "toy-amd.json")
    write(replace(measured_now(), dirty=True), folder)
    assert runner.main(["--stale", "toy"]) == 1
    said = capsys.readouterr().out
    assert said == "toy: measured on a tree with changes that no commit has\n1 of 2 results are stale\n"


def test_targets_of_formats_that_bound_each_other_say_so() -> None:
    rates = {"ours bf16": 1.05, "ours int8": 0.98, "ours w8a8": 1.4, "vLLM": 1.0, "ours static": 0.5}
    numbers = {name: {"tokens_per_s": Number(rate, "tokens/s")} for name, rate in rates.items()}
    (size,) = serving.sizes(runner.Options())
    found = {t.what.partition(": ")[2].partition(",")[0]: t for t in serving._targets(size, 8, numbers)}
    assert found["ours bf16 / vLLM"].limit == SAME_BYTES
    assert found["ours bf16 / vLLM"].wanted == 1.0  # at most 1.15 is there
    assert found["ours int8 / ours bf16"].limit == found["ours int8 / vLLM"].limit == SAME_ARITHMETIC
    assert found["ours w8a8 / vLLM"].limit == found["ours bf16 / ours static"].limit == ""


# --- what the README says of results ----------------------------------------------------------------------------------


def readme_tables(result: str) -> list[list[list[str]]]:
    """The cells of the tables in the README's part that names a result, up to the next result or heading."""
    text = (ROOT / "README.md").read_text()
    _, _, after = text.partition(f"results/{result}.json]")
    part = re.split(r"results/\w[\w-]*\.json|^## |^```", after.partition(")")[2], maxsplit=1, flags=re.MULTILINE)[0]
    rows = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row] for row in rows if not set("".join(row)) <= set("- |")]
    assert cells, f"the README has no table of {result}"
    return [cells]


def figure(row: Row, name: str) -> str:
    return f"{row.numbers[name].value:,.0f}"


@pytest.mark.parametrize("name", ["train", "train-amd"])
def test_the_readmes_speeds_are_the_results(name: str) -> None:
    (cells,) = readme_tables(name)
    rows = {
        (str(row.case["ranks"]), str(row.case["contender"]), row.case["precision"]): row
        for row in read(runner.RESULTS / f"{name}.json").figures
    }
    precisions = ("fp32", "bf16") if len(cells[0]) == 6 else ("fp32",)
    for ranks, contender, *said in cells[1:]:
        found = [rows[ranks, contender, precision] for precision in precisions]
        assert said == [figure(row, what) for row in found for what in ("throughput", "peak")], (ranks, contender)


def test_the_readmes_demo_is_the_results() -> None:
    (cells,) = readme_tables("demo")
    (row,) = read(runner.RESULTS / "demo.json").figures
    said = dict(cells[1:])
    for label, name in (("this model", "heldout"), ("gzip -9", "gzip"), ("xz -9", "xz")):
        assert said[label] == f"{row.numbers[f'{name}_bits_per_byte'].value:.3f}"
    text = " ".join((ROOT / "README.md").read_text().split())
    for wanted in (
        f"{row.numbers['wall_s'].value:.0f} s of training",
        f"{row.numbers['tokens_per_s'].value:,.0f} tokens/s on {row.numbers['num_ranks'].value:.0f} ranks",
        f"{100 * row.numbers['mfu'].value:.0f}% of what the machine's matrix products reach",
        f"{row.numbers['device_peak_bytes'].value / 1e6:,.0f} MB of tensors a rank",
    ):
        assert wanted in text


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


def test_four_counts_give_the_bytes_of_any_layers_and_length() -> None:
    form = sequence_parallel.Form(1000, 70, 5, 3)
    counts = {(layers, length): form(layers, length) for layers in (1, 2) for length in (10, 30)}
    found = sequence_parallel.form_of(counts)
    assert found == form
    assert found(12, 100) == 1000 + 12 * 70 + 41 * 100
    assert found.longest(12, found(12, 77)) == 77
    assert found.longest(12, 1839) == 0
