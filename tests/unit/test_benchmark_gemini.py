"""The benchmark of Gemini: its contenders train alike, what it foresees is what a run takes, and its searches find."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gemini, offload, ranks
from benchmarks.gemini_needs import NEEDS, foreseen, grid, largest
from benchmarks.offload import CONTENDERS, Ran, Shape, Turn, attempt, shaped, take_turn
from benchmarks.result import Number, beginning, result_of
from benchmarks.run import Options
from core.config import UserError

TINY = replace(shaped("GPT-2", 2, 64), vocab_size=64)
TURN = Turn("Gemini", TINY, rows=1, length=16, num_steps=1, budget_bytes=2**20)


def losses(turn: Turn) -> list[float]:
    training = CONTENDERS[turn.contender](turn)
    return [float(training.step()) for _ in range(3)]


@pytest.mark.parametrize("family", ["GPT-2", "OPT"])
def test_all_contenders_that_a_cpu_runs_train_alike(family: str) -> None:
    turn = replace(TURN, shape=replace(TINY, family=family))
    expected = losses(replace(turn, contender="plain PyTorch"))
    assert losses(turn) == expected
    assert losses(replace(turn, contender="FSDP2 + CPUOffloadPolicy")) == pytest.approx(expected, rel=1e-5)
    assert expected[2] < expected[0]


def test_what_is_foreseen_is_what_it_takes() -> None:
    found = foreseen(TINY, TURN.rows, TURN.length, "fp32")
    enough = NEEDS["Gemini"](found)
    assert take_turn(replace(TURN, budget_bytes=enough)).peak_bytes <= enough
    with pytest.raises(UserError, match="give at least"):
        take_turn(replace(TURN, budget_bytes=enough - 1))
    plain = gemini.counted(replace(TURN, contender="plain PyTorch"))
    assert enough < NEEDS["plain PyTorch"](found) <= plain.peak_bytes < 1.5 * NEEDS["plain PyTorch"](found)


def test_a_turn_of_its_own_process_says_when_the_budget_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def process(command: list, **options):
        from benchmarks import offload

        offload.main(*command[3:])
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr("benchmarks.offload.subprocess.run", process)
    ran = attempt(TURN, Path("python"))
    assert ran is not None
    assert len(ran.seconds) == 1
    assert 0 < ran.peak_bytes <= 2**20
    assert attempt(replace(TURN, budget_bytes=1000), Path("python")) is None


def test_the_grid_ascends_and_the_largest_that_fits_is_found() -> None:
    shapes = grid("OPT", (64, 128), (2, 4), 10**9)
    sizes = [shape.num_parameters() for shape in shapes]
    assert sizes == sorted(sizes)
    assert len(grid("OPT", (64, 128), (2, 4), sizes[2])) == 3
    assert largest(shapes, lambda shape: shape.dim == 64) == shapes[1]
    assert largest(shapes, lambda shape: False) is None


@pytest.mark.parametrize("most", [-1, 0, 2, 3])
def test_climbing_finds_the_last_that_trains(most: int) -> None:
    shapes = grid("GPT-2", (64, 128), (2, 4), 10**9)
    tried: list[Shape] = []

    def run(shape: Shape) -> Ran | None:
        tried.append(shape)
        return Ran([1.0], 1, 1) if shapes.index(shape) <= most else None

    assert gemini.climb(shapes, run)[0] == (shapes[most] if most >= 0 else None)
    assert len(tried) <= 3


def test_on_a_gpu_every_contender_gets_every_budget_and_the_targets_are_of_one_model(tmp_path: Path) -> None:
    """With a stand-in for the processes: Gemini trains all shapes, the others the smaller half, at half its speed."""
    shapes = grid("GPT-2", (64, 128), (2, 4), 10**9)
    turns: list[Turn] = []

    def run(turn: Turn) -> Ran | None:
        turns.append(turn)
        ours = turn.contender == "Gemini"
        return Ran([1.0 if ours else 2.0], 2**30) if ours or shapes.index(turn.shape) < 2 else None

    figures, targets = gemini.on_gpu({"GPT-2": shapes}, {"8 GiB": 8 * 2**30}, 4, 1024, run)
    reached = {row.case["contender"]: row.case["model"] for row in figures if "parameters" in row.numbers}
    assert reached.pop("Gemini") == shapes[3].name
    assert set(reached.values()) == {shapes[1].name}
    assert {t.budget_bytes for t in turns} == {8 * 2**30}
    assert {t.precision for t in turns} == {"bf16"}
    assert [target.reached for target in targets] == [2.0, 2.0]
    assert {row.case["model"] for row in figures if row.case["what"] == "step time"} == {shapes[1].name}
    assert gemini.size_targets(figures)[0].reached > 1
    figures.append(gemini.Row(figures[0].case | {"model": "none"}, {"parameters": Number(0.0, "10^6")}))
    result = result_of("toy", "A toy", "", gemini.Measured(tuple(figures), tuple(targets)), beginning())
    assert gemini.plot(result, tmp_path).read_bytes().startswith(b"\x89PNG")


def test_the_part_of_a_gpu_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is lent for minutes is gone before the long part of the CPU is over."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gemini, "grid", lambda *given: [])
    for name, found in (("_gpu_part", ([], [])), ("measured", []), ("planned", []), ("step_time", ([], []))):
        monkeypatch.setattr(gemini, name, lambda *_, name=name, found=found: (calls.append(name), found)[1])
    gemini._measure(Options())
    assert calls == ["_gpu_part", "measured", "planned", "step_time"]


@pytest.mark.parametrize(("peak", "fits"), [(1000, True), (1001, False)])
def test_a_budget_is_of_what_is_allocated(peak: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator may reserve a quarter more, and who allocates more than the budget has not trained in it."""
    said: dict[str, float] = {}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=10_000))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share: said.update(share=share))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 1200)
    training = SimpleNamespace(timed=lambda: 1.0, moved_bytes=0, gemini=None)
    monkeypatch.setitem(offload.CONTENDERS, "plain PyTorch", lambda turn: training)
    turn = replace(TURN, contender="plain PyTorch", device="cuda", budget_bytes=1000)
    with nullcontext() if fits else pytest.raises(torch.OutOfMemoryError, match="1001 bytes were allocated"):
        found = take_turn(turn)
        assert (found.peak_bytes, found.reserved_bytes) == (1000, 1200)
    assert said == {"share": 0.125}


def test_ranks_of_a_gpu_each_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before NCCL is asked for: it takes the device that is the process's then."""
    calls: list[tuple] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda rank: calls.append(("device", rank)))
    monkeypatch.setattr(ranks.dist, "init_process_group", lambda backend, **_: calls.append((backend,)))
    for name in ("barrier", "destroy_process_group"):
        monkeypatch.setattr(ranks.dist, name, lambda: None)
    answers = SimpleNamespace(put=lambda answer: calls.append(answer))
    before = torch.get_num_threads()
    try:
        ranks._rank(1, 2, "store", answers, lambda: "found", ())
    finally:
        torch.set_num_threads(before)
    assert calls == [("device", 1), ("nccl",), (1, "found")]


def test_weights_drawn_on_a_device_are_distributed_as_those_of_the_host() -> None:
    """A GPU draws them; with the CPU in its place every parameter has the mean and deviation that it has there."""
    model = offload.built(Turn("Gemini", shaped("GPT-2", 1, 64), 1, 8, 1, 2**30, "cpu"))
    host = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    offload.draw_on("cpu", model)
    for name, drawn in model.named_parameters():
        parameter = drawn.detach()
        want, sampling = host[name], 5 * float(host[name].std(correction=0)) / host[name].numel() ** 0.5
        assert abs(float(parameter.mean() - want.mean())) <= 2 * sampling + 1e-12, name
        assert abs(float(parameter.std(correction=0) - want.std(correction=0))) <= 2 * sampling + 1e-12, name


def test_a_gpu_is_capped_above_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator reserves more than it has given out; what was given out is held against the budget itself."""
    found: list[float] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", found.append)
    offload._cap(100)
    offload._cap(990)
    assert found == [pytest.approx(offload.ROOM_TO_RESERVE / 10), 1.0]
    assert 1.0 < offload.ROOM_TO_RESERVE < 2.0
