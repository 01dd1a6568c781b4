"""Corrections of old weights on one stage, without a pipeline: against their equations, at every delay."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from core.config import UserError
from core.mesh import MeshConfig
from core.optim.build import OptimConfig
from core.parallel.correction import CORRECTIONS, Correction, CorrectionName
from core.parallel.pipeline.schedule import PipelineConfig
from core.train import TrainConfig

CURVATURE, LR = torch.tensor([3.0, 1.0, 0.2], dtype=torch.float64), 0.1
START = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def corrected(name: CorrectionName, delay: int, strength: float, skipped: frozenset[int] = frozenset()) -> list[Tensor]:
    """The weights after each of 12 steps of SGD on a quadratic, those of old weights."""
    weights = START.clone().requires_grad_()
    optimizer = torch.optim.SGD([weights], lr=LR)
    correction = CORRECTIONS[name].make({"w": weights}, delay, strength, 5)
    versions, made = list[Tensor](), [START.clone()]
    for step in range(12):
        with correction.looking_ahead():
            versions.append(weights.detach().clone())
        assert torch.equal(weights, made[-1])
        if step in skipped:
            correction.skip()
        else:
            weights.grad = CURVATURE * versions[max(step - delay, 0)]
            correction.update(optimizer, optimizer.step)
        made.append(weights.detach().clone())
    return made


def by_equations(name: CorrectionName, delay: int, strength: float) -> Iterator[Tensor]:
    weights, versions, changes, moved = [START], [START], [], [torch.zeros(3, dtype=torch.float64)]
    yield START
    for step in range(12):
        old = max(step - delay, 0)
        gradient = CURVATURE * versions[old]
        if name == "dc_asgd":
            gradient = gradient + strength * gradient * gradient * (weights[-1] - weights[old])
        rate = LR / max(1, delay) ** max(0.0, 1 - step / 5) if name == "lr_by_delay" else LR
        changes.append(-rate * gradient)
        move = changes[-1]
        if name == "nesterov":
            move = strength * moved[-1] + (1 - strength) * changes[-1]
        if name == "error_feedback" and step >= delay:
            move = changes[-1] + strength * (changes[-1] - changes[step - delay])
        moved.append(move)
        weights.append(weights[-1] + move)
        factor = {"prediction": delay, "nesterov": strength}.get(name, 0)
        versions.append(weights[-1] + factor * move)
        yield weights[-1]


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_equations(name: CorrectionName, delay: int) -> None:
    strength = 0.7
    found, expected = corrected(name, delay, strength), list(by_equations(name, delay, strength))
    assert torch.allclose(torch.stack(found), torch.stack(expected), rtol=0, atol=1e-13)
    plain = torch.stack(list(by_equations("none", delay, strength)))
    alike = name == "none" or (delay == 0 and name != "nesterov") or (delay == 1 and name == "lr_by_delay")
    assert torch.allclose(torch.stack(expected), plain, rtol=0, atol=1e-9) == alike


def test_error_feedback_leads_by_the_delay() -> None:
    """The sum of what it changes is that of all updates, and the last `delay` of them in the place of the first."""
    found = corrected("error_feedback", 2, 1.0)
    weights = START.clone()
    total = [weights]
    changes = []
    for step in range(12):
        changes.append(-LR * CURVATURE * found[max(step - 2, 0)])
        total.append(total[-1] + changes[-1])
        ahead = sum(changes[-2:], 0 * START) - sum(changes[:2], 0 * START)
        assert torch.allclose(found[step + 1], total[-1] + ahead, rtol=0, atol=1e-13)


def test_a_skipped_step_ages_the_weights_of_dc_asgd() -> None:
    """The step behind it computes with the weights of now, so nothing is corrected there."""
    skipped = corrected("dc_asgd", 1, 0.7, frozenset({6}))
    assert torch.equal(skipped[7], skipped[6])
    expected = skipped[7] - LR * CURVATURE * skipped[6]
    assert torch.allclose(skipped[8], expected, rtol=0, atol=1e-15)


def test_only_what_leads_computes_with_other_values() -> None:
    for spec in CORRECTIONS.values():
        masters = {"w": START.clone().requires_grad_()}
        correction = spec.make(masters, 1, 0.5, 5)
        storage = masters["w"].untyped_storage().data_ptr()
        with correction.looking_ahead():
            assert (masters["w"].untyped_storage().data_ptr() != storage) == correction.looks_ahead
        assert masters["w"].untyped_storage().data_ptr() == storage
        assert set(correction.tensors) == set(spec.make.keys(1))
    assert not Correction({}).tensors


@pytest.mark.parametrize(
    ("pipeline", "optim", "words"),
    [
        ({"schedule": "1f1b", "correction": "prediction"}, {}, ("1f1b", "newest weights", "2bw")),
        ({"schedule": "2bw", "correction": "lr_by_delay"}, {}, ("lr_by_delay", "one update", "error_feedback")),
        ({"schedule": "2bw", "correction": "dc_asgd"}, {"name": "muon"}, ("dc_asgd", "optim.name=muon", "adamw")),
        ({"schedule": "2bw", "correction": "nesterov"}, {"name": "muon"}, ("nesterov", "optim.name=muon", "sgd")),
        ({"schedule": "2bw", "correction": "nesterov"}, {"name": "sgd"}, ("momentum is 0.9", "--optim.momentum 0")),
        ({"schedule": "2bw", "correction": "nesterov"}, {}, ("betas begin with 0.9", "--optim.betas 0 0.95")),
        (
            {"schedule": "2bw", "correction": "nesterov", "correction_strength": 1.0},
            {"name": "sgd", "momentum": 0.0},
            ("correction_strength=1.0", "below 1"),
        ),
        ({"schedule": "2bw", "correction": "dc_asgd", "correction_strength": 0.0}, {}, ("strength=0.0", "above 0")),
        ({"schedule": "2bw", "correction_steps": 0}, {}, ("correction_steps=0", "positive")),
    ],
)
def test_refused(pipeline: dict, optim: dict, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as refused:
        TrainConfig(mesh=MeshConfig(pp=2), pipeline=PipelineConfig(**pipeline), optim=OptimConfig(**optim))
    assert all(word in str(refused.value) for word in words), refused.value
    assert "\n" not in str(refused.value)


def test_what_no_correction_reads_is_named() -> None:
    found = PipelineConfig("2bw", correction="prediction", correction_strength=0.5).unread()
    assert "correction_strength" in found
    assert "correction_steps" in found
    assert "correction_strength" not in PipelineConfig("2bw", correction="dc_asgd").unread()
