"""What each module does with its part, from how its operations meet the axes that are cut."""

from collections import Counter
from typing import Any, Literal

from torch import Tensor, nn

from core.parallel.draws import UNCALLED
from core.parallel.infer.axes import Axis, flat
from core.parallel.infer.choose import Chosen, Unsure, axes_of
from core.parallel.infer.flow import Call, Operation, Trace, Value
from core.parallel.infer.local import around, carries, is_stretch, parts_of
from core.parallel.infer.styles import Place, Role
from core.placement.style import Cut

ALIKE = ("expand", "zeros", "ones", "full", "new_zeros", "new_ones", "new_full")
"""Operators whose results are alike along an axis that they make: a rank makes its part of it."""
DROPS = ("native_dropout", "bernoulli", "bernoulli_")
State = Literal["whole", "own", "replica"]
"""How a value is there on a rank: whole and alike; this rank's part; alike, of what takes part in the rank's part, so
that its gradient is a sum over the ranks."""


class Roles:
    """The roles of modules: `find` follows the chosen axes through the operations.

    roles     module -> what it does
    handlers  modules whose own code computes with a rank's part
    apart     modules whose operations on a rank are others: lookups
    narrowed  value -> modules that take their part of it, which everyone else has whole
    made_by_rows  values [B, L, ..] of which a rank makes its rows alone (`core.parallel.infer.sequence`)
    """

    def __init__(self, found: Trace, chosen: Chosen, model: nn.Module):
        self.found, self.chosen, self.model, self.axes = found, chosen, model, chosen.axes
        self.roles: dict[str, Role] = {}
        self.handlers: set[str] = set()
        self.apart: set[str] = set()
        self.narrowed: dict[Value, set[str]] = {}
        self.made_by_rows: set[Value] = set()
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
        return axes_of(value.dims) & self.axes

    def uses(self, value: Value) -> list[Operation]:
        """The operations that are given a value."""
        return self._uses.get(value, [])

    def is_own(self, value: Value, op: Operation) -> bool:
        """Return whether an operation meets this rank's part of it."""
        return self._state(value, op) == "own"

    def find(self) -> None:
        """Raises Unsure for axes that cannot be cut after all."""
        while not self._follow():
            pass
        self._own_parameters()
        self._enter_together()
        self._check_entries()
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
        role.each_row = op.given[1].shape[:1] != (1,)
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
            if not sources and maker.name in ALIKE:
                self._broadcast.add(value)
                return
            seen |= set(sources)
            wanted += sources
        raise Unsure(axes, f"{_where(op)} meets it in a value that is made whole there")

    def _check_inner(self, value: Value, axes: set[Axis]) -> None:
        """Raises Unsure where a part is not told from the whole by sizes of the model alone."""
        fixed = {leaf for parameter in self.found.parameters.values() for leaf in axes_of(parameter.dims)}
        for dim in value.dims:
            if carries(dim, self.axes):
                _, inner = around(dim, self.axes)
                if any(axis.parts or axis not in fixed for axis in inner):
                    raise Unsure(axes, "a part of an argument depends on how long the batch is")

    def _own_parameters(self) -> None:
        """Cut what ranks have stretches of; of other parameters they take their part when they use it."""
        for name, value in self.found.parameters.items():
            axes = self.has(value)
            if not axes:
                continue
            path, _, leaf = name.rpartition(".")
            places = [place for place, dim in enumerate(value.dims) if carries(dim, axes)]
            if len(places) != 1 or len(axes) != 1:
                raise Unsure(axes, f"{name} has it twice")
            lengths = parts_of(value.dims[places[0]], axes)
            if len(lengths) == 1 or (lengths and not axes & self.chosen.vocabularies):
                self.role(path).cuts[leaf] = Cut(places[0], parts=lengths if len(lengths) > 1 else ())
            else:
                self.role(path).parts[leaf] = value.dims

    def _enter_together(self) -> None:
        """Where a module only hands an argument on to columns, it enters there: one sum of gradients does for all."""
        times = Counter(call.name for call in self.found.calls)
        for value, entries in self._entered.items():
            into = {call.name for call, _ in entries}
            if any(times[name] > 1 for name in into):
                continue
            for outer in reversed(self.found.calls):  # the innermost that has them all
                place = self._given(value, outer)
                inside = [op for op in self._uses[value] if outer.first <= op.number < outer.last]
                if place is None or not outer.name or times[outer.name] > 1 or outer.name in into:
                    continue
                if {op.calls[-1].name for op in inside} == into:
                    for call, entry in entries:
                        del self.role(call.name).enter[entry]
                    self.role(outer.name).enter[place] = value.shape[-1]
                    self._entered[value] = [(outer, place)]
                    break

    def _check_entries(self) -> None:
        """Raises Unsure for arguments of which a module also makes what every rank has."""
        for value, entries in self._entered.items():
            for call, _ in entries:
                for op in self._uses[value]:
                    for made in op.made if call.first <= op.number < call.last else ():
                        if self._states.get(made, "whole") == "whole" and not self._is_sum(made, set()):
                            axes = self._about.get(made) or self.axes
                            raise Unsure(axes, f"{call.name} uses an argument for a rank's part and for the whole")

    def _mark_draws(self) -> None:
        """Say of modules that draw masks of dropout what they are parts of."""
        marks: dict[str, set[Any]] = {}
        for op in self.found.operations:
            if op.name in DROPS:
                dims = op.given[0].dims
                cut = [place for place, dim in enumerate(dims) if carries(dim, self.axes)]
                mark: Any = None
                if self.is_own(op.given[0], op) and cut:
                    known = len(cut) == 1 and is_stretch(dims[cut[0]], self.axes)
                    mark = (cut[0], op.given[0].shape[cut[0]]) if known else "unknown"
                marks.setdefault(op.modules[-1], set()).add(mark)
        for name, found in marks.items():
            self.role(name).drops = next(iter(found)) if len(found) == 1 else "unknown"
        called = {call.name for call in self.found.calls}
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Dropout) and name not in called:
                self.role(name).drops = UNCALLED

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
        """Return whether the gradient of a value is a sum over the ranks, along all ways that it is used.

        It is none where a module that is given the value adds it up itself.
        """
        if value in self.found.outputs:
            return False
        seen.add(value)
        adding = {call.name for call, _ in self._entered.get(value, [])} | self.narrowed.get(value, set())
        for op in self._uses.get(value, []):
            if op.summed & self.axes or adding & set(op.modules):
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
