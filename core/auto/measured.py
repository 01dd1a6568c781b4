"""A machine as `core.auto.measure` found it, in a JSON file that stands in the place of a data sheet.

The file has a checksum and says its format: what is damaged, or no machine, is refused by one line.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from core.auto.costs import COLLECTIVES, Link
from core.auto.machines import GIB, USABLE_SHARE, AxisLink, Cluster, Gpu, gpu_named
from core.config import UserError
from core.files import Damaged, replace_file, signed, unsigned
from core.precision import COMPUTE_DTYPE

FORMAT = "megalith machine 1"


@dataclass(frozen=True)
class MeasuredLink:
    """A collective in groups of `ranks`, `groups` of them at once: seconds of a message, and bytes a second after it.

    full_bytes, seconds  what the two were fitted on: sizes of `core.auto.costs`, and what each took
    """

    collective: str
    ranks: int
    groups: int
    latency_s: float
    bytes_per_s: float
    full_bytes: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()


@dataclass(frozen=True)
class MeasuredMachine:
    """What a plan asks of a machine.

    device       its name; kind: cpu or cuda
    devices      that compute beside each other in one machine: GPUs, or of a CPU its cores
    memory_bytes of a device; of a CPU, of all its cores together
    launch_s     what a kernel takes to begin
    products     precision -> (FLOPs of a product, FLOP/s), in order of size
    """

    device: str
    kind: str
    devices: int
    memory_bytes: int
    memory_bytes_per_s: float
    launch_s: float
    to_host_bytes_per_s: float
    host_update_bytes_per_s: float
    products: Mapping[str, tuple[tuple[float, float], ...]]
    links: tuple[MeasuredLink, ...] = ()

    def gpu(self) -> Gpu:
        """The device, as plans ask for one; its power nobody has measured."""
        memory_gib = self.memory_bytes / GIB
        curves = tuple((name, tuple(curve)) for name, curve in self.products.items())
        return Gpu(self.device, self.device, memory_gib, self.memory_bytes_per_s / 1e9, 0.0, "PCIe 4", curves=curves)

    def cluster(
        self,
        ranks: int,
        *,
        utilisation: float = 1.0,
        memory_bytes: int | None = None,
        memory_gb_s: float | None = None,
    ) -> Cluster:
        """So many ranks of it: each on a device, and where there are fewer, as on a CPU, they share them.

        utilisation  of the measured curve; others as of `cluster_of`

        Raises UserError for several ranks of a machine that was measured by one.
        """
        if ranks > 1 and not self.links:
            raise UserError(
                f"{ranks} ranks of a machine whose links nobody has measured; measure it anew with --nproc {ranks}"
            )
        inside = self.kind == "cpu" or ranks <= self.devices
        per_machine = ranks if inside else math.gcd(ranks, self.devices)
        on_cpu = self.kind == "cpu"
        usable = USABLE_SHARE * self.memory_bytes / (ranks if on_cpu else 1)
        links = self._axis_links()
        link = links[0].link if links else Link(0.0, math.inf)
        return Cluster(
            self.gpu(),
            ranks,
            per_machine,
            int(usable) if memory_bytes is None else memory_bytes,
            self.memory_bytes_per_s if memory_gb_s is None else 1e9 * memory_gb_s,
            utilisation,
            link,
            link,
            Link(0.0, self.to_host_bytes_per_s),
            self.memory_bytes / per_machine,
            self.host_update_bytes_per_s,
            self.launch_s,
            self.devices if on_cpu else ranks,
            links,
            overlaps=not on_cpu,
        )

    def _axis_links(self) -> tuple[AxisLink, ...]:
        """Of each size of groups one link, which knows each collective's own."""
        found = {}
        for one in self.links:
            found.setdefault((one.ranks, one.groups), []).append((one.collective, Link(one.latency_s, one.bytes_per_s)))
        links = []
        for (ranks, groups), each in found.items():
            usual = dict(each).get("all_gather", each[0][1])
            links.append(AxisLink(ranks, groups, Link(usual.latency_s, usual.bytes_per_s, tuple(each))))
        return tuple(links)


def write_machine(path: Path, machine: MeasuredMachine) -> None:
    replace_file(path, signed({"format": FORMAT, **asdict(machine)}))


def is_file(gpu: str) -> bool:
    """Whether what is typed for a GPU names a measured machine's file."""
    return gpu.endswith(".json")


def device_named(gpu: str) -> Gpu:
    """The device of a file, or of a name.  Raises UserError for what is neither."""
    return read_machine(Path(gpu)).gpu() if is_file(gpu) else gpu_named(gpu)


def read_machine(path: Path) -> MeasuredMachine:
    """Raises UserError for a file that is not there, is damaged, or is no machine's."""
    try:
        content = unsigned(path.read_bytes())
    except (OSError, Damaged, ValueError) as error:
        said = next(iter(str(error).splitlines()), "")
        raise UserError(f"gpu={path} {_why(error, said)}; make it with megalith llm plan --measure {path}") from None
    if content.pop("format", None) != FORMAT:
        raise UserError(f"gpu={path} is no machine of this version; make it with megalith llm plan --measure {path}")
    try:
        return _machine(content)
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(
            f"gpu={path} is no machine ({error}); make it with megalith llm plan --measure {path}"
        ) from None


def _why(error: Exception, said: str) -> str:
    if isinstance(error, Damaged):
        return said
    return "cannot be read: " + said if isinstance(error, OSError) else "is no JSON"


def _machine(content: dict[str, Any]) -> MeasuredMachine:
    links = tuple(
        MeasuredLink(**{**link, "full_bytes": tuple(link["full_bytes"]), "seconds": tuple(link["seconds"])})
        for link in content.pop("links")
    )
    products = {
        name: tuple((float(flops), float(rate)) for flops, rate in curve)
        for name, curve in content.pop("products").items()
    }
    found = MeasuredMachine(**content, products=products, links=links)
    numbers = [found.devices, found.memory_bytes, found.memory_bytes_per_s, found.to_host_bytes_per_s]
    numbers += [found.host_update_bytes_per_s, found.launch_s]
    numbers += [value for curve in products.values() for point in curve for value in point]
    numbers += [value for link in links for value in (link.ranks, link.groups, link.bytes_per_s)]
    if not all(0 < number < math.inf for number in numbers):
        raise ValueError("a number in it is not above 0 and finite")
    if unknown := {*products} - {*COMPUTE_DTYPE} or {link.collective for link in links} - {*COLLECTIVES}:
        raise ValueError(f"it tells of {min(unknown)}, which is not known here")
    if not all(products.values()) or not products:
        raise ValueError("it has no products")
    return found
