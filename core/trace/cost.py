"""What an operator costs: its FLOPs, and the bytes that it reads and writes.

FLOPs are those of torch's counter: matrix products, convolutions and attention; everything else is bound by the bytes
that it touches. A tensor is read once; an element that a view repeats (`expand`) counts once, a lookup reads the rows
that it returns. What views and questions take is nothing.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

# What torch counts of attention on a GPU, and not of the same on a CPU, whose operators a plan for any device sees.
_ATEN = torch.ops.aten
for _on_cpu, _on_gpu in (
    (_ATEN._scaled_dot_product_flash_attention_for_cpu, _ATEN._scaled_dot_product_flash_attention),
    (_ATEN._scaled_dot_product_flash_attention_for_cpu_backward, _ATEN._scaled_dot_product_flash_attention_backward),
):
    flop_registry.setdefault(_on_cpu, flop_registry[_on_gpu])

_READS_ROWS = (_ATEN.embedding, _ATEN.index_select, _ATEN.gather, _ATEN.index)
_OVERWRITES = (
    *(_ATEN.copy_, _ATEN.fill_, _ATEN.zero_, _ATEN.bernoulli_, _ATEN.normal_, _ATEN.uniform_, _ATEN.random_),
    *(_ATEN.exponential_, _ATEN.set_, _ATEN.resize_),
)
_ALLOCATES = (_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided)
_WRITES_UNSAID = {_ATEN.native_batch_norm: (3, 4), _ATEN.cudnn_batch_norm: (3, 4), _ATEN.miopen_batch_norm: (3, 4)}
"""Operators that write to arguments without their schemas saying so, if they train: places of running statistics."""
_TRAINING = 5
"""place of the argument by which they do"""


class Cost(NamedTuple):
    """FLOPs, and bytes read and written."""

    flops: int
    bytes_read: int
    bytes_written: int

    @property
    def num_bytes(self) -> int:
        return self.bytes_read + self.bytes_written


FREE = Cost(0, 0, 0)


class OperatorFacts(NamedTuple):
    """What the schema of an operator says, and torch's registry.

    is_view  its results are views of its arguments, none of which it writes to
    writes   places and names of arguments that it writes to in place; in training others, too
    flops    counts them; None where there are none to count
    """

    is_view: bool
    writes: tuple[int | str, ...]
    writes_in_training: tuple[int, ...]
    overwrites: bool
    reads_rows: bool
    allocates: bool
    flops: Callable[..., int] | None


@cache
def facts_of(func: Any) -> OperatorFacts:
    packet: Any = getattr(func, "_overloadpacket", None)
    schema = func._schema
    returned = [value.alias_info for value in schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in returned)
    written = tuple(
        argument.name if argument.kwarg_only else place
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    of = (_WRITES_UNSAID.get(packet, ()), packet in _OVERWRITES, packet in _READS_ROWS, packet in _ALLOCATES)
    return OperatorFacts(is_view, written, *of, flop_registry.get(packet))


def operator_cost(func: Any, args: Any, kwargs: Any, result: Any) -> Cost:
    """Of one call of an operator, which has returned `result`."""
    facts = facts_of(func)
    outputs = tensors_of(result)
    if facts.is_view or facts.allocates or not (outputs or facts.writes):
        return FREE
    flops = facts.flops(*args, **kwargs, out_val=result) if facts.flops is not None else 0
    given = list({id(tensor): tensor for tensor in tensors_of((args, kwargs))}.values())
    made = {id(tensor): tensor for tensor in (*written_by(facts, args, kwargs), *outputs)}
    num_written = sum(map(num_stored, made.values()))
    if facts.reads_rows:
        return Cost(flops, num_written + sum(map(num_stored, given[1:])), num_written)
    if facts.overwrites:
        given = [tensor for tensor in given if id(tensor) not in made]
    return Cost(flops, sum(map(num_stored, given)), num_written)


def written_by(facts: OperatorFacts, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The arguments that an operator writes to."""
    if facts.writes_in_training and args[_TRAINING]:
        yield from tensors_of([args[place] for place in facts.writes_in_training])
    for place in facts.writes:
        if isinstance(place, str):
            yield from tensors_of(kwargs.get(place))
        elif place < len(args):
            yield from tensors_of(args[place])


def num_stored(tensor: Tensor) -> int:
    """Bytes of a tensor's elements, each one once however often a view repeats it."""
    if not tensor.numel():
        return 0
    count = tensor.itemsize
    for size, stride in zip(tensor.shape, tensor.stride()):
        if stride:
            count *= size
    return count


def tensors_of(tree: Any) -> list[Tensor]:
    """Those among an operator's arguments or results, in their order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    return [tensor for branch in tree for tensor in tensors_of(branch)]
