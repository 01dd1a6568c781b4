"""`python -m core.kernels.tune [--out FOLDER] [KERNEL …]`: choose block sizes on the GPU that is here.

Every SPEC's timed cases run in each format, forward and backward, with the autotuner on (`core.kernels.blocks`); what
is fastest is written to FOLDER, by default the package's own, whose files are shipped. Nothing else tunes: a training
step or a request takes what is shipped for its chip, or the block sizes that are written beside the kernels.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from core.kernels import specs
from core.kernels.blocks import SHIPPED, autotune, chip, winners
from core.kernels.spec import Case, KernelSpec, forward_and_backward


def tune(spec: KernelSpec, cases: tuple[Case, ...], device: str) -> Iterator[str]:
    """Run the cases in all formats; what was chosen, a line each."""
    for case in cases:
        for dtype in spec.dtypes:
            before = winners()
            forward_and_backward(spec, spec.inputs(case, dtype, device, torch.Generator().manual_seed(0)))
            yield from (f"{name}: {blocks}" for name, blocks in winners().items() if name not in before)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m core.kernels.tune", description=__doc__)
    parser.add_argument("--out", type=Path, default=SHIPPED, metavar="FOLDER", help="by default the package's own")
    parser.add_argument("names", nargs="*", metavar="KERNEL")
    given, known = parser.parse_args(argv), specs()
    unknown = [name for name in given.names if name not in known]
    if unknown:
        print(f"error: no kernel '{unknown[0]}'; the kernels are {', '.join(known)}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("error: there is no GPU here, and block sizes are chosen by time; run it on one", file=sys.stderr)
        return 2
    autotune(given.out)
    for name in given.names or known:
        for line in tune(known[name], known[name].timed, "cuda"):
            print(line, flush=True)
    print(f"{given.out / chip()}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
