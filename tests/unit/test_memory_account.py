"""MemoryAccount against hand counts and against the profiler's own record of the CPU allocator."""

import gc
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from core.trace.account import MemoryAccount, peak_bytes, resident_peak_bytes
from tests.support.command import ROOT

KIB = 1024


def test_counts_storages_once_and_frees_them():
    with MemoryAccount() as account:
        x = torch.empty(KIB, dtype=torch.uint8)
        y = x[10:].view(2, -1).t()
        assert account.current_bytes == KIB
        z = torch.empty(2 * KIB, dtype=torch.uint8)
        del x
        assert account.current_bytes == 3 * KIB
        del y
        assert account.current_bytes == 2 * KIB
    del z
    assert (account.current_bytes, account.peak_bytes) == (0, 3 * KIB)


def test_a_temporary_raises_the_peak_only():
    x = torch.zeros(256)
    with MemoryAccount() as account:
        account.add([x, x.view(16, 16)])
        y = x + x * 2
    assert (account.current_bytes, account.peak_bytes) == (2 * KIB, 3 * KIB)
    del y


def test_saved_tensors_live_until_backward():
    x = torch.zeros(256, requires_grad=True)
    with MemoryAccount() as account:
        account.add([x])
        y = x.exp().exp().sum()  # both results of exp are saved; the sum is 4 bytes
        assert account.current_bytes == 3 * KIB + 4
        y.backward()
        del y
        assert account.current_bytes == 2 * KIB  # x and its gradient


def test_resized_storages_and_tensors_of_before():
    x = torch.empty(KIB, dtype=torch.uint8)
    with MemoryAccount() as account:
        account.add([x])
        x.untyped_storage().resize_(0)
        assert account.current_bytes == 0
        x.untyped_storage().resize_(4 * KIB)
        y = torch.empty(0, dtype=torch.uint8).resize_(KIB)
        assert account.current_bytes == 5 * KIB
    assert torch.UntypedStorage.resize_ is account._resize_
    del y


def test_frees_from_another_thread_are_subtracted():
    holder = []
    with MemoryAccount() as account:
        holder.append(torch.empty(KIB, dtype=torch.uint8))
        thread = threading.Thread(target=holder.clear)
        thread.start()
        thread.join()
        assert account.current_bytes == 0


def profiled_bytes(step):
    """(left behind, peak) of what `step` allocates, from the allocator's events in the profiler."""
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return current, peak


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        return x + self.inner(x)


class CheckpointedBlock(Block):
    def forward(self, x):
        # A generator's state (5 kB) is made by no operator, so the account does not see it.
        return x + checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=False)


@pytest.mark.parametrize("block", [Block, CheckpointedBlock])
@pytest.mark.parametrize("foreach", [False, True])
def test_a_training_step_agrees_with_the_profiler_to_the_byte(block, foreach):
    torch.manual_seed(0)
    model = nn.Sequential(block(), block(), nn.Linear(64, 101))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    x, targets = torch.randn(128, 64), torch.arange(128) % 101

    def step():
        nn.functional.cross_entropy(model(x), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    gc.collect()
    with MemoryAccount() as account:
        account.add([*model.parameters(), x, targets])
        account.add(value for state in optimizer.state.values() for value in state.values())
        before = account.current_bytes
        step()
    assert (account.current_bytes - before, account.peak_bytes - before) == profiled_bytes(step)


def test_peak_bytes_on_the_cpu_is_the_account_or_the_process():
    with MemoryAccount() as account:
        torch.empty(KIB, dtype=torch.uint8)
    assert peak_bytes("cpu", account) == KIB
    assert peak_bytes("cpu") == resident_peak_bytes() > 50e6


def test_the_resident_peak_is_of_this_process_whatever_started_it() -> None:
    held = torch.ones(2**30, dtype=torch.uint8)
    line = "from core.trace.account import resident_peak_bytes; print(resident_peak_bytes())"
    said = subprocess.run([sys.executable, "-c", line], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert 50e6 < int(said) < held.numel()
