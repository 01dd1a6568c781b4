"""Products with 4-bit weights on a CPU, and the second forms of weights that its kernels read; for inference.

8 bits: oneDNN's form (`core.quant.integers`), exact, so that no result changes. 4 bits, the products of which stand
here, for few rows:

    stored  `core.kernels.vnni`'s product with the weight as it is stored. Inputs are rounded to 16 bits a row, sums of
            groups are exact, results are fp32
    packed  `core.compat.int4_mm` with the weight in its own order. Inputs and results are bf16, sums
            fp32. Weights are not rounded again: the kernel takes (code - 8) scale + shift with a bf16 scale and shift,
            and the scales of `core.quant.weight` have so few bits that shift = (8 - zero) scale is exact

Both take as long for each of many rows as for the first. Prompts are therefore multiplied, in bf16, by weights widened
to it, which rounds these once more, to 8 bits; from how many rows on is measured. Among few rows each token's sums run
in the same order, whatever is beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.compat import FakeTensor, int4_mm, pack_int4
from core.kernels.llvm import available
from core.kernels.quantized_matmul import dequantize_int4, int4_matmul
from core.kernels.timing import fastest_from_memory
from core.kernels.traced import number_of, traced
from core.kernels.vnni import Int4Weight, int4_product, int4_widened, offered
from core.quant.choose import parameter_holders
from core.quant.integers import form_is_faster, packed_integers
from core.quant.scheme import Scheme
from core.quant.weight import QuantizedWeight

_ROWS = 16
"""The kernel's tiles have so many output channels."""
_SLAB = 1024
_INNER_TILES = 2
_ROUNDS = 3
_WIDENED = 1 << 22
"""elements of a weight that are widened at a time, so that they are multiplied by where they are: in a cache"""
_MEASURED, _WEIGHTS = 1 << 20, 2
"""elements of a weight, and weights, that tell how long a product takes"""

_FEW_ROWS = 16
"""So many never are worth widening a weight."""


def widened(codes: Tensor, scale_OG: Tensor, zero_OG: Tensor | None, group: int) -> Tensor:
    """bf16 [O, G group] of a weight's 4-bit codes, in their order of columns, the last group's filling included."""
    if available():
        return int4_widened(codes, scale_OG, zero_OG, group)
    return dequantize_int4(codes, scale_OG, zero_OG, 2 * codes.shape[1], torch.bfloat16)


@dataclass(frozen=True)
class Form:
    """A form in which few rows are multiplied by a weight of 4 bits: as it is stored."""

    def product(self, x_MI: Tensor, weight: QuantizedWeight) -> Tensor:
        """fp32 x[M, I] of few rows with the weight: [M, O]."""
        return int4_product(x_MI, weight.prepared(_int4_weight))


def _int4_weight(weight: QuantizedWeight) -> Int4Weight:
    return Int4Weight(weight.codes, weight.scale, weight.zero, weight.scheme.group_size)


@dataclass(frozen=True)
class Packed(Form):
    """A second form: codes uint8 [O', I' / 2], O and I filled up to whole tiles and groups; scale_shift bf16
    [G, O', 2]."""

    codes: Tensor
    scale_shift: Tensor

    def product(self, x_MI: Tensor, weight: QuantizedWeight) -> Tensor:
        group = weight.scheme.group_size
        x_MI = F.pad(x_MI.to(torch.bfloat16), (0, group * len(self.scale_shift) - x_MI.shape[1]))
        y_MO = int4_mm(x_MI, self.codes, group, self.scale_shift)
        return y_MO[:, : len(weight.codes)].float()


def pack(model: nn.Module, done: Callable[[str, QuantizedWeight], None] | None = None) -> nn.Module:
    """Give the weights of a model on a CPU the form that is the fastest here. Returns the model.

    A second one is as large as the stored one, which stays for saving and for looking rows up. Weights that are only
    looked up (embeddings) are left. From then on inputs of layers with 4 bits are rounded; with 8 bits results stay the
    same bits.

    done  called with the name of each weight that has a second form, and the weight
    """
    weights = {
        name: weight
        for name, holders in parameter_holders(model).items()
        if isinstance(weight := model.get_parameter(name), QuantizedWeight)
        and any(not isinstance(module, nn.Embedding) for module, _ in holders)
        and weight.packed is None
        and _can(weight)
    }
    for weight in weights.values():
        _chosen(weight)  # what is measured on is gone before there are second forms
    for name, weight in weights.items():
        weight.packed = fastest_form(weight)
        if done is not None and weight.packed is not None and type(weight.packed) is not Form:
            done(name, weight)
    return model


def _can(weight: QuantizedWeight) -> bool:
    return weight.ndim == 2 and weight.codes.device.type == "cpu" and weight.codes.numel() > 0


def fastest_form(weight: QuantizedWeight) -> Any:
    """The fastest form: a `Form` of 4 bits, oneDNN's of 8; None where the weight is multiplied by as it is."""
    made: dict[str, Callable[[], Any]] = {
        "stored": Form,
        "packed": lambda: int4_packed(weight),
        "form": lambda: packed_integers(weight.codes, weight.scale),
        "reference": lambda: None,
    }
    return made[_chosen(weight)]()


def _chosen(weight: QuantizedWeight) -> str:
    """The name of the form: measured once for a shape."""
    if weight.scheme.name != "int4":
        return "form" if form_is_faster(*weight.codes.shape) else "reference"
    return _fastest_int4(*weight.codes.shape, weight.scheme.group_size, torch.get_num_threads())


def int4_packed(weight: QuantizedWeight) -> Packed:
    """A weight of 4 bits in the order of torch's kernel, made some rows at a time.

    Raises RuntimeError where this torch or CPU has no such kernel.
    """
    group, (rows, groups) = weight.scheme.group_size, weight.scale.shape
    pieces = []
    for start in range(0, rows, _SLAB):
        nibbles = weight.codes[start : start + _SLAB].view(-1, groups, group // 2)
        codes_OI = torch.cat((nibbles & 15, nibbles >> 4), 2).flatten(1).to(torch.int32)
        codes_OI = F.pad(codes_OI, (0, 0, 0, -len(codes_OI) % _ROWS))
        pieces.append(pack_int4(codes_OI, _INNER_TILES))
    scale_OG = F.pad(weight.scale, (0, 0, 0, -rows % _ROWS))
    shift_OG = torch.zeros_like(scale_OG)
    if weight.zero is not None:
        shift_OG[:rows] = (8 - weight.zero.float()) * weight.scale.float()
    scale_shift = torch.stack((scale_OG, shift_OG), 2).transpose(0, 1).contiguous()
    return Packed(codes=torch.cat(pieces), scale_shift=scale_shift)


def packed_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """x [.., I] with a weight that has a form: [.., O] in x's dtype."""
    x_MI = x.reshape(-1, x.shape[-1]).float()
    if isinstance(x, FakeTensor):
        y_MO = torch.ops.megalith.packed_product(x_MI, number_of(weight), len(weight.codes))
    else:
        y_MO = _product(x_MI, weight)
    if bias is not None:
        y_MO = y_MO + bias
    return y_MO.to(x.dtype).view(*x.shape[:-1], y_MO.shape[1])


def _product(x_MI: Tensor, weight: QuantizedWeight) -> Tensor:
    """[M, O] in fp32, as x is."""
    form, rows = weight.packed, x_MI.shape[0]
    if rows > _FEW_ROWS and _widening_is_faster(weight, rows):
        return _by_widening(x_MI, weight)
    return form.product(x_MI, weight)


def _by_widening(x_MI: Tensor, weight: QuantizedWeight) -> Tensor:
    """Some channels at a time, all of them where that is not too much."""
    (channels, groups), group = weight.scale.shape, weight.scheme.group_size
    columns = groups * group
    x_MI = F.pad(x_MI.to(torch.bfloat16), (0, columns - x_MI.shape[1]))
    step = max(1, _WIDENED // columns)
    if channels <= step:
        return F.linear(x_MI, widened(weight.codes, weight.scale, weight.zero, group)).float()
    y_MO = torch.empty(len(x_MI), channels, dtype=torch.float32, device="cpu")
    for start in range(0, channels, step):
        part = slice(start, start + step)
        zero = None if weight.zero is None else weight.zero[part]
        y_MO[:, part] = F.linear(x_MI, widened(weight.codes[part], weight.scale[part], zero, group))
    return y_MO


torch.library.define("megalith::packed_product", "(Tensor x, int weight, int channels) -> Tensor")


@torch.library.impl("megalith::packed_product", "CPU")
def _traced_product(x: Tensor, weight: int, channels: int) -> Tensor:
    return _product(x, cast(QuantizedWeight, traced(weight))).contiguous()


@torch.library.register_fake("megalith::packed_product")
def _product_shape(x: Tensor, weight: int, channels: int) -> Tensor:
    return x.new_empty(x.shape[0], channels)  # len() would be a number in the graph


def _widening_is_faster(weight: QuantizedWeight, rows: int) -> bool:
    """For about so many rows of x."""
    form, shape = weight.packed, (*weight.codes.shape, weight.scheme.group_size, weight.zero is None)
    return _widens(*shape, min((rows - 1).bit_length(), 9), type(form), torch.get_num_threads())


@cache
def _widens(
    channels: int, half: int, group: int, symmetric: bool, row_bits: int, kind: type[Form], threads: int
) -> bool:
    few, many = (_examples(channels, half, group, symmetric) for _ in range(2))
    for weight in few:
        weight.packed = int4_packed(weight) if kind is Packed else Form()
    x_MI = torch.ones(3 << (row_bits - 2), 2 * half, dtype=torch.float32, device="cpu")
    kernels = {
        "few": (lambda weight: weight.packed.product(x_MI, weight), few),
        "many": (lambda weight: _by_widening(x_MI, weight), many),
    }
    return fastest_from_memory(kernels, _ROUNDS) == "many"


@cache
def _fastest_int4(channels: int, half: int, group: int, threads: int) -> str:
    """How one token's product is the fastest."""
    stored, packed = (_examples(channels, half, group, True) for _ in range(2))
    x_MI = torch.ones(1, 2 * half, dtype=torch.float32, device="cpu")
    kernels: dict[str, tuple[Callable[[QuantizedWeight], Tensor], list[QuantizedWeight]]] = {}
    if offered():
        kernels["stored"] = (lambda weight: Form().product(x_MI, weight), stored)
    try:
        for weight in packed:
            weight.packed = int4_packed(weight)
        kernels["packed"] = (lambda weight: weight.packed.product(x_MI, weight), packed)
    except RuntimeError:  # this torch or this CPU does not offer it
        kernels["reference"] = (
            lambda weight: int4_matmul(x_MI, weight.codes, weight.scale, group=weight.scheme.group_size),
            packed,
        )
    return fastest_from_memory(kernels, _ROUNDS)


def _examples(channels: int, half: int, group: int, symmetric: bool) -> list[QuantizedWeight]:
    """Weights of so many columns, of as many channels as tell, and as many of them as tell."""
    channels, groups = max(1, min(channels, _MEASURED // (2 * half))), 2 * half // group
    found = []
    for _ in range(_WEIGHTS):
        codes = torch.zeros(channels, half, dtype=torch.uint8, device="cpu")
        scale = torch.ones(channels, groups, dtype=torch.bfloat16, device="cpu")
        zero = None if symmetric else torch.zeros(channels, groups, dtype=torch.uint8, device="cpu")
        shape = (channels, 2 * half)
        found.append(QuantizedWeight(Scheme("int4", group, symmetric), codes, scale, zero, shape, torch.float32))
    return found
