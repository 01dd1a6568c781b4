"""The packed form of 4-bit weights on a CPU: the same weights exactly, inputs and results in bf16."""

import copy
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import core.quant.integers
import core.quant.packed
from core.kernels.traced import number_of
from core.quant import QuantizedWeight, Scheme, compile_widening, load_quantized, pack, quantize, quantize_folder
from core.quant.packed import packed, widened
from core.quant.weight import quantized_weight
from tests.unit.quant.models import decoder, saved, tokens

SCHEMES = [Scheme("int4", group, symmetric) for group in (32, 64, 128) for symmetric in (True, False)]


def packed_weight(rows: int, columns: int, scheme: Scheme) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(0)
    weight = quantized_weight(torch.randn(rows, columns, generator=generator) + 0.3, scheme)
    weight.packed = packed(weight)
    return weight


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_weights_are_the_same_bits(scheme: Scheme) -> None:
    """Through rows of the identity each weight comes out, rounded to bf16 once; shapes that fill no tile or group."""
    for rows, columns in ((48, 256), (37, 100), (1, 1), (2100, 40)):
        weight = packed_weight(rows, columns, scheme)
        found = F.linear(torch.eye(columns), weight)
        assert torch.equal(found, weight.matrix().T.bfloat16().float()), (rows, columns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products(dtype: torch.dtype) -> None:
    weight, generator = packed_weight(37, 200, Scheme("int4")), torch.Generator().manual_seed(1)
    x = torch.randn(3, 5, 200, generator=generator).to(dtype)
    bias = torch.randn(37, generator=generator).to(dtype)
    found = F.linear(x, weight, bias)
    wanted = x.bfloat16().double() @ weight.matrix(dtype=torch.float64).T + bias.double()
    assert (found.dtype, found.shape) == (dtype, (3, 5, 37))
    # The product is rounded to bf16, and in bf16 the sum with the bias again.
    assert float((found.double() - wanted).abs().max() / wanted.abs().max()) < 1.5 * 2**-8


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    weight, x = packed_weight(64, 192, Scheme("int4")), torch.randn(130, 192)
    alone = torch.cat([F.linear(row[None], weight) for row in x])
    for rows in (16, 9, 8, 7, 3):
        assert torch.equal(F.linear(x[:rows], weight), alone[:rows])


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_many_rows_meet_weights_in_bf16(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that is faster; the weights, whose groups do not fill the columns, rounded to bf16 and no further."""
    weight, x = packed_weight(37, 200, scheme), torch.randn(40, 200, generator=torch.Generator().manual_seed(1))
    matrix = weight.matrix(dtype=torch.float64)
    assert torch.equal(widened(weight.codes, weight.scale, weight.zero)[:, :200], matrix.bfloat16())
    widenings = []

    def widen(*parts: torch.Tensor) -> torch.Tensor:
        widenings.append(parts)
        return widened(*parts)

    weight.packed = replace(weight.packed, widen=widen)
    for is_faster, times in ((False, 0), (True, 1)):
        monkeypatch.setattr("core.quant.packed._widening_is_faster", lambda *shape, choice=is_faster: choice)
        wanted = x.bfloat16().double() @ matrix.T
        assert float((F.linear(x, weight).double() - wanted).abs().max() / wanted.abs().max()) < 1.5 * 2**-8
        assert F.linear(x[:16], weight).shape == (16, 37)
        assert len(widenings) == times


def test_a_compiled_widening_gives_the_same_bits() -> None:
    """For any number of channels and groups, one group too; layers of one kind share it, and keep it."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler; ends where g++ is installed, as .ci/run does")
    for scheme in (Scheme("int4", 32, True), Scheme("int4", 32), Scheme("int4", 128)):
        shapes = ((80, 50), (20, 1), (300, 7))
        layers = nn.ModuleList([quantize(nn.Linear(*shape, bias=False), scheme) for shape in shapes])
        for layer in layers:
            layer.weight.packed = packed(layer.weight)
        compile_widening(layers)
        found = [layer.weight.packed.widen for layer in layers]
        compile_widening(layers)
        assert found[0] is not widened
        assert all(layer.weight.packed.widen is found[0] for layer in layers)
        for layer in layers:
            parts = (layer.weight.codes, layer.weight.scale, layer.weight.zero)
            assert torch.equal(found[0](*parts), widened(*parts))
            x = torch.randn(24, layer.in_features)
            torch.testing.assert_close(layer(x), x @ layer.weight.dequantized().T, rtol=0, atol=0.02)


def test_a_lone_token_given_twice_is_multiplied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph is given it: by every scheme that a graph calls as an operator."""
    rows = []
    for module, name in ((core.quant.packed, "_product"), (core.quant.integers, "_product")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda x, w, real=real: rows.append(len(x)) or real(x, w))
    x = torch.randn(1, 64)
    for scheme, operator, digits in (
        ("int4", torch.ops.megalith.packed_product, 1),
        ("w8a8", torch.ops.megalith.product_of_integers, 1),
        ("int8", torch.ops.megalith.product_of_integers, 2),
    ):
        weight = quantized_weight(torch.randn(24, 64), Scheme(scheme))
        weight.packed = packed(weight) if scheme == "int4" else None
        q = x.bfloat16() if scheme == "int4" else torch.arange(64 * digits, dtype=torch.uint8).view(digits, 64) + 68
        twice = q.repeat_interleave(2, 0)
        rows.clear()
        found = operator(twice, number_of(weight), 24)
        assert rows == [digits]
        assert torch.equal(found[::2], found[1::2])
        assert torch.equal(found[::2], operator(q, number_of(weight), 24))
        different = twice.clone()
        different[-1, 0] += 1
        rows.clear()
        operator(different, number_of(weight), 24)
        assert rows == [2 * digits]


def test_what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that something multiplies by; other formats of the model keep it; fp64 does not take it."""
    monkeypatch.setattr("core.quant.packed.form_is_faster", lambda rows, columns: columns > 48)
    monkeypatch.setattr("core.quant.packed._int4_is_faster", lambda *shape: True)
    model = decoder(tied_head=False)
    assert pack(model) is model
    mixed = pack(quantize(quantize(copy.deepcopy(model), "int4", embeddings=True), "int8", head=True))
    forms = {n: p.packed is not None for n, p in mixed.named_parameters() if isinstance(p, QuantizedWeight)}
    assert {name for name, is_packed in forms.items() if not is_packed} == {
        "embedding.tokens.weight",
        "embedding.positions.weight",
        "head.weight",  # in 8 bits, and not faster so
    }
    eight = pack(quantize(copy.deepcopy(model), "int8", head=True))
    assert eight.blocks[0].mlp.down.weight.packed is not None
    assert eight.blocks[0].mlp.up.weight.packed is None
    assert torch.equal(eight(tokens()), quantize(copy.deepcopy(model), "int8", head=True)(tokens()))
    tied = pack(quantize(decoder(), "int4", head=True))
    assert tied.head.weight.packed is not None
    assert copy.deepcopy(tied).to(torch.bfloat16).head.weight.packed is not None
    exact = quantize(decoder(), "int4", head=True)
    ids = tokens()
    assert torch.equal(tied.double()(ids), exact.double()(ids))
    with torch.no_grad():
        error = (tied.float()(ids) - exact.float()(ids)).norm() / exact(ids).norm()
    assert 0 < float(error) < 0.03


def test_inputs_are_differentiated_as_if_not_packed() -> None:
    layer, x = quantize(nn.Linear(64, 16), "int4"), torch.randn(2, 64, requires_grad=True)
    layer.weight.packed = packed(layer.weight)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.dequantized().sum(0).expand(2, 64))


def test_loading_packs_and_lets_go_of_what_it_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.quant.packed._int4_is_faster", lambda *shape: True)  # whatever else the machine does
    saved(tmp_path / "plain")
    quantize_folder(tmp_path / "plain", tmp_path / "q", "int4", embeddings=True, head=True)
    loaded, stored = load_quantized(tmp_path / "q"), load_quantized(tmp_path / "q", packed=False)
    before = dict(stored.named_parameters())
    for name, weight in loaded.named_parameters():
        if isinstance(weight, QuantizedWeight):
            assert (weight.packed is None) == (name == "embedding.positions.weight")
            assert torch.equal(weight.codes, before[name].codes)
    assert torch.equal(loaded(tokens()), pack(stored)(tokens()))
