"""A second form of weights on a CPU, in the order in which torch's fastest kernels read them; for inference.

8 bits: oneDNN's (`core.quant.integers`), exact, so that no result changes. 4 bits, the products of which stand here:
`torch._weight_int4pack_mm_for_cpu` keeps the weights in 4 bits in its own order and is the only one of torch's that
multiplies by them at the speed of memory, but only for inputs and results in bf16: other formats fall to a scalar
loop. So inputs of packed layers are rounded to bf16, and so are results, in any model; sums are in fp32.
Weights are not rounded again: the kernel takes (code - 8) scale + shift with a bf16 scale and shift, and the scales of
`core.quant.weight` have so few bits that shift = (8 - zero) scale is exact.

That kernel takes as long for each of many rows as for the first. Prompts are therefore multiplied by weights widened to
bf16, which rounds these once more, to 8 bits; from how many rows on is measured. `compile_widening` makes one loop of
the widening. Among few rows each token's sums run in the same order, whatever is beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

from core.kernels.quantized_matmul import int4_matmul
from core.kernels.timing import least_seconds
from core.kernels.traced import is_lone_twice, number_of, traced
from core.quant.integers import form_is_faster, packed_integers
from core.quant.quantize import parameter_holders
from core.quant.scheme import Scheme
from core.quant.weight import QuantizedWeight

_ROWS = 16
"""The kernel's tiles have so many output channels."""
_SLAB = 1024
_INNER_TILES = 2
_TRIES = 3


_FEW_ROWS = 16
"""So many never are worth widening a weight."""

Widen = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def widened(codes: Tensor, scale_OG: Tensor, zero_OG: Tensor | None) -> Tensor:
    """bf16 [O, G group] of a weight's 4-bit codes, in their order of columns, the last group's filling included."""
    return _widened(codes.view(*scale_OG.shape, -1), scale_OG, zero_OG)


def _widened(codes_OGH: Tensor, scale_OG: Tensor, zero_OG: Tensor | None = None) -> Tensor:
    """The high halves are masked and taken as sixteenths, which is exact: shifts of bytes are slow in torch's loops."""
    zero_OG1 = 8.0 if zero_OG is None else zero_OG.to(torch.bfloat16)[..., None]
    low, high = (codes_OGH & 15).to(torch.bfloat16), (codes_OGH & 240).to(torch.bfloat16) * 0.0625
    wide = [(half - zero_OG1) * scale_OG.to(torch.bfloat16)[..., None] for half in (low, high)]
    return torch.cat(wide, 2).flatten(1)


@dataclass(frozen=True)
class Packed:
    """codes uint8 [O', I' / 2], O and I filled up to whole tiles and groups; scale_shift bf16 [G, O', 2].

    widen  what makes bf16 weights for many rows
    """

    codes: Tensor
    scale_shift: Tensor
    widen: Widen = widened


def pack(model: nn.Module, done: Callable[[str, QuantizedWeight], None] | None = None) -> nn.Module:
    """Give the weights of a model on a CPU their packed form, where that is faster here. Returns the model.

    It is as large as the stored one, which stays for saving and for looking rows up. Weights that are only looked up
    (embeddings) are left. From then on inputs of packed layers with 4 bits are rounded to bf16; with 8 bits results
    stay the same bits.

    done  told the name of each weight that is packed, and the weight
    """
    for name, holders in parameter_holders(model).items():
        weight = model.get_parameter(name)
        multiplied = any(not isinstance(module, nn.Embedding) for module, _ in holders)
        if not isinstance(weight, QuantizedWeight) or not multiplied or weight.packed is not None or not _can(weight):
            continue
        if _is_faster(weight):
            weight.packed = packed(weight)
            if done is not None:
                done(name, weight)
    return model


def _can(weight: QuantizedWeight) -> bool:
    return weight.ndim == 2 and weight.codes.device.type == "cpu" and weight.codes.numel() > 0


def _is_faster(weight: QuantizedWeight) -> bool:
    if weight.scheme.name != "int4":
        return form_is_faster(*weight.codes.shape)
    return _int4_is_faster(*weight.codes.shape, weight.scheme.group_size)


def packed(weight: QuantizedWeight) -> Any:
    """The packed form: `Packed` of 4 bits, oneDNN's of 8."""
    return _int4_packed(weight) if weight.scheme.name == "int4" else packed_integers(weight.codes, weight.scale)


def _int4_packed(weight: QuantizedWeight) -> Packed:
    """Made some rows at a time."""
    group, (rows, groups) = weight.scheme.group_size, weight.scale.shape
    pieces = []
    for start in range(0, rows, _SLAB):
        nibbles = weight.codes[start : start + _SLAB].view(-1, groups, group // 2)
        codes_OI = torch.cat((nibbles & 15, nibbles >> 4), 2).flatten(1).to(torch.int32)
        codes_OI = F.pad(codes_OI, (0, 0, 0, -len(codes_OI) % _ROWS))
        pieces.append(torch._convert_weight_to_int4pack_for_cpu(codes_OI, _INNER_TILES))
    scale_OG = F.pad(weight.scale, (0, 0, 0, -rows % _ROWS))
    shift_OG = torch.zeros_like(scale_OG)
    if weight.zero is not None:
        shift_OG[:rows] = (8 - weight.zero.float()) * weight.scale.float()
    return Packed(torch.cat(pieces), torch.stack((scale_OG, shift_OG), 2).transpose(0, 1).contiguous())


def packed_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """x [.., I], rounded to bf16, with a packed weight: [.., O] in x's dtype."""
    x_MI = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
    if isinstance(x, FakeTensor):
        y_MO = torch.ops.megalith.packed_product(x_MI, number_of(weight), len(weight.codes))
    else:
        y_MO = _product(x_MI, weight)
    # The sum of bf16 and a wider bias is taken in the wider format, by one operator.
    y_MO = (y_MO if bias is None else y_MO + bias.to(x.dtype)).to(x.dtype)
    return y_MO.view(*x.shape[:-1], y_MO.shape[1])


def _product(x_MI: Tensor, weight: QuantizedWeight) -> Tensor:
    """[M, O] in bf16, as x is."""
    form: Packed = weight.packed
    group, rows = weight.scheme.group_size, x_MI.shape[0]
    if filling := group * len(form.scale_shift) - x_MI.shape[1]:
        x_MI = F.pad(x_MI, (0, filling))
    shape = (*weight.codes.shape, group, weight.zero is None)
    if rows > _FEW_ROWS and _widening_is_faster(*shape, (rows - 1).bit_length(), form.widen):
        return F.linear(x_MI, form.widen(weight.codes, weight.scale, weight.zero))
    y_MO = torch._weight_int4pack_mm_for_cpu(x_MI, form.codes, group, form.scale_shift)
    return y_MO if y_MO.shape[1] == len(weight.codes) else y_MO[:, : len(weight.codes)]


torch.library.define("megalith::packed_product", "(Tensor x, int weight, int channels) -> Tensor")


@torch.library.impl("megalith::packed_product", "CPU")
def _traced_product(x: Tensor, weight: int, channels: int) -> Tensor:
    if is_lone_twice(x, 1):
        y_1O = _product(x[:1], cast(QuantizedWeight, traced(weight)))
        return torch.cat((y_1O, y_1O))
    return _product(x, cast(QuantizedWeight, traced(weight))).contiguous()


@torch.library.register_fake("megalith::packed_product")
def _product_shape(x: Tensor, weight: int, channels: int) -> Tensor:
    return x.new_empty(x.shape[0], channels)  # len() would be a number in the graph


def compile_widening(model: nn.Module) -> None:
    """Let torch.compile make one loop of what widens packed weights of 4 bits for many rows. Needs a C++ compiler.

    Weights that have it keep it, and with it what was measured.

    Raises what torch.compile does where it cannot.
    """
    made: dict[tuple[int, bool], Widen] = {}
    for weight in model.parameters():
        if isinstance(weight, QuantizedWeight) and isinstance(weight.packed, Packed) and weight.packed.widen is widened:
            kind = (weight.scheme.group_size, weight.zero is None)
            if kind not in made:
                made[kind] = _compiled(*kind)
            weight.packed = replace(weight.packed, widen=made[kind])


def _compiled(group: int, symmetric: bool) -> Widen:
    """`widened` for any number of channels and groups of one size.

    The size is a constant of the loop, for one that is only known when it runs is divided by anew for each vector.
    """

    def widen(codes_OGH: Tensor, *factors: Tensor) -> tuple[Tensor]:
        assert codes_OGH.shape[2] == group // 2  # which make_fx takes from here on for granted
        return (_widened(codes_OGH, *factors),)

    scale_OG, zero_OG = torch.ones(13, 5, dtype=torch.bfloat16), torch.zeros(13, 5, dtype=torch.uint8)
    given: list[Any] = [torch.zeros(13, 5, group // 2, dtype=torch.uint8), scale_OG, *([] if symmetric else [zero_OG])]
    graph = make_fx(widen, tracing_mode="symbolic")(*given)
    made: Any = torch._inductor.standalone_compile(graph, given)

    def run(codes: Tensor, scale_OG: Tensor, zero_OG: Tensor | None) -> Tensor:
        codes_OGH = codes.view(*scale_OG.shape, group // 2)
        return made(codes_OGH, scale_OG, *([] if zero_OG is None else [zero_OG]))[0]

    return run


@cache
def _int4_is_faster(rows: int, width: int, group: int) -> bool:
    """Whether the packed kernel beats widening for one token, measured on as many rows as tell."""
    rows = min(rows, 2048)
    codes = torch.zeros(rows, width, dtype=torch.uint8)
    scale = torch.ones(rows, 2 * width // group, dtype=torch.bfloat16)
    weight = QuantizedWeight(Scheme("int4", group, True), codes, scale, None, (rows, 2 * width), torch.float32)
    x_MI = torch.ones(1, 2 * width)
    try:
        weight.packed = _int4_packed(weight)
        taken = least_seconds(lambda: packed_product(x_MI, weight, None), _TRIES)
    except RuntimeError:  # this torch or this CPU does not offer it
        return False
    return taken < least_seconds(lambda: int4_matmul(x_MI, codes, scale, group=group), _TRIES)


@cache
def _widening_is_faster(rows: int, width: int, group: int, symmetric: bool, row_bits: int, widen: Widen) -> bool:
    """Whether the packed kernel is slower for about 2^row_bits rows of x, measured on part of a weight."""
    rows = min(rows, 2048)
    codes = torch.zeros(rows, width, dtype=torch.uint8)
    scale = torch.ones(rows, 2 * width // group, dtype=torch.bfloat16)
    zero = None if symmetric else torch.zeros(rows, 2 * width // group, dtype=torch.uint8)
    weight = QuantizedWeight(Scheme("int4", group, symmetric), codes, scale, zero, (rows, 2 * width), torch.float32)
    form, x_MI = _int4_packed(weight), torch.ones(min(3 << (row_bits - 2), 512), 2 * width, dtype=torch.bfloat16)
    wide = least_seconds(lambda: F.linear(x_MI, widen(codes, scale, zero)), _TRIES)
    return wide < least_seconds(
        lambda: torch._weight_int4pack_mm_for_cpu(x_MI, form.codes, group, form.scale_shift), _TRIES
    )
