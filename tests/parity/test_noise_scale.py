"""The gradient noise scale: unbiased, the same for any split into ranks and microbatches, and refused where unknown."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.compose import ParallelConfig
from core.config import UserError
from core.mesh import MeshConfig, data_axis
from core.parallel import squares
from core.precision import LossScaleConfig
from core.train import num_rows, train_step
from core.train.noise import NoiseScale, estimate
from tests.parity.test_train import GPT2
from tests.support import small
from tests.support.training import Case, batch_of, build, loss, weight

DIM, NOISE, BATCH, STEPS = 20, 0.5, 512, 250


class Linear(nn.Module):
    """y = Xw + noise, X of independent normal numbers; the weights stay at w + a unit vector."""

    def __init__(self) -> None:
        super().__init__()
        self.off = nn.Parameter(torch.zeros(DIM, dtype=torch.float64).index_fill_(0, torch.tensor([0]), 1.0))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.off


def linear_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return 0.5 * (model(batch["x"]) - batch["noise"]).square().mean()


def linear_batch(step: int, rank: int, num_ranks: int) -> dict[str, Tensor]:
    drawn = torch.randn(BATCH, DIM + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    rows = drawn.chunk(num_ranks)[rank]
    return {"x": rows[:, :DIM], "noise": NOISE * rows[:, DIM]}


CLOSED_FORM = DIM + 1 + NOISE**2 * DIM
"""E|x|^2 (x.d)^2 = (n + 2)|d|^2, and noise^2 n, without the |d|^2 of the mean; over |g|^2 = |d|^2 = 1."""


def noise_of_linear(microbatch: int | None, steps: int = STEPS) -> float:
    config = small.config_of(Path("/nowhere"), microbatch=microbatch, noise_scale=True)
    config = replace(config, optim=replace(config.optim, name="adamw", lr=0.0))
    state = small.build(config, Linear())
    state.noise = NoiseScale(state.parallel, steps)
    for step in range(steps):
        batch = linear_batch(step, dist.get_rank(), dist.get_world_size())
        found = train_step(state, batch, linear_loss, num_rows, config, step)
    return found["noise_scale"]


def test_the_linear_model_has_its_closed_form_on_any_split(ranks) -> None:
    found = {
        (num_ranks, rows): ranks(num_ranks).run(noise_of_linear, rows)[0]
        for num_ranks, rows in ((1, 128), (2, 128), (4, None), (1, 100), (2, 96))
    }
    for value in found.values():
        assert abs(value / CLOSED_FORM - 1) < 0.02, found
    for split in ((2, 128), (4, None)):
        assert abs(found[split] / found[1, 128] - 1) < 1e-10, found


@pytest.mark.soak
def test_two_thousand_steps_of_the_linear_model(ranks) -> None:
    """Ragged and equal microbatches; those of as many rows give the same number, whatever ranks they are dealt to."""
    splits = ((1, 128), (2, 128), (4, 128), (4, None), (1, 64), (2, 64), (4, 64), (1, 100), (2, 96), (4, 50))
    found = {split: ranks(split[0]).run(noise_of_linear, split[1], 2000)[0] for split in splits}
    for value in found.values():
        assert abs(value / CLOSED_FORM - 1) < 0.02, found
    for rows in (128, 64):
        for num_ranks in (2, 4):
            assert abs(found[num_ranks, rows] / found[1, rows] - 1) < 1e-10, found
    assert abs(found[4, None] / found[1, 128] - 1) < 1e-10, found


def noise_of(case: Case, steps: int = 2) -> list[dict[str, Any]]:
    state, config = build(case)
    state.noise = NoiseScale(state.parallel, 10)
    axis = data_axis(state.parallel.mesh)
    rows, found = case.batch // axis.size(), []
    for step in range(steps):
        mine = {k: v[axis.get_local_rank() * rows :][:rows] for k, v in batch_of(case, step).items()}
        found.append(train_step(state, mine, loss, weight, config, step))
    return [{key: row[key] for key in ("noise_trace", "noise_square")} for row in found]


UNTIED = replace(GPT2, tied_head=False)
FORMS = {
    "zero 0": (2, MeshConfig(), 0, 3),
    "zero 1": (2, MeshConfig(), 1, 3),
    "zero 2": (2, MeshConfig(), 2, 3),
    "zero 3": (2, MeshConfig(), 3, 3),
    "tp": (2, MeshConfig(tp=2), 0, 3),
    "tp and ranks": (4, MeshConfig(tp=2), 0, 3),
    "tp zero 3": (4, MeshConfig(tp=2), 3, 3),
    "pp": (2, MeshConfig(pp=2), 0, 3),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_squares_of_one_rank(ranks, form: str) -> None:
    """Rows have unequal targets. tp shards are summed, data ranks are not, and what tp holds alike counts once."""
    num_ranks, mesh, zero, rows = FORMS[form]
    case = Case(UNTIED, mesh=mesh, parallel=ParallelConfig(precision="fp64", zero=zero), microbatch=rows)
    alone = replace(case, mesh=MeshConfig(), parallel=ParallelConfig(precision="fp64"))
    (expected,) = ranks(1).run(noise_of, alone)
    for found in ranks(num_ranks).run(noise_of, case):
        for got, want in zip(found, expected, strict=True):
            for key, value in want.items():
                assert abs(got[key] - value) <= 1e-9 * abs(value), (key, got, want)


def squares_taken(microbatch: int, small_bytes: int, collected_bytes: int) -> tuple[list[float], int]:
    """The squares of the microbatches' gradients in two steps, and how many norms that took."""
    config = small.config_of(Path("/nowhere"), microbatch=microbatch)
    state = small.build(config)
    small_limit = patch.object(squares, "SMALL_BYTES", small_bytes)
    limit = patch.object(squares, "COLLECTED_BYTES", collected_bytes)
    norm = patch.object(torch.linalg, "vector_norm", wraps=torch.linalg.vector_norm)
    with small_limit, limit, norm as norms:
        state.noise = NoiseScale(state.parallel, 10)
        found = [
            train_step(state, small.Rows().batch(step, 0, 1), small.loss, num_rows, config, step) for step in range(2)
        ]
    return [row[key] for row in found for key in ("noise_trace", "noise_square")], norms.call_count


def test_small_gradients_have_one_norm_together(ranks) -> None:
    """One a microbatch for all whose rows are as long; the squares are those of a norm of each."""
    shapes = [parameter.shape for parameter in small.Small().parameters()]
    (together, fewest), (each, most), (full, some) = (
        ranks(1).run(squares_taken, 3, *limits)[0] for limits in ((2**16, 2**22), (0, 0), (2**16, 64))
    )
    assert (fewest, most) == (2 * 3 * len({shape[1:] for shape in shapes}), 2 * 3 * len(shapes))
    assert fewest < some < most  # what is collected has room for two or three
    assert together == pytest.approx(each, rel=1e-12)
    assert full == pytest.approx(each, rel=1e-12)


def test_the_estimates_are_those_of_two_batch_sizes() -> None:
    small_square, large_square, b, rows = 5.0, 2.0, 4, 16
    found = estimate(small_square * b / rows, large_square, [b] * (rows // b))
    assert found.square == pytest.approx((rows * large_square - b * small_square) / (rows - b))
    assert found.trace == pytest.approx((small_square - large_square) / (1 / b - 1 / rows))


def scaled(precision: str) -> list[dict[str, Any]]:
    """A step, one that is skipped, a step."""
    scale = LossScaleConfig(initial=256.0)
    config = small.config_of(Path("/nowhere"), precision=precision, loss_scale=scale, microbatch=2)
    state = small.build(config)
    state.noise = NoiseScale(state.parallel, 10)

    def step(number: int, spoil: float = 1.0) -> dict[str, Any]:
        batch = small.Rows().batch(number, 0, 1)
        return train_step(state, batch, lambda m, part: small.loss(m, part) * spoil, num_rows, config, number)

    found = [step(0), step(1, float("inf")), step(1)]
    return [*found, {"steps": state.noise.steps}]


def test_a_scaled_loss_and_a_skipped_step_do_not_enter(ranks) -> None:
    ((first, skipped, _, end),) = ranks(1).run(scaled, "fp16")
    ((plain, _, _, _),) = ranks(1).run(scaled, "fp32")
    assert first["noise_trace"] == pytest.approx(plain["noise_trace"], rel=0.05)
    assert "noise_scale" not in skipped
    assert end["steps"] == 2


def one_microbatch() -> str:
    config = small.config_of(Path("/nowhere"), noise_scale=True)
    state = small.build(config)
    state.noise = NoiseScale(state.parallel, 10)
    try:
        train_step(state, small.Rows().batch(0, 0, 1), small.loss, num_rows, config, 0)
    except UserError as refused:
        return str(refused)
    return ""


def test_one_microbatch_is_refused(ranks) -> None:
    (said,) = ranks(1).run(one_microbatch)
    assert "one microbatch of 8 rows" in said


def tied_stages() -> str:
    state, _ = build(Case(GPT2, mesh=MeshConfig(pp=2), microbatch=3))
    try:
        state.parallel.squares()
    except UserError as refused:
        return str(refused)
    return ""


def test_a_head_that_stages_share_is_refused(ranks) -> None:
    assert all("noise_scale with mesh.pp=2" in said for said in ranks(2).run(tied_stages))


@pytest.mark.parametrize("mesh", [MeshConfig(cp=2), MeshConfig(ep=2), MeshConfig(tp=4, tp_mode="2d")])
def test_axes_that_share_rows_are_refused(mesh: MeshConfig) -> None:
    with pytest.raises(UserError, match=r"noise_scale with mesh\."):
        small.config_of(Path("/nowhere"), mesh=mesh, noise_scale=True)
