"""The graph of a step with many alike blocks, from that of the same step with a few of them.

1. `core.trace.alike` says which blocks of a list repeat, and after how many: a period. The step is traced with four
   periods of them, p0 to p3, and with all else that there is.
2. p1 and p2 must do the same, node by node, each on its own tensors, on its neighbours' in the same places, or on what
   is neither's; and nothing but their neighbours may look at theirs. Else `NotAlike`.
3. So a period more between them would do the same once more: copies of p1 come behind it, in the backward before it,
   each with copies as its neighbours.

Lives of storages go with them: the grown graph is that of the whole step, to the byte.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from core.trace.alike import AlikeBlocks, NotAlike, alike_blocks
from core.trace.graph import Graph, Node, Result, Storage, Value, block_of, filled, name_nodes, plain_arguments

KEPT = 4
"""Periods that are traced: two that are compared, and a neighbour of each."""
_PLACED = ("parameters", "buffers")


@dataclass(frozen=True)
class Insert:
    """Periods that are left out of a list's run of alike blocks, behind the second one of those that are left.

    start, period  in blocks
    count          periods that are left out
    """

    name: str
    start: int
    period: int
    count: int

    @property
    def behind(self) -> int:
        """The first block behind those that are left out, in the list without them."""
        return self.start + 2 * self.period

    @classmethod
    def of(cls, run: AlikeBlocks) -> "Insert":
        return cls(run.name, run.start, run.period, (run.stop - run.start) // run.period - KEPT)


@contextmanager
def few_blocks(model: nn.Module) -> Iterator[list[Insert]]:
    """Inside, lists of alike blocks are shorter; yields what is left out."""
    inserts = [insert for run in alike_blocks(model, copied=False) if (insert := Insert.of(run)).count > 0]
    whole = [(model.get_submodule(insert.name), insert) for insert in inserts]
    blocks = [list_._modules for list_, _ in whole]
    try:
        for list_, insert in whole:
            found = list(list_._modules.values())
            few = found[: insert.behind] + found[insert.behind + insert.count * insert.period :]
            list_._modules = {str(index): block for index, block in enumerate(few)}
        yield inserts
    finally:
        for (list_, _), own in zip(whole, blocks, strict=True):
            list_._modules = own


@dataclass
class _Kin:
    """Nodes, values or storages, by their indices: the period of each, and the partners in p2 of those in p1."""

    periods: list[int | None]
    partner: dict[int, int] = field(default_factory=dict)
    back: dict[int, int] = field(default_factory=dict)

    def pair(self, one: int, other: int) -> None:
        if self.partner.setdefault(one, other) != other or self.back.setdefault(other, one) != one:
            raise NotAlike("blocks that look alike share what they make")

    def partner_of(self, index: int) -> int | None:
        """That of one in p1; None of others."""
        if self.periods[index] != 1:
            return None
        if index not in self.partner:
            raise NotAlike("blocks that look alike make other tensors")
        return self.partner[index]

    def meant(self, period: int | None, copy: int, one: int, other: int | None, count: int) -> tuple[int, int]:
        """(index, copy) of what a thing of this period, or a copy of p1, means by `one`, and its partner by `other`.

        count  of copies, the last of which stands before p2
        """
        of = self.periods[one]
        if period == 1:
            if other is None:
                raise NotAlike("blocks that look alike keep other tensors")
            kind = of, self.periods[other]
            if kind == (1, 2) and self.partner.get(one) == other:
                return one, copy
            if kind == (0, 1):
                return (other, copy - 1) if copy else (one, 0)
            if kind == (2, 3) and one in self.back:
                return (self.back[one], copy + 1) if copy < count else (one, 0)
            if one == other and of not in (1, 2):
                return one, 0
            raise NotAlike("blocks that look alike look at other tensors than their neighbours'")
        if (of == 1 and period not in (0, 2)) or (of == 2 and period not in (2, 3)):
            raise NotAlike("something else looks into blocks that look alike")
        return one, count if of == 1 and period == 2 else 0


class GrownGraph:
    """Makes the graph with what is left out; what is of p1 is there as it was, copy 0, and as the copies 1 to `count`.

    names  of the whole model's parameters and buffers, in their order
    """

    def __init__(self, graph: Graph, insert: Insert, names: Sequence[str]):
        self.graph, self.insert, self.names = graph, insert, names
        self.nodes = _Kin([self._period(node.module) for node in graph.nodes])
        self.values = _Kin([self._period_of(value) for value in graph.values])
        self.storages = _Kin([None] * len(graph.storages))
        for value in reversed(graph.values):
            self.storages.periods[value.storage.index] = self.values.periods[value.index]
        for storage in graph.storages:
            if storage.born is not None:
                self.storages.periods[storage.index] = self.nodes.periods[storage.born]
        self._pair_up()
        self.order = list(self._order())
        self.places = {(node.index, copy): place for place, (node, copy) in enumerate(self.order)}
        self.made_values: dict[tuple[int, int], Value] = {}
        self.made_storages: dict[tuple[int, int], Storage] = {}

    def _period(self, path: str) -> int | None:
        found = block_of(path)
        if found is None or found[0] != self.insert.name:
            return None
        period = (int(found[1]) - self.insert.start) // self.insert.period
        return period if 0 <= period < KEPT else None

    def _period_of(self, value: Value) -> int | None:
        if value.node is not None:
            return self.nodes.periods[value.node]
        if value.storage.kind in _PLACED:
            return self._period(value.name)
        return self.nodes.periods[value.users[0]] if value.name in self.graph.constants and value.users else None

    def _later(self, path: str, periods: int) -> str:
        """The path of the same in a block so many periods behind."""
        name, number, rest = block_of(path) or ("", "0", "")  # of a constant, which gets a name of its own
        return ".".join(filter(None, (name, str(int(number) + periods * self.insert.period), rest)))

    def _moved(self, path: str, copy: int) -> str:
        """A path, or that of a copy, where nothing is left out."""
        found = block_of(path)
        is_behind = found is not None and found[0] == self.insert.name and int(found[1]) >= self.insert.behind
        return self._later(path, copy or self.insert.count * is_behind) if copy or is_behind else path

    # Partners.

    def _pair_up(self) -> None:
        first, second = ([n for n in self.graph.nodes if self.nodes.periods[n.index] == period] for period in (1, 2))
        if len(first) != len(second) or not first:
            raise NotAlike("blocks that look alike have other numbers of operators")
        for a, b in zip(first, second, strict=True):
            self.nodes.pair(a.index, b.index)
            if self._facts(a, 1) != self._facts(b, 0):
                raise NotAlike(f"{a.name} of {a.module} is {b.name} in {b.module}")
            for one, other in zip((*a.inputs, *a.outputs), (*b.inputs, *b.outputs), strict=True):
                self._pair_values(one, other)
        for name, value in self.graph.inputs.items():
            if value.storage.kind in _PLACED and self.values.periods[value.index] == 1:
                if (other := self.graph.inputs.get(self._later(name, 1))) is None:
                    raise NotAlike(f"{name} has no partner")
                self._pair_values(value, other)

    def _pair_values(self, one: Value, other: Value) -> None:
        if (self.values.periods[one.index], self.values.periods[other.index]) == (1, 2):
            self.values.pair(one.index, other.index)
            if one.before is not None and other.before is not None:
                self._pair_values(one.before, other.before)
        of = self.storages.periods
        if (of[one.storage.index], of[other.storage.index]) == (1, 2):
            self.storages.pair(one.storage.index, other.storage.index)

    def _facts(self, node: Node, later: int) -> tuple[Any, ...]:
        cost = node.is_view, node.flops, node.bytes_read, node.bytes_written
        tensors = tuple((v.shape, v.stride, v.dtype, v.offset) for v in (*node.inputs, *node.outputs))
        path = self._later(node.module, later)
        return node.op, node.kind, node.recomputed, path, cost, tensors, plain_arguments(node)

    # The order.

    def _order(self) -> Iterator[tuple[Node, int]]:
        before: dict[int, list[int]] = {}
        behind: dict[int, list[int]] = {}
        for run, other in zip(_runs(self.nodes.partner), _runs(self.nodes.back)):
            if len(run) == len(other) and run[-1] + 1 == other[0]:
                behind[run[-1]] = run
            elif len(run) == len(other) and other[-1] + 1 == run[0]:
                before[run[0]] = run
            else:
                raise NotAlike("something runs between blocks that look alike")
        copies = range(1, self.insert.count + 1)
        for node in self.graph.nodes:
            for copy in reversed(copies):
                yield from ((self.graph.nodes[index], copy) for index in before.get(node.index, ()))
            yield node, 0
            for copy in copies:
                yield from ((self.graph.nodes[index], copy) for index in behind.get(node.index, ()))

    # The graph.

    def made(self) -> Graph:
        inputs: dict[str, Value] = {}
        constants: dict[str, Any] = {}
        for name, value in self.graph.inputs.items():
            for copy in self._copies(self.values, value.index):
                copied = self._value(value.index, copy)
                if name in self.graph.constants:
                    copied.name = copied.storage.name = f"constant.{len(constants)}"
                    constants[copied.name] = self.graph.constants[name]
                inputs[copied.name] = copied
        nodes = [self._node(node, copy, place) for place, (node, copy) in enumerate(self.order)]
        for node in nodes:
            for value in dict.fromkeys(node.inputs):
                value.users.append(node.index)
            for storage in dict.fromkeys(value.storage for value in (*node.inputs, *node.outputs)):
                storage.uses.append(node.index)
        gradients = {
            self._moved(name, copy): self._meant_value(period, copy, value, self._gradient_of_partner(name, period))
            for name, value in self.graph.gradients.items()
            for period in [self._period(name)]
            for copy in (range(self.insert.count + 1) if period == 1 else (0,))
        }
        for index, storage in enumerate(self.graph.storages):  # of what no node is given
            for copy in self._copies(self.storages, index):
                self._storage(storage, copy)
        outputs = tuple(self._meant_value(None, 0, value, None) for value in self.graph.outputs)
        result = self._result()
        name_nodes(nodes)
        values, storages = list(self.made_values.values()), list(self.made_storages.values())
        ordered = [{name: of[name] for name in (*self.names, *of) if name in of} for of in (inputs, gradients)]
        return Graph(nodes, values, storages, ordered[0], outputs, ordered[1], constants, result)

    def _result(self) -> Result | None:
        """Raises NotAlike where something of every block is returned."""
        found = self.graph.result
        if found is None:
            return None
        if any(self.values.periods[value.index] in (1, 2) for value in found.values.values()):
            raise NotAlike("what blocks that look alike make is returned")
        values = {name: self._meant_value(None, 0, value, None) for name, value in found.values.items()}
        return Result(found.tree, values, found.stand_ins)

    def _copies(self, kin: _Kin, index: int) -> Sequence[int]:
        return range(self.insert.count + 1) if kin.periods[index] == 1 else (0,)

    def _gradient_of_partner(self, name: str, period: int | None) -> Value | None:
        return self.graph.gradients.get(self._later(name, 1)) if period == 1 else None

    def _meant_value(self, period: int | None, copy: int, one: Value, other: Value | None) -> Value:
        other_index = None if other is None else other.index
        return self._value(*self.values.meant(period, copy, one.index, other_index, self.insert.count))

    def _place(self, period: int | None, copy: int, one: int | None, other: int | None) -> int | None:
        if one is None or one < 0:
            return one
        return self.places[self.nodes.meant(period, copy, one, other, self.insert.count)]

    def _node(self, node: Node, copy: int, place: int) -> Node:
        period = self.nodes.periods[node.index]
        partner = None if (at := self.nodes.partner_of(node.index)) is None else self.graph.nodes[at]

        def meant(values: Sequence[Value], others: Sequence[Value] | None) -> tuple[Value, ...]:
            pairs = zip(values, others or [None] * len(values), strict=True)
            return tuple(self._meant_value(period, copy, *pair) for pair in pairs)

        inputs = meant(node.inputs, partner and partner.inputs)
        outputs = meant(node.outputs, partner and partner.outputs)
        writes = meant(node.writes, partner and partner.writes)
        given, results = iter(inputs), iter(outputs)
        args, kwargs = filled((node.args, node.kwargs), lambda _: next(given))
        result = filled(node.result, lambda _: next(results))
        source = self._place(period, copy, node.source, partner and partner.source)
        where = node.kind, node.recomputed, self._moved(node.module, copy), source
        cost = node.is_view, node.flops, node.bytes_read, node.bytes_written
        return Node(place, "", node.op, args, kwargs, result, inputs, outputs, writes, *where, *cost)

    def _value(self, index: int, copy: int) -> Value:
        if (found := self.made_values.get((index, copy))) is not None:
            return found
        value, period = self.graph.values[index], self.values.periods[index]
        partner = None if (at := self.values.partner_of(index)) is None else self.graph.values[at]
        other = None if partner is None else partner.storage.index
        meant = self.storages.meant(period, copy, value.storage.index, other, self.insert.count)
        storage = self._storage(self.graph.storages[meant[0]], meant[1])
        made = self._place(period, copy, value.node, partner and partner.node)
        before = value.before and self._meant_value(period, copy, value.before, partner and partner.before)
        name = "" if value.node is not None else self._moved(value.name, copy)
        shape = value.shape, value.dtype, value.offset, value.stride
        found = Value(len(self.made_values), storage, *shape, made, name, before)
        self.made_values[index, copy] = found
        return found

    def _storage(self, storage: Storage, copy: int) -> Storage:
        key = storage.index, copy
        if key not in self.made_storages:
            period = self.storages.periods[storage.index]
            at = self.storages.partner_of(storage.index)
            partner = None if at is None else self.graph.storages[at]
            born = self._place(period, copy, storage.born, partner and partner.born)
            freed = self._place(period, copy, storage.freed, partner and partner.freed)
            if partner is not None and (storage.freed is None) != (partner.freed is None):
                raise NotAlike("memory of blocks that look alike lives to different ends")
            name = self._moved(storage.name, copy) if storage.name else ""
            made = Storage(len(self.made_storages), storage.num_bytes, storage.kind, name, born, freed)
            self.made_storages[key] = made
        return self.made_storages[key]


def _runs(indices: dict[int, int]) -> list[list[int]]:
    """Stretches without a gap."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and runs[-1][-1] + 1 == index:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs
