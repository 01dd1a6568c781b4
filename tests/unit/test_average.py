"""The moving average of weights: both ramps, the swap, the host; that checkpoints hold it tests/parity and e2e show."""

import pytest
import torch

from core.config import UserError
from core.optim.average import WeightAverage, ramp, unbiased

F64 = torch.float64


def _followed(average: WeightAverage, p: torch.nn.Parameter) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW([p], lr=0.1, weight_decay=0.0)
    values = []
    for grad in (1.0, -3.0, 2.0):
        p.grad = torch.full_like(p, grad)
        optimizer.step()
        average.follow()
        values.append(p.detach().clone())
    return values


def test_without_bias_it_is_an_average_of_the_weights_there_were() -> None:
    p = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=F64))
    average = WeightAverage({"p": p}, unbiased(0.8))
    assert torch.equal(average.tensors["p"], p)
    values = _followed(average, p)
    weights = [0.8**k for k in (2, 1, 0)]
    expected = sum(w * v for w, v in zip(weights, values)) / sum(weights)
    assert torch.allclose(average.tensors["p"], expected, rtol=1e-12)
    assert average.steps == 3


def test_the_ramp_reaches_back_over_more_and_more_steps() -> None:
    p = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=F64))
    average = WeightAverage({"p": p}, ramp(0.9999), "cpu")
    first, second, third = _followed(average, p)
    expected = torch.lerp(third, torch.lerp(second, first, 2 / 11), 3 / 12)
    assert torch.allclose(average.tensors["p"], expected, rtol=1e-12)
    assert [ramp(0.5)(step) for step in (1, 2, 9, 1000)] == [0.0, 2 / 11, 0.5, 0.5]


def test_within_in_place_the_masters_hold_it() -> None:
    p = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=F64))
    average, published = WeightAverage({"p": p}, unbiased(0.8)), []
    _followed(average, p)
    before, own = p.detach().clone(), average.tensors["p"].clone()
    with average.in_place(lambda: published.append(p.detach().clone())):
        assert torch.equal(p, own)
        assert torch.equal(average.tensors["p"], before)
    assert torch.equal(p, before)
    assert torch.equal(average.tensors["p"], own)
    assert torch.equal(published[0], average.tensors["p"])
    assert torch.equal(published[1], before)


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (7, 3)])
def test_all_of_it_changes_places(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.optim.average.EXCHANGED_ELEMENTS", 4)
    p = torch.nn.Parameter(torch.randn(shape, dtype=F64))
    average = WeightAverage({"p": p}, unbiased(0.8))
    master, own = p.detach().clone(), average.tensors["p"].normal_().clone()
    average.exchange(["p"])
    assert torch.equal(p, own)
    assert torch.equal(average.tensors["p"], master)


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_a_decay_that_is_none_is_refused(decay: float) -> None:
    for kind in (ramp, unbiased):
        with pytest.raises(UserError, match="from 0 to below 1"):
            kind(decay)
