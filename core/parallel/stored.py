"""What blocks save for their backward, each storage once, in another form until the backward asks for it.

1. Hooks on saved tensors (`torch.autograd.graph.saved_tensors_hooks`) see whatever a block's forward leaves for its
   backward. Parameters, buffers and arguments without a gradient (masks, rotary angles) live anyway and stay as they
   are; so do tensors of fewer than LEAST_BYTES, on another device than the block's, and of a subclass.
2. Of all others the whole storage is stored, once, however many views of it are saved, and by however many blocks, as
   long as nobody has written into it in between.
3. A node that asks for a saved tensor gets a view of the same shape and strides of that storage with the same values.
   The storage stays until the last of the nodes that saved it has run.

A storage that is written into after it was saved is an error in the backward, as without hooks. Which forms there are:
`core.parallel.offload`, `core.parallel.encoded`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from core.compat import FakeTensor, may_compile, own_part, uncompiled
from core.parallel.plan import RECOMPUTED
from core.trace.tracer import tensors_in

LEAST_BYTES = 1024
"""A smaller tensor is not worth a copy of its own."""


class Stored(ABC):
    """The values of a storage, first as they are in `flat`: [elements].

    least  elements of which there are fewer than in any activation: means, deviations, sums of a softmax
    """

    def __init__(self, x: Tensor, least: int):
        storage = x.untyped_storage()
        # A view of a node's own output would hold the node, which holds this.
        self.flat: Tensor | None = x.detach().as_strided((storage.nbytes() // x.element_size(),), (1,), 0)
        self.version, self.least = x._version, least
        self._written = False

    def whole(self) -> Tensor:
        """The values as they were saved: [elements], in the dtype in which they were saved first."""
        self.check()
        if self._written:
            raise RuntimeError(
                "a tensor that a block has saved for its backward has been written into since; clone it before"
            )
        if self.flat is None:
            with torch.no_grad():
                self.flat = self.restored()
            self.version = self.flat._version
        return self.flat

    def check(self) -> None:
        """Note whether somebody has written into it."""
        if self.flat is not None and self.flat._version != self.version:
            self._written = True

    @abstractmethod
    def restored(self) -> Tensor:
        """The values out of their other form."""

    def saved(self) -> None:
        """The block has just saved it for the first time."""
        return

    def block_ended(self) -> None:
        """The forward of the block that saved it is over."""
        return

    def next_ended(self) -> None:
        """So is that of the next one that stores anything."""
        return

    def comes_next(self) -> None:
        """Its values will be asked for soon."""
        return


class _View(NamedTuple):
    """A saved tensor, in the place of which autograd keeps this."""

    call: "Call"
    stored: Stored
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class StoredBlocks:
    """Some blocks of a model, whose forwards store what they save.

    make    the form of a storage
    fetches whether values are brought back a block ahead
    """

    def __init__(self, blocks: Sequence[nn.Module], make: Callable[[Tensor, int], Stored], fetches: bool = False):
        self.make, self.fetches = make, fetches
        self.known: dict[int, tuple[ref[UntypedStorage], ref[Stored]]] = {}
        self._before: ref[Call] | None = None
        self.unfinished: list[ref[Stored]] = []  # of the block that ran last
        for index, block in enumerate(blocks):
            setattr(block, RECOMPUTED, block.forward)
            block.forward = partial(self._forward, index, block)

    def _forward(self, index: int, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return getattr(block, RECOMPUTED)(*args, **kwargs)
        outputs, call = self.call(index, block, args, kwargs, self._before)
        let_go(self.unfinished)
        self._before, self.unfinished = ref(call), call.own
        return outputs

    def call(
        self,
        index: int,
        block: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: "ref[Call] | None" = None,
    ) -> "tuple[Any, Call]":
        """Run the block's own forward, and store what it saves; the rest is up to the caller: see `let_go`."""
        call = Call(self, index, block, before, list(tensors_in((args, kwargs))))
        hooks = (call.leave_uncompiled, _taken_uncompiled) if may_compile() else (call.leave, _taken)
        with saved_tensors_hooks(*hooks):
            outputs = getattr(block, RECOMPUTED)(*args, **kwargs)
        for stored in call.alive():
            stored.block_ended()
        return outputs, call


def let_go(stored: "Sequence[ref[Stored]]") -> None:
    """The forward of the block behind the one that saved these is over."""
    for one in _alive(stored):
        one.next_ended()


class Call:
    """One forward of a block.

    before  the call of an earlier block in the same forward of the model, while something of it is stored
    all     what it saves; own: what it was the first to save
    """

    def __init__(
        self, blocks: StoredBlocks, index: int, block: nn.Module, before: "ref[Call] | None", given: list[Tensor]
    ):
        last = None if before is None else before()
        # A forward that begins anew, of the next microbatch, has nothing before its first block.
        self.before = before if last is not None and last.index < index else None
        self.blocks, self.index, self.block = blocks, index, block
        self.all: list[ref[Stored]] = []
        self.own: list[ref[Stored]] = []
        self._begun = False
        parameters = list(_parameters(block))
        self._sizes = {x.numel() for x in parameters}
        self._device = next((x.device for x in (*parameters, *given)), None)
        self._living = {id(x.untyped_storage()) for x in (*parameters, *(x for x in given if not x.requires_grad))}
        self._least = max((x.numel() for x in given), default=0) // 4

    def leave(self, x: Tensor) -> Any:
        """The hook of a tensor that is saved."""
        if type(x) not in (Tensor, nn.Parameter, FakeTensor) or x.is_conj() or x.is_neg() or x.layout != torch.strided:
            return x.detach()
        storage = x.untyped_storage()
        if storage.nbytes() < LEAST_BYTES or x.device != self._device or self._is_living(x, storage):
            return x.detach()
        stored = self._known(x, storage)
        if stored is None:
            stored = self.blocks.make(x, self._least)
            self.own.append(ref(stored))
            known, key = self.blocks.known, id(storage)
            known[key] = ref(storage, lambda _: known.pop(key, None)), ref(stored)
            stored.saved()
        self.all.append(ref(stored))
        return _View(self, stored, x.dtype, x.shape, x.stride(), int(x.storage_offset()))

    @uncompiled
    def leave_uncompiled(self, x: Tensor) -> Any:
        return self.leave(x)

    def _is_living(self, x: Tensor, storage: UntypedStorage) -> bool:
        if id(storage) in self._living:
            return True
        if x.numel() not in self._sizes:
            return False
        # Parameters may have come to this memory within the block's forward.
        return any(id(parameter.untyped_storage()) == id(storage) for parameter in _parameters(self.block))

    def _known(self, x: Tensor, storage: UntypedStorage) -> Stored | None:
        of, found = self.blocks.known.get(id(storage), (None, None))
        stored = None if found is None else found()
        if of is None or of() is not storage or stored is None:
            return None
        return stored if stored.version == x._version else None

    def alive(self) -> Iterator[Stored]:
        return _alive(self.own)

    def begin_backward(self) -> None:
        """Let this block's values come, and those of the one before."""
        if self._begun or not self.blocks.fetches:
            return
        self._begun = True
        if self.blocks.unfinished is not self.own:  # of a later microbatch, in a pipeline
            let_go(self.blocks.unfinished)
        self.blocks.unfinished = []
        before = None if self.before is None else self.before()
        for call in (self, before):
            if call is not None:
                call.fetch()

    def fetch(self) -> None:
        """Let its values come, what was saved last first."""
        for stored in _alive(reversed(self.all)):
            stored.comes_next()


@uncompiled
def _taken_uncompiled(kept: Any) -> Tensor:
    return _taken(kept)


def _taken(kept: Any) -> Tensor:
    """The hook of a saved tensor that is asked for."""
    if not isinstance(kept, _View):
        return kept
    kept.call.begin_backward()
    flat = kept.stored.whole()
    return (flat if flat.dtype == kept.dtype else flat.view(kept.dtype)).as_strided(
        kept.shape, kept.stride, kept.offset
    )


def _alive(stored: Iterator[ref[Stored]] | Sequence[ref[Stored]]) -> Iterator[Stored]:
    return (found for one in stored if (found := one()) is not None)


def _parameters(block: nn.Module) -> Iterator[Tensor]:
    for tensor in (*block.parameters(), *block.buffers()):
        yield own_part(tensor) if isinstance(tensor, DTensor) else tensor
