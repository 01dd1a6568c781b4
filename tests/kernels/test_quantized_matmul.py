"""What the SPECs of quantized products do not say: how weights are rounded and packed, what outliers do, errors."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from core.kernels import quantized_matmul
from core.kernels.operator import forced
from core.kernels.quantized_matmul import (
    GROUPS,
    dequantize_int4,
    dequantize_int8,
    int4_matmul,
    int8_dynamic_matmul,
    int8_matmul,
    quantize_int4,
    quantize_int8,
)
from core.trace.account import MemoryAccount
from tests.support.device import DEVICE

pytestmark = pytest.mark.usefixtures("device")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def test_int8_weights_are_within_half_a_step() -> None:
    w_OI = normal(5, 100)
    w_OI[3] = 0.0
    weight_OI, scale_O = quantize_int8(w_OI)
    error_OI = (dequantize_int8(weight_OI, scale_O) - w_OI).abs()
    assert bool((error_OI <= 0.5001 * scale_O[:, None]).all())
    assert weight_OI[[0, 1, 2, 4]].abs().amax(1).tolist() == [127] * 4
    assert not dequantize_int8(weight_OI, scale_O)[3].any()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", GROUPS)
def test_int4_weights_are_within_half_a_step(group: int, symmetric: bool) -> None:
    """A zero is rounded, too: where it is not symmetric, the ends of the range may be off by a whole step."""
    w_OI = normal(5, 200) + (0.0 if symmetric else 0.7)
    w_OI[2] = 0.0
    packed, scale_OG, zero_OG = quantize_int4(w_OI, group, symmetric)
    G = -(-200 // group)
    assert (packed.shape, packed.dtype, scale_OG.shape) == ((5, G * group // 2), torch.uint8, (5, G))
    assert (zero_OG is None) == symmetric
    step_OI = scale_OG.repeat_interleave(group, 1)[:, :200]
    error_OI = (dequantize_int4(packed, scale_OG, zero_OG, 200) - w_OI).abs()
    assert bool((error_OI <= (0.5001 if symmetric else 1.0001) * step_OI).all())
    assert float((error_OI / step_OI).median()) < 0.3
    assert not dequantize_int4(packed, scale_OG, zero_OG, 200)[2].any()


def test_int4_packing() -> None:
    """Byte j of a group: column j in the low half, column j + group / 2 in the high half."""
    w_OI = torch.zeros(1, 64)
    w_OI[0, 3], w_OI[0, 16 + 3], w_OI[0, 32] = 7.0, -7.0, 2.0
    packed, scale_OG, _ = quantize_int4(w_OI, 32)
    assert packed[0, 3] == (7 + 8) | (-7 + 8) << 4
    assert packed[0, 16] == (7 + 8) | 8 << 4
    assert scale_OG.tolist() == [[1.0, torch.tensor(2 / 7).item()]]


@pytest.mark.parametrize("kernels", [False, True])
def test_outliers_are_not_rounded(kernels: bool) -> None:
    """One large column makes the steps of all others coarse; taken out, the result is that of 8 bits again."""
    x_MI, w_OI = normal(8, 64), normal(20, 64, seed=1)
    x_MI[:, 5] *= 100
    weight_OI, scale_O = quantize_int8(w_OI)
    exact_MO = x_MI.double() @ dequantize_int8(weight_OI, scale_O, torch.float64).T
    with forced() if kernels else torch.no_grad():
        coarse, by_list, by_threshold = (
            int8_dynamic_matmul(x_MI, weight_OI, scale_O, **given).double()
            for given in ({}, {"outliers": torch.tensor([5], device=DEVICE)}, {"threshold": 6.0})
        )
    assert torch.equal(by_list, by_threshold)
    error, coarse_error = (float((y - exact_MO).abs().max()) for y in (by_list, coarse))
    assert error < 0.3 < 3.0 < coarse_error


@pytest.mark.parametrize("kernels", [False, True])
def test_outliers_of_one_row_do_not_change_another(kernels: bool) -> None:
    x_MI, (weight_OI, scale_O) = normal(8, 64), quantize_int8(normal(20, 64, seed=1))
    with forced() if kernels else torch.no_grad():
        alone = int8_dynamic_matmul(x_MI[:1], weight_OI, scale_O, threshold=6.0)
        x_MI[1:, 5] *= 100
        among = int8_dynamic_matmul(x_MI, weight_OI, scale_O, threshold=6.0)[:1]
    torch.testing.assert_close(among, alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [5, 8])
def test_int4_scales_of_few_bits(bits: int, symmetric: bool) -> None:
    """Codes are chosen to the rounded scale, and no end is clipped; 5 bits leave room for a product with a zero."""
    w_OI = normal(7, 256) * torch.logspace(-30, 20, 7)[:, None].to(DEVICE)
    packed, scale_OG, zero_OG = quantize_int4(w_OI, 64, symmetric, bits)
    _, wide_OG, _ = quantize_int4(w_OI, 64, symmetric)
    assert scale_OG.dtype == torch.bfloat16
    assert bool((scale_OG.float() >= wide_OG).all())
    assert bool((scale_OG.float() <= (1 + 2.0 ** (1 - bits)) * wide_OG).all())
    step_OI = scale_OG.float().repeat_interleave(64, 1)
    error_OI = (dequantize_int4(packed, scale_OG, zero_OG, 256) - w_OI).abs()
    assert bool((error_OI <= (0.501 if symmetric else 1.001) * step_OI).all())
    for zero in range(9):
        shift_OG = zero * scale_OG.float()
        assert bits == 8 or torch.equal(shift_OG.bfloat16().float(), shift_OG)


@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_covers_the_best_share_of_a_range(symmetric: bool) -> None:
    """Each group has that with the least squared error."""
    w_OI = normal(40, 256)

    def errors_OG(shares: tuple[float, ...]) -> torch.Tensor:
        packed, scale_OG, zero_OG = quantize_int4(w_OI, 64, symmetric, 5, shares)
        return (dequantize_int4(packed, scale_OG, zero_OG, 256) - w_OI).square().view(40, 4, 64).sum(2)

    plain_OG, found_OG = errors_OG((1.0,)), errors_OG((1.0, 0.9, 0.8))
    assert float(found_OG.sum()) < 0.95 * float(plain_OG.sum())
    alone = [errors_OG((share,)) for share in (1.0, 0.9, 0.8)]
    assert torch.equal(found_OG, torch.stack(alone).amin(0))


def test_what_does_not_fit_is_named() -> None:
    x, (weight, scale) = normal(2, 6), quantize_int8(normal(3, 6))
    with pytest.raises(ValueError, match=r"needs a torch.int8 weight \[O, 6\], not float32 \[3, 6\]"):
        int8_matmul(x, weight.float(), scale)
    with pytest.raises(ValueError, match=r"scale \[2\] for a weight \[3, 6\]: \[3\]"):
        int8_dynamic_matmul(x, weight, scale[:2])
    with pytest.raises(ValueError, match="groups of 48 columns"):
        int4_matmul(x, weight, scale, group=48)
    with pytest.raises(ValueError, match=r"uint8 weight \[O, 16\]"):
        int4_matmul(x, *quantize_int4(normal(3, 40), 32), group=32)


@pytest.mark.parametrize("kernels", [False, True])
def test_rounded_activations_have_no_gradient(kernels: bool) -> None:
    """Rather than a wrong one, by way of the largest element alone."""
    x, (weight, scale) = normal(2, 6).requires_grad_(), quantize_int8(normal(3, 6))
    with forced() if kernels else torch.enable_grad():
        assert not int8_dynamic_matmul(x, weight, scale).requires_grad


def test_leading_dims_are_kept() -> None:
    x, (weight, scale) = normal(2, 3, 6), quantize_int8(normal(4, 6))
    with forced():
        found = int8_matmul(x, weight, scale)
    torch.testing.assert_close(found, int8_matmul(x, weight, scale), rtol=1e-5, atol=1e-5)
    assert found.shape == (2, 3, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["int8", "w8a8", "int4"])
def test_few_rows_are_in_parts_and_a_row_does_not_depend_on_the_others(scheme: str, dtype: torch.dtype) -> None:
    """Columns are dealt to programs by the weight's sizes alone, so the sums of a row have one order."""
    columns, most, fewer = (1500, 16, (3, 5, 15)) if dtype == torch.float32 else (1536, 64, (33, 40, 63))
    x_MI, w_OI = normal(most, columns).to(dtype), normal(40, columns, seed=1)

    def product(x_MI: Tensor) -> Tensor:
        if scheme == "int4":
            packed, scale_OG, zero_OG = quantize_int4(w_OI, 64, False)
            return int4_matmul(x_MI, packed, scale_OG, zero_OG, group=64)
        return (int8_matmul if scheme == "int8" else int8_dynamic_matmul)(x_MI, *quantize_int8(w_OI))

    parts: list[int] = []
    merge = quantized_matmul._merge_parts

    class Counting:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: (parts.append(args[5]), merge[grid](*args, **kwargs))

    with forced(), patch.object(quantized_matmul, "_merge_parts", Counting()):
        whole = product(x_MI)
        some = [product(x_MI[:rows]) for rows in fewer]
    assert set(parts) == {parts[0]}
    assert parts[0] > 1
    assert len(parts) == 4
    for found in some:
        assert torch.equal(found, whole[: len(found)])


class Assembly:
    """What a GPU computes by the instructions that kernels write as assembly, in whole numbers of 32 bits."""

    def __init__(self, text: str, **given: int):
        self.values = given
        for line in text.strip("{}\n").split("\n"):
            name, *operands = line.strip(" ;").replace(",", "").split()
            if name != ".reg":
                self.values[operands[0]] = self._result(name, [self._value(one) for one in operands[1:]])

    def _value(self, operand: str) -> int:
        return self.values[operand] if operand in self.values else int(operand, 0)

    def _result(self, name: str, given: list[int]) -> int:
        if name == "mov.b32":
            return given[0]
        if name == "xor.b32":
            return given[0] ^ given[1]
        if name == "shr.u32":
            return given[0] >> given[1]
        if name == "lop3.b32":  # bit 4 a + 2 b + c of the table, for bits a, b and c of the operands
            at = [4 * (given[0] >> i & 1) + 2 * (given[1] >> i & 1) + (given[2] >> i & 1) for i in range(32)]
            return sum((given[3] >> index & 1) << i for i, index in enumerate(at))
        if name == "prmt.b32":
            both = given[0] | given[1] << 32
            return sum((both >> 8 * (given[2] >> 4 * i & 7) & 255) << 8 * i for i in range(4))
        dtype = {"fma.rn.bf16x2": torch.bfloat16, "fma.rn.f16x2": torch.float16}[name]
        a, b, c = (halves(one, dtype).double() for one in given)
        low, high = (int(n) & 0xFFFF for n in (a * b + c).to(dtype).view(torch.int16))
        return low | high << 16


def halves(word: int, dtype: torch.dtype) -> Tensor:
    """Two numbers of 16 bits that stand in 32."""
    return torch.tensor([word & 0xFFFF, word >> 16]).to(torch.uint16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_assembly_unpacks_as_the_interpreter_does(dtype: torch.dtype) -> None:
    """All bytes; for halves with some zeros, one for each of the two pairs."""
    name = "BF16" if dtype == torch.bfloat16 else "FP16"
    ours = {kind: getattr(quantized_matmul, f"_{kind}_{name}").value for kind in ("HALVES", "BYTES")}
    for first in range(0, 256, 4):
        bytes_ = [first, 255 - first, first + 1, (first + 130) % 256]
        word = sum(byte << 8 * i for i, byte in enumerate(bytes_))
        values = Assembly(ours["BYTES"], **{"$2": word}).values
        found = [n for i in range(2) for n in halves(values[f"${i}"], dtype).tolist()]
        assert found == torch.tensor(bytes_).to(torch.uint8).view(torch.int8).tolist()
        for zero in (0, 8, 15):
            less = torch.tensor([-zero, zero - 15], dtype=dtype) - (128 if dtype == torch.bfloat16 else 1024)
            low, high = (int(n) & 0xFFFF for n in less.view(torch.int16))
            values = Assembly(ours["HALVES"], **{"$4": word, "$5": low * 0x10001, "$6": high * 0x10001}).values
            found = [n for i in range(4) for n in halves(values[f"${i}"], dtype).tolist()]
            zeros = [zero, zero, 15 - zero, 15 - zero]
            wanted = [(b & 15) - z for b, z in zip(bytes_, zeros)] + [(b >> 4) - z for b, z in zip(bytes_, zeros)]
            assert found == wanted


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_row_in_words_does_not_depend_on_the_others(scheme: str) -> None:
    """Warps share the columns alike for 2 to 32 rows: the sums of a row have one order."""
    x_MI, w_OI = normal(32, 352).bfloat16(), normal(40, 352, seed=1)
    packed, scale_OG, zero_OG = quantize_int4(w_OI, 32, False)

    def product(x_MI: Tensor) -> Tensor:
        if scheme == "int4":
            return int4_matmul(x_MI, packed, scale_OG, zero_OG, group=32)
        return int8_matmul(x_MI, *quantize_int8(w_OI))

    with forced():
        whole, *some = (product(x_MI[:rows]) for rows in (32, 2, 7, 15, 20))
    for found in some:
        assert torch.equal(found, whole[: len(found)])


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("columns", [2048, 4096, 4224])
@pytest.mark.parametrize("scheme", ["int8", *GROUPS])
def test_one_row_by_words(scheme: str | int, columns: int, ahead: bool) -> None:
    """Whole pieces of a row, and not; all at once, and with the next ones read ahead."""
    x_MI, w_OI = normal(1, columns).half(), normal(11, columns, seed=1)
    with (
        forced(),
        patch.object(quantized_matmul, "_WORDS", ((4, 1024, 2, ahead),) if ahead else quantized_matmul._WORDS),
    ):
        if isinstance(scheme, int):
            weight = quantize_int4(w_OI, scheme, False)
            wide, found = dequantize_int4(*weight, columns, torch.float64), int4_matmul(x_MI, *weight, group=scheme)
        else:
            int8 = quantize_int8(w_OI)
            wide, found = dequantize_int8(*int8, torch.float64), int8_matmul(x_MI, *int8)
    torch.testing.assert_close(found.double(), x_MI.double() @ wide.T, rtol=1e-3, atol=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_row_with_scales_of_each_format(dtype: torch.dtype) -> None:
    x_MI, (packed, scale_OG, zero_OG) = normal(1, 256).half(), quantize_int4(normal(11, 256, seed=1), 64, False)
    scale_OG = scale_OG.to(dtype)
    with forced():
        found = int4_matmul(x_MI, packed, scale_OG, zero_OG, group=64)
    exact = x_MI.double() @ dequantize_int4(packed, scale_OG.double(), zero_OG, 256, torch.float64).T
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=0.03)


def test_many_rows_take_a_widened_weight_some_rows_at_a_time() -> None:
    x_MI, w_OI = normal(40, 96), normal(50, 96, seed=1)
    weight_OI, scale_O = quantize_int8(w_OI)
    with forced(), patch.object(quantized_matmul, "_WIDE_BYTES", 96 * 4 * 7):
        found = int8_matmul(x_MI, weight_OI, scale_O, how="wide")
    torch.testing.assert_close(found, x_MI @ dequantize_int8(weight_OI, scale_O).T, rtol=1e-5, atol=1e-4)


def test_a_way_that_a_product_does_not_have_is_refused() -> None:
    weight_OI, scale_O = quantize_int8(normal(8, 32))
    packed, scale_OG, _ = quantize_int4(normal(8, 32), 32)
    x_MI = normal(4, 32)
    with pytest.raises(ValueError, match="int8_matmul: how='library'; choose from tile, wide, or leave it out"):
        int8_matmul(x_MI, weight_OI, scale_O, how="library")
    with pytest.raises(ValueError, match="int4_matmul: how='library'"):
        int4_matmul(x_MI, packed, scale_OG, group=32, how="library")
    with pytest.raises(ValueError, match="int8_dynamic_matmul: how='wide'; choose from tile, library"):
        int8_dynamic_matmul(x_MI, weight_OI, scale_O, how="wide")
    with pytest.raises(ValueError, match="int8_dynamic_matmul: how='library'; choose from tile, or leave it out"):
        int8_dynamic_matmul(x_MI, weight_OI, scale_O, threshold=6.0, how="library")


@pytest.mark.parametrize("at_once", [7, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
def test_what_a_widened_weight_takes_is_known(bits: int, dtype: torch.dtype, at_once: int) -> None:
    """Some rows of it, for 8 bits first in fp32, and their results where they are not all: to the byte."""
    M, N, K = 300, 50, 96
    x_MI, y_MO = (torch.zeros(M, n, dtype=dtype, device=DEVICE) for n in (K, N))
    weight_OI, scale_O = torch.ones(N, K, dtype=torch.int8, device=DEVICE), torch.ones(N, device=DEVICE)

    def wide(rows: slice) -> Tensor:
        if bits == 8:
            return quantized_matmul._wide_int8(weight_OI, scale_O, rows, False, dtype)
        return torch.zeros(rows.stop - rows.start, K, dtype=dtype, device=DEVICE)  # as `_widen_int4` is given it

    with patch.object(quantized_matmul, "_WIDE_BYTES", K * dtype.itemsize * at_once), MemoryAccount(DEVICE) as account:
        account.add([x_MI, y_MO, weight_OI, scale_O])
        before = account.current_bytes
        quantized_matmul._widened(x_MI, y_MO, None, wide)
        assert account.peak_bytes - before == quantized_matmul.widening_bytes(M, (N, K), dtype, bits)


def test_what_a_product_of_integers_takes_is_known() -> None:
    M, N, K = 32, 48, 96
    codes_MI, weight_OI = (torch.ones(n, K, dtype=torch.int8, device=DEVICE) for n in (M, N))
    largest_M, scale_O = torch.ones(M, device=DEVICE), torch.ones(N, device=DEVICE)
    y_MO, bias_O = (torch.zeros(n, N, dtype=torch.bfloat16, device=DEVICE).squeeze(0) for n in (M, 1))
    with MemoryAccount(DEVICE) as account:
        account.add([weight_OI, scale_O, y_MO, bias_O])
        before = account.current_bytes
        account.add([codes_MI, largest_M])
        quantized_matmul._by_library(codes_MI, largest_M, weight_OI, scale_O, bias_O, y_MO)
        assert account.peak_bytes - before == quantized_matmul.library_bytes(M, (N, K))
