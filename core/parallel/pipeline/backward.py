"""A backward in two parts: first the gradient of the input, for which another stage waits, later those of the weights.

What autograd recorded between output and input is a graph. Its nodes from which the input can be reached are the path;
weights hang on the path's sides. `SplitBackward`

1. goes down the path alone (`input`), and notes what arrives at every node on which weights hang,
2. later starts at those nodes again, towards their weights only (`weights`), which accumulate as in any backward: hooks
   of the parameters run, and the activations are let go.

A node that is a Python function computes all its gradients at once, and may not run twice, unless it is made for parts
(`core.kernels.parts`); what it gives its weights in the first part can be accumulated right after it
(`accumulate_computed`). Weights that hang on several nodes (used
twice) are done together, each node with the gradients it saw: what flows down the path a second time, from one of them
to another, is replaced.

Nothing of the graph is let go before the second part, but what blocks compute again (`.recompute`): of that what the
second part does not ask for. Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2.

`torch.distributed.pipelining` has the same two parts. Its second one puts gradients into `.grad` past the accumulators,
so hooks of parameters, which data parallelism sends its messages from, would not run.
"""

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from core.kernels.parts import backward_after, runs_in_parts
from core.parallel.pipeline.recompute import keeping

Grads = tuple[Tensor | None, ...]
Edges = list[tuple[GradientEdge, Tensor]]


class SplitBackward:
    """The backward of `output` to `entrance`, and later to the weights.

    output    or the end of its graph, which needs a gradient
    entrance  a tensor that `output` was computed from: a leaf that requires a gradient, or one that was computed of
              weights, which then belong to the second part
    """

    def __init__(self, output: Tensor | GradientEdge, gradient: Tensor | None, entrance: Tensor):
        self._output, self._entrance = output, entrance
        if gradient is None:
            assert isinstance(output, Tensor)
            gradient = torch.ones_like(output)
        self._gradient = gradient
        self._groups: list[list[_Side]] = []
        self._run_again: set[Node] = set()
        self._input_gradient: Tensor | None = None

    def input(self) -> Tensor:
        """The gradient of the entrance; zeros where nothing depends on it."""
        entrance = _node(self._entrance)
        path = _path({_node(self._output)}, {entrance})
        sides = [_Side(node, path) for node in path if node is not entrance]
        sides = [side for side in sides if side.leaves]
        self._groups = _sharing(sides)
        handles = [side.watch() for side in sides]
        try:
            self._run_again = set().union(*map(_run_again, self._groups))
            with keeping(self._run_again), backward_after(inputs=True, weights=False):
                (found,) = torch.autograd.grad(
                    self._output, self._entrance, self._gradient, retain_graph=True, allow_unused=True
                )
        finally:
            for handle in handles:
                handle.remove()
        self._input_gradient = torch.zeros_like(self._entrance) if found is None else found
        return self._input_gradient

    @property
    def computed(self) -> bool:
        """True where gradients of some weights are there already, so that `accumulate_computed` frees memory."""
        return any(all(side.runs_once for side in sides) for sides in self._groups)

    def accumulate_computed(self) -> None:
        """Accumulate the gradients of weights that the first part had to compute."""
        for sides in self._groups:
            if all(side.runs_once for side in sides):
                _accumulate(sides, retain_graph=True)
        self._groups = [sides for sides in self._groups if not all(side.runs_once for side in sides)]

    def weights(self) -> None:
        """Accumulate the gradients of the other weights, and let go of the graph."""
        # Where no weight is used twice every node is run once, and can let go of what it keeps.
        retain = any(len(sides) > 1 for sides in self._groups)
        with keeping(self._run_again if retain else set()):
            for sides in self._groups:
                _accumulate(sides, retain)
        if self._entrance.grad_fn is not None:
            self._entrance.backward(self._input_gradient)
        self._groups, self._run_again = [], set()
        del self._output, self._entrance, self._gradient


class _Side:
    """A node of the path, the weights (accumulators of gradients) beside it, and what the first part saw there."""

    def __init__(self, node: Node, path: set[Node]):
        self.node = node
        self._beside = [
            (index, below, number)
            for index, (below, number) in enumerate(node.next_functions)
            if below is not None and below not in path
        ]
        self.leaves = _leaves([below for _, below, _ in self._beside])
        self.runs_once = isinstance(node, BackwardCFunction) and not runs_in_parts(node)
        self._seen: Grads | None = None

    def watch(self) -> RemovableHandle:
        """Note what arrives at the node or, of a Python function, what it gives to the sides."""
        if self.runs_once:
            return self.node.register_hook(self._note_outputs)
        return self.node.register_prehook(self._note_inputs)

    def _note_inputs(self, gradients: Grads) -> None:
        self._seen = gradients

    def _note_outputs(self, gradients: Grads, _: Grads) -> None:
        self._seen = tuple(gradients[index] for index, _, _ in self._beside)

    def edges(self) -> Edges:
        """Where the second part begins, with which gradients."""
        if self._seen is None:
            return []
        if self.runs_once:
            starts = [GradientEdge(below, number) for _, below, number in self._beside]
        else:
            starts = [GradientEdge(self.node, index) for index in range(len(self._seen))]
        return [(edge, gradient) for edge, gradient in zip(starts, self._seen, strict=True) if gradient is not None]

    def hold(self) -> RemovableHandle | None:
        """Until removed, the node takes what it saw in the first part, whatever arrives."""
        return None if self.runs_once or self._seen is None else self.node.register_prehook(lambda _: self._seen)


def _accumulate(sides: list[_Side], retain_graph: bool) -> None:
    """The gradients of the weights beside some nodes, which share none with others."""
    edges = [edge for side in sides for edge in side.edges()]
    if not edges:
        return
    handles = [handle for side in sides if (handle := side.hold())] if len(sides) > 1 else []
    leaves = set().union(*(side.leaves for side in sides))
    try:
        with backward_after(inputs=len(sides) > 1, weights=True):
            torch.autograd.backward(
                tuple(edge for edge, _ in edges),
                tuple(gradient for _, gradient in edges),
                inputs=[leaf.variable for leaf in leaves],  # pyright: ignore[reportAttributeAccessIssue]
                retain_graph=retain_graph,
            )
    finally:
        for handle in handles:
            handle.remove()


def _node(end: Tensor | GradientEdge) -> Node:
    node = (end if isinstance(end, GradientEdge) else get_gradient_edge(end)).node
    assert node is not None
    return node


def _run_again(sides: list[_Side]) -> set[Node]:
    """The nodes of the path that the second part runs: of sides that share weights also those between them."""
    if len(sides) == 1:
        return set() if sides[0].runs_once else {sides[0].node}
    nodes = {side.node for side in sides}
    return _path(nodes, nodes)


def _path(starts: set[Node], ends: set[Node]) -> set[Node]:
    """The nodes below the starts from which an end can be reached."""
    order: list[Node] = []
    todo: list[tuple[Node, bool]] = [(node, False) for node in starts]
    seen: set[Node] = set()
    while todo:
        node, done = todo.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            todo.append((node, True))
            todo += [(below, False) for below, _ in node.next_functions if below is not None]
    path = set(ends)
    for node in order:  # what is below comes first
        if any(below in path for below, _ in node.next_functions):
            path.add(node)
    return path


def _leaves(todo: list[Node]) -> set[Node]:
    """The accumulators of gradients that can be reached from some nodes."""
    leaves: set[Node] = set()
    seen: set[Node] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(node)
        todo += [below for below, _ in node.next_functions if below is not None]
    return leaves


def _sharing(sides: list[_Side]) -> list[list[_Side]]:
    """Sides that share weights are together."""
    groups: list[tuple[list[_Side], set[Node]]] = []
    for side in sides:
        apart, together = [], ([side], set(side.leaves))
        for group in groups:
            if group[1].isdisjoint(together[1]):
                apart.append(group)
            else:
                together = ([*group[0], *together[0]], group[1] | together[1])
        groups = [*apart, together]
    return [sides for sides, _ in groups]
