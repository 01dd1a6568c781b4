"""Numbers in a few bits, block by block: `encode` makes bytes of them, `decode` numbers again.

A block x of B numbers becomes a code of b bits for each, and one scale in 16 bits (bfloat16):

    q   x in units of a step, rounded to the nearest of 2^b levels -(2^b - 1) / 2, ..., -1/2, 1/2, ..., (2^b - 1) / 2
    s   <x, q> / <q, q>: of all factors the one that brings q nearest to x

The step of 8 and of 4 bits leaves the largest number within the levels. That of 2 bits is 0.9957 times the root mean
square of the block, the best for normal numbers (Max 1960, four levels of equal steps), and what is larger is cut off.
As x and q have the same signs, |x - s q| < |x| for any block that is not zero, which is what error feedback needs
(Karimireddy et al. 2019, arXiv:1901.09847, assumption A); a block of zeros stays one.

With `keep` so many of the largest numbers of a block are coded, each with its place, in 16 bits; others become zero.

`RoundedCode` has a level at zero instead, so that what is zero stays zero, and needs no error feedback:

    s   max |x| / (2^(b-1) - 1), in bfloat16
    q   x / s, rounded to the nearest of -(2^(b-1) - 1), ..., 2^(b-1) - 1

A block with a number that is not finite decodes to numbers that are not.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from core.config import UserError

_SCALE_BYTES = _PLACE_BYTES = 2
_STEP_OF_4_LEVELS = 0.9957


@dataclass(frozen=True)
class BlockCode:
    """bits  of a number: 8, 4 or 2
    block  numbers of a block, at most 32,768
    keep  numbers of a block that are coded; None: all
    """

    bits: int
    block: int = 256
    keep: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise UserError(f"bits={self.bits}; give 8, 4 or 2")
        if not 0 < self.block <= 32768 or (self.keep is not None and not 0 < self.keep <= self.block):
            raise UserError(
                f"{self.keep} numbers of a block of {self.block}; give at least 1, and at most all of 32768"
            )

    @property
    def num_coded(self) -> int:
        return self.block if self.keep is None else self.keep

    @property
    def num_bytes(self) -> int:
        """Bytes of a block."""
        places = 0 if self.keep is None else _PLACE_BYTES * self.keep
        return _SCALE_BYTES + places + -(-self.num_coded * self.bits // 8)

    @torch.no_grad()
    def encode(self, x_NB: Tensor) -> Tensor:
        """Blocks [N, block] of floating numbers -> uint8[N, num_bytes]."""
        places: list[Tensor] = []
        x_NK = x_NB
        if self.keep is not None:
            found = x_NB.abs().topk(self.keep, dim=1, sorted=False).indices
            x_NK, places = x_NB.gather(1, found), [found.to(torch.int16).view(torch.uint8)]
        half = 2 ** (self.bits - 1)
        if self.bits == 2:
            step_N1 = _STEP_OF_4_LEVELS * x_NK.square().mean(1, keepdim=True).sqrt()
        else:
            step_N1 = x_NK.abs().amax(1, keepdim=True) / (half - 0.5)
        code_NK = (x_NK / torch.where(step_N1 > 0, step_N1, 1)).floor_().add_(half).clamp_(0, 2 * half - 1)
        level_NK = code_NK - (half - 0.5)
        scale_N1 = (x_NK * level_NK).sum(1, keepdim=True) / level_NK.square().sum(1, keepdim=True)
        scale = scale_N1.to(torch.bfloat16).view(torch.uint8)
        return torch.cat([scale, *places, pack_bits(code_NK.to(torch.uint8), self.bits)], 1)

    @torch.no_grad()
    def decode(self, coded: Tensor, dtype: torch.dtype) -> Tensor:
        """uint8[N, num_bytes] -> blocks [N, block]."""
        places = 0 if self.keep is None else _PLACE_BYTES * self.keep
        scale, place, packed = coded.split([_SCALE_BYTES, places, self.num_bytes - _SCALE_BYTES - places], 1)
        codes = unpack_bits(packed, self.bits)[:, : self.num_coded]
        level_NK = codes.to(dtype) - (2 ** (self.bits - 1) - 0.5)
        x_NK = level_NK * _apart(scale).view(torch.bfloat16).to(dtype)
        if self.keep is None:
            return x_NK
        at = _apart(place).view(torch.int16).long()
        return x_NK.new_zeros(len(coded), self.block).scatter_(1, at, x_NK)


@dataclass(frozen=True)
class RoundedCode:
    """bits  of a number: 8 or 4
    block  numbers of a block, even
    """

    bits: int
    block: int = 256

    @property
    def num_bytes(self) -> int:
        """Bytes of a block."""
        return _SCALE_BYTES + self.block * self.bits // 8

    @torch.no_grad()
    def encode(self, x_NB: Tensor) -> Tensor:
        """Blocks [N, block] in fp32 or fp64, whose memory is taken over -> uint8[N, num_bytes]."""
        most = 2 ** (self.bits - 1) - 1
        least_N1, largest_N1 = x_NB.aminmax(dim=1, keepdim=True)
        scale_N1 = (torch.maximum(largest_N1, -least_N1) / most).to(torch.bfloat16)
        step_N1 = torch.where(scale_N1 == 0, 1, scale_N1.to(x_NB.dtype))
        code_NB = x_NB.div_(step_N1).round_().clamp_(-most, most).nan_to_num_(0.0).add_(most + 1)
        return torch.cat([scale_N1.view(torch.uint8), pack_bits(code_NB.to(torch.uint8), self.bits)], 1)

    @torch.no_grad()
    def decode(self, coded: Tensor, dtype: torch.dtype) -> Tensor:
        """uint8[N, num_bytes] -> blocks [N, block]."""
        scale, packed = coded.split([_SCALE_BYTES, self.num_bytes - _SCALE_BYTES], 1)
        level_NB = unpack_bits(packed, self.bits).to(dtype).sub_(2 ** (self.bits - 1))
        return level_NB.mul_(_apart(scale).view(torch.bfloat16).to(dtype))


def pack_bits(code_NK: Tensor, bits: int) -> Tensor:
    """Several codes a byte, the first in its lowest bits."""
    per = 8 // bits
    if per == 1:
        return code_NK
    if left := -code_NK.shape[1] % per:
        code_NK = torch.nn.functional.pad(code_NK, (0, left))
    padded = code_NK.unflatten(1, (-1, per))
    packed = padded[..., 0].clone()
    for place in range(1, per):
        packed |= padded[..., place] << (bits * place)
    return packed


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """The codes, and what filled the last byte."""
    mask, per = 2**bits - 1, 8 // bits
    return torch.stack([(packed >> (bits * place)) & mask for place in range(per)], -1).flatten(1)


def _apart(part: Tensor) -> Tensor:
    """Some columns, one row behind the other; of one row alone `contiguous` would keep the stride of the whole."""
    return part.clone(memory_format=torch.contiguous_format)
