"""The benchmark of asynchronous pipelines: its recurrence, its intervals, its clock."""

import pytest
import torch
from torch import Tensor

from benchmarks.async_pipeline import Run, clock_s, gaps, runs, seeds_of
from benchmarks.recurrence import Recurrence, Sizes, learn, paired_interval
from benchmarks.result import Number, Row
from core.optim.build import OptimConfig, build_optimizer
from core.parallel.correction import CORRECTIONS, CorrectionName
from core.parallel.pipeline.schedule import SCHEDULES

DELAYS = {"first": 2, "second": 1, "third": 0}
START = {"first": 0.7, "second": -1.1, "third": 0.4}
LR = 0.05


def loss(weights: dict[str, Tensor]) -> Tensor:
    """Each gradient depends on all weights, so that a wrong version of any is seen in all."""
    return (weights["first"] * weights["second"] * weights["third"] - 0.5).square().sum()


def by_recurrence(correction: CorrectionName) -> list[dict[str, Tensor]]:
    masters = {n: torch.tensor([value], dtype=torch.float64, requires_grad=True) for n, value in START.items()}
    optimizer = build_optimizer(OptimConfig("sgd", lr=LR, momentum=0.0), masters)
    run, made = Recurrence(masters, DELAYS, optimizer, correction, 3), []
    for _ in range(9):
        with run.computing():
            loss(masters).backward()
        run.update()
        optimizer.zero_grad()
        made.append({name: master.detach().clone() for name, master in masters.items()})
    return made


def by_hand(correction: CorrectionName) -> list[dict[str, Tensor]]:
    strength = CORRECTIONS[correction].strength or 0.0
    made = [{name: torch.tensor([value], dtype=torch.float64) for name, value in START.items()}]
    versions, changes = [made[0]], list[dict[str, Tensor]]()
    for step in range(9):
        used = {n: versions[max(step - d, 0)][n].clone().requires_grad_() for n, d in DELAYS.items()}
        loss(used).backward()
        change, new, version = {}, {}, {}
        for name, delay in DELAYS.items():
            grad, now = used[name].grad, made[-1][name]
            assert grad is not None
            if correction == "dc_asgd":
                grad = grad + strength * grad**2 * (now - made[max(step - delay, 0)][name])
            rate = LR / max(delay, 1) ** max(0.0, 1 - step / 3) if correction == "lr_by_delay" else LR
            change[name] = -rate * grad
            moved = change[name]
            if correction == "error_feedback" and step >= delay > 0:
                moved = moved + strength * (moved - changes[step - delay][name])
            new[name] = now + moved
            version[name] = new[name] + (delay * moved if correction == "prediction" else 0)
        made.append(new)
        versions.append(version)
        changes.append(change)
    return made[1:]


@pytest.mark.parametrize("correction", [name for name in CORRECTIONS if name != "nesterov"])
def test_each_stage_is_as_late_as_it_is(correction: CorrectionName) -> None:
    for found, expected in zip(by_recurrence(correction), by_hand(correction), strict=True):
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=0, atol=1e-13), name


def test_an_optimizer_of_whole_matrices_steps_stage_by_stage() -> None:
    """As in one step, where no stage is late."""
    sizes = Sizes(dim=16, num_layers=2, ffn_dim=16, rows=2, length=8, steps=3, heldout_rows=2, train_bytes=1 << 12)
    optim = OptimConfig("muon", lr=1e-2)
    torch.manual_seed(0)
    whole = learn(sizes, optim, lambda stage, stages: 0, 1, "none", 0)
    staged = learn(sizes, optim, lambda stage, stages: 0, 2, "error_feedback", 0)
    late = learn(sizes, optim, SCHEDULES["pipedream"].delay, 2, "none", 0)
    assert staged.nats == pytest.approx(whole.nats, abs=1e-5)
    assert late.nats != pytest.approx(whole.nats, abs=1e-5)


def test_paired_intervals() -> None:
    low, high = paired_interval([0.1, 0.2, 0.3])
    assert (low + high) / 2 == pytest.approx(0.2)
    assert high - low == pytest.approx(2 * 4.303 * 0.1 / 3**0.5)


def test_gaps_are_of_pairs() -> None:
    nats = {1: 0.0, 2: 0.1}

    def row(run: Run, seed: int) -> Row:
        value = 2 + seed + nats.get(run.stages, 0.3) * (run.schedule != "1f1b")
        return Row(run.case(seed), {"held-out": Number(value, "nats/byte")})

    rows = [row(run, seed) for run in runs(True) for seed in seeds_of(True)]
    for gap in gaps(rows, True):
        assert [round(gap.numbers[name].value, 12) for name in ("gap", "gap from", "gap to")] == [0.1] * 3


@pytest.mark.parametrize(("microbatches", "link"), [(4, 0.0), (4, 0.25), (8, 0.0)])
def test_the_clock(microbatches: int, link: float) -> None:
    ahead, share = clock_s("2bw", 4, microbatches, link)
    step, _ = clock_s("1f1b", 4, microbatches, link)
    assert ahead < step
    if not link:
        assert step / ahead == pytest.approx((microbatches + 3) / microbatches, rel=0.02)
        assert share > 0.98
