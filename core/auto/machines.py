"""GPUs and links by name: memory, what links carry, power, and how many stand in one machine; of data sheets.

Peaks of FLOP/s are in `core.metrics.throughput`, which every run asks. Memory is in GiB, as its chips are made, which
data sheets call GB. Links are one way and a rank's own: of an NVLink the sheet's figure, which adds both ways up, is
halved; of a machine's network cards a rank has its share. A machine reaches `LINK_SHARE` of what the sheet says. In
DGX-1 and DGX A100 two devices share a switch, and so the link to their host; all devices share the host's memory, by
its channels.

Sources: the vendors' data sheets, by the name in `Gpu.sheet`, and for machines (network cards, host memory) the user
guides of DGX-1, DGX A100, DGX H100/H200 and DGX B200. Cards without such a machine are taken as eight on PCIe with
one 100 Gbit/s port. Latencies are those of a small message of NCCL: its documentation's and nccl-tests' order of
magnitude, not of one machine.
"""

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from core.auto.costs import Link
from core.config import UserError, in_words
from core.metrics.throughput import gpu_peak_flops
from core.precision import COMPUTE_DTYPE
from core.trace.machine import HOST_UPDATE, host_update_of

GIB = 2**30
LINK_SHARE = 0.8
"""Of a link's bytes a second, what large messages of collectives reach."""
USABLE_SHARE = 0.92
"""Of a device's memory, what a run may take: beside it are the driver's share, the context, libraries' workspaces and
what the allocator cannot use."""
LAUNCH_S = 5e-6
"""What a kernel takes to begin, where nobody has measured it."""
GRAMS_PER_KWH = 473.0
"""CO2 of the world's electricity in 2024: Ember, Global Electricity Review 2025."""

LINKS = {
    "NVLink 2": Link(5e-6, 150e9),
    "NVLink 3": Link(5e-6, 300e9),
    "NVLink 4": Link(5e-6, 450e9),
    "NVLink 5": Link(5e-6, 900e9),
    "Infinity Fabric": Link(5e-6, 448e9),
    "PCIe 3": Link(1e-5, 16e9),
    "PCIe 4": Link(1e-5, 32e9),
    "PCIe 5": Link(1e-5, 64e9),
    "InfiniBand EDR": Link(1e-5, 12.5e9),
    "InfiniBand HDR": Link(1e-5, 25e9),
    "InfiniBand NDR": Link(1e-5, 50e9),
    "Ethernet 10": Link(3e-5, 1.25e9),
    "Ethernet 100": Link(3e-5, 12.5e9),
    "Ethernet 400": Link(2e-5, 50e9),
}
"""One way, of one port. Ethernet and InfiniBand by their Gbit/s: 100 (EDR), 200 (HDR), 400 (NDR)."""


Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Gpu:
    """A device, and the machine that it is usually in.

    name               as users write it, in small letters
    sheet              the vendor's name, by which its peaks are found (`core.metrics.throughput`)
    memory_gib         of the device
    memory_gb_s        what it reads of its memory in a second, in 1e9 bytes
    watts              of the board at most
    inside             the link between the ranks of a machine, one of LINKS
    across             the link of one port between machines
    ports              of a machine
    ranks_per_machine  devices
    host               the link between a device and its machine
    host_sharers       devices that share one such link, by a switch before it
    host_gib           memory of a machine
    host_gb_s          what a machine reads and writes of it in a second, all its channels together, in 1e9 bytes
    curves             of a device that was measured, (precision, curve): (FLOPs of a product, FLOP/s) in order of size
    """

    name: str
    sheet: str
    memory_gib: float
    memory_gb_s: float
    watts: float
    inside: str
    across: str = "Ethernet 100"
    ports: int = 1
    ranks_per_machine: int = 8
    host: str = "PCIe 4"
    host_sharers: int = 1
    host_gib: float = 512
    host_gb_s: float = 200
    curves: tuple[tuple[str, Curve], ...] = ()

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Dense FLOP/s in a format, of what was measured the most; None where the device has none."""
        if self.curves:
            return max((rate for _, rate in self._curve(dtype)), default=None)
        return gpu_peak_flops(self.sheet, dtype)

    def flops_per_s(self, dtype: torch.dtype, flops: float) -> float | None:
        """FLOP/s of products of that size: on the measured curve, without one the peak; None where there is none."""
        curve = self._curve(dtype)
        if not curve:
            return self.peak_flops(dtype)
        at, rates = (list(map(math.log, column)) for column in zip(*curve, strict=True))
        return math.exp(float(np.interp(math.log(max(flops, 1.0)), at, rates)))

    def _curve(self, dtype: torch.dtype) -> Curve:
        return next((curve for name, curve in self.curves if COMPUTE_DTYPE[name] == dtype), ())

    @property
    def usable_bytes(self) -> int:
        return int(USABLE_SHARE * self.memory_gib * GIB)


_DGX_A100: dict[str, Any] = {
    "inside": "NVLink 3",
    "across": "InfiniBand HDR",
    "ports": 8,
    "host_sharers": 2,
    "host_gb_s": 409.6,  # two sockets of eight channels DDR4-3200
}
_DGX_H100: dict[str, Any] = {
    "inside": "NVLink 4",
    "across": "InfiniBand NDR",
    "ports": 8,
    "host": "PCIe 5",
    "host_gib": 2048,
    "host_gb_s": 614.4,  # of eight channels DDR5-4800
}
_DGX_1: dict[str, Any] = {
    "inside": "NVLink 2",
    "across": "InfiniBand EDR",
    "ports": 4,
    "host": "PCIe 3",
    "host_sharers": 2,
    "host_gb_s": 136.5,  # of four channels DDR4-2133
}
_PCIE_5: dict[str, Any] = {"inside": "PCIe 5", "across": "InfiniBand NDR", "ports": 4, "host": "PCIe 5"}
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("b200", "NVIDIA B200", 180, 8000, 1000, **{**_DGX_H100, "inside": "NVLink 5"}),
        Gpu("h200", "NVIDIA H200 SXM", 141, 4800, 700, **_DGX_H100),
        Gpu("h200-nvl", "NVIDIA H200 NVL", 141, 4800, 600, **_PCIE_5),
        Gpu("h100", "NVIDIA H100 SXM", 80, 3350, 700, **_DGX_H100),
        Gpu("h100-nvl", "NVIDIA H100 NVL", 94, 3938, 400, **_PCIE_5),
        Gpu("h100-pcie", "NVIDIA H100 PCIe", 80, 2000, 350, **_PCIE_5),
        Gpu("a100-80gb", "NVIDIA A100 SXM 80GB", 80, 2039, 400, **_DGX_A100, host_gib=2048),
        Gpu("a100-40gb", "NVIDIA A100 SXM 40GB", 40, 1555, 400, **_DGX_A100, host_gib=1024),
        Gpu("a100-pcie-80gb", "NVIDIA A100 PCIe 80GB", 80, 1935, 300, "PCIe 4", "InfiniBand HDR", 4),
        Gpu("a100-pcie-40gb", "NVIDIA A100 PCIe 40GB", 40, 1555, 250, "PCIe 4", "InfiniBand HDR", 4),
        Gpu("v100-32gb", "NVIDIA V100 SXM2 32GB", 32, 900, 300, **_DGX_1),
        Gpu("v100-16gb", "NVIDIA V100 SXM2 16GB", 16, 900, 300, **_DGX_1),
        Gpu("l40s", "NVIDIA L40S", 48, 864, 350, "PCIe 4"),
        Gpu("l4", "NVIDIA L4", 24, 300, 72, "PCIe 4"),
        Gpu("a40", "NVIDIA A40", 48, 696, 300, "PCIe 4"),
        Gpu("a10", "NVIDIA A10", 24, 600, 150, "PCIe 4"),
        Gpu("rtx-a6000", "NVIDIA RTX A6000", 48, 768, 300, "PCIe 4"),
        Gpu("rtx-5090", "NVIDIA GeForce RTX 5090", 32, 1792, 575, "PCIe 5", host="PCIe 5"),
        Gpu("rtx-4090", "NVIDIA GeForce RTX 4090", 24, 1008, 450, "PCIe 4"),
        Gpu("rtx-3090", "NVIDIA GeForce RTX 3090", 24, 936, 350, "PCIe 4"),
        Gpu("rtx-3080", "NVIDIA GeForce RTX 3080", 10, 760, 320, "PCIe 4"),
        Gpu("t4", "NVIDIA T4", 16, 300, 70, "PCIe 3", host="PCIe 3"),
        Gpu(
            "mi300x",
            "AMD MI300X",
            192,
            5300,
            750,
            **{**_DGX_H100, "inside": "Infinity Fabric", "across": "Ethernet 400"},
        ),
    )
}


def gpu_named(name: str) -> Gpu:
    """The GPU of a name, in any case and with any of "-", "_" and blanks between its words.

    Where memories differ, the name without one is that of the smallest: what fits there fits the others.

    Raises UserError for a name that is none, with the nearest.
    """
    (words, sizes), found = _read(name), []
    for gpu in GPUS.values():
        if _read(gpu.name)[0] == words and all(size == gpu.memory_gib for size in sizes):
            found.append(gpu)
    if found:
        return min(found, key=lambda gpu: gpu.memory_gib)
    near = difflib.get_close_matches(name.lower().replace(" ", "-").replace("_", "-"), GPUS, n=3, cutoff=0.4)
    meant = f", did you mean {' or '.join(near)}?" if near else ""
    raise UserError(f"no GPU is called {name!r}{meant}; those with a data sheet here are {', '.join(GPUS)}")


def _read(name: str) -> tuple[list[str], list[float]]:
    """Words of a name that tell GPUs apart, and the memory that it says."""
    words = re.split(r"[-_ ]+", name.lower().strip())
    sizes = [float(word.removesuffix("gb")) for word in words if re.fullmatch(r"\d+gb", word)]
    return [word for word in words if not re.fullmatch(r"nvidia|amd|geforce|tesla|sxm\d?|hbm\w*|\d+gb", word)], sizes


@dataclass(frozen=True)
class AxisLink:
    """A link as it was measured: of groups of so many ranks each, so many of them at once."""

    ranks: int
    groups: int
    link: Link

    def distance(self, ranks: int, groups: int) -> tuple[float, float]:
        """How far from groups that are asked for: first by the ranks of one, then by all of them."""
        beside = math.log(self.ranks * self.groups / (ranks * groups))
        return abs(math.log(self.ranks / ranks)), abs(beside)


@dataclass(frozen=True)
class Cluster:
    """So many ranks on machines of one kind, each rank a device.

    ranks_per_machine  of one machine, whose ranks are neighbours
    memory_bytes       that a run may take of a device
    bytes_per_s        what a device reads of its memory
    utilisation        of the device's peak, what matrix products reach
    inside, across     the links of a rank, in its machine and to others, as far as they are reached
    to_host            between a device and its host, each way
    host_bytes         of the host's memory, for each rank
    host_update        bytes of masters, gradients and state that a rank's part of the host updates in a second
    launch_s           what a kernel takes to begin
    devices            of the whole cluster; fewer than ranks where several share one, as ranks share a CPU's cores
    measured           links of axes as they were measured, which then stand in the place of `inside` and `across`
    overlaps           messages travel while a device computes; a CPU's cores do both, one after the other
    """

    gpu: Gpu
    ranks: int
    ranks_per_machine: int
    memory_bytes: int
    bytes_per_s: float
    utilisation: float
    inside: Link
    across: Link
    to_host: Link
    host_bytes: float
    host_update: float = HOST_UPDATE
    launch_s: float = LAUNCH_S
    devices: int | None = None
    measured: tuple[AxisLink, ...] = ()
    overlaps: bool = True

    def beside(self, computing_s: float, sending_s: float) -> float:
        """Seconds in which a device computes and messages travel that it need not wait for."""
        return max(computing_s, sending_s) if self.overlaps else computing_s + sending_s

    @property
    def crowd(self) -> float:
        """Ranks that share a device."""
        return 1.0 if self.devices is None else max(1.0, self.ranks / self.devices)

    def link(self, stride: int, ranks: int) -> Link:
        """The link of each rank of an axis whose neighbours are `stride` ranks apart.

        Between machines all ranks of the axis that stand in one machine send beside each other, so that an axis with
        several of them in each has as many ports.
        """
        if self.measured and ranks > 1:
            groups = max(1, self.ranks // ranks)
            return min(self.measured, key=lambda one: one.distance(ranks, groups)).link
        if self.ranks_per_machine % (stride * ranks) == 0:
            return self.inside
        beside = max(1, min(ranks, self.ranks_per_machine // stride))
        rate = min(self.inside.bytes_per_s, beside * self.across.bytes_per_s)
        return Link(self.across.latency_s, rate)

    @property
    def machines(self) -> int:
        return math.ceil(self.ranks / self.ranks_per_machine)

    def facts(self) -> Iterator[str]:
        """Lines that say what is planned for."""
        of = f"{self.ranks} x {self.gpu.sheet}, {self.ranks_per_machine} in a machine"
        if self.crowd > 1:
            of += f", {self.ranks} ranks on {self.devices} devices"
        yield f"{of}; a run may take {in_words(self.memory_bytes)} of a device's {self.gpu.memory_gib:g} GiB"
        if self.measured:
            yield f"links and products as they were measured, at {self.utilisation:.0%} of the curve of products"
            yield "its power is not: energy and CO2 are 0 without --power"
            return
        inside, across = (f"{link.bytes_per_s / 1e9:.3g} GB/s" for link in (self.inside, self.across))
        yield f"links, one way and a rank's: {inside} in a machine ({self.gpu.inside}), {across} to others"
        yield f"({self.gpu.across}, {LINK_SHARE:.0%} of the sheet); products reach {self.utilisation:.0%} of the peak"


def cluster_of(
    gpu: Gpu,
    ranks: int,
    *,
    utilisation: float = 0.5,
    memory_bytes: int | None = None,
    memory_gb_s: float | None = None,
    across_gb_s: float | None = None,
) -> Cluster:
    """The cluster of a data sheet; what is given takes the place of the sheet's.

    Machines have alike many ranks, so that ranks which do not fill machines leave some of their devices out.

    memory_bytes  that a run may take
    memory_gb_s   what a device reads of its memory in a second, in 1e9 bytes
    across_gb_s   a rank's link to other machines, as it is reached
    """
    inside, across, host = LINKS[gpu.inside], LINKS[gpu.across], LINKS[gpu.host]
    per_rank = min(gpu.ports / gpu.ranks_per_machine, 1.0)
    across_rate = LINK_SHARE * per_rank * across.bytes_per_s if across_gb_s is None else 1e9 * across_gb_s
    return Cluster(
        gpu,
        ranks,
        ranks if ranks <= gpu.ranks_per_machine else math.gcd(ranks, gpu.ranks_per_machine),
        gpu.usable_bytes if memory_bytes is None else memory_bytes,
        1e9 * (gpu.memory_gb_s if memory_gb_s is None else memory_gb_s),
        utilisation,
        replace(inside, bytes_per_s=LINK_SHARE * inside.bytes_per_s),
        replace(across, bytes_per_s=across_rate),
        replace(host, bytes_per_s=LINK_SHARE * host.bytes_per_s / gpu.host_sharers),
        gpu.host_gib * GIB / gpu.ranks_per_machine,
        host_update_of(LINK_SHARE * 1e9 * gpu.host_gb_s, gpu.ranks_per_machine),
    )
