"""A run that goes on on another mesh after every step, beside one rank's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from core.checkpoint import CheckpointConfig, Checkpointer
from core.compose import ParallelConfig
from core.layout import full_tensor
from core.mesh import data_axis
from core.models.decoder import DecoderConfig
from core.train import train_step
from tests.support.training import Case, batch_of, build, loss, of_all_stages, weight

STEPS_OF_A_LEG = 1


def leg(case: Case, folder: Path, first: int, last: int) -> dict[str, torch.Tensor]:
    """Steps first to last, from the checkpoint that is there unless first is 0; whole masters at the end."""
    state, config = build(case)
    checkpointer = Checkpointer(folder, CheckpointConfig(asynchronous=False), state.parallel.mesh)
    if first:
        assert state.load(checkpointer, None) == first
    axis = data_axis(state.parallel.mesh)
    rows = case.batch // axis.size()
    for step in range(first, last):
        mine = {k: v[axis.get_local_rank() * rows :][:rows] for k, v in batch_of(case, step).items()}
        train_step(state, mine, loss, weight, config, step)
    state.save(checkpointer, last)
    checkpointer.close()
    return of_all_stages({n: full_tensor(master) for n, master in state.parallel.masters.items()}, state.parallel.mesh)


def resumed_elsewhere(
    ranks, folder: Path, model: DecoderConfig, optim: str, legs: Sequence[tuple[Any, ...]]
) -> float:  # fmt: skip
    """The largest relative difference of a parameter after all legs from one rank's.

    legs  ranks, mesh, ZeRO level, and where Gemini moves parameters its budget
    """
    steps = STEPS_OF_A_LEG * len(legs)
    plain = Case(model, parallel=ParallelConfig(precision="fp64"), steps=steps, optim=optim)
    expected = ranks(1).run(leg, plain, folder / "one", 0, steps)[0]
    found: dict[str, torch.Tensor] = {}
    for index, (num_ranks, mesh, zero, *budget) in enumerate(legs):
        parallel = ParallelConfig(zero=zero, precision="fp64")
        given = {"budget": next(iter(budget), None), "planned": bool(budget)}
        case = Case(model, mesh, parallel, steps=steps, optim=optim, **given)
        first = index * STEPS_OF_A_LEG
        found = ranks(num_ranks).run(leg, case, folder / "moving", first, first + STEPS_OF_A_LEG)[0]
    return max(float((found[n] - v).norm() / v.norm().clamp(min=1e-3)) for n, v in expected.items())
