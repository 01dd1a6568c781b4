"""The style of one module of a plan that was found: what it does before, in and after its forward.

enter   arguments whose gradients are sums over the ranks
narrow  arguments that every rank has whole, and of which it works on its part
parts   parameters that are not cut, since not every rank has a stretch of each of their parts: taken when they are used
leave   sum: its result is one over the ranks, and what is added to it is added once
        gather: its result is put together along the last dim
        copy: the gradient of its result is a sum over the ranks
        lookup: rows of other ranks are zeros in a sum

and with sequence parallelism (`core.parallel.infer.sequence`), of activations [B, L, D]:

splits    arguments of which a rank takes its rows
gathers   those of `enter` that are gathered, their gradients scattered
scatters  the sum leaves this rank's rows
joins     the result's rows are joined; how many features they have
sequence  how long the sequence is, for all modules of a list of blocks
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import Function

from core.comm.collectives import all_gather, copy_to, gather_from, join_from, reduce_from, scatter_to, split_to
from core.layout import is_dtensor, largest_share, shares
from core.parallel.draws import Part
from core.parallel.infer.axes import Dims, size_of
from core.parallel.infer.local import Cuts, around, carries, indices, local_size
from core.parallel.plan import to_local
from core.placement.style import AXIS, Cut, Message, Messages, Site, Style

Place = int | str
"""Of an argument: its position, or its keyword."""

between: ContextVar[bool] = ContextVar("between", default=False)
"""True while a style moves tensors, which is no operation of the model."""


@dataclass(frozen=True)
class Trial:
    """An axis over which nothing is sent: results have their shapes."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def get_local_rank(self) -> int:
        return 0


@contextmanager
def moving() -> Iterator[None]:
    token = between.set(True)
    try:
        yield
    finally:
        between.reset(token)


@dataclass
class Rows:
    """The sequence of which ranks have rows, in the forward that runs.

    What is recomputed in a backward must be of the forward that ran last, or of one of an equal length.
    """

    length: int = 0


@dataclass
class Role:
    """A module's way with its part of a model; see the module's docstring.

    cuts     parameters of which a rank has a stretch, or one of each of its parts: name -> cut
    partial  parameters whose gradients are sums over the ranks
    added    parameters that the module adds to its result: before the sum they are zeros
    sizes    attributes that the module's own code counts with, of the module or its config -> their values for a part
    enter    arguments -> their features
    features of the result
    each_row of a batch has a result of its own; positions have one for all
    rows     of the whole vocabulary, of lookups and of what is gathered
    ids      of a lookup, the argument that says which rows
    drops    of a module that draws masks of dropout: (dim, size) of what they are parts of; None: they are whole;
             UNCALLED: it was not called
    """

    cuts: dict[str, Cut] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    enter: dict[Place, int] = field(default_factory=dict)
    narrow: dict[Place, Dims] = field(default_factory=dict)
    parts: dict[str, Dims] = field(default_factory=dict)
    leave: Literal["", "sum", "gather", "copy", "lookup"] = ""
    added: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    features: int = 0
    each_row: bool = True
    rows: int = 0
    ids: Place = 0
    drops: tuple[int, int | None] | Literal["unknown", "uncalled"] | None = "unknown"
    splits: dict[Place, int] = field(default_factory=dict)
    gathers: set[Place] = field(default_factory=set)
    scatters: bool = False
    joins: int = 0
    sequence: Rows = field(default_factory=Rows)

    def style(self, cuts: Cuts) -> Style:
        forward: list[Message] = []
        backward: list[Message] = []
        if self.scatters:
            forward.append(Message("reduce_scatter", _elements(self.features)))
            backward.append(Message("all_gather", _elements(self.features)))
        elif self.leave:
            operation, moment = _MESSAGES[self.leave]
            elements = _elements(self.features, self.each_row)
            (forward if moment == "forward" else backward).append(Message(operation, elements))
        for place, features in self.enter.items():
            if place in self.gathers:
                forward.append(Message("all_gather", _elements(features)))
                backward.append(Message("reduce_scatter", _elements(features)))
            else:
                backward.append(Message("all_reduce", _elements(features)))
        backward += [Message("all_gather", _elements(features)) for features in self.splits.values()]
        if self.joins:
            forward.append(Message("all_gather", _elements(self.joins)))
        return Style(
            cuts=dict(self.cuts),
            partial=dict.fromkeys(sorted({*self.partial, *self.parts}), (AXIS,)),
            messages=Messages(tuple(forward), tuple(backward)),
            wrap=lambda module, axis: self.wrap(module, axis, cuts),
        )

    def wrap(self, module: Any, axis: Any, cuts: Cuts) -> Any:
        """The module, whose parameters are cut already, with a forward that does so."""
        for name, size in self.sizes.items():
            owner, _, leaf = name.rpartition(".")
            if owner and owner in vars(module):
                setattr(module, owner, copy.copy(getattr(module, owner)))  # other modules have it, too
            setattr(getattr(module, owner) if owner else module, leaf, size)
        if isinstance(self.drops, tuple):
            dim, size = self.drops
            module.part_of_draws = Part(dim, axis.get_local_rank(), axis.size(), size)
        elif self.drops != "unknown":
            module.part_of_draws = self.drops
        inner = _looking_up(module, axis, self.rows, self.ids) if self.leave == "lookup" else module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with moving():
                args, kwargs = self._given(args, kwargs, axis, cuts)
                seen = self._seen(module, axis, cuts)
            # A module's parameter slot takes only parameters, so what the forward sees shadows it in the instance …
            module.__dict__.update(seen)
            try:
                result = inner(*args, **kwargs)
            finally:
                for name in seen:  # … and leaves again, so that names and state stay.
                    module.__dict__.pop(name, None)
            with moving():
                return self._left(result, module, axis)

        module.forward = forward
        return module

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any], axis: Any, cuts: Cuts) -> tuple[Any, Any]:
        listed, named = list(args), dict(kwargs)

        def change(place: Place, by: Callable[[Tensor], Tensor]) -> None:
            where: Any = listed if isinstance(place, int) else named
            if isinstance(place, str) or place < len(listed):
                given = where.get(place) if isinstance(place, str) else where[place]
                if isinstance(given, Tensor):
                    where[place] = by(given)

        for place, dims in self.narrow.items():
            change(place, lambda x, dims=dims: part(_copy_to(x, axis) if x.requires_grad else x, dims, axis, cuts))
        for place in self.splits:  # before they may be gathered, where the first block hands them on to columns
            change(place, lambda x: _rows_taken(x, axis, self.sequence))
        for place in self.enter:
            if place in self.gathers:
                change(place, lambda x: _rows_gathered(x, axis, self.sequence))
            else:
                change(place, lambda x: _copy_to(x, axis))
        return tuple(listed), named

    def _seen(self, module: Any, axis: Any, cuts: Cuts) -> dict[str, Any]:
        """The parameters that the forward sees."""
        seen: dict[str, Any] = {}
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if name in self.parts:
                seen[name] = part(parameter, self.parts[name], axis, cuts)
            elif is_dtensor(parameter):
                seen[name] = to_local(parameter)
            if name in self.added:
                seen[name] = torch.zeros_like(seen.get(name, parameter))
        return seen

    def _left(self, result: Any, module: Any, axis: Any) -> Any:
        if self.leave == "copy":
            return _copy_to(result, axis)
        if self.leave == "gather":
            return _gather(result, self.rows, axis)
        if self.joins:
            first, *rest = result if isinstance(result, tuple) else (result,)
            first = _rows_joined(first, axis, self.sequence)
            return (first, *rest) if isinstance(result, tuple) else first
        if self.leave in ("sum", "lookup"):
            result = _rows_scattered(result, axis) if self.scatters else _sum(result, axis)
        for name in sorted(self.added):
            added = module._parameters[name]
            result = result + (to_local(added) if is_dtensor(added) else added)
        return result


def _copy_to(x: Tensor, axis: Any) -> Tensor:
    return x if isinstance(axis, Trial) else copy_to(x, axis)


def _sum(x: Tensor, axis: Any) -> Tensor:
    return x if isinstance(axis, Trial) else reduce_from(x, axis)


def _gather(x: Tensor, rows: int, axis: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows) if isinstance(axis, Trial) else _Gather.apply(x, rows, axis)


def _rows_taken(x: Tensor, axis: Any, rows: Rows) -> Tensor:
    """x[B, L, D] -> this rank's [B, ceil(L / tp), D], the last ones filled with zeros."""
    rows.length = x.shape[1]
    return x[:, : largest_share(rows.length, axis.size())] if isinstance(axis, Trial) else split_to(x, 1, axis)


def _rows_joined(x: Tensor, axis: Any, rows: Rows) -> Tensor:
    whole = _longer(x, axis) if isinstance(axis, Trial) else join_from(x, 1, axis)
    return whole[:, : rows.length].contiguous()


def _rows_gathered(x: Tensor, axis: Any, rows: Rows) -> Tensor:
    whole = _longer(x, axis) if isinstance(axis, Trial) else gather_from(x, 1, axis)
    return whole[:, : rows.length].contiguous()


def _rows_scattered(x: Tensor, axis: Any) -> Tensor:
    return x[:, : largest_share(x.shape[1], axis.size())] if isinstance(axis, Trial) else scatter_to(x, 1, axis)


def _longer(x: Tensor, axis: Any) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] * axis.size(), *x.shape[2:])


_MESSAGES = {
    "sum": ("all_reduce", "forward"),
    "lookup": ("all_reduce", "forward"),
    "gather": ("all_gather", "forward"),
    "copy": ("all_reduce", "backward"),
}
"""The message of each way to leave, and when it is sent."""


def _elements(features: int, each_row: bool = True) -> Callable[[Site], float]:
    return lambda site: (site.batch if each_row else 1) * site.length * features


def part(x: Tensor, dims: Dims, axis: Any, cuts: Cuts) -> Tensor:
    """This rank's part of a whole tensor."""
    for place, dim in enumerate(dims):
        if carries(dim, cuts):
            outer, inner = around(dim, cuts)
            if isinstance(axis, Trial):  # on tensors without values, where every operator takes a millisecond
                own = torch.zeros(local_size(inner, cuts, axis.size()), dtype=torch.int64, device=x.device)
            else:
                own = indices(inner, cuts, axis.size(), axis.get_local_rank()).to(x.device)
            if not outer:
                x = x.index_select(place, own)
            else:  # rows of a batch, of which there may be any number
                apart = x.unflatten(place, (-1, size_of(inner)))
                x = apart.index_select(place + 1, own).flatten(place, place + 1)
    return x


def _looking_up(module: Any, axis: Any, rows: int, place: Place) -> Callable[..., Tensor]:
    """The forward of an embedding that has some of the rows; a row of padding learns nothing, wherever it is."""
    inner, padding = module.forward, getattr(module, "padding_idx", None)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        ids = args[place] if isinstance(place, int) else kwargs[place]
        with moving():
            weight = module.weight
            if weight.shape[0] == 0:
                return weight.new_zeros(*ids.shape, weight.shape[1])
            own = shares(rows, axis.size())[axis.get_local_rank()]
            elsewhere = (ids < own.start) | (ids >= own.stop)
            if padding is not None:
                module.padding_idx = padding - own.start if own.start <= padding < own.stop else None
            try:
                here = (ids - own.start).masked_fill(elsewhere, 0)
                if isinstance(place, int):
                    args = (*args[:place], here, *args[place + 1 :])
                else:
                    kwargs = kwargs | {place: here}
                found = inner(*args, **kwargs)
            finally:
                if padding is not None:
                    module.padding_idx = padding
            return found.masked_fill(elsewhere.unsqueeze(-1), 0.0)

    return forward


class _Gather(Function):
    """x[.., V_tp], ragged -> [.., V] on every rank, who go on alike; the gradient is this rank's part of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, axis: Any) -> Tensor:
        ctx.own = shares(rows, axis.size())[axis.get_local_rank()]
        padded = nn.functional.pad(x, (0, largest_share(rows, axis.size()) - x.shape[-1]))
        return all_gather(padded, x.ndim - 1, axis)[..., :rows]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0][..., ctx.own].contiguous(), None, None
