"""Streams of a GPU that is not there: numbers are computed at once, on the CPU, and the order is written down.

The host and each stream are actors. What one does comes after what it did before; what is put in a stream comes after
what the host did until then, and an event that is waited for orders the rest (vector clocks). Two uses of the same
elements, one of them a write, that nothing orders are a race: on a GPU whichever comes first would. The device's memory
is computing's: it is allocated and freed in its order, as torch's allocator has it, so a copy in another stream has to
be between the two.

Tensors that `host` is told of lie on the host, others on the device.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from apps.fold.subbatch import slices
from core import pinned
from core.link import Link
from core.streams import DeviceStreams

HOST, COMPUTING = 0, 1
NO_USE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_")
"""Operators that neither read nor write numbers."""
Clock = Counter[int]


Where = tuple[int, tuple[int, ...], tuple[int, ...]] | None
"""Bytes of a storage: the first, the shape and the strides of all; None: the whole of it."""


@dataclass
class _Storage:
    """uses: (actor, where, whether it writes) -> the tick of the actor's clock at the last of them, and its name

    Who comes after the last comes after those before it, which are of the same actor.
    """

    num_bytes: int
    on_host: bool = False
    uses: dict[tuple[int, Where, bool], tuple[int, str]] = field(default_factory=dict)


class RecordedStreams(DeviceStreams, TorchDispatchMode):
    """races     what nothing orders
    order     what was done, as it was issued: the actor, and "fetch", "send" or an operator's name
    waits     for events: by whom, HOST or a stream
    deaf_to   the number of a wait that is left out
    """

    def __init__(self, deaf_to: int | None = None):
        DeviceStreams.__init__(self, torch.device("cpu"))
        TorchDispatchMode.__init__(self)
        self.on_cuda = True
        self.races: list[str] = []
        self.order: list[tuple[int, str]] = []
        self.waits: list[int] = []
        self.deaf_to = deaf_to
        self._clocks: list[Clock] = [Clock(), Clock()]
        self._current = COMPUTING
        self._storages: dict[int, _Storage] = {}

    # --- what streams are ---------------------------------------------------------------------------------------------

    def another(self) -> Any:
        self._clocks.append(Clock())
        return len(self._clocks) - 1

    @contextmanager
    def inside(self, stream: Any) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def mark(self) -> Any:
        return Clock(self._issued(self._current))

    def wait(self, event: Any) -> None:
        if event is not None:
            self._wait(self._current, event)

    def host_waits(self, event: Any) -> None:
        self._wait(HOST, event)

    def _wait(self, actor: int, event: Clock) -> None:
        if len(self.waits) != self.deaf_to:
            self._issued(actor)
            self._join(actor, event)
        self.waits.append(actor)

    def _issued(self, actor: int) -> Clock:
        """The actor's clock when the host has given it something to do."""
        self._join(actor, self._clocks[HOST])
        return self._clocks[actor]

    def _join(self, actor: int, clock: Clock) -> None:
        self._clocks[actor] |= clock

    # --- what they do -------------------------------------------------------------------------------------------------

    def host(self, tensor: Tensor) -> Tensor:
        """Say that it lies on the host."""
        storage = tensor.untyped_storage()
        self._storages[id(storage)] = _Storage(storage.nbytes(), on_host=True)
        return tensor

    def lies_on_host(self, tensor: Tensor) -> bool:
        known = self._storages.get(id(tensor.untyped_storage()))
        return known is not None and known.on_host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name, tensors = func._schema.name.removeprefix("aten::"), _tensors((args, kwargs))
        if func.is_view or name in NO_USE:
            for tensor in () if func.is_view else _tensors(result):
                self._known(tensor, name)
            return result
        changed = _tensors([x for a, x in zip(func._schema.arguments, args) if a.alias_info and a.alias_info.is_write])
        read = [x for x in tensors if not any(x is one for one in changed)]
        written = [*changed, *_tensors(result)]
        lie = [[self.lies_on_host(x) for x in some if x.numel()] for some in (read, written)]
        actor = HOST if all(lie[0] + lie[1]) else self._current
        way = {(True, False): "fetch", (False, True): "send"}.get((any(lie[0]), any(lie[1])), "")
        self.order.append((actor, way or name))
        for tensor in read:
            self._use(actor, tensor, False, name)
        for tensor in written:
            self._use(actor, tensor, True, name)
        if name == "_local_scalar_dense" or (way and not kwargs.get("non_blocking", args[2:3] == (True,))):
            self._join(HOST, self._clocks[actor])
        return result

    def _use(self, actor: int, tensor: Tensor, writes: bool, name: str) -> None:
        size = tensor.element_size()
        strides = (*(step * size for step in tensor.stride()), 1)
        where = tensor.storage_offset() * size, (*tensor.shape, size), strides
        self._note(self._known(tensor, name), actor, where, writes, name)

    def _known(self, tensor: Tensor, name: str) -> _Storage:
        storage = tensor.untyped_storage()
        known = self._storages.get(id(storage))
        if known is None:
            known = self._storages[id(storage)] = _Storage(storage.nbytes())
            weakref.finalize(storage, self._freed, id(storage)).atexit = False
            self._note(known, COMPUTING, None, True, f"allocation by {name}")
        return known

    def _note(self, known: _Storage, actor: int, where: Where, writes: bool, name: str) -> None:
        clock = self._issued(actor)
        clock[actor] += 1
        for (other, there, wrote), (tick, before) in known.uses.items():
            if other == actor or not (wrote or writes) or clock[other] >= tick:
                continue
            if (_places(known.num_bytes, there) & _places(known.num_bytes, where)).any():
                self.races.append(f"{before} of {other} and {name} of {actor}")
        known.uses[actor, where, writes] = clock[actor], name

    def _freed(self, key: int) -> None:
        known = self._storages.pop(key)
        if not known.on_host:
            self._note(known, COMPUTING, None, True, "the next allocation")


@lru_cache(maxsize=1024)
def _places(num_bytes: int, where: Where) -> np.ndarray:
    """bool[bytes]: which of a storage's are meant."""
    if where is None:
        return np.ones(num_bytes, dtype=bool)
    places, (first, shape, strides) = np.zeros(num_bytes, dtype=bool), where
    as_strided(places[first:], shape, strides)[...] = True
    return places


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


@contextmanager
def recorded_link(deaf_to: int | None = None) -> Iterator[RecordedStreams]:
    """Inside, what `apps.fold.subbatch.slices` makes on the host is far from the rest; all that is done is recorded."""
    streams = RecordedStreams(deaf_to)
    link = Link(streams)

    def host_empty(num_elements: int, dtype: torch.dtype, pinned: bool) -> Tensor:
        return streams.host(torch.empty(num_elements, dtype=dtype))

    def link_between(x: Tensor, like: Tensor) -> Link | None:
        return link if streams.lies_on_host(x) and not streams.lies_on_host(like) else None

    with (
        patch.object(pinned, "host_empty", host_empty),
        patch.object(slices, "host_empty", host_empty),
        patch.object(slices, "link_between", link_between),
        patch.object(Tensor, "is_pinned", lambda x: streams.lies_on_host(x)),
        streams,
    ):
        yield streams
