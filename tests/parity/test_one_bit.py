"""Momenta in signs: ranks are a simulation of them in one process, to the bit, on every level of ZeRO.

Gradients are small multiples of 2^-6, so that whole ones have the same sums in any order; what follows a sign is exact.
"""

from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.checkpoint import CheckpointConfig, Checkpointer, read_full
from core.comm.volume import count_volume
from core.compose import parallelize
from core.layout import full_tensor
from core.mesh import MeshConfig, Zero, build_mesh
from core.optim.build import OptimConfig, build_optimizer
from core.optim.schedule import ScheduleConfig
from core.parallel.compress import CommConfig
from core.parallel.local_steps import is_due
from core.parallel.one_bit import InSigns
from core.precision import LossScale
from core.runtime import start
from core.train import TrainConfig, TrainState, train_step
from tests.parity.test_resume import gone_on_to_the_bit, outcome
from tests.support.small import build, config_of

SHAPES = {"tall": (13, 5), "stack": (3, 4, 7), "vector": (6,), "few": (2, 3), "scalar": ()}
START, STEPS, LR, DECAY, EPS = 3, 8, 2.0**-6, 0.125, 1e-8
ONE_BIT = CommConfig("one_bit", start=START)


class Shapes(nn.Module):
    """Its gradients are what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.ones(shape, dtype=torch.float64)))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return torch.stack([(parameter * gradients[name]).sum() for name, parameter in self.named_parameters()]).sum()


def gradient(name: str, step: int, rank: int, dtype: torch.dtype) -> Tensor:
    """That of n ranks' sum; two rows of `tall` have none."""
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + len(name))
    found = torch.randint(-9, 10, SHAPES[name], generator=generator).to(dtype) / 64
    if name == "tall":
        found[4:6] = 0
    return found


def configured(zero: Zero, dtype: torch.dtype, comm: CommConfig, name: str, clip: float | None) -> TrainConfig:
    options: dict[str, Any] = {"betas": (0.875, 0.9375), "eps": EPS, "weight_decay": DECAY}
    optim = OptimConfig(name, lr=LR, clip_norm=clip, schedule=ScheduleConfig("constant", warmup_steps=0), **options)
    precision = "fp64" if dtype == torch.float64 else "fp32"
    return TrainConfig(zero=zero, precision=precision, comm=comm, optim=optim, steps=STEPS)


def trained(
    zero: Zero, dtype: torch.dtype, comm: CommConfig, name: str = "adamw", clip: float | None = None, parts: int = 1
) -> list[dict[str, Tensor]]:
    """The parameters behind each step, whole; and the norm that each step told.  parts: of which gradients add up"""
    config, num_ranks, rank = configured(zero, dtype, comm, name, clip), dist.get_world_size(), dist.get_rank()
    mesh = build_mesh(MeshConfig().resolve(num_ranks, zero), "cpu")
    parallel = parallelize(Shapes(), mesh, replace(config, microbatch=1))
    state = TrainState(parallel, build_optimizer(config.optim, parallel.masters), LossScale(config.precision), {})

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        at = int(batch["step"][0])
        return num_ranks * model({name: gradient(name, at, rank, dtype) for name in SHAPES})

    found = []
    config = replace(config, microbatch=1)
    for step in range(STEPS):
        batch = {"step": torch.full((parts,), step)}
        figures = train_step(state, batch, loss, lambda b: torch.tensor(1.0), config, step)
        whole = {name: full_tensor(master) for name, master in parallel.masters.items()}
        found.append(
            {name: value.clone() for name, value in whole.items()}
            | {"norm": torch.tensor(figures["grad_norm"], dtype=torch.float64)}
        )
    return found


# --- the simulation ---------------------------------------------------------------------------------------------------


def signs(c: Tensor, moves: Tensor) -> Tensor:
    """Tang et al. 2021: the mean magnitude with each sign."""
    mean = c.abs().sum() / moves.sum().clamp(min=1)
    return torch.where(c >= 0, mean, -mean) * moves


def simulated(num_ranks: int, dtype: torch.dtype, clip: float | None = None, whole=lambda t: t < START):
    """1-bit Adam, and 0/1 Adam, of so many ranks, with decay apart, in one process: parameters behind each step."""
    beta1, beta2 = 0.875, 0.9375
    p = {n: torch.ones(s, dtype=dtype) for n, s in SHAPES.items()}
    decays = [[value for value in p.values() if (value.ndim > 1) == matrix] for matrix in (True, False)]
    groups = [{"params": own, "weight_decay": decay} for own, decay in zip(decays, (DECAY, 0.0))]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(beta1, beta2), eps=EPS, fused=True)
    served = {n: torch.zeros_like(value) for n, value in p.items()}
    errors = [{n: torch.zeros_like(value) for n, value in p.items()} for _ in range(num_ranks)]
    found, learned = [], 0
    for step in range(STEPS):
        grads = [{n: gradient(n, step, rank, dtype) for n in p} for rank in range(num_ranks)]
        norms = [reduce(torch.add, [g.double().norm().square() for g in of.values()]) for of in grads]
        norm = (reduce(torch.add, norms) * num_ranks).sqrt()
        learned += whole(step)
        factor = 1.0 if clip is None else min(1.0, clip / float(norm))
        if learned == step + 1:  # all steps so far were whole
            for n, value in p.items():
                value.grad = reduce(torch.add, [of[n] for of in grads])
            adamw.step()
            m, v = ({n: adamw.state[value][key] for n, value in p.items()} for key in ("exp_avg", "exp_avg_sq"))
            found.append({n: value.clone() for n, value in p.items()} | {"norm": norm})
            continue
        for n in p:
            moves = (v[n] / (1 - beta2 ** max(1, learned))).sqrt() > EPS
            if whole(step):
                g = reduce(torch.add, [of[n] for of in grads])
                m[n].mul_(beta1).add_(g, alpha=1 - beta1)
                v[n].mul_(beta2).addcmul_(g, g, value=1 - beta2)
            else:
                scale = torch.tensor((1 - beta1) * factor, dtype=torch.float64).to(dtype)
                given = [of[n] * scale + m[n] * moves * (beta1 / num_ranks) + e[n] for of, e in zip(grads, errors)]
                given = [c * moves for c in given]
                sent = [signs(c, moves) for c in given]
                for e, c, s in zip(errors, given, sent):
                    e[n] = (c - s) * moves
                d = reduce(torch.add, sent, served[n]) * moves
                rows = -(-len(d) // num_ranks) if d.ndim else 1
                cut = [d.split(rows), moves.split(rows)] if d.ndim else [[d], [moves]]
                m[n] = torch.cat([signs(*part).flatten() for part in zip(*cut)]).view(d.shape)
                served[n] = (d - m[n]) * moves
            root = (v[n] / (1 - beta2**learned)).sqrt() + EPS
            most = max(1, (1 - beta1) / (1 - beta2) ** 0.5)
            u = m[n] / (1 - beta1 ** (step + 1)) / root
            u = (u if whole(step) else u.clamp(-most, most)) * LR
            p[n].mul_(1 - LR * (DECAY if p[n].ndim > 1 else 0)).sub_(u)
        found.append({n: value.clone() for n, value in p.items()} | {"norm": norm})
    return found


def alike(of_ranks: list[list[dict[str, Tensor]]], expected: list[dict[str, Tensor]], tolerance: float = 0.0) -> None:
    for found in of_ranks:
        for step, (one, other) in enumerate(zip(found, expected, strict=True)):
            for name in SHAPES:
                difference = float((one[name] - other[name]).abs().max())
                assert difference <= tolerance, f"{name} behind step {step}: {difference:.3g}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("num_ranks", [2, 3, pytest.param(4, marks=pytest.mark.soak)])
def test_ranks_are_a_simulation_of_them_to_the_bit(ranks, num_ranks: int, dtype: torch.dtype) -> None:
    """On every level of ZeRO that goes, with gradients of several microbatches, and 0/1 Adam's intervals."""
    expected = simulated(num_ranks, dtype)
    for zero in (0, 1, 2):
        alike(ranks(num_ranks).run(trained, zero, dtype, ONE_BIT, "adamw", None, 1 + min(zero, 1)), expected)
    # Some elements never move but for their decay, some go as far as they may.
    decayed = torch.full((2, 5), (1 - LR * DECAY) ** STEPS, dtype=dtype)
    torch.testing.assert_close(expected[-1]["tall"][4:6], decayed)
    zero_one = CommConfig("zero_one", start=2)
    expected = simulated(num_ranks, dtype, whole=lambda step: step in (0, 1, 2, 4, 6))
    for zero in (0, 2):
        alike(ranks(num_ranks).run(trained, zero, dtype, zero_one), expected)


def test_a_gradient_is_clipped_by_the_norms_of_all_ranks(ranks) -> None:
    """Behind the whole steps, whose norms are below; to the rounding of the norm."""
    expected = simulated(2, torch.float64, clip=1.9)
    clipped = [float(of["norm"]) > 1.9 for of in expected[START:]]
    assert any(clipped)
    for zero in (0, 1):
        found = ranks(2).run(trained, zero, torch.float64, ONE_BIT, "adamw", 1.9)
        alike(found, expected, 1e-14)
        for of, wanted in zip(found[0][START:], expected[START:]):
            assert float(of["norm"]) == pytest.approx(float(wanted["norm"]), rel=1e-14)


def lamb(num_ranks: int, steps: int = STEPS) -> list[dict[str, Tensor]]:
    """1-bit LAMB of so many ranks in one process (Li et al. 2021, algorithm 1): parameters behind each step."""
    beta1, beta2 = 0.875, 0.9375
    found = list[dict[str, Tensor]]()
    p = {n: torch.ones(s, dtype=torch.float64) for n, s in SHAPES.items()}
    m, v, fresh, served = ({n: torch.zeros_like(value) for n, value in p.items()} for _ in range(4))
    errors = [{n: torch.zeros_like(value) for n, value in p.items()} for _ in range(num_ranks)]
    average, factor = dict.fromkeys(p, 1.0), dict.fromkeys(p, 1.0)
    for step in range(steps):
        for n in p:
            decay, whole = DECAY if p[n].ndim > 1 else 0.0, step < START
            grads = [gradient(n, step, rank, torch.float64) for rank in range(num_ranks)]
            if whole:
                g = reduce(torch.add, grads)
                m[n], v[n] = beta1 * m[n] + (1 - beta1) * g, beta2 * v[n] + (1 - beta2) * g * g
                fresh[n] = v[n].clone()
            root = (v[n] / (1 - beta2 ** min(START, step + 1))).sqrt() + EPS
            moves = root > 2 * EPS
            if not whole:
                given = [((1 - beta1) * g + m[n] * beta1 / num_ranks + e[n]) * moves for g, e in zip(grads, errors)]
                sent = [signs(c, moves) for c in given]
                for e, c, s in zip(errors, given, sent):
                    e[n] = (c - s) * moves
                d, before = reduce(torch.add, sent, served[n]) * moves, m[n] * moves
                rows = -(-len(d) // num_ranks) if d.ndim else 1
                cut = [d.split(rows), moves.split(rows)] if d.ndim else [[d], [moves]]
                m[n] = torch.cat([signs(*part).flatten() for part in zip(*cut)]).view(d.shape)
                served[n] = (d - m[n]) * moves
                told = (m[n] - beta1 * before) / (1 - beta1)
                fresh[n] = beta2 * fresh[n] + (1 - beta2) * told * told
            u = m[n] / (1 - beta1 ** (step + 1)) / root
            u = u if whole else u.clamp(-1, 1)
            direction = u + decay * p[n]
            ratio = 1.0
            if p[n].ndim > 1 and whole:
                ratio = float(p[n].norm() / direction.norm())
                average[n] = ratio if step == 0 else 0.9 * average[n] + 0.1 * ratio
            elif p[n].ndim > 1:
                share = min(1.0, float(u.norm() / direction.norm()))
                most = float((root / ((fresh[n] / (1 - beta2 ** (step + 1))).sqrt() + EPS))[moves].max())
                wanted = min(4.0, max(0.5, most * share + 1 - share))
                factor[n] = min(1.1 * factor[n], max(0.9 * factor[n], wanted))
                ratio = average[n] * factor[n]
            p[n] = p[n] - LR * ratio * direction
        found.append({n: value.clone() for n, value in p.items()})
    assert len({factor[n] for n in ("tall", "stack", "few")}) > 1
    return found


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_lambs_ratio_is_corrected_by_what_momenta_tell(ranks, num_ranks: int) -> None:
    expected = lamb(num_ranks)
    for zero in (0, 1, 2):
        alike(ranks(num_ranks).run(trained, zero, torch.float64, ONE_BIT, "lamb"), expected, 1e-12)


# --- when second moments stay -----------------------------------------------------------------------------------------


def whole_steps(comm: CommConfig, steps: int) -> tuple[list[bool], list[float]]:
    """Whether each step was whole, and the sums that the criterion looked at."""
    config = configured(1, torch.float64, comm, "adamw", None)
    mesh = build_mesh(MeshConfig().resolve(dist.get_world_size(), 1), "cpu")
    parallel = parallelize(Shapes(), mesh, config)
    state = TrainState(parallel, build_optimizer(config.optim, parallel.masters), LossScale("fp64"), {})
    compression = parallel.compression
    assert isinstance(compression, InSigns)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        at = int(batch["step"][0])
        return model({name: gradient(name, at, 0, torch.float64) / (1 + at) for name in SHAPES})

    found, sums = [], []
    for step in range(steps):
        found.append(not compression.is_on)
        train_step(state, {"step": torch.tensor([step])}, loss, lambda b: torch.tensor(1.0), config, step)
        sums.append(getattr(compression, "looked", 0.0))
    return found, sums


def test_second_moments_stay_when_their_sum_does(ranks) -> None:
    """It is looked at each 1 / (1 - beta2) = 16 steps; gradients fall as 1 / t, and with them what is left of it."""
    found, sums = ranks(2).run(whole_steps, CommConfig("one_bit", settled=0.4), 80)[0]
    looked = [sums[step] for step in range(15, 80, 16)]
    first = next(n for n in range(1, 5) if min(looked[n], looked[n - 1]) >= 0.4 * max(looked[n], looked[n - 1]))
    assert first > 1
    assert found == [step < 16 * (first + 1) for step in range(80)]


def test_second_moments_are_learned_at_ever_longer_intervals() -> None:
    at = [step for step in range(56) if is_due(step, 4)]
    assert at == [*range(4), 4, 6, 8, 10, 12, 16, 20, 24, 28, 36, 44, 52]


# --- bytes and state --------------------------------------------------------------------------------------------------


def sent(comm: CommConfig, zero: Zero) -> dict[tuple[str, str], int]:
    """Of the second step in signs."""
    config = configured(zero, torch.float64, comm, "adamw", None)
    mesh = build_mesh(MeshConfig().resolve(dist.get_world_size(), zero), "cpu")
    parallel = parallelize(Shapes(), mesh, config)
    state = TrainState(parallel, build_optimizer(config.optim, parallel.masters), LossScale("fp64"), {})
    for step in range(comm.start + 2):
        with count_volume(mesh) as volume:
            train_step(
                state, {"step": torch.tensor([step])},
                lambda model, batch: model({name: gradient(name, 1, 0, torch.float64) for name in SHAPES}),
                lambda batch: torch.tensor(1.0), config, step,
            )  # fmt: skip
    return dict(volume.bytes)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, pytest.param(8, marks=pytest.mark.soak)])
def test_bytes_are_the_closed_form(ranks, num_ranks: int) -> None:
    """A bit of each element of a rank's rows, filled up to bytes, to and from each rank, and two means a parameter."""
    found = ranks(num_ranks).run(sent, CommConfig("one_bit", start=1), 0)[0]
    rows = {name: -(-shape[0] // num_ranks) if shape else 1 for name, shape in SHAPES.items()}
    bits = sum(-(-rows[name] * torch.Size(shape[1:]).numel() // 8) for name, shape in SHAPES.items())
    means = 2 * num_ranks * len(SHAPES) * 8
    assert found["all_to_all", "dp_replicate"] == num_ranks * bits
    assert found["all_gather", "dp_replicate"] == num_ranks * bits + means
    assert sum(n for (operation, _), n in found.items() if operation == "all_reduce") < 100


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (3, {"comm": CommConfig("one_bit", start=2), "zero": 1}),
        (2, {"comm": CommConfig("zero_one", start=1), "zero": 2}),
        pytest.param(2, {"comm": CommConfig("one_bit", start=2), "optim": "lamb"}, marks=pytest.mark.soak),
        pytest.param(2, {"comm": CommConfig("one_bit", settled=0.5), "steps": 60}, marks=pytest.mark.soak),
    ],
)
def test_resumed_to_the_bit(ranks, tmp_path: Path, size: int, options: dict[str, Any]) -> None:
    steps = options.pop("steps", 6)
    betas: dict[str, Any] = {"betas": (0.9, 0.95)}
    optim = OptimConfig(options.pop("optim", "adamw"), lr=1e-2, **betas)
    config = config_of(tmp_path, steps=steps, checkpoint=CheckpointConfig(every=steps // 2), optim=optim, **options)
    gone_on_to_the_bit(ranks, size, tmp_path, config)


def gone_on(config: TrainConfig) -> Any:
    """What this rank keeps of messages in a run that goes on."""
    with start("cpu", 0):
        state = build(config)
        checkpointer = Checkpointer(config.out / "checkpoints", config.checkpoint, state.parallel.mesh)
        state.load(checkpointer, None)
        checkpointer.close()
        return state.parallel.compression


def resumed_errors(config: TrainConfig, name: str) -> tuple[Tensor, Tensor]:
    """This rank's error of a parameter, and that of the rows it serves, in a run that goes on."""
    compression = gone_on(config)
    assert isinstance(compression, InSigns)
    return compression.errors[name].clone(), compression.server_errors[name].clone()


def test_a_lost_ranks_error_goes_to_the_others(ranks, tmp_path: Path) -> None:
    """Four ranks, then two: the sum of the errors is what it was, and so are those of the rows that ranks serve."""
    config = config_of(tmp_path, steps=9, comm=CommConfig("one_bit", start=2))
    ranks(4).run(outcome, replace(config, stop_after=5, zero=1), 0.0)
    name = "blocks.0.up.weight"
    names = [f"comm/error/{name}", f"comm/server_error/{name}"]
    before = read_full(tmp_path / "checkpoints" / "step-00000005", names)
    after = ranks(2).run(resumed_errors, replace(config, zero=2), name)
    torch.testing.assert_close(after[0][0] + after[1][0], before[names[0]].sum(0), rtol=1e-14, atol=1e-16)
    assert torch.equal(torch.cat([of[1] for of in after]), before[names[1]])
    assert before[names[0]].shape[0] == 4
    assert before[names[1]].abs().sum() > 0
