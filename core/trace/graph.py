"""A step of a module as a graph: its operators in the order in which they run, their tensors, and the memory of these.

    graph = trace_graph(model, {"input_ids": ids, "labels": ids})        # core.trace.record
    graph.flops(), graph.peak(), graph.nodes[graph.peak().node]

1. A `Node` is one call of an operator of ATen, with what it was given and what it made. Calls that make nothing new
   (`detach`, a view of the shape that there is) are no nodes.
2. A `Value` is a tensor as a node made it: a place in a storage. An operator in place makes a new value of the same
   place, so that each value is made once and never changes.
3. A `Storage` is memory. Views share it, and it lives as long as any of them.

Two lives of a storage are told apart: until eager torch frees it (`freed`: Python's variables hold it, and autograd),
and until its last use, which is what a program made of the graph would need. What a backward reads of what a forward
made is *kept*; that is less than what is alive when the forward ends, and told by the joint graph alone.

Blocks that do the same are known (`Graph.alike`), so that a solver may decide for one and have decided for all.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple, get_args

import torch

from core.compat import tree_map
from core.trace.cost import tensors_of

NodeKind = Literal["forward", "backward", "update"]
MemoryKind = Literal["parameters", "buffers", "inputs", "gradients", "state", "activations", "temporaries"]
Until = Literal["freed", "used"]

MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)


@dataclass(eq=False, slots=True)
class Storage:
    """Memory, and when it is there.

    kind    parameters, buffers, inputs (constants and the gradients of outputs, too); gradients: a parameter's, at the
            end; state: the optimizer's; activations: made by the forward and kept for the backward; temporaries: others
    name    of the parameter, buffer or input that lies in it
    born    the node whose result it is; None: it was there before the step
    freed   the node behind which torch frees it; None: it outlives the step
    uses    nodes that are given it or return it, in their order
    """

    index: int
    num_bytes: int
    kind: MemoryKind = "temporaries"
    name: str = ""
    born: int | None = None
    freed: int | None = None
    uses: list[int] = field(default_factory=list)

    def last(self, until: Until) -> int | None:
        """The last node at which it is alive; None: it outlives the step."""
        if until == "freed" or self.freed is None:
            return self.freed
        return self.uses[-1] if self.uses else self.freed


@dataclass(eq=False, slots=True, repr=False)
class Value:
    """A tensor.

    offset, stride  in elements
    node            whose result it is, or who wrote to its storage last; None: it was there before the step
    name            of a parameter, buffer or input; of others the node's, with a number where it has several results
    before          the same place before a node wrote to its storage
    users           nodes that are given it, in their order
    """

    index: int
    storage: Storage
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    stride: tuple[int, ...]
    node: int | None = None
    name: str = ""
    before: Value | None = None
    users: list[int] = field(default_factory=list)

    def meta(self) -> torch.Tensor:
        """A tensor of its shape, strides and format on "meta", which holds nothing."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    def __repr__(self) -> str:
        return f"{self.name or self.index}: {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(eq=False, slots=True, repr=False)
class Node:
    """A call of an operator.

    name         addmm_3: the operator's, numbered
    args, kwargs, result  with values in the place of tensors
    inputs       the values among them, in their order
    outputs      the tensors that it returns, in their order
    writes       the inputs that it writes to in place, as they were before
    recomputed   a forward within the backward
    module       path of the module whose forward calls it, or called the operator whose gradient it computes
    source       a node of the backward: that of the forward whose gradient it is part of
    is_view      it makes nothing but other views, which takes no time
    """

    index: int
    name: str
    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    writes: tuple[Value, ...]
    kind: NodeKind
    recomputed: bool
    module: str
    source: int | None
    is_view: bool
    flops: int
    bytes_read: int
    bytes_written: int

    @property
    def kept(self) -> bool:
        """Whether the backward needs memory that it made."""
        return any(v.storage.kind == "activations" and v.storage.born == self.index for v in self.outputs)

    def on_meta(self) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Arguments, keyword arguments and result of the call with tensors on "meta" in the place of values."""
        return filled((self.args, self.kwargs, self.result), Value.meta)

    def __repr__(self) -> str:
        made = ", ".join(map(repr, self.outputs))
        given = ", ".join(value.name or str(value.index) for value in self.inputs)
        return f"{self.kind} {self.module or '.'}: ({made}) = {self.op}({given})"


class Alike(NamedTuple):
    """A place in a block of the list `blocks`. Blocks of one `kind` do the same, node by node at every `position`."""

    blocks: str
    kind: int
    position: int


@dataclass(frozen=True)
class Peak:
    """The fullest moment of a step.

    node     whose results fill it; None: before the first
    by_kind  bytes by kind of memory, those that are there
    alive    storages, the largest first
    """

    node: int | None
    num_bytes: int
    by_kind: dict[MemoryKind, int]
    alive: tuple[Storage, ...]


@dataclass(frozen=True, eq=False)
class Result:
    """What a call returns: a tree of containers and objects, in which stand-ins are in the place of tensors.

    values     place in the tree, such as output.logits -> value
    stand_ins  place -> the stand-in there; of one tensor in several places the same
    """

    tree: Any
    values: dict[str, Value]
    stand_ins: dict[str, torch.Tensor]

    @classmethod
    def of(cls, tree: Any, value_of: Callable[[torch.Tensor], Value]) -> Result:
        stand_ins = dict(_places("output", tree, set()))
        return cls(tree, {name: value_of(tensor) for name, tensor in stand_ins.items()}, stand_ins)

    def filled(self, tensors: Mapping[str, Any]) -> Any:
        """The same with tensors in the place of stand-ins."""
        memo = {id(self.stand_ins[name]): tensor for name, tensor in tensors.items()}

        def fill(leaf: Any) -> Any:
            return leaf if isinstance(leaf, _PLAIN) else deepcopy(leaf, memo)

        return tree_map(fill, self.tree)


_PLAIN = (bool, int, float, str, type(None))


def _places(path: str, tree: Any, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in containers and in attributes of objects, by their places."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
        return
    if isinstance(tree, (*_PLAIN, type, torch.nn.Module)) or id(tree) in seen:
        return
    seen.add(id(tree))
    if isinstance(tree, Mapping):
        inside = tree.items()
    elif isinstance(tree, list | tuple):
        names = getattr(tree, "_fields", range(len(tree)))
        inside = zip(names, tree, strict=True)
    else:
        inside = getattr(tree, "__dict__", {}).items()
    for name, branch in inside:
        yield from _places(f"{path}.{name}", branch, seen)


@dataclass(eq=False)
class Graph:
    """A step.

    inputs     name -> value: parameters and buffers by their names, inputs by their keys, constants
    outputs    tensors of the module's output; of a step that trains, what its backward begins with
    gradients  name of a parameter, or of an input that wants one -> value
    constants  name of an input -> the tensor with its values, where it is no argument of the step
    result     of a call that is recorded (`trace_call`): what it returns
    """

    nodes: list[Node]
    values: list[Value]
    storages: list[Storage]
    inputs: dict[str, Value]
    outputs: tuple[Value, ...]
    gradients: dict[str, Value]
    constants: dict[str, torch.Tensor]
    result: Result | None = None

    def named_outputs(self) -> dict[str, Value]:
        """Outputs by name: output.0, output.1, …; where the call's result is known, by their places in it."""
        if self.result is not None:
            return self.result.values
        return {f"output.{number}": value for number, value in enumerate(self.outputs)}

    # Work.

    def flops(self, kind: NodeKind | None = None) -> int:
        """What is recomputed counts in the backward."""
        return sum(node.flops for node in self.nodes if kind in (None, node.kind))

    @property
    def bytes_read(self) -> int:
        return sum(node.bytes_read for node in self.nodes)

    @property
    def bytes_written(self) -> int:
        return sum(node.bytes_written for node in self.nodes)

    # Memory.

    def bytes_of(self, kind: MemoryKind) -> int:
        """Bytes of all storages of a kind, whenever they are there."""
        return sum(storage.num_bytes for storage in self.storages if storage.kind == kind)

    def bytes_alive(self, until: Until = "freed") -> dict[MemoryKind, list[int]]:
        """Kind -> bytes that are alive before the first node, and when each node has made its results.

        until  freed: eager torch frees it; used: its last use
        """
        changes: dict[MemoryKind, list[int]] = {kind: [0] * (len(self.nodes) + 2) for kind in MEMORY_KINDS}
        for storage in self.storages:
            born, last = storage.born, storage.last(until)
            changes[storage.kind][0 if born is None else born + 1] += storage.num_bytes
            if last is not None:
                changes[storage.kind][last + 2] -= storage.num_bytes
        return {kind: list(accumulate(change[:-1])) for kind, change in changes.items()}

    def alive(self, node: int | None, until: Until = "freed") -> list[Storage]:
        """Storages that are alive when a node has made its results; None: before the first."""
        place = -1 if node is None else node

        def is_alive(storage: Storage) -> bool:
            last = storage.last(until)
            return (-1 if storage.born is None else storage.born) <= place and (last is None or last >= place)

        return [storage for storage in self.storages if is_alive(storage)]

    def peak(self, until: Until = "freed") -> Peak:
        by_kind = self.bytes_alive(until)
        totals = [sum(at) for at in zip(*by_kind.values(), strict=True)]
        num_bytes = max(totals)
        place = totals.index(num_bytes)
        node = place - 1 if place else None
        alive = sorted(self.alive(node, until), key=lambda storage: -storage.num_bytes)
        return Peak(node, num_bytes, {kind: row[place] for kind, row in by_kind.items() if row[place]}, tuple(alive))

    # Structure.

    def sources(self, node: Node) -> Iterator[Node]:
        """The nodes whose results a node is given, once each."""
        yield from (self.nodes[index] for index in dict.fromkeys(v.node for v in node.inputs) if index is not None)

    @cached_property
    def alike(self) -> list[Alike | None]:
        """Of each node its place in a block of a module list; None outside of any.

        Nodes of one place do the same on tensors of the same shapes, on parameters of the same names in their blocks.
        """
        blocks: dict[tuple[str, str], list[Node]] = defaultdict(list)
        for node in self.nodes:
            if (place := block_of(node.module)) is not None:
                blocks[place[:2]].append(node)
        found: list[Alike | None] = [None] * len(self.nodes)
        kinds: dict[Any, int] = {}
        for (name, number), nodes in blocks.items():
            prefix = ".".join(filter(None, (name, number))) + "."
            kind = kinds.setdefault((name, tuple(_doing(node, prefix) for node in nodes)), len(kinds))
            for position, node in enumerate(nodes):
                found[node.index] = Alike(name, kind, position)
        return found

    def multiplicity(self) -> Counter[Alike]:
        """The number of nodes of each place."""
        return Counter(place for place in self.alike if place is not None)


def block_of(path: str) -> tuple[str, str, str] | None:
    """("blocks", "3", "mlp.up") of blocks.3.mlp.up; None where it is within no list."""
    found = re.match(r"(?:(.*?)\.)??(\d+)(?:\.(.*))?$", path)
    return None if found is None else (found[1] or "", found[2], found[3] or "")


def _doing(node: Node, prefix: str) -> tuple[Any, ...]:
    """All that sets a node apart, wherever its block stands."""
    path = f"{node.module}.".removeprefix(prefix)
    given = tuple((_own_name(value, prefix), value.shape, value.dtype) for value in node.inputs)
    made = tuple((value.shape, value.stride, value.dtype) for value in node.outputs)
    return node.op, node.kind, node.recomputed, path, plain_arguments(node), given, made


def name_nodes(nodes: list[Node]) -> None:
    """Number them operator by operator, and call what they make after them."""
    counts: Counter[str] = Counter()
    for node in nodes:
        called = node.op._schema.name.partition("::")[2]
        counts[called] += 1
        node.name = f"{called}_{counts[called]}"
        for place, value in enumerate(node.outputs):
            if value.node == node.index and not value.name:
                value.name = node.name if len(node.outputs) == 1 else f"{node.name}.{place}"


def _own_name(value: Value, prefix: str) -> str:
    is_own = value.node is None and value.storage.kind in ("parameters", "buffers")
    return value.name.removeprefix(prefix) if is_own else ""


def plain_arguments(node: Node) -> tuple[Any, ...]:
    """The arguments without their tensors, to be compared."""
    return _plain((node.args, node.kwargs))


def _plain(tree: Any) -> Any:
    if isinstance(tree, Value):
        return Value
    if isinstance(tree, list | tuple):
        return tuple(map(_plain, tree))
    if isinstance(tree, dict):
        return tuple((key, _plain(value)) for key, value in tree.items())
    return tree if isinstance(tree, bool | int | float | str | torch.dtype | type(None)) else str(tree)


def run_graph(graph: Graph, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Compute the step: gradients by their parameters' names, outputs as output.0, output.1, …

    given  tensors of the graph's inputs, by their names; constants need not be among them. Those that a step writes to
           in place, such as running statistics, are written to.
    """
    tensors: dict[int, torch.Tensor] = {}
    for name, value in graph.inputs.items():
        tensors[value.index] = graph.constants[name] if name not in given and name in graph.constants else given[name]

    def of(value: Value) -> torch.Tensor:
        while value.index not in tensors and value.before is not None:
            value = value.before  # written to in place since
        return tensors[value.index]

    last = _last_uses(graph)
    with torch.no_grad():
        for node in graph.nodes:
            args, kwargs = filled((node.args, node.kwargs), of)
            made = tensors_of(node.op(*args, **kwargs))
            tensors.update((value.index, tensor) for value, tensor in zip(node.outputs, made, strict=True))
            for index in last.get(node.index, ()):
                tensors.pop(index, None)
    outputs = {f"output.{number}": of(value) for number, value in enumerate(graph.outputs)}
    return outputs | {name: of(value) for name, value in graph.gradients.items()}


def _last_uses(graph: Graph) -> dict[int, list[int]]:
    """Node -> values whose storages nobody uses behind it."""
    stays = {value.storage.index for value in (*graph.outputs, *graph.gradients.values())}
    found: dict[int, list[int]] = defaultdict(list)
    for value in graph.values:
        if value.storage.uses and value.storage.index not in stays:
            found[value.storage.uses[-1]].append(value.index)
    return found


def filled(tree: Any, of: Callable[[Value], Any]) -> Any:
    """The same with something else in the place of values."""
    if isinstance(tree, Value):
        return of(tree)
    if isinstance(tree, dict):
        return {key: filled(value, of) for key, value in tree.items()}
    return type(tree)(filled(branch, of) for branch in tree) if isinstance(tree, list | tuple) else tree
