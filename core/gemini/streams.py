"""Gemini's streams: on CUDA computing, fetching and reducing run beside each other, each in one. On a CPU they run one
after the other, and nothing here does anything.

    fetching  begins when whoever read the memory before is done (`freed`), and computing waits for its end at first use
    reducing  begins when the gradients are written, and the next fetch waits for its end

Waiting is the streams': the host goes on, except where it needs a gradient itself (`Transport.finish`).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from core.streams import DeviceStreams, recorded


class Streams(DeviceStreams):
    def __init__(self, device: torch.device):
        super().__init__(device)
        self._freed: list[torch.cuda.Event] = []
        if self.on_cuda:
            self._fetch, self._reduce = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def freed(self) -> None:
        """Memory that the current stream has read or written up to here may be filled anew."""
        if self.on_cuda:
            self._freed.append(recorded(self.device))

    @contextmanager
    def fetching(self) -> Iterator[None]:
        if not self.on_cuda:
            yield
            return
        for event in self._freed:
            self._fetch.wait_event(event)
        self._freed.clear()
        with torch.cuda.stream(self._fetch):
            yield

    @contextmanager
    def reducing(self) -> Iterator[None]:
        if not self.on_cuda:
            yield
            return
        self._reduce.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._reduce):
            yield
            self.freed()

    def join(self) -> None:
        """Let computing wait for everything, and the host for what fetching reads of its memory."""
        if self.on_cuda:
            torch.cuda.current_stream().wait_stream(self._reduce)
            torch.cuda.current_stream().wait_stream(self._fetch)
            self._fetch.synchronize()
