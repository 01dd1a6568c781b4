"""Many small steps under Gemini, of random shapes, some of which are thrown out in the middle of a forward."""

import gc
import os
import random
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from core.gemini import wrap

DIM, VOCAB, ROWS, LENGTH = 32, 50, 3, 8


class Thrown(Exception):
    pass


class Fragile(nn.Module):
    """A block that throws when it is told to: before it uses a parameter, between two of them, or when it runs again in
    the backward, which it does where it recomputes."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.recomputes, self.throws, self.num_runs = recomputes, "", 0

    def forward(self, x_BLD: Tensor) -> Tensor:
        self.num_runs = 0
        return checkpoint(self._forward, x_BLD, use_reentrant=False) if self.recomputes else self._forward(x_BLD)

    def _forward(self, x_BLD: Tensor) -> Tensor:
        self.num_runs += 1
        if self.throws == "before":
            raise Thrown
        h_BLF = self.up(self.norm(x_BLD)).relu()
        if self.throws == "between" or (self.throws == "again" and self.num_runs == 2):
            raise Thrown
        return x_BLD + self.down(h_BLF)


class Model(nn.Module):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Fragile(recomputes=i % 2 == 1) for i in range(num_blocks))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids_BL: Tensor) -> Tensor:
        x_BLD = self.embedding(ids_BL)
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.head(x_BLD)


@dataclass(frozen=True)
class Census:
    """What must not grow."""

    resident_bytes: int
    num_handles: int
    num_threads: int
    num_tensors: int


def census() -> Census:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Census(
        resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        num_handles=len(os.listdir("/proc/self/fd")),
        num_threads=len(os.listdir("/proc/self/task")) + threading.active_count(),
        num_tensors=sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()),
    )


@dataclass(frozen=True)
class Soaked:
    """early, late  censuses after a tenth of the steps, and after all"""

    early: Census
    late: Census
    losses: list[float]
    plain_losses: list[float]
    thrown: Counter[str]
    num_evictions: int
    device_peak_bytes: int
    budget_bytes: int


def soak(num_steps: int, budget_bytes: int, seed: int = 0, num_compared: int = 2000) -> Soaked:
    """Train a model that learns to repeat what it reads, beside one without Gemini for the first steps."""
    gc.collect()
    gc.freeze()  # what others left in this process does not count, nor that it goes
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = Model(num_blocks=4)
    twin = Model(num_blocks=4)
    twin.load_state_dict(model.state_dict())
    optimizer, plain = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, twin))

    def loss_of(ids_BL: Tensor):
        return lambda m: nn.functional.cross_entropy(m(ids_BL).flatten(0, 1), ids_BL.flatten())

    largest = loss_of(torch.zeros(ROWS, LENGTH, dtype=torch.long))
    gemini = wrap(model, optimizer, budget_bytes, sample=lambda: largest, device="cpu")
    losses, plain_losses, thrown, early = [], [], Counter(), None
    for index in range(num_steps):
        loss = loss_of(torch.randint(VOCAB, (draw.randint(1, ROWS), draw.randint(1, LENGTH))))
        block = draw.choice(list(model.blocks))
        places = ["before", "between", *(["again"] if block.recomputes else [])]
        where = block.throws = draw.choice(places) if draw.random() < 0.1 else ""
        try:
            value = loss(model)
            value.backward()
            optimizer.step()
            losses.append(value.item())
            if index < num_compared:
                value = loss(twin)
                value.backward()
                plain.step()
                plain_losses.append(value.item())
        except Thrown:
            assert where
            thrown[where] += 1
        finally:
            block.throws = ""
            optimizer.zero_grad()
            plain.zero_grad()
        if index == max(num_steps // 10, 40):
            early = census()
    late = census()
    gc.unfreeze()
    assert early is not None
    return Soaked(
        early=early,
        late=late,
        losses=losses,
        plain_losses=plain_losses,
        thrown=thrown,
        num_evictions=gemini.parallel.tier.num_evictions,
        device_peak_bytes=gemini.device_peak_bytes,
        budget_bytes=budget_bytes,
    )


def require_flat(found: Soaked, num_steps: int) -> None:
    """Nothing grows, the budget holds, and what is learnt is what a model without Gemini learns of the same batches."""
    assert found.thrown.total() > num_steps // 20
    assert set(found.thrown) == {"before", "between", "again"}
    assert len(found.losses) == num_steps - found.thrown.total()
    assert found.num_evictions > num_steps
    assert found.device_peak_bytes <= found.budget_bytes
    assert found.late.num_handles == found.early.num_handles
    assert found.late.num_threads == found.early.num_threads
    assert abs(found.late.num_tensors - found.early.num_tensors) <= 2
    assert found.late.resident_bytes - found.early.resident_bytes < 8 * 2**20
    assert found.losses[: len(found.plain_losses)] == found.plain_losses
    tenth = len(found.losses) // 10
    assert sum(found.losses[-tenth:]) < 0.9 * sum(found.losses[:tenth])
