"""The device beside the host that steers it: numbers go there, results come back, and work is captured.

A GPU computes behind the host's back: a copy or a kernel is queued, and only who reads a result waits. What it does in
each step alike can be captured once, over buffers that stay where they are, and is then one launch. On a CPU all of it
happens at once, and what was captured is simply called again: the same code, without a GPU.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from core.streams import recorded


class Machine(ABC):
    """A device and the host beside it."""

    def __init__(self, device: torch.device):
        self.device = device

    @abstractmethod
    def words(self, count: int) -> Tensor:
        """int32[count] on the host, out of which copies to the device need not wait; not initialised."""

    @abstractmethod
    def put(self, x: Tensor) -> Tensor:
        """Numbers of the host on the device, where they are by the time they are read there."""

    @abstractmethod
    def fetch(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin to bring x, as it is now, to the host.  Returns what waits for it."""

    @abstractmethod
    def mark(self) -> Callable[[], None]:
        """Returns what waits for all that was asked of the device until now."""

    @abstractmethod
    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Run `compute` until nothing of it is compiled or allocated any more.  Returns what runs it as one launch.

        It reads and writes buffers that stay where they are, and what it decides on the host it decides now.
        """


class OnHost(Machine):
    """The device is the host's own processor: nothing is queued."""

    def words(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, device="cpu")

    def put(self, x: Tensor) -> Tensor:
        return x

    def fetch(self, x: Tensor) -> Callable[[], Tensor]:
        kept = x.clone()
        return lambda: kept

    def mark(self) -> Callable[[], None]:
        return lambda: None

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        compute()
        return compute


class OnGpu(Machine):
    """CUDA (or HIP): one stream, pinned buffers, graphs that share their memory."""

    def words(self, count: int) -> Tensor:
        # torch keeps pinned memory, and hands none out again before the copies from it are made.
        return torch.empty(count, dtype=torch.int32, device="cpu", pin_memory=True)

    def put(self, x: Tensor) -> Tensor:
        # From memory that can be paged out a copy begins only when all that was queued is done, and the host waits.
        return x.pin_memory().to(self.device, non_blocking=True)

    def fetch(self, x: Tensor) -> Callable[[], Tensor]:
        kept = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
        kept.copy_(x, non_blocking=True)
        wait = self.mark()
        return lambda: wait() or kept

    def mark(self) -> Callable[[], None]:
        return recorded(self.device).synchronize

    @cached_property
    def _side(self) -> "torch.cuda.Stream":
        return torch.cuda.Stream(self.device)

    @cached_property
    def _pool(self) -> object:
        return torch.cuda.graph_pool_handle()

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream(self.device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            for _ in range(2):  # kernels are compiled, libraries and communicators made
                compute()
        current.wait_stream(self._side)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        # Other threads of a server (tokenizers, NCCL's watchdog) may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):  # pyright: ignore[reportArgumentType]
            compute()
        return graph.replay


def machine_of(device: torch.device | str) -> Machine:
    device = torch.device(device)
    return OnHost(device) if device.type == "cpu" else OnGpu(device)
