"""A rank's part of a step, as a plan spreads it: the graph's operators on local parts, and the messages between them.

    program = Program(graph, formulation, plan.choice, mesh)
    outputs, kept = program.forward(given)              # local parts of parameters, buffers and inputs, by their names
    gradients = program.backward(kept, of_outputs)

1. Each operator gets its inputs as its strategy reads them: the path from how they lie is taken, collective by
   collective (`core.auto.exchange`), the one that the solver priced. Then its rule computes on the parts
   (`core.auto.rule`), and where the rule talks, what it says is all-reduced over the axes that cut those letters.
2. A tensor is let go behind its last use. What a backward reads is kept; a changed copy is made anew by each reader.
3. Writes in place are as `core.auto.functional` has them; inputs that are written to get their last value at the end.
4. Operators that draw random numbers run whole. Before a step that draws, every rank takes the generator's state of the
   first one, so that all draw alike, and what one rank alone would draw.

All ranks run the same operators in the same order, so that messages meet.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from core.auto.conversion import Path
from core.auto.exchange import follow
from core.auto.formulate import Formulation
from core.auto.rule import AllReduce, Here, Rule, Strategy
from core.auto.rules import is_pointwise
from core.auto.specs import Spec
from core.comm.collectives import all_reduce, all_reduce_max
from core.config import UserError
from core.mesh import device_of, sub_mesh
from core.trace.cost import tensors_of
from core.trace.graph import Graph, Node, Value

Parts = dict[int, Tensor]
"""By the index of a value what this rank holds of it."""


@dataclass(frozen=True)
class _Given:
    """An input of an operator: the value, and how it comes to lie as it is read.

    stride  that the part must have, if any
    rows    the elements of a row must lie one behind the other
    """

    value: int
    path: Path | None
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    rows: bool = False


@dataclass(frozen=True)
class _Made:
    """A result: its place among the operator's, the value, the local shape and format that it must have."""

    place: int
    value: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Left:
    """What leaves the step, a gradient, an output or an input that was written to, by its name, and how it does."""

    name: str
    given: _Given


@dataclass(frozen=True)
class _Operation:
    """written: (place among the results, what leaves) of inputs' new values; freed: values, behind it"""

    name: str
    given: tuple[_Given, ...]
    run: Callable[[list[Tensor]], Any]
    made: tuple[_Made, ...]
    written: tuple[tuple[int, _Left], ...]
    gradients: tuple[_Left, ...]
    freed: tuple[int, ...]


class Program:
    """See the module.

    mesh     of the sizes that the formulation has, with names
    specs    input -> how it lies; outputs  the same of outputs, also of those that the backward makes
    draws    it draws random numbers

    Raises UserError where a plan cannot be executed, with the operator.
    """

    def __init__(self, graph: Graph, formulation: Formulation, choice: Sequence[int], mesh: DeviceMesh) -> None:
        self.graph, self.formulation, self.mesh = graph, formulation, mesh
        self.sizes, self.coordinate = tuple(mesh.shape), tuple(mesh.get_coordinate() or ())
        self.device, self.writes = device_of(mesh), formulation.writes
        self.taken = formulation.folded.unfold(choice)
        self.made_by_twins: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for index, (node, place) in self.writes.made.items():
            self.made_by_twins[node].append((index, place))
        self.links = {(link.target, link.input): link for link in formulation.links}
        self.known = {value.index for value in graph.inputs.values()} | set(self.writes.made)
        self.known |= {value.index for node in graph.nodes for value in node.outputs if value.node == node.index}
        first = next((node.index for node in graph.nodes if node.kind == "backward"), len(graph.nodes))
        self._check(first)
        self.specs = {name: self._outputs_of(number)[0] for number, name in enumerate(graph.inputs)}
        every = list(enumerate(graph.named_outputs().items(), len(graph.inputs) + len(graph.nodes)))
        self.outputs = {name: self._inputs_of(number)[0] for number, (name, _) in every}
        of_forward, of_backward = [], []
        for number, (name, value) in every:
            maker = self._root(value).node
            (of_backward if maker is not None and maker >= first else of_forward).append((number, name, value))
        self.left = [_Left(name, self._given(value, number, 0)) for number, name, value in of_forward]
        gradients, self.gradients_at_once = self._gradients(first)
        for number, name, value in of_backward:
            gradients[self._root(value).node or 0].append(_Left(name, self._given(value, number, 0)))
        last = self._last_uses()
        self.kept = {value for value, node in last.items() if node >= first}
        self.kept |= {left.given.value for left in self.gradients_at_once}
        leaving = {left.given.value for left in self.left}
        freed: dict[int, list[int]] = defaultdict(list)
        for value, node in last.items():
            if node >= first or value not in leaving:
                freed[node].append(value)
        operations = [
            self._operation(node, gradients.get(node.index, ()), freed.get(node.index, ())) for node in graph.nodes
        ]
        self.operations = operations[:first], operations[first:]
        self.draws = any(map(draws, graph.nodes))

    # What happens.

    def forward(self, given: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Parts]:
        """Outputs by name, as they lie, and what a backward needs. Inputs that the step writes to are written to."""
        if self.draws:
            self._agree_on_randomness()
        parts = {value.index: given[name] for name, value in self.graph.inputs.items() if name in given}
        self._run(self.operations[0], parts, given)
        outputs = {left.name: self._taken(left.given, parts) for left in self.left}
        return outputs, {value: parts[value] for value in self.kept if value in parts}

    def backward(self, kept: Parts, gradients: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients by the names of parameters and inputs, as these lie, and outputs that the backward makes.

        kept       is emptied
        gradients  of the outputs with which the backward begins, and what else comes for the backward alone, by their
                   names among the graph's inputs
        given      what the forward was given; those that a backward writes to are written to
        """
        parts, found = kept, {}
        for name, gradient in gradients.items():
            parts[self.graph.inputs[name].index] = gradient
        for left in self.gradients_at_once:
            found[left.name] = self._taken(left.given, parts).contiguous()
        found |= self._run(self.operations[1], parts, given)
        parts.clear()
        return found

    def _run(self, operations: Sequence[_Operation], parts: Parts, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        gradients: dict[str, Tensor] = {}
        written: dict[str, Tensor] = {}
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            for operation in operations:
                made = tensors_of(operation.run([self._taken(one, parts) for one in operation.given]))
                for one in operation.made:
                    part = made[one.place]
                    part = part if part.dtype == one.dtype else part.to(one.dtype)
                    assert part.shape == one.shape, (operation.name, tuple(part.shape), one.shape)
                    parts[one.value] = part
                for place, left in operation.written:
                    written[left.name] = self._follow(made[place], left.given)
                for left in operation.gradients:
                    gradients[left.name] = self._taken(left.given, parts).contiguous()
                for value in operation.freed:
                    parts.pop(value, None)
            for name, tensor in written.items():
                given[name].copy_(tensor)
        return gradients

    def _taken(self, given: _Given, parts: Parts) -> Tensor:
        return self._follow(parts[given.value], given)

    def _follow(self, part: Tensor, given: _Given) -> Tensor:
        if given.path is not None:
            part = follow(part, given.path, self.mesh, given.shape)
        if given.stride is not None and not _lies(part, given.stride):
            return torch.empty_strided(part.shape, given.stride, dtype=part.dtype, device=part.device).copy_(part)
        return part.contiguous() if given.rows and part.stride(-1) != 1 else part

    def _agree_on_randomness(self) -> None:
        on_cuda = self.device.type == "cuda"
        state = torch.cuda.get_rng_state(self.device) if on_cuda else torch.get_rng_state()
        told = state.to(self.device)
        for axis in self.mesh.mesh_dim_names or ():
            group = sub_mesh(self.mesh, axis).get_group()
            dist.broadcast(told, src=dist.get_global_rank(group, 0), group=group)
        if on_cuda:
            torch.cuda.set_rng_state(told.cpu(), self.device)
        else:
            torch.set_rng_state(told)

    # How it is made.

    def _check(self, first: int) -> None:
        for node in self.graph.nodes[first:]:
            if draws(node):
                raise UserError(
                    f"{node.op} in {node.module or 'the module'} draws random numbers in the backward: what is "
                    "computed again would be another; leave activation checkpointing or dropout out"
                )
        unseen = next((name for name in self.graph.inputs if name.startswith("unseen.")), None)
        if unseen is not None:
            users = self.graph.nodes[self.graph.inputs[unseen].users[0]]
            raise UserError(f"{users.op} in {users.module or 'the module'} reads a tensor that nobody gave; pass it in")

    def _outputs_of(self, node: int) -> tuple[Spec, ...]:
        return self.formulation.choices[node].outputs[self.taken[node]]

    def _inputs_of(self, node: int) -> tuple[Spec, ...]:
        return self.formulation.choices[node].inputs[self.taken[node]]

    def _root(self, value: Value) -> Value:
        """The value as which a part is found; of shared memory, which is written to in place, the first."""
        while value.index not in self.known and value.before is not None:
            value = value.before
        return value

    def _given(self, value: Value, target: int, place: int, **strides: Any) -> _Given:
        """The input of a node of the formulation.  strides: what it asks of them"""
        link = self.links[target, place]
        path = self._path(self._outputs_of(link.source)[link.output], self._inputs_of(target)[place], value)
        return _Given(self._root(value).index, path, value.shape, **strides)

    def _path(self, source: Spec, target: Spec, value: Value) -> Path | None:
        path = self.formulation.machine.path(source, target, value)
        return path if path.steps else None

    def _gradients(self, first: int) -> tuple[dict[int, list[_Left]], list[_Left]]:
        """Gradients by the operator that makes them, and those that are there when the backward begins."""
        numbers = {name: number for number, name in enumerate(self.graph.inputs)}
        by_node: dict[int, list[_Left]] = defaultdict(list)
        at_once: list[_Left] = []
        for name, value in self.graph.gradients.items():
            left, node = _Left(name, self._given(value, numbers[name], 0)), self._root(value).node
            (at_once if node is None or node < first else by_node[node]).append(left)
        return by_node, at_once

    def _last_uses(self) -> dict[int, int]:
        """Value -> the last operator that reads it, or makes it."""
        found: dict[int, int] = {}
        for node in self.graph.nodes:
            made = [value for value in node.outputs if value.node == node.index]
            found |= {self._root(value).index: node.index for value in (*node.inputs, *made)}
        for index, (node, _) in self.writes.made.items():
            found[index] = max(found.get(index, 0), node)
        return found

    def _operation(self, node: Node, gradients: Sequence[_Left], freed: Sequence[int]) -> _Operation:
        number = len(self.graph.inputs) + node.index
        choice = self.formulation.choices[number]
        assert choice.rule is not None
        strategy = choice.strategies[self.taken[number]]
        given = [
            self._given(value, number, n, **self._needed_strides(node, choice.rule, value, spec))
            for n, (value, spec) in enumerate(zip(node.inputs, strategy.inputs, strict=True))
        ]
        specs = [spec for spec in strategy.outputs if spec is not None]
        made = [(n, value) for n, value in enumerate(node.outputs) if value.node == node.index]
        made += [(place, self.graph.values[index]) for index, place in self.made_by_twins.get(node.index, ())]
        return _Operation(
            node.name,
            tuple(given),
            self._runner(choice.rule, strategy),
            tuple(_Made(n, value.index, self._local_shape(specs[n], value), value.dtype) for n, value in made),
            tuple(self._written(node, specs)) if node.writes else (),
            tuple(gradients),
            tuple(freed),
        )

    def _local_shape(self, spec: Spec, value: Value) -> tuple[int, ...]:
        return spec.local_shape(value.shape, self.sizes, self.coordinate)

    def _needed_strides(self, node: Node, rule: Rule, value: Value, spec: Spec) -> dict[str, Any]:
        """What runs as it was recorded gets the strides that it had; a kernel the order of elements that it had.

        Views are made of any strides, and what is computed element by element takes any.
        """
        if self.writes.is_whole(value):
            return {}
        if not rule.letters and not rule.linear and not spec.axes:
            spanned = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride, strict=True))
            return {} if math.prod(value.shape) > spanned else {"stride": value.stride}
        if node.is_view or is_pointwise(rule.call.op) or not value.stride:
            return {}
        if (stride := _dense(value, self._local_shape(spec, value))) is not None:
            return {"stride": stride}
        return {"rows": value.stride[-1] == 1}

    def _written(self, node: Node, specs: Sequence[Spec]) -> Iterator[tuple[int, _Left]]:
        """New values of inputs."""
        for name, at in self.writes.inputs.items():
            for place in (place for index, place in at if index == node.index):
                value = self.graph.inputs[name]
                yield (
                    place,
                    _Left(name, _Given(value.index, self._path(specs[place], self.specs[name], value), value.shape)),
                )

    def _runner(self, rule: Rule, strategy: Strategy) -> Callable[[list[Tensor]], Any]:
        here = rule.here(strategy, self.sizes, self.coordinate)
        axes = rule.talks_over(dict(strategy.cuts))
        if axes and rule.talk is not None:
            names = self.mesh.mesh_dim_names or ()
            over = [sub_mesh(self.mesh, names[axis]) for axis in axes]
            return lambda parts: _talked(rule, parts, here, over)
        return lambda parts: rule.run(parts, here)


def _lies(part: Tensor, stride: Sequence[int]) -> bool:
    return all(size <= 1 or own == other for size, own, other in zip(part.shape, part.stride(), stride, strict=True))


def _dense(value: Value, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of a part of this shape with the dims in the value's order and nothing between; None where the value has
    something between."""
    places = sorted(range(len(shape)), key=lambda dim: (value.stride[dim], -dim))
    made, whole = [0] * len(shape), 1
    part = 1
    for dim in places:
        if value.shape[dim] > 1 and value.stride[dim] != whole:
            return None
        made[dim] = part
        whole *= value.shape[dim]
        part *= shape[dim]
    return tuple(made)


def _talked(rule: Rule, parts: list[Tensor], here: Here, over: Sequence[DeviceMesh]) -> Any:
    """A rule's result whose ranks say something to each other in between."""
    assert rule.talk is not None
    talk = rule.talk.run(parts, here)
    heard: Tensor | None = None
    while True:
        try:
            said = next(talk) if heard is None else talk.send(heard)
        except StopIteration as ended:
            return ended.value
        heard = _everywhere(said, over)


def _everywhere(said: AllReduce, over: Sequence[DeviceMesh]) -> Tensor:
    tensor = said.tensor
    for axis in over:
        tensor = all_reduce_max(tensor, axis) if said.kind == "max" else all_reduce(tensor, axis)
    return tensor


def draws(node: Node) -> bool:
    """Whether an operator draws random numbers; an attention without dropout draws none."""
    if torch.Tag.nondeterministic_seeded not in node.op.tags:
        return False
    names = [argument.name for argument in node.op._schema.arguments]
    if "dropout_p" not in names:
        return True
    given = dict(zip(names, node.args)) | node.kwargs
    return bool(given.get("dropout_p"))
