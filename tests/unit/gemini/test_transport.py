"""What is on its way between the sides: the host holds few gradients at once, however many microbatches there are."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.gemini import transport
from core.gemini.tier import DeviceTier
from core.gemini.transport import MOST_ARRIVING, Transport


class Event:
    """Of a copy that has arrived when `now` has come to it; who waits lets it come."""

    now = 0

    def __init__(self, at: int):
        self.at = at

    def query(self) -> bool:
        return Event.now >= self.at

    def synchronize(self) -> None:
        Event.now = max(Event.now, self.at)


@pytest.mark.parametrize("link", [0.0, 0.5, 2.0])
def test_gradients_do_not_pile_up_on_the_host(monkeypatch: pytest.MonkeyPatch, link: float) -> None:
    """link: how many copies arrive while the next is made"""
    made = 0

    def mark() -> Event:
        nonlocal made
        made += 1
        Event.now = max(Event.now, int(link * made))
        return Event(made)

    empty = torch.empty
    monkeypatch.setattr(transport.torch, "empty", lambda *shape, pin_memory=False, **kind: empty(*shape, **kind))
    monkeypatch.setattr(Event, "now", 0)
    streams: Any = SimpleNamespace(on_cuda=True, mark=mark, join=lambda: None)
    mesh: Any = None
    of = Transport(mesh, None, DeviceTier(1000), streams)
    chunk: Any = SimpleNamespace(resident=False)
    grad, most = torch.zeros(3), 0
    for microbatch in range(40):
        of._put(chunk, grad, torch.full((3,), float(microbatch)), microbatch == 0)
        most = max(most, len(of._arriving))
    of.finish()
    assert most <= MOST_ARRIVING
    assert not of._arriving
    assert torch.equal(grad, torch.full((3,), float(sum(range(40)))))
