"""State in 8 bits: blocks of consecutive elements share a scale, and a byte says which of 256 values an element has.

Dynamic quantisation (Dettmers et al. 2022, arXiv:2110.02861, sections 2.1 to 2.3): relative to the largest magnitude of
its block a value is 10^-e times a fraction in [0.1, 1], e = 0 .. 6, and the smaller e is, the finer the fractions:
2^(6 - e) of them, twice as many without a sign. So both 1 and 1e-6 of the largest value are told apart.

Zero and the largest magnitude are values of their own, so that the largest value of a block is kept exactly and
quantising what was dequantised changes nothing. And of a second moment nothing but zero becomes zero: a denominator of
zero would blow its entry up (Li, Chen and Zhu 2023, arXiv:2309.01507, section 4.2).

A tensor x[N, ..] is N rows of all the dims behind the first, and a block is `BLOCK` consecutive elements of a row, so
the cuts that data parallelism makes (of rows) never go through a block.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 256
MIN_ELEMENTS = 4096
"""Smaller parameters keep their state whole: they need the precision more than the bytes."""
MIN_ROW = 64
"""Elements of a row below which scales would take too much of what is saved."""


def in_8_bits(shape: tuple[int, ...]) -> bool:
    """Return whether the state of a parameter of that (whole) shape is kept in blocks: a large matrix's is."""
    return len(shape) > 1 and math.prod(shape) >= MIN_ELEMENTS and math.prod(shape[1:]) >= MIN_ROW


def scales_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """[rows, blocks of a row]."""
    return shape[0], -(-math.prod(shape[1:]) // BLOCK)


def quantize(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """x[N, ..] -> codes uint8 of its shape, scales [N, blocks] of its dtype."""
    _, middles = code_tables(signed, x.device, x.dtype)
    blocks = _blocks(x.reshape(x.shape[0], -1) if x.numel() else x.new_zeros(scales_shape(tuple(x.shape))[0], 0))
    if not blocks.numel():
        return torch.zeros_like(x, dtype=torch.uint8), x.new_zeros(scales_shape(tuple(x.shape)))
    scales = blocks.abs().amax(-1)
    relative = blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    codes = torch.bucketize(relative, middles, out_int32=True)
    if not signed:
        codes = torch.where((codes == 0) & (relative > 0), 1, codes)
    length = math.prod(x.shape[1:])
    return codes.to(torch.uint8).flatten(1)[:, :length].reshape(x.shape), scales


def dequantize(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """codes [N, ..], scales [N, blocks] -> x[N, ..] of the scales' dtype."""
    values, _ = code_tables(signed, scales.device, scales.dtype)
    if not codes.numel():
        return torch.zeros_like(codes, dtype=scales.dtype)
    relative = values[codes.reshape(codes.shape[0], -1).int()]
    length = relative.shape[1]
    return (_blocks(relative) * scales.unsqueeze(-1)).flatten(1)[:, :length].reshape(codes.shape)


def block_bytes(shape: tuple[int, ...], scale_bytes: int) -> int:
    """Bytes of the codes and scales of a tensor of that shape."""
    return math.prod(shape) + scale_bytes * math.prod(scales_shape(shape))


def row_slices(x: Tensor) -> Iterator[slice]:
    """Slices of rows that are worked on at once: what the cache holds on a CPU, 64 MiB of fp32 on a GPU."""
    most = 1 << (16 if x.device.type == "cpu" else 24)
    rows = max(1, most // max(1, math.prod(x.shape[1:])))
    return (slice(start, start + rows) for start in range(0, x.shape[0], rows))


def _blocks(x_NL: Tensor) -> Tensor:
    """[N, L] -> [N, blocks, BLOCK], zeros behind the end of a row."""
    surplus = -x_NL.shape[1] % BLOCK
    if surplus:
        x_NL = torch.nn.functional.pad(x_NL, (0, surplus))
    return x_NL.unflatten(1, (-1, BLOCK)) if x_NL.shape[1] else x_NL.unsqueeze(-1)


@lru_cache
def code_tables(signed: bool, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The 256 values in ascending order, and the 255 middles between neighbours."""
    values = torch.tensor(code_values(signed), dtype=torch.float64)
    middles = (values[1:] + values[:-1]) / 2
    return values.to(device, dtype), middles.to(device, dtype)


def code_values(signed: bool) -> list[float]:
    """The 256 values between -1 (or 0) and 1, ascending."""
    positive = []
    for exponent in range(7):
        count = 2**exponent if signed else 2 ** (exponent + 1)
        width = 0.9 / count
        positive += [10.0 ** (exponent - 6) * (0.1 + (index + 0.5) * width) for index in range(count)]
    negative = [-1.0, *(-value for value in reversed(positive[1:]))] if signed else []
    return [*negative, 0.0, *positive, 1.0]
