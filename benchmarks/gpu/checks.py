"""Command A, first: every kernel against its reference in all formats, forward and backward.

A figure is the largest error of a family's cases in a format, as a share of what its SPEC allows. On a CPU kernels run
by Triton's interpreter, in fp32 alone; tests/kernels has the other formats.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

from benchmarks import kernels
from benchmarks.gpu.protocol import Entry, Phase, Where
from benchmarks.result import Number, Row
from core.kernels import specs
from core.kernels.operator import forced


def phases(where: Where) -> list[Phase]:
    entries = [Entry(f"{name} is right", partial(check, name), most_s=180) for name in specs()]
    return [Phase(entries, where.untimed_workers)]


def check(name: str, where: Where) -> Iterator[Row]:
    """Raises AssertionError after all formats were looked at, where one is off."""
    spec, red = specs()[name], []
    cases = spec.cases[:1] if where.quick else spec.cases
    for dtype in spec.dtypes if where.on_gpu else spec.dtypes[:1]:
        with nullcontext() if where.on_gpu else forced():
            errors = [kernels.error_of(spec, case, dtype) / spec.tolerance[dtype] for case in cases]
        worst = max(errors)
        said = str(dtype).removeprefix("torch.")
        if not worst <= 1:
            red.append(f"{said}, {dict(cases[errors.index(worst)])}: {worst:.3g} times what is allowed")
            continue
        yield Row({"kernel": name, "dtype": said}, {"error": Number(worst, "of what is allowed")})
    if red:
        raise AssertionError("; ".join(red))
