"""An average of the weights beside a disk: it lies with its masters, and is bit for bit that without a disk."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import UserError
from core.runtime import join
from core.train import TrainState
from core.train.loop import train_step
from tests.support.disk import CASE, counted_and_planned, learned
from tests.support.training import Case, batch_of, build, evaluated, gemini_of, loss, weight

AVERAGED = replace(CASE, average=0.5, host="250KB")
EARLY = replace(AVERAGED, clip=None, parallel=replace(CASE.parallel, precision="fp32"), budget="110KB", host="280KB")
NARROW = replace(AVERAGED, optim="sgd", clip=1.0)


@pytest.fixture(scope="module", autouse=True)
def joined() -> None:
    join("cpu")


@pytest.fixture
def closed() -> Iterator[list[TrainState]]:
    """Runs that are closed at the end."""
    found: list[TrainState] = []
    yield found
    for state in found:
        state.parallel.close()


def steps_of(state: TrainState, config: Any, case: Case, steps: range) -> list[Any]:
    """Of each step its loss, and that of the average behind it."""
    found = []
    for step in steps:
        batch = batch_of(case, step)
        row = train_step(state, batch, loss, weight, config, step)
        assert state.average is not None
        with state.parallel.showing(state.average):
            shown = evaluated(state, batch)
        found.append((row["loss"], shown, evaluated(state, batch)))
        state.commit(step + 1, config)
    return found


@pytest.mark.parametrize("case", [EARLY, NARROW], ids=["beside the backward", "in 16 bits"])
def test_it_is_that_of_no_disk_and_goes_on_in_another_budget(closed: list[TrainState], case: Case, tmp_path: Path):
    state, config = build(replace(case, host=None))
    expected = steps_of(state, config, case, range(4))
    assert expected[-1][1] != expected[-1][2]
    values = {name: value.clone() for name, value in learned(state).items()}

    state, config = build(replace(case, disk=tmp_path / "disk"))
    closed.append(state)
    replicas = gemini_of(state.parallel)
    assert replicas.disk is not None
    assert replicas.disk.away
    assert replicas.disk.housed
    assert steps_of(state, config, case, range(2)) == expected[:2]
    assert replicas.host.peak_bytes <= replicas.host.budget_bytes
    state.parallel.close()

    state, config = build(replace(case, disk=tmp_path / "disk", budget="150KB", host="330KB"))
    closed.append(state)
    durable = state.parallel.durable
    assert durable is not None
    assert durable.latest() == (2, str(config.out.resolve()))
    state.load_durable(2)
    assert steps_of(state, config, case, range(2, 4)) == expected[2:]
    for name, value in learned(state).items():
        assert torch.equal(value, values[name]), name
    for name, value in state.complete_tensors().items():
        assert not name.startswith("average/") or torch.equal(value, values[name]), name


def test_an_update_moves_eight_bytes_more(closed: list[TrainState], tmp_path: Path) -> None:
    """In bf16 with AdamW 34 of a parameter: the average is read and written beside 26; and all of it is planned."""
    model = replace(CASE.model, dim=120, ffn_dim=240, num_layers=1)
    case = replace(AVERAGED, model=model, budget="1.5MB", host="3.6MB", disk=tmp_path / "disk")
    state, config = build(case)
    closed.append(state)
    replicas = gemini_of(state.parallel)
    disk, planned = replicas.disk, replicas.planned
    assert disk is not None
    assert planned is not None
    found, closed_form = counted_and_planned(state, config)
    assert found == closed_form
    assert all(slots.num_bytes <= planned.trace.chunks[chunk.index].slot_bytes for chunk, slots in disk.slots.items())
    largest = max(disk.slots.values(), key=lambda slots: slots.chunk.own_elements)
    moved = largest.num_bytes + sum(b - a for a, b in largest.updated)
    assert moved == pytest.approx(34 * largest.chunk.own_elements, rel=0.1)
    assert planned.plan.disk_written_bytes + planned.plan.durable_bytes == pytest.approx(found[1], rel=0.1)


def test_a_folder_of_a_run_without_it_is_of_another(closed: list[TrainState], tmp_path: Path) -> None:
    state, config = build(replace(CASE, disk=tmp_path / "disk"))
    closed.append(state)
    train_step(state, batch_of(CASE, 0), loss, weight, config, 0)
    state.commit(1, config)
    state.parallel.close()
    state, _ = build(replace(AVERAGED, disk=tmp_path / "disk"))
    closed.append(state)
    with pytest.raises(UserError, match="has no average of weights of"):
        state.load_durable(1)
