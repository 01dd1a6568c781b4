"""Streams of a GPU and the events that order them. On a CPU all happens at once, and nothing here does anything."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


def recorded(device: torch.device | None = None) -> torch.cuda.Event:
    """An event at the end of what the device's current stream has to do."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def take_device(device: torch.device) -> None:
    """Let this thread, a new one, work for that device: each begins with the first, on which whatever it asks CUDA for
    would make a context."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


class DeviceStreams:
    """on_cuda: whether there are streams at all."""

    def __init__(self, device: torch.device):
        self.device, self.on_cuda = device, device.type == "cuda"

    def another(self) -> torch.cuda.Stream | None:
        """A stream beside the one that computes."""
        return torch.cuda.Stream(self.device) if self.on_cuda else None

    @contextmanager
    def inside(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Make it the current stream inside."""
        if stream is None:
            yield
            return
        with torch.cuda.stream(stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """An event at the end of what the current stream has to do."""
        return recorded(self.device) if self.on_cuda else None

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let the current stream wait."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give their memory, which another stream has made, to nobody before the current stream is done with them."""
        if self.on_cuda:
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream(self.device))

    def host_waits(self, event: torch.cuda.Event | None) -> None:
        """Return when the event has happened, in whatever thread."""
        if event is not None:
            with torch.cuda.device(self.device):  # a thread that waits makes no context on the first device
                event.synchronize()
