"""core.auto.parallelize with stages: each rank has its stage's parameters alone, and learns what one rank does."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from core.auto import clip_grad_norm_, parallelize, pipelined, plan_of
from core.config import UserError
from core.layout import full_tensor
from tests.support import foreign
from tests.support.spread import CASES, FREE, LR, SLOW, ids_of, state
from tests.support.zoo import in_fp64

TIGHT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and the loss of what it returns, by the number of the step."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any]]
    loss: Callable[[Any, int], Tensor]


def of_tokens(output: Any, step: int) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), ids_of(step).flip(1).flatten())


def ids_alone(step: int) -> dict[str, Any]:
    return {"input_ids": ids_of(step)}


def pairs(step: int) -> dict[str, Any]:
    return {"input_ids": ids_of(step)[:, :4], "decoder_input_ids": ids_of(step + 1), "use_cache": False}


def pictures(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"pixel_values": torch.randn(6, 3, 16, 16, dtype=torch.float64, generator=generator)}


STAGED = {
    "gpt2": Case(foreign.gpt2, lambda step: ids_alone(step) | {"use_cache": False}, of_tokens),
    "bert": Case(foreign.bert, ids_alone, of_tokens),
    "t5": Case(foreign.t5, pairs, of_tokens),
    "vit": Case(foreign.vit, pictures, lambda output, step: F.cross_entropy(output.logits, ids_of(step)[:, 0] % 5)),
    "unet": Case(CASES["unet"].make, CASES["unet"].inputs, lambda output, _: output.sample.square().mean()),
    "resnet": Case(CASES["resnet"].make, CASES["resnet"].inputs, lambda output, _: output["loss"]),
    "gpt2 with its loss": Case(foreign.gpt2, CASES["gpt2"].inputs, lambda output, _: output.loss),
}


@lru_cache
def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("stage", "x", "y")[: len(sizes)])


def pair(case: Case, sizes: tuple[int, ...], **options: Any) -> tuple[nn.Module, nn.Module]:
    """A module, and the same one in stages."""
    torch.manual_seed(0)
    alone = case.make().double().train()
    model = copy.deepcopy(alone)
    options = {"mesh": mesh_of(*sizes), "stages": sizes[0], "links": [FREE], "speed": SLOW} | options
    assert parallelize(model, case.inputs(0), **options) is model
    return alone, model


def learned(model: nn.Module, case: Case, steps: int, clip: Callable[..., Any]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-5)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = case.loss(model(**case.inputs(step)), step)
        loss.backward()
        clip(model, 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def clipped(model: nn.Module, most: float) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), most)


def trained(name: str, sizes: tuple[int, ...], microbatches: int, steps: int) -> dict[str, Any]:
    """How far apart the two are: losses, and parameters relative to how far they moved."""
    case = STAGED[name]
    with in_fp64():
        alone, model = pair(case, sizes, microbatches=microbatches)
        before = {name: tensor.detach().clone() for name, tensor in state(alone).items()}
        one, ours = learned(alone, case, steps, clipped), learned(model, case, steps, clip_grad_norm_)
    expected, apart = state(alone), {}
    for key, tensor in state(model).items():
        whole = expected[key].detach().double()
        if whole.numel():
            moved = (whole - before[key].double()).norm()
            least = 1e-3 * LR * steps * whole.numel() ** 0.5
            apart[key] = float((full_tensor(tensor).detach().double() - whole).norm() / max(moved, least))
    worst = max(apart, key=lambda key: apart[key])
    return {
        "losses": max(abs(a - b) for a, b in zip(ours, one, strict=True)),
        "apart": apart[worst],
        "worst": worst,
        "names": [name for name, _ in model.named_parameters()],
        "all": [name for name, _ in alone.named_parameters()],
        "is_cut": plan_of(model).is_cut(),
    }


def right(found: list[dict[str, Any]], stages: int) -> None:
    for rank, of in enumerate(found):
        print(f"rank {rank}: losses {of['losses']:.1e} apart, {of['worst']} {of['apart']:.1e}, {len(of['names'])} here")
        assert of["losses"] <= 1e-10
        assert of["apart"] <= 1e-10, of["worst"]
    each = [set(of["names"]) for of in found[:: len(found) // stages]]
    assert set.union(*each) == set(found[0]["all"])
    assert sum(map(len, each)) == len(found[0]["all"])
    assert all(each)


FEW = {("t5", (2, 1), 2)}
CALLS = [
    *((name, (2, 1), m) for name in ("gpt2", "bert", "t5", "vit", "unet") for m in (1, 2, 3)),
    ("resnet", (2, 1), 1),
    ("gpt2 with its loss", (2, 1), 1),
    *((name, sizes, 2) for name in ("gpt2", "bert", "t5") for sizes in ((2, 2), (2, 1, 2))),
    ("resnet", (2, 2), 1),
    ("t5", (4, 1), 3),
]


@pytest.mark.parametrize(
    ("name", "sizes", "microbatches"),
    [pytest.param(*call, marks=() if call in FEW else pytest.mark.soak, id=str(call)) for call in CALLS],
)
def test_stages_learn_as_one_rank(ranks, name: str, sizes: tuple[int, ...], microbatches: int) -> None:
    count = 4 if 4 in (sizes[0], sizes[0] * sizes[-1]) else 2
    steps = 3 if (name, sizes, microbatches) in FEW else 10
    found = ranks(count).run(trained, name, sizes, microbatches, steps)
    right(found, sizes[0])
    assert all(of["is_cut"] for of in found) or count == sizes[0]


def without_a_message(name: str) -> dict[str, Any]:
    """Gradients that come from a later stage are taken for zero."""
    received = pipelined._Run._received

    def none(self: Any, phase: Any) -> dict[str, Tensor]:
        found = received(self, phase)
        return {key: torch.zeros_like(t) for key, t in found.items()} if phase == "backward" else found

    with patch.object(pipelined._Run, "_received", none):
        return trained(name, (2, 1), 1, 2)


def kept_and_refused() -> None:
    case = STAGED["gpt2"]
    with in_fp64():
        alone, model = pair(case, (2, 1))
        # Other shapes, evaluation without a graph, and the state under the original names.
        more = {"input_ids": ids_of(3)[:4, :3], "use_cache": False}
        torch.testing.assert_close(model(**more).logits, alone(**more).logits, **TIGHT)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(**more).logits, alone.eval()(**more).logits, **TIGHT)
        model.train()
        plain = {name: tensor + 1 for name, tensor in alone.state_dict().items()}
        model.load_state_dict(plain)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(full_tensor(tensor), plain[name], **TIGHT)
        assert 0 < len(model.state_dict()) < len(plain)
    options = {"mesh": mesh_of(2, 1), "stages": 2}
    with pytest.raises(UserError, match="microbatches=4 of a batch of 6 rows"):
        parallelize(foreign.gpt2(), ids_alone(0), **options, microbatches=4)
    with pytest.raises(UserError, match=r"output\.loss is a number, not rows of the batch"):
        parallelize(foreign.gpt2(), CASES["gpt2"].inputs(0), **options, microbatches=2)
    with pytest.raises(UserError, match="has its statistics of a batch, and of each microbatch they are others"):
        parallelize(CASES["resnet"].make().double(), CASES["resnet"].inputs(0), **options, microbatches=2)
    alone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 4))
    with pytest.raises(UserError, match="has its statistics of a batch"):
        parallelize(alone, {"input": torch.ones(6, 4)}, **options, microbatches=2)
    with pytest.raises(UserError, match="draws random numbers, which stages do not draw as one rank would"):
        parallelize(foreign.DROPPING["gpt2 with dropout"].make(), ids_alone(0), **options)
    with pytest.raises(UserError, match="no list of blocks"):
        parallelize(nn.Linear(3, 3), {"input": torch.ones(2, 3)}, **options)
    with pytest.raises(UserError, match="are not the module's 2 blocks"):
        parallelize(foreign.gpt2(), ids_alone(0), mesh=mesh_of(2, 1), stages=(2, 2))
    with pytest.raises(UserError, match="stages take no constraints"):
        parallelize(foreign.gpt2(), ids_alone(0), **options, node={"*": "S0"})
    with pytest.raises(UserError, match="whose first axis is called stage"):
        parallelize(foreign.gpt2(), ids_alone(0), mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), stages=2)
    with pytest.raises(UserError, match="give stages, or leave it out"):
        parallelize(foreign.gpt2(), ids_alone(0), microbatches=2)


def test_what_is_kept_and_refused(ranks) -> None:
    ranks(2).run(kept_and_refused)
    found = ranks(2).run(without_a_message, "gpt2")
    assert max(of["apart"] for of in found) > 1e-3


def refused_on_three() -> None:
    with pytest.raises(UserError, match="give a divisor of 3"):
        parallelize(foreign.gpt2(), ids_alone(0), stages=2)
    with pytest.raises(UserError, match=r"mesh=\(2, 2\): 4 ranks, and there are 3; .* 3, which is prime: \(3,\)"):
        parallelize(foreign.gpt2(), ids_alone(0), mesh=(2, 2))


@pytest.mark.soak
def test_three_ranks_are_no_mesh_of_two_axes(ranks) -> None:
    ranks(3).run(refused_on_three)
