"""The phases of Adafactor (core/kernels/adafactor.py) on a CPU, in blocks that stay in the cache.

A matrix of a layer is larger than the cache, so an operator that goes over it takes as long as its memory does, and
Adafactor composed of whole-matrix operators goes over it some twenty times. Here a block of rows is read once a phase
and everything that the phase does with it is done while it is there: the sums read G once, the squares G and P, the
update G, and P in and out.

Where no entry of V = r c / mean(r) can be below eps1^2, which the smallest entries of r and c tell, U = G / sqrt V is G
scaled by one factor a row and one a column, and no root of a matrix is taken. Where one can, V is clamped entry by
entry.

A block of 16 bits is computed in fp32: it is widened when it is read, and what is written is rounded once.

Vectors are small and many: one operator goes over all of them. For matrices that are not whole in memory (transposed),
and many small ones in a convolution, torch's phases do.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from core.kernels.adafactor import TORCH, Phases

BLOCK_ELEMENTS = 1 << 18
"""Of a block, a thread: an operator parts it among them, and a shorter one is over before they have all begun."""


def _row_col_sums(grads: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    rows, cols = [], []
    scratch = _scratch(grads)
    for g in grads:
        if not _blocks_well(g):
            (row,), (col,) = TORCH.row_col_sums([g])
        else:
            dtype = _wide_dtype(g)
            row = g.new_empty(*g.shape[:-1], 1, dtype=dtype)
            col = g.new_zeros(*g.shape[:-2], 1, g.shape[-1], dtype=dtype)
            for g_RC, row_R1, col_1C in _matrices(g, row, col):
                for at in _blocks(g_RC):
                    square = _square(_wide(g_RC[at], scratch.of_g), scratch.work)
                    torch.sum(square, 1, keepdim=True, out=row_R1[at])
                    col_1C += square.sum(0, keepdim=True)
        rows.append(row)
        cols.append(col)
    return rows, cols


def _factored_squares(params, grads, row_vars, col_vars, means, eps1: float | None) -> Tensor:
    found = []
    scratch = _scratch(grads)
    for p, g, row_var, col_var, mean in zip(params, grads, row_vars, col_vars, means):
        lowest = torch.finfo(p.dtype).eps if eps1 is None else eps1
        if not _blocks_well(g, p):
            found.append(TORCH.factored_squares([p], [g], [row_var], [col_var], [mean], lowest)[0])
            continue
        # Sums of blocks in fp64: there may be thousands, and one over a large matrix in fp32 is 2e-4 off.
        of_u = of_p = 0.0
        row, col = _wide_factors(row_var, col_var, mean, lowest)
        for g_RC, p_RC, row_R1, col_1C in _matrices(g, p, row, col):
            scales = _scales(row_R1, col_1C, lowest)
            for at in _blocks(g_RC):
                block, g_block = _wide(p_RC[at], scratch.of_p).view(-1), _wide(g_RC[at], scratch.of_g)
                of_p += float(torch.dot(block, block))
                if scales is None:
                    u = _clamped(g_block, row_R1[at], col_1C, lowest, scratch.work).view(-1)
                    of_u += float(torch.dot(u, u))
                else:
                    sums = torch.mv(_square(g_block, scratch.work), scales[1])
                    of_u += float(torch.dot(sums, scales[0][at].view(-1)))
        found.append(torch.tensor([of_u, of_p], dtype=torch.promote_types(p.dtype, torch.float32)))
    return torch.stack(found)


def _variance_squares(params, grads, variances, weight: float, eps1: float | None) -> Tensor:
    if not _alike(params, grads, variances):
        return TORCH.variance_squares(params, grads, variances, weight, eps1)
    torch._foreach_lerp_(variances, torch._foreach_mul(grads, grads), weight)
    updates = _unfactored(params, grads, variances, eps1)
    return torch.stack([torch.stack(torch._foreach_norm(tensors)) for tensors in (updates, params)], 1).square_()


def _apply(
    params, grads, row_vars, col_vars, means, squares, sizes, eps1, eps2, d, rho, decay, maximize, seed
) -> None:  # fmt: skip
    roots = (squares / torch.tensor(sizes, dtype=squares.dtype).unsqueeze(1)).sqrt().tolist()
    sign = 1.0 if maximize else -1.0
    alphas = [sign * max(rms_p, eps2) * rho / max(rms_u / d, 1.0) for rms_u, rms_p in roots]
    if not means and _alike(params, grads, row_vars):
        updates = _unfactored(params, grads, row_vars, eps1)
        torch._foreach_mul_(updates, alphas)
        torch._foreach_mul_(params, decay)
        torch._foreach_add_(params, updates)
        return
    scratch = _scratch(grads)
    for index, (p, g) in enumerate(zip(params, grads)):
        lowest = torch.finfo(p.dtype).eps if eps1 is None else eps1
        if not _blocks_well(g, p) or seed is not None:
            factors = ([col_vars[index]], [means[index]]) if p.ndim > 1 else ([], [])
            options = (squares[index : index + 1], [sizes[index]], lowest, eps2, d, rho, decay, maximize, seed)
            TORCH.apply([p], [g], [row_vars[index]], *factors, *options)
            continue
        row, col = _wide_factors(row_vars[index], col_vars[index], means[index], lowest)
        for g_RC, p_RC, row_R1, col_1C in _matrices(g, p, row, col):
            _apply_blocks(g_RC, p_RC, row_R1, col_1C, lowest, alphas[index], decay, scratch)


def _apply_blocks(g_RC, p_RC, row_R1, col_1C, lowest: float, alpha: float, decay: float, scratch: "_Scratch") -> None:
    """p <- decay p + alpha U of one matrix."""
    scales = _scales(row_R1, col_1C, lowest)
    if scales is not None:
        row_scale, col_scale = scales[0].sqrt_().mul_(alpha), scales[1].sqrt_()
    for at in _blocks(g_RC):
        block, g_block = _wide(p_RC[at], scratch.of_p), _wide(g_RC[at], scratch.of_g)
        if decay != 1.0:
            block.mul_(decay)
        if scales is None:
            block.add_(_clamped(g_block, row_R1[at], col_1C, lowest, scratch.work), alpha=alpha)
        else:
            block.addcmul_(torch.mul(g_block, row_scale[at], out=_like(block, scratch.work)), col_scale)
        if p_RC.dtype != block.dtype:
            p_RC[at] = block


BLOCKED = Phases(_row_col_sums, TORCH.update_factors, _factored_squares, _variance_squares, _apply)


def _alike(*lists: Sequence[Tensor]) -> bool:
    """Return whether one operator takes them all as lists: they share one wide dtype."""
    dtypes = {t.dtype for tensors in lists for t in tensors}
    return len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64}


def _unfactored(params, grads, variances, eps1: float | None) -> list[Tensor]:
    """U of what keeps its whole second moment."""
    dtype = params[0].dtype
    lowest = torch.finfo(dtype).eps if eps1 is None else eps1
    updates = torch._foreach_clamp_min(variances, max(lowest * lowest, torch.finfo(dtype).tiny))
    torch._foreach_rsqrt_(updates)
    torch._foreach_mul_(updates, grads)
    return list(updates)


def _blocks_well(*tensors: Tensor) -> bool:
    """Return whether the loops over blocks take these tensors of one shape, and win by it."""
    first = tensors[0]
    many_small = first.ndim > 2 and first.shape[-2:].numel() < BLOCK_ELEMENTS // 16
    fine = all(t.is_contiguous() and _wide_dtype(t) == _wide_dtype(first) for t in tensors)
    return fine and first.ndim > 1 and first.numel() > 0 and not many_small


def _matrices(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The matrices along the last two dims, of all tensors alike."""
    return zip(*(t.view(-1, *t.shape[-2:]) for t in tensors), strict=True)


def _blocks(x_RC: Tensor) -> Iterator[slice]:
    rows = _rows_of_block(x_RC.shape[-1])
    return (slice(start, start + rows) for start in range(0, x_RC.shape[0], rows))


def _rows_of_block(num_cols: int) -> int:
    return max(1, BLOCK_ELEMENTS * torch.get_num_threads() // num_cols)


class _Scratch(NamedTuple):
    """Room for a block of what is computed, and for a block of G and of P where these are widened."""

    work: Tensor
    of_g: Tensor
    of_p: Tensor


def _scratch(tensors: Sequence[Tensor]) -> _Scratch:
    """Room for a block of any of them.  One for all: the system hands out memory of this size page by page."""
    blocked = [t for t in tensors if _blocks_well(t)]
    if not blocked:
        return _Scratch(*(torch.empty(0) for _ in range(3)))
    most = max(min(t.shape[-2], _rows_of_block(t.shape[-1])) * t.shape[-1] for t in blocked)
    return _Scratch(*(blocked[0].new_empty(most, dtype=_wide_dtype(blocked[0])) for _ in range(3)))


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _wide(block: Tensor, room: Tensor) -> Tensor:
    """The block itself, or in 16 bits its copy in fp32."""
    return block if block.dtype == room.dtype else _like(block, room).copy_(block)


def _wide_factors(row_var: Tensor, col_var: Tensor, mean: Tensor, lowest: float) -> tuple[Tensor, Tensor]:
    dtype = _wide_dtype(row_var)
    return row_var.to(dtype) / mean.clamp(min=lowest), col_var.to(dtype)


def _like(block: Tensor, scratch: Tensor) -> Tensor:
    return scratch[: block.numel()].view(block.shape)


def _square(g: Tensor, scratch: Tensor) -> Tensor:
    return torch.mul(g, g, out=_like(g, scratch))


def _scales(row_R1: Tensor, col_1C: Tensor, lowest: float) -> tuple[Tensor, Tensor] | None:
    """(1 / r [R, 1], 1 / c [C]) whose product is 1 / V; None where V may have to be clamped, or the product overflows.

    NaN compares as false, so it takes the way of the clamp, as in torch.
    """
    smallest = torch.stack((row_R1.min(), col_1C.min())).tolist()
    floor = max(lowest * lowest, torch.finfo(row_R1.dtype).tiny)
    if smallest[0] * smallest[1] >= floor and min(smallest) > 1e-30:
        return row_R1.reciprocal(), col_1C.view(-1).reciprocal()
    return None


def _clamped(g: Tensor, row: Tensor, col: Tensor, lowest: float, scratch: Tensor) -> Tensor:
    """U of a block, in the scratch."""
    v = torch.mul(row, col, out=_like(g, scratch))
    return v.clamp_(min=max(lowest * lowest, torch.finfo(v.dtype).tiny)).rsqrt_().mul_(g)
