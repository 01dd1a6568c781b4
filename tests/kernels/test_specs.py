"""Every kernel against its reference, generated from the SPECs; on a CPU by Triton's interpreter.

A result is right when it is as near to the fp64 reference as the SPEC's tolerance says, forward and backward, on
memory that is full of NaN where the kernel has not written, on contiguous and on strided inputs.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.trace_rules import get_torch_obj_rule_map

from core.kernels import specs
from core.kernels.operator import forced
from core.kernels.spec import Case, KernelSpec, outputs_of
from tests.support.device import DEVICE

SPECS = specs()
pytestmark = pytest.mark.usefixtures("device")
CASES = [(name, index) for name, spec in SPECS.items() for index in range(len(spec.cases))]
IDS = [f"{name}-{index}" for name, index in CASES]


def formats(name: str, index: int) -> list[torch.dtype]:
    """fp32, and one of 16 bits, by turns: those differ by their rounding alone. A family's first case runs in all.

    By the interpreter, which is slow, the others run in fp32 on strided inputs alone, where they have 16 bits.
    """
    known, turn = SPECS[name].dtypes, (torch.bfloat16, torch.float16)[index % 2]
    if index == 0:
        return list(known)
    return [turn] if DEVICE == "cpu" and turn in known else [dtype for dtype in known if dtype in (torch.float32, turn)]


CASES_IN_FORMATS = [
    pytest.param(name, index, dtype, id=f"{name}-{index}-{str(dtype).removeprefix('torch.')}")
    for name, index in CASES
    for dtype in formats(name, index)
]
Lay = Callable[[Tensor], Tensor]


@contextmanager
def poisoned() -> Iterator[None]:
    """New floating memory is NaN, integers are -77: what a kernel leaves out shows."""
    # Dynamo looks torch's functions up once: had it seen these, it would know torch's own no more.
    get_torch_obj_rule_map()
    real = {name: getattr(torch, name) for name in ("empty", "empty_like", "empty_strided")}
    real_new = Tensor.new_empty

    def spoil(tensor: Tensor) -> Tensor:
        if type(tensor) is not Tensor or tensor.is_meta:
            return tensor
        return tensor.fill_(math.nan if tensor.is_floating_point() else -77)

    def wrap(make: Any) -> Any:
        return lambda *args, **kwargs: spoil(make(*args, **kwargs))

    functions = {name: wrap(make) for name, make in real.items()}
    with patch.multiple(torch, **functions), patch.object(Tensor, "new_empty", wrap(real_new)):
        yield


def strided(tensor: Tensor) -> Tensor:
    """The same values in memory with gaps, the last two dims exchanged."""
    if tensor.ndim == 0 or tensor.numel() == 0:
        return tensor
    if tensor.ndim == 1:
        return torch.stack((tensor, torch.zeros_like(tensor)), -1)[..., 0]
    gaps = torch.stack((tensor.mT, torch.zeros_like(tensor.mT)), -1)
    return gaps[..., 0].mT


def make(spec: KernelSpec, case: Case, dtype: torch.dtype, lay: Lay | None = None) -> dict[str, Any]:
    """The case's inputs; those that may be strided as `lay` puts them into memory."""
    inputs = spec.inputs(case, dtype, DEVICE, torch.Generator().manual_seed(7))
    if lay is None:
        return inputs
    return {n: lay(t) if isinstance(t, Tensor) and n not in spec.alone else t for n, t in inputs.items()}


def with_grads(inputs: dict[str, Any], names: tuple[str, ...]) -> list[Tensor]:
    """Make leaves of the arguments that have gradients, where they are given."""
    leaves = [n for n in names if isinstance(inputs.get(n), Tensor)]
    for name in leaves:
        inputs[name] = inputs[name].detach().requires_grad_()
    return [inputs[name] for name in leaves]


def run(function: Any, spec: KernelSpec, inputs: dict[str, Any], weights: list[Tensor] | None) -> list[Tensor]:
    """Outputs, then gradients of their weighted sum."""
    leaves = with_grads(inputs, spec.grads)
    outputs = outputs_of(function(**inputs))
    found = [o.detach() for o in outputs]
    if not leaves:
        return found
    total = sum((o * w.to(o.dtype)).sum() for o, w in zip(outputs, weights or []) if o.requires_grad)
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    return found + [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves)]


def widened(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def check(spec: KernelSpec, case: Case, dtype: torch.dtype, lay: Lay | None = None) -> None:
    inputs = make(spec, case, dtype, lay)
    exact = {name: widened(value) for name, value in inputs.items()}
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        shapes = [o.shape for o in outputs_of(spec.reference(**{n: _copy(v) for n, v in exact.items()}))]
    weights = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).double().to(DEVICE) for s in shapes]
    expected = run(spec.reference, spec, {n: _copy(v) for n, v in exact.items()}, weights)
    with forced(), poisoned():
        found = run(spec.function, spec, dict(inputs), weights)
    assert len(found) == len(expected)
    for index, (got, want) in enumerate(zip(found, expected)):
        assert got.shape == want.shape, f"{spec.name}: result {index} of {case}"
        if want.numel() == 0:
            continue
        same = torch.equal(got.isfinite(), want.isfinite())
        assert same, f"{spec.name}: result {index} of {case} in {dtype} is not finite where it should be, or is"
        if not want.is_floating_point():
            assert torch.equal(got, want), f"{spec.name}: result {index} of {case} in {dtype}"
            continue
        got, want = (t.double()[want.isfinite()] for t in (got, want))
        if want.numel():
            error = float((got - want).abs().max()) / max(float(want.abs().max()), 1e-30)
            limit = spec.tolerance[dtype]
            assert error <= limit, f"{spec.name}: result {index} of {case} in {dtype} is off by {error:.2g} > {limit:g}"


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@pytest.mark.parametrize(("name", "index", "dtype"), CASES_IN_FORMATS)
def test_kernel(name: str, index: int, dtype: torch.dtype) -> None:
    check(SPECS[name], SPECS[name].cases[index], dtype)


@pytest.mark.parametrize(("name", "index"), CASES, ids=IDS)
def test_strided(name: str, index: int) -> None:
    spec = SPECS[name]
    check(spec, spec.cases[index], spec.dtypes[0], strided)


def drawn(spec: KernelSpec) -> st.SearchStrategy[Case]:
    assert spec.space is not None
    return st.fixed_dictionaries(
        {
            n: st.integers(v.start, v.stop - 1) if isinstance(v, range) else st.sampled_from(v)
            for n, v in spec.space.items()
        }
    )


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.space is not None])
def test_random_shapes(name: str) -> None:
    spec = SPECS[name]

    @settings(max_examples=5, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=drawn(spec), strides=st.booleans())
    def property_(case: Case, strides: bool) -> None:
        check(spec, case, spec.dtypes[0], strided if strides else None)

    property_()


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.gradcheck is not None])
def test_gradients_of_the_reference(name: str) -> None:
    """The reference is what the kernels are compared with; its own gradients are compared with differences."""
    spec = SPECS[name]
    inputs = {n: widened(v) for n, v in make(spec, spec.gradcheck or {}, torch.float64).items()}
    leaves = [n for n in spec.grads if isinstance(inputs.get(n), Tensor)]

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        outputs = outputs_of(spec.reference(**(inputs | dict(zip(leaves, values)))))
        return tuple(o for o in outputs if o.is_floating_point() and o.requires_grad)

    assert torch.autograd.gradcheck(function, tuple(inputs[n].detach().requires_grad_() for n in leaves), atol=1e-6)


@pytest.mark.parametrize("name", list(SPECS))
def test_traced_without_computing(name: str) -> None:
    """Shapes, dtypes and gradients' shapes are known from meta tensors alone, as torch.compile needs them."""
    spec = SPECS[name]
    case, dtype = spec.cases[0], spec.dtypes[0]
    real = make(spec, case, dtype)
    expected = run(spec.reference, spec, dict(real), _ones(spec, real))
    meta = {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in real.items()}
    with forced():
        found = run(spec.function, spec, meta, [w.to("meta") for w in _ones(spec, real)])
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in expected]


def _ones(spec: KernelSpec, inputs: dict[str, Any]) -> list[Tensor]:
    with torch.no_grad():
        outputs = outputs_of(spec.reference(**{n: _copy(v) for n, v in inputs.items()}))
    return [torch.ones_like(o) for o in outputs]


@pytest.mark.parametrize("name", list(SPECS))
def test_compiled_without_a_graph_break(name: str) -> None:
    spec = SPECS[name]
    inputs = make(spec, spec.cases[0], spec.dtypes[0])
    with forced():
        expected = outputs_of(spec.function(**{n: _copy(v) for n, v in inputs.items()}))
        torch._dynamo.reset()
        compiled = torch.compile(spec.function, fullgraph=True, backend="aot_eager")
        found = outputs_of(compiled(**{n: _copy(v) for n, v in inputs.items()}))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_a_wrong_result_is_seen() -> None:
    """The checks above can fail: a reference that is off by a thousandth is."""
    spec = SPECS["softmax"]
    off = KernelSpec(**{**vars(spec), "reference": lambda **inputs: spec.reference(**inputs) * 1.001})
    with pytest.raises(AssertionError, match="is off by"):
        check(off, spec.cases[0], torch.float32)


def test_what_a_kernel_cannot_do_compiles_all_the_same() -> None:
    """The warning is said while tracing, and torch's own operators are in the graph."""
    x = torch.randn(3, 5, dtype=torch.float64, device=DEVICE)
    torch._dynamo.reset()
    with forced(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.compile(SPECS["softmax"].function, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, torch.softmax(x, -1))
