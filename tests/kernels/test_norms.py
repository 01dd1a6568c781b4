"""What the SPECs of the norms do not draw: few programs over many rows, strides of many dims, results left unused."""

import pytest
import torch
from torch import Tensor

from core.kernels import norms
from core.kernels.norms import layer_norm, layer_norm_reference, rms_norm, rms_norm_reference
from core.kernels.operator import forced
from tests.support.device import DEVICE

pytestmark = pytest.mark.usefixtures("device")

PAIRS = [(layer_norm, layer_norm_reference), (rms_norm, rms_norm_reference)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE).requires_grad_()


@pytest.mark.parametrize(("function", "reference"), PAIRS, ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("length", [70, 8200])
def test_two_programs_sum_over_all_rows(function, reference, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program takes several tiles, the last one ragged; twice the same, bit for bit."""
    monkeypatch.setattr(norms, "_num_programs", lambda num_rows, blocks: 2)
    num_rows = 5 if length > 1000 else 75
    x, weight, bias = draw(num_rows, length), draw(length, seed=1), draw(length, seed=2)
    dy = torch.randn(num_rows, length, device=DEVICE)
    expected = torch.autograd.grad((reference(x, weight, bias) * dy).sum(), (x, weight, bias))
    with forced():
        found = [torch.autograd.grad(function(x, weight, bias), (x, weight, bias), dy) for _ in range(2)]
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_strides_of_many_dims() -> None:
    """Leading dims that merge to three, to four and to five, and an expanded gradient."""
    memory = draw(3, 2, 2, 2, 2, 5)
    orders = (3, 0, 1, 2, 4, 5), (3, 2, 1, 0, 4, 5), (4, 3, 2, 1, 0, 5)
    for x in (*(memory.permute(order) for order in orders), memory[:, :1].expand(3, 4, 2, 2, 2, 5)):
        expected = torch.autograd.grad(layer_norm_reference(x, eps=0.1).square().sum(), memory)
        with forced():
            found = torch.autograd.grad(layer_norm(x, eps=0.1).square().sum(), memory)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            layer_norm(x).sum().backward()  # dy has no strides at all


@pytest.mark.parametrize("used", [0, 1])
def test_one_result_unused(used: int) -> None:
    x, residual, weight = draw(3, 8), draw(3, 8, seed=1), draw(8, seed=2)
    leaves = (x, residual, weight)

    def gradients(results: tuple[Tensor, Tensor]) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(results[used].square().sum(), leaves, allow_unused=True)

    expected = gradients(rms_norm_reference(x, weight, residual=residual))
    with forced():
        found = gradients(rms_norm(x, weight, residual=residual))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_formats_that_differ() -> None:
    """A bf16 branch, an fp32 stream, fp32 weights: y is as the branch, the sum as the stream, gradients as theirs."""
    x, residual, weight = draw(3, 8).detach().bfloat16().requires_grad_(), draw(3, 8, seed=1), draw(8, seed=2)
    with forced():
        y, total = layer_norm(x, weight, residual=residual)
    want_y, want_total = layer_norm_reference(x, weight, residual=residual)
    assert (y.dtype, total.dtype) == (want_y.dtype, want_total.dtype) == (torch.bfloat16, torch.float32)
    leaves = (x, residual, weight)
    found, expected = (
        torch.autograd.grad((a.float() * b).sum(), leaves) for a, b in ((y, total), (want_y, want_total))
    )
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-2)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"weight \[3\] for x \[2, 4\]"):
        layer_norm(torch.ones(2, 4), torch.ones(3))
    with pytest.raises(ValueError, match=r"residual \[1, 4\] for x \[2, 4\]"):
        rms_norm(torch.ones(2, 4), residual=torch.ones(1, 4))
    with forced(), pytest.warns(UserWarning, match="16384 elements"):
        layer_norm(torch.ones(1, 20_000, device=DEVICE))
