"""The speed of a machine: what it computes, reads of its memory, copies over its link; by data sheets or measured."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from core.config import UserError
from core.kernels.timing import least_seconds
from core.metrics import peak_flops
from core.pinned import host_empty

SHARE_OF_PEAK = 0.4
"""Of a device's FLOP/s, what products of usual sizes reach."""

UNKNOWN_FLOPS = 1e11
"""Of a device whose peak nobody knows: what is computed in a second."""

HOST_UPDATE = 2e10
"""Bytes of masters, gradients and state that a rank's optimizer on the host goes through in a second."""
HOST_TRAFFIC = 30 / 16
"""What AdamW reads and writes of the host's memory for each of these bytes: of an element it reads 16, master, gradient
and two moments in fp32; it writes master and moments, 12, and 2 of the parameter."""

LEAST_PROBE_BYTES, MOST_PROBE_BYTES = 1 << 22, 1 << 28
"""Of less a device's copy shows how long it takes to begin, and a host's what a cache gives; more adds nothing."""
PROBED_LATENCY_BYTES = 1 << 12


@dataclass(frozen=True)
class Speed:
    """The device's speed: FLOPs of matrix products and the like, and bytes of memory traffic, a second.

    Raises UserError unless both are above 0.
    """

    flops_per_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "bytes_per_s"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name}={getattr(self, name)} of a device: give a number above 0")

    def seconds(self, flops: float, num_bytes: float) -> float:
        """By FLOPs or by the bytes read and written, whichever takes longer."""
        return max(flops / self.flops_per_s, num_bytes / self.bytes_per_s)


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second.

    to_device, to_host            of the link; `latency_s` is what each copy takes beside its bytes
    host_update, device_update    of masters and optimizer state, when that side's optimizer runs over them
    disk_read, disk_write         of a drive below the host; 0: there is none
    """

    to_device: float
    to_host: float
    host_update: float
    device_update: float
    latency_s: float = 0.0
    disk_read: float = 0.0
    disk_write: float = 0.0

    @property
    def has_disk(self) -> bool:
        return self.disk_read > 0


def speed_of(device: torch.device, dtype: torch.dtype) -> Speed:
    """The device's speed, for want of a first step."""
    peak = peak_flops(device, dtype) or UNKNOWN_FLOPS
    return Speed(SHARE_OF_PEAK * peak, 1e12 if device.type == "cuda" else 1e10)


def bandwidth_of(device: torch.device, ranks: int, num_bytes: int = LEAST_PROBE_BYTES) -> Bandwidth:
    """Measured: copies over the link in both directions, and a pass over memory for updates on either side.

    ranks      that share a chunk: each brings its part of it over a link of its own
    num_bytes  of a copy; see `probe_bytes`
    """
    on_cuda = device.type == "cuda"
    host, scratch = (host_empty(num_bytes, torch.uint8, pinned=on_cuda) for _ in range(2))
    for tensor in (host, scratch):
        tensor.zero_()  # memory that nobody has written has no pages yet
    there = torch.zeros_like(host, device=device)
    few = slice(0, PROBED_LATENCY_BYTES)

    def seconds(pass_over: Callable[[], object]) -> float:
        return least_seconds(lambda: (pass_over(), torch.cuda.synchronize(device) if on_cuda else None), rounds=3)

    to_device = seconds(lambda: there.copy_(host, non_blocking=True))
    to_host = seconds(lambda: host.copy_(there, non_blocking=True))
    latency_s = seconds(lambda: there[few].copy_(host[few], non_blocking=True)) if on_cuda else 1e-5
    host_update = seconds(lambda: scratch.copy_(host)) * 2  # as much is read as written
    device_update = seconds(lambda: there.add_(1)) * 2 if on_cuda else host_update
    rates = [
        num_bytes / max(taken, 1e-9)
        for taken in (to_device - latency_s, to_host - latency_s, host_update, device_update)
    ]
    return Bandwidth(ranks * rates[0], ranks * rates[1], rates[2], rates[3], latency_s)


def host_update_of(memory_bytes_per_s: float, ranks: int) -> float:
    """Bytes that a rank's update goes through in a second, where so many ranks share a host's memory."""
    return min(HOST_UPDATE, memory_bytes_per_s / ranks / HOST_TRAFFIC)


def described_bandwidth(speed: Speed, link_bytes_per_s: float, ranks: int) -> Bandwidth:
    """The bandwidth of a machine that is not here; link_bytes_per_s: device to host, each way; ranks share a chunk."""
    link = ranks * link_bytes_per_s
    return Bandwidth(link, link, HOST_UPDATE, speed.bytes_per_s, latency_s=1e-5)
