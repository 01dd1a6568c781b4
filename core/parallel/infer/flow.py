"""A model's forward, run once without values: its operators, the axes of all tensors, and the modules that call them.

Each operator either says which axes of its operands are one (`core.parallel.infer.rules`), works element by element
(torch's own tag), or is not known: then all axes that it meets are frozen, which is never wrong and only cuts less.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from core.compat import FakeTensor, TorchDispatchMode, tree_leaves, tree_map, without_modes
from core.parallel.infer.axes import Axis, Dims, freeze, leaves_of, new_dim, noting
from core.parallel.infer.rules import Operator, attended, axes_made

ATTENTION = "scaled_dot_product_attention"
"""The operation that stands for torch's function in a trace with `attention`."""
EXPERTS = "experts"
"""The operation that stands for a module of `by_token`."""
_CONSTANT = 64
"""Elements of a constant that is noted."""


@dataclass(eq=False)
class Value:
    """A tensor of the trace.

    dims       its axes
    parameter  the name of the parameter that it is, or a view of
    learned    it follows from a parameter
    made_by    the number of the operation that made it; -1: none did
    """

    shape: tuple[int, ...]
    dims: Dims
    parameter: str | None = None
    learned: bool = False
    made_by: int = -1


@dataclass(eq=False)
class Operation:
    """An operator's call.

    number  of the operation, in their order
    plain   its arguments that are no tensors
    calls   those of the modules that were running, the outermost first
    frozen  the axes that it forbids to be cut, and why
    """

    number: int
    name: str
    given: list[Value]
    made: list[Value]
    plain: tuple[Any, ...]
    calls: "tuple[Call, ...]"
    operator: Operator
    frozen: list[tuple[Axis, str]] = field(default_factory=list)

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules that were running."""
        return tuple(call.name for call in self.calls)

    @property
    def summed(self) -> set[Axis]:
        """The axes that a product sums over."""
        return set(leaves_of((self.operator.summed or (),)))

    @property
    def rows(self) -> set[Axis]:
        """The axes that a lookup takes rows of."""
        return set(leaves_of((self.operator.rows or (),)))


@dataclass(eq=False)
class Call:
    """A module's call: what it was given and what it returned, and the numbers of the operations in between."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    first: int
    result: Any = None
    last: int = 0


@dataclass
class Trace:
    """A forward.

    values      by the identity of the tensors, which are kept
    parameters  every name of each -> its value
    outputs     of the model
    opaque      modules that are not run, since they look at values, and why; their result is taken to be like their
                first tensor, all frozen
    by_token    those of them that compute each token by itself -> the place of tokens among their arguments
    running     calls that have begun and not ended
    paused      operations are not the model's
    attention   torch's function of attention is one operation, which freezes nothing
    """

    values: dict[int, Value] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    parameters: dict[str, Value] = field(default_factory=dict)
    outputs: list[Value] = field(default_factory=list)
    opaque: dict[str, str] = field(default_factory=dict)
    by_token: Mapping[str, int | str] = field(default_factory=dict)
    running: list[Call] = field(default_factory=list)
    paused: bool = False
    attention: bool = False
    _kept: list[Tensor] = field(default_factory=list)

    def value(self, tensor: Tensor) -> Value:
        """The value of a tensor; one that nobody has made comes from outside."""
        found = self.values.get(id(tensor))
        return found or self.add(tensor, Value(tuple(tensor.shape), tuple(map(new_dim, tensor.shape))))

    def add(self, tensor: Tensor, value: Value) -> Value:
        self._kept.append(tensor)  # its identity is its own as long as it is there
        self.values[id(tensor)] = value
        return value


def trace(model: nn.Module, sample: Mapping[str, Any], found: Trace) -> Trace:
    """Note the forward of a model without values, of keyword arguments without."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        value = found.value(parameter)
        value.parameter, value.learned = value.parameter or name, True
        found.parameters[name] = value
    with watched(model, found), torch.no_grad(), _Attention(found) if found.attention else nullcontext(), _Flow(found):
        result = model(**sample)
    found.outputs = [found.value(tensor) for tensor in tensors_in(result)]
    return found


def plain_of(name: str, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """The arguments of an operator that are no tensors; of a constant its values, which a forward may count with."""
    leaves = tree_leaves((args, kwargs))
    if name == "lift_fresh" and not isinstance(leaves[0], FakeTensor) and leaves[0].numel() <= _CONSTANT:
        with without_modes():
            return tuple(leaves[0].flatten().tolist())
    return tuple(leaf for leaf in leaves if isinstance(leaf, bool | int | float | str))


def tensors_in(result: Any) -> Iterator[Tensor]:
    """Those in what a forward returns, whatever it returns."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, Mapping):
        for value in result.values():
            yield from tensors_in(value)
    elif isinstance(result, list | tuple | set):
        for value in result:
            yield from tensors_in(value)
    elif hasattr(result, "__dict__") and not isinstance(result, type | nn.Module):
        yield from tensors_in(vars(result))


@contextmanager
def watched(model: nn.Module, found: Trace) -> Iterator[None]:
    """Note the calls of modules; opaque ones return what is like their first tensor."""
    handles = []

    def before(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.running.append(Call(name, args, kwargs, len(found.operations)))
            found.calls.append(found.running[-1])

        return note

    def after(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        call = found.running.pop()
        call.result, call.last = result, len(found.operations)

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    replaced = [(model.get_submodule(name), name) for name in found.opaque]
    before_that = [module.__dict__.get("forward") for module, _ in replaced]
    for module, name in replaced:
        module.__dict__["forward"] = _by_token(found, name) if name in found.by_token else _opaque(found, name)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for (module, _), forward in zip(replaced, before_that, strict=True):
            module.__dict__.pop("forward")
            if forward is not None:
                module.__dict__["forward"] = forward


def _opaque(found: Trace, name: str) -> Callable[..., Tensor]:
    why = f"{name} looks at values"

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in given:
            for dim in found.value(tensor).dims:
                freeze(dim, why)
        found.paused = True
        made = torch.empty_like(given[0])
        found.paused = False
        found.add(made, Value(tuple(made.shape), tuple(new_dim(n, why) for n in made.shape), learned=True))
        return made

    return forward


def _by_token(found: Trace, name: str) -> Callable[..., Tensor]:
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        tokens = (dict(enumerate(args)) | kwargs)[found.by_token[name]]
        given = [found.value(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        found.paused = True
        made = torch.empty_like(tokens)
        found.paused = False
        dims, number = (*found.value(tokens).dims[:-1], new_dim(made.shape[-1])), len(found.operations)
        value = found.add(made, Value(tuple(made.shape), dims, learned=True, made_by=number))
        operator = Operator(found.by_token, (), {})
        found.operations.append(Operation(number, EXPERTS, given, [value], (), tuple(found.running), operator))
        return made

    return forward


class _Flow(TorchDispatchMode):
    """Notes operators, and what they say of axes."""

    def __init__(self, found: Trace):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, found = kwargs or {}, self.found
        result = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if found.paused or not results:
            return result
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        given = [found.value(tensor) for tensor in tensors]
        operator = Operator(func, *tree_map(lambda x: found.value(x) if isinstance(x, Tensor) else x, (args, kwargs)))
        made = []
        with noting() as frozen:
            all_dims = axes_made(operator, given, [tuple(tensor.shape) for tensor in results])
        for tensor, dims in zip(results, all_dims, strict=True):
            if any(tensor is other for other in tensors):  # in place
                made.append(found.value(tensor))
                continue
            same = given[0].parameter if operator.is_view and given else None
            learned = any(value.learned for value in given)
            made.append(found.add(tensor, Value(tuple(tensor.shape), dims, same, learned, len(found.operations))))
        plain = plain_of(operator.name, args, kwargs)
        number, running = len(found.operations), tuple(found.running)
        found.operations.append(Operation(number, operator.name, given, made, plain, running, operator, frozen))
        return result


class _Attention(TorchFunctionMode):
    """Notes torch's attention as one operation: queries, keys, values and a mask are given, the result is made."""

    def __init__(self, found: Trace):
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, found = kwargs or {}, self.found
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if found.paused or any(tensor.ndim != 4 for tensor in tensors[:3]):
            return func(*args, **kwargs)
        found.paused = True
        made = tensors[0].new_empty(*tensors[0].shape[:3], tensors[2].shape[3])
        found.paused = False
        given, number = [found.value(tensor) for tensor in tensors], len(found.operations)
        operator = Operator(func, *tree_map(lambda x: found.value(x) if isinstance(x, Tensor) else x, (args, kwargs)))
        learned = any(value.learned for value in given)
        value = found.add(made, Value(tuple(made.shape), attended(given), learned=learned, made_by=number))
        found.operations.append(Operation(number, ATTENTION, given, [value], (), tuple(found.running), operator))
        return made
