"""The triangle multiplicative update in place, in three orders. All give what core's kernel gives, to rounding.

Every result (i, j) needs the old rows i and j whole, so a row must not be written before all others have read it.
Channels of the product have nothing to do with each other until it is normalised:

`in_channels`: 1. the norm of all of z
               2. some channels at a time: a and b of all rows, and their product, matrices of the full size
               3. slice by slice of rows: the result over z's rows                                 3 z in all

Incoming edges are the same on the transpose with a and b exchanged: with z' = z^T, x'_ji = sum_k b(z'_jk) a(z'_ik). So
the other two orders are written for outgoing edges, x_ij = sum_k a_ik b_jk.

`in_copied_order`: 1. b of all rows, slice by slice, into a tensor of z's size
                   2. slice by slice: a, the product with all of b, the result over z's rows.           2 z in all
`in_cross_order`:  for each tile t of rows, of T:
                   1. a and b of the rows of t, which nobody needs in z from now on
                   2. the cells (t, before t), made in earlier turns, go from the pool to their place
                   3. for each slice J of the rows t and after it: a and b of J; the cells (t, J) go to their place, the
                      cells (J, t) into the pool, since others still need the old row J
                   The pool holds at most (T - 1 - t)(t + 1) of T^2 cells: a quarter of z.             1.25 z in all
                   Projections are computed (T + 1) / 2 times; nothing is approximated.

Shapes: B batch, N residues, I or J some rows, Z = c_z channels, C channels of the product.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from apps.fold.model.triangle import TriangleMultiplication
from apps.fold.subbatch.slices import (
    Cuts,
    How,
    collect,
    collect_rows,
    each,
    empty_beside,
    enough,
    put,
    send,
    settle,
    update_rows,
)
from core.kernels.gated_output import gated_residual
from core.kernels.matmul import linear
from core.kernels.triangle import norm_channels_last, pair_factors, pair_product
from core.link import Coming

A, B = 0, 1


class Product:
    """The steps of `core.kernels.triangle.triangle_multiply`, for some rows at a time."""

    def __init__(self, module: TriangleMultiplication):
        self.module = module
        weights, biases = module.get_parameter("in_weight").chunk(4), module.get_parameter("in_bias").chunk(4)
        self.projections = [
            (torch.cat([weights[side], weights[side + 2]]), torch.cat([biases[side], biases[side + 2]]))
            for side in (A, B)
        ]
        if not module.outgoing:
            self.projections.reverse()

    def norm(self, z_BIJZ: Tensor) -> Tensor:
        weight, bias = self.module.get_parameter("norm_weight"), self.module.get_parameter("norm_bias")
        return F.layer_norm(z_BIJZ, weight.shape, weight, bias)

    def factor(self, n_BINZ: Tensor, mask_BIN: Tensor, side: int) -> Tensor:
        """a or b of some rows, channels first: [B, C, I, N]."""
        weight, bias = self.projections[side]
        if len(weight) % 4:  # what follows makes two tensors of equal width
            p, g = linear(n_BINZ, weight, bias).chunk(2, -1)
            return (torch.sigmoid(g) * p * mask_BIN[..., None].to(p.dtype)).movedim(-1, 1).contiguous()
        return torch.cat(pair_factors(n_BINZ, weight, bias, mask_BIN), 1)

    def result(self, x_BCIJ: Tensor, z_BIJZ: Tensor, n_BIJZ: Tensor | None = None) -> Tensor:
        """z and its update, of z's shape, from the product."""
        weight = self.module.get_parameter
        y = norm_channels_last(x_BCIJ, weight("product_norm_weight"), weight("product_norm_bias"))
        del x_BCIJ
        y = linear(y, weight("out_weight"))
        n = self.norm(z_BIJZ) if n_BIJZ is None else n_BIJZ
        del n_BIJZ
        gate = linear(n, weight("gate_weight"), weight("gate_bias"))
        del n
        return gated_residual(y, gate=gate, bias=weight("out_bias"), residual=z_BIJZ)


def multiply(
    module: TriangleMultiplication, whole: Callable[..., Tensor], how: How, cuts: Cuts, z: Tensor, mask: Tensor
) -> Tensor:
    """The update of z[B, N, N, Z], in place where no gradient is recorded; with gradients as the model has it."""
    if torch.is_grad_enabled():
        return whole(z, mask)
    if how.method == "whole":
        return update_rows(z, mask, [slice(0, z.shape[1])], lambda _, rows: whole(rows.take(), mask))
    if how.method == "channels":
        _in_channels(module, how, cuts, z, mask)
        return z
    z_BNNZ, mask_BNN = (z, mask) if module.outgoing else (z.transpose(1, 2), mask.transpose(1, 2))
    (_in_copied_order if how.method == "copy" else _in_cross_order)(Product(module), how, cuts, z_BNNZ, mask_BNN)
    return z


def _factor_of(
    product: Product, z: Tensor, mask: Tensor, sides: tuple[int, ...], cuts: list[slice], length: int | None = None
) -> list[Tensor]:
    """Factors [B, C, I, N] of the rows that `cuts` covers (or of `length` rows), made slice by slice."""
    first, last = cuts[0].start, cuts[-1].stop if length is None else cuts[0].start + length
    out: list[Tensor] = []

    def make(at: slice, z_BINZ: Coming) -> None:
        n = product.norm(z_BINZ.take())
        for number, side in enumerate(sides):
            factor = product.factor(n, mask[:, at], side)
            if len(out) < len(sides):
                shape = (*factor.shape[:2], last - first, factor.shape[3])
                out.append(factor if factor.shape == shape else factor.new_empty(shape))
            if out[number] is not factor:
                out[number][:, :, at.start - first : at.stop - first].copy_(factor)

    each(z, mask, cuts, lambda at: [z[:, at]], make)
    return out


def _in_channels(module: TriangleMultiplication, how: How, cuts: Cuts, z_BNNZ: Tensor, mask_BNN: Tensor) -> None:
    product, N = Product(module), z_BNNZ.shape[1]
    slices = cuts(N, how.rows, enough(z_BNNZ, 2))
    n_BNNZ = collect_rows(z_BNNZ, mask_BNN, slices, 1, lambda _, z_BINZ: product.norm(z_BINZ.take()))
    weight_4CZ, bias_4C = (module.get_parameter(name).unflatten(0, (4, -1)) for name in ("in_weight", "in_bias"))
    C = bias_4C.shape[1]

    def product_of(at: slice) -> Tensor:
        a, b = pair_factors(n_BNNZ, weight_4CZ[:, at].flatten(0, 1), bias_4C[:, at].flatten(), mask_BNN)
        return pair_product(a, b, outgoing=module.outgoing)

    x_BCNN = collect(C, cuts(C, how.tile, 2), 1, product_of)

    def rows(at: slice, z_BINZ: Coming) -> Tensor:
        return product.result(x_BCNN[:, :, at], z_BINZ.take(), n_BNNZ[:, at])

    update_rows(z_BNNZ, mask_BNN, slices, rows)


def _in_copied_order(product: Product, how: How, cuts: Cuts, z_BNNZ: Tensor, mask_BNN: Tensor) -> None:
    slices = cuts(z_BNNZ.shape[1], how.rows, enough(z_BNNZ, 2))
    (b_BCNN,) = _factor_of(product, z_BNNZ, mask_BNN, (B,), slices, z_BNNZ.shape[1])

    def rows(at: slice, coming: Coming) -> Tensor:
        z_BINZ = coming.take()
        n_BINZ = product.norm(z_BINZ)
        x_BCIN = pair_product(product.factor(n_BINZ, mask_BNN[:, at], A), b_BCNN, outgoing=True)
        return product.result(x_BCIN, z_BINZ, n_BINZ)

    update_rows(z_BNNZ, mask_BNN, slices, rows)


class _Turn(NamedTuple):
    """Some rows J of a tile u, which meet the rows of tile t: the cells (t, J), and where u is not t (J, t)."""

    rows: slice
    place: Tensor | None
    """where the new (J, t) wait; None where u is t"""


def _in_cross_order(product: Product, how: How, cuts: Cuts, z_BNNZ: Tensor, mask_BNN: Tensor) -> None:
    batch, N, _, Z = z_BNNZ.shape
    tiles, num_tiles = cuts(N, how.tile, enough(z_BNNZ) + 1), -(-N // how.tile)
    num_cells = max((num_tiles - 1 - t) * (t + 1) for t in range(num_tiles))
    pool = empty_beside(z_BNNZ, num_cells, batch, how.tile, how.tile, Z)
    free, waiting = list(range(num_cells)), dict[tuple[int, int], int]()  # (row's tile, column's tile) -> cell

    def cell(number: int, rows: slice, columns: slice) -> Tensor:
        return pool[number][:, : rows.stop - rows.start, : columns.stop - columns.start]

    def turns(t: int) -> Iterator[_Turn]:
        for u in range(t, len(tiles)):
            place = cell(waiting[u, t], tiles[u], tiles[t]) if u > t else None
            for part in _within(tiles[u], cuts, how.rows, enough(z_BNNZ)):
                here = slice(part.start - tiles[u].start, part.stop - tiles[u].start)
                yield _Turn(part, None if place is None else place[:, here])

    for t, at in enumerate(cuts(N, how.tile, 2)):
        own = _within(at, cuts, how.rows, enough(z_BNNZ, 2))
        a_BCIN, b_BCIN = _factor_of(product, z_BNNZ, mask_BNN, (A, B), own, at.stop - at.start)
        if t > 0:
            settle(z_BNNZ, mask_BNN)
        for s, before in enumerate(tiles[:t]):
            number = waiting.pop((t, s))
            put(z_BNNZ[:, at, before], cell(number, at, before))
            free.append(number)
        waiting |= {(u, t): free.pop() for u in range(t + 1, len(tiles))}
        _meet(product, at, a_BCIN, b_BCIN, turns(t), z_BNNZ, mask_BNN)
        del a_BCIN, b_BCIN


def _within(tile: slice, cuts: Cuts, rows: int, enough: int) -> list[slice]:
    """Slices of a tile's rows."""
    return [slice(tile.start + s.start, tile.start + s.stop) for s in cuts(tile.stop - tile.start, rows, enough)]


def _meet(
    product: Product, at: slice, a_BCIN: Tensor, b_BCIN: Tensor, turns: Iterable[_Turn], z_BNNZ: Tensor,
    mask_BNN: Tensor,
) -> None:  # fmt: skip
    """New values of the cells of the rows `at`, whose factors are a and b, and of each turn's."""

    def views(turn: _Turn) -> list[Tensor]:
        own = [z_BNNZ[:, at, turn.rows]]
        return own if turn.place is None else [*own, z_BNNZ[:, turn.rows], z_BNNZ[:, turn.rows, at]]

    def result(a: Tensor, b: Tensor, z_BIJZ: Coming) -> Tensor:
        return product.result(pair_product(a, b, outgoing=True), z_BIJZ.take())

    def part(turn: _Turn, z_BIJZ: Coming, *others: Coming) -> None:
        place = z_BNNZ[:, at, turn.rows]
        if turn.place is None:
            here = slice(turn.rows.start - at.start, turn.rows.stop - at.start)
            send(place, result(a_BCIN, b_BCIN[:, :, here], z_BIJZ))
            return
        z_BJNZ, z_BJIZ = others
        n_BJNZ = product.norm(z_BJNZ.take())
        a_BCJN, b_BCJN = (product.factor(n_BJNZ, mask_BNN[:, turn.rows], side) for side in (A, B))
        del n_BJNZ
        send(place, result(a_BCIN, b_BCJN, z_BIJZ))
        send(turn.place, result(a_BCJN, b_BCIN, z_BJIZ))

    each(z_BNNZ, mask_BNN, turns, views, part)
