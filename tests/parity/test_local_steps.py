"""0/1 Adam's local steps: ranks are a simulation of them in one process, to the bit; bytes, checkpoints, figures.

Gradients are those of `tests.parity.test_one_bit`; in steps that are sent in signs, or not at all, they follow the
weights that a rank computes with.
"""

from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.checkpoint import CheckpointConfig, read_full
from core.comm.volume import count_volume
from core.compose import parallelize
from core.layout import full_tensor
from core.mesh import MeshConfig, Zero, build_mesh
from core.optim.build import OptimConfig, build_optimizer
from core.parallel.compress import CommConfig
from core.parallel.local_steps import is_due, num_due
from core.parallel.zero_one import ZeroOne
from core.precision import LossScale
from core.train import TrainConfig, TrainState, train_step
from tests.parity.test_one_bit import DECAY, EPS, LR, SHAPES, Shapes, alike, configured, gone_on, gradient, signs
from tests.parity.test_resume import gone_on_to_the_bit, outcome
from tests.support.small import config_of

BETA1, BETA2, MOMENTS = 0.875, 0.9375, ("exp_avg", "exp_avg_sq")
BOUND = max(1, (1 - BETA1) / (1 - BETA2) ** 0.5)
START, FROM, EACH, MOST, STEPS = 2, 5, 2, 3, 17
LOCAL = CommConfig("zero_one", start=START, local_steps=MOST, local_start=FROM, local_each=EACH)
SENT = (5, 6, 7, 9, 11, 14, 16)
"""Sums from step 5 on: two of one step each, two of two, then of three, and that of the last step."""
PULL = 2.0**-4
"""By which gradients follow weights."""
UNUSED = {"few": (6, 8, 14)}
"""Steps in which a parameter takes no part: one of its own sum, one by itself, and the last one of three."""


class Pulled(Shapes):
    """Its gradients are what it is called with, and a share of the weights."""

    def forward(self, gradients: dict[str, Tensor], pull: float = 0.0) -> Tensor:
        used = ((name, parameter) for name, parameter in self.named_parameters() if name in gradients)
        return torch.stack([(p * gradients[n]).sum() + pull / 2 * p.square().sum() for n, p in used]).sum()


def given(step: int, rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    names = (name for name in SHAPES if step not in UNUSED.get(name, ()))
    return {name: gradient(name, step, rank, dtype) for name in names}


def pull_in(step: int) -> float:
    """Whole gradients are the same in any order of their sum only without it."""
    return PULL if step >= FROM else 0.0


def spread(zero: Zero, dtype: torch.dtype, comm: CommConfig, clip: float | None) -> tuple[TrainState, TrainConfig]:
    config = replace(configured(zero, dtype, comm, "adamw", clip), microbatch=1, steps=STEPS)
    mesh = build_mesh(MeshConfig().resolve(dist.get_world_size(), zero), "cpu")
    parallel = parallelize(Pulled(), mesh, config)
    optimizer = build_optimizer(config.optim, parallel.masters)
    return TrainState(parallel, optimizer, LossScale(config.precision), {}), config


def one_step(state: TrainState, config: TrainConfig, dtype: torch.dtype, step: int, parts: int) -> dict[str, Any]:
    num_ranks, rank = dist.get_world_size(), dist.get_rank()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return num_ranks * model(given(step, rank, dtype), pull_in(step))

    batch = {"step": torch.full((parts,), step)}
    return train_step(state, batch, loss, lambda b: torch.tensor(1.0), config, step)


def trained(
    zero: Zero, dtype: torch.dtype, comm: CommConfig = LOCAL, clip: float | None = None, parts: int = 1
) -> tuple[list[dict[str, Tensor]], list[dict[str, float]]]:
    """The masters behind each step, whole, with the norm that it told; and the figures of steps."""
    state, config = spread(zero, dtype, comm, clip)
    found, figures = [], []
    for step in range(STEPS):
        figures.append(one_step(state, config, dtype, step, parts))
        whole = {name: full_tensor(master).clone() for name, master in state.parallel.masters.items()}
        found.append(whole | {"norm": torch.tensor(figures[-1]["grad_norm"], dtype=torch.float64)})
    return found, figures


# --- the simulation ---------------------------------------------------------------------------------------------------


class Ranks:
    """So many ranks in one process, by Lu et al. 2022, algorithm 1.

    x        the weights that all know
    at       each rank's
    loses    of each sum in signs: step, name, what was to be sent, what came of it, what waits
    """

    def __init__(self, num_ranks: int, dtype: torch.dtype):
        def zeros() -> dict[str, Tensor]:
            return {n: torch.zeros(s, dtype=dtype) for n, s in SHAPES.items()}

        self.ranks, self.dtype = range(num_ranks), dtype
        self.x = {n: torch.ones(s, dtype=dtype) for n, s in SHAPES.items()}
        self.at = [{n: value.clone() for n, value in self.x.items()} for _ in self.ranks]
        decays = [[value for value in self.x.values() if (value.ndim > 1) == matrix] for matrix in (True, False)]
        groups = [{"params": own, "weight_decay": decay} for own, decay in zip(decays, (DECAY, 0.0))]
        self.adamw = torch.optim.AdamW(groups, lr=LR, betas=(BETA1, BETA2), eps=EPS, fused=True)
        self.m, self.v, self.served = zeros(), zeros(), zeros()
        self.own, self.u, self.errors = ([zeros() for _ in self.ranks] for _ in range(3))
        self.kept, self.weight, self.rates = (dict.fromkeys(SHAPES, value) for value in (1.0, 0.0, 0.0))
        self.taken, self.learned = dict.fromkeys(SHAPES, 0), dict.fromkeys(SHAPES, 0)
        self.loses: list[tuple[int, str, Tensor, Tensor, Tensor]] = []

    def root(self, n: str) -> tuple[Tensor, Tensor]:
        found = (self.v[n] / (1 - BETA2 ** self.learned[n])).sqrt()
        return found + EPS, found > EPS

    def in_signs(self, step: int, n: str, given: list[Tensor]) -> Tensor:
        moves = self.root(n)[1]
        given = [c * moves for c in given]
        true, c = reduce(torch.add, given), [c + of[n] for c, of in zip(given, self.errors)]
        sent = [signs(one, moves) for one in c]
        for of, one, s in zip(self.errors, c, sent):
            of[n] = (one - s) * moves
        d = reduce(torch.add, sent, self.served[n]) * moves
        rows = -(-len(d) // len(self.ranks)) if d.ndim else 1
        cut = [d.split(rows), moves.split(rows)] if d.ndim else [[d], [moves]]
        came = torch.cat([signs(*part).flatten() for part in zip(*cut)]).view(d.shape)
        self.served[n] = (d - came) * moves
        self.loses.append((step, n, true, came, reduce(torch.add, [of[n] for of in self.errors], self.served[n])))
        return came

    def first(self, step: int, n: str, grads: list[Tensor], scale: Tensor) -> None:
        """A step of all ranks together, behind those of `adamw`."""
        decay, whole = DECAY if self.x[n].ndim > 1 else 0.0, is_due(step, START)
        if whole:
            g = reduce(torch.add, grads)
            self.m[n].mul_(BETA1).add_(g, alpha=1 - BETA1)
            self.v[n].mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
            self.learned[n] += 1
        root, moves = self.root(n)
        if not whole:
            given = [g * scale + self.m[n] * moves * (BETA1 / len(grads)) for g in grads]
            self.m[n].copy_(self.in_signs(step, n, given))
        u = self.m[n] / (1 - BETA1 ** self.taken[n]) / root
        self.x[n].mul_(1 - LR * decay).sub_((u if whole else u.clamp(-BOUND, BOUND)) * LR)

    def local(self, step: int, n: str, grads: list[Tensor] | None, scale: Tensor) -> None:
        root, moves = self.root(n)
        left, rate = 1 - LR * (DECAY if self.x[n].ndim > 1 else 0.0), LR / (1 - BETA1 ** self.taken[n])
        if grads is not None:
            self.kept[n], self.weight[n] = self.kept[n] * left, self.weight[n] * left + rate
            self.rates[n] = self.rates[n] * left + LR
            for own, u, g in zip(self.own, self.u, grads):
                own[n] = own[n] * BETA1 + g * scale * moves
                u[n] = u[n] * left + own[n] * rate
        if not self.weight[n]:
            return
        if step not in SENT:
            for at, u in zip(self.at, self.u):
                at[n] = self.gone(n, u[n] * (len(self.u) / self.rates[n]), root)
            return
        self.m[n] = self.in_signs(step, n, [u[n] / self.weight[n] for u in self.u])
        self.x[n].copy_(self.gone(n, self.m[n] * (self.weight[n] / self.rates[n]), root))
        self.kept[n], self.weight[n], self.rates[n] = 1.0, 0.0, 0.0
        self.agree(n)

    def gone(self, n: str, come: Tensor, root: Tensor) -> Tensor:
        return self.x[n] * self.kept[n] - (come / root).clamp(-BOUND, BOUND) * self.rates[n]

    def agree(self, n: str) -> None:
        for at, own, u in zip(self.at, self.own, self.u):
            at[n], own[n] = self.x[n].clone(), self.m[n] * self.root(n)[1] / len(self.ranks)
            u[n] = torch.zeros_like(u[n])

    def step(self, step: int, clip: float | None) -> Tensor:
        """Returns the norm that ranks tell."""
        grads = [given(step, rank, self.dtype) for rank in self.ranks]
        grads = [{n: g + pull_in(step) * at[n] for n, g in of.items()} for of, at in zip(grads, self.at)]
        norms = [reduce(torch.add, [g.double().norm().square() for g in of.values()]) for of in grads]
        norm = (reduce(torch.add, norms) * len(grads)).sqrt()
        factor = 1.0 if clip is None else min(1.0, clip / float(norm))
        scale = torch.tensor((1 - BETA1) * factor, dtype=torch.float64).to(self.dtype)
        for n in grads[0]:
            self.taken[n] += 1
        if step <= START:  # all so far were whole
            for n, value in self.x.items():
                value.grad = reduce(torch.add, [of[n] for of in grads])
                self.learned[n] += 1
            self.adamw.step()
            self.m, self.v = ({n: self.adamw.state[x][key] for n, x in self.x.items()} for key in MOMENTS)
        for n in self.x if step > START else ():
            of_ranks = [of[n] for of in grads] if n in grads[0] else None
            if step >= FROM:
                self.local(step, n, of_ranks, scale)
            elif of_ranks is not None:
                self.first(step, n, of_ranks, scale)
        if step < FROM:
            for n in self.x:
                self.agree(n)
        return norm


def simulated(num_ranks: int, dtype: torch.dtype, clip: float | None = None) -> tuple[list[dict[str, Tensor]], Ranks]:
    """The weights that all know behind each step, and the norm."""
    of, found = Ranks(num_ranks, dtype), []
    for step in range(STEPS):
        norm = of.step(step, clip)
        found.append({n: value.clone() for n, value in of.x.items()} | {"norm": norm})
    return found, of


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("num_ranks", [2, 3, pytest.param(4, marks=pytest.mark.soak)])
def test_ranks_are_a_simulation_of_them_to_the_bit(ranks, num_ranks: int, dtype: torch.dtype) -> None:
    """On every level of ZeRO that goes, with gradients of several microbatches."""
    expected, _ = simulated(num_ranks, dtype)
    for zero in (0, 1, 2):
        found = ranks(num_ranks).run(trained, zero, dtype, LOCAL, None, 1 + min(zero, 1))
        alike([masters for masters, _ in found], expected)
    # Weights stay between sums, and are not those of a sum in every step.
    stays = [step for step in range(1, STEPS) if torch.equal(expected[step]["tall"], expected[step - 1]["tall"])]
    assert stays == [step for step in range(FROM, STEPS) if step not in SENT]


def test_gradients_are_clipped_in_every_step(ranks) -> None:
    """To the rounding of the norm."""
    expected, _ = simulated(2, torch.float64, clip=2.5)
    assert 0 < sum(float(of["norm"]) > 2.5 for of in expected[FROM:]) < len(expected[FROM:])
    found = ranks(2).run(trained, 1, torch.float64, LOCAL, 2.5)
    alike([masters for masters, _ in found], expected, 1e-13)
    for of, wanted in zip(found[0][0][FROM:], expected[FROM:]):
        assert float(of["norm"]) == pytest.approx(float(wanted["norm"]), rel=1e-13)


def test_figures_are_those_of_what_was_sent(ranks) -> None:
    """Each four steps, of the first step in signs then."""
    _, of = simulated(3, torch.float64)
    lengths = {5: 1, 6: 1, 7: 1, 9: 2, 11: 2, 14: 3, 16: 2}
    for _, figures in ranks(3).run(trained, 2, torch.float64, replace(LOCAL, report_every=4)):
        told = {step: row for step, row in enumerate(figures) if "compression_error" in row}
        assert [*told] == [3, 7, 11, 16]
        assert {step: row["local_steps"] for step, row in enumerate(figures) if "local_steps" in row} == lengths
        for step, row in told.items():
            parts = [torch.cat([t.flatten() for t in one]) for one in zip(*(i[2:] for i in of.loses if i[0] == step))]
            true, came, waits = parts
            assert row["compression_cosine"] == pytest.approx(float(true @ came / true.norm() / came.norm()), rel=1e-10)
            assert row["compression_error"] == pytest.approx(float(waits.norm() / true.norm()), rel=1e-10)


# --- bytes ------------------------------------------------------------------------------------------------------------


def sent(zero: Zero, dtype: torch.dtype) -> list[dict[tuple[str, str], int]]:
    """Of each step from the first local one on."""
    state, config = spread(zero, dtype, LOCAL, None)
    found = []
    for step in range(STEPS):
        with count_volume(state.parallel.mesh) as volume:
            one_step(state, config, dtype, step, 1)
        found.append(dict(volume.bytes))
    return found[FROM:]


@pytest.mark.parametrize("num_ranks", [2, 3, pytest.param(4, marks=pytest.mark.soak)])
def test_bytes_are_those_of_the_sums(ranks, num_ranks: int) -> None:
    """Of each a step in signs, and at ZeRO-1 the weights; between them a hundred bytes of norms, losses and marks."""
    rows = {name: -(-shape[0] // num_ranks) if shape else 1 for name, shape in SHAPES.items()}
    widths = {name: torch.Size(shape[1:]).numel() for name, shape in SHAPES.items()}
    of_zero = {name: rows[name] * widths[name] for name in SHAPES}
    if num_ranks == 4:  # more than `stack` has matrices, whose four rows are dealt out then
        of_zero["stack"] = 3 * 7
    for zero, axis in ((0, "dp_replicate"), (1, "dp_shard")):
        steps = ranks(num_ranks).run(sent, zero, torch.float64)[0]
        for step, of in enumerate(steps, FROM):
            names = [name for name in SHAPES if step in SENT and (name != "few" or step != 6)]  # it has not moved
            bits = sum(-(-rows[name] * widths[name] // 8) for name in names)
            weights = 8 * num_ranks * sum(of_zero.values()) * (zero > 0 and step in SENT)
            assert of.get(("all_to_all", axis), 0) == num_ranks * bits
            means = 2 * num_ranks * len(names) * 8
            assert of.get(("all_gather", axis), 0) == num_ranks * bits + means + weights
            once = 3000 * (zero and step == FROM)  # momenta, roots and what moves, of the optimizer's rows
            assert sum(n for (operation, _), n in of.items() if operation == "all_reduce") < 150 + once


def test_sums_grow_apart_up_to_the_most() -> None:
    """Lu et al. 2022, section 6: k_(j+1) - k_j = 2^floor(j / each), at most so many."""
    for each, most in ((1, 4), (2, 3), (3, 16), (16, 1), (2, None)):
        at = [step for step in range(200) if is_due(step, each, most)]
        wanted, j = [0], 0
        while wanted[-1] < 200:
            wanted.append(wanted[-1] + min(2 ** (j // each), most or 2**j))
            j += 1
        assert at == wanted[:-1]
        assert [num_due(steps, each, most) for steps in range(200)] == [sum(t < n for t in at) for n in range(200)]


# --- checkpoints ------------------------------------------------------------------------------------------------------

FEW = CommConfig("zero_one", start=1, local_steps=3, local_start=1, local_each=1)
"""Sums in steps 1, 2, 4 and 7."""


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (3, {"zero": 1}),
        (2, {"zero": 2, "precision": "bf16", "microbatch": 2}),
        pytest.param(2, {"zero": 0, "precision": "fp16"}, marks=pytest.mark.soak),
        pytest.param(4, {"zero": 1, "mesh": MeshConfig(tp=2)}, marks=pytest.mark.soak),
        pytest.param(4, {"zero": 2, "mesh": MeshConfig(dp_replicate=2, dp_shard=2)}, marks=pytest.mark.soak),
    ],
)
def test_resumed_to_the_bit(ranks, tmp_path: Path, size: int, options: dict[str, Any]) -> None:
    """Between two sums, where each rank has weights of its own."""
    betas: dict[str, Any] = {"betas": (0.9, 0.95)}
    optim = OptimConfig("adamw", lr=1e-2, **betas)
    comm = replace(FEW, report_every=2)
    config = config_of(tmp_path, steps=9, checkpoint=CheckpointConfig(every=4), optim=optim, comm=comm, **options)
    gone_on_to_the_bit(ranks, size, tmp_path, config)


def resumed(config: TrainConfig, name: str) -> tuple[Tensor, Tensor]:
    """This rank's way and momentum of a parameter, in a run that goes on."""
    compression = gone_on(config)
    assert isinstance(compression, ZeroOne)
    assert compression.local is not None
    return compression.local.ways[name].clone(), compression.local.momenta[name].clone()


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_fewer_ranks_go_on_from_the_mean_of_all(ranks, tmp_path: Path, size: int) -> None:
    config = config_of(tmp_path, steps=9, comm=FEW, optim=OptimConfig("adamw", lr=1e-2))
    ranks(4).run(outcome, replace(config, stop_after=4, zero=1), 0.0)
    name = "blocks.0.up.weight"
    kinds = [f"comm/{kind}/{name}" for kind in ("way", "local_momentum")]
    before = read_full(tmp_path / "checkpoints" / "step-00000004", kinds)
    for of in ranks(size).run(resumed, replace(config, zero=2), name):
        for kind, found in zip(kinds, of, strict=True):
            assert before[kind].shape[0] == 4
            assert float(before[kind].sum(0).norm()) > 0
            torch.testing.assert_close(found * size, before[kind].sum(0), rtol=1e-14, atol=1e-18)
