"""Products with bytes by VNNI: exact sums, whatever the tiles, vectors and threads."""

from collections.abc import Iterator

import pytest
import torch

from core.kernels import llvm, vnni
from core.kernels.quantized_matmul import dequantize_int4, quantize_int4

pytestmark = pytest.mark.skipif(
    not vnni.offered(), reason="this CPU has no VNNI, or llvmlite is missing; ends on one that has it"
)
# Rows that fill tiles and do not, columns that fill vectors and do not, one channel and some.
SHAPES = [(1, 64, 1), (1, 100, 3), (3, 768, 37), (13, 200, 64), (8, 63, 5), (9, 130, 4), (20, 1024, 50), (2, 16, 9)]


@pytest.fixture(params=[64, 32], ids=["64 bytes", "32 bytes"])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    if request.param > vnni.width():
        pytest.skip("this CPU's vectors are shorter; ends on one with AVX-512 VNNI")
    monkeypatch.setattr(vnni, "width", lambda: request.param)
    return request.param


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def bytes_and_codes(rows: int, columns: int, channels: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows + columns)
    q_RI = torch.randint(0, 256, (rows, columns), generator=generator).to(torch.uint8)
    codes_OI = torch.randint(-127, 128, (channels, columns), generator=generator).to(torch.int8)
    q_RI[:, 0], codes_OI[:, 0] = 255, -127
    return q_RI, codes_OI, torch.rand(channels, generator=generator), codes_OI.sum(1, dtype=torch.int32)


@pytest.mark.usefixtures("width")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_eight_bits_are_exact(shape: tuple[int, int, int]) -> None:
    q_RI, codes_OI, scale_O, sums_O = bytes_and_codes(*shape)
    wanted = ((q_RI.double() - 128) @ codes_OI.double().T).float() * scale_O
    assert torch.equal(vnni.int8_product(q_RI, vnni.Int8Weight(codes_OI, scale_O, sums_O)), wanted)


@pytest.mark.usefixtures("width")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("symmetric", [True, False])
def test_four_bits(shape: tuple[int, int, int], group: int, symmetric: bool) -> None:
    """As exact as fp32's sums of groups, for the inputs as they are rounded; and widened, rounded once."""
    (rows, columns, channels), generator = shape, torch.Generator().manual_seed(sum(shape))
    x_MI = torch.randn(rows, columns, generator=generator)
    x_MI[-1] = 0.0
    codes, scale_OG, zero_OG = quantize_int4(
        torch.randn(channels, columns, generator=generator) + 0.3, group, symmetric
    )
    scale_OG = scale_OG.bfloat16()
    exact_OI = dequantize_int4(codes, scale_OG, zero_OG, columns, torch.float64)
    weight = vnni.Int4Weight(codes, scale_OG, zero_OG, group)
    found = vnni.int4_product(x_MI, weight)
    largest_M1 = x_MI.abs().amax(1, keepdim=True).clamp(min=1e-30)
    rounded_MI = (x_MI * (32767 / largest_M1)).round().double() * (largest_M1.double() / 32767)
    sizes = rounded_MI.abs() @ exact_OI.abs().T
    # Where a product lies between two steps fp32 may take the other one: one input of a row, a step off.
    off = (largest_M1.double() / 32767) * exact_OI.abs().amax(1)
    assert bool(((found - rounded_MI @ exact_OI.T).abs() <= 1e-6 * sizes + off).all())
    assert bool((found[-1] == 0).all())
    alone = torch.cat([vnni.int4_product(row[None], weight) for row in x_MI])
    assert torch.equal(alone, found)
    wide_OI = vnni.int4_widened(codes, scale_OG, zero_OG, group)
    assert torch.equal(wide_OI[:, :columns], exact_OI.bfloat16())


@pytest.mark.parametrize("columns", [1, 15, 16, 40, 768])
@pytest.mark.parametrize("count", [1, 2])
def test_digits_are_torchs(columns: int, count: int) -> None:
    """Bit for bit, with zeros, a row of one number and numbers that lie between two steps."""
    x_MI = torch.randn(7, columns, generator=torch.Generator().manual_seed(columns)) * 3
    x_MI[1], x_MI[2], x_MI[3] = 0.0, 2.5, torch.arange(columns) - 63.5
    largest_M1 = x_MI.abs().amax(1, keepdim=True).clamp(min=1e-30)
    if count == 1:
        wanted = (x_MI / (largest_M1 / 127)).round()[None]
    else:
        places = torch.tensor([127.0, 127.0 * 128])[:, None, None]
        wanted = (x_MI * (places / largest_M1)).round()
        wanted[1] -= 128 * wanted[0]
    q_PMI, found_M1 = vnni.digits_of(x_MI, count)
    assert torch.equal(found_M1, largest_M1)
    assert torch.equal(q_PMI.float() - 128, wanted)


@pytest.mark.usefixtures("two_threads")
def test_on_two_threads() -> None:
    """Each has a part of the channels, of which there may be too few."""
    if llvm.openmp() is None:
        pytest.skip("torch's OpenMP is not to be found; ends where it is libgomp, libomp or libiomp5")
    for channels in (1, 5, 6, 7, 63, 1000):
        q_RI, codes_OI, scale_O, sums_O = bytes_and_codes(3, 100, channels)
        wanted = ((q_RI.double() - 128) @ codes_OI.double().T).float() * scale_O
        assert torch.equal(vnni.int8_product(q_RI, vnni.Int8Weight(codes_OI, scale_O, sums_O)), wanted), channels


@pytest.mark.usefixtures("two_threads")
def test_every_thread_works() -> None:
    """Each writes who it is."""
    if llvm.openmp() is None:
        pytest.skip("torch's OpenMP is not to be found; ends where it is libgomp, libomp or libiomp5")

    def build(code: llvm.Code, arguments: list, first: object, last: object) -> None:
        with code.loop(first, last, code.number(1)) as turn:
            code.store(code.spread(code.worker, 1), arguments[0], code.i64, turn.at)

    found = torch.full((7,), -1)
    llvm.Kernel("who", 1, 1, build)(7, found.data_ptr())
    assert found.tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_without_llvm(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("No module named 'llvmlite'")

    for function in (llvm.available, llvm.x86_features, vnni.width):
        function.cache_clear()
    monkeypatch.setattr(llvm, "library", missing)
    try:
        assert not llvm.available()
        assert not vnni.offered()
    finally:
        monkeypatch.undo()
        for function in (llvm.available, llvm.x86_features, vnni.width):
            function.cache_clear()
    assert vnni.offered()
