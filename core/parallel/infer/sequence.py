"""Sequence parallelism of a plan that was found: between the pairs each rank has its rows of the sequence.

Korthikanti et al. 2022, section 4.2.2, for modules that do not know of it. What it is proved for is a list of blocks,
each of which is called once and hands its activations [B, L, D] on to the next:

    before the first   each rank takes its rows of what all have
    columns            get the whole sequence: gathered where a plan without it would sum their gradients
    rows               leave this rank's rows of the sum: scattered where it would be summed
    in between         element by element, or normalised along another dim: residuals, norms, dropouts. Gradients of
                       their parameters are sums over the ranks
    behind the last    all rows are joined again

A list in which anything else meets the rows of a sequence keeps them whole.
"""

from collections import Counter
from contextlib import suppress

import torch
from torch import Tensor, nn

from core.parallel.infer.axes import Axis, leaves_of
from core.parallel.infer.choose import axes_of
from core.parallel.infer.flow import Call, Operation, Value
from core.parallel.infer.roles import DROPS, Roles
from core.parallel.infer.styles import Place, Role, Rows

_BY_ROWS = ("native_layer_norm", "_fused_rms_norm", "mean", "_to_copy", "clone", "detach", "alias", *DROPS)
_BY_ROWS += ("empty_like", "zeros_like", "ones_like", "full_like")
"""Operators that work on each row of a sequence by itself, beside those that work element by element."""


class _Not(Exception):
    """A list of blocks keeps its sequences whole, and why."""


def shard_rows(roles: Roles) -> None:
    """Give modules the roles of sequence parallelism, in the outermost lists of blocks for which that is sure."""
    seen, times = set[str](), Counter(call.name for call in roles.found.calls)
    for name, module in roles.model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(name.startswith(f"{other}.") for other in seen):
            continue
        calls = [call for call in roles.found.calls if call.name.rpartition(".")[0] == name]
        if len(calls) == len(module) and calls:
            seen.add(name)
            with suppress(_Not):
                _List(roles, calls, times).shard()


class _List:
    """A list of blocks, one call after another."""

    def __init__(self, roles: Roles, calls: list[Call], times: Counter[str]):
        self.roles, self.found, self.calls, self.times = roles, roles.found, calls, times
        self.place, self.first = self._first(calls[0])
        self.rows = self._rows(self.first)
        self.sharded: set[Value] = {self.first}
        self.gathered: dict[str, set[Place]] = {}
        self.scattered: list[str] = []
        self.made: set[Value] = set()
        self.partial: set[str] = set()
        self.drops: set[str] = set()

    def shard(self) -> None:
        """Raises _Not before anything is changed."""
        before = self.first
        for call in self.calls:
            if self._first(call)[1] is not before:
                raise _Not(f"{call.name} is given more than what the block before it returns")
            self._block(call)
            before = self._result(call)
        self._check_uses(before)
        self._give()

    def _first(self, call: Call) -> tuple[Place, Value]:
        for place, given in (*enumerate(call.args), *call.kwargs.items()):
            if isinstance(given, Tensor) and given.ndim == 3 and self.found.value(given).learned:
                return place, self.found.value(given)
        raise _Not(f"{call.name} is given no activations [B, L, D]")

    def _rows(self, value: Value) -> tuple[Axis, ...]:
        found = tuple(leaves_of((value.dims[1],)))
        if not found or set(found) & set(axes_of((value.dims[0], value.dims[2]))):
            raise _Not("its rows are no axis of their own")
        return found

    def _has_rows(self, value: Value) -> bool:
        """Return whether dim 1 of a value is the sequence."""
        return len(value.dims) > 1 and tuple(leaves_of((value.dims[1],))) == self.rows

    def _result(self, call: Call) -> Value:
        """The result that goes on; of several the first.  Raises _Not where others are of this rank's rows."""
        results = call.result if isinstance(call.result, tuple | list) else [call.result]
        values = [self.found.value(x) if isinstance(x, Tensor) else None for x in results]
        if values[0] is None or values[0] not in self.sharded or any(v in self.sharded for v in values[1:]):
            raise _Not(f"{call.name} returns more than its activations")
        if isinstance(call.result, list):
            raise _Not(f"{call.name} returns a list")
        return values[0]

    def _block(self, block: Call) -> None:
        inside = [call for call in self.found.calls if block.first <= call.first and call.last <= block.last]
        for call in inside:
            role = self.roles.roles.get(call.name)
            if role is None:
                continue
            if (role.enter or role.leave) and self.times[call.name] > 1:
                raise _Not(f"{call.name} is called several times")
            if role.leave in ("gather", "lookup", "copy"):
                raise _Not(f"{call.name} is in a block")
        for op in self.found.operations[block.first : block.last]:
            self._meet(op, block)

    def _meet(self, op: Operation, block: Call) -> None:
        entered = self._entered(op, block)
        meets = [value for value in op.given if value in self.sharded and value not in entered]
        if meets:
            self._between(op)
        call = op.calls[-1]
        role = self.roles.roles.get(call.name)
        if role is not None and role.leave == "sum" and op.number == call.last - 1:
            self._scatter(call, role)

    def _entered(self, op: Operation, block: Call) -> set[Value]:
        """Activations that a running module has gathered."""
        entered = set()
        for call in op.calls:
            role = self.roles.roles.get(call.name)
            if role is None or call.first < block.first or call.last > block.last:
                continue
            for place in role.enter:
                given = call.args[place] if isinstance(place, int) else call.kwargs[place]
                if (value := self.found.value(given)) in self.sharded:
                    self.gathered.setdefault(call.name, set()).add(place)
                    entered.add(value)
        return entered

    def _between(self, op: Operation) -> None:
        """An operation on this rank's rows."""
        where = op.modules[-1]
        if not (torch.Tag.pointwise in op.operator.func.tags or op.name in _BY_ROWS):
            raise _Not(f"{where} ({op.name}) works on whole sequences")
        for value in op.given:
            if value not in self.sharded and set(self.rows) & set(axes_of(value.dims)):
                raise _Not(f"{where} ({op.name}) joins activations with what all ranks have of the sequence")
            if value not in self.sharded and value.learned:
                self._add_partial(value)
        for value in op.made:
            if not self._has_rows(value):
                raise _Not(f"{where} ({op.name}) takes the rows of a sequence apart")
            self.sharded.add(value)
            self.made.add(value)
        if op.name in DROPS:
            if self.roles.role(where).drops not in (None, "unknown"):
                raise _Not(f"{where} drops parts of two kinds")
            self.drops.add(where)

    def _add_partial(self, value: Value) -> None:
        """Parameters that a value without rows follows from."""
        if value.parameter is not None:
            self.partial.add(value.parameter)
        elif value.made_by < self.calls[0].first:
            raise _Not("activations without rows are made before the blocks")
        else:
            for source in self.found.operations[value.made_by].given:
                if source in self.sharded:
                    raise _Not("a block joins its rows")
                if source.learned:
                    self._add_partial(source)

    def _scatter(self, call: Call, role: Role) -> None:
        """A module that leaves a sum leaves rows of it; what it adds to them is added to this rank's rows."""
        value = self.found.value(call.result)
        if len(value.dims) != 3 or not self._has_rows(value):
            raise _Not(f"{call.name} sums what are no rows of the sequence")
        self.sharded.add(value)
        self.scattered.append(call.name)
        self.partial |= {f"{call.name}.{leaf}" for leaf in role.added}

    def _check_uses(self, last: Value) -> None:
        """Raises _Not for activations of this rank's rows that are used behind the list, and for parameters, before."""
        first, end = self.calls[0].first, self.calls[-1].last
        for value in self.sharded - {self.first, last}:
            if any(not first <= op.number < end for op in self.roles.uses(value)) or value in self.found.outputs:
                raise _Not("what a block computes is used behind the blocks")
        inside = {number for call in self.calls for number in range(call.first, call.last)}
        for name in self.partial:
            if any(op.number not in inside for op in self.roles.uses(self.found.parameters[name])):
                raise _Not(f"{name} is used in and outside of the blocks")
        if any(op.number not in inside for value in self.sharded - {self.first, last} for op in self.roles.uses(value)):
            raise _Not("activations are used between the blocks")
        if not self.scattered or not self.gathered:
            raise _Not("nothing in it is cut")

    def _give(self) -> None:
        roles, sequence = self.roles, Rows()
        for name, places in self.gathered.items():
            roles.role(name).gathers |= places
            roles.role(name).sequence = sequence
        for name in self.scattered:
            roles.role(name).scatters = True
        for shared in self.partial:
            of = self.found.parameters[shared].parameter
            for name in (name for name, other in self.found.parameters.items() if other.parameter == of):
                path, _, leaf = name.rpartition(".")
                roles.role(path).partial.add(leaf)
        for name in self.drops:
            roles.role(name).drops = (1, None)
        for call in (self.calls[0], self.calls[-1]):
            roles.role(call.name).sequence = sequence
        roles.role(self.calls[0].name).splits[self.place] = self.first.shape[-1]
        roles.role(self.calls[-1].name).joins = self.first.shape[-1]
        roles.made_by_rows |= self.made
