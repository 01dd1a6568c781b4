"""A call of every operator that has a rule, in fp64 and on odd sizes: each with the tensors that it gets."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.auto.rule import Rule
from core.auto.rules import rule_of

aten = torch.ops.aten
Case = tuple[Any, list[Any], dict[str, Any]]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 17), dtype=torch.float64)


def ids(below: int, *shape: int) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(5))


def _layer_norm(given: Tensor, size: list[int], weight: Tensor | None, bias: Tensor | None) -> Case:
    out, mean, scale = aten.native_layer_norm.default(given, size, weight, bias, 1e-5)
    return aten.native_layer_norm_backward.default, [
        drawn(*out.shape, seed=4), given, size, mean, scale, weight, bias, [True, weight is not None, bias is not None]
    ], {}  # fmt: skip


def _group_norm() -> Case:
    given, weight = drawn(3, 6, 5), drawn(6, seed=1)
    _, mean, scale = aten.native_group_norm.default(given, weight, drawn(6, seed=2), 3, 6, 5, 3, 1e-5)
    gradient = drawn(3, 6, 5, seed=3)
    return aten.native_group_norm_backward.default, [
        gradient, given, mean, scale, weight, 3, 6, 5, 3, [True, True, True]
    ], {}  # fmt: skip


def _batch_norm() -> Case:
    given, weight, bias = drawn(5, 3, 3), drawn(3, seed=1), drawn(3, seed=2)
    mean, variance = drawn(3, seed=3), drawn(3, seed=4).square()
    functional = aten._native_batch_norm_legit_functional.default
    _, saved, scale, *_ = functional(given, weight, bias, mean, variance, True, 0.1, 1e-5)
    return aten.native_batch_norm_backward.default, [
        drawn(5, 3, 3, seed=5), given, weight, mean, variance, saved, scale, True, 1e-5, [True, True, True]
    ], {}  # fmt: skip


def _running_batch_norm() -> tuple[Case, Case, Case]:
    """By running moments, which are no parameters' business; in training it is one that writes, and runs whole."""
    given, weight, bias = drawn(5, 3, 3), drawn(3, seed=1), drawn(3, seed=2)
    mean, variance = drawn(3, seed=3), drawn(3, seed=4).square()
    norm = aten.native_batch_norm.default
    _, *saved = norm(given, weight, bias, mean, variance, False, 0.1, 1e-5)
    return (
        (norm, [given, weight, bias, mean, variance, False, 0.1, 1e-5], {}),
        (norm, [given, None, None, mean, variance, False, 0.1, 1e-5], {}),
        (
            aten.native_batch_norm_backward.default,
            [drawn(5, 3, 3, seed=5), given, weight, mean, variance, *saved, False, 1e-5, [True, True, True]],
            {},
        ),
    )


def _weight_norm() -> list[Case]:
    cases: list[Case] = []
    for dim, shape in ((0, (5, 1, 1)), (2, (1, 1, 7))):
        weight, scale = drawn(5, 3, 7), drawn(*shape, seed=1)
        _, norms = aten._weight_norm_interface.default(weight, scale, dim)
        cases.append((aten._weight_norm_interface.default, [weight, scale, dim], {}))
        gradient = drawn(5, 3, 7, seed=2)
        backward = aten._weight_norm_interface_backward.default
        cases.append((backward, [gradient, weight, scale, norms, dim], {}))
    return cases


def _attention(causal: bool, masked: bool) -> tuple[Case, Case]:
    q, k, v = drawn(3, 5, 7, 4), drawn(3, 5, 9 - 2 * causal, 4, seed=1), drawn(3, 5, 9 - 2 * causal, 4, seed=2)
    named = {"attn_mask": drawn(3, 1, 7, 9, seed=3)} if masked else {}
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    out, log = forward(q, k, v, 0.0, causal, **named)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    gradient = drawn(*out.shape, seed=6)
    return (forward, [q, k, v, 0.0, causal], named), (backward, [gradient, q, k, v, out, log, 0.0, causal], named)


def _nll(reduction: int) -> tuple[Case, Case]:
    scores, target = drawn(7, 5), ids(5, 7)
    target[2] = -100
    _, total = aten.nll_loss_forward.default(scores, target, None, reduction, -100)
    gradient = drawn(7, seed=3) if reduction == 0 else drawn(1, seed=3)[0]
    forward = (aten.nll_loss_forward.default, [scores, target, None, reduction, -100], {})
    return forward, (
        aten.nll_loss_backward.default, [gradient, scores, target, None, reduction, -100, total], {}
    )  # fmt: skip


def _puts() -> list[Case]:
    """Added up, in places that come several times; written, in one dim, in two, and around one between."""
    x, values = drawn(3, 5, 7), drawn(3, 9, 7, seed=1)
    several = [ids(3, 5, 1), None, ids(7, 4)]
    return [
        (aten.index_put.default, [x, [None, ids(5, 9)], values, True], {}),
        (aten.index_put.default, [x, several, drawn(5, 4, 5, seed=2), True], {}),
        (aten._unsafe_index_put.default, [x, [ids(3, 5), ids(5, 5)], drawn(5, 1, seed=2), True], {}),
        (aten.index_put.default, [x, [None, torch.tensor([4, 1])], drawn(3, 2, 7, seed=2), False], {}),
        (aten.index_put.default, [x, [None, torch.tensor([3])], drawn(7, seed=2), False], {}),
    ]


def _pool() -> tuple[Case, Case, Case, Case]:
    given = drawn(3, 5, 6, 6)
    _, places = aten.max_pool2d_with_indices.default(given, [2, 2], [2, 2])
    gradient = drawn(3, 5, 3, 3, seed=1)
    return (
        (aten.max_pool2d_with_indices.default, [given, [2, 2], [2, 2]], {}),
        (
            aten.max_pool2d_with_indices_backward.default,
            [gradient, given, [2, 2], [2, 2], [0, 0], [1, 1], False, places],
            {},
        ),
        (aten.avg_pool2d.default, [given, [2, 2], [2, 2]], {}),
        (aten.avg_pool2d_backward.default, [gradient, given, [2, 2], [2, 2], [0, 0], False, True, None], {}),
    )


def _convolutions() -> list[Case]:
    """Two dims and one, groups, depthwise, transposed, with and without bias; each with its backward."""
    window = [[1, 1], [1, 1], [1, 1]]
    kinds: list[tuple[Tensor, Tensor, Tensor | None, list[Any]]] = [
        (drawn(3, 5, 4, 4), drawn(7, 5, 3, 3, seed=1), drawn(7, seed=2), [*window, False, [0, 0], 1]),
        (drawn(3, 5, 4), drawn(7, 5, 2, seed=1), None, [[2], [0], [1], False, [0], 1]),
        (drawn(3, 6, 4), drawn(6, 2, 3, seed=1), drawn(6, seed=2), [[1], [1], [1], False, [0], 3]),
        (drawn(3, 6, 4), drawn(6, 1, 3, seed=1), None, [[1], [1], [1], False, [0], 6]),
        (drawn(3, 5, 4), drawn(5, 7, 3, seed=1), drawn(7, seed=2), [[2], [1], [1], True, [1], 1]),
        (drawn(3, 6, 4), drawn(6, 2, 3, seed=1), drawn(6, seed=2), [[2], [1], [1], True, [1], 3]),
    ]
    cases: list[Case] = []
    for given, weight, bias, how in kinds:
        out = aten.convolution.default(given, weight, bias, *how)
        cases.append((aten.convolution.default, [given, weight, bias, *how], {}))
        sizes = None if bias is None else [len(bias)]
        backward = [drawn(*out.shape, seed=3), given, weight, sizes, *how, [True, True, bias is not None]]
        cases.append((aten.convolution_backward.default, backward, {}))
    return cases


def cases() -> list[Case]:
    """One or more calls of every operator in `RULES`, and of pointwise operators of each kind."""
    x, y = drawn(3, 5, 7), drawn(3, 5, 7, seed=1)
    matrix, mask = drawn(5, 7), drawn(3, 5, 7, seed=2) > 0
    row = drawn(7, seed=3)
    weights, biases = drawn(5, 7, seed=4), drawn(5, 7, seed=5)
    indices = ids(7, 3, 5)
    statistics = [drawn(3, seed=1), drawn(3, seed=2), drawn(3, seed=3), drawn(3, seed=4).square()]
    kept: list[Case] = [
        (aten.mm.default, [drawn(5, 7), drawn(7, 3, seed=1)], {}),
        (aten.addmm.default, [drawn(3), drawn(5, 7, seed=2), drawn(7, 3, seed=1)], {"alpha": 2.0}),
        (aten.addmm.default, [drawn(5, 1), drawn(5, 7, seed=2), drawn(7, 3, seed=1)], {"beta": 0.5}),
        (aten.bmm.default, [drawn(3, 5, 7), drawn(3, 7, 9, seed=1)], {}),
        (aten.baddbmm.default, [drawn(3, 5, 9, seed=2), drawn(3, 5, 7), drawn(3, 7, 9, seed=1)], {}),
        *((op, [x], {}) for op in (aten.neg.default, aten.clone.default, aten.detach.default, aten.alias.default)),
        (aten.lift_fresh_copy.default, [x], {}),
        (aten._to_copy.default, [x], {"dtype": torch.float64}),
        (aten._to_copy.default, [x], {"dtype": torch.int64}),
        *((op, [x, y], {}) for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)),
        *((op, [x, row], {}) for op in (aten.add.Tensor, aten.mul.Tensor, aten.maximum.default)),
        *((op, [x, 3.0], {}) for op in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.add.Scalar)),
        (aten.mul.Scalar, [x, 3.0], {}),
        (aten.pow.Tensor_Scalar, [x, 2], {}),
        *((op, [x], {}) for op in (aten.gelu.default, aten.relu.default, aten.exp.default, aten.tanh.default)),
        (aten.rsqrt.default, [x.square() + 1], {}),
        (aten.where.self, [mask, x, y], {}),
        (aten.where.self, [mask[:, :1], x, drawn(1)[0]], {}),
        (aten.addcmul.default, [x, y, drawn(3, 5, 7, seed=6)], {"value": 0.5}),
        (aten.masked_fill.Scalar, [x, mask[0], 0], {}),
        (aten.masked_fill.Scalar, [x, mask, -5.0], {}),
        (aten.eq.Tensor, [x, y], {}),
        *((op, [x, y], {}) for op in (aten.gelu_backward.default, aten.silu_backward.default)),
        *((op, [x, y], {}) for op in (aten.sigmoid_backward.default, aten.tanh_backward.default)),
        (aten.threshold_backward.default, [x, y, 0], {}),
        *((op, [x], {}) for op in (aten.zeros_like.default, aten.ones_like.default)),
        (aten.full_like.default, [x, 2.0], {}),
        (aten.zero.default, [x], {}),
        (aten.fill.Scalar, [x, 2.0], {}),
        (aten.fill.Tensor, [x, drawn(1)[0]], {}),
        *((aten.copy.default, [x, given], {}) for given in (y, row, drawn(5, 1, seed=8))),
        (aten.masked_fill.Tensor, [x, mask, drawn(1)[0]], {}),
        *((aten.mse_loss.default, [x, y, reduction], {}) for reduction in range(3)),
        (aten.mse_loss_backward.default, [drawn(1)[0], x, y, 1], {}),
        (aten.mse_loss_backward.default, [drawn(3, 5, 7, seed=7), x, y, 0], {}),
        (aten.sum.default, [x], {}),
        (aten.sum.dim_IntList, [x, [1]], {}),
        (aten.sum.dim_IntList, [x, [0, -1], True], {}),
        (aten.mean.default, [x], {}),
        (aten.mean.dim, [x, [1]], {}),
        (aten.mean.dim, [x, [-1], True], {}),
        (aten.amax.default, [x, [1]], {}),
        (aten.amin.default, [x, [-1], True], {}),
        *((op, [x, 1], {}) for op in (aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim)),
        *((op, [x], {}) for op in (aten.max.default, aten.min.default, aten.prod.default)),
        (aten.prod.dim_int, [x, 1], {}),
        *((op, [mask], {}) for op in (aten.any.default, aten.all.default)),
        *((op, [mask, 1], {}) for op in (aten.any.dim, aten.all.dim)),
        *((op, [x, [1]], {}) for op in (aten.var.correction, aten.var_mean.correction, aten.std.correction)),
        (aten.logsumexp.default, [x, [1]], {}),
        (aten.linalg_vector_norm.default, [x], {}),
        (aten.linalg_vector_norm.default, [x, 2, [1]], {}),
        *((op, [x, 1], {}) for op in (aten.cumsum.default, aten.cumprod.default, aten.argsort.default)),
        (aten.sort.default, [x, 1], {}),
        (aten.sort.stable, [x], {"stable": True, "dim": 1}),
        (aten.topk.default, [x, 2, 1], {}),
        (aten._softmax.default, [x, -1, False], {}),
        (aten._softmax.default, [x, 1, False], {}),
        (aten._safe_softmax.default, [x.masked_fill(mask.logical_and(mask[:1]), -math.inf), 1], {}),
        (aten._safe_softmax.default, [x.index_fill(1, torch.tensor([2]), -math.inf), -1], {}),
        (aten._log_softmax.default, [matrix, 1, False], {}),
        (aten._softmax_backward_data.default, [x, y.softmax(1), 1, torch.float64], {}),
        (aten._log_softmax_backward_data.default, [matrix, weights.log_softmax(-1), -1, torch.float64], {}),
        *(case for reduction in range(3) for case in _nll(reduction)),
        (aten.native_layer_norm.default, [x, [7], drawn(7, seed=8), drawn(7, seed=9), 1e-5], {}),
        (aten.native_layer_norm.default, [x, [5, 7], weights, biases, 1e-5], {}),
        (aten.native_layer_norm.default, [x, [7], None, None, 1e-5], {}),
        _layer_norm(x, [7], drawn(7, seed=8), drawn(7, seed=9)),
        _layer_norm(x, [5, 7], weights, biases),
        _layer_norm(x, [7], None, None),
        (
            aten.native_group_norm.default,
            [drawn(3, 6, 5), drawn(6, seed=1), drawn(6, seed=2), 3, 6, 5, 3, 1e-5],
            {},
        ),
        _group_norm(),
        (
            aten._native_batch_norm_legit_functional.default,
            [drawn(5, 3, 3), *statistics, True, 0.1, 1e-5],
            {},
        ),
        _batch_norm(),
        *_running_batch_norm(),
        *_weight_norm(),
        (aten.embedding.default, [drawn(7, 5), indices], {}),
        (aten.embedding_dense_backward.default, [drawn(3, 5, 7), indices, 7, -1, False], {}),
        (aten.embedding_dense_backward.default, [drawn(3, 5, 7), indices, 7, 4, False], {}),
        (aten.index_select.default, [x, 1, ids(5, 4)], {}),
        (aten.index.Tensor, [x, [None, ids(5, 3, 3)]], {}),
        (aten.index.Tensor, [drawn(5, 7), [ids(5, 3, 1, 1), ids(7, 1, 1, 5)]], {}),
        (aten.index.Tensor, [x, [ids(3, 5, 1), None, ids(7, 3)]], {}),
        *_puts(),
        (aten.scatter.value, [x, 1, ids(5, 3, 2, 7), 0.0], {}),
        (aten.scatter.value, [x, 1, ids(5, 3, 2, 5), 2.0], {}),
        (aten.scatter.src, [x, -1, torch.arange(4).expand(3, 5, 4), drawn(3, 5, 4, seed=8)], {}),
        (aten.scatter_add.default, [x, 1, ids(5, 3, 4, 7), drawn(3, 4, 7, seed=8)], {}),
        (aten.gather.default, [x, 1, ids(5, 3, 4, 7)], {}),
        *_attention(False, False),
        *_attention(True, False),
        *_attention(False, True),
        (aten.view.default, [drawn(3, 5, 8), [15, 8]], {}),
        (aten.view.default, [drawn(6, 5), [3, 2, 5]], {}),
        (aten.view.default, [drawn(6, 4, 5), [4, 6, 5]], {}),
        (aten.view.default, [drawn(3, 1, 8), [3, 4, 2]], {}),
        (aten._unsafe_view.default, [drawn(6, 4), [6, 2, 2]], {}),
        (aten.reshape.default, [drawn(3, 5, 8), [3, 40]], {}),
        (aten.squeeze.default, [drawn(3, 1, 5)], {}),
        (aten.squeeze.dim, [drawn(3, 1, 5), 1], {}),
        (aten.squeeze.dims, [drawn(3, 1, 5), [1]], {}),
        (aten.unsqueeze.default, [drawn(3, 5), 1], {}),
        (aten.permute.default, [x, [2, 0, -2]], {}),
        (aten.transpose.int, [x, -1, 0], {}),
        (aten.t.default, [matrix], {}),
        (aten.t.default, [row], {}),
        (aten.expand.default, [drawn(3, 1, 5), [-1, 7, 5]], {}),
        (aten.expand.default, [drawn(5), [3, 5]], {}),
        (aten.repeat.default, [drawn(3, 5), [2, 1, 3]], {}),
        (aten.slice.Tensor, [x, 1, 1, 4], {}),
        (aten.slice.Tensor, [x, 1, 0, 9223372036854775807], {}),
        (aten.slice_backward.default, [drawn(3, 2, 7), [3, 5, 7], 1, 1, 3, 1], {}),
        (aten.select_backward.default, [drawn(3, 7), [3, 5, 7], 1, 2], {}),
        (aten.select.int, [x, 1, 2], {}),
        (aten.unbind.int, [x, 1], {}),
        (aten.split.Tensor, [x, 3, -1], {}),
        (aten.split_with_sizes.default, [x, [2, 5], 2], {}),
        (aten.flip.default, [x, [1]], {}),
        (aten.roll.default, [x, [2], [1]], {}),
        *((op, [x], {}) for op in (aten.tril.default, aten.triu.default)),
        (aten.cat.default, [[x, drawn(3, 2, 7)], 1], {}),
        (aten.stack.default, [[x, y], 1], {}),
        (aten.constant_pad_nd.default, [x, [1, 2, 0, 0]], {}),
        (aten.constant_pad_nd.default, [x, [0, 0, 1, 0], 2.0], {}),
        (aten.new_zeros.default, [x, [3, 5]], {}),
        (aten.new_ones.default, [x, [3, 5]], {}),
        (aten.new_full.default, [x, [3, 5], 2.0], {}),
        *((op, [[3, 5]], {}) for op in (aten.zeros.default, aten.ones.default)),
        (aten.full.default, [[3, 5], 2.0], {}),
        *_convolutions(),
        *_pool(),
        (aten._adaptive_avg_pool2d.default, [drawn(3, 5, 6, 6), [3, 3]], {}),
        (aten._adaptive_avg_pool2d_backward.default, [drawn(3, 5, 3, 3), drawn(3, 5, 6, 6)], {}),
        (aten.upsample_nearest2d.default, [drawn(3, 5, 3, 3), [6, 6]], {}),
        (aten.upsample_nearest2d_backward.default, [drawn(3, 5, 6, 6), [6, 6], [3, 5, 3, 3]], {}),
        (aten.upsample_bilinear2d.default, [drawn(3, 5, 3, 3), [6, 6], False], {}),
        (aten.upsample_bilinear2d_backward.default, [drawn(3, 5, 6, 6), [6, 6], [3, 5, 3, 3], False], {}),
    ]
    return kept


NOTHING_TO_COMPARE = frozenset(
    f"aten.{name}" for name in ("empty_like.default", "new_empty.default", "empty.memory_format")
)
"""Operators whose values are whatever was in memory."""


def rule_of_case(case: Case) -> Rule:
    op, args, kwargs = case
    return rule_of(op, args, kwargs, op(*args, **kwargs))


def case_of(op: Any, accept: Callable[[Case], bool] = lambda case: True) -> Case:
    """The first case of an operator that is accepted."""
    return next(case for case in cases() if case[0] is op and accept(case))
