"""Learning rates, optimizer groups, and the norm of gradients that are sharded in every way."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.config import UserError
from core.layout import Layout, tag
from core.mesh import MeshConfig, build_mesh
from core.optim.build import OptimConfig, build_optimizer
from core.optim.clip import gradient_norm, scale_gradients
from core.optim.schedule import ScheduleConfig, learning_rate
from core.optim.sharded import make_state


def rates(num_steps: int, **options) -> list[float]:
    config = ScheduleConfig(**options)
    return [round(learning_rate(step, num_steps, 1.0, config), 6) for step in range(num_steps)]


def test_schedule_shapes() -> None:
    assert rates(6, warmup_steps=2, shape="constant") == [0.5, 1, 1, 1, 1, 1]
    assert rates(6, warmup_steps=2, shape="linear", final=0.2) == [0.5, 1, 1, 0.8, 0.6, 0.4]
    assert rates(6, warmup_steps=2, shape="cosine", final=0.0) == [0.5, 1, 1, 0.853553, 0.5, 0.146447]
    assert rates(8, shape="wsd", decay=0.5, final=0.0) == [1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert rates(3, warmup_steps=5, shape="cosine") == [0.2, 0.4, 0.6]


@given(
    num_steps=st.integers(1, 50),
    warmup_steps=st.integers(0, 60),
    shape=st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    final=st.floats(0, 1),
    decay=st.floats(0.01, 1),
)
def test_rates_rise_then_fall_between_final_and_peak(num_steps, warmup_steps, shape, final, decay) -> None:
    config = ScheduleConfig(shape, warmup_steps, final, decay)
    found = [learning_rate(step, num_steps, 3.0, config) for step in range(num_steps + 1)]
    assert all(0 < rate <= 3.0 + 1e-12 for rate in found[: min(warmup_steps, num_steps)])
    after = found[warmup_steps:]
    assert all(3.0 * final - 1e-12 <= rate <= 3.0 + 1e-12 for rate in after)
    assert all(b <= a + 1e-12 for a, b in pairwise(after))
    if after and shape != "constant":
        assert after[0] == pytest.approx(3.0) or warmup_steps >= num_steps
        assert found[num_steps] == pytest.approx(3.0 * final) or warmup_steps >= num_steps


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (ScheduleConfig, {"warmup_steps": -1}),
        (ScheduleConfig, {"final": 1.5}),
        (ScheduleConfig, {"decay": 0.0}),
        (OptimConfig, {"lr": -1.0}),
        (OptimConfig, {"eps": 0.0}),
        (OptimConfig, {"clip_norm": 0.0}),
        (OptimConfig, {"betas": (0.9, 1.0)}),
        (OptimConfig, {"momentum": -0.1}),
    ],
)
def test_values_out_of_range_are_refused(config: type, options: dict) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(UserError, match=name) as refusal:
        config(**options)
    assert str(value) in str(refusal.value)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_only_matrices_decay(name) -> None:
    masters = {"w": torch.ones(3, 2), "b": torch.ones(3), "scale": torch.tensor(1.0), "none": torch.ones(0, 2)}
    masters = {n: m.requires_grad_() for n, m in masters.items()}
    # A row of a bias may be all that is held of it, and of a matrix a single row: what counts is the whole's shape.
    masters["row"] = tag(torch.ones(1, 2), Layout((1, 2))).requires_grad_()
    optimizer = build_optimizer(OptimConfig(name, lr=0.5, weight_decay=0.1), masters)
    for master in masters.values():
        master.grad = torch.zeros_like(master)
    optimizer.step()
    found = {n: m.detach().flatten().tolist() for n, m in masters.items()}
    assert found["w"] == found["row"] * 3 == [pytest.approx(0.95)] * 6
    assert found["b"] == [1.0] * 3
    assert found["scale"] == [1.0]


def test_a_rank_that_holds_nothing_still_has_an_optimizer() -> None:
    optimizer = build_optimizer(OptimConfig(), {"w": torch.ones(0, 2).requires_grad_()})
    optimizer.step()
    assert not optimizer.state


def held_gradients(shapes: list[tuple[int, ...]]) -> tuple[float, float]:
    """The norm of whole gradients and of their shards over tp, dp_shard, both or none on 2 x 2 ranks."""
    mesh = build_mesh(MeshConfig(tp=2, dp_shard=2).resolve(4, 3), "cpu")
    generator = torch.Generator().manual_seed(0)
    whole, masters = [], []
    for shape in shapes:
        for cuts in ((), (("tp", 0),), (("tp", len(shape) - 1), ("dp_shard", 0)), (("dp_shard", 0),)):
            full = torch.randn(shape, dtype=torch.float64, generator=generator)
            layout = Layout(shape, mesh, cuts)
            master = tag(torch.zeros(layout.local_shape(), dtype=torch.float64), layout).requires_grad_()
            master.grad = layout.local(full).clone()
            whole.append(torch.nn.Parameter(torch.zeros_like(full)))
            whole[-1].grad = full
            masters.append(master)
    return float(gradient_norm(masters, mesh)), float(torch.nn.utils.get_total_norm([w.grad for w in whole]))


def test_the_norm_of_shards_is_that_of_the_whole(ranks) -> None:
    found = ranks(4).run(held_gradients, [(5, 4), (3,), (1, 6), (1,)])
    assert len({norm for norm, _ in found}) == 1, "the same to the bit on every rank"
    assert found[0][0] == pytest.approx(found[0][1], rel=1e-13)


def test_scaling_is_in_place_and_skips_what_has_no_gradient() -> None:
    masters = [torch.ones(3).requires_grad_(), torch.ones(2).requires_grad_()]
    masters[0].grad = gradient = torch.full((3,), 4.0)
    scale_gradients(masters, 0.25)
    assert masters[0].grad is gradient
    assert gradient.tolist() == [1.0] * 3


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.Rprop, torch.optim.AdamW])
def test_state_that_is_made_is_that_before_the_first_step(kind: Callable[..., torch.optim.Optimizer]) -> None:
    """Not all of it begins at zero."""
    moved = []
    for makes in (False, True):
        parameter = torch.ones(3).requires_grad_()
        optimizer = kind([parameter], lr=0.1)
        if makes:
            make_state(optimizer, [parameter])
            assert torch.equal(parameter, torch.ones(3))
        for step in range(3):
            parameter.grad = torch.tensor([1.0, -2.0, 0.5]) + step
            optimizer.step()
        moved.append(parameter.detach().clone())
    assert torch.equal(*moved)
