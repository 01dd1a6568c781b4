"""What 1D, 2D, 2.5D and 3D tensor parallelism cost a rank: the published table of efficiencies, from counts.

What is counted is a linear pair, y = (x w1^T) w2^T with x[M, K], w1[N, K], w2[K, N], forward and backward, by the
styles that train the decoder: FLOPs of its products, bytes of its parameters, bytes of the activations between the
layers, bytes and calls of every collective that passes the dispatcher. Real ranks up to 8; beyond them one rank
computes and the others of a fake process group do not exist, which changes no count. No time is taken.

Each count has a closed form, and equals it to the byte:

    1D     2 all-reduces of x: 2 M K
    2D     3 products of SUMMA a layer, each of q rounds: 6 K (M / q + N / q)
    2.5D   the same for a depth's share of M, and sums of w's gradients: 6 K (M / dq + N / q) + 2 K N / q^2
    3D     a layer gathers its input twice, its weight twice, its output's gradient, and scatters the other three

Messages are full ones (`core.comm.volume`). The leading activation term is that of the messages which carry x, y or
their gradients; its exponent is fitted over squares, q x q x d and cubes. Latency is what the table means by it, the
rounds that follow one another: of a ring all-reduce 2 (P - 1), of 2D and 2.5D the q of a product, of 3D the p - 1 of a
ring all-gather.

The published latency of 2.5D, sqrt(P / d^3), is that of Solomonik and Demmel's matrix product, which deals the q rounds
of a product out over the depth. Tesseract, which trains transformers, deals the batch out over the depth and keeps q =
sqrt(P / d) rounds; so does ours. Its parameters are repeated over the depth in both: d / P.
"""

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.ranks import on_ranks
from benchmarks.result import Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from benchmarks.tensor_parallel_bytes import Counts, pair_bytes
from core.comm.volume import count_volume
from core.compose import ParallelConfig, parallelize
from core.config import UserError, run_command
from core.mesh import MeshConfig, TpMode, build_mesh, tensor_axes
from core.parallel import tensor1d, tensor2d, tensor3d
from core.parallel.grid import Spread, on_grid
from core.placement.style import Plan
from core.runtime import pretended

PUBLISHED = {
    "1d": ("1/P", "1/P", "1", "1", "P"),
    "2d": ("1/P", "1/P", "1/P", "1/sqrt(P)", "sqrt(P)"),
    "2.5d": ("1/P", "d/P", "1/P", "1/sqrt(dP)", "sqrt(P/d^3)"),
    "3d": ("1/P", "1/P", "1/P", "1/P^(2/3)", "P^(1/3)"),
}
# What the leading activation term is a power of, and which.
EXPONENTS = {"1d": ("P", 0.0), "2d": ("P", -1 / 2), "2.5d": ("dP", -1 / 2), "3d": ("P", -2 / 3)}
ITEMSIZE = 4


@dataclass(frozen=True)
class Sizes:
    """x[rows, inner], w1[outer, inner], w2[inner, outer]; by default of sizes that every mesh below divides."""

    rows: int = 512
    inner: int = 1024
    outer: int = 4096


def meshes(quick: bool) -> list[tuple[MeshConfig, bool]]:
    """(mesh, whether its ranks are real)."""
    real = [_mesh("1d", 2), _mesh("2d", 4)] if quick else [
        *(_mesh("1d", n) for n in (2, 4, 8)), _mesh("2d", 4), _mesh("2.5d", 2, 2), _mesh("2.5d", 4, 1),
        _mesh("2.5d", 8, 2), _mesh("3d", 8),
    ]  # fmt: skip
    sides = (2, 4) if quick else (2, 4, 8, 16, 32, 64)
    fake = [_mesh("1d", side**2) for side in sides] + [_mesh("2d", side**2) for side in sides]
    boxes = ((2, 2), (4, 2)) if quick else ((2, 2), (4, 2), (4, 4), (8, 2), (8, 4), (16, 4), (16, 16), (32, 4))
    fake += [_mesh("2.5d", side**2 * depth, depth) for side, depth in boxes]
    fake += [_mesh("3d", side**3) for side in ((2,) if quick else (2, 4, 8, 16))]
    return [(mesh, True) for mesh in real] + [(mesh, False) for mesh in fake]


def _mesh(mode: TpMode, ranks: int, depth: int = 1) -> MeshConfig:
    return MeshConfig(tp=ranks, tp_mode=mode, tp_depth=depth)


def measure(options: Options) -> Measured:
    sizes = Sizes(256, 64, 128) if options.quick else Sizes()
    figures = []
    for mesh, is_real in meshes(options.quick):
        found = on_real_ranks(mesh, sizes) if is_real else on_a_fake_group(mesh, sizes)
        figures.append(_row(mesh, sizes, is_real, found))
    return Measured(tuple(figures), tuple(_targets(figures)), notes())


# --- counting ---------------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.up = nn.Linear(sizes.inner, sizes.outer, bias=False)
        self.down = nn.Linear(sizes.outer, sizes.inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def plan_of(mode: TpMode) -> Plan:
    if mode == "1d":
        return {"up": tensor1d.colwise, "down": tensor1d.rowwise}
    if mode == "3d":
        return {"up": tensor3d.linear, "down": tensor3d.linear_back}
    return {"up": tensor2d.linear, "down": tensor2d.linear}


@dataclass(frozen=True)
class Found:
    """What one rank computed, holds and sent in a step."""

    flops: int
    parameter_bytes: int
    activation_bytes: int
    bytes: Counts
    calls: Counts


def count(mesh: MeshConfig, sizes: Sizes) -> Found:
    """Of this rank of the process group that there is."""
    built = build_mesh(mesh.resolve(dist.get_world_size()), "cpu")
    parallel = parallelize(
        Pair(sizes), built, ParallelConfig(), plan_of(mesh.tp_mode) if mesh.tp > 1 else {}
    )  # fmt: skip
    x = torch.ones(sizes.rows, sizes.inner)
    if mesh.tp_mode != "1d":
        x = on_grid(x, Spread(tensor_axes(built)))
    x.requires_grad_()
    kept = [x.numel()]
    for module in (parallel.model.up, parallel.model.down):
        module.register_forward_hook(lambda module, args, out: kept.append(out.numel()))
    with count_volume(built) as volume, _flop_counter() as flops:
        with parallel.microbatch(last=True):
            parallel.model(x).sum().backward()
        parallel.reduce()
    parameters = sum(m.numel() for m in parallel.masters.values())
    return Found(
        flops.get_total_flops(), ITEMSIZE * parameters, ITEMSIZE * sum(kept), dict(volume.bytes), dict(volume.calls)
    )


def _flop_counter() -> FlopCounterMode:
    """torch's own knows addmm, and not that in place, which SUMMA adds its rounds with."""

    def addmm(_: Any, a_shape: Any, b_shape: Any, **options: Any) -> int:
        return 2 * math.prod(a_shape) * b_shape[1]

    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm})


def on_a_fake_group(mesh: MeshConfig, sizes: Sizes) -> Found:
    """Rank 0 of as many ranks as the mesh has, of which the others do not exist."""
    with pretended(mesh.tp):
        return count(mesh, sizes)


def on_real_ranks(mesh: MeshConfig, sizes: Sizes) -> Found:
    """gloo ranks, all of which have to count the same.  Raises UserError when one fails."""
    found = on_ranks(mesh.tp, count, mesh, sizes, preload=[__spec__.name])
    if any(one != found[0] for one in found):
        raise UserError(f"the ranks of {mesh.describe()} count differently; no result")
    return found[0]


# --- the table --------------------------------------------------------------------------------------------------------


def notes() -> tuple[str, ...]:
    return (
        "published: computation, parameters, activations, bandwidth, latency; 'd' is the depth of 2.5D.",
        "shares are relative to one rank. In 1D what a pair keeps beside its hidden features is whole on every rank: "
        "(2 K + N / P) / (2 K + N), which the table rounds to 1.",
        "sent: full messages, as the volume counter has them; closed form / counted is 1 where they agree to the byte, "
        "by operation and by axis.",
        "rounds: 2.5D keeps q = sqrt(P / d) as Tesseract does; the published sqrt(P / d^3) deals the rounds of a "
        "product out over the depth (Solomonik and Demmel 2011).",
        "ranks beyond 8 are those of a fake process group: one of them computes. No time is taken, so other load on "
        "the machine changes nothing.",
    )


def activation_bytes(mesh: MeshConfig, found: Counts) -> int:
    """Of the messages that carry x, y or their gradients: in a grid those along a row, in 3D along rows and columns."""
    axes = {"1d": ("tp",), "2d": ("tp_col",), "2.5d": ("tp_col",), "3d": ("tp_row", "tp_col")}[mesh.tp_mode]
    return sum(number for (_, axis), number in found.items() if axis in axes)


def rounds(mesh: MeshConfig) -> int:
    """Messages that follow one another in one product."""
    if mesh.tp_mode == "1d":
        return 2 * (mesh.tp - 1)
    return mesh.grid[1] - (mesh.tp_mode == "3d")


def _row(mesh: MeshConfig, sizes: Sizes, is_real: bool, found: Found) -> Row:
    ranks, form = mesh.tp, pair_bytes(mesh, plan_of(mesh.tp_mode), sizes.rows, sizes.inner, sizes.outer, ITEMSIZE)
    published = PUBLISHED[mesh.tp_mode]
    weights, kept = 2 * sizes.inner * sizes.outer, sizes.rows * (2 * sizes.inner + sizes.outer)
    case = {
        "form": mesh.tp_mode, "ranks": ranks, "grid": "x".join(map(str, mesh.grid)) if mesh.tp_mode != "1d" else ranks,
        "process group": "gloo" if is_real else "fake", "published": ", ".join(published),
    }  # fmt: skip
    agrees = form == found.bytes
    return Row(case, {
        "computation": Number(found.flops / (6 * sizes.rows * weights), "of one rank"),
        "parameters": Number(found.parameter_bytes / (ITEMSIZE * weights), "of one rank"),
        "activations": Number(found.activation_bytes / (ITEMSIZE * kept), "of one rank"),
        "sent": Number(sum(found.bytes.values()), "bytes"),
        "of activations": Number(activation_bytes(mesh, found.bytes), "bytes"),
        "closed form / counted": Number(sum(form.values()) / sum(found.bytes.values()) if agrees else 0.0, "1 = equal"),
        "calls": Number(sum(found.calls.values()), "a step"),
        "rounds": Number(rounds(mesh), "a product"),
    })  # fmt: skip


def fitted(points: list[tuple[float, float]]) -> float:
    """The exponent of a power law through (size, bytes), by least squares of the logarithms."""
    xs, ys = ([math.log(point[i]) for point in points] for i in (0, 1))
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - x0) * (y - y0) for x, y in zip(xs, ys)) / sum((x - x0) ** 2 for x in xs)


def exponent(mode: str, rows: list[Row]) -> float | None:
    """Of the leading activation term of a form, in P or (2.5D) in d P; None where there are no two sizes."""
    points = {}
    for row in rows:
        if row.case["form"] == mode and row.numbers["of activations"].value:
            depth = int(str(row.case["grid"]).split("x")[0]) if EXPONENTS[mode][0] == "dP" else 1
            points[depth * int(row.case["ranks"])] = row.numbers["of activations"].value
    return fitted(sorted(points.items())) if len(points) > 1 else None


def _targets(rows: list[Row]) -> list[Target]:
    equal = min(row.numbers["closed form / counted"].value for row in rows)
    found = [Target(f"closed form / counted bytes, the least of {len(rows)} meshes", 1.0, equal)]
    for mode, (power, wanted) in EXPONENTS.items():
        if (measured := exponent(mode, rows)) is not None:
            what = f"leading activation term of {mode} ~ ({power})^{wanted:.3g}: 1 - |{measured:.4f} - ({wanted:.4f})|"
            found.append(Target(what, 0.999999, 1 - abs(measured - wanted)))
    return found


MEASURES = (
    "core/parallel",
    "core/placement",
    "core/comm",
    "benchmarks/ranks.py",
    "benchmarks/tensor_parallel_bytes.py",
    "benchmarks/tensor_parallel.py",
)
BENCHMARK = Benchmark("tensor_parallel", "Tensor parallelism: cost of a rank", measure, MEASURES)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="tensor_parallel"), sys.argv[1:]))
