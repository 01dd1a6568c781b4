"""Modules that the solver spreads, beside the same ones untouched: both train in one process of each rank."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from core.auto import parallelize, plan_of, spread
from core.auto.costs import Link
from core.auto.problem import Problem
from core.auto.simulate import simulate
from core.auto.solve import Plan
from core.layout import full_tensor
from core.trace.machine import Speed
from tests.support import foreign
from tests.support.auto_models import MODELS, made
from tests.support.zoo import in_fp64

ROWS, LENGTH = 6, 5
LR, STEPS = 1e-2, 10
FREE, SLOW = Link(0.0, 1e15), Speed(1e7, 1e7)
"""Messages cost nothing and work a lot: everything that can be cut is."""
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model, its inputs at each step, and what of its output is the loss."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    loss: Callable[[Any], Tensor] = lambda output: output.loss


def drawn(step: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def ids_of(step: int) -> Tensor:
    return torch.randint(3, foreign.VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def tokens(step: int) -> Inputs:
    ids = ids_of(step)
    return {"input_ids": ids, "labels": ids}


def padded_tokens(step: int) -> Inputs:
    ids = ids_of(step)
    return {"input_ids": ids, "attention_mask": (torch.arange(LENGTH) < 3 + ids[:, :1] % 3).long()}


class Residual(nn.Module):
    def __init__(self, channels: int, made: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(n, made, 3, padding=1, bias=False) for n in (channels, made))
        self.norm1, self.norm2 = nn.BatchNorm2d(made), nn.BatchNorm2d(made)
        self.by = nn.Conv2d(channels, made, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made = F.relu(self.norm1(self.first(x)), inplace=True)
        made = self.norm2(self.second(made))
        made += self.by(x)
        return F.relu(made, inplace=True)


class ResNet(nn.Module):
    """Convolutions, BatchNorm, in place what can be."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(3, 6), Residual(6, 10)])
        self.head = nn.Linear(10, 5)

    def forward(self, x: Tensor, classes: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = F.max_pool2d(block(x), 2)
        logits = self.head(x.mean((2, 3)))
        return {"loss": F.cross_entropy(logits, classes), "logits": logits}


def encoder() -> nn.Module:
    return foreign.bert().bert


def unet() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        in_channels=2,
        out_channels=2,
        block_out_channels=(8, 12),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=2,
        attention_head_dim=4,
    )


CASES = {
    "gpt2": Case(foreign.gpt2, tokens),
    "llama": Case(foreign.llama, tokens),
    "bert": Case(encoder, padded_tokens, lambda output: output.last_hidden_state.pow(3).mean()),
    "resnet": Case(
        ResNet, lambda step: {"x": drawn(step, ROWS, 3, 8, 8), "classes": ids_of(step)[:, 0] % 5}, lambda o: o["loss"]
    ),
    "unet": Case(
        unet,
        lambda step: {"sample": drawn(step, ROWS, 2, 8, 8), "timestep": torch.arange(ROWS) + step},
        lambda output: output.sample.square().mean(),
    ),
    "t5": Case(foreign.t5, tokens),
    "gpt2 with dropout": Case(foreign.DROPPING["gpt2 with dropout"].make, tokens),
}


def case_of(name: str) -> Case:
    """Of this file, or one of the forty models, which takes the same batch at every step."""
    if name in CASES:
        return CASES[name]
    loss = MODELS[name].loss
    return Case(MODELS[name].make, lambda _: made(name)[1], (lambda output: output.loss) if loss is None else loss)


@lru_cache
def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("x", "y", "z")[: len(sizes)])


def drawn_plan(seed: int) -> Callable[..., Plan]:
    """In the place of the solver: any plan that is allowed."""

    def choose(problem: Problem, *_: Any, **__: Any) -> Plan:
        random_ = random.Random(seed)
        choice = tuple(random_.randrange(len(node.seconds)) for node in problem.nodes)
        account = simulate(problem, choice)
        return Plan(choice, account.seconds, 0.0, account.peak_bytes, False, 0, 0)

    return choose


def trained(
    name: str,
    sizes: tuple[int, ...],
    *,
    seed: int | None = None,
    steps: int = STEPS,
    optimizer: str = "adamw",
    clip: float | None = 0.5,
    **options: Any,
) -> dict[str, Any]:
    """How far apart a spread model and an untouched one are that learn the same: losses, and of parameters and buffers
    the difference relative to how far they moved.  seed: of a plan that is drawn
    """
    case = case_of(name)
    torch.manual_seed(0)
    with in_fp64():
        model = case.make().double().train()
        alone = copy.deepcopy(model)
        before = {name: tensor.detach().double().clone() for name, tensor in state(alone).items()}
        solver = patch.object(spread, "solve", spread.solve if seed is None else drawn_plan(seed))
        with solver:
            parallelize(model, case.inputs(0), mesh=mesh_of(sizes), links=[FREE], speed=SLOW, **options)
            losses = [learned(one, case, steps, optimizer, clip) for one in (alone, model)]
    found = {name: full_tensor(tensor).detach().double() for name, tensor in state(model).items()}
    apart = {
        name: float(
            (found[name] - whole).norm() / max((whole - before[name]).norm(), 1e-3 * LR * steps * whole.numel() ** 0.5)
        )
        for name, whole in ((name, tensor.detach().double()) for name, tensor in state(alone).items())
        if whole.numel()
    }
    worst = max(apart, key=lambda name: apart[name])
    plan = plan_of(model)
    cut = [name for name, parameter in model.named_parameters() if any(p.is_shard() for p in parameter.placements)]
    return {
        "losses": max(abs(a - b) for a, b in zip(*losses, strict=True)),
        "apart": apart[worst],
        "worst": worst,
        "cut": cut,
        "is_cut": plan.is_cut(),
        "sent": sum(change.path.bytes_sent for change in plan.changes),
    }


def state(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def learned(model: nn.Module, case: Case, steps: int, optimizer: str, clip: float | None) -> list[float]:
    """The losses of steps that one process takes, or all ranks together."""
    parameters = list(model.parameters())
    # With torch's 1e-8 rounding noise in a gradient that is zero, that of a key's bias, becomes a step.
    made = (
        torch.optim.AdamW(parameters, lr=LR, eps=1e-5) if optimizer == "adamw" else torch.optim.SGD(parameters, lr=LR)
    )
    losses = []
    torch.manual_seed(1)
    for step in range(steps):
        made.zero_grad()
        loss = case.loss(model(**case.inputs(step)))
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        made.step()
        losses.append(float(loss.detach()))
    return losses
