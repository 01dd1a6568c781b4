"""The optimizer's step as a plan has it: chunk after chunk, and new values go ahead while others are still updated."""

from dataclasses import replace
from unittest.mock import patch

import pytest

from core.gemini.executor import LETS_GO
from core.optim.sharded import steps_apart
from tests.parity.test_train import GPT2, TOLERANCE, parallel
from tests.support.training import (
    Case,
    batch_of,
    build,
    data_axis,
    difference_from_single,
    gemini_of,
    loss,
    train_step,
    weight,
)

CASE = Case(replace(GPT2, num_layers=6), parallel=parallel(3), batch=2, length=4, budget="600KB", planned=True)


def followed(case: Case) -> dict[str, list]:
    """What a step's update does, and what the plan says that it does."""
    state, config = build(case)
    replicas, axis = gemini_of(state.parallel), data_axis(state.parallel.mesh)
    executor, planned = replicas.executor, replicas.planned
    assert executor is not None
    assert planned is not None
    rows = case.batch // axis.size()
    mine = {k: v[axis.get_local_rank() * rows :][:rows] for k, v in batch_of(case, 0).items()}
    at, fetch, updates, came = executor.at, executor._fetch, [], []

    def noted(kind, name, needed):
        if kind == "update":
            updates.append(name)
        at(kind, name, needed)

    def fetched(chunk):
        if updates and not chunk.resident:
            came.append((updates[-1], chunk.index))
        fetch(chunk)

    for step in range(3):
        updates.clear()
        came.clear()
        with patch.object(executor, "at", noted), patch.object(executor, "_fetch", fetched):
            train_step(state, mine, loss, weight, config, step)
    moments = [(k, m) for k, m in enumerate(planned.trace.moments) if m.kind == "update"]
    moves = [(m.name, move.chunk) for k, m in moments for move in planned.plan.moves[k] if move.kind not in LETS_GO]
    filled = [chunk.index for chunk in replicas.chunks if chunk.is_filled]
    return {"updates": updates[:], "came": came[:], "planned": [m.name for _, m in moments], "moves": moves,
            "filled": filled, "start": sorted(planned.plan.start), "apart": [steps_apart(state.optimizer)]}  # fmt: skip


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_moves_that_are_planned_among_updates_are_made(ranks, num_ranks: int) -> None:
    for found in ranks(num_ranks).run(followed, CASE):
        assert found["updates"] == found["planned"]
        assert found["came"] == found["moves"] != []
        assert found["filled"] == found["start"]  # the next step begins as its plan says


def test_an_optimizer_that_sends_takes_one_step(ranks) -> None:
    """Steps of parts would send as many messages each."""
    for found in ranks(2).run(followed, replace(CASE, optim="adafactor")):
        assert found["apart"] == [False]
        assert found["updates"] == found["came"] == []


@pytest.mark.parametrize("optim", ["adamw", "adamw8bit"])
def test_what_is_learned_is_the_same(ranks, optim: str) -> None:
    case = replace(CASE, optim=optim, batch=4, budget="700KB")
    difference, where = difference_from_single(ranks, 2, case)
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"
