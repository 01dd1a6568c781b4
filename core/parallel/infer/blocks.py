"""The pipeline of a model that brings no plan: its list of blocks and what comes before it, found in its forward.

A list of blocks can be cut into stages where a stage needs nothing of the others but the tensor that its first block is
given. That is read from a forward without values:

- each block is called once, in its turn, and given as its first argument what the one before returned: one tensor;
- what follows from parameters in front of the list, or inside of a block, is used by nobody behind it in another way;
- a parameter is used by the modules of one stage, or has a name in each of those that use it.

What is made in front of the list from inputs alone (masks, angles of positions) every stage makes for itself. Then each
stage of a split runs without values, as a rank would run it, and must call the same operators as the whole forward.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from core.compat import TorchDispatchMode, tree_leaves
from core.config import UserError
from core.parallel.infer.axes import size_of
from core.parallel.infer.find import on_tensors_without_values, traced
from core.parallel.infer.flow import Operation, Trace, Value, watched
from core.parallel.infer.trial import NOTHING, VIEWS
from core.parallel.pipeline.stages import Stages
from core.placement.stages import Costs, PipelinePlan, StageSplit, stage_ranges

LEAST_SHARE = 0.5
"""Part of the model's work that a list of blocks does."""
MOST_TRIED = 4
"""Stages of the split that is tried."""
OF_ITS_SHAPE = {f"{name}_like" for name in ("zeros", "ones", "full", "empty", "rand", "randn")}
OF_ITS_SHAPE |= {f"new_{name}" for name in ("zeros", "ones", "full", "empty", "empty_strided")}
"""Operators that take no values from their tensor."""


class UnsureBlocks(Exception):
    """The reason why a list of blocks is not cut."""


def infer_stages(model: nn.Module, sample: Mapping[str, Any]) -> PipelinePlan:
    """The plan of a pipeline; the model stays as it is.

    sample  keyword arguments of its forward, whose values do not matter

    Raises UserError where no list of blocks can be cut for sure, with what stood in the way of the largest.
    """
    with on_tensors_without_values(model, sample) as (whole, inputs):
        found = traced(whole, inputs)
        lists, refused = lists_of_blocks(whole, found), list[str]()
        for name in lists:
            try:
                plan = Blocks(name, whole, found).plan()
                _try_stages(plan, whole, inputs, found)
                return plan
            except UnsureBlocks as unsure:
                refused.append(f"{name}: {unsure}")
    why = refused[0] if refused else "it has no list of modules that are called once each, in their order"
    raise UserError(f"no list of blocks can be cut into stages for sure ({why}); use pp=1, or say where its blocks are")


def lists_of_blocks(model: nn.Module, found: Trace) -> list[str]:
    """Lists of two blocks at least, none inside of another; the one with most parameters first."""
    called = [call.name for call in found.calls]
    lists: dict[str, int] = {}
    for name, module in model.named_modules():
        names = [f"{name}.{n}" for n in range(len(module))] if isinstance(module, nn.ModuleList) else []
        inside = any(name.startswith(f"{other}.") for other in lists)
        if len(names) > 1 and name and not inside and [n for n in called if n in set(names)] == names:
            lists[name] = sum(parameter.numel() for parameter in module.parameters())
    return sorted(lists, key=lambda name: -lists[name])


class Blocks:
    """A list of blocks in a trace. Places: -1 is in front of it, 0 to n - 1 are the blocks, n is behind it."""

    def __init__(self, name: str, model: nn.Module, found: Trace):
        self.name, self.model, self.found = name, model, found
        of = {call.name: call for call in found.calls}
        self.calls = [of[f"{name}.{n}"] for n, _ in model.get_submodule(name).named_children()]
        self.start, self.stop = self.calls[0].first, self.calls[-1].last

    def plan(self) -> PipelinePlan:
        tuple_size, costs = self.handed_on(), self.costs()
        self._check_values()
        before = tuple(dict.fromkeys(self._modules_before()))
        self._check_parameters(before)
        work = sum(costs.blocks) + costs.before + costs.behind
        if sum(costs.blocks) < LEAST_SHARE * work:
            share = sum(costs.blocks) / work
            raise UnsureBlocks(f"its blocks do {share:.0%} of the model's work, and one stage would do the rest")
        return PipelinePlan(self.name, before, costs, tuple_size)

    def place(self, number: int) -> int:
        """The place of an operation. Those between two blocks are of the next one's."""
        return -1 if number < self.start else next((n for n, c in enumerate(self.calls) if number < c.last), self.end)

    @property
    def end(self) -> int:
        return len(self.calls)

    def handed_on(self) -> int:
        """The size of the tuple that each block returns; 0 where it returns the tensor that it hands on."""
        for call in self.calls:
            if not call.args or not isinstance(call.args[0], Tensor):
                raise UnsureBlocks(f"{call.name} is not given a tensor as its first argument")
            if not isinstance(handed := first_of(call.result), Tensor) or not handed.is_floating_point():
                raise UnsureBlocks(f"{call.name} hands on a {type(handed).__name__}, and a stage hands on one tensor")
        for one, next_one in pairwise(self.calls):
            if self.found.value(first_of(one.result)) is not self.found.value(next_one.args[0]):
                raise UnsureBlocks(f"{next_one.name} is given another tensor than {one.name} returns")
        sizes = {len(call.result) if isinstance(call.result, tuple) else 0 for call in self.calls}
        if len(sizes) > 1:
            raise UnsureBlocks(f"its blocks return tuples of {', '.join(map(str, sorted(sizes)))}")
        return sizes.pop()

    def _check_values(self) -> None:
        """A value that follows from parameters or from blocks is used at its own place, or handed on."""
        opaque = (call for call in self.found.calls if call.name in self.found.opaque)
        made = {self.found.value(call.result): self.place(call.first) for call in opaque}
        entrances = [self.found.value(call.args[0]) for call in self.calls]
        result = self.found.value(first_of(self.calls[-1].result))
        handed = {value: place for place, value in enumerate([*entrances, result])}
        for op in self.found.operations:
            used = [value for value in op.given if value in made or value.parameter is not None]
            if not used or op.name in OF_ITS_SHAPE:
                continue
            place = self.place(op.number)
            for value in used:
                if value.parameter is None and place not in (made[value], handed.get(value)):
                    raise UnsureBlocks(f"{where(op)} uses what was made {self._in_words(made[value])}")
            if 0 <= place < self.end and self.calls[place] not in op.calls:
                raise UnsureBlocks(f"{where(op)} computes between two blocks")
            made |= {value: place for value in op.made if value.parameter is None}
        left = next((v for v in self.found.outputs if v in made and self.end not in (made[v], handed.get(v))), None)
        if left is not None:
            raise UnsureBlocks(f"the model returns what was made {self._in_words(made[left])}")

    def _in_words(self, place: int) -> str:
        if place < 0:
            return "in front of the blocks"
        return f"in {self.calls[place].name}" if place < self.end else "behind"

    def _modules_before(self) -> Iterator[str]:
        """The outermost modules that use parameters in front of the list."""
        for op in self.found.operations[: self.start]:
            if not any(value.parameter is not None for value in op.given):
                continue
            call = next((c for c in op.calls if c.name and not f"{self.name}.".startswith(f"{c.name}.")), None)
            if call is None:
                raise UnsureBlocks(f"{where(op)} uses a parameter by itself in front of the blocks")
            if not isinstance(call.result, Tensor) or not call.result.is_floating_point():
                raise UnsureBlocks(f"{call.name}, in front of the blocks, returns a {type(call.result).__name__}")
            yield call.name

    def _check_parameters(self, before: Sequence[str]) -> None:
        """Each parameter has a name at every place where it is used."""
        names: dict[Value, list[str]] = {}
        for name, value in self.found.parameters.items():
            names.setdefault(value, []).append(name)
        places = {value: {self._place_of(name, before) for name in each} for value, each in names.items()}
        of = {each[0]: value for value, each in names.items()}
        for op in self.found.operations:
            for value in op.given:
                whole = None if value.parameter is None else of[value.parameter]
                if whole is not None and self.place(op.number) not in places[whole]:
                    place = self._in_words(self.place(op.number))
                    raise UnsureBlocks(f"{value.parameter} is used {place}, and belongs to another stage")

    def _place_of(self, name: str, before: Sequence[str]) -> int:
        if any(name.startswith(f"{module}.") for module in before):
            return -1
        rest = name.removeprefix(f"{self.name}.")
        return self.end if rest == name else int(rest.split(".")[0])

    def costs(self) -> Costs:
        """By the multiplications of products."""
        costs = [0.0] * (self.end + 2)
        for op in self.found.operations:
            if op.operator.summed:
                costs[self.place(op.number)] += float(prod(op.made[0].shape) * size_of(op.operator.summed))
        *blocks, behind, before = costs
        return Costs(tuple(blocks), before, behind)


def where(op: Operation) -> str:
    name = op.modules[-1] if op.modules else ""
    return f"{name or 'the model'} ({op.name})"


def _try_stages(plan: PipelinePlan, whole: nn.Module, inputs: Mapping[str, Any], found: Trace) -> None:
    """Run each stage of a split. Raises UnsureBlocks where one differs from the whole forward."""
    blocks = Blocks(plan.blocks, whole, found)
    num = min(MOST_TRIED, blocks.end)
    sizes = [blocks.end // num + (n < blocks.end % num) for n in range(num)]
    split = StageSplit(tuple(stage_ranges(sizes)), tuple(range(num)), plan)
    received = None
    for stage, own in enumerate(split.ranges):
        first = 0 if stage == 0 else blocks.calls[own.start].first
        last = len(found.operations) if stage == num - 1 else blocks.calls[own.stop].first
        model = copy.deepcopy(whole, {id(tensor): tensor for tensor in chain(whole.parameters(), whole.buffers())})
        attempt = Trace(opaque=found.opaque)
        noted = _Noted(attempt)
        try:
            stages = Stages(model, split, stage)
            with watched(model, attempt), torch.no_grad(), noted, stages.computing(stage, received):
                received = stages.compute(**inputs)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
            said = next(iter(str(error).splitlines()), type(error).__name__)
            raise UnsureBlocks(f"stage {stage} of {num} cannot run by itself: {said}") from error
        wanted = [told for op in found.operations[first:last] for told in _told(op.name, op.made[0].shape)]
        if noted.operations[-len(wanted) :] != wanted:
            raise UnsureBlocks(f"stage {stage} of {num} does not compute what it computes in the whole model")


def first_of(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) and result else result


def _told(name: str, shape: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
    """One operator; none, where it only hands its tensor on."""
    return [] if name in NOTHING else [("view" if name in VIEWS else name, tuple(shape))]


class _Noted(TorchDispatchMode):
    """Operators, and the shapes of their first results."""

    def __init__(self, attempt: Trace) -> None:
        super().__init__()
        self.attempt = attempt
        self.operations: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if tensors and not self.attempt.paused:
            self.operations.extend(_told(func._schema.name.removeprefix("aten::"), tensors[0].shape))
        return result
