"""The study of large batches: what it fits and searches with, on planted answers."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks import large_batch_tasks as tasks
from benchmarks.large_batch import FULL, GAP, Study, ramp_then_cosine
from benchmarks.large_batch_tasks import (
    CONTENDERS,
    GROUP,
    Curve,
    GhostNorm,
    Task,
    best_rate,
    fitted,
    interval,
    to_target,
)
from benchmarks.result import Number, Row
from benchmarks.run import Options
from core.optim.build import OPTIMIZERS
from core.optim.prediction import Prediction


@pytest.mark.parametrize("critical", [3.0, 70.0, 2000.0])
def test_a_planted_curve_is_found(critical: float) -> None:
    planted = Curve(40.0, critical)
    found = fitted({rows: planted(rows) for rows in (8, 24, 72, 216, 648)})
    assert found.critical == pytest.approx(critical, rel=0.01)
    assert found.fewest == pytest.approx(40.0, rel=0.01)


def test_the_interval_is_students_of_the_logarithms() -> None:
    mean, low, high = interval([50.0, 100.0, 200.0])
    assert mean == pytest.approx(100)
    assert math.log(high / mean) == pytest.approx(4.303 * math.log(2) / math.sqrt(3))
    assert low * high == pytest.approx(mean**2)


@pytest.mark.parametrize("best", [0.3, 1.0, 3.9, 7.5])
def test_the_search_finds_a_rate_within_its_budget(best: float) -> None:
    tried = []

    def score(rate: float, least: float) -> float:
        tried.append((rate, least))
        return abs(math.log(rate / best))

    found = best_rate(score, 1.0, 5)
    assert abs(math.log2(found / best)) <= 0.5
    assert len({rate for rate, _ in tried}) == 5
    assert tried[-1][1] == min(abs(math.log(rate / best)) for rate, _ in tried[:-1])


def test_the_search_leaves_where_all_diverges() -> None:
    found = best_rate(lambda rate, _: math.inf if rate > 0.1 else 1 / rate, 1.0, 5)
    assert 0.05 < found <= 0.1


def test_ghost_norm_is_batch_norm_of_microbatches() -> None:
    torch.manual_seed(0)
    ghost, plain = GhostNorm(3).double(), nn.BatchNorm2d(3).double()
    x = torch.randn(4 * GROUP, 3, 2, 2, dtype=torch.float64)
    for norm in (ghost, plain):
        nn.init.uniform_(norm.weight, generator=torch.Generator().manual_seed(1))
    groups = [x[n::4] for n in range(4)]  # a row and the next are of different groups
    for rows, made in zip(groups, (ghost(x)[n::4] for n in range(4)), strict=True):
        assert torch.allclose(made, plain(rows), rtol=1e-12, atol=1e-12)
    ghost.eval()
    assert torch.allclose(ghost(x), plain(x), rtol=1e-12, atol=1e-12)


def a_task(slope: float, target: float = math.exp(-1.05)) -> Task:
    """One number, whose loss falls to exp(-slope n) in n steps, whatever is drawn."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.number = nn.Parameter(torch.zeros(1))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return -model.get_parameter("number").sum()

    def draw(rows: int, seed: int) -> Callable[[int], dict[str, Tensor]]:
        return lambda step: {}

    def predict(model: nn.Module, batch: dict[str, Tensor]) -> Prediction:
        raise AssertionError

    def look(model: nn.Module) -> float:
        return math.exp(-slope * float(model.get_parameter("number").detach()))

    return Task("one", lambda seed: One(), lambda seed: One(), draw, loss, predict, look, target, (8,), 8)


def test_steps_to_a_target_are_counted_in_parts_of_a_step() -> None:
    plain = replace(CONTENDERS["sgd"], options={"momentum": 0.0, "weight_decay": 0.0})
    assert to_target(a_task(0.1), plain, 8, 1.0, 0, 100).steps == pytest.approx(10.5)
    assert to_target(a_task(0.1), plain, 8, 1.0, 0, 100, warmup=4).steps == pytest.approx(12.0)
    short = to_target(a_task(0.1), plain, 8, 1.0, 0, 5)
    assert (short.there, short.steps) == (False, 5)
    assert short.loss == pytest.approx(math.exp(-0.5))
    assert not to_target(a_task(-5.0), plain, 8, 1.0, 0, 100).there, "it diverges"
    assert short.score(0.35) > 5


def test_what_was_kept_is_not_made_again() -> None:
    kept = Row({"part": "steps", "rows": 8}, {"steps": Number(3.0, "")})
    told: list[Row] = []
    study = Study(Options(earlier=(kept,), kept=told.append))
    assert study.row({"part": "steps", "rows": 8}, dict) is kept
    made = study.row({"part": "steps", "rows": 24}, lambda: {"steps": Number(1.0, "")})
    assert told == [made]
    assert study.find(rows=24) == [made]


def test_the_study_is_of_optimizers_that_there_are_and_rates_end_at_zero() -> None:
    assert CONTENDERS.keys() <= OPTIMIZERS.keys()
    assert {optimizer for optimizer, _, _ in GAP.values()} <= CONTENDERS.keys()
    assert all(rows % GROUP == 0 for rows in FULL.of_gap)
    assert [ramp_then_cosine(step, 2, 4) for step in (1, 2, 3, 4)] == pytest.approx([0.5, 1.0, 1.0, 0.5])
    assert tasks.ramp(0)(1) == 1.0
