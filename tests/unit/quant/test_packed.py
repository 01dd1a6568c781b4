"""Products with 4-bit weights on a CPU, as they are stored and packed: the same weights exactly, inputs rounded."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core.kernels import vnni
from core.kernels.llvm import looks_words_up
from core.quant import QuantizedWeight, Scheme, load_quantized, pack, quantize, quantize_folder
from core.quant.packed import Form, int4_packed, widened
from core.quant.weight import quantized_weight
from tests.unit.quant.models import decoder, saved, tokens

SCHEMES = [Scheme("int4", group, symmetric) for group in (32, 64, 128) for symmetric in (True, False)]


FORMS = {"stored": lambda weight: Form(), "packed": int4_packed}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    if request.param == "stored":
        require_vnni()
    return request.param


def require_vnni() -> None:
    if not vnni.offered():
        pytest.skip("this CPU has no VNNI, or llvmlite is missing; runs on one that has it")


def weight_of(form: str, rows: int, columns: int, scheme: Scheme) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(0)
    weight = quantized_weight(torch.randn(rows, columns, generator=generator) + 0.3, scheme)
    weight.packed = FORMS[form](weight)
    return weight


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_weights_are_the_same(form: str, scheme: Scheme) -> None:
    """Through rows of the identity each weight comes out; shapes that fill no tile or group."""
    for rows, columns in ((48, 256), (37, 100), (1, 1), (2100, 40)):
        weight = weight_of(form, rows, columns, scheme)
        x_MI = torch.eye(columns)
        found = torch.cat([F.linear(part, weight) for part in x_MI.split(16)])
        if form == "packed":
            assert torch.equal(found, weight.matrix().T.bfloat16().float()), (rows, columns)
        else:  # 32,767 steps of a 32,767th
            torch.testing.assert_close(found, weight.matrix().T, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products(form: str, dtype: torch.dtype) -> None:
    weight, generator = weight_of(form, 37, 200, Scheme("int4")), torch.Generator().manual_seed(1)
    x = torch.randn(3, 5, 200, generator=generator).to(dtype)
    bias = torch.randn(37, generator=generator).to(dtype)
    found = F.linear(x, weight, bias)
    rounded = x.bfloat16() if form == "packed" else x
    wanted = rounded.double() @ weight.matrix(dtype=torch.float64).T + bias.double()
    assert (found.dtype, found.shape) == (dtype, (3, 5, 37))
    # Packed: the product is rounded to bf16. Stored: 200 inputs, each half of a 32,767th of the largest off at most.
    # Then to the inputs' format.
    steps = 1.5 * 2**-8 if form == "packed" else 2e-4 + torch.finfo(dtype).eps
    assert float((found.double() - wanted).abs().max() / wanted.abs().max()) < steps


def test_inputs_as_they_are_stored_are_rounded_to_so_many_steps() -> None:
    """Exactly as said, so what is left is fp32's rounding of the groups' sums."""
    require_vnni()
    for group, symmetric in ((32, True), (64, False), (128, True)):
        weight = weight_of("stored", 37, 200, Scheme("int4", group, symmetric))
        x = torch.randn(5, 200, generator=torch.Generator().manual_seed(1))
        step = x.abs().amax(1, keepdim=True) / 32767
        q = (x * (32767 / x.abs().amax(1, keepdim=True))).round().double()
        wanted = step.double() * (q @ weight.matrix(dtype=torch.float64).T)
        assert float((F.linear(x, weight).double() - wanted).abs().max() / wanted.abs().max()) < 1e-6


def test_a_token_does_not_depend_on_its_neighbours(form: str) -> None:
    weight, x = weight_of(form, 64, 192, Scheme("int4")), torch.randn(130, 192)
    alone = torch.cat([F.linear(row[None], weight) for row in x])
    for rows in (16, 13, 9, 8, 7, 3):
        assert torch.equal(F.linear(x[:rows], weight), alone[:rows])


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("how", ["looked up", "computed", "by torch"])
def test_many_rows_meet_weights_in_bf16(scheme: Scheme, how: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that is faster; the weights, whose groups do not fill the columns, rounded to bf16 and no further."""
    if how == "looked up" and not looks_words_up():
        pytest.skip("this CPU has no AVX-512, or llvmlite is missing; ends on one that has it")
    if how == "by torch":
        monkeypatch.setattr("core.quant.packed.available", lambda: False)
    monkeypatch.setattr("core.kernels.vnni.looks_words_up", lambda: how == "looked up")
    weight, x = weight_of(form, 37, 200, scheme), torch.randn(40, 200, generator=torch.Generator().manual_seed(1))
    matrix = weight.matrix(dtype=torch.float64)
    wide = widened(weight.codes, weight.scale, weight.zero, scheme.group_size)
    assert torch.equal(wide[:, :200], matrix.bfloat16())
    widenings = []

    def widen(*parts: object) -> torch.Tensor:
        widenings.append(parts)
        return widened(*parts)

    monkeypatch.setattr("core.quant.packed.widened", widen)
    # some channels at a time, and all
    for is_faster, at_once, times in ((False, 1 << 22, 0), (True, 5 * 256, 8), (True, 1 << 22, 9)):
        monkeypatch.setattr("core.quant.packed._WIDENED", at_once)
        monkeypatch.setattr("core.quant.packed._widening_is_faster", lambda *given, choice=is_faster: choice)
        wanted = x.bfloat16().double() @ matrix.T
        assert float((F.linear(x, weight).double() - wanted).abs().max() / wanted.abs().max()) < 1.5 * 2**-8
        assert F.linear(x[:16], weight).shape == (16, 37)
        assert len(widenings) == times


def test_what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that something multiplies by; other formats of the model keep it; fp64 does not take it."""
    monkeypatch.setattr("core.quant.packed.form_is_faster", lambda rows, columns: columns > 48)
    monkeypatch.setattr("core.quant.packed._fastest_int4", lambda *shape: "packed")
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
    layer.weight.packed = int4_packed(layer.weight)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.dequantized().sum(0).expand(2, 64))


def test_loading_packs_and_lets_go_of_what_it_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.quant.packed._fastest_int4", lambda *shape: "packed")  # whatever else the machine does
    saved(tmp_path / "plain")
    quantize_folder(tmp_path / "plain", tmp_path / "q", "int4", embeddings=True, head=True)
    loaded, stored = load_quantized(tmp_path / "q"), load_quantized(tmp_path / "q", packed=False)
    before = dict(stored.named_parameters())
    for name, weight in loaded.named_parameters():
        if isinstance(weight, QuantizedWeight):
            assert (weight.packed is None) == (name == "embedding.positions.weight")
            assert torch.equal(weight.codes, before[name].codes)
    assert torch.equal(loaded(tokens()), pack(stored)(tokens()))
