"""Local workers that are killed and join: what is left of each round is averaged, as in a simulation of all of them."""

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from core.checkpoint import CheckpointConfig, read_full
from core.optim.adamw import AdamWConfig
from core.optim.build import build_optimizer
from core.optim.schedule import ScheduleConfig, learning_rate
from core.parallel.local import LocalTrainingConfig
from core.train import TrainConfig
from tests.parity.test_elastic import START_S
from tests.support.elastic import Batch, Task, config, die_and_join, pause, replica, rows, said, store, wait_for_members
from tests.support.small import Small, loss

EVERY, STEPS = 4, 202
SCHEDULE = ScheduleConfig(warmup_steps=2)
ADAMW = AdamWConfig(lr=1e-2, clip_norm=0.3, schedule=SCHEDULE)
STILL = Task(dropout=0.0)


@pytest.fixture
def kept() -> TCPStore:
    return store()


def given(out: Path, kept: TCPStore, steps: int, every: int, **options: Any) -> TrainConfig:
    local, checkpoint = LocalTrainingConfig(every=every), CheckpointConfig(every=0)
    return config(out, kept.port, steps, 1, **{"local": local, "optim": ADAMW, "checkpoint": checkpoint, **options})


class Simulated:
    """All workers in one process, of which the log says who had which rows, and who was there when a round ended."""

    def __init__(self, of: TrainConfig):
        self.of = of
        torch.manual_seed(0)
        self.theta = {name: value.detach().clone() for name, value in Small().double().named_parameters()}
        self.momentum = {name: torch.zeros_like(value) for name, value in self.theta.items()}
        self.workers: dict[int, tuple[Small, torch.optim.Optimizer]] = {}
        self.items: dict[int, tuple[float, float]] = {}

    def worker(self, first: int | None) -> tuple[Small, torch.optim.Optimizer]:
        """One that begins at theta, with the inner optimizer of the first."""
        model = Small().double()
        model.load_state_dict(self.theta, strict=False)
        optimizer = build_optimizer(self.of.optim, dict(model.named_parameters()))
        if first is not None:
            optimizer.load_state_dict(deepcopy(self.workers[first][1].state_dict()))
        return model, optimizer

    def step(self, step: int, dealt: Mapping[str, list[int]]) -> float:
        """Returns the loss of the first worker's rows."""
        whole, losses = Batch().batch(step, 0, 1), {}
        for name in dealt:
            if int(name) not in self.workers:
                self.workers[int(name)] = self.worker(int(next(iter(dealt))) if self.workers else None)
        for name, (begin, end) in dealt.items():
            worker = int(name)
            model, optimizer = self.workers[worker]
            value = loss(model, {key: rows[begin:end] for key, rows in whole.items()})
            grads = torch.autograd.grad(value, list(model.parameters()))
            norm = float(torch.cat([grad.flatten() for grad in grads]).norm())
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.grad = grad * min(1.0, 0.3 / norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, self.of.steps, self.of.optim.lr, SCHEDULE)
            optimizer.step()
            number, total = self.items.get(worker, (0.0, 0.0))
            self.items[worker] = number + end - begin, total + (end - begin) * value.item()
            losses[worker] = value.item()
        return losses[min(losses)]

    @torch.no_grad()
    def end_round(self, there: list[int]) -> float:
        """Returns the mean loss of the round's items."""
        local = self.of.local
        have = [worker for worker in there if worker in self.items]
        total = sum(self.items[worker][0] for worker in have)
        for name, theta in self.theta.items():
            shares = [self.items[worker][0] / total for worker in have]
            own = [self.workers[worker][0].get_parameter(name) for worker in have]
            ways = [share * (theta - value) for share, value in zip(shares, own, strict=True)]
            mean = torch.stack(ways).sum(0)
            self.momentum[name] = local.outer_momentum * self.momentum[name] + mean
            theta -= local.outer_lr * (mean + local.outer_momentum * self.momentum[name])
        found = sum(self.items[worker][1] for worker in have) / total
        self.items = {}
        for worker in there:
            if worker not in self.workers:
                self.workers[worker] = self.worker(there[0])
            self.workers[worker][0].load_state_dict(self.theta, strict=False)
        return found


def check(of: TrainConfig) -> None:
    """The log and theta are those of the simulation, and all rows of the workers that were there were seen."""
    simulated, found = Simulated(of), rows(of.out)
    assert [row["step"] for row in found] == list(range(1, of.steps + 1))
    for row in found:
        ends = row["step"] % of.local.every == 0 or row["step"] == of.steps
        assert ends == ("round_loss" in row)
        own = simulated.step(row["step"] - 1, row["rows"])
        if row["step"] <= of.local.every:  # later another may lead
            assert abs(own - row["loss"]) < 1e-10
        if ends:
            assert abs(simulated.end_round(row["workers"]) - row["round_loss"]) < 1e-10, row
    ended = read_full(of.out / "checkpoints")
    for name, theta in simulated.theta.items():
        torch.testing.assert_close(ended[f"model/{name}"], theta, rtol=1e-10, atol=1e-10, msg=name)
        torch.testing.assert_close(
            ended[f"outer/momentum/{name}"], simulated.momentum[name], rtol=1e-10, atol=1e-10, msg=name
        )


def test_a_lost_worker_is_left_out_of_its_round_and_one_that_joins_loses_no_step(
    tmp_path: Path, kept: TCPStore
) -> None:
    of, slow = given(tmp_path / "run", kept, STEPS, EVERY), pause(0.15)
    workers = [replica(of, tmp_path / f"said-{number}", slow, STILL) for number in range(3)]
    try:
        wait_for_members(of.out, 3, START_S)
        workers.append(replica(of, tmp_path / "said-3", slow, STILL))
        while num_registered(kept) < 4:  # so that it comes while the round without the lost one is ended
            time.sleep(0.01)
        workers[0].kill()
        begin = time.monotonic()
        while "3" not in rows(of.out)[-1]["rows"]:
            assert time.monotonic() - begin < START_S
            time.sleep(0.02)
        slow.value = 0
        for number, process in enumerate(workers[1:], start=1):
            process.join(START_S)
            assert process.exitcode == 0, said(tmp_path / f"said-{number}")
    finally:
        for process in workers:
            process.kill()
    found = rows(of.out)
    assert [row for row in found if "workers" in row and set(row["rows"]) - set(map(str, row["workers"]))]
    check(of)


def num_registered(kept: TCPStore) -> int:
    run = json.loads(kept.get("began"))["run"]
    return kept.get(f"{run}/registered").decode().count(",")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ends_within_the_spread_of_three_seeds(tmp_path: Path) -> None:
    """Twenty kills in 400 steps, at any moment, while others join; a seed draws the model, the data and the kills."""
    steps, kills = 400, range(10, 372, 19)
    killed, quiet = ([_end(tmp_path, f"{len(of)}-{seed}", steps, seed, of) for seed in range(3)] for of in (kills, ()))
    print(f"with kills {killed}; undisturbed {quiet}")
    assert min(quiet) <= statistics.mean(killed) <= max(quiet)
    ratio = statistics.geometric_mean([one / other for one, other in zip(killed, quiet, strict=True)])
    assert 0.9 < ratio < 1.1, "seed by seed"


def _end(folder: Path, name: str, steps: int, seed: int, kills: Sequence[int]) -> float:
    """The loss on rows that are in no batch."""
    kept = store()
    optim = AdamWConfig(lr=1e-3, schedule=SCHEDULE)
    of = given(folder / name, kept, steps, 5, optim=optim, seed=seed)
    die_and_join(of, folder / f"said-{name}", Task(dropout=0.0, steep=0.4, seeded=True), 4, kills, START_S)
    assert [row["step"] for row in rows(of.out)] == list(range(1, steps + 1))
    return json.loads((of.out / "summary.json").read_text())["held_out"]
