"""Activations in fewer bytes: what a block saves for its backward is encoded behind its forward and decoded when asked.

Without loss (Jain et al. 2018, "Gist: Efficient Data Encoding for Deep Neural Network Training", ISCA, section III):

    masks     of a dropout, 8 bits each as torch has them: 1 bit
    places    64-bit integers (of a pooling, an expert, a token): 8, 16 or 32 bits, by the largest
    zeros     numbers many of which are zero (results of a ReLU, whose backward needs their mask and the product behind
              it the numbers): 1 bit each, and what is not zero; where that is shorter

With loss, of floating numbers, all in blocks of 256 with a scale in 16 bits (Chen et al. 2021, "ActNN", arXiv
2104.14129, has the blocks, and rounds at random; here to the nearest, `core.comm.block_code.RoundedCode`): ranks that
hold the same values then decode the same, and a run that is continued is the run that was not interrupted. What is zero
stays zero, and in a block without negative numbers (ReLU) nothing else becomes zero, so masks are exact. Means,
deviations and sums of softmaxes stay as they are: tensors with fewer elements than a quarter of the block's largest
argument.

The first form asks a device how many numbers are not zero, for which the host waits. On tensors without memory, for
which an estimate is made, nobody knows that: floating numbers then stay as they are.
"""

from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from core.comm.block_code import RoundedCode, pack_bits, unpack_bits
from core.comm.coded_rows import AT_A_TIME
from core.compat import FakeTensor
from core.parallel.stored import Stored, StoredBlocks

_BLOCKS_AT_A_TIME = AT_A_TIME // RoundedCode(8).block
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Code(Protocol):
    """Numbers [elements] in another form."""

    def decode(self) -> Tensor: ...


class _Bits(NamedTuple):
    """Truth values, 8 a byte."""

    bits: Tensor
    length: int

    @classmethod
    def of(cls, flat: Tensor) -> "_Bits":
        return cls(pack_bits(flat.view(torch.uint8)[None], 1)[0], len(flat))

    def decode(self) -> Tensor:
        return unpack_bits(self.bits[None], 1)[0][: self.length].to(torch.bool)


class _Narrow(NamedTuple):
    """Integers in a format in which they fit."""

    values: Tensor
    dtype: torch.dtype

    def decode(self) -> Tensor:
        return self.values.to(self.dtype)


class _NotZero(NamedTuple):
    """Which are not zero, and those: bits are compared, so that a zero with a sign is none."""

    mask: _Bits
    values: Tensor
    dtype: torch.dtype

    def decode(self) -> Tensor:
        words = self.values.new_zeros(self.mask.length)
        return words.masked_scatter_(self.mask.decode(), self.values).view(self.dtype)


class _FewBits(NamedTuple):
    """Blocks of numbers in few bits each."""

    blocks: Tensor
    code: RoundedCode
    length: int
    dtype: torch.dtype

    @classmethod
    def of(cls, flat: Tensor, bits: int) -> "_FewBits":
        code = RoundedCode(bits)
        blocks = flat.new_empty(-(-len(flat) // code.block), code.num_bytes, dtype=torch.uint8)
        for part, numbers in zip(blocks.split(_BLOCKS_AT_A_TIME), flat.split(_BLOCKS_AT_A_TIME * code.block)):
            x_NB = flat.new_zeros(len(part), code.block, dtype=_wide(flat.dtype))
            x_NB.view(-1)[: len(numbers)] = numbers
            part.copy_(code.encode(_above_zero(x_NB, bits)))
        return cls(blocks, code, len(flat), flat.dtype)

    def decode(self) -> Tensor:
        flat = self.blocks.new_empty(self.length, dtype=self.dtype)
        numbers = flat.split(_BLOCKS_AT_A_TIME * self.code.block)
        for part, x in zip(self.blocks.split(_BLOCKS_AT_A_TIME), numbers):
            x.copy_(self.code.decode(part, _wide(self.dtype)).view(-1)[: len(x)])
        return flat


def _above_zero(x_NB: Tensor, bits: int) -> Tensor:
    """The numbers, in blocks without negative ones none of which rounds to zero that is not zero; in their memory."""
    least_N1, largest_N1 = x_NB.aminmax(dim=1, keepdim=True)
    # A little more than half a step, since the scale is rounded, too.
    lift_N1 = torch.where(least_N1 >= 0, largest_N1 * (0.52 / (2 ** (bits - 1) - 1)), 0)
    torch.where((x_NB > 0).logical_and_(x_NB < lift_N1), lift_N1, x_NB, out=x_NB)
    return x_NB


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def coded_bytes(bits: int) -> float:
    """Bytes of a number in so few bits."""
    code = RoundedCode(bits)
    return code.num_bytes / code.block


def encode(flat: Tensor, bits: int | None, foreseen: bool = False) -> Code | None:
    """The shortest of the forms for numbers [elements]; None where they are shortest as they are.

    bits      of a floating number; None: without loss
    foreseen  of the forms whose length does not depend on values
    """
    if flat.dtype == torch.bool:
        return _Bits.of(flat)
    if flat.is_floating_point() and bits is not None:
        return _FewBits.of(flat, bits)
    if foreseen:
        return None
    if flat.is_floating_point():
        return _without_zeros(flat)
    if flat.dtype in (torch.int16, torch.int32, torch.int64) and len(flat):
        least, largest = torch.stack(flat.aminmax()).tolist()
        for dtype in (torch.uint8, torch.int16, torch.int32):
            limits = torch.iinfo(dtype)
            if dtype.itemsize < flat.dtype.itemsize and limits.min <= least and largest <= limits.max:
                return _Narrow(flat.to(dtype), flat.dtype)
    return None


def _without_zeros(flat: Tensor) -> Code | None:
    words = flat.view(_WORDS[flat.element_size()])
    mask = words != 0
    if int(mask.count_nonzero()) * flat.element_size() + len(flat) / 8 >= flat.nbytes:
        return None
    return _NotZero(_Bits.of(mask), words[mask], flat.dtype)


class _Encoded(Stored):
    """A storage that is encoded when the forward that saved it is over."""

    def __init__(self, x: Tensor, least: int, bits: int | None, foreseen: bool):
        super().__init__(x, least)
        self._bits, self._code, self._foreseen = bits, None, foreseen or isinstance(x, FakeTensor)

    def block_ended(self) -> None:
        assert self.flat is not None
        self.check()
        with torch.no_grad():
            bits = self._bits if len(self.flat) >= self.least else None
            self._code: Code | None = encode(self.flat, bits, self._foreseen)
        if self._code is not None:
            self.flat = None

    def restored(self) -> Tensor:
        assert self._code is not None
        return self._code.decode()


class Compressed(StoredBlocks):
    """Blocks whose activations wait for the backward in fewer bytes.

    bits      of a floating number; None: without loss
    foreseen  only in forms whose length does not depend on values
    """

    def __init__(self, blocks: list[nn.Module], bits: int | None, foreseen: bool = False):
        super().__init__(blocks, partial(_Encoded, bits=bits, foreseen=foreseen))
