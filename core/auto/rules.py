"""The rule of every operator of ATen that a step of training is made of; `core.auto.rule` says how they read.

`rule_of` finds the rule of a call: by the operator's name, or because it is pointwise; any other operator, and whatever
draws random numbers, runs whole on every rank. Shapes say more than names: a view's letters are the factors that both
shapes share, a slice of all rows is none.

Blocked on purpose: the window of a convolution or a pool (neighbours would be needed), the row that a causal mask
counts from, keys of an attention, dims of a cat, a split, a scan or a sort, dropout (its mask is one rank's).
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from core.auto.rule import AllReduce, Call, Dims, Here, Rule, Run, Talk, describe, dims_of

Builder = Callable[[Call], Rule]
RULES: dict[str, Builder] = {}
"""Operator, as "aten.mm.default" -> what makes its rule of a call."""

Steps = Generator[AllReduce, Tensor, Any]


def rule_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> Rule:
    """The rule of an operator's call.  outputs: what it returns, real or fake tensors as its arguments."""
    call = Call.of(op, args, kwargs, outputs)
    build = RULES.get(str(op))
    if build is not None:
        return build(call)
    return _pointwise(call) if is_pointwise(op) else runs_whole(call)


def is_pointwise(op: Any) -> bool:
    """Whether it computes element by element, of elements in the same place."""
    if RULES.get(str(op)) is _pointwise:
        return True
    tags = op.tags
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags and not op._schema.is_mutable


def runs_whole(call: Call) -> Rule:
    """Every rank does all of it."""
    return Rule(
        call,
        tuple(_whole(tensor) for tensor in call.inputs),
        tuple(None if tensor is None else _whole(tensor) for tensor in call.outputs),
        sizes={},
        run=lambda parts, here: call(parts),
    )


def _rule(*names: str) -> Callable[[Builder], Builder]:
    def keep(build: Builder) -> Builder:
        RULES.update(dict.fromkeys((f"aten.{name}" for name in names), build))
        return build

    return keep


def _whole(tensor: Tensor) -> Dims:
    return ((),) * tensor.ndim


def _letters(tensor: Tensor, prefix: str = "d") -> Dims:
    return tuple((f"{prefix}{dim}",) for dim in range(tensor.ndim))


def _aligned(tensor: Tensor, dims: Dims, shape: Sequence[int]) -> Dims:
    """Dims of what is broadcast to a shape whose dims are known."""
    own = dims[len(dims) - tensor.ndim :]
    sizes = shape[len(shape) - tensor.ndim :]
    return tuple(() if n == 1 != size else dim for dim, n, size in zip(own, tensor.shape, sizes, strict=True))


def _dim(call: Call, name: str = "dim", of: str = "self") -> int:
    """An argument that numbers a dim, counted from the front."""
    return call[name] % max(call[of].ndim, 1)


def _without(dims: Dims, *places: int) -> Dims:
    """The dims, some of them nobody's."""
    return tuple(() if n in places else dim for n, dim in enumerate(dims))


def _sizes_as(call: Call, name: str) -> Run:
    """An operator one of whose arguments is the size of its output."""
    return lambda parts, here: call(parts, **{name: here.shapes[0]})


# --- products ---------------------------------------------------------------------------------------------------------


@_rule("mm.default")
def _mm(call: Call) -> Rule:
    return describe(call, {"self": "m k", "mat2": "k n"}, "m n", linear=("self", "mat2"))


@_rule("addmm.default")
def _addmm(call: Call) -> Rule:
    added = _aligned(call["self"], (("m",), ("n",)), call.made.shape)
    inputs = {"self": added, "mat1": "m k", "mat2": "k n"}
    return describe(call, inputs, "m n", linear=("self mat1", "self mat2"), added="self")


@_rule("bmm.default")
def _bmm(call: Call) -> Rule:
    return describe(call, {"self": "b m k", "mat2": "b k n"}, "b m n", linear=("self", "mat2"))


@_rule("baddbmm.default")
def _baddbmm(call: Call) -> Rule:
    added = _aligned(call["self"], (("b",), ("m",), ("n",)), call.made.shape)
    inputs = {"self": added, "batch1": "b m k", "batch2": "b k n"}
    return describe(call, inputs, "b m n", linear=("self batch1", "self batch2"), added="self")


# --- pointwise --------------------------------------------------------------------------------------------------------

_GRADIENT = ("grad_output",)
_LINEAR: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("neg", "clone", "detach", "alias", "_to_copy", "positive", "lift_fresh_copy"), ("self",)),
    **dict.fromkeys(("add.Tensor", "sub.Tensor", "where.self"), ("self other",)),
    "copy": ("src",),
    "fill.Tensor": ("value",),
    "masked_fill.Tensor": ("self value",),
    **dict.fromkeys(("mul.Tensor", "mul.Scalar"), ("self", "other")),
    **dict.fromkeys(("div.Tensor", "div.Scalar"), ("self",)),
    "addcmul": ("self tensor1", "self tensor2"),
    "addcdiv": ("self tensor1",),
    **dict.fromkeys(("gelu_backward", "silu_backward", "sigmoid_backward", "tanh_backward"), _GRADIENT),
    **dict.fromkeys(("threshold_backward", "hardtanh_backward", "leaky_relu_backward", "elu_backward"), _GRADIENT),
    **dict.fromkeys(("softplus_backward", "hardswish_backward"), _GRADIENT),
}
"""Sets of arguments in which an operator is linear together; where one is a number the set does not count: x + 1 is not
linear in x."""
_OVERWRITES = {"copy": "src", "fill.Tensor": "value"}
"""What is all that the result depends on."""


@_rule(
    "_to_copy.default",
    "detach.default",
    "alias.default",
    "lift_fresh_copy.default",
    *(f"{name}.default" for name in ("zeros_like", "ones_like", "full_like", "empty_like", "clone", "zero")),
    *("fill.Scalar", "fill.Tensor", "copy.default", "masked_fill.Tensor"),
    *(f"{name}_backward.default" for name in ("gelu", "silu", "sigmoid", "tanh", "threshold")),
)
def _pointwise(call: Call) -> Rule:
    shape = call.made.shape
    dims = tuple((f"d{n}",) for n in range(len(shape)))
    tensors = {name: value for name, value in call.arguments.items() if isinstance(value, Tensor)}
    inputs = {name: _aligned(tensor, dims, shape) for name, tensor in tensors.items()}
    if len(call.inputs) != len(tensors):
        return runs_whole(call)
    name = str(call.op).removeprefix("aten.").removesuffix(".default")
    linear, reads = _LINEAR.get(name, ()), _OVERWRITES.get(name)
    return describe(call, inputs, [dims for _ in call.outputs], linear=linear, reads=() if reads is None else (reads,))


@_rule("masked_fill.Scalar")
def _masked_fill(call: Call) -> Rule:
    dims, shape = _letters(call.made), call.made.shape
    inputs = {name: _aligned(call[name], dims, shape) for name in ("self", "mask")}
    return describe(call, inputs, [dims], linear=("self",) if call["value"] == 0 else ())


@_rule("mse_loss.default")
def _mse_loss(call: Call) -> Rule:
    dims = _letters(call["self"])
    if call["reduction"] == 0:
        return describe(call, {"self": dims, "target": dims}, [dims])
    full = call["self"].numel()

    def run(parts: Sequence[Tensor], here: Here) -> Tensor:
        return call(parts) * (parts[0].numel() / full if call["reduction"] == 1 else 1)

    return describe(call, {"self": dims, "target": dims}, "", run=run)


@_rule("mse_loss_backward.default")
def _mse_loss_backward(call: Call) -> Rule:
    dims = _letters(call["self"])
    full = call["self"].numel()

    def run(parts: Sequence[Tensor], here: Here) -> Tensor:
        return call(parts) * (parts[1].numel() / full if call["reduction"] == 1 else 1)

    gradient = _aligned(call["grad_output"], dims, call["self"].shape)
    return describe(call, {"grad_output": gradient, "self": dims, "target": dims}, [dims], linear=_GRADIENT, run=run)


# --- reductions -------------------------------------------------------------------------------------------------------


def _reduced(call: Call) -> tuple[Dims, Dims, list[int]]:
    """Dims of what is reduced and of the result, and the places that are gone."""
    tensor: Tensor = call["self"]
    given = call.arguments.get("dim")
    places = [given] if isinstance(given, int) else list(given or range(tensor.ndim))
    gone = [place % max(tensor.ndim, 1) for place in places]
    dims = _letters(tensor)
    left = tuple(() if n in gone else dim for n, dim in enumerate(dims))
    return dims, left if call.arguments.get("keepdim") else tuple(dim for dim in left if dim), gone


@_rule("sum.dim_IntList", "sum.default")
def _sum(call: Call) -> Rule:
    dims, left, _ = _reduced(call)
    return describe(call, {"self": dims}, [left], linear=("self",))


@_rule("mean.dim", "mean.default")
def _mean(call: Call) -> Rule:
    """Each rank's mean counts by its share of the rows."""
    dims, left, gone = _reduced(call)
    full = math.prod(call["self"].shape[place] for place in gone)

    def run(parts: Sequence[Tensor], here: Here) -> Tensor:
        return call(parts) * (math.prod(parts[0].shape[place] for place in gone) / full)

    return describe(call, {"self": dims}, [left], linear=("self",), run=run)


@_rule(
    *("amax.default", "amin.default", "argmax.default", "argmin.default", "max.dim", "min.dim", "max.default"),
    *("min.default", "any.dim", "any.default", "all.dim", "all.default", "prod.dim_int", "prod.default"),
    *("var.correction", "var_mean.correction", "std.correction", "logsumexp.default", "linalg_vector_norm.default"),
)
def _reduction_that_is_no_sum(call: Call) -> Rule:
    dims, left, gone = _reduced(call)
    whole = frozenset(dims[place][0] for place in gone)
    return describe(call, {"self": dims}, [left for _ in call.outputs], whole=whole)


@_rule("cumsum.default", "cumprod.default", "sort.default", "sort.stable", "argsort.default", "topk.default")
def _scan(call: Call) -> Rule:
    place = _dim(call)
    dims = _without(_letters(call["self"]), place)
    linear = ("self",) if str(call.op).startswith("aten.cumsum") else ()
    return describe(call, {"self": dims}, [dims for _ in call.outputs], linear=linear)


# --- softmax and loss -------------------------------------------------------------------------------------------------


@_rule("_softmax.default", "_log_softmax.default", "_safe_softmax.default")
def _softmax(call: Call) -> Rule:
    """A row of which all is -inf gives zeros if the operator is a safe one, else NaN."""
    dims, place = _letters(call["self"]), _dim(call)
    is_log, is_safe = "log" in str(call.op), "safe" in str(call.op)

    def run(parts: Sequence[Tensor], here: Here) -> Steps:
        given = parts[0].to(call.made.dtype)
        most = yield AllReduce(given.amax(place, keepdim=True), "max")
        shifted = given - (most.masked_fill(most == -math.inf, 0) if is_safe else most)
        total = yield AllReduce(shifted.exp().sum(place, keepdim=True))
        total = total.masked_fill(total == 0, 1) if is_safe else total
        return shifted - total.log() if is_log else shifted.exp() / total

    return describe(call, {"self": dims}, [dims], talk=_row_talk(dims, place, run, 2))


@_rule("_softmax_backward_data.default", "_log_softmax_backward_data.default")
def _softmax_backward(call: Call) -> Rule:
    dims, place = _letters(call["output"]), _dim(call, of="output")
    is_log = "log" in str(call.op)

    def run(parts: Sequence[Tensor], here: Here) -> Steps:
        gradient, output = parts
        weight = output.exp() if is_log else output
        total = yield AllReduce((gradient if is_log else gradient * output).sum(place, keepdim=True))
        return gradient - weight * total if is_log else weight * (gradient - total)

    inputs = {"grad_output": dims, "output": dims}
    return describe(call, inputs, [dims], linear=_GRADIENT, talk=_row_talk(dims, place, run, 1))


def _row_talk(dims: Dims, place: int, run: Callable[[Sequence[Tensor], Here], Steps], messages: int) -> Talk:
    """The dim at `place` may be cut if ranks say so many things about each row."""
    row = tuple(letter for n, dim in enumerate(dims) if n != place for letter in dim)
    return Talk(frozenset(dims[place]), run, (row,) * messages)


_NONE, _MEAN = 0, 1


@_rule("nll_loss_forward.default")
def _nll_loss(call: Call) -> Rule:
    """Classes may be cut: each rank takes what its own say, and the loss is the sum."""
    if call["self"].ndim != 2 or call["weight"] is not None:
        return runs_whole(call)
    reduction = call["reduction"]

    def pick(parts: Sequence[Tensor], here: Here) -> tuple[Tensor, Tensor]:
        scores, target = parts
        counts = target != call["ignore_index"]
        inside, place = _inside(target, here, "c", counts)
        picked = -scores.gather(1, place[:, None])[:, 0] * inside
        total = counts.sum().to(scores.dtype)
        return (picked, total * 0) if reduction == _NONE else (picked.sum(), total)

    def run(parts: Sequence[Tensor], here: Here) -> tuple[Tensor, Tensor]:
        picked, total = pick(parts, here)
        return (picked / total, total) if reduction == _MEAN else (picked, total)

    def talk(parts: Sequence[Tensor], here: Here) -> Steps:
        picked, total = pick(parts, here)
        everywhere = yield AllReduce(total)
        return picked / everywhere, total

    return describe(
        call,
        {"self": "n c", "target": "n"},
        "n," if reduction == _NONE else ",",
        linear=("self",),
        reads=("self target", "target"),
        run=run,
        talk=Talk(frozenset("n"), talk, ((),)) if reduction == _MEAN else None,
    )


@_rule("nll_loss_backward.default")
def _nll_loss_backward(call: Call) -> Rule:
    if call["self"].ndim != 2 or call["weight"] is not None:
        return runs_whole(call)
    reduction = call["reduction"]

    def run(parts: Sequence[Tensor], here: Here) -> Tensor:
        gradient, scores, target, total = parts
        inside, place = _inside(target, here, "c", target != call["ignore_index"])
        each = -(gradient / total if reduction == _MEAN else gradient) * inside
        return torch.zeros_like(scores).scatter(1, place[:, None], each[:, None])

    inputs = {"grad_output": "n" if reduction == _NONE else "", "self": "n c", "target": "n", "total_weight": ""}
    return describe(call, inputs, "n c", linear=_GRADIENT, run=run)


def _inside(index: Tensor, here: Here, letter: str, counts: Tensor | bool = True) -> tuple[Tensor, Tensor]:
    """Which of the indices fall on this rank's part of a letter, and where in it; of others place 0."""
    place = index - here.starts[letter]
    inside = (place >= 0) & (place < here.sizes[letter]) & counts
    return inside, torch.where(inside, place, 0)


# --- norms ------------------------------------------------------------------------------------------------------------


def _moments(x: Tensor, dims: Sequence[int], count: int) -> Generator[AllReduce, Tensor, tuple[Tensor, Tensor]]:
    """Mean and biased variance over dims whose rows lie on several ranks."""
    over = list(dims)
    mean = (yield AllReduce(x.sum(over, keepdim=True))) / count
    return mean, (yield AllReduce((x - mean).square().sum(over, keepdim=True))) / count


@_rule("native_layer_norm.default")
def _layer_norm(call: Call) -> Rule:
    tensor: Tensor = call["input"]
    batch = tensor.ndim - len(call["normalized_shape"])
    dims, over = _letters(tensor), range(batch, tensor.ndim)
    statistics = dims[:batch] + ((),) * len(over)
    count = math.prod(tensor.shape[batch:])

    def run(parts: Sequence[Tensor], here: Here) -> Steps:
        given = call.named(parts)
        mean, variance = yield from _moments(given["input"], over, count)
        scale = (variance + call["eps"]).rsqrt()
        normed = (given["input"] - mean) * scale
        normed = normed if given["weight"] is None else normed * given["weight"]
        return normed if given["bias"] is None else normed + given["bias"], mean, scale

    rows = tuple(dim[0] for dim in dims[:batch])
    talk = Talk(frozenset(dim[0] for dim in dims[batch:]), run, (rows, rows), told=frozenset((1, 2)))
    inputs = {"input": dims, "weight": dims[batch:], "bias": dims[batch:]}
    inputs = {name: of for name, of in inputs.items() if call[name] is not None}
    reads = (" ".join(inputs), "input", "input")
    return describe(call, inputs, [dims, statistics, statistics], reads=reads, talk=talk)


@_rule("native_layer_norm_backward.default")
def _layer_norm_backward(call: Call) -> Rule:
    tensor: Tensor = call["input"]
    batch = tensor.ndim - len(call["normalized_shape"])
    dims, over = _letters(tensor), list(range(batch, tensor.ndim))
    statistics = dims[:batch] + ((),) * len(over)
    count = math.prod(tensor.shape[batch:])

    def run(parts: Sequence[Tensor], here: Here) -> Steps:
        given = call.named(parts)
        gradient, normed = given["grad_out"], (given["input"] - given["mean"]) * given["rstd"]
        scaled = gradient if given["weight"] is None else gradient * given["weight"]
        mean = (yield AllReduce(scaled.sum(over, keepdim=True))) / count
        along = (yield AllReduce((scaled * normed).sum(over, keepdim=True))) / count
        rows = list(range(batch))
        made = (given["rstd"] * (scaled - mean - normed * along), (gradient * normed).sum(rows), gradient.sum(rows))
        return tuple(one if wanted else None for one, wanted in zip(made, call["output_mask"], strict=True))

    rows = tuple(dim[0] for dim in dims[:batch])
    talk = Talk(frozenset(dim[0] for dim in dims[batch:]), run, (rows, rows)) if batch else None
    inputs = {"grad_out": dims, "input": dims, "mean": statistics, "rstd": statistics}
    inputs |= {name: dims[batch:] for name in ("weight", "bias") if call[name] is not None}
    return describe(
        call,
        inputs,
        [dims, dims[batch:], dims[batch:]],
        linear=("grad_out",),
        whole="" if batch else frozenset(dim[0] for dim in dims),
        reads=(
            "grad_out input mean rstd" + (" weight" if "weight" in inputs else ""),
            "grad_out input mean rstd",
            "grad_out",
        ),
        talk=talk,
    )


def _channels(tensor: Tensor, channel: str = "c") -> Dims:
    """Rows, channels, and what is neither."""
    return (("n",), tuple(channel.split()), *((f"p{n}",) for n in range(tensor.ndim - 2)))


@_rule("native_group_norm.default")
def _group_norm(call: Call) -> Rule:
    groups = call["group"]
    dims = _without(_channels(call["input"], "g c"), *range(2, call["input"].ndim))
    inputs = {name: dims[1:2] for name in ("weight", "bias") if call[name] is not None} | {"input": dims}
    reads = ("input" + "".join(f" {name}" for name in ("weight", "bias") if name in inputs), "input", "input")
    sizes = {"g": groups, "c": call["C"] // groups}
    return describe(
        call, inputs, [dims, (("n",), ("g",)), (("n",), ("g",))], reads=reads, sizes=sizes, run=_grouped(call)
    )


@_rule("native_group_norm_backward.default")
def _group_norm_backward(call: Call) -> Rule:
    dims = _without(_channels(call["input"], "g c"), *range(2, call["input"].ndim))
    statistics = (("n",), ("g",))
    inputs = {"grad_out": dims, "input": dims, "mean": statistics, "rstd": statistics}
    if call["weight"] is not None:
        inputs["weight"] = dims[1:2]
    return describe(
        call,
        inputs,
        [dims, dims[1:2], dims[1:2]],
        linear=("grad_out",),
        reads=(" ".join(inputs), "grad_out input mean rstd", "grad_out"),
        sizes={"g": call["group"], "c": call["C"] // call["group"]},
        run=_grouped(call),
    )


def _grouped(call: Call) -> Run:
    """A group norm of a rank's rows and groups."""
    place = call.places("input")[0]
    return lambda parts, here: call(parts, N=parts[place].shape[0], C=parts[place].shape[1], group=here.sizes["g"])


@_rule("native_batch_norm.default")
def _batch_norm_in_place(call: Call) -> Rule:
    """In training it writes the running moments, which is what the functional one is for."""
    if call["training"]:
        return runs_whole(call)
    dims = _channels(call["input"])
    moments = [None if one is None else _whole(one) for one in call.outputs[1:]]
    return describe(call, {"input": dims, **_of_channels(call)}, [dims, *moments])


def _of_channels(call: Call, *names: str) -> dict[str, Dims]:
    """Dims of weights and moments, where they are given."""
    names = ("weight", "bias", "running_mean", "running_var", *names)
    given = {name: call.arguments.get(name) for name in names}
    return {name: (("c",),) if one.numel() else ((),) for name, one in given.items() if one is not None}


@_rule("_native_batch_norm_legit_functional.default")
def _batch_norm(call: Call) -> Rule:
    """Moments of rows that lie on several ranks are moments of all: their sums are all-reduced."""
    tensor: Tensor = call["input"]
    if not call["training"]:
        return runs_whole(call)
    dims = _channels(tensor)
    over = [n for n in range(tensor.ndim) if n != 1]
    count = tensor.numel() // tensor.shape[1]

    def run(parts: Sequence[Tensor], here: Here) -> Steps:
        given = call.named(parts)
        mean, variance = yield from _moments(given["input"], over, count)
        scale = (variance + call["eps"]).rsqrt()
        shape = [1, -1, *[1] * (tensor.ndim - 2)]
        normed = (given["input"] - mean) * scale
        normed = normed if given["weight"] is None else normed * given["weight"].view(shape)
        normed = normed if given["bias"] is None else normed + given["bias"].view(shape)
        new = call["momentum"]
        return (
            normed,
            mean.flatten(),
            scale.flatten(),
            given["running_mean"] * (1 - new) + mean.flatten() * new,
            given["running_var"] * (1 - new) + variance.flatten() * (count / (count - 1)) * new,
        )

    talk = Talk(frozenset(dims[n][0] for n in over), run, (("c",), ("c",)), told=frozenset((1, 2, 3, 4)))
    return describe(call, {"input": dims, **_of_channels(call)}, [dims, *[(("c",),)] * 4], talk=talk)


@_rule("native_batch_norm_backward.default")
def _batch_norm_backward(call: Call) -> Rule:
    """With moments of the batch; with running ones, which do not depend on it, each rank's rows are its own."""
    tensor: Tensor = call["input"]
    dims = _channels(tensor)
    over = [n for n in range(tensor.ndim) if n != 1]
    count = tensor.numel() // tensor.shape[1]
    shape = [1, -1, *[1] * (tensor.ndim - 2)]

    def run(parts: Sequence[Tensor], here: Here) -> Steps:
        given = call.named(parts)
        gradient, scale = given["grad_out"], given["save_invstd"].view(shape)
        normed = (given["input"] - given["save_mean"].view(shape)) * scale
        total = yield AllReduce(gradient.sum(over))
        along = yield AllReduce((gradient * normed).sum(over))
        scaled = scale if given["weight"] is None else scale * given["weight"].view(shape)
        moved = scaled * (gradient - total.view(shape) / count - normed * along.view(shape) / count)
        return tuple(
            one if wanted else None for one, wanted in zip((moved, along, total), call["output_mask"], strict=True)
        )

    inputs = _of_channels(call, "save_mean", "save_invstd")
    talk = Talk(frozenset(dims[n][0] for n in over), run, (("c",), ("c",)), told=frozenset((1, 2)))
    statistics = " ".join(name for name in inputs if name != "weight")
    return describe(
        call,
        {"grad_out": dims, "input": dims, **inputs},
        [dims, (("c",),), (("c",),)],
        linear=("grad_out",),
        reads=(
            f"grad_out input {statistics}" + (" weight" if "weight" in inputs else ""),
            f"grad_out input {statistics}",
            "grad_out",
        ),
        talk=talk if call["train"] else None,
    )


@_rule("_weight_norm_interface.default", "_weight_norm_interface_backward.default")
def _weight_norm(call: Call) -> Rule:
    """A norm for each row of one dim, which may be cut."""
    tensor = call.inputs[0]
    place = call["dim"] % tensor.ndim
    dims = _without(_letters(tensor), *(n for n in range(tensor.ndim) if n != place))
    inputs = {name: dims for name, value in call.arguments.items() if isinstance(value, Tensor)}
    linear = ("grad_w",) if "grad_w" in inputs else ()
    return describe(call, inputs, [dims, dims], linear=linear)


# --- lookups ----------------------------------------------------------------------------------------------------------


@_rule("embedding.default")
def _embedding(call: Call) -> Rule:
    """Rows of the table may be cut: each rank looks up its own, and the result is the sum."""

    def run(parts: Sequence[Tensor], here: Here) -> Tensor:
        inside, place = _inside(parts[1], here, "v")
        return parts[0][place] * inside[..., None]

    dims = _letters(call["indices"], "i")
    return describe(call, {"weight": "v d", "indices": dims}, [(*dims, ("d",))], linear=("weight",), run=run)


@_rule("embedding_dense_backward.default")
def _embedding_backward(call: Call) -> Rule:
    if call["scale_grad_by_freq"]:
        return runs_whole(call)

    def run(parts: Sequence[Tensor], here: Here) -> Tensor:
        counts = parts[1] != call["padding_idx"] if call["padding_idx"] >= 0 else True
        inside, place = _inside(parts[1], here, "v", counts)
        gradient = (parts[0] * inside[..., None]).flatten(0, -2)
        return gradient.new_zeros(here.shapes[0]).index_add(0, place.flatten(), gradient)

    dims = _letters(call["indices"], "i")
    inputs = {"grad_output": (*dims, ("d",)), "indices": dims}
    return describe(call, inputs, "v d", linear=_GRADIENT, run=run)


@_rule("index_select.default")
def _index_select(call: Call) -> Rule:
    place = _dim(call)
    dims = _without(_letters(call["self"]), place)
    made = tuple(("j",) if n == place else dim for n, dim in enumerate(dims))
    return describe(call, {"self": dims, "index": "j"}, [made], linear=("self",))


def _indexed(call: Call) -> tuple[Dims, list[Dims], Dims] | None:
    """Dims of what is indexed, of the tensors of places, and of what is at these; None where a mask tells the places.

    Tensors of places are broadcast. What they say stands where they do, or first if something is between them.
    """
    places = [n for n, index in enumerate(call["indices"]) if index is not None]
    given = [call["indices"][n] for n in places]
    if not given or any(index.dtype == torch.bool for index in given):
        return None
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    letters = tuple((f"i{n}",) for n in range(len(shape)))
    dims = _without(_letters(call["self"]), *places)
    first, last = places[0], places[-1] + 1
    if last - first == len(places):
        found = (*dims[:first], *letters, *dims[last:])
    else:
        found = (*letters, *(dim for n, dim in enumerate(dims) if n not in places))
    return dims, [_aligned(index, letters, shape) for index in given], found


@_rule("index.Tensor")
def _index(call: Call) -> Rule:
    dims = _indexed(call)
    if dims is None:
        return runs_whole(call)
    own, given, found = dims
    return describe(call, {"self": own, "indices": given}, [found], linear=("self",))


@_rule("index_put.default", "_unsafe_index_put.default")
def _index_put(call: Call) -> Rule:
    """Places that are added up may be cut: each rank adds its own, and what they are added to is added once."""
    dims = _indexed(call)
    if dims is None:
        return runs_whole(call)
    own, given, found = dims
    shape = call["self"][tuple(slice(None) if index is None else index for index in call["indices"])].shape
    inputs = {"self": own, "indices": given, "values": _aligned(call["values"], found, shape)}
    adds = call["accumulate"]
    whole = frozenset() if adds else frozenset(letter for dims in given for dim in dims for letter in dim)
    return describe(call, inputs, [own], linear=("self values",), added="self" if adds else "", whole=whole)


@_rule("gather.default")
def _gather(call: Call) -> Rule:
    place = _dim(call)
    shape = call["index"].shape
    index = tuple(
        dim if n == place or shape[n] == call["self"].shape[n] else () for n, dim in enumerate(_letters(call["index"]))
    )
    return describe(call, {"self": _without(index, place), "index": index}, [index], linear=("self",))


@_rule("scatter.value", "scatter.src", "scatter_add.default")
def _scatter(call: Call) -> Rule:
    """Row by row beside the dim in which the places are."""
    place, tensor = _dim(call), call["self"]
    given = [value for value in (tensor, call["index"], call.arguments.get("src")) if value is not None]
    uneven = [n for n, sizes in enumerate(zip(*(value.shape for value in given))) if len(set(sizes)) > 1]
    dims = _without(_letters(tensor), place, *uneven)
    inputs = {name: dims for name in ("self", "index", "src") if name in call.arguments}
    linear = ("self src",) if "src" in inputs else ("self",) if call["value"] == 0 else ()
    return describe(call, inputs, [dims], linear=linear)


# --- attention --------------------------------------------------------------------------------------------------------


def _attention_dims(call: Call) -> tuple[dict[str, Dims], str]:
    """Dims of queries, keys, values and mask, and the letters that stay whole."""
    heads = "h" if call["query"].shape[1] == call["key"].shape[1] else "."
    inputs = {name: dims_of(f"b {heads} {rows}") for name, rows in (("query", "l e"), ("key", "s e"), ("value", "s f"))}
    if call["attn_mask"] is not None:
        shape = (*call["query"].shape[:3], call["key"].shape[2])
        inputs["attn_mask"] = _aligned(call["attn_mask"], dims_of(f"b {heads} l s"), shape)
    return inputs, "s e f" + (" l" if call["is_causal"] else "")


@_rule("_scaled_dot_product_flash_attention_for_cpu.default")
def _attention(call: Call) -> Rule:
    if call["dropout_p"]:
        return runs_whole(call)
    inputs, whole = _attention_dims(call)
    query = inputs["query"]
    scores = " ".join(name for name in inputs if name != "value")
    made = [(*query[:3], ("f",)), query[:3]]
    return describe(call, inputs, made, linear=("value",), whole=whole, reads=(f"{scores} value", scores))


@_rule("_scaled_dot_product_flash_attention_for_cpu_backward.default")
def _attention_backward(call: Call) -> Rule:
    if call["dropout_p"]:
        return runs_whole(call)
    inputs, whole = _attention_dims(call)
    query = inputs["query"]
    made = [query, inputs["key"], inputs["value"]]
    inputs |= {"grad_out": (*query[:3], ("f",)), "out": (*query[:3], ("f",)), "logsumexp": query[:3]}
    return describe(call, inputs, made, linear=("grad_out",), whole=whole)


# --- shapes -----------------------------------------------------------------------------------------------------------


def view_dims(before: Sequence[int], after: Sequence[int]) -> tuple[Dims, Dims, dict[str, int], frozenset[str]]:
    """Letters of a view's dims, their sizes, and those that stay whole: what lies outermost in both may be cut.

    Dims are taken together until both sides have as many elements. One dim that becomes several is made of them; of
    several that become several, the outermost have their common divisor in common.
    """
    if 0 in before:
        return ((),) * len(before), ((),) * len(after), {}, frozenset()
    dims: tuple[list[tuple[str, ...]], list[tuple[str, ...]]] = [() for _ in before], [() for _ in after]
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    places = [[n for n, size in enumerate(shape) if size != 1] for shape in (before, after)]
    at = [0, 0]
    while at[0] < len(places[0]):
        groups: tuple[list[int], list[int]] = ([], [])
        products = [1, 1]
        while not groups[0] or products[0] != products[1]:
            side = 0 if products[0] <= products[1] else 1
            place = places[side][at[side]]
            groups[side].append(place)
            products[side] *= (before, after)[side][place]
            at[side] += 1
        (mine, theirs), start = groups, len(sizes)
        if len(mine) > 1 and len(theirs) > 1:
            common = math.gcd(before[mine[0]], after[theirs[0]])
            shared = f"v{start}"
            sizes[shared] = common
            for side, (shape, group) in enumerate(((before, mine), (after, theirs))):
                rest = shape[group[0]] // common
                sizes[f"{shared}{'ab'[side]}"] = rest
                whole.add(f"{shared}{'ab'[side]}")
                dims[side][group[0]] = (shared, f"{shared}{'ab'[side]}") if rest > 1 else (shared,)
            continue
        several, side = (mine, 0) if len(mine) > 1 else (theirs, 1)
        letters = tuple(f"v{start + n}" for n in range(len(several)))
        for place, letter in zip(several, letters, strict=True):
            dims[side][place] = (letter,)
            sizes[letter] = (before, after)[side][place]
        dims[1 - side][groups[1 - side][0]] = letters
    return tuple(dims[0]), tuple(dims[1]), sizes, frozenset(whole)


@_rule("view.default", "_unsafe_view.default", "reshape.default", "squeeze.default", "squeeze.dim", "squeeze.dims")
@_rule("unsqueeze.default")
def _view(call: Call) -> Rule:
    tensor, made = call["self"], call.made
    before, after, sizes, whole = view_dims(tensor.shape, made.shape)
    return describe(
        call,
        {"self": before},
        [after],
        linear=("self",),
        sizes=sizes,
        whole=whole,
        run=lambda parts, here: parts[0].reshape(here.shapes[0]),
    )


@_rule("permute.default", "transpose.int", "t.default")
def _permute(call: Call) -> Rule:
    dims = _letters(call["self"])
    order = list(range(len(dims)))
    if "dims" in call.arguments:
        order = [place % len(dims) for place in call["dims"]]
    elif len(dims) > 1:
        pair = (_dim(call, "dim0"), _dim(call, "dim1")) if "dim0" in call.arguments else (0, 1)
        order[pair[0]], order[pair[1]] = order[pair[1]], order[pair[0]]
    return describe(call, {"self": dims}, [tuple(dims[place] for place in order)], linear=("self",))


@_rule("expand.default")
def _expand(call: Call) -> Rule:
    made = call.made
    dims = _letters(made)
    inputs = {"self": _aligned(call["self"], dims, made.shape)}
    return describe(call, inputs, [dims], linear=("self",), run=_sizes_as(call, "size"))


@_rule("repeat.default")
def _repeat(call: Call) -> Rule:
    ahead = len(call["repeats"]) - call["self"].ndim
    own = tuple(() if times != 1 else dim for dim, times in zip(_letters(call["self"]), call["repeats"][ahead:]))
    return describe(call, {"self": own}, [((),) * ahead + own], linear=("self",))


@_rule("slice.Tensor")
def _slice(call: Call) -> Rule:
    dims, made = _letters(call["self"]), call.made
    own = _without(dims, *(n for n in range(len(dims)) if made.shape[n] != call["self"].shape[n]))
    return describe(call, {"self": own}, [own], linear=("self",), run=_sliced(call, own))


def _sliced(call: Call, dims: Dims) -> Run:
    place = _dim(call)
    return (lambda parts, here: parts[0]) if dims[place] else (lambda parts, here: call(parts))


@_rule("slice_backward.default", "select_backward.default")
def _slice_backward(call: Call) -> Rule:
    made = call.made
    place = call["dim"] % made.ndim
    dims = _without(_letters(made), place)
    gradient = dims if str(call.op).startswith("aten.slice") else dims[:place] + dims[place + 1 :]
    return describe(call, {"grad_output": gradient}, [dims], linear=_GRADIENT, run=_sizes_as(call, "input_sizes"))


@_rule("select.int", "unbind.int")
def _select(call: Call) -> Rule:
    place = _dim(call)
    dims = _without(_letters(call["self"]), place)
    left = dims[:place] + dims[place + 1 :]
    return describe(call, {"self": dims}, [left for _ in call.outputs], linear=("self",))


@_rule("split.Tensor", "split_with_sizes.default", "flip.default", "roll.default", "tril.default", "triu.default")
def _along_a_dim(call: Call) -> Rule:
    """What looks along dims that stay whole, and at all others row by row."""
    tensor: Tensor = call["self"]
    if "dims" in call.arguments:
        places = [place % tensor.ndim for place in call["dims"]] or range(tensor.ndim)
    else:
        places = [_dim(call)] if "dim" in call.arguments else range(tensor.ndim - 2, tensor.ndim)
    dims = _without(_letters(tensor), *places)
    return describe(call, {"self": dims}, [dims for _ in call.outputs], linear=("self",))


@_rule("cat.default")
def _cat(call: Call) -> Rule:
    if any(tensor.ndim != call.inputs[-1].ndim for tensor in call.inputs):
        return runs_whole(call)  # an empty tensor of one dim, which cat leaves out
    dims = _without(_letters(call.inputs[0]), call["dim"] % call.inputs[0].ndim)
    return describe(call, {"tensors": [dims for _ in call.inputs]}, [dims], linear=("tensors",))


@_rule("stack.default")
def _stack(call: Call) -> Rule:
    dims = _letters(call.inputs[0])
    place = call["dim"] % (len(dims) + 1)
    made = (*dims[:place], (), *dims[place:])
    return describe(call, {"tensors": [dims for _ in call.inputs]}, [made], linear=("tensors",))


@_rule("constant_pad_nd.default")
def _pad(call: Call) -> Rule:
    dims = _letters(call["self"])
    pads = [(before, after) for before, after in zip(call["pad"][::2], call["pad"][1::2])]
    padded = [len(dims) - 1 - n for n, pad in enumerate(pads) if pad != (0, 0)]
    own = _without(dims, *padded)
    return describe(call, {"self": own}, [own], linear=("self",) if call["value"] == 0 else ())


@_rule("new_zeros.default", "new_ones.default", "new_full.default", "new_empty.default")
@_rule("zeros.default", "ones.default", "full.default", "empty.memory_format")
def _made(call: Call) -> Rule:
    made = call.made
    inputs = {"self": _whole(call["self"])} if "self" in call.arguments else {}
    return describe(call, inputs, [_letters(made)], run=_sizes_as(call, "size"))


# --- convolutions and pools -------------------------------------------------------------------------------------------


def _convolution_dims(call: Call) -> tuple[Dims, Dims, Dims, dict[str, int]]:
    """Dims of input, weight and output, and sizes of letters that are parts of dims; windows stay whole."""
    groups, weight = call["groups"], call["weight"]
    window = ((),) * (weight.ndim - 2)
    outside, inside = (("o",), ("c",)) if groups == 1 else (("g", "o"), ("g", "c"))
    first, second = (inside, ("o",)) if call["transposed"] else (outside, ("c",))
    made = weight.shape[1] if call["transposed"] else weight.shape[0] // groups
    read = weight.shape[0] // groups if call["transposed"] else weight.shape[1]
    sizes = {} if groups == 1 else {"g": groups, "c": read, "o": made}
    return (("n",), inside, *window), (first, second, *window), (("n",), outside, *window), sizes


@_rule("convolution.default")
def _convolution(call: Call) -> Rule:
    x, weight, made, sizes = _convolution_dims(call)
    has_bias = call["bias"] is not None
    inputs = {"input": x, "weight": weight} | ({"bias": made[1:2]} if has_bias else {})
    linear = ("input bias", "weight bias") if has_bias else ("input", "weight")
    groups = call["groups"]
    return describe(
        call,
        inputs,
        [made],
        linear=linear,
        added="bias",
        sizes=sizes,
        run=lambda parts, here: call(parts, groups=here.sizes["g"] if groups > 1 else 1),
    )


@_rule("convolution_backward.default")
def _convolution_backward(call: Call) -> Rule:
    x, weight, made, sizes = _convolution_dims(call)
    groups = call["groups"]

    def run(parts: Sequence[Tensor], here: Here) -> Any:
        bias = None if call["bias_sizes"] is None else [parts[0].shape[1]]
        return call(parts, groups=here.sizes["g"] if groups > 1 else 1, bias_sizes=bias)

    return describe(
        call,
        {"grad_output": made, "input": x, "weight": weight},
        [x, weight, made[1:2]],
        linear=("grad_output", "input", "weight"),
        reads=("grad_output weight", "grad_output input", "grad_output"),
        sizes=sizes,
        run=run,
    )


_POOLS = {
    "max_pool2d_with_indices": (),
    "max_pool2d_with_indices_backward": _GRADIENT,
    "avg_pool2d": ("self",),
    "avg_pool2d_backward": _GRADIENT,
    "_adaptive_avg_pool2d": ("self",),
    "_adaptive_avg_pool2d_backward": _GRADIENT,
    "upsample_nearest2d": ("self",),
    "upsample_bilinear2d": ("self",),
    "upsample_nearest2d_backward": _GRADIENT,
    "upsample_bilinear2d_backward": _GRADIENT,
}


@_rule(*(f"{name}.default" for name in _POOLS))
def _planes(call: Call) -> Rule:
    """Operators that take every plane by itself."""
    ahead = call.inputs[0].ndim - 2
    dims = (*((f"d{n}",) for n in range(ahead)), (), ())
    inputs = {name: dims for name, value in call.arguments.items() if isinstance(value, Tensor)}
    run = _sizes_as(call, "input_size") if "input_size" in call.arguments else None
    linear = _POOLS[str(call.op).removeprefix("aten.").removesuffix(".default")]
    return describe(call, inputs, [dims for _ in call.outputs], linear=linear, run=run)
