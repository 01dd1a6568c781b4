"""Operators that write in place, and what takes their place where tensors lie in pieces.

1. A *twin* does the same and writes to nothing: `add` of `add_`, the functional batch norm of the one that writes its
   running statistics. What it returns is the new value of what is written, and goes on in its place.
2. That holds where whoever reads the memory behind the write reads what the write returns. A write into a view whose
   base is read later (`shifted[:, 1:] = ids[:, :-1]`), or one that has no twin (`bernoulli_`), is of memory that is
   *shared*: everything in it is whole on every rank, and its operators run as they were recorded.
3. Inputs of the step that are written to, such as running statistics, get their last value behind it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from core.config import UserError
from core.trace.graph import Graph, Node, Value

_TRAINING = 5
_RUNNING = ("running_mean", "running_var")


@dataclass(frozen=True)
class Twin:
    """An operator without writes.  new: (what is written, the place of its new value among the twin's results)"""

    op: Any
    new: tuple[tuple[Value, int], ...] = ()

    def results(self, node: Node, result: Any) -> Any:
        """What the twin returns, of what the node does: `result`, on any tensors, and the new values behind it."""
        behind = [value.meta() for value, place in self.new if place >= len(node.outputs)]
        return (*result, *behind) if behind else result


def twin_of(node: Node) -> Twin | None:
    """None: it writes, and nothing does the same without."""
    if not node.writes:
        return Twin(node.op)
    packet = str(node.op._schema.name).removeprefix("aten::")
    if packet == "native_batch_norm" and len(node.writes) == len(_RUNNING):
        op = torch.ops.aten._native_batch_norm_legit_functional.default
        return Twin(op, tuple((value, 3 + n) for n, value in enumerate(node.writes)))
    if packet.endswith("_") and len(node.writes) == len(node.outputs) == 1:
        op = getattr(getattr(torch.ops.aten, packet[:-1], None), node.op._overloadname, None)
        if op is not None and not op._schema.is_mutable:
            return Twin(op, ((node.writes[0], 0),))
    return None


_FORMS = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
_NEW = ("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full")


def reads_form_alone(node: Node) -> bool:
    """Whether an operator of one tensor looks at its shape, format and strides, and not at its values."""
    return node.op._overloadpacket.__name__ in (*_FORMS, *_NEW) and len(node.inputs) == 1


@dataclass
class Writes:
    """A graph's writes.

    shared  storages in which everything is whole and runs as recorded
    made    value -> (node, place): new values that twins return and the operators themselves do not
    inputs  input that twins write to -> (node, place) of every new value
    """

    graph: Graph
    shared: set[int] = field(default_factory=set)
    made: dict[int, tuple[int, int]] = field(default_factory=dict)
    inputs: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph) -> "Writes":
        """Raises UserError for a step that writes to a parameter."""
        found = cls(graph)
        twins = {node.index: twin_of(node) for node in graph.nodes if node.writes}
        inputs = {(value.storage.index, *_place(value)): name for name, value in graph.inputs.items()}
        for index, twin in twins.items():
            node = graph.nodes[index]
            for value in node.writes:
                if value.storage.kind == "parameters":
                    raise UserError(
                        f"{node.op} in {node.module or 'the module'} writes to the parameter {value.storage.name}, "
                        "which a plan cannot spread; write to a copy, or to a buffer"
                    )
            for value, place in () if twin is None else twin.new:
                if (name := inputs.get((value.storage.index, *_place(value)))) is not None:
                    found.inputs.setdefault(name, []).append((index, place))
                elif value.storage.born is None:
                    found.shared.add(value.storage.index)
            if twin is None:
                found.shared |= {value.storage.index for value in node.writes}
        for value in found._read():
            if value.node is None or any(value is made for made in graph.nodes[value.node].outputs):
                continue
            place = found._new_place(value, twins[value.node])
            if place is None:
                found.shared.add(value.storage.index)
            else:
                found.made[value.index] = value.node, place
        found.inputs = {name: at for name, at in found.inputs.items() if not found.is_whole(graph.inputs[name])}
        return found

    def _read(self) -> Iterator[Value]:
        """Values that something reads, or that are returned."""
        returned = (*self.graph.outputs, *self.graph.gradients.values(), *self.graph.named_outputs().values())
        yield from (value for value in self.graph.values if value.users)
        yield from returned

    @staticmethod
    def _new_place(value: Value, twin: Twin | None) -> int | None:
        """Where a twin returns a value that its operator wrote."""
        for written, place in () if twin is None else twin.new:
            if value.before is written:
                return place
        return None

    def is_whole(self, value: Value) -> bool:
        """Whether a value lies in shared memory."""
        return value.storage.index in self.shared

    def is_literal(self, node: Node) -> bool:
        """Whether a node runs as it was recorded, on whole tensors."""
        return any(map(self.is_whole, (*node.outputs, *node.writes)))

    def is_written(self, name: str) -> bool:
        """Whether a step writes to an input."""
        return name in self.inputs or self.is_whole(self.graph.inputs[name])


def _place(value: Value) -> tuple[Any, ...]:
    return value.offset, value.shape, value.stride
