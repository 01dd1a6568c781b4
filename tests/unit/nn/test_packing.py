"""Weights in oneDNN's own order: the same products, taken only where they are the weight's own and nothing learns."""

import copy

import pytest
import torch
from torch import nn

from core.kernels import matmul
from core.kernels.matmul import linear, pack_weight
from core.nn.packing import pack_linear
from tests.unit.quant.models import decoder, tokens

# Of the largest result: fp32 sums in another order, and a rounding to bf16.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine measures."""
    monkeypatch.setattr(matmul, "_packing_is_faster", lambda *shape: True)


def weight_of(rows: int, columns: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype))


def is_taken(monkeypatch: pytest.MonkeyPatch, x: torch.Tensor, weight: torch.Tensor) -> bool:
    taken = []
    with monkeypatch.context() as patch:
        real = matmul._linear_by_form
        patch.setattr(matmul, "_linear_by_form", lambda *given: taken.append(given) or real(*given))
        linear(x, weight)
    return bool(taken)


@torch.no_grad()
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_products(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where oneDNN has no bf16 (a CPU without AVX-512) the weight stays as it is, and the product is torch's."""
    offered = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for rows, columns in ((48, 64), (37, 101), (1, 1)):
        weight, bias = weight_of(rows, columns, dtype), torch.randn(rows).to(dtype)
        assert pack_weight(weight) == offered
        for shape in ((1,), (7,), (2, 3), (40,)):
            x = torch.randn(*shape, columns).to(dtype)
            found, wanted = linear(x, weight, bias), x.double() @ weight.double().T + bias.double()
            assert (found.dtype, found.shape) == (dtype, (*shape, rows))
            assert float((found.double() - wanted).abs().max() / wanted.abs().max()) < TOLERANCE[dtype]
            assert is_taken(monkeypatch, x, weight) == offered


def test_only_as_it_was_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while gradients are recorded, not of a weight that was converted or replaced since, not of other formats."""
    weight, x = weight_of(24, 32, torch.float32), torch.randn(5, 32)
    assert pack_weight(weight)
    assert not is_taken(monkeypatch, x, weight)
    with torch.no_grad():
        assert is_taken(monkeypatch, x, weight)
        assert not is_taken(monkeypatch, x[:0], weight)
        assert not is_taken(monkeypatch, x, copy.deepcopy(weight))
        before = linear(x, weight)
        weight.data = weight.data.clone().mul_(2)
        assert not is_taken(monkeypatch, x, weight)
        torch.testing.assert_close(linear(x, weight), 2 * before)
    assert not pack_weight(weight_of(24, 32, torch.float64))


@torch.no_grad()
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_a_model(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = decoder(family), tokens()
    wanted = model(ids)
    assert pack_linear(model) is model
    multiplied = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    assert all(is_taken(monkeypatch, torch.randn(2, w.shape[1]), w) for w in (*multiplied, model.head.weight))
    torch.testing.assert_close(model(ids), wanted, rtol=1e-5, atol=1e-5)
