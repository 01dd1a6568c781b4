"""Long sequences in the memory there is: operations in slices, and how small the slices have to be.

`slice_operations(model, limit_bytes)` wraps the modules whose temporaries grow with the cube of the length or hold many
channels, so that each works on a few rows at a time: attention (rows, columns, triangles), transitions, the outer
product mean. Every slice is computed as before, so the result is the same but for the order of no sum at all.

`plan(...)` finds the largest limit whose peak fits into a budget. It decides by what the model really allocates, tensor
by tensor, in a forward on the meta device with one block a stack: no formula that could drift from the code. What it
cannot know is scratch memory inside an operator; on a CPU it counts attention's scores, which torch may not allocate.
"""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor, nn

from apps.fold.model.alphafold import AlphaFold
from apps.fold.model.attention import GatedAttention, GlobalAttention
from apps.fold.model.config import ModelConfig
from apps.fold.model.features import Features, TemplateFeatures
from apps.fold.model.layers import Transition
from apps.fold.model.msa import OuterProductMean
from apps.fold.weights.table import name_table
from core.config import UserError
from core.metrics import MemoryAccount

_COUNTED = 0.95  # of the budget; the rest is for small tensors that the count leaves out
_SHARES = (4, 16, 64, 256, 1024)  # parts of the budget that a slice's temporaries may take, tried in turn


def slice_operations(model: nn.Module, limit_bytes: float) -> None:
    """From now on the model's operations work in slices whose temporaries take about `limit_bytes`, at least a row.

    Parameters keep their names. inf: as it was.
    """
    for module in model.modules():
        original = type(module).forward.__get__(module)
        if isinstance(module, GatedAttention | GlobalAttention):
            module.forward = partial(_attention, original, module, limit_bytes)
        elif isinstance(module, Transition):
            module.forward = partial(_transition, original, module, limit_bytes)
        elif isinstance(module, OuterProductMean):
            module.update = partial(_outer_product, OuterProductMean.update.__get__(module), module, limit_bytes)


def _rows(limit_bytes: float, bytes_a_row: float) -> float:
    return max(1.0, limit_bytes / max(1, bytes_a_row))


def _attention(
    whole: Callable[..., Tensor],
    module: GatedAttention | GlobalAttention,
    limit_bytes: float,
    x_XLD: Tensor,
    mask_XL: Tensor,
    *,
    residual: Tensor,
    bias: Tensor | None = None,
    dropout: Tensor | None = None,
) -> Tensor:
    X, L, D = x_XLD.shape
    H, size = module.num_heads, x_XLD.element_size()
    scores = 3 * H * L * L * max(4, size) if isinstance(module, GatedAttention) else H * L * 8
    rows = _rows(limit_bytes, (7 * H * module.head_dim + 3 * D) * L * size + scores)
    given = {name: t for name, t in (("bias", bias), ("dropout", dropout)) if t is not None}
    if rows >= X:
        return whole(x_XLD, mask_XL, residual=residual, **given)
    shared = X if bias is None else X // bias.shape[0]

    def part(at: slice) -> Tensor:
        here = {"bias": bias[at.start // shared : at.start // shared + 1]} if bias is not None else {}
        here |= {"dropout": dropout[at] if dropout.shape[0] == X else dropout} if dropout is not None else {}
        return whole(x_XLD[at], mask_XL[at], residual=residual[at], **here)

    return _in_slices(part, _cuts(X, int(rows), shared), 0, X)


def _transition(whole: Callable[[Tensor], Tensor], module: Transition, limit_bytes: float, x: Tensor) -> Tensor:
    flat = x.flatten(0, -3) if x.ndim > 3 else x
    row_bytes = flat[0].numel() // x.shape[-1] * (2 * module.up.out_features + 4 * x.shape[-1]) * x.element_size()
    rows = _rows(limit_bytes, row_bytes)
    if rows >= len(flat):
        return whole(x)
    out = _in_slices(lambda at: whole(flat[at]), _cuts(len(flat), int(rows), len(flat)), 0, len(flat))
    return out.view(x.shape)


def _outer_product(
    whole: Callable[..., Tensor], module: OuterProductMean, limit_bytes: float, a_BSIC: Tensor, b_BSJC: Tensor,
    mask_BSI: Tensor, mask_BSJ: Tensor,
) -> Tensor:  # fmt: skip
    B, _, I, C = a_BSIC.shape
    row_bytes = B * b_BSJC.shape[2] * (2 * C * C + 2 * module.out.out_features) * a_BSIC.element_size()
    rows = _rows(limit_bytes, row_bytes)
    if rows >= I:
        return whole(a_BSIC, b_BSJC, mask_BSI, mask_BSJ)

    def part(at: slice) -> Tensor:
        return whole(a_BSIC[:, :, at], b_BSJC, mask_BSI[:, :, at], mask_BSJ)

    return _in_slices(part, _cuts(I, int(rows), I), 1, I)


def _cuts(length: int, rows: int, shared: int) -> list[slice]:
    """Slices of at most `rows`, none of which crosses a multiple of `shared`."""
    return [
        slice(first, min(first + rows, block + shared))
        for block in range(0, length, shared)
        for first in range(block, block + shared, rows)
    ]


def _in_slices(part: Callable[[slice], Tensor], cuts: list[slice], dim: int, length: int) -> Tensor:
    """The parts side by side along `dim`; without gradients each goes to its place at once."""
    if torch.is_grad_enabled():
        return torch.cat([part(at) for at in cuts], dim)
    out = None
    for at in cuts:
        value = part(at)
        if out is None:
            shape = [*value.shape[:dim], length, *value.shape[dim + 1 :]]
            out = value.new_empty(shape)
        out.narrow(dim, at.start, at.stop - at.start).copy_(value)
        del value
    assert out is not None
    return out


def plan(
    config: ModelConfig, residues: int, rows: int, extra: int, templates: int, dtype: torch.dtype, budget: int
) -> float:
    """The largest limit for `slice_operations` with which a prediction stays within `budget` bytes; inf: no slices.

    rows, extra, templates  of the MSA (those of templates not counted), of the extra MSA, templates

    Raises UserError when even the smallest slices need more.
    """
    peak = 0
    least = least_bytes(config, residues, dtype)
    for limit in (math.inf, *(budget / share for share in _SHARES)) if least <= budget else ():
        peak = peak_bytes(config, residues, rows, extra, templates, dtype, limit)
        if peak <= _COUNTED * budget:
            return limit
    raise UserError(
        f"{residues} residues need {max(peak, least) / 2**30:.1f} GiB and there are {budget / 2**30:.1f}; "
        "take fewer rows of the MSA, bf16, or another machine"
    )


def least_bytes(config: ModelConfig, residues: int, dtype: torch.dtype) -> int:
    """A bound from below: the weights, and six pair representations in the triangle product."""
    return _weights_bytes(config, dtype) + 6 * config.pair_dim * residues**2 * dtype.itemsize


def _weights_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return sum(math.prod(entry.shape) for entry in name_table(config)) * dtype.itemsize


@cache
def peak_bytes(
    config: ModelConfig, residues: int, rows: int, extra: int, templates: int, dtype: torch.dtype, limit: float
) -> int:
    """The most bytes of tensors alive at once in a prediction, by a forward on the meta device."""
    short = replace(
        config,
        evoformer=replace(config.evoformer, num_blocks=1),
        extra=replace(config.extra, num_blocks=1),
        structure=replace(config.structure, num_layers=1),
    )
    with torch.device("meta"):
        model = AlphaFold(short).to(dtype).eval()
    slice_operations(model, limit)
    features = _meta_features(residues, rows, extra, templates if config.templates is not None else 0, dtype)
    with torch.no_grad(), MemoryAccount("meta") as account:
        model([features] * 2)  # the second iteration has the first one's results beside it
    return account.peak_bytes - _weights_bytes(short, dtype) + _weights_bytes(config, dtype)


def _meta_features(N: int, S: int, E: int, T: int, dtype: torch.dtype) -> Features:
    def real(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def whole(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.long, device="meta")

    templates = None
    if T:
        templates = TemplateFeatures(
            whole(1, T, N), real(1, T), real(1, T, N, 3).float(), real(1, T, N), real(1, T, N), real(1, T, N, 7, 2),
            real(1, T, N, 7, 2), real(1, T, N, 7),
        )  # fmt: skip
    return Features(
        whole(1, N), whole(1, N), real(1, N), real(1, N, 22), real(1, S, N, 49), real(1, S, N), whole(1, E, N),
        real(1, E, N), real(1, E, N), real(1, E, N), templates,
    )  # fmt: skip


def free_bytes(device: torch.device | str) -> int:
    """What a device has free, less a tenth for what is not counted."""
    if torch.device(device).type == "cuda":
        return int(0.9 * torch.cuda.mem_get_info(device)[0])
    return int(0.9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
