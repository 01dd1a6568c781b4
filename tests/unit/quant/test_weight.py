"""A quantized weight is a tensor: what torch, modules and copies do with it."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.config import UserError
from core.kernels import vnni
from core.kernels.quantized_matmul import dequantize_int4, quantize_int4
from core.quant import QuantizedWeight, Scheme, quantize, stored_bytes
from core.quant import weight as weights
from core.quant.packed import Form
from core.quant.weight import quantized_weight
from core.trace.account import MemoryAccount

INT4 = Scheme("int4", 64)


def weight_of(scheme: Scheme = INT4, shape: tuple[int, ...] = (10, 100), dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    if scheme.name == "llm.int8":
        values[:, 70] /= 100  # it gets a gain
    return nn.Parameter(quantized_weight(values, scheme), requires_grad=False)


def same(a: Tensor, b: Tensor) -> bool:
    assert isinstance(a, QuantizedWeight)
    assert isinstance(b, QuantizedWeight)
    alike = (a.scheme, a.shape, a.dtype, a.transposed) == (b.scheme, b.shape, b.dtype, b.transposed)
    return alike and a.parts.keys() == b.parts.keys() and all(torch.equal(a.parts[n], b.parts[n]) for n in a.parts)


def test_it_has_shape_and_dtype_of_what_it_stands_for() -> None:
    weight = weight_of(dtype=torch.bfloat16)
    assert (weight.shape, weight.dtype, weight.numel(), weight.requires_grad) == (
        (10, 100),
        torch.bfloat16,
        1000,
        False,
    )
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, QuantizedWeight)
    assert {name: (tuple(p.shape), p.dtype) for name, p in weight.parts.items()} == {
        "codes": ((10, 64), torch.uint8),
        "scale": ((10, 2), torch.bfloat16),
        "zero": ((10, 2), torch.uint8),
    }
    assert weight.stored_bytes == 10 * 64 + 2 * 10 * 2 + 10 * 2


def test_any_other_operator_sees_the_values() -> None:
    weight = weight_of()
    assert isinstance(weight, QuantizedWeight)
    plain = weight.dequantized()
    assert torch.equal(weight.T @ torch.ones(10), plain.T @ torch.ones(10))
    assert torch.equal(weight[2:4].abs().sum(1), plain[2:4].abs().sum(1))
    assert torch.equal(torch.stack((weight, weight)), torch.stack((plain, plain)))
    assert "int4" in repr(weight)


def test_it_cannot_be_written_to() -> None:
    weight = weight_of()
    for write in (lambda: weight.mul_(2), lambda: weight.copy_(torch.zeros(10, 100)), lambda: weight.fill_(1.0)):
        with pytest.raises(TypeError, match="would write to a quantized weight"):
            write()
    module, state = quantize(nn.Linear(100, 10), INT4), nn.Linear(100, 10).state_dict()
    with pytest.raises(RuntimeError, match="would write to a quantized weight"):
        module.load_state_dict(state)


@pytest.mark.parametrize("scheme", [Scheme("int8"), Scheme("llm.int8"), INT4, Scheme("int4", 32, True)], ids=str)
def test_copies(scheme: Scheme) -> None:
    weight = weight_of(scheme)
    assert ("gain" in weight.parts) == (scheme.name == "llm.int8")
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight)), weight.clone(), weight.detach()):
        assert same(weight, other)
    assert isinstance(copy.deepcopy(weight), nn.Parameter)
    assert isinstance(pickle.loads(pickle.dumps(weight)), nn.Parameter)


def test_modules_move_and_cast_it() -> None:
    """Another dtype changes what it says it is, and none of what is stored."""
    tied = nn.ModuleDict({"a": nn.Linear(100, 10, bias=False), "b": nn.Linear(100, 10)})
    tied["b"].weight = tied["a"].weight
    quantize(tied, INT4)
    assert tied["a"].weight is tied["b"].weight
    before = tied["a"].weight
    codes = before.codes
    tied.to(torch.bfloat16)
    assert tied["a"].weight is tied["b"].weight
    assert (tied["a"].weight.dtype, tied["b"].bias.dtype) == (torch.bfloat16, torch.bfloat16)
    assert tied["a"].weight.codes.data_ptr() == codes.data_ptr()
    assert tied["b"](torch.ones(3, 100, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert tied.to("meta")["a"].weight.codes.is_meta


def test_bytes_are_those_of_what_is_stored() -> None:
    model = nn.Sequential(nn.Linear(128, 32), nn.LayerNorm(32))
    plain = stored_bytes(model)
    assert plain == 4 * (128 * 32 + 32 + 64)
    quantize(model, "int8")
    assert stored_bytes(model) == 128 * 32 + 4 * 32 + 4 * (32 + 64)
    with MemoryAccount() as account:
        account.add(model.parameters())
    assert account.current_bytes == stored_bytes(model)


def test_only_a_slab_is_widened_at_a_time() -> None:
    values = torch.randn(4096, 1024, dtype=torch.bfloat16)
    with MemoryAccount() as account:
        account.add([values])
        weight = quantized_weight(values, Scheme("int8"))
    assert account.peak_bytes < values.nbytes + weight.stored_bytes + (2 << 20)  # the whole in fp32 would be 16 MiB


def test_weights_that_are_not_finite_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight[2, 3] = torch.nan
    with pytest.raises(UserError, match=r"^1\.weight holds values that are not finite"):
        quantize(model, "int8")


def test_schemes_refuse_what_they_do_not_know() -> None:
    for given, said in (
        (
            {"name": "int5"},
            r"no quantization scheme 'int5', did you mean int8\?; the schemes are int8, w8a8, llm\.int8",
        ),
        ({"name": "int4", "group_size": 48}, "group_size=48; int4 has groups of 32, 64, 128 columns"),
        ({"name": "int8", "group_size": 128}, "group_size is an option of int4, and int8 was asked for"),
        ({"name": "w8a8", "threshold": 5.0}, r"threshold is an option of llm\.int8, and w8a8 was asked for"),
        ({"name": "llm.int8", "threshold": 0.0}, "give a positive number"),
    ):
        with pytest.raises(UserError, match=said) as raised:
            Scheme(**given)
        assert "\n" not in str(raised.value)
    for content in ({}, [], {"name": "int8"}, Scheme("int8").as_json() | {"threshold": "6"}):
        with pytest.raises(UserError, match="no description of a scheme"):
            Scheme.from_json(content)
    assert Scheme.from_json(INT4.as_json()) == INT4


@pytest.mark.parametrize(
    "scheme", [Scheme("int8"), Scheme("llm.int8"), Scheme("int4", 32), Scheme("int4", 32, symmetric=True)], ids=str
)
def test_parts_of_ranks_make_up_the_whole(scheme: Scheme) -> None:
    """Rows and columns, the last of them fewer; nothing is rounded again."""
    weight = weight_of(scheme, (10, 100))
    assert isinstance(weight, QuantizedWeight)
    whole = weight.dequantized()
    for rows in (slice(0, 6), slice(6, 10)):
        for columns in (slice(0, 64), slice(64, 100), slice(0, 100)):
            part = weight.cut((rows, columns))
            assert part.shape == whole[rows, columns].shape
            assert torch.equal(part.dequantized(), whole[rows, columns])
            assert part.codes.is_contiguous()
    if scheme.name == "int4":
        with pytest.raises(UserError, match="100 columns in groups of 32 are not cut at 0 and 50"):
            weight.cut((slice(0, 10), slice(0, 50)))


def test_four_bits_cover_less_than_a_groups_range_where_that_is_closer() -> None:
    values = torch.randn(20, 256, generator=torch.Generator().manual_seed(0))
    packed, scale, zero = quantize_int4(values, 64, False, 5)
    whole_range = dequantize_int4(packed, scale, zero, 256)
    found = quantized_weight(values, INT4).dequantized()
    assert float((found - values).square().sum()) < 0.95 * float((whole_range - values).square().sum())


@pytest.mark.parametrize("scheme", [Scheme("int8"), INT4], ids=str)
def test_products_follow_codes_that_move(scheme: Scheme) -> None:
    """As when a folder's codes are mapped anew: what a product kept of the old ones is not used again."""
    values, x = torch.randn(20, 128), torch.randn(2, 128)
    weight, other = quantized_weight(values, scheme), quantized_weight(-values, scheme)
    for each in (weight, other):
        # As the codes are stored: a copy in another order would stay as it is.
        each.packed = Form() if scheme is INT4 and vnni.offered() else None
        F.linear(x, each)
    weight.codes, weight.scale, weight.zero = other.codes, other.scale, other.zero
    assert torch.equal(F.linear(x, weight), F.linear(x, other))


@pytest.mark.parametrize("name", ["int8", "llm.int8", "int4"])
def test_slabs_are_rounded_by_a_thread_each(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that share so short operators wait for each other; and who comes later has as many threads as before."""
    values, scheme, before = torch.randn(700, 300) * torch.logspace(-3, 1, 300), Scheme(name), torch.get_num_threads()
    seen: list[int] = []
    rounded = weights._rounded

    def counted(matrix_OI: Tensor, of: Scheme) -> Any:
        seen.extend([torch.get_num_threads()] * bool(len(matrix_OI)))
        return rounded(matrix_OI, of)

    monkeypatch.setattr(weights, "_rounded", counted)
    try:
        torch.set_num_threads(1)
        alone = quantized_weight(values, scheme)
        torch.set_num_threads(3)
        for mode in (torch.enable_grad, torch.inference_mode):
            seen.clear()
            with mode():
                shared = quantized_weight(nn.Parameter(values), scheme)
            assert seen == [1] * len(seen)
            assert len(seen) > 3
            assert all(torch.equal(part, shared.parts[key]) for key, part in alone.parts.items())
            with ThreadPoolExecutor(1) as pool:
                assert torch.get_num_threads() == pool.submit(torch.get_num_threads).result() == 3
        with pytest.raises(ValueError, match="not finite"):
            quantized_weight(values.index_fill(0, torch.tensor([650]), torch.inf), scheme)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
