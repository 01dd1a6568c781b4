"""Moments of matrices in 16 and 8 bits: widened for a step, and narrowed again.

    fp32  in the wide format of the parameter
    bf16  first moments in 16 bits. Second moments stay wide: where they decay by less than half of bf16's last bit a
          step, 1/512 (beta2 above 0.998), they would never fall
    8bit  both, of large matrices, as codes and scales of blocks (core/kernels/blockwise.py). A block's scale is wide
          and decays with its largest element, and the others with it

What is kept whole at one home is alike on every mesh, so the blocks are, too.
"""

import math
from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from core.kernels.blockwise import block_bytes, dequantize, in_8_bits, quantize, scales_shape
from core.layout import Layout, layout_of, tag, tagged_as
from core.optim.sharded import CODES, SCALES, is_signed, own
from core.optim.spec import check_options

MomentumFormat = Literal["fp32", "bf16", "8bit"]
MOMENTUM_FORMATS: tuple[MomentumFormat, ...] = get_args(MomentumFormat)


def check_format(optimizer: str, momentum_format: str) -> None:
    """Raises UserError for a format that is none."""
    fine = momentum_format in MOMENTUM_FORMATS
    check_options(optimizer, momentum_format=(momentum_format, fine, "fp32, bf16 or 8bit"))


def format_of(name: str, shape: tuple[int, ...], wanted: MomentumFormat) -> MomentumFormat:
    """The format in which a moment of that name and (whole) shape is kept."""
    if wanted == "8bit":
        return "8bit" if in_8_bits(shape) else "fp32"
    return "bf16" if wanted == "bf16" and is_signed(name) else "fp32"


def moment_bytes(name: str, shape: tuple[int, ...], wanted: MomentumFormat, wide_bytes: int) -> int:
    """Bytes of a moment."""
    kept = format_of(name, shape, wanted)
    if kept == "8bit":
        return block_bytes(shape, wide_bytes)
    return math.prod(shape) * (2 if kept == "bf16" else wide_bytes)


def narrowed(name: str, value: Tensor, shape: tuple[int, ...], wanted: MomentumFormat) -> dict[str, Tensor]:
    """The state tensors, zeros, of a moment that is this in the wide format; its whole has that shape."""
    kept = format_of(name, shape, wanted)
    if kept == "fp32":
        return {name: value}
    if kept == "bf16":
        return {name: tagged_as(value.bfloat16(), value)}
    absent, made = layout_of(value).absent, {}
    for ending, form, dtype in ((CODES, shape, torch.uint8), (SCALES, scales_shape(shape), value.dtype)):
        layout = Layout(form, absent=absent)
        made[name + ending] = tag(own(value).new_zeros(layout.local_shape(), dtype=dtype), layout)
    return made


def widened(state: dict[str, Any], names: Iterable[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """Moments in the wide format, of those that are kept in a narrow one."""
    found = {}
    for name in names:
        if name + CODES in state:
            found[name] = dequantize(state[name + CODES], state[name + SCALES], is_signed(name))
        elif name in state and state[name].dtype == torch.bfloat16:
            found[name] = own(state[name]).to(dtype)
    return found


def keep(state: dict[str, Any], wide: dict[str, Tensor]) -> None:
    """Put moments back in their narrow formats."""
    for name, value in wide.items():
        if name + CODES not in state:
            own(state[name]).copy_(value)
            continue
        codes, scales = quantize(value, is_signed(name))
        state[name + CODES].copy_(codes)
        state[name + SCALES].copy_(scales)
