"""What the SPEC of softmax does not draw: many leading dims, biases of other shapes, gradients with other strides."""

import pytest
import torch
from torch import Tensor

from core.kernels import softmax as kernels
from core.kernels.operator import forced
from core.kernels.softmax import reference, softmax
from tests.support.device import DEVICE

pytestmark = pytest.mark.usefixtures("device")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE).requires_grad_()


def gradients(function, x: Tensor, bias: Tensor, order: tuple[int, ...], **options) -> tuple[Tensor, ...]:
    """y, and gradients from a dy that lies in memory as `order` says."""
    y = function(x, bias=bias, **options)
    weights = torch.randn([y.shape[d] for d in order], generator=torch.Generator().manual_seed(9)).to(DEVICE)
    back = [order.index(d) for d in range(y.ndim)]
    return y, *torch.autograd.grad(y, (x, bias), weights.permute(back))


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 1, 7), (2, 3, 1), (1,), (1, 1, 1, 7), (4, 2, 3, 7)], ids=str)
@pytest.mark.parametrize("scale", [1.0, -0.7, 0.0])
def test_a_bias_of_any_shape(shape: tuple[int, ...], scale: float) -> None:
    x, bias = draw(4, 2, 3, 7), draw(*shape, seed=1)
    for order in ((0, 1, 2, 3), (2, 3, 0, 1)):
        expected = gradients(reference, x, bias, order, scale=scale)
        with forced():
            found = gradients(softmax, x, bias, order, scale=scale)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 1, 2, 1, 2, 1, 5), (1, 2, 1, 2, 1, 2, 5), (2, 1, 1, 2, 1, 1, 5)], ids=str)
def test_any_number_of_leading_dims(shape: tuple[int, ...]) -> None:
    """Seven dims that none of their strides lets merge, in x, in the bias, or in dy."""
    memory, bias = draw(2, 2, 2, 2, 2, 2, 5), draw(*shape, seed=1)
    backwards = (5, 4, 3, 2, 1, 0, 6)
    for x in (memory, memory.permute(backwards)):
        for order in (tuple(range(7)), backwards):
            expected = gradients(reference, x, bias, order)
            with forced():
                found = gradients(softmax, x, bias, order)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_bias_gradient_is_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PROGRAMS", 3)
    x, bias = draw(5, 2, 3, 7), draw(2, 1, 7, seed=1)
    with forced():
        one, other = (gradients(softmax, x, bias, (0, 1, 2, 3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_rows_that_are_too_long_go_to_torch_with_a_warning() -> None:
    x = torch.randn(1, kernels.MAX_LENGTH + 1, device=DEVICE)
    with forced(), pytest.warns(UserWarning, match="rows of at most 32768 elements"):
        found = softmax(x)
    torch.testing.assert_close(found, torch.softmax(x, -1))


def test_what_does_not_broadcast_is_refused() -> None:
    with pytest.raises(ValueError, match=r"softmax: bias \[3, 4\] does not broadcast to x \[2, 4\]"):
        softmax(torch.zeros(2, 4), bias=torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"softmax: mask \[1, 2, 4\] does not broadcast to x \[2, 4\]"):
        softmax(torch.zeros(2, 4), mask=torch.zeros(1, 2, 4))
