"""Models of transformers, diffusers and peft, as they are, in random budgets.

In fp32 bit-equal to the same ranks with everything on the device, and on one rank to training without Gemini; in fp64
within 1e-10 of that on two ranks. In bf16 what torch's own FSDP2 makes of it, rounded at the same places.
"""

import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_flatten, tree_unflatten

from core.config import UserError
from core.mesh import MeshConfig, build_mesh
from core.parallel.plan import blocks_of
from tests.support import forkserver
from tests.support.covering import FEW, MANY
from tests.support.gemini import Accounted, Run, require_equal, traced_once, train
from tests.support.zoo import CASES, LIBRARIES, in_fp64

forkserver.PRELOADED += [name for name in LIBRARIES if name not in forkserver.PRELOADED]
LR, TOLERANCE = 1e-2, 1e-10


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, fused=True)


def run(name: str, budget: int | str | None, precision: str = "fp32", steps: int = FEW, doors: bool = False) -> Run:
    """Trained on all ranks there are; its losses are this rank's shares."""
    case = CASES[name]
    rank, num_ranks = (
        (dist.get_rank(), dist.get_world_size()) if budget is not None and dist.is_initialized() else (0, 1)
    )

    def step(model: nn.Module, index: int) -> torch.Tensor:
        return case.share(model, index, rank, num_ranks)

    options: dict[str, Any] = {"precision": precision}
    if budget is not None:
        options["sample"] = lambda: lambda model: step(model, 0)
    with in_fp64() if precision == "fp64" else nullcontext():
        make = partial(with_doors, case.make) if doors else case.make
        return train(make, budget, adamw, steps, step, **options)


def least(name: str) -> str:
    """The smallest budget that works, as it is told to who gives too little."""
    with pytest.raises(UserError, match="give at least") as refusal:
        run(name, 4096)
    return re.search(r"give at least ([\d.]+ \w+)", str(refusal.value))[1]


def budgets(everything: Run, draw: random.Random) -> list[tuple[int, bool]]:
    """(bytes, below half of the model data): one in which a fifth or so of it fits, one for more."""
    parallel = everything.gemini.parallel
    whole = parallel.planned.trace.model_bytes
    alone = [[member] for chunk in parallel.chunks for member in chunk.members]
    messages = parallel.executor.transport.message_bytes(alone, parallel.reduce_dtype)
    others = parallel.planned.plan.device_peak_bytes - whole + messages
    tight = others + int(draw.uniform(0.12, 0.25) * whole)
    return [(tight, True), (others + int(draw.uniform(0.5, 0.95) * whole), False)]


def require_accounted(found: Run, is_tight: bool, steps: int) -> None:
    parallel, tier = found.gemini.parallel, found.gemini.parallel.tier
    assert tier.peak_bytes <= tier.budget_bytes
    assert found.gemini.moved_bytes > 0
    if is_tight:
        messages = sum(message.nbytes for message in parallel.executor.transport.messages)  # between ranks
        assert tier.budget_bytes - messages <= parallel.planned.trace.model_bytes / 2
        require_moved(found, steps)


def require_moved(found: Run, num_steps: int) -> None:
    """Half of what learns has its place on the host, and comes and goes in each step.

    Evictions are not counted: the plan follows measured times, and where all that comes in goes with its gradients
    nothing has to be evicted.
    """
    learning = [c for c in found.gemini.parallel.chunks if c.trainable]
    away = sum(c.own_bytes for c in learning if not c.resident)
    assert away >= sum(c.own_bytes for c in learning) / 2
    assert found.gemini.moved_bytes >= num_steps * 2 * away  # values come at least once, gradients go once


QUICK = ["recomputing gpt2", "mixtral", "lora", "unet", "clip"]
ALONE = [*((name, FEW) for name in QUICK), *(pytest.param(name, MANY, marks=pytest.mark.soak) for name in CASES)]


@pytest.mark.parametrize(("name", "steps"), ALONE)
def test_bit_equal_on_one_rank(name: str, steps: int) -> None:
    expected = run(name, None, steps=steps)
    with traced_once():
        everything = run(name, 1 << 30, steps=steps)
        require_equal(everything, expected)
        assert everything.gemini.moved_bytes == 0
        for budget, is_tight in budgets(everything, random.Random(name)):
            with Accounted() as accounted:
                found = run(name, budget, steps=steps)
            require_equal(found, expected)
            require_accounted(found, is_tight, steps)
            assert accounted.num_checks > steps * len(found.gemini.parallel.chunks)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("unet", marks=pytest.mark.soak)])
def test_bit_equal_in_the_smallest_budget(name: str) -> None:
    with traced_once():
        require_equal(run(name, least(name)), run(name, None))


def on_ranks(name: str, steps: int) -> dict[str, Any]:
    """What a rank has to say of fp32 in a tight budget, and of fp64 (all is twice as wide) in twice one for more."""
    with traced_once():
        everything = run(name, 1 << 30, steps=steps)
        (tight, _), (more, _) = budgets(everything, random.Random(f"{name} on {dist.get_world_size()}"))
        with Accounted():
            found = run(name, tight, steps=steps)
    require_equal(found, everything)
    require_accounted(found, True, steps)
    found = run(name, 2 * more, "fp64", steps)
    require_accounted(found, False, steps)
    losses = torch.tensor(found.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    return {"losses": losses.tolist(), "values": found.values}


def displacement_floor(parameter: str, steps: int) -> float:
    """Of the norm of a displacement, per element: the part of Adam's steps below which it is taken for noise.

    Attention does not change when all scores of a query move alike, so a key's bias has a gradient of zero. Adam
    divides what rounding leaves of it by its own size: the displacement is noise from its first digit on, as large as a
    real one, and can only be measured by the steps themselves.
    """
    return (1.0 if parameter.endswith("k_proj.bias") else 1e-3) * LR * steps


@pytest.mark.parametrize(
    ("name", "num_ranks", "steps"),
    [
        ("t5", 2, FEW),
        ("mixtral", 2, FEW),
        pytest.param("gpt2", 4, FEW, marks=pytest.mark.soak),
        *(
            pytest.param(name, 2, MANY, marks=pytest.mark.soak)
            for name in ("gpt2", "opt", "t5", "mixtral", "lora", "unet")
        ),
    ],
)
def test_on_ranks(ranks, name: str, num_ranks: int, steps: int) -> None:
    expected, start = run(name, None, "fp64", steps), run(name, None, "fp64", steps=0)
    for found in ranks(num_ranks).run(on_ranks, name, steps):
        assert found["losses"] == pytest.approx(expected.losses, rel=TOLERANCE)
        for parameter, value in expected.values.items():
            moved = value - start.values[parameter]
            scale = max(float(moved.norm()), displacement_floor(parameter, steps) * moved.numel() ** 0.5)
            difference = float((found["values"][parameter] - value).norm()) / scale
            assert difference <= TOLERANCE, f"{parameter} differs by {difference:.3g}"


MIXED_STEPS = 2
"""Of bf16: a single value rounded at another place is seen in the first, as 1e-3 of the way."""


class Door(torch.autograd.Function):
    """What FSDP2 puts in front of a block: gradients of what enters are complete when they leave it.

    Autograd alone adds one gradient after the other to what is used in several blocks, such as an encoder's output.
    With a door each block's are added up first. In bf16 that is another rounding, no better and no worse.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads


def enter(block: nn.Module, args: Any, kwargs: Any) -> Any:
    """A hook before a block's forward: all that learns goes through one door."""
    leaves, spec = tree_flatten((args, kwargs))
    learns = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if learns and torch.is_grad_enabled():
        for i, entered in zip(learns, Door.apply(*(leaves[i] for i in learns)), strict=True):
            leaves[i] = entered
    return tree_unflatten(leaves, spec)


def with_doors(make: Callable[[], nn.Module]) -> nn.Module:
    model = make()
    for block in blocks_of(model):
        block.register_forward_pre_hook(enter, with_kwargs=True)
    return model


def with_fsdp2(name: str) -> Run:
    """Trained on all ranks by torch alone: bf16 where it computes, masters and sums in fp32."""
    torch.manual_seed(0)
    case, rank, num_ranks = CASES[name], dist.get_rank(), dist.get_world_size()
    model = case.make()
    mesh = build_mesh(MeshConfig().resolve(num_ranks, 3), "cpu")["dp_shard"]
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*blocks_of(model), model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    for part in model.modules():
        if isinstance(part, FSDPModule):  # the loss is a share of the whole batch's: gradients are to be sums
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    optimizer, losses = adamw(model.parameters()), []
    for index in range(MIXED_STEPS):
        loss = case.share(model, index, rank, num_ranks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return Run(losses, {name: p.detach().full_tensor() for name, p in model.named_parameters()}, None)


def tight_in_bf16(name: str, doors: bool = False) -> Run:
    with traced_once():
        (tight, _), _ = budgets(run(name, 1 << 30, "bf16", steps=0, doors=doors), random.Random(name))
        found = run(name, tight, "bf16", MIXED_STEPS, doors)
    require_moved(found, MIXED_STEPS)
    return found


def beside_fsdp2(name: str, doors: bool) -> dict[str, float]:
    """parameter -> how far it is from where FSDP2 brings it, in parts of the way; those that learn."""
    found, expected = tight_in_bf16(name, doors), with_fsdp2(name)
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    torch.manual_seed(0)
    start = {n: p.detach() for n, p in CASES[name].make().named_parameters() if p.requires_grad}
    return {
        n: float((found.values[n] - expected.values[n]).norm() / (expected.values[n] - value).norm())
        for n, value in start.items()
    }


@pytest.mark.parametrize(
    ("name", "doors"),
    [
        ("mixtral", False),
        ("lora", False),
        ("t5", True),
        pytest.param("opt", False, marks=pytest.mark.soak),
        pytest.param("gpt2", False, marks=pytest.mark.soak),
        pytest.param("unet", True, marks=pytest.mark.soak),
    ],
)
def test_mixed_precision_is_that_of_fsdp2(ranks, name: str, doors: bool) -> None:
    """Both round to bf16 at the same places, so what is left is the order of sums in fp32.

    A T5's encoder and a U-Net's embedding of time have their gradients from several blocks: there the same doors stand
    in both, and `test_bf16_is_that_of_autograd_alone` is about ours without.
    """
    for found in ranks(2).run(beside_fsdp2, name, doors):
        assert len(found) > 10
        assert max(found.values()) <= 1e-6


def in_plain_bf16(name: str) -> Run:
    """Trained by autograd alone, in bf16 from masters in fp32."""
    torch.manual_seed(0)
    case = CASES[name]
    model, losses = case.make(), []
    masters = {n: p.detach().clone() for n, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    optimizer = adamw(masters.values())
    for index in range(MIXED_STEPS):
        loss = case.share(model, index)
        loss.backward()
        for n, parameter in model.named_parameters():
            masters[n].grad, parameter.grad = parameter.grad.to(torch.float32), None
        optimizer.step()
        for n, parameter in model.named_parameters():
            parameter.data.copy_(masters[n])
        losses.append(float(loss.detach()))
    return Run(losses, masters, None)


@pytest.mark.parametrize("name", [pytest.param("t5", marks=pytest.mark.soak), "unet"])
def test_bf16_is_that_of_autograd_alone(name: str) -> None:
    """Bit for bit: no sum has another order, none is in another format."""
    expected = in_plain_bf16(name)
    with traced_once():
        require_equal(run(name, 1 << 30, "bf16", MIXED_STEPS), expected)
        require_equal(tight_in_bf16(name), expected)
