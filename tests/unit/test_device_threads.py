"""What threads and loops ask of a GPU that is not there: whose device they are of, what they wait for, how often."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from core import runtime
from core.config import UserError
from core.data import Prefetch
from core.parallel.compress import CommConfig
from core.parallel.local import _Arriving, _Sum
from core.parallel.sparse import RandomK
from core.runtime import start
from core.streams import DeviceStreams
from tests.support.command import ROOT
from tests.support.fake_gpu import fake_gpu
from tests.support.small import Rows, build, config_of
from tests.unit.test_train import HostReads, step_alone

SECOND = torch.device("cuda", 1)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.device]]:
    """(thread, device) of each that has said which device it is of."""
    found: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: found.append((threading.current_thread().name, device))
    )
    return found


def test_the_thread_of_batches_is_of_their_device(devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would make a context on the first GPU to pin memory for the second."""
    pinned: list[Tensor] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    with Prefetch(Rows(), device=SECOND) as source:
        batch = next(source)
    assert devices == [("prefetch", SECOND)]
    assert len(pinned) >= len(batch)
    pinned.clear()
    with Prefetch(Rows(), device=torch.device("cpu")) as source:
        next(source)
    assert not pinned
    assert len(devices) == 1


def test_who_waits_for_an_event_does_so_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[Any] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        inside.append(device)
        yield
        inside.append("left")

    monkeypatch.setattr(torch.cuda, "device", on)
    event: Any = SimpleNamespace(synchronize=lambda: inside.append("waited"))
    DeviceStreams(SECOND).host_waits(event)
    assert inside == [SECOND, "waited", "left"]


class Streams(DeviceStreams):
    """Writes down who waits for what."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.said: list[str] = []
        self._inside = "computing"

    def mark(self) -> Any:
        self.said.append(f"mark in {self._inside}")
        return len(self.said)

    @contextmanager
    def inside(self, stream: Any) -> Iterator[None]:
        before, self._inside = self._inside, stream
        yield
        self._inside = before

    def wait(self, event: Any) -> None:
        self.said.append(f"{self._inside} waits for {event}")

    def keep(self, tensors: Iterable[Tensor]) -> None:
        self.said.append(f"{self._inside} keeps {[int(x) for x in tensors]}")


def test_an_average_is_made_in_a_stream_of_its_own() -> None:
    """It begins behind what computes the ways, and computing waits for it where it is taken, and keeps its memory."""
    streams, found = Streams(), _Sum(torch.tensor(1), [torch.tensor(2), torch.tensor(3)], torch.tensor(4))
    arriving = _Arriving(lambda: streams.said.append("work") or found, 3, (streams, "aside"))  # pyright: ignore
    assert arriving.wait() is found
    begins = ["mark in computing", "aside waits for 1", "work", "mark in aside"]
    assert streams.said == [*begins, "computing waits for 4", "computing keeps [1, 2, 3, 4]"]


@pytest.mark.parametrize("launched", [True, False])
def test_a_rank_that_joins_takes_the_device_of_its_number(
    launched: bool, devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(runtime, "_init_process_group", lambda *_: None)
    monkeypatch.setattr(runtime.atexit, "register", lambda *_: None)
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value) if launched else monkeypatch.delenv(name, raising=False)
    runtime.join("cuda")
    assert [device for _, device in devices] == [1] * launched
    runtime.join("cpu")
    assert len(devices) == launched


def test_a_device_with_a_number_is_the_one_that_kernels_run_on(devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, wherever tensors lie."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert runtime.device_of("cuda:1") == SECOND
    assert [device for _, device in devices] == [SECOND]
    assert runtime.device_of("cuda").index is None
    with pytest.raises(UserError, match=r"device=cuda:2, and torch sees 2; use one from cuda:0 to cuda:1"):
        runtime.device_of("cuda:2")
    assert len(devices) == 1


def test_pinned_memory_is_taken_by_exact_sizes() -> None:
    """torch's own comes in powers of two: up to twice what was counted."""
    files = list((ROOT / "core").rglob("*.py"))
    assert len(files) > 100
    assert [path.name for path in files if "pin_memory=" in path.read_text()] == []


def test_random_places_come_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    sparse: Any = RandomK.__new__(RandomK)
    sparse.options, sparse.steps, sparse.axis = {"density": 0.5}, 0, SimpleNamespace(size=lambda: 1)
    sparse.table = dict.fromkeys("abc", SimpleNamespace(layout=SimpleNamespace(stretches=lambda: ())))
    with fake_gpu() as counted:
        sparse.exchange({name: torch.empty(8, 3, device="cuda") for name in "abc"})
    assert counted.copies == [("cpu", "cuda")]
    assert counted.waits == {}


@pytest.mark.parametrize("name", ["one_bit", "zero_one"])
def test_a_step_in_signs_waits_for_the_device_once(name: Any) -> None:
    """How many steps an optimizer has taken lies on the device, for each parameter: it is read once, in a step."""
    config = config_of(Path("/nowhere"), comm=CommConfig(name, start=1))
    with start("cpu"):
        state = build(config)
        for step in range(3):
            step_alone(state, config, step)
        with HostReads() as reads:
            step_alone(state, config, 3)
        assert state.parallel.compression is not None
        assert state.parallel.compression.steps == 4
    assert len(reads.found) == 1, reads.found
