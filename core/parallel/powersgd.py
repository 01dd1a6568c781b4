"""PowerSGD: gradients of matrices sent as products of two thin ones, with warm start and error feedback.

For a matrix G_w[M, N] of rank w of the data-parallel ranks, with its error E_w and a basis Q[N, r] alike on all ranks:

    C_w = G_w + E_w
    P   = sum over w of C_w Q                all-reduced, r M elements
    P   = orthonormal columns of P           (`orthonormal`)
    Q_w = C_w^T P
    E_w = C_w - P Q_w^T
    Q   = sum over w of Q_w                  all-reduced, r N elements
    G^  = P Q^T                              the projection of the sum of all C_w; Q begins the next step

Everything is linear in C_w but for P, which the ranks share: n ranks do what one rank does with the sum of their
gradients and errors. The paper's E_w = C_w - G^ / n has the same sum over w, and so gives the same G^ in every step;
but each rank's then also sums up how its gradients differ from the mean, a walk without bound. Here it is what of its
own matrix was not sent.

Q begins normally distributed, seeded by the parameter's name. A column of P that the ones before it leave nothing of is
zero, not noise that is scaled up, and begins the next step as it began the first.

A parameter W[O, I, ..] is the matrix [O, I ..], or with three dims the stack of O matrices [I, ..] where that sends
less, as of experts' weights. It is compressed where r (M + N) < M N; vectors go whole. What a plan has cut stays so,
and cutting changes nothing: where rows are cut, Q_w is summed over that axis and P gathered; where columns are, P is
summed.

Vogels et al. 2019, PowerSGD, arXiv:1905.13727, algorithms 1 and 2.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from core.layout import Layout, boxes_of, tag
from core.mesh import sub_mesh
from core.parallel.feedback import Feedback, sum_together

NEGLIGIBLE = 1e-4
"""Of a column's norm, what the columns before it have to leave of it."""


def stack_dims(shape: Sequence[int], rank: int) -> int | None:
    """How many dims of a parameter count matrices, 0 or 1, where it is sent in fewer elements; None: it goes whole."""
    whole = math.prod(shape)
    if len(shape) < 2 or not whole:
        return None
    dims = min((0, 1) if len(shape) == 3 else (0,), key=lambda dims: _sent(shape, dims))
    return dims if rank * _sent(shape, dims) < whole else None


def _sent(shape: Sequence[int], dims: int) -> int:
    """B (M + N)."""
    return math.prod(shape[:dims]) * (shape[dims] + math.prod(shape[dims + 1 :]))


@dataclass(frozen=True)
class Matrices:
    """A parameter as matrices [B, M, N], of which this rank has [B', M', N'].

    layout  of the parameter in forwards
    dims    dims of it that count matrices: see `stack_dims`
    """

    layout: Layout
    dims: int
    rank: int

    @cached_property
    def local(self) -> tuple[int, int, int]:
        """B', M', N'."""
        shape, dims = self.layout.local_shape(), self.dims
        return math.prod(shape[:dims]), shape[dims], math.prod(shape[dims + 1 :])

    @cached_property
    def row_axes(self) -> tuple[str, ...]:
        """Axes of several ranks that cut rows."""
        return self._axes(lambda dim: dim == self.dims)

    @cached_property
    def column_axes(self) -> tuple[str, ...]:
        return self._axes(lambda dim: dim > self.dims)

    def _axes(self, wanted: Any) -> tuple[str, ...]:
        axes = dict.fromkeys(axis for axis, dim in self.layout.cuts if wanted(dim))
        return tuple(axis for axis in axes if self.layout.axis_size(axis) > 1)

    @cached_property
    def basis(self) -> Layout:
        """Where Q lies: [O, I .., r] of a stack, else [I .., r], cut as these dims are."""
        shape, rows = self.layout.shape, self.dims
        cuts = tuple((axis, dim - (dim > rows)) for axis, dim in self.layout.cuts if dim != rows)
        return replace(self.layout, shape=(*shape[:rows], *shape[rows + 1 :], self.rank), cuts=cuts)

    def messages(self) -> Iterator[tuple[str, int]]:
        """(axis, elements) of the all-reduces of a step; "" for the data-parallel ranks."""
        stack, rows, columns = self.local
        yield "", stack * rows * self.rank
        yield "", stack * columns * self.rank
        for axis in self.column_axes:
            yield axis, stack * rows * self.rank
        for axis in self.row_axes:
            yield axis, stack * self.layout.shape[self.dims] * self.rank
            yield axis, stack * columns * self.rank


class PowerSGD(Feedback):
    """Of parameters that `stack_dims` tells; option: rank.

    bases  name -> Q [B', N', r] of this rank, with which the next step begins
    """

    name = "powersgd"

    def begin(self, dtype: torch.dtype, device: torch.device) -> None:
        super().begin(dtype, device)
        rank = self.options["rank"]
        self.matrices: dict[str, Matrices] = {}
        for name in self.names:
            layout = self.table[name].layout
            dims = stack_dims(layout.shape, rank)
            assert dims is not None, name
            self.matrices[name] = Matrices(layout, dims, rank)
        self._first = {n: self._drawn(n, m.basis).to(device, dtype) for n, m in self.matrices.items()}
        self.bases = {name: first.clone() for name, first in self._first.items()}
        self._next: dict[str, Tensor] = {}

    def _drawn(self, name: str, layout: Layout) -> Tensor:
        digest = hashlib.blake2b(f"powersgd/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
        whole = torch.empty(layout.shape, dtype=torch.float64, device="cpu").normal_(generator=generator)
        stack, _, columns = self.matrices[name].local
        return layout.local(whole).reshape(stack, columns, layout.shape[-1])

    def exchange(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        of = {name: self.matrices[name] for name in given}
        c_BMN = {name: given[name].view(m.local) for name, m in of.items()}
        p_BMr = {name: c @ self.bases[name] for name, c in c_BMN.items()}
        sum_together(list(p_BMr.values()), self.axis)
        self._sum_over({name: m.column_axes for name, m in of.items()}, p_BMr)
        whole = self._gathered(p_BMr)
        orthonormal_together(whole)
        p_BMr = {name: self._own_rows(name, p) for name, p in whole.items()}
        q_BNr = {name: c.mT @ p_BMr[name] for name, c in c_BMN.items()}
        self._sum_over({name: m.row_axes for name, m in of.items()}, q_BNr)
        for name, c in c_BMN.items():
            c.baddbmm_(p_BMr[name], q_BNr[name].mT, alpha=-1)
        sum_together(list(q_BNr.values()), self.axis)
        for name, q in q_BNr.items():
            is_gone = (whole[name] == 0).all(1, keepdim=True)
            self._next[name] = torch.where(is_gone, self._first[name], q)
        return {name: (p_BMr[name] @ q.mT).view_as(given[name]) for name, q in q_BNr.items()}

    def _sum_over(self, axes: Mapping[str, tuple[str, ...]], tensors: Mapping[str, Tensor]) -> None:
        """Sum each tensor over its axes, those of one axis in one message."""
        for axis in dict.fromkeys(axis for own in axes.values() for axis in own):
            sum_together([tensors[name] for name, own in axes.items() if axis in own], sub_mesh(self.mesh, axis))

    def _gathered(self, p_BMr: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All rows of each P, where a rank has a part of them."""
        found, axes = dict(p_BMr), {name: self.matrices[name].row_axes for name in p_BMr}
        for name in (name for name, own in axes.items() if own):
            own, m = p_BMr[name], self.matrices[name]
            found[name] = own.new_zeros(own.shape[0], m.layout.shape[m.dims], own.shape[2])
            for here, there in self._rows(name):
                found[name][:, there] = own[:, here]
        self._sum_over(axes, found)
        return found

    def _own_rows(self, name: str, whole: Tensor) -> Tensor:
        if not self.matrices[name].row_axes:
            return whole
        return torch.cat([whole[:, there] for _, there in self._rows(name)], 1)

    def _rows(self, name: str) -> Iterator[tuple[slice, slice]]:
        """(where in this rank's rows, where in all) of each stretch of them."""
        m = self.matrices[name]
        for (here,), (there,) in boxes_of((m.layout.stretches()[m.dims],)):
            yield here, there

    def commit(self) -> None:
        super().commit()
        self.bases |= self._next
        self._next = {}

    def discard(self) -> None:
        super().discard()
        self._next = {}

    def own_tensors(self) -> dict[str, Tensor]:
        layouts = {name: m.basis for name, m in self.matrices.items()}
        shaped = {n: self.bases[n].view(layout.local_shape()) for n, layout in layouts.items()}
        return {f"basis/{name}": tag(basis, layouts[name]) for name, basis in shaped.items()}


def orthonormal_together(matrices: dict[str, Tensor]) -> None:
    """`orthonormal` of each, in place in the dict: those of alike rows at once."""
    alike: dict[tuple[int, int], list[str]] = {}
    for name, p_BMr in matrices.items():
        alike.setdefault((p_BMr.shape[1], p_BMr.shape[2]), []).append(name)
    for names in alike.values():
        made = orthonormal(torch.cat([matrices[name] for name in names]))
        matrices |= zip(names, made.split([len(matrices[name]) for name in names]), strict=True)


def orthonormal(columns_BMr: Tensor) -> Tensor:
    """Orthonormal columns that span what these do: Gram-Schmidt, in their order, twice.

    A column of which those before it leave less than NEGLIGIBLE is zero: what is left of it is noise, which differs
    from one number of ranks to another.
    """
    found = torch.zeros_like(columns_BMr)
    for index in range(columns_BMr.shape[2]):
        before, column = found[:, :, :index], columns_BMr[:, :, index : index + 1]
        size = torch.linalg.vector_norm(column, dim=1, keepdim=True)
        for _ in range(2 if index else 0):
            column = column - before @ (before.mT @ column)
        left = torch.linalg.vector_norm(column, dim=1, keepdim=True)
        kept = left > NEGLIGIBLE * size
        found[:, :, index : index + 1] = torch.where(kept, column / torch.where(kept, left, 1), 0)
    return found
