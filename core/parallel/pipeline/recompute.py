"""Activation checkpointing for a backward in two parts: a block is computed again once, in the first.

torch's checkpoint computes a block again in every backward that asks for what its forward saved, and the second part
is one for every weight. Here each tensor that the forward would save leaves a place. The first node that asks for one
of them has the forward run again, which fills all places of the block. Then a node takes along what it asks for; only
those that the second part will run again (`keeping`: products, norms) leave theirs until then. So between the two parts
a block holds what the gradients of its weights are made from, and nothing of its attention and activations.

As torch's, it draws again what was drawn, and a backward that asks twice for the same tensor is an error.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from core.compat import current_node
from core.trace.tracer import tensors_in

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Around the forward, and around the same when it runs again."""
_KEPT: set[Node] = set()


@contextmanager
def keeping(nodes: set[Node]) -> Iterator[None]:
    """Inside, these nodes leave what they ask for where it is."""
    _KEPT.update(nodes)
    try:
        yield
    finally:
        _KEPT.clear()


def checkpoint_once(
    forward: Callable[..., Any],
    *args: Any,
    context_fn: Callable[[], Contexts] = lambda: (nullcontext(), nullcontext()),
    **kwargs: Any,
) -> Any:
    """`forward(*args, **kwargs)`; see `torch.utils.checkpoint.checkpoint`."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    context, context_again = context_fn()
    around, versions = Surroundings(args), versions_of(tensors_in((args, kwargs)))

    def again() -> Any:
        check_given(tensors_in((args, kwargs)), versions)
        with context_again:
            return forward(*args, **kwargs)

    places = Places(lambda places: places.fill(again, around))
    with saved_tensors_hooks(places.leave, places.take), context:
        return forward(*args, **kwargs)


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """How often each has been written into."""
    return [0 if x.is_inference() else x._version for x in tensors]


def check_given(tensors: Iterable[Tensor], versions: Sequence[int]) -> None:
    """Raises RuntimeError where what a block was given has been written into since it had these versions."""
    if versions_of(tensors) != list(versions):
        raise RuntimeError(
            "a block's input has been written into since, and the block cannot be computed again: clone it before, or "
            "use --recompute.mode offload"
        )


class _Place:
    """Where a tensor goes when it is computed again."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None


class _Filled(Exception):
    """Raised in a forward that runs again where the rest of it is not needed."""


class Places:
    """The places of a forward, in their order; those that nothing holds any longer stay empty.

    again  called when the first of them is asked for: it has them filled, by `fill`
    """

    def __init__(self, again: Callable[["Places"], None]):
        self._again: Callable[[Places], None] | None = again
        self._places: list[ref[_Place]] = []
        self._forms: list[tuple[torch.Size, torch.dtype]] = []

    def leave(self, x: Tensor) -> _Place:
        place = _Place()
        self._places.append(ref(place))
        self._forms.append((x.shape, x.dtype))
        return place

    def take(self, place: _Place) -> Tensor:
        if self._again is not None:
            self._again(self)
        tensor = place.tensor
        assert tensor is not None, "a backward asks twice for a tensor that was computed again"
        if current_node() not in _KEPT:
            place.tensor = None
        return tensor

    def fill(self, forward: Callable[[], Any], around: "Surroundings", *, to_the_end: bool = False) -> Any:
        """Run the forward again, as far as the last place.

        to_the_end  run all of it, and return what it does
        """
        self._again = None
        count = 0

        def fill(x: Tensor) -> Tensor:
            nonlocal count
            assert (x.shape, x.dtype) == self._forms[count], "a block computes something else when it runs again"
            place, x = self._places[count](), x.detach()  # without its graph, which would hold itself
            if place is not None:
                place.tensor = x
            count += 1
            if count == len(self._places) and not to_the_end:
                raise _Filled
            return x

        with around.put_back(), saved_tensors_hooks(fill, lambda x: x), torch.enable_grad():
            try:
                result = forward()
            except _Filled:
                return None
        assert count == len(self._places), f"a block saved {len(self._places)} tensors, and {count} when it runs again"
        assert to_the_end, "a block that saves nothing is not computed again"
        return result


class Surroundings:
    """Generators and autocast as they were when this was made."""

    def __init__(self, args: tuple[Any, ...]):
        self._generator = torch.get_rng_state()
        self._devices, self._generators = get_device_states(*args)
        self._types = sorted({"cpu", *(x.device.type for x in args if isinstance(x, Tensor))} - {"meta"})
        self._casts = [(torch.get_autocast_dtype(t), torch.is_autocast_enabled(t)) for t in self._types]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(self._devices, device_type=self._types[-1]))
            torch.set_rng_state(self._generator)
            set_device_states(self._devices, self._generators)
            for kind, (dtype, enabled) in zip(self._types, self._casts, strict=True):
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            yield
