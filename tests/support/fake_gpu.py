"""A GPU where there is none: tensors without values that say they lie on one, and counts of what makes the host wait.

A torch that was built without CUDA has nobody to ask for the current device, and refuses even a slice of such a tensor;
inside `fake_gpu` it asks whom it asks for the meta device. A backward wants a device all the same, so what runs here
runs without gradients.
"""

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero")
"""Operators whose results, or whose results' shapes, the host has to see."""


class Operators(TorchDispatchMode):
    """Counts operators by name; `waits` those for which the host waits, `copies` those from one device to another."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.copies: list[tuple[str, str]] = []

    @property
    def waits(self) -> dict[str, int]:
        found = {name: self.counts[name] for name in WAITS if self.counts[name]}
        return found | ({"copies to the host": n} if (n := self.to_host) else {})

    @property
    def to_host(self) -> int:
        return self.copies.count(("cuda", "cpu"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._opname
        if func.namespace != "prim":
            self.counts[name] += 1
        if name == "_to_copy" and (to := kwargs.get("device")) is not None:
            self._copied(args[0].device, torch.device(to))
        if name == "copy_":
            self._copied(args[1].device, args[0].device)
        return func(*args, **kwargs)

    def _copied(self, source: torch.device, target: torch.device) -> None:
        if source.type != target.type:
            self.copies.append((source.type, target.type))


@contextmanager
def fake_gpu() -> Iterator[Operators]:
    """Inside, tensors are fakes, also such on "cuda"; no gradients are recorded. Gives the counts."""
    with cuda_guarded(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), Operators() as counted:
        yield counted


@contextmanager
def cuda_guarded() -> Iterator[None]:
    """The guard of the meta device, which does nothing, in the place of that of CUDA, where there is none."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 16).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # c10::DeviceType
    before = guards[cuda]
    guards[cuda] = before or guards[meta]
    try:
        yield
    finally:
        guards[cuda] = before


def on_fake_gpu(module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """The module with parameters and buffers that say they lie on a GPU; floating ones in `dtype`."""

    def moved(tensor: Tensor) -> Tensor:
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=kind, device="cuda")

    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                part._parameters[name] = nn.Parameter(moved(parameter), requires_grad=False)
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda")
    return module
