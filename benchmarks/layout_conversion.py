"""Layout conversion: the published greedy heuristic beside the cheapest path, and what DTensor sends for the same.

1. All pairs of sharding specs of tensors of one to three dims on 2 x 2, 2 x 3 and 2 x 2 x 2 ranks: seconds of the
   greedy path over those of the cheapest, by bytes alone, where all links are alike and where the first axis is ten
   times slower (machines that a network joins). Where both send nothing the ratio is 1.
2. On ranks, the pairs that DTensor can say: bytes that its redistribute sends, and ours, counted. On a CPU DTensor
   gathers where it would exchange on a GPU; it is counted both ways, and compared by what it would exchange.
"""

import itertools
import math
import statistics
import sys
import time
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.ranks import device_of_rank, on_ranks
from benchmarks.result import Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.auto.conversion import cheapest, greedy
from core.auto.costs import Link, bytes_sent
from core.auto.exchange import convert
from core.auto.specs import Spec, all_specs
from core.comm.volume import count_volume
from core.config import UserError, run_command

Sizes = tuple[int, ...]
MESHES: tuple[Sizes, ...] = ((2, 2), (2, 3), (2, 2, 2))
ROWS = 24
"""Of each dim: it divides over all of these meshes."""
ALIKE, SLOW = Link(0.0, 1.0), Link(0.0, 0.1)


def measure(options: Options) -> Measured:
    figures: list[Row] = []
    for sizes in MESHES[:1] if options.quick else MESHES:
        for num_dims in (1, 2, 3):
            for name, links in {
                "alike": (ALIKE,) * len(sizes),
                "first axis 10x slower": (SLOW, *(ALIKE,) * (len(sizes) - 1)),
            }.items():
                figures.append(ratios(sizes, num_dims, name, links))
                options.kept(figures[-1])
    targets = []
    for sizes in MESHES[:1] if options.quick else (MESHES[0], MESHES[2]):
        row = beside_dtensor(sizes)
        figures.append(row)
        options.kept(row)
        targets.append(Target(f"DTensor's bytes / ours, {_by(sizes)}", 1.0, row.numbers["DTensor / ours"].value))
    return Measured(
        tuple(figures),
        tuple(targets),
        (
            "ratio: greedy / cheapest in seconds, over all pairs of specs without partial sums, by bytes alone.",
            "DTensor: pairs with partial sources too, and axes in the mesh's order, which is all that it can say; "
            "tensors of two dims, bytes of one rank by the counter of this project.",
        ),
    )


def ratios(sizes: Sizes, num_dims: int, name: str, links: tuple[Link, ...]) -> Row:
    """Greedy over cheapest, of all pairs."""
    shape, specs = (ROWS,) * num_dims, all_specs(num_dims, len(sizes))
    found, steps = [], [0, 0]
    taken = {"greedy": 0.0, "cheapest": 0.0}
    for source, target in itertools.product(specs, repeat=2):
        given = source, target, shape, 2, sizes, links
        begin = time.perf_counter()
        published = greedy(*given)
        between = time.perf_counter()
        best = cheapest(*given)
        taken["greedy"] += between - begin
        taken["cheapest"] += time.perf_counter() - between
        if not best.seconds <= published.seconds * (1 + 1e-9):
            raise UserError(f"from {source} to {target} the cheapest path is dearer than the greedy one; no result")
        if best.seconds == 0 != published.seconds:
            raise UserError(f"from {source} to {target} nothing need be sent, and the greedy path does; no result")
        found.append(published.seconds / best.seconds if best.seconds else 1.0)
        steps[0] += len(published.steps)
        steps[1] += len(best.steps)
    pairs = len(found)
    numbers = {
        "pairs": Number(pairs, ""),
        "mean ratio": Number(statistics.fmean(found), "x"),
        "largest ratio": Number(max(found), "x"),
        "dearer": Number(100 * sum(ratio > 1 + 1e-9 for ratio in found) / pairs, "%"),
        "steps, greedy": Number(steps[0] / pairs, "steps"),
        "steps, cheapest": Number(steps[1] / pairs, "steps"),
        "search, greedy": Number(1e6 * taken["greedy"] / pairs, "us a pair"),
        "search, cheapest": Number(1e6 * taken["cheapest"] / pairs, "us a pair"),
    }
    return Row({"mesh": _by(sizes), "dims": num_dims, "links": name}, numbers)


def beside_dtensor(sizes: Sizes) -> Row:
    num_ranks = math.prod(sizes)
    preload = ["benchmarks.layout_conversion", "torch.distributed.tensor"]
    pairs, ours, theirs, gathered = on_ranks(num_ranks, redistributed, sizes, preload=preload)[0]
    numbers = {
        "pairs": Number(pairs, ""),
        "bytes, ours": Number(ours, "bytes"),
        "bytes, DTensor": Number(theirs, "bytes"),
        "DTensor / ours": Number(theirs / ours, "x"),
        "DTensor on a CPU": Number(gathered, "bytes"),
    }
    return Row({"mesh": _by(sizes), "dims": 2, "links": "counted"}, numbers)


def redistributed(sizes: Sizes) -> tuple[int, float, float, float]:
    """On a rank: pairs, and the bytes that it sends for all: ours, DTensor's if it exchanges, and as it does here."""
    from torch.distributed.tensor import DTensor, placement_types

    device, shape = device_of_rank(), (ROWS, ROWS)
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    mesh = DeviceMesh(device.type, ranks, mesh_dim_names=("x", "y", "z")[: len(sizes)])
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    sources = [spec for spec in all_specs(2, len(sizes), partial=True) if ordered(spec)]
    targets = [spec for spec in sources if not spec.partial]
    pairs, ours, theirs, spared = 0, 0.0, 0.0, 0.0
    exchanged = placement_types.shard_dim_alltoall

    def counted(x: torch.Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
        nonlocal spared
        before = volume.wire_bytes
        out = exchanged(x, gather_dim, shard_dim, mesh, mesh_dim)
        ranks = mesh.size(mesh_dim)
        by_exchange = bytes_sent("all_to_all", ranks * x.numel() * x.element_size(), ranks)
        spared += volume.wire_bytes - before - by_exchange
        return out

    with count_volume(mesh) as volume, patch.object(placement_types, "shard_dim_alltoall", counted):
        for source, target in itertools.product(sources, targets):
            local = torch.ones(source.local_shape(shape, sizes, coordinate), device=device)
            given = DTensor.from_local(local, mesh, source.placements(len(sizes)), run_check=False)
            before = volume.wire_bytes
            reference = given.redistribute(placements=target.placements(len(sizes))).to_local()
            between = volume.wire_bytes
            result = convert(local, source, target, mesh, shape)
            if not torch.equal(result, reference):
                raise UserError(f"from {source} to {target} DTensor gives another result; no figures")
            pairs, ours, theirs = pairs + 1, ours + volume.wire_bytes - between, theirs + between - before
    return pairs, ours, theirs - spared, theirs


def ordered(spec: Spec) -> bool:
    return all(list(axes) == sorted(axes) for axes in spec.dims)


def _by(sizes: Sizes) -> str:
    return " x ".join(map(str, sizes))


MEASURES = ("core/auto/conversion.py", "core/auto/costs.py", "core/auto/exchange.py", "core/auto/specs.py", "core/comm",
            "benchmarks/layout_conversion.py", "benchmarks/ranks.py")  # fmt: skip
BENCHMARK = Benchmark("layout_conversion", "Layout conversion: greedy and cheapest paths", measure, MEASURES)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="layout_conversion"), sys.argv[1:]))
