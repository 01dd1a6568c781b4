"""Serving BLOOM-560M's shape beside other engines, llama.cpp among them: `benchmarks.serving` with fewer requests.

llama.cpp reads BLOOM and no OPT; it is the strongest peer for one sequence. With --full as many rounds as for OPT.
At 32 sequences the other engines are loaded one after another: all at once need more than 24 GB of memory.
transformers' continuous batching, which has no fast attention with ALiBi, is left out.
"""

import sys
from dataclasses import replace

from benchmarks.result import Measured
from benchmarks.run import Benchmark, Options, main
from benchmarks.serving import MEASURES, Size, Turns, measured, sizes
from core.config import run_command
from core.models import SHAPES


def measure(options: Options) -> Measured:
    if options.quick:
        return measured([replace(size, apart=True) for size in sizes(options)[1:]], options)
    turns = (Turns(1, 2, 3), Turns(8, 12, 3)) if options.full else (Turns(1, 2, 2), Turns(8, 8, 1))
    size = Size("bloom_560m", SHAPES["bloom_560m"], turns, (16, 128), (8, 64))
    return measured([size, replace(size, turns=(Turns(32, 40, 1),), apart=True)], options)


BENCHMARK = Benchmark("serving_bloom", "Serving BLOOM", measure, (*MEASURES, "benchmarks/serving_bloom.py"))

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="serving_bloom"), sys.argv[1:]))
