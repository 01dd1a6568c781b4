"""Pinned memory is as much as was planned, and copies that nobody waits for end up where they belong.

There is no driver here: what registers pages is a list of what was registered.
"""

import gc
import mmap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from core.config import UserError
from core.gemini import wrap
from core.gemini.chunk import Chunk, Member
from core.gemini.planning import probe_bytes
from core.gemini.tier import DeviceTier
from core.gemini.transport import Transport
from core.pinned import host_empty
from core.trace.machine import LEAST_PROBE_BYTES, MOST_PROBE_BYTES, bandwidth_of

CPU = torch.device("cpu")


class Driver:
    """pages: address -> bytes that are registered now."""

    def __init__(self) -> None:
        self.pages: dict[int, int] = {}
        self.code = 0

    def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> int:
        assert pointer % mmap.PAGESIZE == 0
        self.pages[pointer] = num_bytes
        return self.code

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.pages[pointer]
        return 0


@pytest.fixture
def driver() -> Iterator[Driver]:
    found = Driver()
    with patch.object(torch.cuda, "cudart", lambda: found):
        yield found
        gc.collect()


@pytest.mark.parametrize("num_elements", [1, 1000, 1025, (3 << 20) + 5])
def test_less_than_a_page_more_than_it_needs(driver: Driver, num_elements: int) -> None:
    tensor = host_empty(num_elements, torch.float32, pinned=True)
    tensor.fill_(2.0)
    assert tensor.shape == (num_elements,)
    assert list(driver.pages) == [tensor.data_ptr()]
    assert 0 <= driver.pages[tensor.data_ptr()] - tensor.nbytes < mmap.PAGESIZE
    view = tensor.view(-1)[-1:]
    del tensor
    gc.collect()
    assert driver.pages  # a view holds them
    assert float(view) == 2.0
    del view
    gc.collect()
    assert not driver.pages


def test_the_device_is_waited_for_before_pages_go(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to and from them may be under way."""
    there: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: there.append(len(driver.pages)))
    tensor = host_empty(10, torch.float32, pinned=True)
    del tensor
    gc.collect()
    assert there == [1]
    assert not driver.pages


def test_a_driver_that_locks_no_more_says_so(driver: Driver) -> None:
    driver.code = 2
    with pytest.raises(UserError, match=r"locks no further 4 KiB .*ulimit -l"):
        host_empty(10, torch.float32, pinned=True)


def test_without_a_gpu_nothing_is_registered(driver: Driver) -> None:
    assert host_empty(10, torch.float32, pinned=False).shape == (10,)
    assert host_empty(0, torch.float32, pinned=True).shape == (0,)
    assert not driver.pages


class Waits:
    """Streams of a GPU on a CPU: what is copied arrives at once, and events say in which order they were waited for."""

    on_cuda = True

    def __init__(self) -> None:
        self.waited: list[int] = []
        self.marks = 0
        self.joined = False

    def mark(self) -> Any:
        self.marks += 1
        return SimpleNamespace(synchronize=lambda number=self.marks: self.waited.append(number))

    def join(self) -> None:
        self.joined = True


def chunk_of(dtype: torch.dtype) -> Chunk:
    parameter = nn.Parameter(torch.zeros(100, 30, dtype=dtype))
    return Chunk(0, [Member("weight", parameter, torch.zeros(100, 30).requires_grad_())], CPU, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_microbatches_add_up_in_two_places(driver: Driver, dtype: torch.dtype) -> None:
    chunk, streams = chunk_of(dtype), Waits()
    transport = Transport.__new__(Transport)
    transport.tier, transport.streams = DeviceTier(1 << 30), streams  # pyright: ignore[reportAttributeAccessIssue]
    Transport.begin(transport, [chunk])
    grads = [torch.full((chunk.own_elements,), float(n), dtype=dtype) for n in (1, 2, 4, 8)]
    for number, grad in enumerate(grads):
        transport._put(chunk, chunk.make_grad(), grad, number == 0)
    beside = len(grads) - (dtype == torch.float32)  # the first arrives in its place
    assert len(streams.waited) == max(0, beside - 2) + (dtype == torch.float32) * (beside > 2)
    assert len(driver.pages) == 2
    transport.finish()
    assert streams.waited == [1, 2, 3, 4]
    assert streams.joined
    assert torch.equal(chunk.make_grad(), torch.full((chunk.own_elements,), 15.0))
    transport._put(chunk, chunk.make_grad(), grads[0], False)
    transport.finish()
    assert len(driver.pages) == 2  # which are used again
    assert float(chunk.make_grad()[0]) == 16.0


def test_gradients_of_a_step_that_is_given_up_are_forgotten_as_they_arrive(driver: Driver) -> None:
    chunk, streams = chunk_of(torch.float32), Waits()
    transport = Transport.__new__(Transport)
    transport.tier, transport.streams = DeviceTier(1 << 30), streams  # pyright: ignore[reportAttributeAccessIssue]
    Transport.begin(transport, [chunk])
    for value in (1.0, float("nan")):
        transport._add(chunk, torch.full((chunk.own_elements,), value), chunk.members)
    transport.forget()
    assert streams.waited == [1, 2]  # what is on its way needs its place until then
    chunk.has_grad = False
    for value in (5.0, 2.0):
        transport._add(chunk, torch.full((chunk.own_elements,), value), chunk.members)
    transport.finish()
    assert torch.equal(chunk.make_grad(), torch.full((chunk.own_elements,), 7.0))
    assert len(driver.pages) == 1  # a place beside it, given back and used again


class SendsHome(Waits):
    """Streams of a CPU, but that gradients go to the host as they do from a GPU."""

    def __init__(self, streams: Any):
        super().__init__()
        self._streams = streams

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streams, name)

    def wait(self, event: Any) -> None:
        pass

    def keep(self, tensors: Any) -> None:
        pass


def test_a_step_that_is_given_up_leaves_nothing_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.pinned.host_empty", lambda n, dtype, pinned: torch.empty(n, dtype=dtype))
    torch.manual_seed(0)
    model, x = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), torch.randn(4, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gemini = wrap(model, optimizer, "200KiB", sample=lambda: lambda m: m(x).square().mean(), device="cpu")
    executor: Any = gemini.parallel.executor
    assert not all(chunk.resident for chunk in gemini.parallel.chunks)
    executor.transport.streams = executor.streams = streams = SendsHome(executor.streams)

    def backward(factor: float) -> None:
        (model(x) * factor).square().mean().backward()

    def gradients() -> list[Tensor]:
        backward(1.0)
        backward(2.0)
        gemini.reduce()
        found = [master.grad.clone() for master in gemini.parallel.masters.values() if master.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        return found

    wanted = gradients()
    assert streams.marks
    backward(1.0)
    backward(float("nan"))
    optimizer.zero_grad()
    found = gradients()
    assert len(found) == len(wanted) == 16
    assert all(map(torch.equal, found, wanted))


def test_what_shards_take_of_the_host_is_what_a_plan_counts(driver: Driver) -> None:
    """On a GPU masters, values and gradients of a chunk are pinned; a power of two would be up to twice as much."""
    with patch.object(Chunk, "_make_buffer", lambda self: None):
        parameter = nn.Parameter(torch.zeros(300, 300, dtype=torch.bfloat16))
        member = Member("weight", parameter, torch.zeros(300, 300).requires_grad_())
        chunk = Chunk(0, [member], torch.device("cuda"), torch.float32)
    chunk.make_grad()
    planned = chunk.own_elements * (4 + 2 + 4)
    assert planned <= sum(driver.pages.values()) < planned + 3 * mmap.PAGESIZE


def test_the_probe_is_of_the_size_that_planning_uses() -> None:
    assert probe_bytes(1000, 1000) == LEAST_PROBE_BYTES
    assert probe_bytes(14 << 30, 10 << 30) == MOST_PROBE_BYTES
    assert probe_bytes(640 << 20, 10 << 30) == 80 << 20
    assert probe_bytes(640 << 20, 1 << 30) == 64 << 20


def test_the_probe_copies_that_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    real = Tensor.copy_

    def copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        copied.append(source.nbytes)
        return real(to, source)

    monkeypatch.setattr(Tensor, "copy_", copy)
    found = bandwidth_of(CPU, 2, 5 << 20)
    assert set(copied) == {5 << 20}
    assert found.to_device > 0
    assert found.host_update > 0
