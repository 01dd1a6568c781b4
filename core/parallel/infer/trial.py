"""The trial of roles: the model runs as one rank would, without values, and must do what the trace foresees."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from core.compat import TorchDispatchMode, tree_leaves
from core.layout import largest_share
from core.parallel.infer.axes import Axis, flat
from core.parallel.infer.choose import Unsure
from core.parallel.infer.flow import Operation, Trace, Value, watched
from core.parallel.infer.local import carries, local_shape, local_size, rows_of_unit
from core.parallel.infer.roles import Roles
from core.parallel.infer.styles import Role, Trial, between

MOST_SIZES = 4
"""Attributes of one module that are changed together at most."""
COUNTS = {"view", "_unsafe_view", "reshape", "expand", "slice", "split", "split_with_sizes", "narrow", "new_zeros"}
COUNTS |= {"new_ones", "new_full", "new_empty", "zeros", "ones", "full", "empty", "arange", "repeat", "as_strided"}
"""Operators whose arguments count a rank's part, so that they differ from those of the whole."""

NOTHING = ("detach", "alias", "lift_fresh", "clone", "contiguous")
"""Operators that hand their tensor on, and are called or not as tensors happen to lie in memory."""
VIEWS = ("view", "_unsafe_view", "reshape", "_reshape_alias")
"""Operators of which it depends on how a tensor lies in memory which one is called."""


class _Differs(Exception):
    """The trial is not what the trace foresees: at which operation, in which modules, and how."""

    def __init__(self, at: int, modules: Sequence[str], how: str):
        super().__init__(how)
        self.at, self.modules = at, modules


def fit(whole: nn.Module, inputs: Mapping[str, Any], roles: Roles, ranks: int) -> None:
    """Find the attributes with which the model runs as a rank of it should.  Raises Unsure where none are found."""
    sizes = _sizes(roles, ranks)
    for name in sorted(roles.handlers):
        role = Role() if _candidates(whole.get_submodule(name), sizes) else None
        if role is not None:
            roles.roles.setdefault(name, role)
    differs, handled = tried(whole, inputs, roles, ranks), set[str]()
    while differs is not None:
        name = next((n for n in reversed(differs.modules) if n in roles.handlers and n not in handled), None)
        if name is None or name not in roles.roles:
            raise Unsure(_axes_at(roles, differs.at), str(differs))
        handled.add(name)
        module, before = whole.get_submodule(name), roles.role(name).sizes
        candidates = _candidates(module, sizes)
        alike = [name, *_alike_to_come(whole, roles, name, sizes, differs.at)]
        counts = range(min(len(candidates), MOST_SIZES) + 1)
        best = before, differs
        for option in (_sized(module, o, sizes) for n in counts for o in combinations(candidates, n)):
            if option == before:
                continue
            _give(roles, alike, option)
            found = tried(whole, inputs, roles, ranks)
            if found is None:
                return
            passed = found.at > differs.at and name not in found.modules
            if passed or found.at > best[1].at:
                best = option, found
            if passed:
                break
        if best[1].at <= differs.at:
            raise Unsure(_axes_at(roles, differs.at), str(differs))
        _give(roles, alike, best[0])
        differs = best[1]


def _alike_to_come(whole: nn.Module, roles: Roles, name: str, sizes: Mapping[int, int], at: int) -> Iterator[str]:
    """Modules that the trial has not come to, of the same class and counts: nearly always they need the same."""
    module, come = whole.get_submodule(name), {n for op in _foreseen(roles)[: at + 1] for n in op.modules}
    counts = _sized(module, _candidates(module, sizes), sizes)
    for other in sorted(roles.handlers - come - {name}):
        found = whole.get_submodule(other)
        if type(found) is type(module) and _sized(found, _candidates(found, sizes), sizes) == counts:
            yield other


def _give(roles: Roles, names: Iterable[str], option: Mapping[str, int]) -> None:
    for name in names:
        roles.role(name).sizes = dict(option)


def _axes_at(roles: Roles, at: int) -> set[Axis]:
    """The cut axes of an operation, or of those before it."""
    for op in reversed(roles.found.operations[: at + 1]):
        found = set[Axis]().union(*(roles.has(value) for value in (*op.given, *op.made)))
        if found:
            return found
    return roles.axes


def _sizes(roles: Roles, ranks: int) -> dict[int, int]:
    """The sizes of dims that are cut -> those of a rank's part, which code may count with."""
    found: dict[int, int] = {}
    values = chain(roles.found.parameters.values(), (v for op in roles.found.operations for v in op.made))
    for value in values:
        if not roles.has(value) or roles.has(value) & roles.chosen.vocabularies:
            continue
        for dim in value.dims:
            axes = flat(dim)
            for number, axis in enumerate(axes):
                for end in range(number + 1, len(axes) + 1):
                    if carries((axis,), roles.axes):
                        stretch = axes[number:end]
                        found[prod(a.size for a in stretch)] = local_size(stretch, roles.axes, ranks)
    return found


def _candidates(module: nn.Module, sizes: Mapping[int, int]) -> list[str]:
    """Attributes of a module, and of the configuration that it has, which its code may count with."""
    config = getattr(module, "config", None)
    named = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    named |= {f"config.{name}": value for name, value in (vars(config) if config is not None else {}).items()}
    return [name for name, value in named.items() if type(value) is int and value in sizes]


def _sized(module: nn.Module, option: Iterable[str], sizes: Mapping[int, int]) -> dict[str, int]:
    """The attributes with the rank's counts."""
    return {name: sizes[attrgetter(name)(module)] for name in option}


def tried(whole: nn.Module, inputs: Mapping[str, Any], roles: Roles, ranks: int) -> _Differs | None:
    """Run the model as a rank would; None where it does what the trace foresees."""
    model = copy.deepcopy(whole, {id(tensor): tensor for tensor in chain(whole.parameters(), whole.buffers())})
    for name, value in roles.found.parameters.items():
        path, _, leaf = name.rpartition(".")
        role = roles.roles.get(path)
        if role is not None and leaf in role.cuts:
            parameter = model.get_parameter(name)
            cut = role.cuts[leaf]
            dim, shape = value.dims[cut.dim], list(parameter.shape)
            unit = 1 if cut.parts or not carries(dim, roles.axes) else rows_of_unit(dim, roles.axes)
            shape[cut.dim] = sum(largest_share(n, ranks, unit) for n in cut.parts or [shape[cut.dim]])
            made = nn.Parameter(torch.empty(shape, dtype=parameter.dtype), parameter.requires_grad)
            model.get_submodule(path).register_parameter(leaf, made)
    axis = Trial(ranks)
    for name, role in roles.roles.items():
        role.wrap(model.get_submodule(name), axis, roles.axes)
    expected = _foreseen(roles)
    attempt = Trace(opaque=roles.found.opaque)
    compared = _Compared(expected, roles, ranks, attempt)
    try:
        with watched(model, attempt), torch.no_grad(), compared:
            model(**inputs)
    except _Differs as differs:
        return differs
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        said = next(iter(str(error).splitlines()), type(error).__name__)
        running = [call.name for call in attempt.running]
        return _Differs(compared.at, running, f"{running[-1] if running else 'the model'}: {said}")
    if compared.at != len(expected):
        return _Differs(compared.at, expected[compared.at].modules, "it stops early")
    return None


def _foreseen(roles: Roles) -> list[Operation]:
    """The operations that a trial is compared with."""
    return [op for op in roles.found.operations if op.name not in NOTHING and not roles.apart & set(op.modules)]


class _Compared(TorchDispatchMode):
    """Compares operators with those foreseen, as they come."""

    def __init__(self, expected: Sequence[Operation], roles: Roles, ranks: int, attempt: Trace):
        super().__init__()
        self.expected, self.roles, self.ranks, self.attempt = expected, roles, ranks, attempt
        self.at = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, running = func._schema.name.removeprefix("aten::"), {call.name for call in self.attempt.running}
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not tensors or name in NOTHING or between.get() or self.attempt.paused or running & self.roles.apart:
            return result
        modules = [call.name for call in self.attempt.running]
        if self.at >= len(self.expected):
            raise _Differs(self.at, modules, f"{name} is called beyond the end")
        op = self.expected[self.at]
        where = modules[-1] if modules else "the model"
        same = name == op.name or (name in VIEWS and op.name in VIEWS)
        if not same or tuple(modules) != op.modules:
            raise _Differs(self.at, modules, f"{where} calls {name} and not {op.name}")
        for tensor, value in zip(tensors, op.made, strict=True):
            if tuple(tensor.shape) != (wanted := self._shape(value, op)):
                raise _Differs(self.at, modules, f"{where} ({name}) makes {tuple(tensor.shape)} and not {wanted}")
        plain = tuple(leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, bool | int | float | str))
        if name == "slice":
            if not self._same_slice(op, args, kwargs or {}):
                raise _Differs(self.at, modules, f"{where} takes another slice")
        elif name not in COUNTS and plain != op.plain:
            raise _Differs(self.at, modules, f"{where} ({name}) is given {plain} and not {op.plain}")
        self.at += 1
        return result

    def _shape(self, value: Value, op: Operation) -> tuple[int, ...]:
        if value in self.roles.made_by_rows:
            batch, length, *rest = value.shape
            return (batch, largest_share(length, self.ranks), *rest)
        if self.roles.is_own(value, op):
            return local_shape(value.dims, self.roles.axes, self.ranks)
        return value.shape

    def _same_slice(self, op: Operation, args: Any, kwargs: Any) -> bool:
        """Return whether it begins where the rank's part of the foreseen slice does."""
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        given, before = args[0].shape[dim], op.given[0].shape[dim]
        start, start_before = (
            max(0, s + n if s < 0 else s)
            for s, n in (((args[2] if len(args) > 2 else 0) or 0, given), (op.operator.arg(2, "start", 0) or 0, before))
        )
        return start * before == start_before * given
