"""A serving machine whose GPU is not there: tensors of shapes without numbers, and what a step asks of it, counted.

torch computes shapes of tensors on CUDA without a device (`FakeTensorMode`), but for what looks for the device's own
guard: indexing, `view(dtype)`, copies (`tests.support.fake_gpu` replaces it). What would wait for a device (`.item()`,
`nonzero`, an index by a mask) raises there, and streams and events do not exist; the machine that stands for it says
what its launches, copies and waits would have been.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from apps.serve.machine import Machine
from tests.support.fake_gpu import cuda_guarded

DEVICE = torch.device("cuda:0")
_CPU = torch.device("cpu")
_ALLOCATES = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
_ALLOCATES |= {"aten::lift_fresh", "prim::device", "aten::detach", "aten::alias"}


class Counter(TorchDispatchMode):
    """What is asked of the device: copies between it and the host, and operators, in graphs and outside.

    captured  names of the operators that are in graphs
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_capturing = False
        self.captured: set[str] = set()
        self.reset()

    def reset(self) -> None:
        self.graphs, self.waits = 0, 0
        self.copies: list[str] = []
        self.launches: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs))
        tensors = [x for x in given if isinstance(x, Tensor)]
        if func is torch.ops.aten.copy_.default and args[0].device.type != args[1].device.type:
            self._note(self.copies, f"{args[1].device.type} to {args[0].device.type}")
            return args[0]
        is_fake = any(isinstance(x, FakeTensor) for x in tensors)
        if tensors and not is_fake and all(x == _CPU for x in given if isinstance(x, torch.device)):
            with unset_fake_temporarily():  # the host's own numbers
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        devices = {x.device.type for x in tensors if x.ndim or x.device.type != "cpu"}
        if func._schema.name in ("aten::to", "aten::_to_copy") and made[0].device.type not in devices:
            self._note(self.copies, f"{tensors[0].device.type} to {made[0].device.type}")
        elif (
            not func.is_view
            and func._schema.name not in _ALLOCATES
            and "cuda" in {x.device.type for x in (*made, *tensors)}
        ):
            assert devices <= {"cuda"}, f"{func} mixes devices"
            self._note(self.launches, func._schema.name)
        return result

    def _note(self, where: list[str], what: str) -> None:
        if not self.is_capturing:
            where.append(what)
        else:
            assert where is not self.copies, f"a copy {what} inside a graph"
            self.captured.add(what)


class FakeGpu(Machine):
    """Results are zeros."""

    def __init__(self, counter: Counter):
        super().__init__(DEVICE)
        self.counter = counter

    def words(self, count: int) -> Tensor:
        return _on_the_host(np.zeros(count, dtype=np.int32))

    def put(self, x: Tensor) -> Tensor:
        self.counter.copies.append("cpu to cuda")
        return torch.empty(x.shape, dtype=x.dtype, device=DEVICE)

    def fetch(self, x: Tensor) -> Callable[[], Tensor]:
        assert x.device == DEVICE
        assert x.is_contiguous(), "copied on the device first"
        self.counter.copies.append("cuda to cpu")
        kept, wait = _on_the_host(np.zeros(tuple(x.shape), dtype=np.int64)), self.mark()
        return lambda: wait() or kept

    def mark(self) -> Callable[[], None]:
        def wait() -> None:
            self.counter.waits += 1

        return wait

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        self.counter.is_capturing = True
        compute()
        self.counter.is_capturing = False

        def replay() -> None:
            self.counter.graphs += 1

        return replay


def _on_the_host(x: np.ndarray) -> Tensor:
    with unset_fake_temporarily():
        return torch.from_numpy(x)


@contextmanager
def counted_machine(capability: tuple[int, int] = (9, 0)) -> Iterator[FakeGpu]:
    """Inside, tensors on `DEVICE` can be made, and are not there.

    capability  what the GPU says that it can compute, by which torch's products are chosen
    """
    asked = patch("torch.cuda.get_device_capability", lambda *_: capability)
    with cuda_guarded(), asked, FakeTensorMode(allow_non_fake_inputs=True), Counter() as counter:
        yield FakeGpu(counter)
