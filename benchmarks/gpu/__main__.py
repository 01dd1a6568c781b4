"""`python -m benchmarks.gpu a|b|c|d --out DIR [--minutes M] [--only TEXT ...] [--device cpu --quick]`; see docs/gpu.md.

From a plain checkout: what is not installed comes from .gpu-pack (`make gpu-pack`), which is not installed either.
`python -m benchmarks.gpu tests` is `make gpu`: the tests that are marked gpu, in fourteen processes.
`python -m benchmarks.gpu shown RESULT ...` makes the table of what kernels have shown, from results of a and b.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.gpu.packed import Unusable, use_pack

COMMANDS = ("a", "b", "c", "d", "tests", "shown")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("command", choices=COMMANDS, help="; ".join(SAID))
    parser.add_argument("results", nargs="*", type=Path, metavar="RESULT", help="of shown: files that a and b wrote")
    parser.add_argument("--out", type=Path, help="folder of the results; needed but by tests and shown")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to see that it runs")
    parser.add_argument("--quick", action="store_true", help="sizes that take seconds and measure nothing")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which it ends, whatever is left to do")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="the entries whose names have one of these in them")
    given = parser.parse_intermixed_args(argv)  # options may stand before the results
    if bool(given.results) != (given.command == "shown"):
        parser.error("shown RESULT ... takes the files that a and b wrote, and the other commands take none")
    if given.command == "shown":
        return _shown(given.results, given.out)
    if given.out is None and given.command != "tests":
        parser.error(f"{given.command} needs --out FOLDER, where its results go")
    if given.device == "cpu" and not given.quick and given.command != "tests":
        parser.error("--device cpu is to see that a command runs; give --quick with it")
    if not 0.5 <= given.minutes <= 60:
        parser.error(f"--minutes {given.minutes:g}: from 0.5 to 60")
    try:
        taken = use_pack()
    except Unusable as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if taken:
        print(f"from .gpu-pack, not installed here: {', '.join(taken)}", flush=True)
    from benchmarks.gpu import protocol, suite

    if given.command == "tests":
        return suite.main(given.device)
    part = protocol.Part(given.minutes, tuple(given.only or ()))
    return protocol.main(given.command, given.out, protocol.Where(given.device, given.quick), part)


def _shown(results: list[Path], out: Path | None) -> int:
    from benchmarks.gpu import shown
    from core.config import UserError

    try:
        shown.main(results, out or shown.FOLDER)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


SAID = (
    "a: kernels against references, then the tests of a GPU",
    "b: kernels' and decoding's speed",
    "c: training, offload, fold and diffusion",
    "d: what no GPU has measured yet, what is worth most first",
    "tests: the tests of a GPU alone",
    "shown: the table of what kernels have shown",
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
