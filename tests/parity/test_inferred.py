"""Tensor parallelism that was inferred: n ranks train transformers' own models as one rank does."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.compose import ParallelConfig, parallelize
from core.config import UserError
from core.layout import full_tensor
from core.mesh import MeshConfig, Zero, build_mesh
from core.optim.build import OptimConfig, build_optimizer
from core.precision import LossScale
from core.train import TrainConfig, TrainState, num_rows, train_step
from tests.support.foreign import CASES, ROWS, UNSEEN, batch_of
from tests.support.zoo import in_fp64

LR, STEPS = 1e-2, 10


def trained(name: str, tp: int, zero: Zero) -> dict[str, Any]:
    """Losses, and where the parameters began and ended, whole."""
    case = (CASES | UNSEEN)[name]
    torch.manual_seed(0)
    with in_fp64():
        model = case.make().double().train()
        config = TrainConfig(zero=zero, precision="fp64", steps=STEPS, optim=OptimConfig(lr=LR, clip_norm=0.5))
        mesh = build_mesh(MeshConfig(tp=tp).resolve(dist.get_world_size(), zero), "cpu")
        parallel = parallelize(model, mesh, ParallelConfig(zero=zero, precision="fp64"))
        state = TrainState(parallel, build_optimizer(config.optim, parallel.masters), LossScale("fp64"), {})
        start = {n: full_tensor(m).clone() for n, m in parallel.masters.items()}
        losses = []
        data_ranks, data_rank = dist.get_world_size() // tp, dist.get_rank() // tp
        rows = slice(data_rank * ROWS // data_ranks, (data_rank + 1) * ROWS // data_ranks)
        for step in range(STEPS):
            batch = {k: v[rows] for k, v in batch_of(step).items()}
            losses.append(train_step(state, batch, case.loss, num_rows, config, step)["loss"])
        end = {n: full_tensor(m).clone() for n, m in parallel.masters.items()}
    cut = sum(m.numel() for m in parallel.masters.values()) / sum(m.numel() for m in end.values())
    return {"losses": losses, "start": start, "end": end, "cut": cut}


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-10)
    assert found["end"].keys() == expected["end"].keys()
    for name, end in expected["end"].items():
        assert torch.equal(found["start"][name], expected["start"][name]), name
        moved = end - expected["start"][name]
        floor = LR * STEPS * moved.numel() ** 0.5
        assert (found["end"][name] - end).norm() <= 1e-10 * max(float(moved.norm()), floor), name


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one(ranks, name: str) -> None:
    expected = ranks(1).run(trained, name, 1, 0)[0]
    for found in ranks(2).run(trained, name, 2, 0):
        check_equal(found, expected)
        assert found["cut"] < (0.95 if name == "mixtral" else 0.75)  # its experts stay whole


FORMS = [(4, 0), (2, 1), (2, 2), (2, 3)]
"""(tp, ZeRO) on four ranks."""
EACH = [(name, *FORMS[number % len(FORMS)]) for number, name in enumerate(CASES)]


@pytest.mark.parametrize(
    ("name", "tp", "zero"),
    [
        pytest.param(name, tp, zero, marks=() if (name, tp, zero) in EACH else pytest.mark.soak)
        for name in CASES
        for tp, zero in FORMS
    ],
)
def test_four_ranks_equal_one(ranks, name: str, tp: int, zero: Zero) -> None:
    expected = ranks(1).run(trained, name, 1, 0)[0]
    for found in ranks(4).run(trained, name, tp, zero):
        check_equal(found, expected)


@pytest.mark.soak
@pytest.mark.parametrize("name", UNSEEN)
def test_models_that_the_inference_was_not_written_with(ranks, name: str) -> None:
    """Right, or refused in a line: what runs equals one rank."""
    expected = ranks(1).run(trained, name, 1, 0)[0]
    found = ranks(2).run(tried, name)
    if isinstance(found[0], str):
        assert found[0].startswith("mesh.tp=2 without a plan: ")
        pytest.skip(found[0])
    for each in found:
        check_equal(each, expected)


def tried(name: str) -> dict[str, Any] | str:
    try:
        return trained(name, 2, 0)
    except UserError as refused:
        return str(refused)
