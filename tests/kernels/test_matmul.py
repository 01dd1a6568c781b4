import shutil

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from core.kernels import matmul
from core.kernels.matmul import product, uses_onednn
from core.nn.linear import Linear


@pytest.fixture(autouse=True)
def _small_products_too(monkeypatch):
    """As on a CPU where oneDNN is the faster one, whatever this is."""
    monkeypatch.setattr(matmul, "_WORTH_IT", 0)
    monkeypatch.setattr(matmul, "_FASTER", True)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (40, 9, 130)])
def test_as_torch(shape, bias):
    """Value and gradients against fp64, on three-dimensional and strided input, within fp32 rounding of the sums."""
    M, K, N = shape
    layer = Linear(K, N, bias=bias)
    x = torch.randn(2, K, M).transpose(1, 2).requires_grad_()
    assert uses_onednn(x, layer.weight, 1) is matmul._AVAILABLE
    wide = [t.detach().double().requires_grad_() for t in (x, *layer.parameters())]
    g = torch.randn(2, M, N)
    out, want = layer(x), F.linear(*wide)
    grads = torch.autograd.grad(out, (x, *layer.parameters()), g)
    wants = torch.autograd.grad(want, wide, g.double())
    for ours, exact in zip((out, *grads), (want, *wants), strict=True):
        assert ours.shape == exact.shape
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5 * max(shape) ** 0.5)


def test_twice_differentiable():
    a, b = torch.randn(4, 3, requires_grad=True), torch.randn(3, 6, requires_grad=True)
    ours = torch.autograd.grad(product(a, b).square().sum(), a, create_graph=True)[0].square().sum()
    want = torch.autograd.grad((a @ b).square().sum(), a, create_graph=True)[0].square().sum()
    for grad, exact in zip(torch.autograd.grad(ours, (a, b)), torch.autograd.grad(want, (a, b)), strict=True):
        torch.testing.assert_close(grad, exact, rtol=1e-4, atol=1e-4)


def test_frozen_weight_makes_no_gradient():
    layer = Linear(4, 5).requires_grad_(False)
    x = torch.randn(3, 4, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(3, 4))


def test_where_it_is_not_used():
    x, weight = torch.randn(2, 4), torch.randn(3, 4)
    assert not uses_onednn(x.double(), weight.double(), 1)
    assert not uses_onednn(x.bfloat16(), weight.bfloat16(), 1)
    assert not uses_onednn(x.to("meta"), weight.to("meta"), 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert not uses_onednn(x, weight, 1)
        assert Linear(4, 3)(x).dtype == torch.bfloat16


def test_never_a_weight_with_gaps():
    """Slices come as inputs, weights and gradients; what oneDNN gets as a weight has no gaps (250x slower)."""
    strides = []

    class Weights(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.mkldnn._linear_pointwise.default:
                strides.append((tuple(args[1].shape), args[1].stride()))
            return func(*args, **kwargs or {})

    x, weight, g = (torch.randn(n, 20)[:, 3:m].requires_grad_() for n, m in ((9, 10), (6, 10), (9, 9)))
    with Weights():
        torch.autograd.grad(matmul.linear(x, weight), (x, weight), g.detach())
        for a, b in ((g.T, x), (g[:, 1:4].T, x), (x, weight.T)):
            torch.testing.assert_close(product(a, b), a @ b, rtol=1e-5, atol=1e-5)
    assert len(strides) == 6
    for (rows, columns), stride in strides:
        assert stride in ((columns, 1), (1, rows)), stride


def test_its_result_may_be_written_over():
    """As a transition does it, in four dims, with gradients."""
    layer, x = Linear(4, 6), torch.randn(1, 2, 3, 4)
    layer.weight.grad = None
    torch.relu_(layer(x)).sum().backward()
    want = torch.autograd.grad(torch.relu(F.linear(x, layer.weight, layer.bias)).sum(), layer.weight)[0]
    torch.testing.assert_close(layer.weight.grad, want)


@pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="no C++ compiler; ends where Debian's g++ is",
)
@pytest.mark.parametrize("gradients", [False, True])
def test_compiled(gradients):
    """By inductor, whose own way with oneDNN takes constant weights alone."""
    layer, x = Linear(4, 6), torch.randn(2, 3, 4, requires_grad=gradients)

    def found(function):
        with torch.set_grad_enabled(gradients):
            out = torch.relu(function(x))
            return out, *(torch.autograd.grad(out.sum(), (x, *layer.parameters())) if gradients else ())

    torch._dynamo.reset()
    for got, want in zip(found(torch.compile(layer)), found(layer), strict=True):
        torch.testing.assert_close(got, want)
