"""The effect of operators on axes: aten's, as a forward without values calls them.

A rule takes the operator's arguments, values in the place of tensors, and returns the axes of each result. It says on
the way which axes are one (`unify`), and which are never cut (`freeze`): those that are summed over, normalised,
sorted, looked up by an index, or taken apart in a way that no rule knows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from core.parallel.infer.axes import Dim, Dims, freeze, grouped, joined, new_dim, part_of, size_of, unify

Shape = tuple[int, ...]
_WHOLE = ("lift_fresh", "detach", "alias", "clone", "_to_copy", "contiguous", "detach_", "lift_fresh_copy", "to")
_VIEWS = {"view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", *_WHOLE}


@dataclass
class Operator:
    """An operator with its arguments.

    summed  what a product of two matrices, its last two values, sums over
    rows    what a lookup takes rows of: its first value's
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    summed: Dim | None = None
    rows: Dim | None = None

    @property
    def name(self) -> str:
        return self.func._schema.name.removeprefix("aten::")

    @property
    def is_view(self) -> bool:
        """True where the result has its only operand's elements, in another order at most."""
        return self.name in _VIEWS

    def arg(self, place: int, name: str = "", default: Any = None) -> Any:
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)


def axes_made(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
    """The axes of the results.

    given   values of all tensors among the arguments
    shapes  of the results
    """
    rule = _RULES.get(op.name)
    if rule is None and torch.Tag.pointwise in op.func.tags:
        rule = _pointwise
    if rule is None and not given:
        return [tuple(map(new_dim, shape)) for shape in shapes]
    found = (rule or _unknown)(op, given, shapes)
    assert [tuple(map(size_of, dims)) for dims in found] == list(shapes), (op.name, found, shapes)
    return found


def _unknown(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
    why = f"{op.name} is not known to work along it"
    for value in given:
        for dim in value.dims:
            freeze(dim, why)
    return [tuple(new_dim(size, why) for size in shape) for shape in shapes]


def _pointwise(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
    return [_broadcast([value.dims for value in given], shape) for shape in shapes]


def _broadcast(all_dims: Sequence[Dims], shape: Shape) -> Dims:
    found = []
    for place in range(1, len(shape) + 1):
        size = shape[-place]
        there = [dims[-place] for dims in all_dims if len(dims) >= place and size_of(dims[-place]) == size]
        for other in there[1:]:
            unify(there[0], other)
        found.append(there[0] if there else new_dim(size))
    return tuple(reversed(found))


def _same(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
    dims = given[0].dims
    return [dims if tuple(map(size_of, dims)) == shape else _fresh(shape) for shape in shapes]


def _fresh(shape: Shape, why: str = "") -> Dims:
    return tuple(new_dim(size, why) for size in shape)


def _view(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
    axes = [axis for dim in given[0].dims for axis in dim]
    if not all(shapes[0]):
        return [_fresh(shapes[0])]
    return [grouped(axes, shapes[0], "a view groups its indices in two ways")]


def _permute(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
    return [tuple(given[0].dims[place] for place in op.arg(1, "dims"))]


def _transpose(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
    dims = list(given[0].dims)
    if len(dims) > 1:
        a, b = (0, 1) if op.name == "t" else (op.arg(1), op.arg(2))
        dims[a], dims[b] = dims[b], dims[a]
    return [tuple(dims)]


def _unsqueeze(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
    dims, place = list(given[0].dims), op.arg(1)
    dims.insert(place if place >= 0 else place + len(dims) + 1, ())
    return [tuple(dims)]


def _squeeze(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
    dims = given[0].dims
    asked = op.arg(1, "dim")
    places = range(len(dims)) if asked is None else [asked] if isinstance(asked, int) else asked
    gone = {place % len(dims) for place in places} if dims else set()
    return [tuple(dim for place, dim in enumerate(dims) if place not in gone or size_of(dim) != 1)]


def _expand(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
    return [_broadcast([given[0].dims], shapes[0])]


def _slice(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
    dims = list(given[0].dims)
    place = op.arg(1, "dim", 0) % len(dims)
    size, step = size_of(dims[place]), op.arg(4, "step", 1)
    start, length = op.arg(2, "start", 0) or 0, shapes[0][place]
    start = max(0, start + size if start < 0 else start)
    why = "a slice takes a part of it"
    if step == 1 and length:
        dims[place] = part_of(dims[place], min(start, size), length, why)
    else:
        freeze(dims[place], why)
        dims[place] = new_dim(length, why)
    return [tuple(dims)]


def _select(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
    dims = list(given[0].dims)
    place = op.arg(1, "dim", 0) % len(dims)
    freeze(dims[place], "one of its indices is taken")
    return [tuple(dims[:place] + dims[place + 1 :])] * len(shapes)


def _split(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
    dims = given[0].dims
    place = op.arg(2, "dim", 0) % len(dims)
    found, start = [], 0
    for shape in shapes:
        piece = part_of(dims[place], start, shape[place], "it is split along other axes")
        found.append((*dims[:place], piece, *dims[place + 1 :]))
        start += shape[place]
    return found


def _cat(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
    (shape,) = shapes
    place = op.arg(1, "dim", 0) % len(shape)
    parts = [value.dims for value in given if len(value.dims) == len(shape) and all(map(size_of, value.dims))]
    for other in parts[1:]:
        for at, (ours, theirs) in enumerate(zip(parts[0], other, strict=True)):
            if at != place:
                unify(ours, theirs)
    return [tuple(joined([p[at] for p in parts]) if at == place else dim for at, dim in enumerate(parts[0]))]


def _stack(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
    (shape,) = shapes
    place = op.arg(1, "dim", 0) % len(shape)
    (dims,) = [_broadcast([value.dims for value in given], given[0].shape)]
    return [(*dims[:place], new_dim(shape[place], "tensors are stacked along it"), *dims[place:])]


# --- products ---------------------------------------------------------------------------------------------------------


def _product(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
    """mm, bmm, and with something added to it addmm, baddbmm: [.., I, K] x [.., K, J]."""
    *added, first, second = given
    *batch, rows, inner = first.dims
    *others, other_inner, columns = second.dims
    unify(inner, other_inner)
    for ours, theirs in zip(batch, others, strict=True):
        unify(ours, theirs)
    if first.parameter is None and second.parameter is None:
        freeze(inner, "two activations are multiplied along it")
    op.summed = inner
    dims = (*batch, rows, columns)
    return [_broadcast([dims, *(value.dims for value in added)], shapes[0])]


def _attention(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
    """scaled_dot_product_attention in one operator: queries [B, H, T, E], keys [B, K, S, E], values [B, K, S, V]."""
    for dim in (given[0].dims[2], given[0].dims[3], given[1].dims[2]):
        freeze(dim, "attention works along it")
    result = attended(given)
    known: list[Dims] = [result, result[:3]]  # and a number for each row
    fits = {tuple(map(size_of, dims)): dims for dims in known}
    return [fits.get(shape) or _fresh(shape, "attention's own") for shape in shapes]


def attended(given: Sequence[Any]) -> Dims:
    """The axes of attention's result [B, H, T, V]."""
    queries, keys, values, *rest = given
    B, H, T, E = queries.dims
    for ours, theirs in ((B, keys.dims[0]), (E, keys.dims[3]), (keys.dims[2], values.dims[2])):
        unify(ours, theirs)
    unify(keys.dims[1], values.dims[1])
    heads, groups = size_of(H), size_of(keys.dims[1])
    unify(H, keys.dims[1] if heads == groups else (*keys.dims[1], *new_dim(heads // groups)))
    for mask in rest:
        _broadcast([(B, H, T, keys.dims[2]), mask.dims], (size_of(B), heads, size_of(T), size_of(keys.dims[2])))
    return (B, H, T, values.dims[3])


# --- along a dim ------------------------------------------------------------------------------------------------------


def _along(place_of: Callable[[Operator], Any]) -> Callable[..., list[Dims]]:
    """Operators that work along dims and keep the others."""

    def rule(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
        dims, asked, why = given[0].dims, place_of(op), f"{op.name} works along it"
        places = range(len(dims)) if asked is None or asked == [] else [asked] if isinstance(asked, int) else asked
        along = {place % len(dims) for place in places} if dims else set()
        for place in along:
            freeze(dims[place], why)
        kept = [dim for place, dim in enumerate(dims) if place not in along]
        found = []
        for shape in shapes:
            if len(shape) == len(dims):
                made = tuple(
                    dim if place not in along or size_of(dim) == size else new_dim(size, why)
                    for place, (dim, size) in enumerate(zip(dims, shape, strict=True))
                )
            else:
                made = tuple(kept)
            found.append(made if tuple(map(size_of, made)) == shape else _fresh(shape, why))
        return found

    return rule


def _norm(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
    """Layer norm and RMS norm over the last dims; statistics have size 1 there."""
    count = len(op.arg(1, "normalized_shape"))
    dims = given[0].dims
    for dim in dims[len(dims) - count :]:
        freeze(dim, "it is normalised")
    for weight in given[1:]:
        _broadcast([dims, weight.dims], given[0].shape)
    small = (*dims[: len(dims) - count], *[()] * count)
    return [dims if shape == given[0].shape else small for shape in shapes]


def _embedding(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
    weight, ids = given
    op.rows = weight.dims[0]
    return [(*ids.dims, weight.dims[1])]


def _index(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
    """Rows by tensors of indices, of the first dims."""
    (shape,) = shapes
    dims, indices = given[0].dims, op.arg(1, "indices")
    there = [index is not None for index in indices]
    first, count = there.index(True), sum(there)
    if not all(there[first : first + count]) or any(len(index.shape) == 0 for index in indices if index is not None):
        return _unknown(op, given, shapes)
    for place in range(first, first + count):
        freeze(dims[place], "its indices are looked up")
    after = dims[first + count :]
    between = _broadcast([index.dims for index in indices if index is not None], shape[first : len(shape) - len(after)])
    return [(*dims[:first], *between, *after)]


def _gather(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
    place = op.arg(1, "dim", 0) % len(given[0].dims)
    for value in given:
        freeze(value.dims[place], f"{op.name} works along it")
    return [_broadcast([value.dims for value in reversed(given)], shapes[0])]


def _convolution(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
    batch = given[0].dims[0]
    for value in given:
        for dim in value.dims[value is given[0] :]:
            freeze(dim, "a convolution works along it")
    return [(batch, *_fresh(shape[1:], "a convolution made it")) for shape in shapes]


def _padded(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
    """Padding, of the last dim first: (in front, behind), which may cut off at one end what they add at the other."""
    (shape,) = shapes
    dims, pad, why = list(given[0].dims), op.arg(1, "pad"), f"{op.name} changes it"
    for place in (-1 - n // 2 for n in range(len(pad)) if pad[n]):
        freeze(dims[place], why)
        dims[place] = new_dim(shape[place], why)
    return [tuple(dims)]


def _repeat(op: Operator, given: Sequence[Any], shapes: Sequence[Shape]) -> list[Dims]:
    (shape,) = shapes
    dims = [()] * (len(shape) - len(given[0].dims)) + list(given[0].dims)
    return [tuple((*new_dim(size // size_of(dim)), *dim) for dim, size in zip(dims, shape, strict=True))]


Rule = Callable[[Operator, Sequence[Any], Sequence[Shape]], list[Dims]]
_AT_1, _AT_2 = _along(lambda op: op.arg(1, "dim")), _along(lambda op: op.arg(2, "dim"))
_RULES: dict[str, Rule] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), _view),
    "permute": _permute,
    **dict.fromkeys(("transpose", "t"), _transpose),
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "slice": _slice,
    **dict.fromkeys(("select", "unbind"), _select),
    **dict.fromkeys(("split", "split_with_sizes"), _split),
    "cat": _cat,
    "stack": _stack,
    **dict.fromkeys(_WHOLE, _same),
    **dict.fromkeys(("native_dropout", "dropout", "bernoulli", "bernoulli_", "zeros_like", "ones_like"), _same),
    **dict.fromkeys(("full_like", "empty_like", "rand_like", "randn_like", "tril", "triu"), _same),
    **dict.fromkeys(("masked_fill", "masked_fill_", "copy_", "copy", "fill_", "zero_", "where"), _pointwise),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm"), _product),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "sort", "argsort", "flip"), _AT_1),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "any", "all", "prod", "argmax", "argmin", "max", "min"), _AT_1),
    **dict.fromkeys(("var", "std", "var_mean", "logsumexp"), _AT_1),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _AT_2),
    "topk": _along(lambda op: op.arg(2, "dim", -1)),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _norm),
    "embedding": _embedding,
    "index": _index,
    **dict.fromkeys(("gather", "scatter", "scatter_add"), _gather),
    **dict.fromkeys(("convolution", "_convolution"), _convolution),
    "constant_pad_nd": _padded,
    "repeat": _repeat,
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_attention_math",
            "scaled_dot_product_attention",
        ),
        _attention,
    ),
}
