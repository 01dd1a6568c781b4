"""Tensor parallelism that was inferred: n ranks train transformers' own models as one rank does."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from core.comm.volume import count_volume
from core.compose import ParallelConfig, parallelize
from core.config import UserError
from core.layout import full_tensor
from core.mesh import MeshConfig, Zero, build_mesh
from core.optim.build import OptimConfig, build_optimizer
from core.parallel.data import Completion
from core.parallel.infer import infer_plan, sample_of
from core.placement.messages import microbatch_bytes, partial_sum_bytes
from core.placement.table import placement
from core.precision import LossScale
from core.train import TrainConfig, TrainState, num_rows, train_step
from tests.support.foreign import CASES, DROPPING, LENGTH, ROWS, UNSEEN, batch_of
from tests.support.zoo import in_fp64

LR, STEPS = 1e-2, 10


def trained(name: str, tp: int, zero: Zero) -> dict[str, Any]:
    """Losses, and where the parameters began and ended, whole."""
    case = (CASES | DROPPING | UNSEEN)[name]
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


FORMS = [(4, 0), (2, 1), (2, 2), (2, 3)]
"""(tp, ZeRO) on four ranks."""
EACH = [("bert", 4, 0), ("gpt2", 2, 1), ("whisper", 2, 3)]
"""What every run tests; the other cases it tests on two ranks."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.soak) if name in [name for name, *_ in EACH] else name for name in CASES],
)
def test_two_ranks_equal_one(ranks, name: str) -> None:
    expected = ranks(1).run(trained, name, 1, 0)[0]
    for found in ranks(2).run(trained, name, 2, 0):
        check_equal(found, expected)
        assert found["cut"] < (0.95 if name == "mixtral" else 0.75)  # its experts stay whole


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


def test_dropout_drops_what_one_rank_drops(ranks) -> None:
    """Where attention is written out; torch's own operator on one rank draws for itself."""
    expected = ranks(1).run(trained, "gpt2 with dropout", 1, 0)[0]
    for found in ranks(2).run(trained, "gpt2 with dropout", 2, 0):
        check_equal(found, expected)


def test_dropout_of_fused_attention_is_alike_on_any_ranks_of_tensor_parallelism(ranks) -> None:
    expected = ranks(2).run(trained, "gpt2 with fused dropout", 2, 0)[0]
    for found in ranks(4).run(trained, "gpt2 with fused dropout", 4, 0):
        check_equal(found, expected)


def sent_and_said(name: str) -> tuple[dict[Any, int], dict[Any, int]]:
    """Bytes of a microbatch and of the sums of partial gradients: counted, and by the plan's closed forms."""
    model = CASES[name].make().train()
    found = infer_plan(model, 2, sample_of(model)).plan
    mesh = MeshConfig(tp=2).resolve(2, 0)
    said = microbatch_bytes(model, found, mesh, ROWS, LENGTH) + partial_sum_bytes(placement(model, found, mesh))
    parallel = parallelize(model, build_mesh(mesh, "cpu"), ParallelConfig(), found)
    # What data parallelism sends is counted in tests/unit/test_volume.py.
    used = patch.object(Completion, "used_anywhere", lambda _, masters, together: set(masters))
    with used, count_volume(parallel.mesh) as volume:
        with parallel.microbatch(last=True):
            CASES[name].loss(parallel.model, batch_of(0)).backward()
        parallel.reduce()
    return {key: n for key, n in volume.bytes.items() if key[1] == "tp" and n}, dict(said)


@pytest.mark.parametrize("name", ["bert", "gpt2", "opt", "bloom", "llama"])
def test_messages_are_those_of_the_closed_forms(ranks, name: str) -> None:
    for counted, said in ranks(2).run(sent_and_said, name):
        assert counted == said


REFUSED = {"gpt_bigcode": "transformer.h.0.attn"}
"""Models that are refused -> the module that the line names: one head of keys stands in a matrix with the queries."""


@pytest.mark.soak
@pytest.mark.parametrize("name", UNSEEN)
def test_models_that_the_inference_was_not_written_with(ranks, name: str) -> None:
    """Right, or refused in a line: what runs equals one rank."""
    expected = ranks(1).run(trained, name, 1, 0)[0]
    found = ranks(2).run(tried, name)
    for each in found:
        if name in REFUSED:
            assert isinstance(each, str)
            assert each.startswith("mesh.tp=2 without a plan: ")
            assert REFUSED[name] in each
        else:
            assert isinstance(each, dict), each
            check_equal(each, expected)


def tried(name: str) -> dict[str, Any] | str:
    try:
        return trained(name, 2, 0)
    except UserError as refused:
        return str(refused)
