"""A step's graph cut into stages: a graph of each, forward and backward, and the tensors that they send to each other.

    dealt = deal(graph, 2)
    cut = cut_graph(graph, dealt.stages(graph), 2)
    cut.parts[1].graph, cut.messages

1. Blocks of module lists are dealt out in the order in which they run, so that the stage with the most FLOPs has the
   fewest. What stands in front of them is the first stage's, what stands behind them the last one's.
2. An operator of the forward runs in its block's stage, and no earlier than the stages that make what it reads; one of
   the backward in that of its forward, and no later than those. So a forward hands on to later stages alone, to any of
   them (skips of a U-Net, an encoder's states), and a backward to earlier ones.
3. A parameter belongs to one stage: where its gradient ends. Others that read it, of tied weights, are sent it before
   the step, and their terms of its gradient come back as any other tensor of the backward.
4. Data, buffers and gradients of outputs are everywhere.

Messages have one order that all stages keep, which is why they meet.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from core.auto.staged import Chain
from core.config import UserError
from core.placement.stages import Costs, split_by_cost, stage_ranges
from core.trace.graph import Graph, Node, Result, Storage, Value, filled

Phase = Literal["parameters", "forward", "backward"]


@dataclass(frozen=True, eq=False)
class Message:
    """A tensor that one stage makes or owns, and another reads.

    name   of the parameter; of others what it is called among the outputs of the one and the inputs of the other
    phase  parameters: before the step
    """

    name: str
    source: int
    target: int
    phase: Phase
    value: Value


@dataclass(frozen=True, eq=False)
class Part:
    """A stage's graph. Its outputs, by name, are what it sends and the outputs of the whole that it makes.

    owns     parameters
    written  buffers that it writes to
    """

    graph: Graph
    owns: frozenset[str]
    written: frozenset[str]


@dataclass(frozen=True, eq=False)
class Cut:
    """The stages of a step.

    messages  in the order of a microbatch: first by phase, then as `cut_graph` says
    makers    output of the whole -> the stage that makes it
    """

    parts: tuple[Part, ...]
    messages: tuple[Message, ...]
    makers: dict[str, int]

    @property
    def owners(self) -> dict[str, int]:
        """Parameter -> its stage."""
        return {name: stage for stage, part in enumerate(self.parts) for name in part.owns}

    def of(self, phase: Phase) -> list[Message]:
        return [message for message in self.messages if message.phase == phase]


@dataclass(frozen=True)
class Dealt:
    """Which blocks each of `count` stages has: block -> stage."""

    count: int
    of_blocks: Mapping[tuple[str, str], int]

    def stages(self, graph: Graph) -> list[int]:
        """The stage of every operator, before it is settled.  Raises UserError for a call that runs other blocks."""
        chain = Chain(graph, alike=False)
        if unknown := [block for block in chain.blocks if block not in self.of_blocks]:
            raise UserError(
                f"the block {'.'.join(filter(None, unknown[0]))} runs in this call and not in the planned one: "
                "it has no stage; plan a call that runs all blocks"
            )
        of_place = [0, *(self.of_blocks[block] for block in chain.blocks), self.count - 1]
        return [of_place[place] for place in chain.places]


def deal(graph: Graph, stages: int | Sequence[int]) -> Dealt:
    """The blocks of each stage.

    stages  how many, or how many blocks each has

    Raises UserError for a module without a list of blocks, and for more stages than blocks.
    """
    chain = Chain(graph, alike=False)
    if isinstance(stages, int):
        if not 1 <= stages <= chain.count:
            raise UserError(f"stages={stages} and the module has {chain.count} blocks; give 1 to {chain.count}")
        split = split_by_cost(chain.count, stages, _costs(graph, chain))
    else:
        split = tuple(stages)
        if sum(split) != chain.count or min(split, default=0) < 1:
            raise UserError(
                f"stages={tuple(stages)} are not the module's {chain.count} blocks; give numbers that add up to them"
            )
    numbers = [number for number, blocks in enumerate(stage_ranges(split)) for _ in blocks]
    return Dealt(len(split), dict(zip(chain.blocks, numbers, strict=True)))


def _costs(graph: Graph, chain: Chain) -> Costs:
    """FLOPs; of what has none, one."""
    flops = [1.0] * (chain.count + 2)
    for node, place in zip(graph.nodes, chain.places, strict=True):
        flops[place] += node.flops
    return Costs(tuple(flops[1:-1]), flops[0], flops[-1])


def cut_graph(graph: Graph, stages: Sequence[int], count: int, owners: Mapping[str, int] | None = None) -> Cut:
    """The stages' graphs and messages.

    stages  of each operator, from which it moves where the flow of tensors asks for it
    owners  parameter -> its stage, where that is settled

    Messages of the forward go from the first stage to the last, those of the backward from the last to the first.

    Raises UserError for a write in place to what another stage made, or has been sent.
    """
    of = _settled(graph, stages)
    owns = {
        name: _owner(graph, name, value, of) if owners is None else owners[name]
        for name, value in graph.inputs.items()
        if value.storage.kind == "parameters"
    }
    reads: list[dict[int, Value]] = [{} for _ in range(count)]
    for node in graph.nodes:
        reads[of[node.index]].update((value.index, value) for value in (*node.inputs, *node.writes))
    for name, value in graph.gradients.items():
        reads[owns[name]][value.index] = value
    makers = {}
    for name, value in graph.named_outputs().items():
        makers[name] = of[value.node] if value.node is not None else owns.get(value.name, 0)
    messages = _messages(graph, of, owns, reads)
    _check_writes(graph, of, messages)
    parts = tuple(_Cutter(graph, of, stage, owns, messages, makers).part() for stage in range(count))
    return Cut(parts, tuple(messages), makers)


def _settled(graph: Graph, stages: Sequence[int]) -> list[int]:
    """No forward earlier, and no backward later, than what it reads of its own kind is made."""
    found = list(stages)
    for node in graph.nodes:
        forward = node.kind == "forward"
        makers = {value.node for value in (*node.inputs, *node.writes)} - {None}
        alike = [found[m] for m in makers if m is not None and (graph.nodes[m].kind == "forward") == forward]
        found[node.index] = (max if forward else min)([found[node.index], *alike])
    return found


def _owner(graph: Graph, name: str, value: Value, of: Sequence[int]) -> int:
    """The stage in which the gradient ends; without one the first that reads the parameter."""
    gradient = graph.gradients.get(name)
    if gradient is not None and gradient.node is not None:
        return of[gradient.node]
    return min((of[user] for user in value.users), default=0)


def _messages(
    graph: Graph, of: Sequence[int], owns: Mapping[str, int], reads: Sequence[Mapping[int, Value]]
) -> list[Message]:
    found = []
    for target, values in enumerate(reads):
        for value in values.values():
            if value.node is None:
                source = owns.get(value.name)
                if source is not None and source != target:
                    found.append(Message(value.name, source, target, "parameters", value))
            elif of[value.node] != target:
                source = of[value.node]
                goes_on = graph.nodes[value.node].kind == "forward" and source < target
                phase: Phase = "forward" if goes_on else "backward"
                if phase == "backward" and source < target:
                    raise UserError(
                        f"{value} is made by the backward of stage {source} and read in stage {target}, which runs its "
                        "own before; give fewer stages"
                    )
                found.append(Message(f"value.{value.index}", source, target, phase, value))
    order = {"parameters": 0, "forward": 1, "backward": 2}

    def place(message: Message) -> tuple[int, ...]:
        way = -1 if message.phase == "backward" else 1
        return order[message.phase], way * message.source, way * message.target, message.value.index

    return sorted(found, key=place)


def _check_writes(graph: Graph, of: Sequence[int], messages: Sequence[Message]) -> None:
    sent: dict[int, int] = {}
    for message in messages:
        if message.value.node is not None:
            storage = message.value.storage.index
            sent[storage] = min(sent.get(storage, message.value.node), message.value.node)
    for node in graph.nodes:
        for value in node.writes:
            born = value.storage.born
            elsewhere = born is not None and of[born] != of[node.index]
            if elsewhere or sent.get(value.storage.index, node.index) < node.index:
                raise UserError(
                    f"{node.op} in {node.module or 'the module'} writes in place to what stages send each other; write "
                    "to a copy, or put the border of stages elsewhere"
                )


@dataclass(eq=False)
class _Cutter:
    """Copies what a stage has of a graph, with indices of its own."""

    whole: Graph
    of: Sequence[int]
    stage: int
    owns: Mapping[str, int]
    messages: Sequence[Message]
    makers: Mapping[str, int]
    values: dict[int, Value] = field(default_factory=dict)
    storages: dict[int, Storage] = field(default_factory=dict)
    at: dict[int, int] = field(default_factory=dict)
    """operator of the whole -> its index here"""
    order: list[int] = field(default_factory=list)

    def part(self) -> Part:
        own = [node for node in self.whole.nodes if self.of[node.index] == self.stage]
        self.order = [node.index for node in own]
        self.at = {node: index for index, node in enumerate(self.order)}
        owned = {name for name, stage in self.owns.items() if stage == self.stage}
        outputs = {name: v for name, v in self.whole.named_outputs().items() if self.makers[name] == self.stage}
        read = {value.index for node in own for value in (*node.inputs, *node.writes)}
        read |= {value.index for value in outputs.values()}
        read |= {value.index for name, value in self.whole.gradients.items() if name in owned}
        inputs = {
            name: self._value(value)
            for name, value in self.whole.inputs.items()
            if name in owned or value.index in read
        }
        for message in self.messages:
            if message.target == self.stage and message.phase != "parameters":
                inputs[message.name] = self._value(message.value)
        nodes = [self._node(node) for node in own]
        leaving = {name: self._value(value) for name, value in outputs.items()}
        for message in self.messages:
            if message.source == self.stage and message.phase != "parameters":
                leaving[message.name] = self._value(message.value)
        gradients = {name: self._value(value) for name, value in self.whole.gradients.items() if name in owned}
        written = {value.storage.name for node in nodes for value in node.writes if value.storage.kind == "buffers"}
        graph = Graph(
            nodes,
            list(self.values.values()),
            list(self.storages.values()),
            inputs,
            (),
            gradients,
            {name: tensor for name, tensor in self.whole.constants.items() if name in inputs},
            Result(None, leaving, {}),
        )
        return Part(graph, frozenset(owned), frozenset(written))

    def _node(self, node: Node) -> Node:
        args, kwargs, result = filled((node.args, node.kwargs, node.result), self._value)
        given = {name: tuple(map(self._value, getattr(node, name))) for name in ("inputs", "outputs", "writes")}
        source = None if node.source is None else self.at.get(node.source)
        return replace(node, index=self.at[node.index], args=args, kwargs=kwargs, result=result, source=source, **given)

    def _value(self, value: Value) -> Value:
        if value.index not in self.values:
            node = None if value.node is None else self.at.get(value.node)
            made = Value(
                len(self.values),
                self._storage(value.storage),
                value.shape,
                value.dtype,
                value.offset,
                value.stride,
                node,
                value.name,
                None,
                [self.at[user] for user in value.users if user in self.at],
            )
            self.values[value.index] = made
            if node is not None and value.before is not None:
                made.before = self._value(value.before)
        return self.values[value.index]

    def _storage(self, storage: Storage) -> Storage:
        if storage.index not in self.storages:
            born = None if storage.born is None else self.at.get(storage.born)
            kind, name = storage.kind, storage.name
            if born is None and (storage.born is not None or self.owns.get(name, self.stage) != self.stage):
                kind = "inputs"
            freed = storage.freed
            if freed is not None:
                freed = max(bisect_right(self.order, freed) - 1, 0)
            uses = [self.at[node] for node in storage.uses if node in self.at]
            self.storages[storage.index] = Storage(len(self.storages), storage.num_bytes, kind, name, born, freed, uses)
        return self.storages[storage.index]
