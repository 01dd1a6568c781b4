"""What the operators touch is what the SPECs count: no pass over memory is hidden, and none is claimed.

Forward and backward run on meta tensors. A launch touches each tensor that it is given once; an operator of torch
between launches reads its arguments and writes its results. A kernel that reads its input twice in two launches is
seen, one that does so within a launch is not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from core.kernels.operator import forced
from core.kernels.spec import Case, KernelSpec, outputs_of
from tests.kernels.test_specs import SPECS

DTYPE = torch.bfloat16
MOST = 1 / 0.85  # times the SPEC's count: what the share of the bandwidth that is aimed at leaves
LEAST = 0.97
COMPUTE_BOUND = ("attention", "attention_varlen", "linear_cross_entropy", "grouped_matmul")
OTHERWISE = {
    "write_pages": "of the pages, only where tokens are written is touched",
    "layer_norm-3": "rows over 8192 elements: the sums of a backward need a second read",
    "rms_norm-2": "likewise",
    "paged_attention-3": "a prefill: compute-bound, and both launches get the pages, which one of them leaves alone",
    "paged_attention-4": "likewise, and of the pages all are counted here, those too that the window hides",
    "int8_dynamic_matmul-2": "which columns of x are outliers, and read once more, is not known here",
    "int4_matmul-0": "the backward widens the weight, which a product with its transpose would have to do by column",
    "int4_matmul-1": "likewise",
    "int4_matmul-2": "likewise",
    "int4_matmul-3": "likewise",
    "int8_dynamic_matmul-4": "torch's product of integers is called inside of the operator, which is not seen here",
}
"""Of families, or of their cases: why touched and counted differ."""


FREE = ("empty", "empty_like", "new_empty", "empty_strided", "detach", "alias", "_unsafe_view")


class Touched(TorchDispatchMode):
    """Counts bytes; views and what only makes memory move nothing."""

    def __init__(self):
        super().__init__()
        self.bytes = 0
        self.launched = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before, self.launched = self.launched, 0
        result = func(*args, **kwargs)
        launched, self.launched = self.launched, before
        name = func._schema.name.split("::")[1]
        if not func.is_view and name not in FREE:
            mutated = [a for a, given in zip(func._schema.arguments, args) if a.alias_info and a.alias_info.is_write]
            written = [given for a, given in zip(func._schema.arguments, args) if a in mutated]
            self.bytes += max(launched, bytes_of((args, kwargs, result)) + bytes_of(written))
        return result


def bytes_of(given: Any) -> int:
    """Of all tensors, each counted once, and an expanded one with what it has in memory."""
    found = {}
    for x in tree_leaves(given):
        if isinstance(x, Tensor):
            storage = x.untyped_storage()
            bytes_ = min(x.numel() * x.element_size(), storage.nbytes())
            found[storage._cdata, x.storage_offset(), x.numel()] = bytes_
    return sum(found.values())


@contextmanager
def counted() -> Iterator[Touched]:
    touched = Touched()

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        touched.launched += bytes_of((args, kwargs))

    kind = InterpretedFunction if isinstance(_some_kernel(), InterpretedFunction) else JITFunction
    with patch.object(kind, "run", launch), forced(compiling=True), touched:
        yield touched


def _some_kernel() -> Any:
    from core.kernels.softmax import _softmax_forward

    return _softmax_forward


def forward_and_backward(spec: KernelSpec, case: Case) -> tuple[int, int]:
    """Bytes that a call touches on meta tensors."""
    inputs = spec.inputs(case, DTYPE, "meta", torch.Generator())
    inputs = {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in inputs.items()}
    leaves = [n for n in spec.grads if isinstance(inputs.get(n), Tensor)]
    for name in leaves:
        inputs[name] = inputs[name].detach().requires_grad_()
    with counted() as forward:
        result = (spec.in_place or (spec.function,))[0](**inputs)
    outputs = [] if result is None else [o for o in outputs_of(result) if o.requires_grad]
    if not outputs:
        return forward.bytes, 0
    gradients = [torch.empty_like(o) for o in outputs]
    with counted() as backward:
        torch.autograd.grad(outputs, [inputs[n] for n in leaves], gradients, allow_unused=True)
    return forward.bytes, backward.bytes


CASES = [
    pytest.param(spec, case, id=f"{name}-{index}")
    for name, spec in SPECS.items()
    for index, case in enumerate(spec.timed)
    if not {name, f"{name}-{index}"} & {*COMPUTE_BOUND, *OTHERWISE}
]


@pytest.mark.parametrize(("spec", "case"), CASES)
def test_what_is_touched_is_what_is_counted(spec: KernelSpec, case: Case) -> None:
    traffic = spec.traffic(case, DTYPE)
    found = forward_and_backward(spec, case)
    for which, touched, promised in zip(
        ("forward", "backward"), found, (traffic.forward_bytes, traffic.backward_bytes)
    ):
        if touched or promised:
            ratio = touched / max(promised, 1)
            said = f"{spec.name} {which} of {dict(case)}: {touched:,} bytes touched, {promised:,} counted: {ratio:.2f}"
            print(said)
            assert LEAST <= ratio <= MOST, said
