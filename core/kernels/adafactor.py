"""Adafactor for a list of parameters (Shazeer and Stern 2018, arXiv:1804.04235), with torch.optim.Adafactor's names.

For a matrix G of R rows and C columns, at step t, with w = t^beta2_decay and rho = min(lr, 1 / sqrt t):

    r <- r + w (mean over columns of G^2 - r)          c <- c + w (mean over rows of G^2 - c)
    V = r c / max(mean of r, eps1)                     U = G / max(sqrt V, eps1)
    P <- P (1 - lr weight_decay) - max(eps2, RMS P) rho / max(1, RMS U / d) U

More dims are a batch of matrices with one RMS. A vector keeps V itself: V <- V + w (G^2 - V).

Five phases, each a function over the whole list, and public, because the distributed optimizer puts its reductions
between them (a shard's sums are partial; lengths and sizes are those of the whole):

    1. row_col_sums       reads G      sums of G^2 over each row and column
    2. update_factors     small        r, c in place; each matrix' mean of r
    3. factored_squares   reads G, P   sums of U^2 and of P^2, which the two RMS need
       variance_squares   the same for vectors, and V in place
    4. apply              reads G, P   writes P

So G is read three times and P twice and written once, whatever the state's size; U is never in memory. Sums are in
fp32, by programs first and then over programs, in a fixed order: the same inputs give the same bits.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.kernels.blocks import chip
from core.kernels.language import tl, triton
from core.kernels.operator import launches, operator, runs_kernel, unsupported_dtype
from core.kernels.spec import Case, KernelSpec, Traffic, drawing
from core.kernels.tensor_lists import (
    TYPES,
    aligned,
    on_clones,
    on_keywords,
    owners,
    pointer_at,
    rounded_at_random,
    starts,
    store_rounded,
    table,
    write_back,
)

MAX_LENGTH = 1 << 24
"""Of a row of a matrix: offsets within a tile have 32 bits."""


@dataclass(frozen=True)
class Phases:
    """The phases of an update, by kernels or by torch; all lists are of one length, B stands for leading dims.

    A shard may be empty: its sums are zeros.

    row_col_sums(grads) -> rows, cols
        lists of fp32 [B.., R, 1] and [B.., 1, C]; fp64 for fp64
    update_factors(row_vars, col_vars, rows, cols, num_rows, num_cols, weight) -> means
        in place on both vars; num_rows, num_cols are the whole matrices' sizes. Means [B.., 1, 1] are sums over the
        given rows, divided by num_rows: over shards of rows they add up
    factored_squares(params, grads, row_vars, col_vars, means, eps1) -> [len, 2], sums of U^2 and P^2
    variance_squares(params, grads, variances, weight, eps1) -> [len, 2]; in place on variances
    apply(params, grads, row_vars, col_vars, means, squares, sizes, options..) -> None; in place on params
        sizes are the whole parameters' numbers of elements; for vectors row_vars are the variances, and col_vars and
        means are empty
    """

    row_col_sums: Callable[..., tuple[list[Tensor], list[Tensor]]]
    update_factors: Callable[..., list[Tensor]]
    factored_squares: Callable[..., Tensor]
    variance_squares: Callable[..., Tensor]
    apply: Callable[..., None]


@torch.no_grad()
def adafactor(
    params: Sequence[Tensor], grads: Sequence[Tensor], row_vars: Sequence[Tensor | None],
    col_vars: Sequence[Tensor | None], variances: Sequence[Tensor | None], *, step: int, lr: float = 1e-2,
    beta2_decay: float = -0.8, eps: tuple[float | None, float] = (None, 1e-3), d: float = 1.0,
    weight_decay: float = 0.0, maximize: bool = False, seed: int | None = None,
) -> None:  # fmt: skip
    """One step of Adafactor, in place on parameters and state; lists of one length.

    params, grads  of any shapes; a parameter and its gradient have one shape
    row_vars       [.., R, 1], or None for a parameter of less than two dims
    col_vars       [.., 1, C], or None likewise
    variances      of the parameter's shape for less than two dims, else None
    step           counted from 1, the same for all: parameters that started later are another call
    eps            (eps1, eps2); an eps1 of None is the eps of the parameter's dtype
    seed           round bf16 parameters at random, by this seed (a new one each step); others round to nearest

    fp32, bf16 and fp16 in any mixture. Tensors with gaps are copied, and copied back.
    Raises ValueError when lengths or shapes do not fit.
    """
    _check(params, grads, row_vars, col_vars, variances)
    if params:
        options = _Options(step, lr, beta2_decay, eps, d, weight_decay, maximize, seed)
        _update(phases(params, grads, row_vars, col_vars, variances), options, *_groups(
            params, grads, row_vars, col_vars, variances
        ))  # fmt: skip


@torch.no_grad()
def reference(
    params: Sequence[Tensor], grads: Sequence[Tensor], row_vars: Sequence[Tensor | None],
    col_vars: Sequence[Tensor | None], variances: Sequence[Tensor | None], *, step: int, lr: float = 1e-2,
    beta2_decay: float = -0.8, eps: tuple[float | None, float] = (None, 1e-3), d: float = 1.0,
    weight_decay: float = 0.0, maximize: bool = False, seed: int | None = None,
) -> None:  # fmt: skip
    """The same by torch; what runs on a CPU."""
    options = _Options(step, lr, beta2_decay, eps, d, weight_decay, maximize, seed)
    _update(TORCH, options, *_groups(params, grads, row_vars, col_vars, variances))


def phases(*lists: Sequence[Tensor | None]) -> Phases:
    """The phases by kernels where kernels run for these tensors, else by torch."""
    tensors = [t for tensors in lists for t in tensors if t is not None]
    return KERNELS if tensors and runs_kernel("adafactor", tensors[0], _unsupported(tensors)) else TORCH


@dataclass(frozen=True)
class _Options:
    step: int
    lr: float
    beta2_decay: float
    eps: tuple[float | None, float]
    d: float
    weight_decay: float
    maximize: bool
    seed: int | None

    def for_apply(self) -> tuple[float | None, float, float, float, float, bool, int | None]:
        rho = min(self.lr, 1 / math.sqrt(self.step))
        return *self.eps, self.d, rho, 1 - self.lr * self.weight_decay, self.maximize, self.seed


def _update(by: Phases, options: _Options, matrices: list[list[Tensor]], vectors: list[list[Tensor]]) -> None:
    """The step on one rank. `matrices` are params, grads, row_vars, col_vars; `vectors` params, grads, variances."""
    weight, eps1 = options.step**options.beta2_decay, options.eps[0]
    if matrices[0]:
        params, grads, row_vars, col_vars = matrices
        rows, cols = by.row_col_sums(grads)
        num_rows, num_cols = ([g.shape[dim] for g in grads] for dim in (-2, -1))
        means = by.update_factors(row_vars, col_vars, rows, cols, num_rows, num_cols, weight)
        squares = by.factored_squares(params, grads, row_vars, col_vars, means, eps1)
        sizes = [p.numel() for p in params]
        by.apply(params, grads, row_vars, col_vars, means, squares, sizes, *options.for_apply())
    if vectors[0]:
        params, grads, variances = vectors
        squares = by.variance_squares(params, grads, variances, weight, eps1)
        by.apply(params, grads, variances, [], [], squares, [p.numel() for p in params], *options.for_apply())


def _groups(params, grads, row_vars, col_vars, variances) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """(params, grads, row_vars, col_vars) of what is factored and (params, grads, variances) of the rest."""
    matrices = [m for m in zip(params, grads, row_vars, col_vars) if m[0].ndim > 1 and m[0].numel() > 0]
    vectors = [v for v in zip(params, grads, variances) if v[0].ndim <= 1 and v[0].numel() > 0]
    return [[m[i] for m in matrices] for i in range(4)], [[v[i] for v in vectors] for i in range(3)]


def _check(params, grads, row_vars, col_vars, variances) -> None:
    lengths = [len(tensors) for tensors in (params, grads, row_vars, col_vars, variances)]
    if len(set(lengths)) > 1:
        raise ValueError(f"adafactor: lists of params, grads, row_vars, col_vars, variances have lengths {lengths}")
    for p, g, row, col, variance in zip(params, grads, row_vars, col_vars, variances):
        if p.shape != g.shape:
            raise ValueError(f"adafactor: a parameter {list(p.shape)} has a gradient {list(g.shape)}")
        if p.ndim > 1:
            wanted = {"row_var": (row, (*p.shape[:-1], 1)), "col_var": (col, (*p.shape[:-2], 1, p.shape[-1]))}
        else:
            wanted = {"variance": (variance, tuple(p.shape))}
        for name, (tensor, shape) in wanted.items():
            if tensor is None or tuple(tensor.shape) != shape:
                given = None if tensor is None else list(tensor.shape)
                raise ValueError(f"adafactor: a parameter {list(p.shape)} needs a {name} {list(shape)}, not {given}")


def _unsupported(tensors: Sequence[Tensor]) -> str | None:
    if any(t.device != tensors[0].device for t in tensors):
        return "the tensors lie on several devices"
    if any(t.ndim > 1 and t.shape[-1] > MAX_LENGTH for t in tensors):
        return f"the kernels take rows of at most {MAX_LENGTH} elements"
    return unsupported_dtype(*tensors)


# --- by torch ---------------------------------------------------------------------------------------------------------


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _lowest(eps1: float | None, param: Tensor) -> float:
    """eps1 of a parameter."""
    return torch.finfo(param.dtype).eps if eps1 is None else eps1


def _torch_row_col_sums(grads: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    def sums(dim: int) -> list[Tensor]:  # the norm has no intermediate of the gradient's size
        dtypes = [torch.promote_types(g.dtype, torch.float32) for g in grads]
        norms = [torch.linalg.vector_norm(g, dim=dim, keepdim=True, dtype=t) for g, t in zip(grads, dtypes)]
        return [norm.square_() for norm in norms]

    return sums(-1), sums(-2)


def _torch_update_factors(row_vars, col_vars, rows, cols, num_rows, num_cols, weight: float) -> list[Tensor]:
    means = []
    for row_var, col_var, row, col, R, C in zip(row_vars, col_vars, rows, cols, num_rows, num_cols):
        row_var.copy_(_wide(row_var).lerp(row / C, weight))
        col_var.copy_(_wide(col_var).lerp(col / R, weight))
        means.append(_wide(row_var).sum(-2, keepdim=True) / R)
    return means


def _torch_factored(g: Tensor, row_var: Tensor, col_var: Tensor, mean: Tensor, eps1: float) -> Tensor:
    """U."""
    return _torch_unfactored(g, (_wide(row_var) / mean.clamp(min=eps1)) * _wide(col_var), eps1)


def _torch_unfactored(g: Tensor, variance: Tensor, eps1: float) -> Tensor:
    """U; `variance` is overwritten."""
    return variance.clamp_(min=max(eps1 * eps1, torch.finfo(variance.dtype).tiny)).rsqrt_().mul_(g)


def _torch_factored_squares(params, grads, row_vars, col_vars, means, eps1: float | None) -> Tensor:
    found = []
    for p, g, row_var, col_var, mean in zip(params, grads, row_vars, col_vars, means):
        found.append(_torch_squares(_torch_factored(g, row_var, col_var, mean, _lowest(eps1, p)), p))
    return torch.stack(found)


def _torch_variance_squares(params, grads, variances, weight: float, eps1: float | None) -> Tensor:
    found = []
    for p, g, variance in zip(params, grads, variances):
        variance.copy_(_wide(variance).lerp(_wide(g).square(), weight))
        found.append(_torch_squares(_torch_unfactored(g, variance.to(_wide(g).dtype, copy=True), _lowest(eps1, p)), p))
    return torch.stack(found)


def _torch_squares(u: Tensor, p: Tensor) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(t, dtype=u.dtype).square() for t in (u, p)])


def _torch_apply(
    params, grads, row_vars, col_vars, means, squares, sizes, eps1, eps2, d, rho, decay, maximize, seed
) -> None:  # fmt: skip
    generator = None if seed is None else torch.Generator(params[0].device).manual_seed(seed)
    for index, (p, g) in enumerate(zip(params, grads)):
        lowest = _lowest(eps1, p)
        if p.ndim > 1:
            u = _torch_factored(g, row_vars[index], col_vars[index], means[index], lowest)
        else:
            u = _torch_unfactored(g, row_vars[index].to(_wide(g).dtype, copy=True), lowest)
        rms_u, rms_p = (squares[index] / sizes[index]).sqrt().unbind()
        alpha = rms_p.clamp(min=eps2) * rho / (rms_u / d).clamp(min=1.0)
        new = (_wide(p) * decay).add_(u.mul_(alpha), alpha=1.0 if maximize else -1.0)
        p.copy_(rounded_at_random(new, generator) if generator is not None and p.dtype == torch.bfloat16 else new)


TORCH = Phases(
    _torch_row_col_sums, _torch_update_factors, _torch_factored_squares, _torch_variance_squares, _torch_apply
)


# --- kernels ----------------------------------------------------------------------------------------------------------
# A tensor is B matrices of R rows and C columns (a vector is one row), cut into tiles of BB x BR x BC.


@triton.jit
def _tile(owners, table, COLUMNS: tl.constexpr, BB: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
          EVEN: tl.constexpr):  # fmt: skip
    """Where this program works. Every table begins with the columns B, R, C, the number of the tensor's first tile."""
    owner = table + tl.load(owners + tl.program_id(0)).to(tl.int64) * COLUMNS
    B, R, C = tl.load(owner), tl.load(owner + 1), tl.load(owner + 2)
    if EVEN:
        C = tl.multiple_of(C, 16)
    tile = tl.program_id(0) - tl.load(owner + 3).to(tl.int32)  # in 64 bits a division is a call
    of_row, of_matrix = tl.cdiv(C, BC).to(tl.int32), tl.cdiv(R, BR).to(tl.int32)
    c_tile, tile = tile % of_row, tile // of_row
    r_tile, b_tile = tile % of_matrix, tile // of_matrix
    return owner, B, R, C, b_tile.to(tl.int64), r_tile.to(tl.int64), c_tile.to(tl.int64)


@triton.jit
def _offsets(R, C, BB: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Offsets within a tile, from its first element."""
    b, r, c = tl.arange(0, BB), tl.arange(0, BR), tl.arange(0, BC)
    rows = b[:, None, None] * R.to(tl.int32) + r[None, :, None]
    return rows * C.to(tl.int32) + c[None, None, :], b, r, c


@triton.jit
def _tile_sums(
    owners, table, partial,
    BB: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, G: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Columns: B, R, C, first tile, G, then where this tensor's row and column sums begin in `partial`."""
    owner, B, R, C, b_tile, r_tile, c_tile = _tile(owners, table, 7, BB, BR, BC, EVEN)
    at, b, r, c = _offsets(R, C, BB, BR, BC)
    b_in, r_in, c_in = b < B - b_tile * BB, r < R - r_tile * BR, c < C - c_tile * BC
    grad = pointer_at(owner + 4, G, ALIGNED) + ((b_tile * BB * R + r_tile * BR) * C + c_tile * BC)
    inside = b_in[:, None, None] & r_in[None, :, None] & c_in[None, None, :]
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    to = partial + tl.load(owner + 5) + c_tile * B * R + b_tile * BB * R + r_tile * BR
    tl.store(to + b[:, None] * R + r[None, :], tl.sum(g * g, 2), mask=b_in[:, None] & r_in[None, :])
    to = partial + tl.load(owner + 6) + r_tile * B * C + b_tile * BB * C + c_tile * BC
    tl.store(to + b[:, None] * C + c[None, :], tl.sum(g * g, 1), mask=b_in[:, None] & c_in[None, :])


@triton.jit
def _finish_sums(owners, table, partial, sums, BK: tl.constexpr, BN: tl.constexpr):
    """sums[n] = sum over k of partial[k, n]. Columns: n, k, first program, where they begin in `partial`, in `sums`."""
    owner = table + tl.load(owners + tl.program_id(0)).to(tl.int64) * 5
    length, height = tl.load(owner), tl.load(owner + 1).to(tl.int32)
    n = (tl.program_id(0) - tl.load(owner + 2)) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    partial += tl.load(owner + 3)
    total = tl.zeros([BK, BN], tl.float32)
    for start in range(0, height, BK):
        inside = (start + k < height)[:, None] & (n < length)[None, :]
        total += tl.load(partial + (start + k).to(tl.int64)[:, None] * length + n[None, :], mask=inside, other=0.0)
    tl.store(sums + tl.load(owner + 4) + n, tl.sum(total, 0), mask=n < length)


@triton.jit
def _averaged(var, total, inside, weight, length, V: tl.constexpr):
    """One factor towards its new mean, in place; what is stored, in fp32."""
    old = tl.load(var, mask=inside, other=0.0).to(tl.float32)
    new = old + weight * (tl.load(total, mask=inside, other=0.0) / length - old)
    new = new.to(V)
    tl.store(var, new, mask=inside)
    return tl.where(inside, new.to(tl.float32), 0.0)


@triton.jit
def _factors(owners, table, sums, means, weight, BB: tl.constexpr, BLOCK: tl.constexpr, V: tl.constexpr):
    """Columns: B, R, C, first program, r, c, where the rows' sums and the columns' begin in `sums`, all rows, all
    columns, where means begin."""
    owner = table + tl.load(owners + tl.program_id(0)).to(tl.int64) * 11
    B, R, C = tl.load(owner), tl.load(owner + 1), tl.load(owner + 2)
    b = (tl.program_id(0) - tl.load(owner + 3)) * BB + tl.arange(0, BB)
    row_var, col_var = pointer_at(owner + 4, V, False), pointer_at(owner + 5, V, False)
    rows, cols = sums + tl.load(owner + 6), sums + tl.load(owner + 7)
    num_rows, num_cols = tl.load(owner + 8).to(tl.float32), tl.load(owner + 9).to(tl.float32)
    total = tl.zeros([BB, BLOCK], tl.float32)
    for start in range(0, R.to(tl.int32), BLOCK):
        i = start + tl.arange(0, BLOCK)
        at, inside = b[:, None] * R + i[None, :], (b < B)[:, None] & (i < R)[None, :]
        total += _averaged(row_var + at, rows + at, inside, weight, num_cols, V)
    tl.store(means + tl.load(owner + 10) + b, tl.sum(total, 1) / num_rows, mask=b < B)
    for start in range(0, C.to(tl.int32), BLOCK):
        i = start + tl.arange(0, BLOCK)
        at, inside = b[:, None] * C + i[None, :], (b < B)[:, None] & (i < C)[None, :]
        _averaged(col_var + at, cols + at, inside, weight, num_rows, V)


@triton.jit
def _inverse_root(
    owner, means, B, R, C, b_tile, r_tile, c_tile, eps1,
    BB: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """1 / max(sqrt V, eps1) of a tile from its factors. Columns 6, 7, 8: r, c, where the means begin in `means`."""
    b, r, c = b_tile * BB + tl.arange(0, BB), r_tile * BR + tl.arange(0, BR), c_tile * BC + tl.arange(0, BC)
    row_var, col_var = pointer_at(owner + 6, V, False), pointer_at(owner + 7, V, False)
    mean = tl.load(means + tl.load(owner + 8) + b, mask=b < B, other=1.0)
    inside = (b < B)[:, None] & (r < R)[None, :]
    row = tl.load(row_var + b[:, None] * R + r[None, :], mask=inside, other=0.0).to(tl.float32)
    row = row / tl.maximum(mean, eps1)[:, None]
    inside = (b < B)[:, None] & (c < C)[None, :]
    col = tl.load(col_var + b[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.maximum(row[:, :, None] * col[:, None, :], tl.maximum(eps1 * eps1, 1.1754944e-38)))


@triton.jit
def _tile_squares(
    owners, table, means, partial, weight, eps1, BB: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, P: tl.constexpr,
    G: tl.constexpr, V: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr, FACTORED: tl.constexpr,
):  # fmt: skip
    """Sums of U^2 and P^2. Columns: B, R, C, first tile, P, G, r or V (which is updated), c, means."""
    owner, B, R, C, b_tile, r_tile, c_tile = _tile(owners, table, 9, BB, BR, BC, EVEN)
    at, b, r, c = _offsets(R, C, BB, BR, BC)
    first = (b_tile * BB * R + r_tile * BR) * C + c_tile * BC
    inside = (b < B - b_tile * BB)[:, None, None] & (r < R - r_tile * BR)[None, :, None]
    inside = inside & (c < C - c_tile * BC)[None, None, :]
    g = tl.load(pointer_at(owner + 5, G, ALIGNED) + first + at, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(pointer_at(owner + 4, P, ALIGNED) + first + at, mask=inside, other=0.0).to(tl.float32)
    if FACTORED:
        u = g * _inverse_root(owner, means, B, R, C, b_tile, r_tile, c_tile, eps1, BB, BR, BC, V)
    else:
        variance = pointer_at(owner + 6, V, ALIGNED) + first + at
        old = tl.load(variance, mask=inside, other=0.0).to(tl.float32)
        new = (old + weight * (g * g - old)).to(V)
        tl.store(variance, new, mask=inside)
        u = g * tl.rsqrt(tl.maximum(new.to(tl.float32), tl.maximum(eps1 * eps1, 1.1754944e-38)))
    tl.store(partial + tl.program_id(0), tl.sum(u * u))
    tl.store(partial + tl.num_programs(0) + tl.program_id(0), tl.sum(p * p))


@triton.jit
def _finish_squares(table, partial, squares, num_tiles, BLOCK: tl.constexpr):
    """A program a tensor. Columns: first tile, number of tiles, row of `squares`."""
    owner = table + tl.program_id(0) * 3
    partial += tl.load(owner)
    count = tl.load(owner + 1).to(tl.int32)
    of_u, of_p = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        of_u += tl.load(partial + tile, mask=tile < count, other=0.0)
        of_p += tl.load(partial + num_tiles + tile, mask=tile < count, other=0.0)
    to = squares + tl.load(owner + 2) * 2
    tl.store(to, tl.sum(of_u))
    tl.store(to + 1, tl.sum(of_p))


@triton.jit(do_not_specialize=["seed", "stream"])
def _apply_tile(
    owners, table, means, squares, eps1, eps2, d, rho, decay, seed, stream,
    BB: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, P: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
    ALIGNED: tl.constexpr, EVEN: tl.constexpr, FACTORED: tl.constexpr, AT_RANDOM: tl.constexpr,
):  # fmt: skip
    """Columns: B, R, C, first tile, P, G, r or V, c, means, number of elements of the whole, row of `squares`."""
    owner, B, R, C, b_tile, r_tile, c_tile = _tile(owners, table, 11, BB, BR, BC, EVEN)
    size = tl.load(owner + 9).to(tl.float32)
    square = squares + tl.load(owner + 10) * 2
    rms_u, rms_p = tl.sqrt(tl.load(square) / size), tl.sqrt(tl.load(square + 1) / size)
    alpha = tl.maximum(rms_p, eps2) * rho / tl.maximum(rms_u / d, 1.0)  # the sign of rho says maximize
    at, b, r, c = _offsets(R, C, BB, BR, BC)
    first = (b_tile * BB * R + r_tile * BR) * C + c_tile * BC
    inside = (b < B - b_tile * BB)[:, None, None] & (r < R - r_tile * BR)[None, :, None]
    inside = inside & (c < C - c_tile * BC)[None, None, :]
    param = pointer_at(owner + 4, P, ALIGNED) + first + at
    g = tl.load(pointer_at(owner + 5, G, ALIGNED) + first + at, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(param, mask=inside, other=0.0).to(tl.float32)
    if FACTORED:
        u = g * _inverse_root(owner, means, B, R, C, b_tile, r_tile, c_tile, eps1, BB, BR, BC, V)
    else:
        variance = pointer_at(owner + 6, V, ALIGNED) + first + at
        v = tl.load(variance, mask=inside, other=0.0).to(tl.float32)
        u = g * tl.rsqrt(tl.maximum(v, tl.maximum(eps1 * eps1, 1.1754944e-38)))
    lane = (tl.arange(0, BB)[:, None, None] * BR + tl.arange(0, BR)[None, :, None]) * BC + tl.arange(0, BC)
    store_rounded(param, p * decay - alpha * u, inside, lane, seed, stream + tl.program_id(0), P, AT_RANDOM)


# --- operators --------------------------------------------------------------------------------------------------------
# Each makes one launch, and one to finish its sums, for all tensors that have one tile and one set of dtypes.


@operator("adafactor_row_col_sums")
def _row_col_sums(grads: list[Tensor]) -> Tensor:
    """All rows' sums, then all columns'."""
    sizes_of = [_matrices(g) for g in grads]
    num_rows, num_cols = [B * R for B, R, _ in sizes_of], [B * C for B, _, C in sizes_of]
    size = sum(num_rows) + sum(num_cols)
    if not any(map(launches, grads)):
        return torch.zeros(size, dtype=torch.float32, device=grads[0].device)
    sums = torch.empty(size, dtype=torch.float32, device=grads[0].device)
    grads = [g.contiguous() for g in grads]
    row_at, col_at = starts(num_rows), [sum(num_rows) + at for at in starts(num_cols)]
    for (tile, G, is_aligned, even), members in _by_launch([grads]):
        sizes, counts, first = _tiling(tile, [grads[i] for i in members])
        lengths = [n for B, R, C in sizes for n in (B * R, B * C)]
        heights = [k for _, R, C in sizes for k in (triton.cdiv(C, tile[2]), triton.cdiv(R, tile[1]))]
        partial_at = starts([n * k for n, k in zip(lengths, heights)])
        partial = torch.empty(sum(n * k for n, k in zip(lengths, heights)), dtype=torch.float32, device=sums.device)
        rows = [(*sizes[k], first[k], grads[i].data_ptr(), *partial_at[2 * k : 2 * k + 2]) for k, i in _of(members)]
        _tile_sums[(sum(counts),)](
            owners(tuple(counts), sums.device), table(tuple(rows), sums.device), partial,
            *tile, G=G, ALIGNED=is_aligned, EVEN=even, num_warps=8,
        )  # fmt: skip
        counts = [triton.cdiv(n, 128) for n in lengths]
        to = [at for i in members for at in (row_at[i], col_at[i])]
        rows = zip(lengths, heights, starts(counts), partial_at, to)
        _finish_sums[(sum(counts),)](
            owners(tuple(counts), sums.device), table(tuple(rows), sums.device), partial, sums, BK=32, BN=128
        )
    return sums


def row_col_sums(grads: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    sums = _row_col_sums(list(grads))
    shapes = [(*g.shape[:-1], 1) for g in grads] + [(*g.shape[:-2], 1, g.shape[-1]) for g in grads]
    parts = [part.view(shape) for part, shape in zip(sums.split([math.prod(s) for s in shapes]), shapes)]
    return parts[: len(grads)], parts[len(grads) :]


@operator("adafactor_update_factors", mutates=("row_vars", "col_vars"))
def _update_factors(
    row_vars: list[Tensor], col_vars: list[Tensor], rows: list[Tensor], cols: list[Tensor],
    num_rows: list[int], num_cols: list[int], weight: float,
) -> Tensor:  # fmt: skip
    counts = [r.shape[:-2].numel() for r in row_vars]
    means = torch.empty(sum(counts), dtype=torch.float32, device=row_vars[0].device)
    if not any(map(launches, [*row_vars, *col_vars])):
        return means
    at = starts(counts)
    given = [list(row_vars), list(col_vars)]
    lists = [[t.contiguous() for t in tensors] for tensors in given]
    sums, sums_at = _in_one([*rows, *cols])
    keys = [(max(r.shape[-2], c.shape[-1]) <= 16, r.dtype) for r, c in zip(row_vars, col_vars)]
    for key in dict.fromkeys(keys):
        members = [i for i, k in enumerate(keys) if k == key]
        BB, BLOCK = (128, 16) if key[0] else (1, 2048)
        sizes = [(counts[i], row_vars[i].shape[-2], col_vars[i].shape[-1]) for i in members]
        programs = [triton.cdiv(B, BB) for B, _, _ in sizes]
        first = starts(programs)
        entries = [
            (
                *sizes[k],
                first[k],
                *(tensors[i].data_ptr() for tensors in lists),
                sums_at[i],
                sums_at[len(rows) + i],
                num_rows[i],
                num_cols[i],
                at[i],
            )
            for k, i in _of(members)
        ]
        _factors[(sum(programs),)](
            owners(tuple(programs), means.device), table(tuple(entries), means.device), sums, means, weight,
            BB=BB, BLOCK=BLOCK, V=TYPES[key[1]], num_warps=8,
        )  # fmt: skip
    write_back(given[0] + given[1], lists[0] + lists[1])
    return means


def update_factors(row_vars, col_vars, rows, cols, num_rows, num_cols, weight: float) -> list[Tensor]:
    means = _update_factors(list(row_vars), list(col_vars), list(rows), list(cols), num_rows, num_cols, weight)
    shapes = [(*r.shape[:-2], 1, 1) for r in row_vars]
    return [part.view(shape) for part, shape in zip(means.split([math.prod(s) for s in shapes]), shapes)]


@operator("adafactor_factored_squares")
def _factored_squares(
    params: list[Tensor], grads: list[Tensor], row_vars: list[Tensor], col_vars: list[Tensor], means: list[Tensor],
    eps1: float | None,
) -> Tensor:  # fmt: skip
    lists = [[t.contiguous() for t in tensors] for tensors in (params, grads, row_vars, col_vars)]
    return _squares(lists, means, 0.0, eps1)


@operator("adafactor_variance_squares", mutates=("variances",))
def _variance_squares(
    params: list[Tensor], grads: list[Tensor], variances: list[Tensor], weight: float, eps1: float | None
) -> Tensor:
    lists = [[t.contiguous() for t in tensors] for tensors in (params, grads, variances)]
    squares = _squares(lists, [], weight, eps1)
    write_back(variances, lists[2])
    return squares


def _squares(lists: list[list[Tensor]], means: list[Tensor], weight: float, eps1: float | None) -> Tensor:
    params = lists[0]
    if not any(map(launches, params)):
        return torch.zeros(len(params), 2, dtype=torch.float32, device=params[0].device)
    squares = torch.empty(len(params), 2, dtype=torch.float32, device=params[0].device)
    every_mean, means_at = _in_one(means) if means else (squares, [0] * len(params))
    for (tile, P, G, V, is_aligned, even), members in _by_launch(lists[:3]):
        sizes, counts, first = _tiling(tile, [params[i] for i in members])
        partial = torch.empty(2, sum(counts), dtype=torch.float32, device=squares.device)
        rows = [(*sizes[k], first[k], *_pointers(lists, i), means_at[i]) for k, i in _of(members)]
        _tile_squares[(sum(counts),)](
            owners(tuple(counts), squares.device), table(tuple(rows), squares.device), every_mean, partial, weight,
            _lowest(eps1, params[members[0]]), *tile, P=P, G=G, V=V, ALIGNED=is_aligned, EVEN=even,
            FACTORED=bool(means), num_warps=16 if chip() == "sm_100" else 8,  # where registers are spilled by 8
        )  # fmt: skip
        rows = tuple(zip(first, counts, members))
        _finish_squares[(len(members),)](
            table(rows, squares.device), partial, squares, sum(counts), BLOCK=1024, num_warps=8
        )
    return squares


@operator("adafactor_apply", mutates=("params",))
def _apply(
    params: list[Tensor], grads: list[Tensor], row_vars: list[Tensor], col_vars: list[Tensor], means: list[Tensor],
    squares: Tensor, sizes: list[int], eps1: float | None, eps2: float, d: float, rho: float, decay: float,
    maximize: bool, seed: int | None,
) -> None:  # fmt: skip
    if not any(map(launches, params)):
        return
    lists = [[t.contiguous() for t in tensors] for tensors in (params, grads, row_vars, col_vars) if tensors]
    every_mean, means_at = _in_one(means) if means else (squares, [0] * len(params))
    stream = 0
    for (tile, P, G, V, is_aligned, even), members in _by_launch(lists[:3]):
        shapes, counts, first = _tiling(tile, [params[i] for i in members])
        rows = [(*shapes[k], first[k], *_pointers(lists, i), means_at[i], sizes[i], i) for k, i in _of(members)]
        _apply_tile[(sum(counts),)](
            owners(tuple(counts), squares.device), table(tuple(rows), squares.device), every_mean,
            squares.contiguous(),
            _lowest(eps1, params[members[0]]), eps2, d, -rho if maximize else rho, decay, seed or 0, stream,
            *tile, P=P, G=G, V=V, ALIGNED=is_aligned, EVEN=even, FACTORED=bool(means),
            AT_RANDOM=seed is not None and P is tl.bfloat16, num_warps=8,
        )  # fmt: skip
        stream += sum(counts)
    write_back(params, lists[0])


KERNELS = Phases(row_col_sums, update_factors, _factored_squares, _variance_squares, _apply)


def _of(members: list[int]) -> list[tuple[int, int]]:
    return list(enumerate(members))


def _pointers(lists: list[list[Tensor]], index: int) -> list[int]:
    """P, G, r or V, c; zeros for what a vector lacks."""
    return [tensors[index].data_ptr() for tensors in lists] + [0] * (4 - len(lists))


def _in_one(tensors: list[Tensor]) -> tuple[Tensor, list[int]]:
    """Sums of a step as (memory that all lie in, where each begins), copied where they lie apart.

    A table that held pointers to them would be another each step, and be made on the host and sent; nor could a step
    be captured as a graph.
    """
    one = tensors[0].untyped_storage()._cdata
    if not all(t.untyped_storage()._cdata == one and t.is_contiguous() for t in tensors):
        return torch.cat([t.reshape(-1) for t in tensors]), starts([t.numel() for t in tensors])
    first = min(t.storage_offset() for t in tensors)
    length = max(t.storage_offset() + t.numel() for t in tensors) - first
    return tensors[0].as_strided((length,), (1,), first), [t.storage_offset() - first for t in tensors]


def _by_launch(lists: list[list[Tensor]]) -> list[tuple[tuple, list[int]]]:
    """Which tensors share a launch: (tile, dtypes.., pointers are aligned, rows are even) -> indices."""
    found: dict[tuple, list[int]] = {}
    for index, tensors in enumerate(zip(*lists)):
        _, R, C = _matrices(tensors[0])
        whole = tensors if R == 1 else tensors[:2]  # factors are read as they lie
        key = (_tile_of(tensors[0]), *(TYPES[t.dtype] for t in tensors), aligned(whole), C % 16 == 0)
        found.setdefault(key, []).append(index)
    return list(found.items())


def _tiling(tile: tuple[int, int, int], tensors: list[Tensor]) -> tuple[list, list[int], list[int]]:
    """(B, R, C), number of tiles and number of the first tile of each."""
    sizes = [_matrices(t) for t in tensors]
    counts = [math.prod(triton.cdiv(n, block) for n, block in zip(size, tile)) for size in sizes]
    return sizes, counts, starts(counts)


def _matrices(x: Tensor) -> tuple[int, int, int]:
    """(B, R, C) of a parameter or gradient."""
    if x.ndim < 2:
        return 1, 1, x.numel()
    return x.shape[:-2].numel(), x.shape[-2], x.shape[-1]


def _tile_of(x: Tensor) -> tuple[int, int, int]:
    """Tiles of about 8192 elements, nearly square; few kinds, each of which is a compilation and a launch."""
    _, R, C = _matrices(x)
    if x.ndim < 2:
        return 1, 1, 4096
    rows, cols = next(n for n in (4, 16, 64) if n >= R or n == 64), next(n for n in (4, 16, 128) if n >= C or n == 128)
    if cols == 128:
        return 1, rows, 8192 // rows
    if rows == 64:
        return 1, 8192 // cols, cols
    return 4096 // (rows * cols), rows, cols  # smaller: they keep more pointers


# --- spec -------------------------------------------------------------------------------------------------------------


_KINDS = ("param", "grad", "row_var", "col_var", "variance")


def updated(**inputs) -> tuple[Tensor, ...]:
    """`adafactor` as a function."""
    return on_clones(adafactor, _KINDS, inputs)


def updated_reference(**inputs) -> tuple[Tensor, ...]:
    """`reference` as a function."""
    return on_clones(reference, _KINDS, inputs)


def _shapes(case: Case) -> list[tuple[int, ...]]:
    return list(case.get("shapes") or [(case["B"], case["R"], case["C"]), (case["C"],)]) * case.get("copies", 1)


def _inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    # A step whose length is near the parameters' own size: a tolerance must not hide it.
    inputs: dict = {"step": 3, "lr": 0.4, "eps": (1e-5, 1e-3), "weight_decay": 0.1}
    inputs |= {name: case[name] for name in ("maximize", "d", "seed") if name in case}
    draw = drawing(torch.float32, device, generator)
    for index, shape in enumerate(_shapes(case)):
        inputs[f"param_{index}"], inputs[f"grad_{index}"] = draw(*shape).to(dtype), draw(*shape).to(dtype)
        if len(shape) > 1:
            inputs[f"row_var_{index}"] = draw(*shape[:-1], 1).square()
            inputs[f"col_var_{index}"] = draw(*shape[:-2], 1, shape[-1]).square()
        else:
            inputs[f"variance_{index}"] = draw(*shape).square()
    return inputs


def _traffic(case: Case, dtype: torch.dtype) -> Traffic:
    """Matrices: G three times, P twice (the RMS of P is that of the P that is then changed) and its write.

    Factors are written, as are the sums that they come from, and read four times in all.
    """
    shapes = _shapes(case)
    matrices = sum(math.prod(s) for s in shapes if len(s) > 1)
    factors = sum(math.prod(s) // s[-1] + math.prod(s) // s[-2] for s in shapes if len(s) > 1 and math.prod(s))
    vectors = sum(math.prod(s) for s in shapes if len(s) < 2)
    moved = dtype.itemsize * (6 * matrices + 5 * vectors) + 4 * (6 * factors + 3 * vectors)
    return Traffic(moved, 0, 14 * matrices + 12 * vectors)


SPECS = (KernelSpec(
    name="adafactor",
    function=updated,
    reference=updated_reference,
    inputs=_inputs,
    cases=(
        {"shapes": ((63, 100), (1000,), (3, 5), (7,), (2, 130, 3)), "seed": 1},
        {"shapes": ((65, 129), (1, 1), (), (4097,)), "maximize": True, "d": 2.0},
        {"shapes": ((30, 20, 3, 3), (2, 300), (70, 1)), "d": 2.0},
        {"shapes": ((1,),)},
        {"shapes": ((0, 4), (5, 4))},
    ),
    space={"B": range(1, 4), "R": range(1, 100), "C": range(1, 200), "maximize": (False, True), "d": (1.0, 3.0)},
    timed=(
        {"shapes": ((4096, 4096),)},
        {"shapes": ((1024, 4096), (4096, 1024), (1024,), (4096,)), "copies": 24, "seed": 1},
        {"shapes": ((512, 512, 3, 3), (512,)), "copies": 8},
    ),
    # fp32 sums over a few thousand squares, then roots and quotients: some of its roundings. In 16 bits P is rounded,
    # to either neighbour where that is at random.
    tolerance={torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3},
    traffic=_traffic,
    in_place=(functools.partial(on_keywords, adafactor, _KINDS), functools.partial(on_keywords, reference, _KINDS)),
),)  # fmt: skip
