"""AdamW whose moments are kept in a byte an element, in one pass (Dettmers et al. 2022, arXiv:2110.02861).

    m, v from their codes and scales -> the update of `core.kernels.adamw` -> codes and scales of the new m, v

One launch for all tensors that share their dtypes, and 16 bytes moved of an element of fp32, over which about thirty
operators of torch would go. A program has whole blocks of `core.kernels.blockwise`, so that it knows their new scales
before it writes codes.

1. A code is looked up among 256 values.
2. The new code: the decade of the relative value and its place in the decade are computed, which is right to within one
   code; two looks at the middles between values make it what a search among all of them finds.

A scale is the largest magnitude of its block, and NaN where one of its elements is.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from core.kernels import adamw as plain
from core.kernels.blockwise import BLOCK, code_tables, dequantize, quantize, row_slices, scales_shape
from core.kernels.language import tl, triton
from core.kernels.operator import launches, operator, runs_kernel, unsupported_dtype
from core.kernels.spec import Case, KernelSpec, Traffic, drawing
from core.kernels.tensor_lists import (
    TYPES,
    aligned,
    count_at,
    on_clones,
    on_keywords,
    owners,
    pointer_at,
    starts,
    table,
    write_back,
)

_LOG2_10, _LOG10_2 = tl.constexpr(math.log2(10)), tl.constexpr(math.log10(2))
_BLOCKS = 8
"""Blocks of a program."""
_MOMENTS = ((True, 0), (False, 2))
"""(has a sign, place of its codes among the four lists of state) of each moment."""


@torch.no_grad()
def adamw_8bit(
    params: Sequence[Tensor], grads: Sequence[Tensor], avg_codes: Sequence[Tensor], avg_scales: Sequence[Tensor],
    sq_codes: Sequence[Tensor], sq_scales: Sequence[Tensor], *, step: int, lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2, maximize: bool = False,
) -> None:  # fmt: skip
    """One step of AdamW, in place; lists of one length.

    params, grads  [N, ..] in fp32, bf16 or fp16
    *_codes        uint8 of the parameter's shape, of the first moment and of the second
    *_scales       [N, blocks of a row] in fp32 or wider; see `core.kernels.blockwise`
    step           counted from 1, the same for all

    Raises ValueError when shapes do not fit.
    """
    lists = [list(given) for given in (params, grads, avg_codes, avg_scales, sq_codes, sq_scales)]
    _check(lists)
    options = {"step": step, "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
    if params and runs_kernel("adamw_8bit", params[0], unless=_unsupported(lists)):
        _update(*lists, step, lr, *betas, eps, weight_decay, maximize)
    else:
        reference(*lists, **options)


@torch.no_grad()
def reference(
    params: Sequence[Tensor], grads: Sequence[Tensor], avg_codes: Sequence[Tensor], avg_scales: Sequence[Tensor],
    sq_codes: Sequence[Tensor], sq_scales: Sequence[Tensor], **options,
) -> None:  # fmt: skip
    """The same by torch, rows at a time, so what is whole of the moments is never more than a slice."""
    for p, g, *state in zip(params, grads, avg_codes, avg_scales, sq_codes, sq_scales):
        for rows in row_slices(p):
            packed = [(state[at][rows], state[at + 1][rows], signed) for signed, at in _MOMENTS]
            moments = [dequantize(*parts) for parts in packed]
            plain.adamw([p[rows]], [g[rows]], *([m] for m in moments), **options)
            for moment, (codes, scales, signed) in zip(moments, packed):
                new_codes, new_scales = quantize(moment, signed)
                codes.copy_(new_codes)
                scales.copy_(new_scales)


def _check(lists: list[list[Tensor]]) -> None:
    lengths = [len(given) for given in lists]
    if len(set(lengths)) > 1:
        raise ValueError(f"adamw_8bit: lists of params, grads, codes and scales have lengths {lengths}")
    for p, g, *state in zip(*lists):
        scales = scales_shape(tuple(p.shape))
        shapes = [tuple(t.shape) for t in (p, g, *state)]
        if shapes != [shapes[0], shapes[0], shapes[0], scales, shapes[0], scales]:
            raise ValueError(f"adamw_8bit: shapes {shapes} are not those of a parameter, its gradient and its state")


def _unsupported(lists: list[list[Tensor]]) -> str | None:
    params, grads, _, avg_scales, _, sq_scales = lists
    if any(t.device != params[0].device for given in lists for t in given):
        return "the tensors lie on several devices"
    if any(t.dtype != torch.float32 for t in (*avg_scales, *sq_scales)):
        return "the kernel takes scales in fp32"
    return unsupported_dtype(*params, *grads)


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _nearest_code(relative, middles, SIGNED: tl.constexpr):
    """The number of middles below each of `relative`, all in [-1, 1]; 255 for NaN."""
    size = tl.abs(relative)
    # Decade e has magnitudes up to 10^(e - 6), and 2^e of them (twice as many without a sign) up to the next. The
    # logarithm is the exponent and, for the fraction, the mantissa: at most 0.09 too small, which puts 6 % above a
    # power of ten into the decade below, whose last code is the neighbour of theirs.
    log2 = size.to(tl.int32, bitcast=True).to(tl.float32) * (1 / 8388608) - 127.0
    decade = tl.minimum(tl.maximum(tl.ceil(log2 * _LOG10_2) + 6.0, 0.0), 6.0)
    bits = (decade.to(tl.int32) + (127 if SIGNED else 128)) << 23
    count = bits.to(tl.float32, bitcast=True)
    top = tl.exp2((6.0 - decade) * _LOG2_10)
    place = tl.minimum(tl.maximum((size * top - 0.1) * (count * (1 / 0.9)), 0.0), count - 1)
    place = (count - (1.0 if SIGNED else 2.0) + place).to(tl.int32)
    if SIGNED:
        code = tl.where(relative < 0, 127 - place, 128 + place)
    else:
        code = 1 + place
    code = tl.where(relative == relative, tl.minimum(code, 254), 254)
    below = tl.load(middles + tl.maximum(code - 1, 0)) < relative
    code = tl.where(below | (code == 0), code, code - 1)
    return tl.where((tl.load(middles + code) < relative) | (relative != relative), code + 1, code)


@triton.jit
def _quotient(x, y):
    """x / y, |x| <= y, rounded to nearest: one division a row, and three operations instead of some twenty an element.

    The remainder corrects the product with the reciprocal (Markstein, "Computation of elementary functions on the IBM
    RISC System/6000 processor", 1990). A y whose reciprocal is infinite is raised by 2^64 first, as x is.
    """
    raised = tl.where(y < 1e-30, 18446744073709551616.0, 1.0)
    x, y = x * raised, y * raised
    inverse = tl.div_rn(1.0 + y * 0.0, y)
    q = x * inverse
    return tl.where(y < float("inf"), tl.fma(tl.fma(-q, y, x), inverse, q), q)


@triton.jit
def _moment(codes, scales, at, block, inside, whole, values):
    """fp32 values of elements `at`, whose scale is that of `block`."""
    relative = tl.load(values + tl.load(codes + at, mask=inside, other=0).to(tl.int32))
    return tl.where(inside, relative * tl.load(scales + block, mask=whole, other=0.0)[:, None], 0.0)


@triton.jit
def _keep(x, codes, scales, at, block, inside, whole, middles, SIGNED: tl.constexpr):
    largest = tl.max(tl.abs(x), 1)
    largest = tl.where(tl.max((x != x).to(tl.int32), 1) > 0, float("nan"), largest)
    relative = _quotient(x, tl.where(largest > 0, largest, 1.0)[:, None])
    code = _nearest_code(relative, middles, SIGNED)
    if not SIGNED:
        code = tl.where((code == 0) & (relative > 0), 1, code)
    tl.store(codes + at, code.to(tl.uint8), mask=inside)
    tl.store(scales + block, largest, mask=whole)


@triton.jit
def _adamw_8bit(
    owners, table, signed_values, signed_middles, values, middles, factor, size, inverse_root, beta2, rest1, rest2, eps,
    decay, P: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Columns: number of blocks, first program, row length, blocks of a row, p, g, m's codes and scales, v's."""
    owner = table + tl.load(owners + tl.program_id(0)).to(tl.int64) * 10
    block = (tl.program_id(0) - tl.load(owner + 1)) * BLOCKS + tl.arange(0, BLOCKS)
    length, of_row = count_at(owner + 2, ALIGNED), tl.load(owner + 3)
    whole = block < tl.load(owner)
    column = (block % of_row * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    inside = whole[:, None] & (column < length)
    at = (block // of_row * length)[:, None] + column
    m_codes, m_scales = pointer_at(owner + 6, tl.uint8, ALIGNED), pointer_at(owner + 7, tl.float32, ALIGNED)
    v_codes, v_scales = pointer_at(owner + 8, tl.uint8, ALIGNED), pointer_at(owner + 9, tl.float32, ALIGNED)
    g = tl.load(pointer_at(owner + 5, G, ALIGNED) + at, mask=inside, other=0.0).to(tl.float32) * factor
    m = _moment(m_codes, m_scales, at, block, inside, whole, signed_values)
    v = _moment(v_codes, v_scales, at, block, inside, whole, values)
    m += rest1 * (g - m)
    v = beta2 * v + rest2 * g * g
    p_at = pointer_at(owner + 4, P, ALIGNED) + at
    p = tl.load(p_at, mask=inside, other=0.0).to(tl.float32)
    p = p * decay - size * m / (tl.sqrt(v) * inverse_root + eps)
    tl.store(p_at, p.to(P), mask=inside)
    _keep(m, m_codes, m_scales, at, block, inside, whole, signed_middles, True)
    _keep(v, v_codes, v_scales, at, block, inside, whole, middles, False)


# --- operators --------------------------------------------------------------------------------------------------------


@operator("adamw_8bit", mutates=("params", "avg_codes", "avg_scales", "sq_codes", "sq_scales"))
def _update(
    params: list[Tensor], grads: list[Tensor], avg_codes: list[Tensor], avg_scales: list[Tensor],
    sq_codes: list[Tensor], sq_scales: list[Tensor], step: int, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, maximize: bool,
) -> None:  # fmt: skip
    given = list(zip(params, grads, avg_codes, avg_scales, sq_codes, sq_scales))
    members = [i for i, p in enumerate(params) if launches(p)]
    taken = {i: [t.contiguous() for t in given[i]] for i in members}
    launched: dict[tuple, list[int]] = {}
    for i, tensors in taken.items():
        is_aligned = aligned(tensors) and params[i][0].numel() % 16 == 0
        launched.setdefault((TYPES[tensors[0].dtype], TYPES[tensors[1].dtype], is_aligned), []).append(i)
    for (P, G, is_aligned), members in launched.items():
        device = params[members[0]].device
        blocks = [taken[i][3].numel() for i in members]
        counts = [triton.cdiv(n, _BLOCKS) for n in blocks]
        sizes = [(params[i][0].numel(), taken[i][3].shape[1]) for i in members]
        pointers = [[t.data_ptr() for t in taken[i]] for i in members]
        rows = tuple((n, at, *size, *to) for n, at, size, to in zip(blocks, starts(counts), sizes, pointers))
        _adamw_8bit[(sum(counts),)](
            owners(tuple(counts), device), table(rows, device), *code_tables(True, device, torch.float32),
            *code_tables(False, device, torch.float32), -1.0 if maximize else 1.0, lr / (1 - beta1**step),
            (1 - beta2**step) ** -0.5, beta2, 1 - beta1, 1 - beta2, eps, 1 - lr * weight_decay, P=P, G=G, BLOCK=BLOCK,
            BLOCKS=_BLOCKS, ALIGNED=is_aligned, num_warps=8,
        )  # fmt: skip
    for i, worked_on in taken.items():
        write_back(given[i], worked_on)


# --- spec -------------------------------------------------------------------------------------------------------------


_KINDS = ("param", "grad", "m_codes", "m_scales", "v_codes", "v_scales")


def updated(**inputs) -> tuple[Tensor, ...]:
    """`adamw_8bit` as a function: parameters and scales. Codes, which may go to either neighbour, have a test."""
    return _without_codes(adamw_8bit, inputs)


def updated_reference(**inputs) -> tuple[Tensor, ...]:
    """`reference` as a function."""
    return _without_codes(reference, inputs)


def _without_codes(update, inputs: dict) -> tuple[Tensor, ...]:
    return tuple(t for t in on_clones(update, _KINDS, inputs) if t.dtype != torch.uint8)


def _shapes(case: Case) -> list[tuple[int, ...]]:
    return list(case.get("shapes") or [(case["N"], case["M"])]) * case.get("copies", 1)


def _inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    # A step as long as the parameters are large: a tolerance must not hide it.
    inputs: dict = {"step": 3, "lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-2, "weight_decay": 0.2}
    inputs |= {"maximize": case["maximize"]} if "maximize" in case else {}
    draw = drawing(torch.float32, device, generator)
    for index, shape in enumerate(_shapes(case)):
        inputs[f"param_{index}"], inputs[f"grad_{index}"] = draw(*shape).to(dtype), draw(*shape).to(dtype)
        for name, signed in (("m", True), ("v", False)):
            codes, scales = _state(draw(*shape), signed)
            inputs[f"{name}_codes_{index}"], inputs[f"{name}_scales_{index}"] = codes, scales
    return inputs


def _state(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    if x.is_meta:
        return torch.empty_like(x, dtype=torch.uint8), x.new_empty(scales_shape(tuple(x.shape)))
    return quantize(x if signed else x.square(), signed)


def _traffic(case: Case, dtype: torch.dtype) -> Traffic:
    shapes = _shapes(case)
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    scales = sum(torch.Size(scales_shape(shape)).numel() for shape in shapes)
    return Traffic(elements * (3 * dtype.itemsize + 4) + 16 * scales, 0, 80 * elements)


SPECS = (KernelSpec(
    name="adamw_8bit",
    function=updated,
    reference=updated_reference,
    inputs=_inputs,
    cases=(
        {"shapes": ((33, 300), (64, 64), (3, 5, 100))},
        {"shapes": ((17, 256), (1, 1)), "maximize": True},
        {"shapes": ((1, 1),)},
        {"shapes": ((0, 4), (5, 4))},
    ),
    space={"N": range(1, 40), "M": range(1, 700), "maximize": (False, True)},
    timed=(
        {"shapes": ((4096, 4096),)},
        {"shapes": ((1024, 4096), (4096, 1024)), "copies": 24},
        {"shapes": ((256, 255),), "copies": 64},
    ),
    # A dozen roundings of fp32, and p minus a step of its own size; in 16 bits p is rounded.
    tolerance={torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3},
    traffic=_traffic,
    alone=("m_codes_0", "v_codes_0", "m_scales_0", "v_scales_0"),
    in_place=(functools.partial(on_keywords, adamw_8bit, _KINDS), functools.partial(on_keywords, reference, _KINDS)),
),)  # fmt: skip
