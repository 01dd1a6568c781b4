"""What K-FAC sees of a model at work: sums over the inputs of its layers and the gradients of their outputs.

Forward hooks take a layer's input, and leave a hook on its output that takes the gradient when it comes. Nothing is
kept but the sums, in the wide format. What ranks of tensor parallelism cut of a layer's features is put together, one
message a layer (core/optim/kfac_cut.py). Ranks of context parallelism see the tokens of their parts of each row,
without what fills up.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from core.config import UserError
from core.optim.kfac_cut import Cut, GridCut, Shown, Squares, View, Whole
from core.optim.kfac_layers import (
    Layer,
    Sharing,
    Use,
    gradient_rows,
    input_rows,
    outer_sum,
    packed_factor,
    packed_factor_size,
)
from core.optim.kfac_stacks import LinearCalls, Stack
from core.optim.sharded import wide_dtype


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

    cuts    of each use of each layer; None of an expert that this rank does not have
    copies  ranks that count the same items
    model   whose modules say in `sequence_cut` which places of a row this rank has while they run; None: it has all
    bases   layer -> (Q_R, Q_C), of the layers whose squares in a basis are summed, too
    rows    the most that a layer was given in the last recording
    """

    def __init__(
        self, layers: Sequence[Layer], cuts: Sequence[Sequence[Cut | GridCut | None]], sharing: Sharing,
        copies: int = 1, model: nn.Module | None = None,
    ):  # fmt: skip
        self.layers = layers
        modules = () if model is None else model.modules()
        self._cut: list[Any] = [module for module in modules if hasattr(module, "sequence_cut")]
        self.sharing: Sharing = sharing
        self._copies = copies
        self.rows = 0
        self.bases: dict[int, tuple[Tensor, Tensor]] = {}
        self.items = 0.0
        self.seen: dict[tuple[int, int], Seen] = {}
        self.shown: dict[tuple[int, int], Shown] = {}
        self._recording: _Recording | None = None
        own = weakref.ref(self)
        stacks: dict[str, list[int]] = {}
        foreign: dict[str, dict[int, int]] = {}
        self._stacks: list[Stack] = []
        for index, layer in enumerate(layers):
            for use_index, use in enumerate(layer.uses):
                cut = cuts[index][use_index]
                if cut is None:
                    continue
                if use.kind == "stack":
                    assert layer.expert is not None
                    if layer.expert == 0:
                        foreign[layer.weight] = {}
                        self._stacks.append(Stack(use, foreign[layer.weight]))
                    foreign[layer.weight][layer.expert] = index
                    continue
                if isinstance(cut, Cut) and layer.expert is not None:
                    stacks.setdefault(layer.weight, []).append(index)
                    if len(stacks[layer.weight]) == 1:
                        use.module.register_forward_hook(_stack_hook(own, stacks[layer.weight], use, cut))
                    continue
                hook = _hook(own, (index, use_index), layer, use, cut)
                use.module.register_forward_hook(hook, with_kwargs=True)
                if use.kind == "head":
                    use.module.show_gradients = _shows(own, (index, use_index), layer)

    def clear(self) -> None:
        self.items, self.seen, self.shown = 0.0, {}, {}

    @contextmanager
    def recording(
        self, items: float, rows: int | None, factor: float, length: int | None = None
    ) -> Iterator[list[Tensor]]:
        """Surround a forward; gradients are taken whenever they come. Yields the outputs of its layers."""
        before, self._recording = self._recording, _Recording(rows, factor, length, [])
        self.items += items
        self.rows = 0
        try:
            with LinearCalls(self._stacks, self.take_matrix) if self._stacks and before is None else nullcontext():
                yield self._recording.outputs
        finally:
            self._recording = before

    def require_stacks(self) -> None:
        """Raises UserError for a stack of matrices of which none was ever seen in use."""
        for stack in self._stacks if self.items else ():
            stack.require_seen()

    def sizes(self, indices: Sequence[int]) -> list[list[tuple[int, int, int, int]]]:
        """Elements of sums in a message: inputs, their number, gradients, squares; of each use of some layers."""
        found = []
        for index in indices:
            layer = self.layers[index]
            r, c = map(packed_factor_size, layer.factor_shapes())
            squares = layer.shape[0] * layer.shape[1] if index in self.bases else 0
            found.append([(r, 1, c, squares) if use.inputs_first else (c, 1, r, squares) for use in layer.uses])
        return found

    def message(self, device: torch.device, dtype: torch.dtype, indices: Sequence[int]) -> Tensor:
        """All sums of some layers one behind the other, and the number of items; zeros of what was not used."""
        parts = []
        for index, of_layer in zip(indices, self.sizes(indices), strict=True):
            for use_index, size in enumerate(of_layer):
                seen = self.seen.get((index, use_index))
                if seen is None:
                    parts.append(torch.zeros(sum(size), device=device, dtype=dtype))
                else:
                    cases = torch.tensor([seen.cases], device=device, dtype=dtype)
                    parts += [seen.inputs.to(device, dtype), cases, seen.gradients.to(device, dtype)]
                    if index in self.bases:
                        assert seen.squares is not None
                        parts.append(seen.squares.flatten().to(device, dtype))
        return torch.cat([*parts, torch.tensor([self.items / self._copies], device=device, dtype=dtype)])

    def sharing_of(self, use: Use) -> Sharing:
        """Looked-up rows are cases of their own: their mean is none of the table's. So are those of an expert."""
        if use.kind in ("embedding", "experts", "stack"):
            return "expand"
        return self.sharing

    @torch.no_grad()
    def take(
        self, key: tuple[int, int], layer: Layer, use: Use, cut: Cut | GridCut, x: Tensor, y: Tensor
    ) -> None:  # fmt: skip
        """Note an input, and wait for the gradient of what it became."""
        now, shown = self._recording, self.shown.pop(key, None)
        assert now is not None
        if use.kind == "head" and shown is None:
            if cut.copies > 1:
                raise UserError(
                    "kfac: with tensor parallelism a head shows the gradients of its loss alone, and logits are asked "
                    "for here; use --optim.fisher sampled or empirical"
                )
            x = x[:, : y.shape[1]]
        _require_graph(use, y)
        self.rows = max(self.rows, len(x))
        rows = now.rows if now.rows is not None else len(x)
        if isinstance(cut, Cut) and cut.rows_of is None and rows and x.shape[0] % rows:
            raise UserError(
                f"kfac: {use.name} is given {x.shape[0]} rows of a microbatch of {rows}, and what it does to all of "
                f"them at once has no factors; leave it out: --optim.exclude '{use.name}'"
            )
        if (isinstance(cut, GridCut) or cut.rows_of is not None) and now.rows is None:
            raise UserError("kfac: on a grid of tensor parallelism give observe, or recording, the rows of the batch")
        length, real = self._places(now.length, y.device)
        view = cut.view(use, x, y, rows, length) if shown is None else cut.head_view(use, shown, rows)
        summed = _Summed(self, key, layer, use, y)
        if view.inputs is not None:
            summed.take_inputs(_real(view.inputs, view, real))
        now.outputs.append(y)
        observer, factor = weakref.ref(self), now.factor
        kept = x.detach()[:0]
        if use.kind == "embedding":
            kept = x if real is None else x[:, real]

        def arrived(gradient: Tensor) -> None:
            own = observer()
            if own is None or own.seen.get(key) is not summed.seen:
                return  # the sums were taken, or thrown away, before it came
            with torch.no_grad():
                inputs, came = view.arrived(gradient)
                if inputs is not None:
                    summed.take_inputs(_real(inputs, view, real))
                if isinstance(came, Squares):
                    summed.seen.gradients.add_(came.value, alpha=factor**2)
                else:
                    summed.take_gradient(_real(came, view, real), kept, factor)

        y.register_hook(arrived)

    def _places(self, length: int | None, device: torch.device) -> tuple[int | None, Tensor | None]:
        """The length of this rank's part of a row, and which of its places are tokens; None: all are."""
        found = next((cut for module in self._cut if (cut := module.sequence_cut) is not None), None)
        if found is None:
            return length, None
        cut, rank = found
        real = cut.places(rank, device) < cut.length
        return cut.local_length, None if bool(real.all()) else real

    @torch.no_grad()
    def take_stack(self, indices: Sequence[int], use: Use, cut: Cut, x_AI: Tensor, rows_E: Tensor, y: Tensor) -> None:
        """The same of the experts that this rank has, of which each is a layer, and a module's inputs their rows."""
        now = self._recording
        assert now is not None
        _require_graph(use, y)
        counts = rows_E.tolist()
        parts = [slice(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]
        view = cut.view(use, x_AI, y, len(x_AI), None)
        summed = [_Summed(self, (index, 0), self.layers[index], use, y) for index in indices]
        assert view.inputs is not None
        for one, part in zip(summed, parts, strict=True):
            one.take_inputs(_rows(view.inputs, part))
        now.outputs.append(y)
        observer, factor, kept = weakref.ref(self), now.factor, x_AI.detach()[:0]

        def arrived(gradient: Tensor) -> None:
            own = observer()
            if own is None or own.seen.get((indices[0], 0)) is not summed[0].seen:
                return
            with torch.no_grad():
                _, came = view.arrived(gradient)
                assert isinstance(came, Whole)
                for one, part in zip(summed, parts, strict=True):
                    one.take_gradient(_rows(came, part), kept, factor)

        y.register_hook(arrived)

    @torch.no_grad()
    def take_matrix(self, index: int, use: Use, x: Tensor, y: Tensor) -> None:
        """The same of one matrix of a stack, whose inputs x[.., I] are rows of their own."""
        now = self._recording
        assert now is not None
        _require_graph(use, y)
        summed, rows_AI = _Summed(self, (index, 0), self.layers[index], use, y), x.detach().flatten(0, -2)
        summed.take_inputs(Whole(rows_AI, len(rows_AI)))
        now.outputs.append(y)
        observer, factor, count, none = weakref.ref(self), now.factor, len(rows_AI), rows_AI[:0]

        def arrived(gradient: Tensor) -> None:
            own = observer()
            if own is None or own.seen.get((index, 0)) is not summed.seen:
                return
            with torch.no_grad():
                summed.take_gradient(Whole(gradient, count), none, factor)

        y.register_hook(arrived)

    def oriented(self, index: int) -> tuple[Any, Any]:
        """The bases of a layer's inputs and gradients; None where there are none."""
        q_r, q_c = self.bases.get(index, (None, None))
        return (q_r, q_c) if self.layers[index].inputs_first else (q_c, q_r)


class _Summed:
    """The sums of one use, into which the cases of one forward go; of a use that was not seen before, zeros."""

    def __init__(self, observer: Observer, key: tuple[int, int], layer: Layer, use: Use, y: Tensor):
        self.layer, self.use = layer, use
        self.sharing: Sharing = observer.sharing_of(use)
        self.sizes = layer.shape if use.inputs_first else layer.shape[::-1]
        self.diagonal = layer.diagonal if use.inputs_first else layer.diagonal[::-1]
        bases = observer.oriented(key[0])
        self.bases = bases if bases[0] is None else tuple(basis.to(y.device) for basis in bases)
        self.projected: Tensor | None = None
        if key not in observer.seen:
            factors = ((n,) if short else (n, n) for n, short in zip(self.sizes, self.diagonal))
            made = [y.new_zeros(packed_factor_size(factor), dtype=wide_dtype(y.dtype)) for factor in factors]
            squares = made[0].new_zeros(layer.shape) if key[0] in observer.bases else None
            observer.seen[key] = Seen(made[0], 0.0, made[1], squares)
        self.seen = observer.seen[key]

    def take_inputs(self, inputs: Whole) -> None:
        wide = self.seen.inputs.dtype
        has_bias = self.layer.bias is not None
        cases = inputs.own(input_rows(self.use, inputs.value, has_bias, inputs.rows, self.sharing))
        cases = cases.to(wide) if cases.is_floating_point() else cases
        total = packed_factor(outer_sum(cases, self.sizes[0], self.diagonal[0]).to(wide))
        self.seen.inputs.add_(total, alpha=inputs.share)
        self.seen.cases += inputs.share * len(cases)
        if self.bases[0] is not None:
            self.projected = cases @ self.bases[0]

    def take_gradient(self, gradient: Whole, x: Tensor, factor: float) -> None:
        """x: the input of an embedding"""
        g = gradient.own(gradient_rows(self.use, gradient.value, x, gradient.rows, self.sharing))
        g = g.to(wide_dtype(g.dtype)) * factor
        total = packed_factor(outer_sum(g, self.sizes[1], self.diagonal[1]))
        self.seen.gradients.add_(total, alpha=gradient.share)
        if self.projected is not None and self.seen.squares is not None:
            both = self._squares(g @ self.bases[1], self.projected, gradient.rows)
            self.seen.squares.add_(both.T if self.layer.inputs_first else both, alpha=gradient.share)

    def _squares(self, g: Tensor, a: Tensor, rows: int) -> Tensor:
        """Sum of squares of g a^T, over the cases; places of a convolution make one gradient of a row between them."""
        if self.use.kind != "conv" or self.sharing == "reduce":
            return g.square().T @ a.square()
        of_rows = zip(g.view(rows, -1, g.shape[1]), a.view(rows, -1, a.shape[1]), strict=True)
        return torch.stack([(of_g.T @ of_a).square_() for of_g, of_a in of_rows]).sum(0)


def _hook(own: Any, key: tuple[int, int], layer: Layer, use: Use, cut: Cut | GridCut) -> Callable[..., None]:
    def hook(module: Any, args: tuple[Any, ...], named: dict[str, Any], y: Tensor) -> None:
        observer = own()
        if observer is not None and observer._recording is not None and torch.is_grad_enabled():
            observer.take(key, layer, use, cut, next(iter((*args, *named.values()))), y)

    return hook


def _stack_hook(own: Any, indices: Sequence[int], use: Use, cut: Cut) -> Callable[..., None]:
    def hook(module: Any, args: tuple[Tensor, Tensor], y: Tensor) -> None:
        observer = own()
        if observer is not None and observer._recording is not None and torch.is_grad_enabled():
            observer.take_stack(indices, use, cut, *args, y)

    return hook


def _require_graph(use: Use, y: Tensor) -> None:
    """Raises UserError for outputs that no gradient comes to."""
    if not y.requires_grad:
        raise UserError(
            f"kfac: {use.name or 'the model'} is computed without a graph, and no gradient comes to it; use "
            "--recompute.mode none or full, or leave it out: --optim.exclude"
        )


def _real(whole: Whole, view: View, real: Tensor | None) -> Whole:
    """Without places that are none of a row's.  real: of those that the layer is given; None: all are"""
    if real is None:
        return whole
    return replace(whole, value=whole.value[:, real if view.part is None else real[view.part]])


def _rows(whole: Whole, part: slice) -> Whole:
    return Whole(whole.value[part], part.stop - part.start, whole.share)


def _shows(own: Any, key: tuple[int, int], layer: Layer) -> Callable[[Tensor, slice, Tensor], None]:
    """What a head calls with its inputs, some of its tokens, and the gradients of their logits."""

    def show(x_BLD: Tensor, tokens: slice, g_CV: Tensor) -> None:
        observer = own()
        if observer is None or observer._recording is None:
            return
        if key not in observer.shown:
            observer.shown[key] = Shown(x_BLD.detach(), layer.diagonal[0], observer.sharing)
        observer.shown[key].add(tokens, g_CV)

    return show
