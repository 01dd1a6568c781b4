"""Products, look-ups and convolutions with quantized weights against plain dequantized ones in fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.quant import QuantizedWeight, Scheme, integers, quantize
from core.quant.integers import _KERNELS, Codes, exact_kernels, packed_integers
from core.quant.packed import fastest_form
from core.quant.weight import quantized_weight
from core.trace.account import MemoryAccount

WEIGHT_ONLY = (
    Scheme("int8"),
    Scheme("int4", 32, True),
    Scheme("int4", 64),
    Scheme("int4", 128, True),
    Scheme("int4", 128),
)
ALL = (*WEIGHT_ONLY, Scheme("w8a8"), Scheme("llm.int8", threshold=2.5))
SHAPES = ((1, 64, 128), (5, 63, 100), (3, 1, 1), (33, 130, 70), (0, 4, 8), (2, 48, 2100))
# Sums of fp32 products; 16 bits round the result once.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expected(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """The scheme in fp64, written down plainly."""
    narrow, x, scheme = x.dtype != torch.float64, x.double(), weight.scheme
    if scheme.name == "int8" and narrow:
        steps_M1 = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / (127 * 128)
        x = (x / steps_M1).round() * steps_M1
    if not scheme.rounds_inputs:
        return x @ weight.matrix(dtype=torch.float64).T
    matrix = weight.matrix(dtype=torch.float64)
    if weight.gain is not None:
        x, matrix = x * weight.gain.double(), matrix / weight.gain.double()
    apart = x.abs() > (scheme.threshold if scheme.name == "llm.int8" else torch.inf)
    usual = x.masked_fill(apart, 0.0)
    largest = usual.abs().amax(-1, keepdim=True)
    largest = torch.where(largest > 0, largest, 1.0)
    rounded = (usual * 127 / largest).round() * largest / 127
    return (rounded + x.masked_fill(~apart, 0.0)) @ matrix.T


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max()) if wanted.numel() else 0.0


@pytest.mark.parametrize("scheme", ALL, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_linear(scheme: Scheme, dtype: torch.dtype) -> None:
    for rows, num_out, num_in in SHAPES:
        x, weight = normal(rows, num_in, dtype=dtype), quantized_weight(normal(num_out, num_in, seed=1), scheme)
        bias = normal(num_out, seed=2, dtype=dtype)
        found = F.linear(x, weight, bias)
        assert (found.dtype, found.shape) == (dtype, (rows, num_out))
        limit = TOLERANCE[dtype]
        if dtype != torch.float64:  # an input on the edge of two steps may fall either way
            limit += 2e-3 if scheme.rounds_inputs else 2e-5 if scheme.name == "int8" else 0.0
        assert error(found, expected(x, weight) + bias.double()) < limit, (rows, num_out, num_in)
        assert torch.equal(F.linear(x, weight) + bias, found) or dtype in (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("scheme", [Scheme("int8"), Scheme("w8a8"), Scheme("llm.int8", threshold=2.0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_does_not_depend_on_its_neighbours(scheme: Scheme, dtype: torch.dtype) -> None:
    """Bit for bit, among neighbours with outliers a thousand times as large, in batches of every size."""
    weight = quantized_weight(normal(96, 160, seed=1), scheme)
    x = normal(300, 160, dtype=dtype)
    x[::7] *= 1000
    alone = torch.cat([F.linear(x[i : i + 1], weight) for i in range(40)])
    for rows in (300, 41, 64, 40):
        assert torch.equal(F.linear(x[:rows], weight)[:40], alone)
    assert torch.equal(F.linear(x.view(10, 30, 160), weight).view(300, 96)[:40], alone)


def test_outliers_break_w8a8_and_not_llm_int8() -> None:
    x, w = normal(16, 256), normal(64, 256, seed=1)
    x[:, 17] *= 100
    w[:, 17] /= 100
    wanted = x.double() @ w.double().T
    errors = {
        name: error(F.linear(x, quantized_weight(w, Scheme(name))), wanted) for name in ("int8", "w8a8", "llm.int8")
    }
    assert errors["llm.int8"] < 0.5 * errors["int8"], errors  # int8 loses the small column's weights, too
    assert errors["w8a8"] > 5 * errors["llm.int8"], errors


def test_columns_that_are_much_smaller_keep_their_digits() -> None:
    """By llm.int8: powers of two, none above 1, and none where columns are alike; every column as fine as the usual."""
    w = normal(64, 256)
    assert quantized_weight(w, Scheme("llm.int8")).gain is None
    w[:, 3], w[:, 70], w[:, 100] = w[:, 3] / 50, w[:, 70] / 4000, 0.0
    weight = quantized_weight(w, Scheme("llm.int8"))
    assert weight.gain is not None
    assert (weight.gain != 1).nonzero().flatten().tolist() == [3, 70]
    assert torch.equal(weight.gain.log2(), weight.gain.log2().round())
    assert bool((weight.gain <= 1).all())
    error_I = (weight.dequantized() - w).norm(dim=0) / w.norm(dim=0).clamp(min=1e-9)
    assert float(error_I.max()) < 0.02
    assert quantized_weight(w, Scheme("int8")).gain is None
    x, bias = normal(5, 256, seed=1), normal(64, seed=2)
    x[:, 3] *= 50
    for dtype, limit in TOLERANCE.items():
        found = F.linear(x.to(dtype), weight, bias.to(dtype))
        wanted = expected(x.to(dtype), weight) + bias.to(dtype).double()
        assert error(found, wanted) < limit + 2e-3 * (dtype != torch.float64)


def test_onednns_form_gives_the_same_bits() -> None:
    for scheme in (Scheme("int8"), Scheme("w8a8"), Scheme("llm.int8", threshold=2.0)):
        plain, packed = (quantized_weight(normal(96, 160, seed=1), scheme) for _ in range(2))
        packed.packed = packed_integers(packed.codes, packed.scale)
        for rows in (1, 2, 9, 100):
            x = normal(rows, 160)
            assert torch.equal(F.linear(x, packed), F.linear(x, plain))


@pytest.mark.parametrize(("rows", "channels", "columns"), [(3, 37, 1024), (300, 37, 2100), (520, 1500, 48)])
def test_what_a_product_in_fp32_holds_is_known(monkeypatch, rows: int, channels: int, columns: int) -> None:
    monkeypatch.setattr(integers, "exact_kernels", lambda: ("floats",))
    q = torch.full((rows, columns), 131, dtype=torch.uint8)
    codes = Codes(torch.full((channels, columns), 5, dtype=torch.int8), torch.ones(channels))
    with MemoryAccount() as account:
        account.add([q, codes.codes_OI, codes.scale_O])
        before = account.current_bytes
        assert (integers._KERNELS["floats"](q, codes) == 15 * columns).all()
        held = account.peak_bytes - before - 4 * rows * channels
        # And the number 128, a tensor, which the account sees when it is first used.
        assert held <= integers.float_bytes(rows, (channels, columns)) + 4 <= 1.15 * held


@pytest.mark.parametrize("name", ["signed", "unsigned", "form", "floats"])
def test_products_of_integers_are_exact(name: str) -> None:
    """Also where sums of pairs would leave 16 bits, and whole sums 24."""
    if name not in (*exact_kernels(), "floats"):
        pytest.skip("this CPU's instructions saturate; the kernel is not taken here")
    for rows, num_out, num_in in ((1, 16, 64), (3, 37, 4099), (70, 5, 130)):
        q = torch.full((rows, num_in), 127.0)
        q[::2, ::3] = -127.0
        codes = torch.full((num_out, num_in), -127, dtype=torch.int8)
        codes[1::2] = 127
        codes[:, ::5] = 3
        scale = normal(num_out, seed=3).exp()
        form = packed_integers(codes, scale) if name == "form" else None
        wanted = (q.double() @ codes.double().T).float() * scale
        assert torch.equal(_KERNELS[name]((q + 128).to(torch.uint8), Codes(codes, scale, form)), wanted)


@pytest.mark.parametrize("name", ["int8", "w8a8", "llm.int8", "int4"])
def test_what_is_not_finite_stays_visible(name: str) -> None:
    weight, x = quantized_weight(normal(20, 64), Scheme(name)), normal(3, 64, seed=1)
    weight.packed = fastest_form(weight)
    clean = F.linear(x, weight)
    for value in (torch.nan, torch.inf):
        x[1, 5] = value
        found = F.linear(x, weight)
        assert not found[1].isfinite().any()
        assert torch.equal(found[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_gradients_of_inputs(scheme: Scheme) -> None:
    """For adapters beside frozen weights: dx = dy W, with what is rounded counted as if it were not."""
    weight, x = quantized_weight(normal(2050, 40), scheme), normal(2, 3, 40, seed=1).requires_grad_()
    bias, dy = normal(2050, seed=2).requires_grad_(), normal(2, 3, 2050, seed=3)
    F.linear(x, weight, bias).backward(dy)
    assert x.grad is not None
    assert bias.grad is not None
    assert error(x.grad, dy.double() @ weight.matrix(dtype=torch.float64)) < 1e-5
    torch.testing.assert_close(bias.grad, dy.sum((0, 1)))


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_convolutions(scheme: Scheme) -> None:
    """By every scheme with rounded weights and inputs as they are; groups, strides and padding modes."""
    layers = (
        (nn.Conv1d(6, 9, 5, stride=2, padding=2), (2, 6, 17)),
        (nn.Conv2d(8, 12, 3, padding=1, groups=4), (2, 8, 9, 7)),
        (nn.Conv2d(4, 5, 1, bias=False), (1, 4, 3, 3)),
        (nn.Conv2d(4, 6, 3, padding="same", padding_mode="circular", dilation=2), (1, 4, 8, 8)),
        (nn.Conv3d(2, 3, (1, 3, 2)), (1, 2, 3, 5, 4)),
    )
    for layer, shape in layers:
        x = normal(*shape)
        quantize(layer, scheme)
        weight = layer.weight
        assert isinstance(weight, QuantizedWeight)
        found = layer(x)
        layer.weight = nn.Parameter(weight.dequantized())
        assert torch.equal(layer(x), found)


@pytest.mark.parametrize("scheme", WEIGHT_ONLY, ids=str)
def test_embedding(scheme: Scheme) -> None:
    weight = quantized_weight(normal(50, 70), scheme)
    ids = torch.tensor([[0, 49, 3], [3, 3, 7]])
    assert torch.equal(F.embedding(ids, weight, 3), weight.dequantized()[ids])


def test_autocast_gives_the_dtype_of_autocast() -> None:
    weight, x = quantized_weight(normal(8, 64), Scheme("int8")), normal(2, 64, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        found = F.linear(x, weight)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, F.linear(x.bfloat16(), weight))
