"""What K-FAC sees of a model at work: sums over the inputs of its layers and the gradients of their outputs.

Forward hooks take a layer's input, and leave a hook on its output that takes the gradient when it comes. Nothing is
kept but the sums, in the wide format. What ranks of tensor parallelism cut of a layer's features is put together, one
message a layer; what they hold alike counts once.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from core.config import UserError
from core.layout import Layout
from core.optim.kfac_layers import (
    Layer,
    Sharing,
    Use,
    gradient_rows,
    input_rows,
    outer_sum,
    packed,
    packed_size,
)
from core.optim.sharded import wide_dtype


@dataclass(frozen=True)
class Cut:
    """How ranks of tensor parallelism share a layer.

    copies    ranks of them, 1: none
    layout    of the weight in forwards
    dim       of the weight that is cut; None: it is whole on each
    group     those ranks
    """

    copies: int = 1
    layout: Layout | None = None
    dim: int | None = None
    group: ProcessGroup | None = None

    def whole(self, x: Tensor, feature_dim: int) -> Tensor:
        """x with the features of all ranks, from those that this one has."""
        assert self.layout is not None
        assert self.dim is not None
        shape = list(x.shape)
        shape[feature_dim] = self.layout.shape[self.dim]
        made, start, dim = x.new_zeros(shape), 0, feature_dim % x.ndim
        for stretch in self.layout.stretches()[self.dim]:
            made.narrow(dim, stretch.start, len(stretch)).copy_(x.narrow(dim, start, len(stretch)))
            start += len(stretch)
        dist.all_reduce(made, group=self.group)
        return made


@dataclass
class _Recording:
    """rows: of the microbatch, None: those of each input; factor: times a gradient, what it is of one item's loss;
    length: of a row's sequence, None: what layers are given is that long"""

    rows: int | None
    factor: float
    length: int | None
    outputs: list[Tensor]


@dataclass
class Seen:
    """Sums of one use: inputs (packed), their number, gradients (packed); squares of V's entries in a basis."""

    inputs: Tensor
    cases: float
    gradients: Tensor
    squares: Tensor | None = None


class Observer:
    """The sums of a model's layers since the last `clear`; fp32 or wider.

    cuts   of each use of each layer
    bases  layer -> (Q_R, Q_C), of the layers whose squares in a basis are summed, too
    """

    def __init__(self, layers: Sequence[Layer], cuts: Sequence[Sequence[Cut]], sharing: Sharing):
        self.layers = layers
        self.sharing: Sharing = sharing
        self._copies = max(cut.copies for of_layer in cuts for cut in of_layer)
        self.bases: dict[int, tuple[Tensor, Tensor]] = {}
        self.items = 0.0
        self.seen: dict[tuple[int, int], Seen] = {}
        self._recording: _Recording | None = None
        own = weakref.ref(self)
        for index, layer in enumerate(layers):
            for use_index, use in enumerate(layer.uses):
                cut = cuts[index][use_index]
                hook = _hook(own, (index, use_index), layer, use, cut)
                use.module.register_forward_hook(hook, with_kwargs=True)

    def clear(self) -> None:
        self.items, self.seen = 0.0, {}

    @contextmanager
    def recording(
        self, items: float, rows: int | None, factor: float, length: int | None = None
    ) -> Iterator[list[Tensor]]:
        """Surround a forward; gradients are taken whenever they come. Yields the outputs of its layers."""
        before, self._recording = self._recording, _Recording(rows, factor, length, [])
        self.items += items
        try:
            yield self._recording.outputs
        finally:
            self._recording = before

    def sizes(self) -> list[tuple[int, int, int, int]]:
        """Elements of a use's sums in a message: inputs, their number, gradients, squares; use by use."""
        found = []
        for index, layer in enumerate(self.layers):
            r, c = map(packed_size, layer.factor_shapes())
            squares = layer.shape[0] * layer.shape[1] if index in self.bases else 0
            found += [(r, 1, c, squares) if use.inputs_first else (c, 1, r, squares) for use in layer.uses]
        return found

    def message(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """All sums one behind the other, and the number of items; zeros of what was not used."""
        parts, sizes = [], iter(self.sizes())
        for index, layer in enumerate(self.layers):
            for use_index in range(len(layer.uses)):
                seen, size = self.seen.get((index, use_index)), next(sizes)
                if seen is None:
                    parts.append(torch.zeros(sum(size), device=device, dtype=dtype))
                else:
                    cases = torch.tensor([seen.cases], device=device, dtype=dtype)
                    parts += [seen.inputs.to(device, dtype), cases, seen.gradients.to(device, dtype)]
                    if index in self.bases:
                        assert seen.squares is not None
                        parts.append(seen.squares.flatten().to(device, dtype))
        return torch.cat([*parts, torch.tensor([self.items / self._copies], device=device, dtype=dtype)])

    def _sharing_of(self, use: Use) -> Sharing:
        """Looked-up rows are cases of their own: their mean is none of the table's."""
        if use.kind == "embedding":
            return "expand"
        return self.sharing

    @torch.no_grad()
    def take(self, key: tuple[int, int], layer: Layer, use: Use, cut: Cut, x: Tensor, y: Tensor) -> None:
        """Note an input, and wait for the gradient of what it became."""
        now = self._recording
        assert now is not None
        if not y.requires_grad:
            raise UserError(
                f"kfac: {use.name or 'the model'} is computed without a graph, and no gradient comes to it; use "
                "--recompute.mode none or full, or leave it out: --optim.exclude"
            )
        sharing = self._sharing_of(use)
        rows = now.rows if now.rows is not None else len(x)
        if rows and x.shape[0] % rows:
            raise UserError(
                f"kfac: {use.name} is given {x.shape[0]} rows of a microbatch of {rows}, and what it does to all of "
                f"them at once has no factors; leave it out: --optim.exclude '{use.name}'"
            )
        whole_x, input_share, gradient_share = _shares(use, cut, x, y, now.length)
        cases = input_rows(use, whole_x, layer.bias is not None, rows, sharing)
        inputs_size, gradients_size = layer.shape if use.inputs_first else layer.shape[::-1]
        inputs_short, gradients_short = layer.diagonal if use.inputs_first else layer.diagonal[::-1]
        wide = wide_dtype(y.dtype)
        cases = cases.to(wide) if cases.is_floating_point() else cases
        total = packed(outer_sum(cases, inputs_size, inputs_short).to(wide)) * input_share
        seen = self.seen.get(key)
        if seen is None:
            size = packed_size((gradients_size,) if gradients_short else (gradients_size, gradients_size))
            seen = self.seen[key] = Seen(torch.zeros_like(total), 0.0, total.new_zeros(size))
            seen.squares = total.new_zeros(layer.shape) if key[0] in self.bases else None
        seen.inputs += total
        seen.cases += input_share * len(cases)
        now.outputs.append(y)
        observer, factor = weakref.ref(self), now.factor
        kept = x if use.kind == "embedding" else x.detach()[:0]
        q_inputs, q_gradients = self._oriented(key[0])
        projected = None if q_inputs is None else (cases @ q_inputs).square_()

        def arrived(gradient: Tensor) -> None:
            own = observer()
            if own is None or own.seen.get(key) is not seen:
                return  # the sums were taken, or thrown away, before it came
            with torch.no_grad():
                g = gradient
                if cut.dim is not None and _role(use, cut.dim) == "gradient":
                    g = cut.whole(g, 1 if use.kind == "conv" else -1)
                g = gradient_rows(use, g, kept, rows, sharing).to(wide) * factor
                seen.gradients.add_(packed(outer_sum(g, gradients_size, gradients_short)), alpha=gradient_share)
                if projected is not None and seen.squares is not None:
                    both = (g @ q_gradients).square_().T @ projected
                    seen.squares.add_(both.T if layer.inputs_first else both, alpha=gradient_share)

        y.register_hook(arrived)

    def _oriented(self, index: int) -> tuple[Any, Any]:
        """The bases of a layer's inputs and gradients; None where there are none."""
        q_r, q_c = self.bases.get(index, (None, None))
        return (q_r, q_c) if self.layers[index].inputs_first else (q_c, q_r)


def _hook(own: Any, key: tuple[int, int], layer: Layer, use: Use, cut: Cut) -> Callable[..., None]:
    def hook(module: Any, args: tuple[Any, ...], named: dict[str, Any], y: Tensor) -> None:
        observer = own()
        if observer is not None and observer._recording is not None and torch.is_grad_enabled():
            observer.take(key, layer, use, cut, next(iter((*args, *named.values()))), y)

    return hook


def _role(use: Use, dim: int) -> str:
    return "input" if (dim == 0) == use.inputs_first else "gradient"


def _shares(use: Use, cut: Cut, x: Tensor, y: Tensor, length: int | None) -> tuple[Tensor, float, float]:
    """The whole input, and the shares that a rank's sums of inputs and gradients have in those of all ranks.

    Under tensor parallelism activations are alike on the ranks, or each has a part of the sequence on one side of the
    layer. A sequence that the ranks do not divide is filled up with places that are not counted; no gradient comes to
    them.
    """
    if cut.copies == 1:
        return x, 1.0, 1.0
    alike = 1 / cut.copies
    in_rows = x.ndim > 1 and use.kind != "conv"
    cut_x, cut_y = False, False
    if in_rows and cut.dim is not None and y.ndim > 2:
        cut_x, cut_y = x.shape[1] < y.shape[1], y.shape[1] < x.shape[1]
    if length is None and y.ndim > 2:
        length = y.shape[1]
    if cut_x:
        assert length is not None
        start = dist.get_rank(cut.group) * x.shape[1]
        x = x[:, : max(0, min(x.shape[1], length - start))]
    elif in_rows and x.ndim > 2 and length is not None and x.shape[1] == -(-length // cut.copies) * cut.copies:
        x = x[:, :length]
    if cut.dim is not None and not cut_x and _role(use, cut.dim) == "input" and use.kind != "embedding":
        x = cut.whole(x, 1 if use.kind == "conv" else -1)
    return x, 1.0 if cut_x else alike, 1.0 if cut_y else alike
