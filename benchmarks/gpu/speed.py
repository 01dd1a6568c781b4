"""Command B, first: one size of every family of kernels, beside torch's operators, its fused ones, and SDPA's backends.

The roofline is measured first, in the same process; each family after it is an entry. No torch.compile: it takes longer
than all else.
"""

from collections.abc import Iterator
from functools import cache, partial

import torch

from benchmarks import kernels
from benchmarks.gpu.protocol import Entry, Phase, Where
from benchmarks.result import Number, Row, Target
from core.kernels import specs


def phases(where: Where) -> list[Phase]:
    families = [Entry(f"{name}, speed", partial(family, name), least_s=8, most_s=60) for name in specs()]
    return [Phase([Entry("roofline", roofline_rows, most_s=60), *families])]


def formats(where: Where) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16,) if where.on_gpu else (torch.float32,)


@cache
def roofline(where: Where) -> kernels.Roofline:
    return kernels.measure_roofline((torch.float32, *(d for d in formats(where) if d != torch.float32)))


def roofline_rows(where: Where) -> Iterator[Row | str]:
    yield from kernels.absent_peers()
    found = roofline(where)
    yield Row({"what": "copy of 256 MiB"}, {"bandwidth": Number(found.bandwidth / 1e9, "GB/s")})
    for dtype, flops in found.flops.items():
        yield Row({"what": f"matrix product in {dtype}"}, {"arithmetic": Number(flops / 1e12, "TFLOP/s")})


def family(name: str, where: Where) -> Iterator[Row | str]:
    spec = specs()[name]
    case = (spec.cases if where.quick else spec.timed)[0]
    dtypes = [d for d in formats(where) if d in spec.dtypes] or list(spec.dtypes[:1])
    kernels.check_green(spec, tuple(dtypes))
    for dtype in dtypes:
        notes: list[str] = []
        yield from kernels.rows_of(spec, case, dtype, roofline(where), compiled=False, failed=notes.append)
        yield from notes


def targets(figures: list[Row]) -> list[Target]:
    """Those of `benchmarks.kernels`: shares of the roofline."""
    alike = [Row({k: v for k, v in row.case.items() if k != "entry"}, row.numbers) for row in figures]
    timed = [row for row in alike if "contender" in row.case and "kernel" in row.case]
    return [t for row in timed if row.case["contender"] == "ours" for t in kernels.targets_of(row, timed)]
