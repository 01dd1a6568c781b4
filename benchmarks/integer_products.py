"""Products of integers with an 8-bit weight on a CPU, kernel by kernel: those that are exact here, and which is taken.

Shapes are those of OPT-125M, the head among them; one row is a written token, hundreds are a prompt. The least of some
calls, in turns, one thread, weights in a cache where they fit it. `taken` is the kernel that `core.quant.integers` has
chosen for about that many rows, by a measurement of its own with weights that come from memory.
"""

import sys

import torch

from benchmarks.result import Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import UserError, run_command
from core.kernels.timing import least_seconds
from core.quant.integers import _KERNELS, Codes, exact_kernels, fastest, packed_integers

SHAPES = ((768, 768), (3072, 768), (768, 3072), (50_272, 768))
ROWS = (1, 8, 64, 420)
CALLS = 3


def measure(options: Options) -> Measured:
    torch.set_num_threads(1)
    shapes, rows = (((96, 64),), (1, 8)) if options.quick else (SHAPES, ROWS)
    figures = [_row(channels, columns, number) for channels, columns in shapes for number in rows]
    reached = min(row.numbers["fastest"].value / row.numbers["taken"].value for row in figures)
    target = Target(f"seconds of the fastest kernel / of that taken, the least of {len(figures)} shapes", 0.8, reached)
    return Measured(tuple(figures), (target,), (f"kernels that are exact here: {', '.join(exact_kernels())}",))


def _row(channels: int, columns: int, rows: int) -> Row:
    generator = torch.Generator().manual_seed(0)
    codes_OI = torch.randint(-127, 128, (channels, columns), dtype=torch.int8, generator=generator)
    scale_O = torch.rand(channels, generator=generator)
    has_form = "form" in exact_kernels()
    codes = Codes(codes_OI, scale_O, packed_integers(codes_OI, scale_O) if has_form else None)
    q_RI = torch.randint(1, 256, (rows, columns), dtype=torch.uint8, generator=generator)
    names = exact_kernels()
    results = [_KERNELS[name](q_RI, codes) for name in names]  # what is made at a first call is made
    if not all(torch.equal(result, results[0]) for result in results):
        raise UserError(f"{', '.join(names)} differ at {rows} x {columns} by {channels}; nothing is timed")
    seconds = {name: least_seconds(lambda name=name: _KERNELS[name](q_RI, codes), CALLS) for name in names}
    taken = fastest(channels, columns, rows, has_form)
    numbers = {name: Number(each, "s") for name, each in seconds.items()}
    numbers |= {"taken": Number(seconds[taken], "s"), "fastest": Number(min(seconds.values()), "s")}
    return Row({"channels": channels, "columns": columns, "rows": rows, "which is taken": taken}, numbers)


BENCHMARK = Benchmark(
    "integer_products",
    "Products of integers with an 8-bit weight",
    measure,
    ("core/quant/integers.py", "core/kernels/vnni.py", "core/kernels/timing.py", "benchmarks/integer_products.py"),
)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="integer_products"), sys.argv[1:]))
