"""An optimizer's state is where its masters are, in the step after they have moved, too.

The device is torch's meta device: tensors on it have no values, and operators on them run.
"""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from core.gemini import wrap
from core.gemini.residency import host_bytes_of
from core.gemini.slots import numbers_of
from core.gemini.state_device import bring_state
from core.gemini.tier import parse_bytes
from core.layout import tagged_as
from core.optim import AdamW8bit, Lamb
from tests.support.gemini import Net, batch, loss, train

META = torch.device("meta")
UPDATES = [
    partial(torch.optim.AdamW, lr=1e-2, fused=True),
    partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    partial(torch.optim.SGD, lr=1e-2, momentum=0.9, foreach=True),
    partial(torch.optim.RMSprop, lr=1e-2),
    partial(Lamb, lr=1e-2),
    partial(AdamW8bit, lr=1e-2),
]


class Devices(TorchDispatchMode):
    """Devices of the state tensors of each fused update."""

    def __init__(self) -> None:
        super().__init__()
        self.of_steps: list[tuple[set[str], set[str]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._opname == "_fused_adamw_":
            *tensors, steps = args[:6]
            self.of_steps.append(({t.device.type for list_ in tensors for t in list_}, {t.device.type for t in steps}))
        return func(*args, **(kwargs or {}))


def moved(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every master put in its place on the device, as a chunk does that settles there; what the optimizer has stays.

    `.data` does not go from the host to the meta device, so these are other tensors in the same places.
    """
    found = []
    for group in optimizer.param_groups:
        for index, master in enumerate(group["params"]):
            group["params"][index] = there = torch.empty_like(master, device=META, requires_grad=True)
            optimizer.state[there] = optimizer.state.pop(master, {})
            found.append(there)
    return found


def step(optimizer: torch.optim.Optimizer, masters: list[Tensor]) -> None:
    for master in masters:
        master.grad = torch.ones_like(master)
    optimizer.step()


@pytest.mark.parametrize("make", UPDATES, ids=lambda make: make.func.__name__)
def test_a_second_step_after_the_masters_have_moved(make: Any) -> None:
    optimizer = make([nn.Parameter(torch.randn(64, 80)), nn.Parameter(torch.randn(64))])
    step(optimizer, optimizer.param_groups[0]["params"])
    masters = moved(optimizer)
    for master in masters:
        bring_state(optimizer, master)
    with Devices() as seen:
        if make.func is not Lamb:  # which asks for values, and this device has none
            step(optimizer, masters)
    fused = bool(optimizer.param_groups[0].get("fused"))
    assert seen.of_steps == [({"meta"}, {"meta"})] * fused
    for state in optimizer.state.values():
        numbers = {key: t for key, t in state.items() if isinstance(t, Tensor) and not t.ndim}
        whole = [t for key, t in state.items() if isinstance(t, Tensor) and t.ndim]
        assert {t.device.type for t in whole} <= {"meta"}
        assert {t.device.type for t in numbers.values()} <= {"meta" if fused else "cpu"}


def test_capturable_updates_take_the_number_of_the_step_from_the_device() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.randn(4))])
    step(optimizer, optimizer.param_groups[0]["params"])
    optimizer.param_groups[0]["capturable"] = True
    (master,) = moved(optimizer)
    bring_state(optimizer, master)
    assert {t.device.type for t in optimizer.state[master].values()} == {"meta"}


@pytest.mark.parametrize("budget", [20_000, 300_000])
def test_masters_that_settle_and_masters_that_are_wrapped_are_asked_for(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`wrap` takes an optimizer with its state, which may lie on the device; later those move that live there."""
    asked: dict[str, list[Tensor]] = {"loop": [], "replicas": []}
    for module, found in asked.items():
        monkeypatch.setattr(f"core.gemini.{module}.bring_state", lambda _, master, found=found: found.append(master))
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    sample: Any = None if budget < 100_000 else lambda: lambda model: loss(model, batch(0))
    gemini = wrap(model, optimizer, budget, sample=sample)
    masters = {id(master) for master in gemini.parallel.masters.values()}
    resident = {id(m.master) for chunk in gemini.parallel.chunks if chunk.resident for m in chunk.members}
    assert {id(master) for master in asked["loop"]} == masters
    assert {id(master) for master in asked["replicas"]} == resident
    assert bool(resident) == (budget > 100_000)


def in_other_tensors(optimizer: torch.optim.Optimizer, master: Tensor) -> None:
    """As `bring_state` where the device is another one than the host."""
    state = optimizer.state.get(master, {})
    for key, value in state.items():
        if isinstance(value, Tensor) and value.ndim:
            state[key] = tagged_as(value.clone(), value)


@pytest.mark.parametrize(("budget", "host", "warms_up"), [(300_000, "1MB", False), (110_000, "150KB", True)])
def test_a_durable_step_has_the_state_of_what_has_settled_on_the_device(
    budget: int, host: str, warms_up: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """warms_up: as on a GPU nothing has before the first step is over, and the host holds no more for it."""
    monkeypatch.setattr("core.gemini.replicas.GeminiReplicas.warms_up", warms_up)
    expected = train(Net, None, partial(torch.optim.AdamW, lr=1e-2))
    monkeypatch.setattr("core.gemini.replicas.bring_state", in_other_tensors)
    losses: list[float] = []
    for last in (2, 4):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        given: Any = {"sample": lambda: partial(loss, ids=batch(0)), "host": host, "disk": tmp_path}
        gemini = wrap(model, optimizer, budget, device="cpu", **given)
        disk = gemini.parallel.disk
        planned = gemini.parallel.planned
        assert disk is not None
        assert planned is not None
        try:
            if warms_up:
                away, waiting = (frozenset(one.index for one in of) for of in (disk.away, disk.waiting.of))
                assert host_bytes_of(planned.trace.chunks, frozenset(), away, True, waiting) <= parse_bytes(host)
            first, _ = gemini.resume()
            for step in range(first, last):
                value = loss(model, batch(step))
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
                gemini.commit(step + 1)
                losses.append(float(value.detach()))
            assert any(chunk.resident for chunk in gemini.parallel.chunks)
            assert bool(disk.away) == warms_up
            values = gemini.state_dict()
        finally:
            gemini.close()
    assert losses == expected.losses
    assert all(torch.equal(values[name], value) for name, value in expected.values.items())


def test_numbers_are_read_together(tmp_path: Path) -> None:
    """Those of a fused update lie on the device: one wait for all parameters of a durable step."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    gemini = wrap(model, optimizer, 40_000, host="1MB", disk=tmp_path, device="cpu")
    try:
        disk, reads = gemini.parallel.disk, list[int]()
        assert disk is not None
        read = Tensor.tolist
        with patch.object(Tensor, "tolist", lambda x: reads.append(len(x)) or read(x)):
            found = numbers_of(disk.slots.values())
    finally:
        gemini.close()
    names = [name for name, _ in model.named_parameters()]
    assert {*found} == {*names}
    assert reads == [len(names)]
    assert all(kept == {"step": 0.0} for kept in found.values())
