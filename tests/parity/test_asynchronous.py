"""Workers that do not wait for one another: the parameter server is its record of arrivals replayed on one rank."""

import os
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from core.config import UserError
from core.gemini.config import GeminiConfig
from core.mesh import MeshConfig
from core.metrics import read_metrics
from core.optim.average import WeightAverage
from core.optim.build import OptimConfig, build_optimizer
from core.optim.schedule import ScheduleConfig, learning_rate
from core.optim.sgd import SgdConfig
from core.parallel.asynchronous import Clocks, ParameterServer, dealt_out
from core.parallel.local import LocalTrainingConfig
from core.parallel.recompute import RecomputeConfig
from core.runtime import start
from core.train import TrainConfig, fit
from tests.support.small import Rows, Small, build, config_of, loss, train

STEPS, TOLERANCE = 7, 1e-10
SCHEDULE = ScheduleConfig(warmup_steps=2)
ADAMW = OptimConfig("adamw", lr=1e-2, clip_norm=None, schedule=SCHEDULE)
SGD = SgdConfig(lr=5e-2, momentum=0.0, clip_norm=0.3, schedule=SCHEDULE)
MOMENTUM = SgdConfig(lr=1e-2, momentum=0.9, clip_norm=0.3, schedule=SCHEDULE)

Record = list[tuple[str, int, int]]
"""Of an owner: pushes and pulls, each of a worker and a step, and where all workers have met."""


class LateRows(Rows):
    """Those of rank 0's first step come when the others' pushes have been applied."""

    def batch(self, step: int, rank: int, num_ranks: int) -> dict[str, Tensor]:
        time.sleep(0.3 if step == rank == 0 else 0.0)
        return super().batch(step, rank, num_ranks)


class Found(NamedTuple):
    """What a rank has: values before and after, its owner's record, who owns what."""

    summary: dict[str, Any]
    begin: dict[str, Tensor]
    end: dict[str, Tensor]
    record: Record
    owned: list[list[str]]


def config(out: Path, local: LocalTrainingConfig, optim: Any = ADAMW, **options: Any) -> TrainConfig:
    return config_of(out, steps=STEPS, optim=optim, local=local, **options)


def served(staleness: int) -> LocalTrainingConfig:
    return LocalTrainingConfig("parameter_server", staleness)


def unevenly(model: nn.Module, batch: dict[str, Tensor], rank: int, draws: random.Random) -> Tensor:
    """The loss, on ranks that take different and changing times."""
    time.sleep(draws.choice((0.0, 0.004, 0.012)) * (1 + rank % 2))
    return loss(model, batch)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def run(given: TrainConfig, **options: Any) -> Found:
    with start("cpu", given.seed) as runtime:
        state = build(given, Small())
        parallel = state.parallel
        before = values(parallel.model)
        slow = partial(unevenly, rank=runtime.rank, draws=random.Random(runtime.rank))
        record: Record = []
        if isinstance(parallel, ParameterServer):
            begin, publish = parallel._begin, parallel.publish

            def recorded(step: int) -> None:
                begin(step)
                parallel.server.record = record

            def met() -> None:
                publish()
                record.append(("meet", -1, -1))

            with patch.object(parallel, "_begin", recorded), patch.object(parallel, "publish", met):
                summary = fit(parallel, state.optimizer, LateRows(), slow, given, runtime, **options)
            return Found(summary, before, values(parallel.model), record, parallel.owned)
        summary = fit(parallel, state.optimizer, Rows(), slow, given, runtime, **options)
        return Found(summary, before, values(parallel.model), record, [])


def gradient(at: dict[str, Tensor], worker: int, step: int, num_workers: int, clip: float | None) -> dict[str, Tensor]:
    model = Small().double()
    model.load_state_dict(at, strict=False)
    loss(model, Rows().batch(step, worker, num_workers)).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return clipped(grads, clip)


def clipped(grads: dict[str, Tensor], clip: float | None) -> dict[str, Tensor]:
    norm = float(torch.cat([grad.flatten() for grad in grads.values()]).norm())
    factor = 1.0 if clip is None or norm <= clip else clip / norm
    return {name: grad * factor for name, grad in grads.items()}


def replayed(found: list[Found], given: TrainConfig) -> dict[str, Tensor]:
    """The owners' records on one rank: each owner's updates in its order, gradients at the versions that were read.

    Where a run is resumed, its records follow those of the run before.
    """
    num_workers, owned, together = len(found), found[0].owned, given.local.staleness == 0
    each_clips, all_clip = (None, given.optim.clip_norm) if together else (given.optim.clip_norm, None)
    versions = [[{name: found[0].begin[name].clone() for name in names}] for names in owned]
    read = [{(worker, 0): 0 for worker in range(num_workers)} for _ in owned]
    masters = [{name: value.clone().requires_grad_() for name, value in of[0].items()} for of in versions]
    optimizers = [build_optimizer(given.optim, each) for each in masters]
    coming, grads, arrived = [list(each.record) for each in found], {}, [[] for _ in owned]

    def known(worker: int, step: int) -> dict[str, Tensor] | None:
        if (worker, step) not in grads:
            places = [each.get((worker, step)) for each in read]
            if any(at is None or at >= len(of) for at, of in zip(places, versions, strict=True)):
                return None
            at = {name: v for of, place in zip(versions, places, strict=True) for name, v in of[place or 0].items()}
            grads[worker, step] = gradient(at, worker, step, num_workers, each_clips)
        return grads[worker, step]

    def update(owner: int, step: int, own: Mapping[str, Any], share: float) -> None:
        for name, master in masters[owner].items():
            master.grad = own[name].clone()
        for group in optimizers[owner].param_groups:
            group["lr"] = share * learning_rate(step, STEPS, given.optim.lr, given.optim.schedule)
        optimizers[owner].step()
        versions[owner].append({name: master.detach().clone() for name, master in masters[owner].items()})

    pushes = [0] * num_workers
    while any(coming):
        moved = all(events and events[0][0] == "meet" for events in coming)
        if moved:  # the next step begins with the newest values of all owners, whatever was read before
            for owner, events in enumerate(coming):
                events.pop(0)
                step = pushes[owner] // num_workers
                read[owner] |= {(worker, step): len(versions[owner]) - 1 for worker in range(num_workers)}
        for owner, events in enumerate(coming):
            while events and events[0][0] != "meet":
                what, worker, step = events[0]
                if what == "pull":
                    read[owner][worker, step] = len(versions[owner]) - 1
                elif (own := known(worker, step)) is None:
                    break
                elif not together:
                    update(owner, step, own, 1 / num_workers)
                else:
                    arrived[owner].append(own)
                    if len(arrived[owner]) == num_workers:
                        mean = {n: torch.stack([each[n] for each in arrived[owner]]).mean(0) for n in own}
                        update(owner, step, clipped(mean, all_clip), 1.0)
                        arrived[owner].clear()
                pushes[owner] += what == "push"
                events.pop(0)
                moved = True
        assert moved, "a worker has read what was not there"
    return {name: value for of in versions for name, value in of[-1].items()}


def difference(end: dict[str, Tensor], expected: dict[str, Tensor], begin: dict[str, Tensor]) -> float:
    return max(float((end[n] - v).norm() / (v - begin[n]).norm().clamp(min=1e-6)) for n, v in expected.items())


RECOMPUTED = {"microbatch": 1, "recompute": RecomputeConfig("full")}


@pytest.mark.parametrize(
    ("size", "staleness", "optim", "options"),
    [
        (2, 0, MOMENTUM, {}),
        (2, 2, ADAMW, {}),
        (3, 1, SGD, RECOMPUTED),
        (3, 3, ADAMW, {}),
        (4, 2, MOMENTUM, {}),
        (1, 2, ADAMW, {}),
    ],
)
def test_the_record_replayed(
    ranks, tmp_path: Path, size: int, staleness: int, optim: Any, options: dict[str, Any]
) -> None:
    """With any number of owners, also more than balance; 8 rows do not divide over 3 ranks, which then see 6."""
    given = config(tmp_path, served(staleness), optim, **options)
    found = ranks(size).run(run, given)
    expected = replayed(found, given)
    for each in found:
        assert len([event for event in each.record if event[0] == "push"]) == size * STEPS
        assert difference(each.end, expected, each.begin) <= TOLERANCE
    assert sorted(name for names in found[0].owned for name in names) == sorted(expected)


def test_staleness_is_bounded_and_used(ranks, tmp_path: Path) -> None:
    staleness, size = 2, 3
    found = ranks(size).run(run, config(tmp_path, served(staleness)))
    for each in found:
        clocks, late = [0] * size, 0
        for what, worker, step in each.record:
            clocks[worker] += what == "push"
            if what == "pull":
                late = max(late, step - min(clocks))
        assert 0 < late <= staleness
    assert 0 < found[0].summary["most_staleness"] <= staleness
    assert {row["staleness"] for row in read_metrics(tmp_path / "metrics.jsonl")} <= {0, 1, 2}


def test_tokens_are_of_all_workers(ranks, tmp_path: Path) -> None:
    """While rank 0 waits for its first rows, the two others make the three steps that a staleness of 2 lets them."""
    staleness, size, rows = 2, 3, 8 // 3
    summary = ranks(size).run(run, config(tmp_path, served(staleness)))[0].summary
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    tokens = [round(row["tokens_per_s"] * row["step_s"]) // rows for row in metrics]
    assert tokens[0] > size
    assert size * STEPS - (size - 1) * staleness <= sum(tokens) <= size * STEPS
    assert summary["tokens_per_s"] == pytest.approx(rows * sum(tokens[2:]) / sum(row["step_s"] for row in metrics[2:]))
    ranks(2).run(run, config(tmp_path / "hogwild", LocalTrainingConfig("hogwild", 0), replace(SGD, weight_decay=0.0)))
    for row in read_metrics(tmp_path / "hogwild" / "metrics.jsonl"):
        assert 4 <= round(row["tokens_per_s"] * row["step_s"]) <= 12


def some(batch: dict[str, Tensor]) -> Tensor:
    """A weight that differs from rank to rank, and is zero on one of two in four of the steps, on both in none."""
    first = batch["x"][0]
    return (first[0] > 0).double() + 2 * (first[3] > 0).double()


@pytest.mark.parametrize(
    ("optim", "precision", "options"),
    [(ADAMW, "fp64", {}), (SGD, "fp64", {"weight": some}), (MOMENTUM, "bf16", {})],
    ids=["adamw", "clipped, weighted", "bf16"],
)
def test_without_staleness_it_is_synchronous(
    ranks, tmp_path: Path, optim: Any, precision: str, options: dict[str, Any]
) -> None:
    """Clipped by the norm of the mean, too; in bf16 to the bit, since two workers' weights are powers of two."""
    forms = {"served": served(0), "plain": LocalTrainingConfig(), "late": served(2)}
    given = {name: config(tmp_path / name, local, optim, precision=precision) for name, local in forms.items()}
    found, (plain, _), (late, _) = (ranks(2).run(run, each, **options) for each in given.values())
    for each in found:
        assert difference(each.end, plain.end, plain.begin) <= TOLERANCE
    assert difference(late.end, plain.end, plain.begin) > 1e-4


@pytest.mark.soak
def test_compiled_blocks(ranks, tmp_path: Path) -> None:
    found = ranks(2).run(run, config(tmp_path / "served", served(0), compile=True))
    plain = ranks(2).run(run, config(tmp_path / "plain", LocalTrainingConfig()))[0]
    for each in found:
        assert difference(each.end, plain.end, plain.begin) <= TOLERANCE
    summary = ranks(2).run(run, config(tmp_path / "late", served(2), compile=True, precision="bf16"))[0].summary
    assert summary["step"] == STEPS


def figures(model: nn.Module) -> dict[str, float]:
    return {f"{name} {at}": float(v) for name, value in values(model).items() for at, v in enumerate(value.flatten())}


def test_meetings_and_a_resumed_run_replayed(ranks, tmp_path: Path) -> None:
    """Checkpoints and evaluations are of all pushes; from there on all workers begin with the newest values."""
    given = config(tmp_path, served(2), ADAMW, evaluate_every=3)
    given = replace(given, checkpoint=replace(given.checkpoint, every=2))
    first = ranks(3).run(run, replace(given, stop_after=5), evaluate=figures)
    second = ranks(3).run(run, replace(given, resume="auto"), evaluate=figures)
    found = [now._replace(begin=one.begin, record=one.record + now.record) for one, now in zip(first, second)]
    expected = replayed(found, given)
    for each in found:
        assert difference(each.end, expected, each.begin) <= TOLERANCE
        said = {name: each.summary[name] for name in figures(Small())}
        assert said == {f"{n} {at}": float(v) for n, e in found[0].end.items() for at, v in enumerate(e.flatten())}
    third = next(row for row in read_metrics(tmp_path / "metrics.jsonl") if row["step"] == 3)
    assert figures(Small()).keys() <= third.keys()


def test_resumed_to_the_bit(ranks, tmp_path: Path) -> None:
    """Of an order that is the same each time; owners' moments go on, and another number of ranks takes them over."""
    given = config(tmp_path / "stopped", served(0))
    ranks(2).run(train, replace(given, stop_after=3), 0.3)
    resumed = ranks(2).run(run_with_dropout, replace(given, resume="auto"))[0]
    straight = ranks(2).run(run_with_dropout, replace(given, out=tmp_path / "straight"))[0]
    for name, value in straight.items():
        assert torch.equal(resumed[name], value), name
    late = replace(given, local=served(3), out=tmp_path / "late")
    ranks(3).run(run, replace(late, stop_after=4))
    summary = ranks(1).run(run, replace(late, local=LocalTrainingConfig(), resume="auto"))[0].summary
    assert summary["step"] == STEPS


def run_with_dropout(given: TrainConfig) -> dict[str, Tensor]:
    with start("cpu", given.seed) as runtime:
        state = build(given, Small(0.3))
        fit(state.parallel, state.optimizer, Rows(), loss, given, runtime)
        return values(state.parallel.model)


@pytest.mark.parametrize("kind", ["parameter_server", "hogwild"])
def test_all_stop_after_the_same_step(ranks, tmp_path: Path, kind: Any) -> None:
    """Two that are asked at different steps; the earlier one counts, and what was saved goes on."""
    given = config(tmp_path, LocalTrainingConfig(kind, 1), replace(SGD, weight_decay=0.0), hang_after=60)
    assert ranks(3).run(asked_to_stop, given) == [3] * 3
    summary = ranks(3).run(run, replace(given, resume="auto"))[0].summary
    assert summary["step"] == STEPS


def asked_to_stop(given: TrainConfig) -> int:
    """Rank 0 by SIGTERM in its third step, rank 1 in its second, rank 2 not."""
    with start("cpu", given.seed) as runtime:
        state, calls = build(given, Small()), []

        def stops(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            calls.append(None)
            if (runtime.rank, len(calls)) in ((0, 3), (1, 2)):
                os.kill(os.getpid(), signal.SIGTERM)
            return loss(model, batch)

        return fit(state.parallel, state.optimizer, Rows(), stops, given, runtime)["step"]


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
def test_any_order_of_pushes_keeps_the_bound_and_ends(staleness: int) -> None:
    """None begins a step too early, none waits for longer than it must, and some worker always computes."""
    for seed in range(40):
        draws = random.Random(seed)
        size, first = draws.randint(1, 6), draws.choice((0, 7))
        last, steps = first + draws.randint(1, 12), [first] * size
        favourite = draws.randrange(size)  # as fast as it is let
        clocks, computing = Clocks(size, staleness, first), set(range(size))
        while any(step < last for step in steps):
            able = sorted(worker for worker in computing if steps[worker] < last)
            assert able, "all wait"
            worker = favourite if favourite in able and draws.random() < 0.8 else draws.choice(able)
            computing.remove(worker)
            steps[worker] += 1
            for other, step in clocks.push(worker):
                assert step == steps[other]
                computing.add(other)
            assert clocks.applied == steps
            assert computing == {w for w in range(size) if steps[w] - min(steps) <= staleness}


def test_hogwild(ranks, tmp_path: Path) -> None:
    """One worker is exact; several have one memory, and learn."""
    shared, optim = LocalTrainingConfig("hogwild", 2), replace(SGD, weight_decay=0.0, clip_norm=None)
    one = ranks(1).run(run, config(tmp_path / "one", shared, optim))[0]
    plain = ranks(1).run(run, config(tmp_path / "plain", LocalTrainingConfig(), optim))[0]
    assert difference(one.end, plain.end, plain.begin) <= TOLERANCE
    found = ranks(3).run(run, config(tmp_path / "three", shared, optim))
    for each in found:
        assert all(torch.equal(each.end[name], value) for name, value in found[0].end.items())
    assert 0 < found[0].summary["most_staleness"] <= 2
    before, synchronous, end = (mean_loss(at) for at in (found[0].begin, plain.end, found[0].end))
    assert synchronous < before
    assert end - synchronous < 0.4 * (before - synchronous)


@torch.no_grad()
def mean_loss(at: dict[str, Tensor]) -> float:
    model = Small().double()
    model.load_state_dict(at, strict=False)
    return sum(float(loss(model, Rows().batch(step, 0, 1))) for step in range(20)) / 20


def released(given: TrainConfig) -> bool:
    """Whether an update that is under way keeps its gradients when the worker drops its own."""
    parallel = build(given).parallel
    for master in parallel.masters.values():
        master.grad = torch.ones_like(master)
    parallel.release()
    return all(master.grad is not None for master in parallel.masters.values())


def test_a_worker_leaves_the_owner_its_gradients(ranks, tmp_path: Path) -> None:
    assert ranks(1).run(released, config(tmp_path, served(1))) == [True]


def test_owners_have_about_as_much() -> None:
    owned = dealt_out({"a": 9, "b": 5, "c": 4, "d": 3, "e": 3}, 3)
    assert [sum({"a": 9, "b": 5, "c": 4, "d": 3, "e": 3}[n] for n in names) for names in owned] == [9, 8, 7]
    assert dealt_out({"a": 1}, 2) == [["a"], []]


def averaged(given: TrainConfig) -> None:
    state = build(given)
    with start("cpu") as runtime:
        average = WeightAverage(state.parallel.masters, lambda step: 0.9)
        fit(state.parallel, state.optimizer, Rows(), loss, given, runtime, average=average)


def test_an_average_is_refused(ranks, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"local\.async with an average of the weights"):
        ranks(1).run(averaged, config(tmp_path, served(1)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"zero": 1}, "zero=1"),
        ({"zero": 3, "gemini": GeminiConfig("1GB")}, "zero=3"),
        ({"gemini": GeminiConfig("1GB")}, "gemini.budget=1GB"),
        ({"mesh": MeshConfig(cp=2)}, "mesh.cp=2"),
        ({"mesh": MeshConfig(ep=2)}, "mesh.ep=2"),
        ({"local": LocalTrainingConfig("hogwild"), "precision": "bf16"}, "precision=bf16"),
        ({"mesh": MeshConfig(tp=2)}, "mesh.tp=2"),
        ({"mesh": MeshConfig(pp=2)}, "mesh.pp=2"),
        ({"precision": "fp16"}, "precision=fp16"),
        ({"noise_scale": True}, "noise_scale"),
        ({"optim": OptimConfig("muon")}, "optim.name=muon"),
        ({"optim": replace(ADAMW, plan=True)}, "optim.plan"),
        ({"local": LocalTrainingConfig("hogwild")}, "optim.name=adamw"),
    ],
)
def test_what_it_does_not_go_with(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        config_of(tmp_path, **{"local": served(1), **options})
    with pytest.raises(UserError, match="staleness=-1"):
        LocalTrainingConfig(staleness=-1)
