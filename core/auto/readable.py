"""A plan that people read: what is cut, why an operator is run so and what else it could be, how two plans differ.

    print(plan)                       # seconds, peak, gap; how parameters lie, and what operators do, blocks once
    print(plan.explain("addmm_3"))    # the strategy taken, its cost, and what others would cost
    print(plan.compare(other))

Specs are DTensor's, axis by axis of the mesh: `S(0)R, RS(1) -> S(0)S(1)` on two axes is a matrix product whose first
operand is cut by rows over the first axis, the second by columns over the other.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from core.auto.costs import bytes_sent
from core.auto.execute import draws
from core.auto.formulate import Change, Formulation, widest
from core.auto.simulate import Account, simulate
from core.auto.solve import Plan
from core.auto.specs import Spec
from core.comm.volume import wire_share
from core.config import UserError, in_words
from core.trace.graph import Graph, Node

PEAK_WITHIN = 0.9, 1.25
"""Of the planned peak, what a rank's may be: a plan knows nothing of what is allocated inside of operators and on the
way from one layout to another, and counts what is freed by storages."""
MOST_SHOWN = 12
"""Alternatives of an operator, and differences of two plans: the cheapest, and the dearest."""


@dataclass(frozen=True, eq=False)
class SpreadStep:
    """The plan of one step of a module.

    axes  names of the mesh's axes
    """

    graph: Graph
    formulation: Formulation
    plan: Plan
    axes: tuple[str, ...]

    @cached_property
    def taken(self) -> tuple[int, ...]:
        """The strategy of every input, operator and output, in their order."""
        return self.formulation.folded.unfold(self.plan.choice)

    @cached_property
    def account(self) -> Account:
        return simulate(self.formulation.whole, self.taken)

    @cached_property
    def changes(self) -> list[Change]:
        return self.formulation.changes(self.plan.choice)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.formulation.machine.sizes

    def sent(self, coordinate: Sequence[int] | None = None) -> dict[tuple[str, str], float]:
        """(collective, axis) -> bytes that a rank sends in the step: between operators, and inside of them.

        Where operators draw random numbers, the first rank's generator comes before them, of a CPU in this count.

        coordinate  of the rank; by default the first, whose parts are the largest
        """
        found: dict[tuple[str, str], float] = defaultdict(float)
        for change in self.changes:
            shape, itemsize = change.value.shape, change.value.dtype.itemsize
            for step in change.path.steps:
                num_bytes = step.bytes_sent(shape, itemsize, self.sizes, coordinate)
                found[step.operation, self.axes[step.axis]] += num_bytes
        for number, choice in enumerate(self.formulation.choices):
            for message in choice.strategies[self.taken[number]].messages if choice.strategies else ():
                num_bytes = message.elements * self._itemsize(number)
                for axis in message.axes:
                    found["all_reduce", self.axes[axis]] += bytes_sent("all_reduce", num_bytes, self.sizes[axis])
        if any(map(draws, self.graph.nodes)):
            for axis, size in zip(self.axes, self.sizes, strict=True):
                found["broadcast", axis] += wire_share("broadcast", size) * torch.get_rng_state().nbytes
        return {key: num for key, num in found.items() if num}

    def _itemsize(self, number: int) -> int:
        return widest(self.graph.nodes[number - len(self.graph.inputs)])

    def specs(self) -> dict[str, Spec]:
        """Parameter, buffer or input -> how it lies."""
        return {name: self._outputs(number)[0] for number, name in enumerate(self.graph.inputs)}

    def is_cut(self) -> bool:
        """Whether anything is, or every rank does all."""
        return any(spec.axes for number in range(len(self.taken)) for spec in self._outputs(number))

    # --- as text ------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        mesh = " x ".join(f"{name}={size}" for name, size in zip(self.axes, self.sizes, strict=True))
        yield f"a step on {mesh}: {self.plan}"
        sent = " and ".join(f"{in_words(num)} {kind} over {axis}" for (kind, axis), num in sorted(self.sent().items()))
        yield f"{len(self.changes)} changes of layout between operators; a rank sends {sent or 'nothing'}"
        if not self.is_cut():
            yield "nothing is cut: every rank does all, which on these links takes the least time"
            return
        yield "parameters:"
        names = {name: self._told(spec) for name, spec in self.specs().items() if self._kind(name) == "parameters"}
        yield from folded(names)
        yield "operators:"
        of_nodes = {
            f"{node.module or '.'} {_kind_of(node)}": self._strategy(self._number(node)) for node in self._shown()
        }
        yield from folded(of_nodes)

    def _shown(self) -> Iterator[Node]:
        """What computes in the forward."""
        yield from (node for node in self.graph.nodes if node.kind == "forward" and node.flops)

    def explain(self, name: str) -> str:
        """The strategy of an input, operator or output, its cost, and what the others would cost, all else as it is.

        Raises UserError where there is nothing of that name.
        """
        number = self._numbered(name)
        node = self.formulation.whole.nodes[number]
        taken = self.taken[number]
        place = number - len(self.graph.inputs)
        lines = []
        if 0 <= place < len(self.graph.nodes):
            operator = self.graph.nodes[place]
            lines.append(f"{name}: {operator.op}, {operator.kind} of {operator.module or 'the module itself'}")
        else:
            lines.append(f"{name}: {'an output' if place >= 0 else self._kind(name).removesuffix('s')}")
        prices = self._prices(number)
        lines.append(f"takes  {self._strategy(number)}")
        lines.append(f"       {_ms(node.seconds[taken])} itself, {_ms(prices[taken] - node.seconds[taken])} around it")
        for change in self.changes:
            if name in (change.source, change.target):
                of = f"{change.source} -> {change.target}"
                lines.append(
                    f"       {of}: {change.path}, {in_words(change.path.bytes_sent)}, {_ms(change.path.seconds)}"
                )
        others = [n for n in np.argsort(prices, kind="stable").tolist() if n != taken]
        for other in others[:MOST_SHOWN]:
            lines.append(f"{_ms(prices[other] - prices[taken], True):>12}  {self._strategy(number, other)}")
        if len(others) > MOST_SHOWN:
            lines.append(f"and {len(others) - MOST_SHOWN} that cost more")
        return "\n".join(lines)

    def compare(self, other: "SpreadStep") -> str:
        """What the other plan of the same step does otherwise, the largest differences of cost first.

        Raises UserError where it is one of another step.
        """
        names = [[node.name for node in one.formulation.whole.nodes] for one in (self, other)]
        if names[0] != names[1] or self.sizes != other.sizes:
            raise UserError("two plans are compared of one step on meshes of one size; these differ in that")
        costs = [one._costs() for one in (self, other)]
        lines = [
            f"{_ms(self.account.seconds)} and {_ms(other.account.seconds)}: the other takes "
            f"{_ms(other.account.seconds - self.account.seconds, True)}",
            f"peak {in_words(self.account.peak_bytes)} and {in_words(other.account.peak_bytes)}",
        ]
        found = [n for n in range(len(names[0])) if self._strategy(n) != other._strategy(n)]
        found.sort(key=lambda n: -abs(costs[1][n] - costs[0][n]))
        lines.append(f"{len(found)} of {len(names[0])} inputs, operators and outputs differ")
        for n in found[:MOST_SHOWN]:
            change = _ms(costs[1][n] - costs[0][n], True)
            lines.append(f"{change:>12}  {names[0][n]}: {self._strategy(n)}  instead  {other._strategy(n)}")
        return "\n".join(lines)

    # --- prices -------------------------------------------------------------------------------------------------------

    def _prices(self, number: int) -> np.ndarray:
        """Seconds of a node's strategies with what they cost around it."""
        total = self.formulation.whole.nodes[number].seconds.copy()
        for edge in self.formulation.whole.edges:
            if edge.source == number:
                total += edge.seconds[:, self.taken[edge.target]]
            elif edge.target == number:
                total += edge.seconds[self.taken[edge.source]]
        return total

    def _costs(self) -> list[float]:
        """Seconds of each node and of what is changed for it."""
        costs = list(self.account.node_s)
        for edge, seconds in zip(self.formulation.whole.edges, self.account.edge_s, strict=True):
            costs[edge.target] += seconds
        return costs

    # --- names --------------------------------------------------------------------------------------------------------

    def _number(self, node: Node) -> int:
        return len(self.graph.inputs) + node.index

    def _numbered(self, name: str) -> int:
        for number, node in enumerate(self.formulation.whole.nodes):
            if node.name == name:
                return number
        near = [node.name for node in self.formulation.whole.nodes if name in node.name][:5]
        raise UserError(
            f"nothing in the step is called {name}" + (f"; there are {', '.join(near)}" if near else "; print the plan")
        )

    def _kind(self, name: str) -> str:
        return self.graph.inputs[name].storage.kind

    def _outputs(self, number: int) -> tuple[Spec, ...]:
        return self.formulation.choices[number].outputs[self.taken[number]]

    def _told(self, spec: Spec) -> str:
        return spec.by_axis(len(self.sizes))

    def _strategy(self, number: int, which: int | None = None) -> str:
        which = self.taken[number] if which is None else which
        choice = self.formulation.choices[number]
        if choice.rule is None:
            return self._told((choice.inputs[which] or choice.outputs[which])[0])
        sides = [", ".join(map(self._told, side[which])) for side in (choice.inputs, choice.outputs)]
        return " -> ".join(sides)


def folded(told: dict[str, str]) -> Iterator[str]:
    """Lines `name  what`, numbers in names as * where what they stand for is alike."""
    """Lines of what names have; blocks whose names differ in their number alone are told once."""
    found: dict[tuple[str, str], int] = {}
    for name, what in told.items():
        key = re.sub(r"(?<=\.)\d+(?=[. ]|$)", "*", name), what
        found[key] = found.get(key, 0) + 1
    width = max((len(name) for name, _ in found), default=0)
    for (name, what), count in found.items():
        yield f"  {name:<{width}}  {what}" + (f"  x {count}" if count > 1 else "")


def _kind_of(node: Node) -> str:
    return node.name if "." not in node.module else str(node.op._schema.name).partition("::")[2]


def _ms(seconds: float, signed: bool = False) -> str:
    return f"{1e3 * seconds:{'+' if signed else ''}.4g} ms"
