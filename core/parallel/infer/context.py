"""The context parallelism of a model that brings no plan: what of its blocks works on each place by itself.

1. The model's lists of blocks are found as for stages (`core.parallel.infer.blocks`), in a forward without values in
   which torch's attention is one operation. The sequence is dim 1 of the activations [B, L, D] of the first block; the
   axis of it is found wherever it goes.
2. Each operation of a block on what a rank has places of must keep the axis whole and work along others alone;
   attention is of places to places of one sequence, or to another sequence that every rank has whole. Modules that
   hold experts compute each token by itself, whatever they look at, which trying them has shown. A tensor that enters
   a block with the axis is cut like the activations, unless it goes to masks of attention alone.
3. A second forward with a mask of padding, where the model takes one, shows which arguments are masks.
4. The blocks run on one rank's places, without values: they must call the same operators, of the shapes that the rank's
   places have.

What is not sure is refused, by the name of the module and what it does.
"""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from core.compat import TorchDispatchMode, tree_leaves
from core.config import UserError
from core.parallel.infer.axes import flat, leaves_of
from core.parallel.infer.blocks import LEAST_SHARE, OF_ITS_SHAPE, Blocks, UnsureBlocks, first_of, lists_of_blocks, where
from core.parallel.infer.experts import by_token
from core.parallel.infer.find import on_tensors_without_values, traced
from core.parallel.infer.flow import ATTENTION, EXPERTS, Call, Operation, Trace, Value, plain_of, watched
from core.parallel.infer.places import Attention, Block, Held, Mode, Sequence, given, whole
from core.parallel.infer.roles import DROPS
from core.parallel.infer.rules import Operator
from core.parallel.infer.styles import Place, Trial, between
from core.parallel.infer.trial import COUNTS, NOTHING, VIEWS
from core.placement.style import Plan

_MASKS = {"attention_mask": "input_ids", "decoder_attention_mask": "decoder_input_ids"}
"""Arguments of padding -> those of whose shape they are."""
_MANY = (ATTENTION, EXPERTS)
"""Operations that stand for several operators."""
_CONSTANT = ("zeros", "ones", "full", "empty", "scalar_tensor")
_FILLED = {"full": 1, "new_full": 2}
"""Operators that fill a shape -> where they take what with."""
_BY_PLACE = ("tril", "triu")
"""Operators that look at where an element stands in the last two dims."""


def infer_context(model: nn.Module, ranks: int, sample: Mapping[str, Any], mode: Mode) -> Plan:
    """The plan over so many ranks; the model stays as it is.

    sample  keyword arguments of its forward, whose values do not matter; two sequences at least

    Raises UserError where a list of blocks is not sure to compute the same.
    """
    experts = by_token(model, sample)
    found = _tried(model, sample, ranks, mode, experts)
    unknown = "none was given to it where its plan was found"
    if masks := _masks(model, sample):
        try:
            found = _joined(found, _tried(model, {**sample, **masks}, ranks, mode, experts))
        except UserError as refused:
            unknown = f"with {' and '.join(masks)} no plan was found ({refused})"
    plan = {place.name: replace(place, unknown=unknown).style() for place in found}
    return {**plan, "": whole}


def _masks(model: nn.Module, sample: Mapping[str, Any]) -> dict[str, Tensor]:
    """The masks of padding that a model takes beside the sample."""
    accepted = inspect.signature(model.forward).parameters
    return {
        name: torch.ones(sample[ids].shape, dtype=torch.int64)
        for name, ids in _MASKS.items()
        if ids in sample and name in accepted and name not in sample
    }


def _joined(found: list[Block], masked: list[Block]) -> list[Block]:
    """What the two forwards have shown of the same blocks.  Raises UserError where they contradict each other."""
    made = []
    for one, other in zip(found, masked, strict=True):
        for place in one.held.keys() & other.held.keys():
            held = {one.held[place], other.held[place]} - {"unused"}
            if len(held) > 1:
                raise UserError(f"{one.name} uses its argument {place} in two ways")
        shown = {**one.held, **{place: held for place, held in other.held.items() if held != "unused"}}
        made.append(replace(one, held={**other.held, **shown}))
    return made


def _tried(
    model: nn.Module, sample: Mapping[str, Any], ranks: int, mode: Mode, experts: Mapping[str, Place]
) -> list[Block]:
    """The blocks of all lists, tried.  Raises UserError where one is not sure."""
    with on_tensors_without_values(model, sample) as (bare, inputs):
        found = traced(bare, inputs, attention=True, by_token=experts)
        spans = []
        for name in _lists(bare, found):
            try:
                spans.append(_Span(name, bare, found, mode))
            except UnsureBlocks as unsure:
                raise UserError(f"the blocks of {name} are not sure to do so: {unsure}{_advice(model)}") from unsure
        try:
            _try(bare, inputs, found, spans, ranks)
        except UnsureBlocks as unsure:
            raise UserError(
                f"on a rank's places of a sequence the blocks do not compute the same: {unsure}"
            ) from unsure
    return [place for span in spans for place in span.places]


def _advice(model: nn.Module) -> str:
    now = getattr(getattr(model, "config", None), "_attn_implementation", "sdpa")
    if now != "sdpa" and getattr(model, "_supports_sdpa", False):
        return f'; its attention is "{now}": make it with attn_implementation="sdpa"'
    return "; use mesh.cp=1"


def _lists(model: nn.Module, found: Trace) -> list[str]:
    """The lists of blocks that attend, or do most of the work.  Raises UserError where there are none."""
    chosen = []
    for name in lists_of_blocks(model, found):
        blocks = Blocks(name, model, found)
        costs = blocks.costs()
        attends = any(op.name == ATTENTION for op in found.operations[blocks.start : blocks.stop])
        inside = sum(costs.blocks)
        if attends or inside > LEAST_SHARE * (inside + costs.before + costs.behind):
            chosen.append(name)
    if not chosen:
        looks = next((f" ({name} looks at values)" for name, why in found.opaque.items() if why), "")
        raise UserError(
            "it has no list of blocks that are called once each, in their order, and attend by torch's "
            f"scaled_dot_product_attention{looks}{_advice(model)}"
        )
    return chosen


class _Span:
    """A list of blocks, and what of its values lies on a rank by places.

    rows     the axis of its sequence
    local    values of which a rank has its places
    """

    def __init__(self, name: str, model: nn.Module, found: Trace, mode: Mode):
        self.found, self.blocks = found, Blocks(name, model, found)
        self.blocks.handed_on()
        experts = found.by_token.keys()
        inside = (call for call in found.calls if self.blocks.start <= call.first and call.last <= self.blocks.stop)
        if opaque := next((call.name for call in inside if call.name in found.opaque.keys() - experts), None):
            raise UnsureBlocks(f"{opaque} looks at values")
        first = found.value(self.blocks.calls[0].args[0])
        if len(first.dims) != 3:
            raise UnsureBlocks(f"{self.blocks.calls[0].name} is given {list(first.shape)} and not [B, L, D]")
        self.rows, self.length = tuple(flat(first.dims[1])), first.shape[1]
        self._leaves = set(leaves_of((first.dims[1],)))
        self.local, self.constant = {first}, set[Value]()
        held = [self._enter(call, number == 0) for number, call in enumerate(self.blocks.calls)]
        attends = self._walk()
        self._check_result()
        own = [op for calls in attends for op in calls if self._is_own(op)]
        zigzag = mode == "ring" and bool(own) and all(_is_causal(op, model) for op in own)
        sequence, last, features = Sequence(mode, zigzag), len(held) - 1, first.shape[2]
        self.places = [
            Block(call.name, sequence, held[n], [self._attention(op) for op in attends[n]], features, n == 0, n == last)
            for n, call in enumerate(self.blocks.calls)
        ]

    def names(self) -> set[str]:
        return {call.name for call in self.blocks.calls}

    def dim_of(self, value: Value) -> int | None:
        """The dim that holds the sequence; None: it has none of it.  Raises UnsureBlocks where it is taken apart."""
        here = [n for n, dim in enumerate(value.dims) if self._leaves & set(leaves_of((dim,)))]
        if not here:
            return None
        axes, size = tuple(flat(value.dims[here[0]])), len(self.rows)
        runs = [n for n in range(len(axes) - size + 1) if axes[n : n + size] == self.rows]
        if len(here) > 1 or len(runs) != 1 or self._leaves & set(leaves_of((axes[: runs[0]], axes[runs[0] + size :]))):
            raise UnsureBlocks("has a sequence twice, or a part of it (is attention written out?)")
        return here[0]

    def has_rows(self, value: Value) -> bool:
        return any(self._leaves & set(leaves_of((dim,))) for dim in value.dims)

    def shape_of(self, value: Value, places: int) -> tuple[int, ...]:
        """The shape of a value on a rank that has so many places."""
        shape = list(value.shape)
        if value in self.local and (dim := self.dim_of(value)) is not None:
            shape[dim] = shape[dim] // self.length * places
        return tuple(shape)

    def _enter(self, call: Call, first: bool) -> dict[str, Held]:
        """What a block is given."""
        held: dict[str, Held] = {}

        def note(place: str, tensor: Tensor) -> Tensor:
            value = self.found.value(tensor)
            if place == "0":
                held[place] = 1 if first else "here"
            elif not self.has_rows(value):
                held[place] = "whole"
            elif not (uses := self._uses(value)):
                held[place] = "unused"
            elif value.made_by >= self.blocks.start:
                raise UnsureBlocks(f"{call.name} is given an argument {place} that another block has made")
            elif all(self._to_masks(op, value, set()) for op in uses):
                held[place] = "whole"
            else:
                try:
                    held[place] = self._along(value)
                except UnsureBlocks as unsure:
                    raise UnsureBlocks(
                        f"{call.name} is given an argument {place} that {unsure}, and it goes elsewhere than to a "
                        f"mask of torch's {ATTENTION}"
                    ) from unsure
                self.local.add(value)
            return tensor

        try:
            given(call.args, call.kwargs, note)
        except UserError as refused:
            raise UnsureBlocks(str(refused)) from refused
        return held

    def _along(self, value: Value) -> int:
        dim = self.dim_of(value)
        assert dim is not None
        if value.shape[dim] != self.length:
            raise UnsureBlocks("joins a sequence with another dim")
        return dim

    def _uses(self, value: Value) -> list[Operation]:
        inside = self.found.operations[self.blocks.start : self.blocks.stop]
        return [op for op in inside if any(value is other for other in op.given)]

    def _to_masks(self, op: Operation, value: Value, seen: set[Value]) -> bool:
        """Return whether a value that an operation is given goes to masks of attention, and to nothing else."""
        if op.name == ATTENTION:
            return all(value is not other for other in op.given[:3])
        seen.add(value)
        return all(
            bool(uses := self._uses(made)) and all(self._to_masks(use, made, seen) for use in uses)
            for made in op.made
            if made not in seen
        )

    def _walk(self) -> list[list[Operation]]:
        """Follow what a rank has places of; returns the calls of attention of each block."""
        attends: list[list[Operation]] = [[] for _ in self.blocks.calls]
        for op in self.found.operations[self.blocks.start : self.blocks.stop]:
            block = next((n for n, call in enumerate(self.blocks.calls) if call in op.calls), None)
            if not op.given and op.name in _CONSTANT:
                self.constant.update(op.made)
            if self.local.isdisjoint(op.given):
                if op.name == ATTENTION and block is not None:
                    raise UnsureBlocks(f"{where(op)} attends from what is no sequence of the blocks")
                continue
            if block is None:
                raise UnsureBlocks(f"{where(op)} computes between two blocks")
            try:
                if op.name == ATTENTION:
                    self._attend(op)
                    attends[block].append(op)
                else:
                    if op.name == EXPERTS and len({tuple(flat(chain(*v.dims[:-1]))) for v in op.given}) > 1:
                        raise UnsureBlocks("is given tokens and their experts in different orders")
                    self._by_place(op)
            except UnsureBlocks as unsure:
                raise UnsureBlocks(f"{where(op)} {unsure}") from unsure
        return attends

    def _by_place(self, op: Operation) -> None:
        """An operation on each place by itself."""
        frozen = next((why for axis, why in op.frozen if self._leaves & set(axis.leaves())), None)
        if op.name in OF_ITS_SHAPE:
            self.local.update(value for value in op.made if self.has_rows(value))
            return
        if frozen is not None:
            raise UnsureBlocks(f"works along the sequence: {frozen}")
        if self._leaves & (op.summed | op.rows):
            raise UnsureBlocks("sums over the sequence")
        if op.name in _BY_PLACE and any(self.has_rows(Value((), value.dims[-2:])) for value in op.given):
            raise UnsureBlocks("looks at where a place stands")
        if op.name in DROPS and not all(len(v.dims) > 1 and tuple(flat(v.dims[1])) == self.rows for v in op.given):
            raise UnsureBlocks("drops parts of what does not have its places as dim 1; set the dropout to 0")
        for value in op.given:
            if value not in self.local and self.has_rows(value):
                if value not in self.constant:
                    raise UnsureBlocks("joins places with what all ranks have of the whole sequence")
                self.local.add(value)
        for value in op.made:
            if self.dim_of(value) is None:
                raise UnsureBlocks("leaves nothing of the sequence, or one place of it")
            self.local.add(value)

    def _attend(self, op: Operation) -> None:
        queries, keys, values, *masks = op.given
        if _options(op)["dropout_p"]:
            raise UnsureBlocks("drops parts of its weights; set the dropout of attention to 0")
        if queries not in self.local or self.dim_of(queries) != 2 or queries.shape[2] != self.length:
            raise UnsureBlocks("attends from what is no sequence of the blocks")
        if not self._is_own(op) and (any(map(self.has_rows, (keys, values))) or _options(op)["is_causal"]):
            raise UnsureBlocks("attends to a part of the sequence")
        if not self.local.isdisjoint(masks):
            raise UnsureBlocks("attends with a mask that follows from the blocks' activations")
        self.local.update(op.made)

    def _is_own(self, op: Operation) -> bool:
        """Return whether the keys are those of the same sequence."""
        return all(
            value in self.local and value.shape[2] == self.length and self.dim_of(value) == 2 for value in op.given[1:3]
        )

    def _attention(self, op: Operation) -> Attention:
        queries, keys, values = op.given[:3]
        if self._is_own(op) and queries.shape[3] != values.shape[3]:
            raise UnsureBlocks(f"{where(op)} has heads of two sizes, {queries.shape[3]} and {values.shape[3]}")
        return Attention(queries.shape[1], keys.shape[1], queries.shape[3], self._is_own(op))

    def _check_result(self) -> None:
        """The last block's result is gathered; nothing else of a rank's places is used behind the blocks."""
        call = self.blocks.calls[-1]
        result = self.found.value(first_of(call.result))
        if result not in self.local or len(result.dims) != 3 or tuple(flat(result.dims[1])) != self.rows:
            raise UnsureBlocks(f"{call.name} does not return activations [B, L, D]")
        inner = {value for value in self.local if value.made_by >= self.blocks.start} - {result}
        for op in self.found.operations[self.blocks.stop :]:
            if not inner.isdisjoint(op.given):
                raise UnsureBlocks(f"{where(op)} uses what a block computes")
        if not inner.isdisjoint(self.found.outputs):
            raise UnsureBlocks("the model returns what a block computes")


def _is_causal(op: Operation, model: nn.Module) -> bool:
    """Return whether attention is likely to be causal: in a forward without values transformers gives it a mask."""
    module = model.get_submodule(op.modules[-1])
    return _options(op)["is_causal"] or bool(getattr(module, "is_causal", False))


def _options(op: Operation) -> dict[str, Any]:
    """The options of a call of torch's attention."""
    return {"dropout_p": op.operator.arg(4, "dropout_p", 0.0), "is_causal": op.operator.arg(5, "is_causal", False)}


# --- the trial --------------------------------------------------------------------------------------------------------


def _try(whole: nn.Module, inputs: Mapping[str, Any], found: Trace, spans: list[_Span], ranks: int) -> None:
    """Run the blocks as a rank would.  Raises UnsureBlocks where they do not do what the trace foresees."""
    _check_draws(found)
    model = copy.deepcopy(whole, {id(tensor): tensor for tensor in chain(whole.parameters(), whole.buffers())})
    for span in spans:
        for place in span.places:
            place.wrap(model.get_submodule(place.name), Trial(ranks))
    attempt = Trace(opaque=found.opaque, by_token=found.by_token)
    compared = _Compared(found, spans, attempt)
    try:
        with watched(model, attempt), torch.no_grad(), compared:
            model(**inputs)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, AttributeError) as error:
        said = next(iter(str(error).splitlines()), type(error).__name__)
        running = [call.name for call in attempt.running]
        raise UnsureBlocks(f"{running[-1] if running else 'the model'}: {said}") from error
    if compared.expected:
        raise UnsureBlocks(f"{where(compared.expected[0][0])} is not called")


def _check_draws(found: Trace) -> None:
    """Raises UnsureBlocks for what draws from a rank's own generator."""
    for op in found.operations:
        if op.name not in _MANY and torch.Tag.nondeterministic_seeded in op.operator.func.tags and op.name not in DROPS:
            raise UnsureBlocks(f"{where(op)} draws from each rank's own generator, and ranks would compute differently")


class _Compared(TorchDispatchMode):
    """Compares the operators of blocks with those foreseen, as they come."""

    def __init__(self, found: Trace, spans: list[_Span], attempt: Trace):
        super().__init__()
        self.attempt, self.spans = attempt, spans
        of = {name: span for span in spans for name in span.names()}
        self.expected = [
            (op, of[name])
            for op in found.operations
            for name in op.modules
            if name in of and _counts(op.name) and op.name not in _MANY
        ]
        self.blocks = set(of)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, modules = func._schema.name.removeprefix("aten::"), tuple(call.name for call in self.attempt.running)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not tensors or not _counts(name) or between.get() or self.attempt.paused or self.blocks.isdisjoint(modules):
            return result
        if not self.expected:
            raise ValueError(f"{name} is called beyond the end")
        op, span = self.expected.pop(0)
        if not (name == op.name or (name in VIEWS and op.name in VIEWS)) or modules != op.modules:
            raise ValueError(f"calls {name}, where on the whole sequence {where(op)} is called")
        places = span.places[0].sequence.cut.local_length
        for tensor, value in zip(tensors, op.made, strict=True):
            if tuple(tensor.shape) != (wanted := span.shape_of(value, places)):
                raise ValueError(f"{name} makes {list(tensor.shape)} and not {list(wanted)}")
        plain = _plain(Operator(func, args, kwargs or {}), plain_of(name, args, kwargs or {}))
        wanted = _plain(op.operator, op.plain)
        if plain != wanted:
            raise ValueError(f"{name} is given {plain}, and {wanted} on the whole sequence")
        return result


def _counts(name: str) -> bool:
    """Return whether an operator is called or not whatever the lengths; a constant that code makes is."""
    return name not in NOTHING or name == "lift_fresh"


def _plain(op: Operator, noted: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments that may not follow the length: all; of operators that make a shape, what they fill it with."""
    if op.name in COUNTS:
        return (op.arg(_FILLED[op.name], "fill_value"),) if op.name in _FILLED else ()
    return noted
