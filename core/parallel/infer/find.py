"""The tensor parallelism of a model that brings no plan: found from its forward, and proved by it.

1. `flow` runs the forward without values and learns which axes of which parameters are one.
2. An axis is cut where that is sure to compute the same: nothing is summed over it, normalised or sorted along it
   between the products with parameters in which it comes in (columns: heads, hidden features) and those in which it
   goes out in a sum (rows); or where it is a vocabulary, whose rows are looked up and whose logits leave the model.
3. Every module that owns a part of that gets a `Role`, from how its operations meet the axis.
4. The roles are tried: the model runs once more without values, as one rank would run it. It must call the same
   operators in the same order, each of the shape that the rank's part of its axes has. Where a module's own code counts
   with the whole (a number of heads), the attribute that says so gets the rank's count; which one, trying shows.

What is not sure stays whole. A model of which nothing can be cut is refused, with what stood in the way.

Gradients need no trial: of what every rank has whole and uses for its part they are sums over the ranks, and a
`copy_to` stands wherever that begins. A value that is used both ways is not cut.
"""

import copy
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, combinations
from math import prod
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from core.compat import FakeTensorMode, tree_leaves
from core.config import UserError
from core.layout import largest_share
from core.parallel.infer.axes import Axis, Dims, flat, leaves_of, size_of
from core.parallel.infer.flow import Call, Operation, Trace, Value, trace, watched
from core.parallel.infer.local import around, carries, is_stretch, local_shape, local_size, rows_of_unit
from core.parallel.infer.styles import Place, Role, Trial, between
from core.placement.style import Plan

SMALL_TABLE = 64
"""A table of rows that are only looked up is cut where it is more than this part of the parameters."""
MOST_SIZES = 4
"""Attributes of one module that are changed together at most."""
_COUNTS = {"view", "_unsafe_view", "reshape", "expand", "slice", "split", "split_with_sizes", "narrow", "new_zeros"}
_COUNTS |= {"new_ones", "new_full", "new_empty", "zeros", "ones", "full", "empty", "arange", "repeat", "as_strided"}

_ALIKE = ("expand", "zeros", "ones", "full", "new_zeros", "new_ones", "new_full")
"""Operators whose results are alike along an axis that they make: a rank makes its part of it."""
_DROPS = ("native_dropout", "bernoulli", "bernoulli_")
_NOTHING = ("detach", "alias", "lift_fresh", "clone", "contiguous")
"""Operators that hand their tensor on, and are called or not as tensors happen to lie in memory."""
_VIEWS = ("view", "_unsafe_view", "reshape", "_reshape_alias")
"""Operators of which it depends on how a tensor lies in memory which one is called."""


class Unsure(Exception):
    """An axis cannot be cut: which, and why."""

    def __init__(self, axes: Iterable[Axis], why: str):
        super().__init__(why)
        self.axes = set(axes)


@dataclass
class Found:
    """A plan, and what is left whole.

    left  modules with large parameters of which nothing is cut -> why
    """

    plan: Plan
    left: dict[str, str]


def infer_plan(model: nn.Module, ranks: int, sample: Mapping[str, Any]) -> Found:
    """The plan over so many ranks; the model stays as it is.

    sample  keyword arguments of its forward, whose values do not matter; two sequences at least

    Raises UserError where no axis can be cut, and where one that could be has a size that the ranks do not divide.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), quiet():
        formats = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
        dtype = next(formats, torch.get_default_dtype())
        inputs = {name: without_value(value) for name, value in sample.items()}
        floating = {n: x.to(dtype) for n, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
        found, roles, refused = fitted(without_values(model), ranks, inputs | floating)
    plan = {name: role.style(roles.axes) for name, role in roles.roles.items()}
    return Found(plan, _left_whole(found, roles.chosen, refused))


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's own log of operators that cannot run without values, which are expected."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def fitted(whole: nn.Module, ranks: int, inputs: Mapping[str, Any]) -> "tuple[Trace, _Roles, dict[Axis, str]]":
    """The roles of a model's modules, tried; and the axes that were given up, and why."""
    found, refused = _traced(whole, inputs), dict[Axis, str]()
    while True:
        chosen = _choose(found, ranks, refused)
        roles = _Roles(found, chosen, whole)
        try:
            roles.find()
            _fit(whole, inputs, roles, ranks)
            return found, roles, refused
        except Unsure as unsure:
            given_up = {axis.root for axis in unsure.axes} & chosen.axes
            if not given_up:
                raise UserError(f"no plan of tensor parallelism was found for this model: {unsure}") from unsure
            refused |= dict.fromkeys(given_up, str(unsure))


def without_values(model: nn.Module) -> nn.Module:
    """A copy of the model, its tensors without memory; nothing that the model holds is copied."""
    memo: dict[int, Tensor] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        made = without_value(tensor)
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    return copy.deepcopy(model, memo).train()  # with its dropouts


def without_value(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value


def _traced(model: nn.Module, inputs: Mapping[str, Any]) -> Trace:
    """The trace, around modules that cannot run without values."""
    opaque: dict[str, str] = {}
    while True:
        attempt = Trace(opaque=dict(opaque))
        try:
            return trace(model, inputs, attempt)
        except (RuntimeError, NotImplementedError) as error:
            running = [call.name for call in attempt.running]
            if not running or not running[-1] or running[-1] in opaque:
                raise UserError(f"{_cannot_run(opaque, error)}; say how its modules are cut") from error
            opaque[running[-1]] = next(iter(str(error).splitlines()), type(error).__name__)
        except (AttributeError, TypeError, ValueError, KeyError) as error:  # of what was put in a module's place
            raise UserError(f"{_cannot_run(opaque, error)}; say how its modules are cut") from error


def _cannot_run(opaque: Mapping[str, str], error: Exception) -> str:
    said = next(iter(str(error).splitlines()), type(error).__name__)
    where, why = next(iter(opaque.items()), ("the model", said))
    return f"{where}: its forward cannot be run without values ({why})"


# --- which axes -------------------------------------------------------------------------------------------------------


@dataclass
class _Chosen:
    """Axes that are cut together; those of vocabularies, whose results leave the model, among them."""

    axes: set[Axis] = field(default_factory=set)
    vocabularies: set[Axis] = field(default_factory=set)


def _choose(found: Trace, ranks: int, refused: Mapping[Axis, str]) -> _Chosen:
    """Those that come in and go out with parameters, and vocabularies of large tables; the heaviest first."""
    parameters = dict.fromkeys(found.parameters.values())
    weights: Counter[Axis] = Counter()
    for value in parameters:
        for dim in value.dims:
            for leaf in _leaves((dim,)):
                weights[leaf] += prod(value.shape) * _indices_with(dim, leaf) // size_of(dim)
    sources, sinks, tables = set[Axis](), set[Axis](), set[Axis]()
    for op in found.operations:
        if op.rows and op.given[0].parameter is not None:
            tables |= op.rows
        if op.summed and any(value.parameter for value in op.given[-2:]):
            sinks |= op.summed
            sources |= {leaf for v in op.given[-2:] if v.parameter for leaf in _leaves(v.dims)} - op.summed
    leaving = {leaf for value in found.outputs for leaf in _leaves(value.dims)}
    total = sum(prod(value.shape) for value in parameters)
    chosen, taken = _Chosen(), set[Value]()
    for axis, weight in weights.most_common():
        owners = {value for value in parameters if axis in _leaves(value.dims)}
        if axis.frozen or axis.size == 1 or axis in refused or owners & taken:
            continue
        is_vocabulary = axis in leaving or axis in tables
        if is_vocabulary:
            if axis in sinks or weight * SMALL_TABLE <= total or axis.size < ranks * ranks:
                continue
            chosen.vocabularies.add(axis)
        elif axis not in sources or axis not in sinks:
            continue
        elif axis.size % ranks:
            owner = next(name for name, value in found.parameters.items() if value in owners)
            raise UserError(
                f"{owner.rpartition('.')[0]}: its {axis.size} parts (heads, groups of them, or features) do not divide "
                f"over tp={ranks}; use a tp that divides {axis.size}"
            )
        taken |= owners
        chosen.axes.add(axis)
    if not chosen.axes:
        why = [f"{name} looks at values" for name in found.opaque]
        for reasons in (refused.values(), (axis.frozen for axis in weights if axis.frozen)):
            why += [reason for reason, _ in Counter(reasons).most_common(3)]
        said = "; ".join(dict.fromkeys(why))
        raise UserError(
            f"no axis of this model can be cut over tp={ranks} for sure ({said}); use tp=1, or say how modules are cut"
        )
    return chosen


def _indices_with(dim: Sequence[Axis], leaf: Axis) -> int:
    """How many indices of a dim lie in stretches that have the axis: of three projections in one, two or all three."""
    count, has = 1, False
    for axis in flat(dim):
        inside = sum(_indices_with((part,), leaf) for part in axis.parts)
        count *= inside or axis.size
        has = has or axis is leaf or bool(inside)
    return count if has else 0


def _leaves(dims: Dims) -> set[Axis]:
    return set(leaves_of(dims))


# --- what each module does with its part ------------------------------------------------------------------------------

State = Literal["whole", "own", "replica"]
"""How a value is there on a rank: whole and alike; this rank's part; alike, of what takes part in the rank's part, so
that its gradient is a sum over the ranks."""


class _Roles:
    """The roles of modules: `find` follows the chosen axes through the operations.

    roles     module -> what it does
    handlers  modules whose own code computes with a rank's part
    apart     modules whose operations on a rank are others: lookups
    narrowed  value -> modules that take their part of it, which everyone else has whole
    """

    def __init__(self, found: Trace, chosen: _Chosen, model: nn.Module):
        self.found, self.chosen, self.model, self.axes = found, chosen, model, chosen.axes
        self.roles: dict[str, Role] = {}
        self.handlers: set[str] = set()
        self.apart: set[str] = set()
        self.narrowed: dict[Value, set[str]] = {}
        self._broadcast: set[Value] = set()
        self._entered: dict[Value, list[tuple[Call, Place]]] = {}
        self._gathered: dict[Value, str] = {}
        self._states: dict[Value, State] = {}
        self._about: dict[Value, set[Axis]] = {}
        self._uses: dict[Value, list[Operation]] = {}
        for op in found.operations:
            for value in dict.fromkeys(op.given):
                self._uses.setdefault(value, []).append(op)

    def role(self, module: str) -> Role:
        return self.roles.setdefault(module, Role())

    def has(self, value: Value) -> set[Axis]:
        """The cut axes of a value."""
        return _leaves(value.dims) & self.axes

    def is_own(self, value: Value, op: Operation) -> bool:
        """Return whether an operation meets this rank's part of it."""
        return self._state(value, op) == "own"

    def find(self) -> None:
        """Raises Unsure for axes that cannot be cut after all."""
        while not self._follow():
            pass
        self._own_parameters()
        self._enter_together()
        self._mark_draws()
        for op in self.found.operations:
            self._check_gradients(op)

    def _state(self, value: Value, op: Operation) -> State:
        modules = set(op.modules)
        if value in self._gathered and self._gathered[value] not in modules:
            return "whole"
        if self.narrowed.get(value, set()) & modules:
            return "own"
        return self._states.get(value, "whole")

    def _follow(self) -> bool:
        """Once through the operations; False where a value turned out to be narrowed, so that it has to begin anew."""
        self._states = dict.fromkeys((v for v in self.found.parameters.values() if self.has(v)), "own")
        self._about = {value: self.has(value) for value in self._states}
        self.roles = {name: Role(narrow=role.narrow) for name, role in self.roles.items() if role.narrow}
        self.handlers, self.apart, self._gathered, self._entered = set(), set(), {}, {}
        return all(self._meet(op) for op in self.found.operations)

    def _meet(self, op: Operation) -> bool:
        if any(call.name in self.apart for call in op.calls):
            return True
        states = {value: self._state(value, op) for value in op.given}
        if op.rows & self.axes:
            return self._lookup(op)
        if op.summed & self.axes and "own" in states.values():
            return self._rows(op)
        about = set[Axis]().union(*(self._about.get(value, set()) for value in op.given if states[value] != "whole"))
        if "own" not in states.values():
            state: State = "replica" if "replica" in states.values() else "whole"
            if state == "replica" and any(states[v] == "whole" and v.learned and not v.parameter for v in op.given):
                raise Unsure(about, f"{_where(op)} mixes what takes part in a rank's part with what does not")
            for value in op.made:
                self._states[value] = "own" if value in self._broadcast else state
                self._about[value] = about | (self.has(value) if value in self._broadcast else set())
            return True
        for value in op.given:
            if self.has(value) and states[value] == "whole":
                self._narrow(value, op)
                return False
        self._handle(op, [value for value in op.given if states[value] == "own"], about)
        for value in op.made:
            self._states[value] = "own" if self.has(value) else "replica"
            self._about[value] = about
        return True

    def _handle(self, op: Operation, own: list[Value], about: set[Axis]) -> None:
        """An operation with this rank's part."""
        module = op.modules[-1]
        for value in own:
            if value.parameter is not None and not self._names_in(value, module):
                raise Unsure(
                    about, f"{module or 'the model'} computes with {value.parameter}, which is another module's"
                )
        is_product = op.operator.summed is not None and any(value.parameter for value in own)
        if is_product:
            self._columns(op, own, about)
        elif not (op.operator.is_view and own[0].parameter is not None):
            self.handlers.add(module)

    def _columns(self, op: Operation, own: list[Value], about: set[Axis]) -> None:
        """A product whose result has this rank's columns: of its other operand the gradient is a sum."""
        first, second = op.given[-2:]
        x, call = (first if second in own and second.parameter else second), op.calls[-1]
        if self.has(x) & about and x.parameter is None:
            return
        axes = self.has(op.made[0])
        if axes & self.chosen.vocabularies:
            result = self.found.value(call.result) if isinstance(call.result, Tensor) else None
            role, *places = self.role(call.name), *(() if result is None else range(len(result.dims)))
            if result is None or [p for p in places if carries(result.dims[p], axes)] != [len(result.dims) - 1]:
                raise Unsure(axes, f"{call.name} returns more than its logits")
            if not is_stretch(result.dims[-1], axes) or len(flat(result.dims[-1])) > 1:
                raise Unsure(axes, f"{call.name} orders its logits in a way of its own")
            role.leave, role.rows, role.features = "gather", result.shape[-1], result.shape[-1]
            self._gathered[result] = call.name
        if x.learned and self._state(x, op) == "whole":
            place = self._argument(x, call)
            if place is None:
                raise Unsure(axes, f"{call.name or 'the model'} multiplies by a parameter what it was not given")
            self.role(call.name).enter[place] = x.shape[-1]
            self._entered.setdefault(self._origin(x, call), []).append((call, place))

    def _rows(self, op: Operation) -> bool:
        """A product over a cut axis: the module's result is a sum over the ranks."""
        axes, call = op.summed & self.axes, op.calls[-1]
        name, (first, second) = call.name, op.given[-2:]
        weight, x = (second, first) if second.parameter is not None else (first, second)
        if self._state(x, op) == "whole" and self.has(x):
            self._narrow(x, op)
            return False
        if weight.parameter is None or not self._names_in(weight, name) or axes & self.chosen.vocabularies:
            raise Unsure(axes, f"{name} sums over it outside of a product with a parameter of its own")
        added, value = list(op.given[:-2]), op.made[0]
        for later in self.found.operations[op.number + 1 : call.last]:
            extra = [other for other in later.given if other is not value]
            if value not in later.given or not (later.operator.is_view or later.name in ("add", "add_")):
                raise Unsure(axes, f"{name} goes on computing behind the product that sums over it")
            added += extra
            value = later.made[0]
        if not isinstance(call.result, Tensor) or self.found.value(call.result) is not value:
            raise Unsure(axes, f"{name} returns more than the product that sums over it")
        role = self.role(name)
        role.leave, role.features = "sum", value.shape[-1]
        for other in added:
            names = self._names_in(other, name)
            if not names:
                raise Unsure(axes, f"{name} adds what is no parameter of its own to a sum over the ranks")
            role.added.add(names[0])
        for made in (made for later in self.found.operations[op.number : call.last] for made in later.made):
            self._states[made] = "whole"
        return True

    def _lookup(self, op: Operation) -> bool:
        """A table of a vocabulary: ranks have some of its rows, and zeros for the others."""
        call, table = op.calls[-1], op.given[0]
        module, inside = self.model.get_submodule(call.name), self.found.operations[call.first : call.last]
        if not isinstance(module, nn.Embedding) or module.max_norm is not None or not self._names_in(table, call.name):
            raise Unsure(self.has(table), f"{call.name} looks rows up in a way of its own")
        if any(other is not op and len(other.given) > 1 for other in inside):
            raise Unsure(self.has(table), f"{call.name} computes with more than its rows")
        place = self._argument(op.given[1], call)
        if place is None:
            raise Unsure(self.has(table), f"{call.name} looks up other rows than it is given")
        role = self.role(call.name)
        role.leave, role.rows, role.ids, role.features = "lookup", table.shape[0], place, table.shape[1]
        self.apart.add(call.name)
        self._states |= dict.fromkeys((made for other in inside for made in other.made), "whole")
        return True

    def _narrow(self, value: Value, op: Operation) -> None:
        """A value that is whole meets this rank's part: the module that was given it takes its part of it."""
        wanted, seen, axes = [value], {value}, self.has(value)
        while wanted:
            value = wanted.pop(0)
            for call in reversed(op.calls):
                place = self._argument(value, call)
                if place is not None and call.name:
                    self._check_inner(value, axes)
                    self.role(call.name).narrow[place] = value.dims
                    self.narrowed.setdefault(value, set()).add(call.name)
                    return
            if value.made_by < 0:
                continue
            maker = self.found.operations[value.made_by]
            sources = [source for source in maker.given if self.has(source) and source not in seen]
            if not sources and maker.name in _ALIKE:
                self._broadcast.add(value)
                return
            seen |= set(sources)
            wanted += sources
        raise Unsure(axes, f"{_where(op)} meets it in a value that is made whole there")

    def _check_inner(self, value: Value, axes: set[Axis]) -> None:
        """Raises Unsure where a part is not told from the whole by sizes of the model alone."""
        fixed = {leaf for parameter in self.found.parameters.values() for leaf in _leaves(parameter.dims)}
        for dim in value.dims:
            if carries(dim, self.axes):
                _, inner = around(dim, self.axes)
                if any(axis.parts or axis not in fixed for axis in inner):
                    raise Unsure(axes, "a part of an argument depends on how long the batch is")

    def _own_parameters(self) -> None:
        """Cut what ranks have a stretch of; of other parameters they take their part when they use it."""
        for name, value in self.found.parameters.items():
            axes = self.has(value)
            if not axes:
                continue
            path, _, leaf = name.rpartition(".")
            places = [place for place, dim in enumerate(value.dims) if carries(dim, axes)]
            if len(places) != 1 or len(axes) != 1:
                raise Unsure(axes, f"{name} has it twice")
            if is_stretch(value.dims[places[0]], axes):
                self.role(path).cuts[leaf] = places[0]
            else:
                self.role(path).parts[leaf] = value.dims

    def _enter_together(self) -> None:
        """Where a module only hands an argument on to columns, one sum of gradients does for all of them."""
        times = Counter(call.name for call in self.found.calls)
        for value, entries in self._entered.items():
            into = {call.name for call, _ in entries}
            if len(into) == 1 or any(times[name] > 1 for name in into):
                continue
            for outer in reversed(self.found.calls):  # the innermost that has them all
                place = self._given(value, outer)
                inside = [op for op in self._uses[value] if outer.first <= op.number < outer.last]
                if place is None or not outer.name or times[outer.name] > 1 or outer.name in into:
                    continue
                if (
                    {op.calls[-1].name for op in inside}
                    == into
                    == {op.calls[-1].name for op in self._uses[value]} & into
                ):
                    for call, entry in entries:
                        del self.role(call.name).enter[entry]
                    self.role(outer.name).enter[place] = value.shape[-1]
                    break

    def _mark_draws(self) -> None:
        """Say of modules that draw masks of dropout what they are parts of."""
        marks: dict[str, set[Any]] = {}
        for op in self.found.operations:
            if op.name in _DROPS:
                dims = op.given[0].dims
                cut = [place for place, dim in enumerate(dims) if carries(dim, self.axes)]
                mark: Any = None
                if self.is_own(op.given[0], op) and cut:
                    known = len(cut) == 1 and is_stretch(dims[cut[0]], self.axes)
                    mark = (cut[0], op.given[0].shape[cut[0]]) if known else "unknown"
                marks.setdefault(op.modules[-1], set()).add(mark)
        for name, found in marks.items():
            self.role(name).drops = next(iter(found)) if len(found) == 1 else "unknown"

    def _check_gradients(self, op: Operation) -> None:
        """Note parameters whose gradients are sums; raises Unsure for values that are used both ways."""
        if any(call.name in self.apart for call in op.calls):
            return
        states = {self._states.get(value, "whole") for value in op.made}
        if states <= {"whole"}:
            return
        about = set[Axis]().union(*(self._about.get(value, set()) for value in op.made)) or self.axes
        for value in op.made:
            if self._states.get(value) == "replica" and value.learned and not self._is_sum(value, set()):
                raise Unsure(about, f"{_where(op)} hands on what takes part in a rank's part")
        for value in op.given:
            if self._state(value, op) != "whole" or not value.learned or self.has(value):
                continue
            if value.parameter is not None:
                self._partial(value, about)
            elif op.operator.summed is None or not any(other.parameter for other in op.given[-2:]):
                self._copied(value, about, op)

    def _partial(self, value: Value, about: set[Axis]) -> None:
        """The gradient of a whole parameter that a rank's part meets is a sum over the ranks."""
        names = [name for name, other in self.found.parameters.items() if other.parameter == value.parameter]
        for name in names:
            if not self._is_sum(self.found.parameters[name], set()):
                raise Unsure(about, f"{name} is used for a rank's part and for what every rank has")
            path, _, leaf = name.rpartition(".")
            self.role(path).partial.add(leaf)

    def _is_sum(self, value: Value, seen: set[Value]) -> bool:
        """Return whether the gradient of a value is a sum over the ranks, along all ways that it is used."""
        if value in self.found.outputs:
            return False
        seen.add(value)
        for op in self._uses.get(value, []):
            if op.summed & self.axes:
                return False
            for made in op.made:
                whole = self._states.get(made, "whole") == "whole"
                if whole and made not in seen and not self._is_sum(made, seen):
                    return False
        return True

    def _copied(self, value: Value, about: set[Axis], op: Operation) -> None:
        """An activation that meets a rank's part: the gradient of the module's result that it is, is summed there."""
        wanted, seen = [value], set[Value]()
        while wanted:
            value = wanted.pop(0)
            if value in seen:
                continue
            seen.add(value)
            if self._is_sum(value, set()):
                for call in self.found.calls:
                    is_result = isinstance(call.result, Tensor) and self.found.value(call.result) is value
                    if is_result and call.name and self.role(call.name).leave in ("", "copy"):
                        self.role(call.name).leave, self.role(call.name).features = "copy", value.shape[-1]
                        return
            if value.made_by >= 0:
                wanted += [v for v in self.found.operations[value.made_by].given if v.learned and not v.parameter]
        raise Unsure(about, f"{_where(op)} mixes a rank's part with what every rank has")

    def _names_in(self, value: Value, module: str) -> list[str]:
        """A parameter's names in a module; none where it is another's."""
        names = (n.rpartition(".") for n, p in self.found.parameters.items() if p.parameter == value.parameter)
        return [leaf for path, _, leaf in names if path == module] if value.parameter is not None else []

    def _given(self, value: Value, call: Call) -> Place | None:
        """The place at which a call was given a tensor."""
        for place, given in (*enumerate(call.args), *call.kwargs.items()):
            if isinstance(given, Tensor) and self.found.values.get(id(given)) is value:
                return place
        return None

    def _origin(self, value: Value, call: Call) -> Value:
        """The argument of a call of which a value is a view."""
        while self._given(value, call) is None:
            value = self.found.operations[value.made_by].given[0]
        return value

    def _argument(self, value: Value, call: Call) -> Place | None:
        """The place at which a call was given a tensor, of which the value is a view at most."""
        while True:
            if (place := self._given(value, call)) is not None:
                return place
            if value.made_by < call.first or not self.found.operations[value.made_by].operator.is_view:
                return None
            value = self.found.operations[value.made_by].given[0]


def _where(op: Operation) -> str:
    return f"{op.modules[-1] or 'the model'} ({op.name})"


def _left_whole(found: Trace, chosen: _Chosen, refused: Mapping[Axis, str]) -> dict[str, str]:
    """Matrices of which nothing is cut -> why."""
    left = {}
    for name, value in found.parameters.items():
        leaves = _leaves(value.dims)
        if len(value.shape) > 1 and not leaves & chosen.axes:
            why = [refused.get(leaf, leaf.frozen) for leaf in leaves if leaf in refused or leaf.frozen]
            left[name] = found.opaque.get(name.rpartition(".")[0], next(iter(why), "nothing sums over its axes"))
    return left


# --- the trial --------------------------------------------------------------------------------------------------------


@dataclass
class _Ranks(Trial):
    """The axis of a trial."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def get_local_rank(self) -> int:
        return 0


class _Differs(Exception):
    """The trial is not what the trace foresees: at which operation, in which modules, and how."""

    def __init__(self, at: int, modules: Sequence[str], how: str):
        super().__init__(how)
        self.at, self.modules = at, modules


def _fit(whole: nn.Module, inputs: Mapping[str, Any], roles: _Roles, ranks: int) -> None:
    """Find the attributes with which the model runs as a rank of it should.  Raises Unsure where none are found."""
    sizes, known = _sizes(roles, ranks), dict[type, tuple[str, ...]]()
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
        module = whole.get_submodule(name)
        candidates = _candidates(module, sizes)
        first = known.get(type(module), ())
        counts = range(min(len(candidates), MOST_SIZES) + 1)
        options = [first, *(o for n in counts for o in combinations(candidates, n) if o != first)]
        best: tuple[tuple[str, ...], _Differs] | None = None
        for option in options:
            roles.role(name).sizes = _sized(module, option, sizes)
            found = tried(whole, inputs, roles, ranks)
            if found is None or (found.at > differs.at and name not in found.modules):
                best = None if found is None else (option, found)
                break
            if best is None or found.at > best[1].at:
                best = option, found
        else:
            assert best is not None
            roles.role(name).sizes = _sized(module, best[0], sizes)
        if best is None:
            return
        if best[1].at <= differs.at:
            raise Unsure(_axes_at(roles, differs.at), str(differs))
        known[type(module)], differs = best


def _axes_at(roles: _Roles, at: int) -> set[Axis]:
    """The cut axes of an operation, or of those before it."""
    for op in reversed(roles.found.operations[: at + 1]):
        found = set[Axis]().union(*(roles.has(value) for value in (*op.given, *op.made)))
        if found:
            return found
    return roles.axes


def _sizes(roles: _Roles, ranks: int) -> dict[int, int]:
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


def tried(whole: nn.Module, inputs: Mapping[str, Any], roles: _Roles, ranks: int) -> _Differs | None:
    """Run the model as a rank would; None where it does what the trace foresees."""
    model = copy.deepcopy(whole, {id(tensor): tensor for tensor in chain(whole.parameters(), whole.buffers())})
    for name, value in roles.found.parameters.items():
        path, _, leaf = name.rpartition(".")
        role = roles.roles.get(path)
        if role is not None and leaf in role.cuts:
            parameter = model.get_parameter(name)
            dim = role.cuts[leaf]
            unit = rows_of_unit(value.dims[dim], roles.axes) if carries(value.dims[dim], roles.axes) else 1
            shape = list(parameter.shape)
            shape[dim] = largest_share(shape[dim], ranks, unit)
            made = nn.Parameter(torch.empty(shape, dtype=parameter.dtype), parameter.requires_grad)
            model.get_submodule(path).register_parameter(leaf, made)
    axis = _Ranks(ranks)
    for name, role in roles.roles.items():
        role.wrap(model.get_submodule(name), axis, roles.axes)
    expected = [op for op in roles.found.operations if op.name not in _NOTHING and not roles.apart & set(op.modules)]
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


class _Compared(TorchDispatchMode):
    """Compares operators with those foreseen, as they come."""

    def __init__(self, expected: Sequence[Operation], roles: _Roles, ranks: int, attempt: Trace):
        super().__init__()
        self.expected, self.roles, self.ranks, self.attempt = expected, roles, ranks, attempt
        self.at = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, running = func._schema.name.removeprefix("aten::"), {call.name for call in self.attempt.running}
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not tensors or name in _NOTHING or between.get() or self.attempt.paused or running & self.roles.apart:
            return result
        modules = [call.name for call in self.attempt.running]
        if self.at >= len(self.expected):
            raise _Differs(self.at, modules, f"{name} is called beyond the end")
        op = self.expected[self.at]
        where = modules[-1] if modules else "the model"
        same = name == op.name or (name in _VIEWS and op.name in _VIEWS)
        if not same or tuple(modules) != op.modules:
            raise _Differs(self.at, modules, f"{where} calls {name} and not {op.name}")
        for tensor, value in zip(tensors, op.made, strict=True):
            if tuple(tensor.shape) != (wanted := self._shape(value, op)):
                raise _Differs(self.at, modules, f"{where} ({name}) makes {tuple(tensor.shape)} and not {wanted}")
        plain = tuple(leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, bool | int | float | str))
        if name == "slice":
            if not self._same_slice(op, args, kwargs or {}):
                raise _Differs(self.at, modules, f"{where} takes another slice")
        elif name not in _COUNTS and plain != op.plain:
            raise _Differs(self.at, modules, f"{where} ({name}) is given {plain} and not {op.plain}")
        self.at += 1
        return result

    def _shape(self, value: Value, op: Operation) -> tuple[int, ...]:
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
