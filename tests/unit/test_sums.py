"""Sums in one shot over memory that all ranks see: two ranks of one process stand for GPUs."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from core.comm import sums

CPU = torch.device("cpu")


class Peer:
    """What another rank, which has the same numbers, does to this one's sums."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sum_of: Callable[[Tensor], Tensor] = lambda x: 2 * x):
        self.grouped, self.one_shot, self.buffers, self.sum_of = list[int](), list[int](), list[int](), sum_of
        shared = SimpleNamespace(empty=self.empty, rendezvous=lambda *_: None)
        monkeypatch.setattr(sums, "symmetric_memory", lambda: shared)
        monkeypatch.setattr(sums.dist, "all_reduce", self.all_reduce)
        monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce_copy", self.all_at_once, raising=False)
        group = SimpleNamespace(group_name="tp")
        self.axis: Any = SimpleNamespace(get_group=lambda: group, size=lambda: 2, get_local_rank=lambda: 0)

    def empty(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        made = torch.empty(num_elements, dtype=dtype)
        self.buffers.append(made.data_ptr())
        return made

    def all_reduce(self, x: Tensor, op: Any = None, group: Any = None) -> None:
        self.grouped.append(x.numel())
        if op is None:
            x.mul_(2)

    def all_at_once(self, shared: Tensor, x: Tensor, op: str, name: str) -> Tensor:
        assert (op, name, shared.shape) == ("sum", "tp", x.shape)
        self.one_shot.append(self.buffers.index(shared.data_ptr()))
        return self.sum_of(x)

    def sums(self, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        real = sums._OneShot.over
        monkeypatch.setattr(sums._OneShot, "over", lambda axis, device, dtype: real(axis, CPU, dtype))
        total = sums.sums_over(self.axis, "cuda", dtype)
        self.grouped.clear()
        self.one_shot.clear()
        return lambda x: total(x, self.axis)


def test_small_sums_take_one_shot_and_the_buffers_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(monkeypatch)
    total = peer.sums(monkeypatch, torch.bfloat16)
    for n in range(1, 5):
        x = torch.full((2, n), 3.0, dtype=torch.bfloat16)
        assert torch.equal(total(x), 2 * x)
    assert peer.one_shot == [0, 1, 0, 1]
    assert not peer.grouped


def test_other_formats_and_larger_sums_go_through_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(monkeypatch)
    total = peer.sums(monkeypatch, torch.bfloat16)
    most = sums.MOST_BYTES // 2
    for n, dtype in ((most, torch.bfloat16), (most + 1, torch.bfloat16), (3, torch.float32)):
        assert float(total(torch.ones(n, dtype=dtype))[-1]) == 2.0
    assert len(peer.one_shot) == 1
    assert peer.grouped == [most + 1, 3]


def raises(error: type[Exception], text: str) -> Callable[[Tensor], Tensor]:
    def kernel(x: Tensor) -> Tensor:
        raise error(text)

    return kernel


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(raises(NotImplementedError, "\"one_shot_all_reduce\" not implemented for 'Half'"), id="no format"),
        pytest.param(raises(RuntimeError, "no multicast"), id="fails"),
        pytest.param(lambda x: 2 * x + (x.numel() == 1003), id="wrong once"),
    ],
)
def test_a_kernel_that_does_not_add_up_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, kernel: Callable[[Tensor], Tensor]
) -> None:
    peer = Peer(monkeypatch, kernel)
    total = peer.sums(monkeypatch, torch.float16)
    assert float(total(torch.ones(4, dtype=torch.float16))[0]) == 2.0
    assert peer.grouped == [4]
    assert not peer.one_shot


def test_each_rank_takes_all_turns_of_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that stops at its first wrong sum would leave the others waiting in the next one."""
    peer = Peer(monkeypatch, lambda x: x)
    made = sums._OneShot(peer.axis, CPU, torch.float32)
    assert not sums._is_right(made, peer.axis, CPU, torch.float32)
    assert len(peer.grouped) == len(peer.one_shot) == 6


def test_without_such_memory_the_group_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(monkeypatch)
    monkeypatch.setattr(sums, "symmetric_memory", lambda: SimpleNamespace())
    total = peer.sums(monkeypatch, torch.bfloat16)
    assert float(total(torch.ones(4, dtype=torch.bfloat16))[0]) == 2.0
    assert peer.grouped == [4]
