"""Peak memory: CUDA's allocator counts its own; on the CPU, `MemoryAccount` counts the storages of tensors.

How the account works:
1. A dispatch mode sees every operator. The storages of its arguments and results are noted with their size, once each,
   however many views share them. Operators on tensor subclasses (DTensor) are handed on to the subclass, and what it
   does with its local tensors comes back here.
2. A weak reference to each storage tells when it is freed, whoever held it: a variable, autograd's saved tensors, the
   optimizer's state.
3. A storage that is resized in place (FSDP2 empties and refills its gathered parameters) is noted again.

It does not see scratch memory inside one operator's kernel, nor the buffers of a communication library. Functions
under `torch.compile` run operator by operator while an account is open, so their peak is the eager one.
"""

from __future__ import annotations

import gc
import resource
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from core.compat import TorchDispatchMode

DEVICE_OF = torch.ops.prim.device.default
"""By which torch asks a dispatch mode for a fake tensor's device, more often than it asks for everything else."""


def peak_bytes(device: torch.device | str, account: MemoryAccount | None = None) -> int:
    """The most bytes that were allocated at once on `device`.

    CUDA: by torch's allocator, since the start or `torch.cuda.reset_peak_memory_stats`. CPU: by `account`, or, without
    one, the most that the whole process had resident.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resident_peak_bytes() if account is None else account.peak_bytes


def resident_peak_bytes() -> int:
    """The most bytes that this process had resident since it started: code, libraries and everything."""
    if sys.platform == "linux":  # not its ru_maxrss: that begins with what the process had that started this one
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


@contextmanager
def no_garbage() -> Iterator[None]:
    """Storages go when nobody holds them, not when a cycle is found at some moment."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class MemoryAccount(TorchDispatchMode):
    """Counts the bytes of all tensors of one device type that are alive, and the most there ever were.

        with MemoryAccount() as account:
            account.add(model.parameters())
            loss = model(x).sum(); loss.backward(); optimizer.step()
        account.peak_bytes

    A tensor from before is counted from the moment an operator touches it, or from `add`. Memory that is freed after
    the `with` is still subtracted from `current_bytes`. One thread at a time may be inside.
    """

    # Every other subclass of Tensor holds plain ones, and its operators come here once more with those.
    _plain_types: tuple[type, ...] = (Tensor, torch.nn.Parameter)

    def __init__(self, device_type: str = "cpu"):
        super().__init__()
        self.device_type = device_type
        self.peak_bytes = 0
        self._current_bytes = 0
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        # Storages may be freed in any thread and in the middle of anything; deque.append is atomic.
        self._freed_bytes: deque[int] = deque()
        self._resize_ = torch.UntypedStorage.resize_

    @property
    def current_bytes(self) -> int:
        """Bytes of the tensors that are alive now."""
        while self._freed_bytes:
            self._current_bytes -= self._freed_bytes.popleft()
        return self._current_bytes

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that existed before (parameters, gradients, optimizer state); shared storages count once."""
        for tensor in tensors:
            self._note_tensor(tensor)

    def __enter__(self) -> Self:
        account, resize_ = self, self._resize_

        def noted_resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize_(self, size)
            if self.device.type == account.device_type or id(self) in account._alive:
                account._note(self)
            return result

        torch.UntypedStorage.resize_ = noted_resize_
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize_

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, Tensor) and t not in self._plain_types for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors((args, tuple((kwargs or {}).values()), result)):
            self._note_tensor(tensor)
        return result

    def _note_tensor(self, tensor: Tensor) -> None:
        for plain in plain_tensors(tensor):
            if plain.device.type == self.device_type:
                self._note(plain.untyped_storage())

    def _note(self, storage: torch.UntypedStorage) -> None:
        """Book `storage` at its present size."""
        key, num_bytes = id(storage), storage.nbytes()
        known = self._alive.get(key)
        if known is not None and known[1] == num_bytes:
            return
        reference = weakref.ref(storage, lambda _: self._forget(key)) if known is None else known[0]
        self._alive[key] = (reference, num_bytes)
        self._current_bytes = self.current_bytes + num_bytes - (known[1] if known else 0)
        self.peak_bytes = max(self.peak_bytes, self._current_bytes)

    def _forget(self, key: int) -> None:
        self._freed_bytes.append(self._alive.pop(key)[1])


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for branch in tree:
            yield from _tensors(branch)


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors inside a wrapper subclass such as DTensor, or the tensor itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):  # DTensor names its mesh too
                yield from plain_tensors(inner)
    else:
        yield tensor
