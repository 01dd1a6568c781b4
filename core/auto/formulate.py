"""The solver's problem of a step: what every operator and every change of layout costs on a mesh.

A node is an operator of the graph (`core.trace.graph`), with the strategies of its rule, or an input: a parameter, a
buffer or data, which lies as any spec says that is no partial sum. An edge is a tensor that one makes and another
reads: the cheapest path from one's spec to the other's (`core.auto.conversion`). A gradient ends as its parameter lies,
the outputs as no partial sum.

seconds   of an operator: FLOPs and bytes of the largest part, on a machine of `Speed`, and its own messages; a view's 0
memory    the parts of parameters (with so many bytes of optimizer state), buffers and data, from first to last; what an
          operator makes, from there to its last use, as its storage lives; a changed copy while it is read

Views and what is computed of one tensor element by element follow their producer, where they can take each of its specs
as it comes. Blocks that do the same choose alike.

Not known: that messages may run beside what is computed (their seconds add up), that two readers of a tensor may share
one changed copy, and what is allocated within an operator or on the way from one spec to another.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from core.auto.conversion import Path, cheapest
from core.auto.costs import Link, seconds_of
from core.auto.functional import Writes, reads_form_alone, twin_of
from core.auto.problem import Edge, Folded, Follower, Held, Node, Problem, fold
from core.auto.rule import Call, Here, Rule, Strategy
from core.auto.rules import is_pointwise, rule_of, runs_whole
from core.auto.specs import Spec, all_specs
from core.config import UserError
from core.trace.graph import Graph, Value, block_of
from core.trace.graph import Node as Operator
from core.trace.machine import Speed


@dataclass(frozen=True, eq=False)
class Choice:
    """What a node may be: of each strategy the specs of its inputs and outputs, its seconds, and its name.

    rule, strategies  of an operator: what runs them
    """

    inputs: tuple[tuple[Spec, ...], ...]
    outputs: tuple[tuple[Spec, ...], ...]
    seconds: np.ndarray
    names: tuple[str, ...]
    rule: Rule | None = None
    strategies: tuple[Strategy, ...] = ()

    def limited(self, name: str, spec: Spec) -> "Choice":
        """The strategies whose first output lies so.  Raises UserError where there is none."""
        kept = [n for n, outputs in enumerate(self.outputs) if outputs and outputs[0] == spec]
        if not kept:
            others = ", ".join(sorted({str(outputs[0]) for outputs in self.outputs if outputs})) or "nothing"
            raise UserError(f"{name} cannot lie as {spec}; it can lie as {others}")
        return Choice(
            tuple(self.inputs[n] for n in kept),
            tuple(self.outputs[n] for n in kept),
            self.seconds[kept],
            tuple(self.names[n] for n in kept),
            self.rule,
            tuple(self.strategies[n] for n in kept),
        )


@dataclass(frozen=True, eq=False)
class Change:
    """A tensor that is laid out anew between two nodes of a plan."""

    source: str
    target: str
    value: Value
    path: Path


@dataclass(frozen=True, eq=False)
class Formulation:
    """The problem of a step, `folded`, and what its nodes are."""

    folded: Folded
    whole: Problem
    choices: tuple[Choice, ...]
    links: tuple["_Link", ...]
    machine: "_Machine"
    writes: Writes

    @property
    def problem(self) -> Problem:
        return self.folded.problem

    def taken(self, choice: Sequence[int]) -> dict[str, str]:
        """Node -> its strategy in a plan of `problem`, as `inputs -> outputs`."""
        return {
            node.name: node.strategy(strategy)
            for node, strategy in zip(self.whole.nodes, self.folded.unfold(choice), strict=True)
        }

    def specs(self, choice: Sequence[int]) -> dict[str, tuple[Spec, ...]]:
        """Node -> how its outputs lie."""
        strategies = self.folded.unfold(choice)
        return {
            node.name: of.outputs[strategy]
            for node, of, strategy in zip(self.whole.nodes, self.choices, strategies, strict=True)
        }

    def changes(self, choice: Sequence[int]) -> list[Change]:
        """Tensors that a plan lays out anew, in the order in which they are read; free slices are left out."""
        strategies = self.folded.unfold(choice)
        found = []
        for link in self.links:
            source = self.choices[link.source].outputs[strategies[link.source]][link.output]
            target = self.choices[link.target].inputs[strategies[link.target]][link.input]
            path = self.machine.path(source, target, link.value)
            if path.bytes_sent:
                names = (self.whole.nodes[link.source].name, self.whole.nodes[link.target].name)
                found.append(Change(*names, link.value, path))
        return found


@dataclass(frozen=True, eq=False)
class _Link:
    """A tensor between two nodes: an output of the one, an input of the other."""

    source: int
    output: int
    target: int
    input: int
    value: Value


def formulate(
    graph: Graph,
    sizes: Sequence[int],
    links: Sequence[Link],
    speed: Speed,
    fixed: Mapping[str, Spec | Sequence[Spec]] | None = None,
    state: float = 0.0,
) -> Formulation:
    """The problem of a step on a mesh.

    sizes  ranks on each axis of the mesh; links  of each
    fixed  input, output by its name in `Graph.named_outputs`, or node by the name of its first output -> how it lies;
           of inputs and outputs also the specs among which is chosen
    state  bytes that an optimizer keeps by byte of a parameter

    Raises UserError where there is no such input, output or node, or where it cannot lie so, and for a state that is no
    number of bytes.
    """
    if not 0 <= state < math.inf:
        raise UserError(f"state={state}: an optimizer keeps a number of bytes by byte of a parameter, 0 or more")
    return _Builder(graph, _Machine(tuple(sizes), tuple(links), speed), dict(fixed or {}), state).formulation()


class _Machine:
    """Prices on a mesh, each worked out once."""

    def __init__(self, sizes: tuple[int, ...], links: tuple[Link, ...], speed: Speed) -> None:
        self.sizes, self.links, self.speed = sizes, links, speed
        self.paths: dict[tuple[Any, ...], Path] = {}
        self.tables: dict[tuple[Any, ...], tuple[np.ndarray, np.ndarray]] = {}
        self.kept: list[Any] = []  # whose ids are keys

    def path(self, source: Spec, target: Spec, value: Value) -> Path:
        key = (source, target, value.shape, value.dtype.itemsize)
        if key not in self.paths:
            self.paths[key] = cheapest(source, target, value.shape, value.dtype.itemsize, self.sizes, self.links)
        return self.paths[key]

    def table(self, sources: Sequence[Spec], targets: Sequence[Spec], value: Value) -> tuple[np.ndarray, np.ndarray]:
        """[source, target] seconds of the change, and bytes of the copy that it makes.

        Lists of specs are told apart by who they are: equal blocks have the same ones.
        """
        key = (id(sources), id(targets), value.shape, value.dtype.itemsize)
        if key not in self.tables:
            self.kept += [sources, targets]
            (from_, at), (to, into) = _distinct(sources), _distinct(targets)
            seconds = np.zeros((len(from_), len(to)))
            copied = np.zeros((len(from_), len(to)))
            for i, source in enumerate(from_):
                for j, target in enumerate(to):
                    if source == target:
                        continue
                    path = self.path(source, target, value)
                    seconds[i, j] = path.seconds
                    if any(step.operation != "split" for step in path.steps):
                        copied[i, j] = self.num_bytes(target, value)
            pair = np.ix_(at, into)
            self.tables[key] = seconds[pair], copied[pair]
        return self.tables[key]

    def num_bytes(self, spec: Spec, value: Value) -> int:
        """Of the largest part."""
        return math.prod(spec.largest_shape(value.shape, self.sizes)) * value.dtype.itemsize

    def seconds(self, operator: Operator, rule: Rule, strategy: Strategy) -> float:
        if operator.is_view:
            return 0.0
        cuts = dict(strategy.cuts)
        here = rule.here(strategy, self.sizes, [0] * len(self.sizes))
        share = math.prod(here.sizes[letter] / rule.sizes[letter] for letter in cuts)
        outputs = [spec for spec in strategy.outputs if spec is not None]
        tensors = [*zip(operator.inputs, strategy.inputs), *zip(operator.outputs, outputs)]
        full = sum(math.prod(value.shape) * value.dtype.itemsize for value, _ in tensors)
        part = sum(self.num_bytes(spec, value) for value, spec in tensors)
        traffic = (operator.bytes_read + operator.bytes_written) * (part / full if full else 1.0)
        itemsize = widest(operator)
        said = sum(
            seconds_of("all_reduce", message.elements * itemsize, self.sizes[axis], self.links[axis])
            for message in strategy.messages
            for axis in message.axes
        )
        return self.speed.seconds(operator.flops * share, traffic) + said


class _Builder:
    """A node for every input and operator, links between them, and what they hold."""

    def __init__(self, graph: Graph, machine: _Machine, fixed: dict[str, Any], state: float) -> None:
        self.graph, self.machine, self.fixed, self.state = graph, machine, fixed, state
        self.names: list[str] = []
        self.choices: list[Choice] = []
        self.made: dict[int, tuple[int, int]] = {}
        """value -> node and which of its outputs"""
        self.links: list[_Link] = []
        self.followers: dict[int, Follower] = {}
        self.held: list[Held] = []
        self.points = tuple(node.name for node in graph.nodes) or ("the step",)
        self.known: dict[Any, Choice] = {}
        self.columns: dict[Any, list[Any]] = {}
        self.gradient_ends: dict[tuple[int, int], int] = {}
        """operator and parameter -> when the gradient is there"""
        self.writes = Writes.of(graph)
        self.written: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """operator -> values that its twin makes besides, and where among its outputs"""
        for value, (index, place) in self.writes.made.items():
            self.written[index].append((value, place))
        self.alike = graph.alike
        kinds = {
            block[:2]: (place.blocks, place.kind)
            for node, place in zip(graph.nodes, self.alike, strict=True)
            if place is not None and (block := block_of(node.module)) is not None
        }
        self.kinds: dict[tuple[str, str], tuple[str, int]] = kinds

    def formulation(self) -> Formulation:
        known = {*self.graph.inputs, *self.graph.named_outputs(), *(node.name for node in self.graph.nodes)}
        if unknown := self.fixed.keys() - known:
            raise UserError(
                f"no input, output or node is called {min(unknown)}; fixed are inputs, output.0, … and nodes"
            )
        leaders: dict[Any, int] = {}
        for name, value in self.graph.inputs.items():
            self._add_input(name, value, leaders)
        for operator, place in zip(self.graph.nodes, self.alike, strict=True):
            self._add_operator(operator, place, leaders)
        for name, value in self.graph.gradients.items():
            parameter, source = self.made[self.graph.inputs[name].index][0], self._source(value)
            if source is not None:
                self._link(value, parameter, 0)
                self.gradient_ends[source[0], parameter] = value.storage.born or 0
        for name, at in self.writes.inputs.items():  # their new values lie as they do
            value = self.graph.inputs[name]
            for index, place in at:
                self.links.append(_Link(len(self.graph.inputs) + index, place, self.made[value.index][0], 0, value))
        for name, value in self.graph.named_outputs().items():
            specs = self._specs(name, value)
            node = self._add(
                name, Choice(tuple((s,) for s in specs), ((),) * len(specs), np.zeros(len(specs)), _strings(specs))
            )
            self._link(value, node, 0)
        self._hold_storages()
        nodes = tuple(
            Node(name, choice.seconds, choice.names) for name, choice in zip(self.names, self.choices, strict=True)
        )
        problem = Problem(nodes, tuple(self._edges()), tuple(self.held), self.points)
        of_nodes = tuple(self.choices), tuple(self.links)
        return Formulation(fold(problem, self.followers), problem, *of_nodes, self.machine, self.writes)

    def _add(self, name: str, choice: Choice) -> int:
        self.names.append(name)
        self.choices.append(choice)
        return len(self.names) - 1

    def _specs(self, name: str, value: Value) -> list[Spec]:
        """How an input or output may lie."""
        given = self.fixed.get(name)
        if isinstance(given, Spec):
            given.check(value.shape, self.machine.sizes)
            return [given]
        every = all_specs(len(value.shape), len(self.machine.sizes)) if given is None else given
        if self.writes.is_whole(value):
            every = [Spec(((),) * len(value.shape))]
        return [spec for spec in every if self._has_rows_for_all(spec, value)]

    def _has_rows_for_all(self, spec: Spec, value: Value) -> bool:
        last = [size - 1 for size in self.machine.sizes]
        return math.prod(spec.local_shape(value.shape, self.machine.sizes, last)) > 0 or not any(spec.dims)

    def _add_input(self, name: str, value: Value, leaders: dict[Any, int]) -> None:
        specs = self._specs(name, value)
        key = ("input", value.shape, value.dtype, tuple(specs))
        choice = self.known.setdefault(
            key, Choice(tuple((s,) for s in specs), tuple((s,) for s in specs), np.zeros(len(specs)), _strings(specs))
        )
        node = self._add(name, choice)
        self.made[value.index] = node, 0
        place = block_of(name.rpartition(".")[0])
        if place is not None and place[:2] in self.kinds and not isinstance(self.fixed.get(name), Spec):
            own = name.removeprefix(".".join(filter(None, place[:2])))
            self._follow_alike(node, (*self.kinds[place[:2]], own, value.shape, value.dtype), leaders)

    def _follow_alike(self, node: int, key: Any, leaders: dict[Any, int]) -> bool:
        """Its choice is that of the same node in the first block that is alike."""
        leader = leaders.setdefault(key, node)
        if leader == node or self.choices[leader] is not self.choices[node]:
            return False
        self.followers[node] = Follower(leader, tuple(range(len(self.choices[node].names))))
        return True

    def _add_operator(self, operator: Operator, place: Any, leaders: dict[Any, int]) -> None:
        key = None if place is None else ("operator", place)
        doing = (*_doing(operator), self.writes.is_literal(operator))
        if doing not in self.known:
            self.known[doing] = self._choice(operator)
        choice = self.known[doing]
        if (spec := self.fixed.get(operator.name)) is not None:
            choice = choice.limited(operator.name, spec)
        node = self._add(operator.name, choice)
        for n, value in enumerate(operator.inputs):
            self._link(value, node, n)
        for n, value in enumerate(operator.outputs):
            if value.node == operator.index:  # else it is what another made, and returned once more
                self.made[value.index] = node, n
        for value, place in self.written.get(operator.index, ()):
            self.made[value] = node, place
        if not (key and self._follow_alike(node, key, leaders)):
            self._follow_producer(operator, node)

    def _choice(self, operator: Operator) -> Choice:
        args, kwargs, result = operator.on_meta()
        twin = twin_of(operator)
        if twin is None or self.writes.is_literal(operator):
            rule = runs_whole(Call.of(operator.op, args, kwargs, result))
        else:
            rule = rule_of(twin.op, args, kwargs, twin.results(operator, result))
        strategies = rule.strategies(self.machine.sizes)
        if reads_form_alone(operator) and not rule.letters:
            rule, strategies = _of_any_input(rule, strategies, len(self.machine.sizes))
        seconds = [self.machine.seconds(operator, rule, strategy) for strategy in strategies]
        return Choice(
            tuple(strategy.inputs for strategy in strategies),
            tuple(tuple(spec for spec in strategy.outputs if spec is not None) for strategy in strategies),
            np.array(seconds),
            _strings(strategies),
            rule,
            tuple(strategies),
        )

    def _link(self, value: Value, target: int, place: int) -> None:
        source = self._source(value)
        if source is not None and source[0] != target:
            self.links.append(_Link(*source, target, place, value))

    def _source(self, value: Value) -> tuple[int, int] | None:
        """The node that made a value, and which of its outputs it is."""
        while value.index not in self.made and value.before is not None:
            value = value.before  # of shared memory: written to in place, and returned by nobody
        return self.made.get(value.index)

    def _follow_producer(self, operator: Operator, node: int) -> None:
        """Views, and what is computed element by element of one tensor, lie as it does, if they can."""
        if not operator.is_view and not (_is_pointwise(operator) and len(operator.inputs) == 1):
            return
        links = [link for link in self.links[-len(operator.inputs) or None :] if link.target == node]
        if len(links) != 1:
            return
        link, choice = links[0], self.choices[node]
        by_spec: dict[Spec, int] = {}
        for n in np.argsort(choice.seconds, kind="stable").tolist():
            by_spec.setdefault(choice.inputs[n][link.input], n)
        wanted = [outputs[link.output] for outputs in self.choices[link.source].outputs]
        if all(spec in by_spec for spec in wanted):
            self.followers[node] = Follower(link.source, tuple(by_spec[spec] for spec in wanted))

    def _edges(self) -> list[Edge]:
        """One of each pair of nodes, and the memory of what it copies while it is read."""
        by_ends: dict[tuple[int, int], list[_Link]] = defaultdict(list)
        for link in self.links:
            by_ends[link.source, link.target].append(link)
        sums: dict[Any, tuple[np.ndarray, np.ndarray]] = {}
        edges = []
        for ends, links in by_ends.items():
            tables = [self._table(link) for link in links]
            key = tuple(id(table[0]) for table in tables)
            if key not in sums:
                seconds, copied = sum(t[0] for t in tables), sum(t[1] for t in tables)
                sums[key] = np.asarray(seconds), np.asarray(copied).astype(np.int64)
                for array in sums[key]:
                    array.setflags(write=False)
            seconds, copied = sums[key]
            edges.append(Edge(*ends, seconds))
            if ends in self.gradient_ends:
                self.held.append(self._gradient(ends, links[0]))
            elif copied.any():
                point = self._point(ends[1])
                self.held.append(Held(ends, copied, point, point))
        return edges

    def _gradient(self, ends: tuple[int, int], link: _Link) -> Held:
        """What is left of a gradient behind the operator that makes it: a part as the parameter's."""
        kept = [self.machine.num_bytes(spec, link.value) for spec in self._column(self.choices[ends[1]], "inputs", 0)]
        end = len(self.points) - 1
        table = np.broadcast_to(np.array(kept), (len(self.choices[ends[0]].names), len(kept)))
        return Held(ends, table.copy(), min(self.gradient_ends[ends] + 1, end), end)

    def _point(self, node: int) -> int:
        """Where in the liveness order a node runs: inputs, to which gradients go, and outputs at its end."""
        point, end = node - len(self.graph.inputs), len(self.points) - 1
        return min(point, end) if point >= 0 else end

    def _table(self, link: _Link) -> tuple[np.ndarray, np.ndarray]:
        return self.machine.table(
            self._column(self.choices[link.source], "outputs", link.output),
            self._column(self.choices[link.target], "inputs", link.input),
            link.value,
        )

    def _column(self, choice: Choice, side: str, place: int) -> list[Any]:
        """Of each strategy the spec of one tensor; the same list whenever it is asked for."""
        key = (id(choice), side, place)
        if key not in self.columns:
            self.columns[key] = [specs[place] for specs in getattr(choice, side)]
        return self.columns[key]

    def _hold_storages(self) -> None:
        """Each storage by how the tensor lies that was made in it first."""
        first: dict[int, Value] = {}
        for value in self.graph.values:
            first.setdefault(value.storage.index, value)
        known: dict[Any, np.ndarray] = {}
        end = len(self.points) - 1
        for storage in self.graph.storages:
            value = first.get(storage.index)
            source = None if value is None else self.made.get(value.index)
            if value is None or source is None:
                continue
            times = 1 + (self.state if storage.kind == "parameters" else 0.0)
            node, output = source
            choice = self.choices[node]
            key = (id(choice), output, storage.num_bytes, times)
            if key not in known:
                full = math.prod(value.shape) * value.dtype.itemsize
                scale = times * storage.num_bytes / full if full else 0.0
                parts = [self.machine.num_bytes(s, value) for s in self._column(choice, "outputs", output)]
                known[key] = np.ceil(np.array(parts) * scale).astype(np.int64)
                known[key].setflags(write=False)
            last = storage.last("used")
            if storage.kind == "gradients":
                last = max(storage.uses, default=None)
            if storage.born is None:
                self.held.append(Held((node,), known[key], 0, end))
            else:
                self.held.append(
                    Held((node,), known[key], storage.born, end if last is None else max(last, storage.born))
                )


def _doing(operator: Operator) -> tuple[Any, ...]:
    """All of which its strategies depend: equal operators share them, and so the prices of what lies between them."""

    def plain(tree: Any) -> Any:
        if isinstance(tree, Value):
            return tree.shape, tree.dtype
        if isinstance(tree, dict):
            return tuple((key, plain(value)) for key, value in tree.items())
        return tuple(map(plain, tree)) if isinstance(tree, (list, tuple)) else str(tree)

    cost = operator.is_view, operator.flops, operator.bytes_read, operator.bytes_written
    return operator.op, plain(operator.args), plain(operator.kwargs), plain(operator.result), cost


def _of_any_input(rule: Rule, strategies: Sequence[Strategy], num_axes: int) -> tuple[Rule, list[Strategy]]:
    """Of an operator that looks at its input's form alone: the input may lie in any way, since another of that form is
    made for it."""
    form = rule.call.inputs[0]

    def run(parts: Sequence[Tensor], here: Here) -> Any:
        return rule.run([parts[0].new_empty_strided(form.shape, form.stride())], here)

    every = all_specs(form.ndim, num_axes, partial=True)
    return replace(rule, run=run), [replace(s, inputs=(spec,)) for s in strategies for spec in every]


def widest(operator: Operator) -> int:
    """Bytes of an element of what its ranks say to each other: of the widest of its inputs."""
    return max((value.dtype.itemsize for value in operator.inputs if value.dtype.is_floating_point), default=4)


def _is_pointwise(operator: Operator) -> bool:
    twin = twin_of(operator)
    return twin is not None and is_pointwise(twin.op)


def _distinct(specs: Sequence[Spec]) -> tuple[list[Spec], list[int]]:
    places: dict[Spec, int] = {}
    at = [places.setdefault(spec, len(places)) for spec in specs]
    return list(places), at


def _strings(values: Sequence[Any]) -> tuple[str, ...]:
    return tuple(map(str, values))
