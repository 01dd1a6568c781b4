"""The demo as a benchmark: what `make demo` learns in its minutes, beside what compressors make of the same bytes."""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from apps.llm.demo import OUT
from apps.llm.demo import main as demo
from benchmarks.result import Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import UserError, run_command

_UNITS = {
    "heldout_bits_per_byte": "bits/byte",
    "gzip_bits_per_byte": "bits/byte",
    "xz_bits_per_byte": "bits/byte",
    "tokens_per_s": "tokens/s",
    "mfu": "of the fastest matrix product here",
    "device_peak_bytes": "bytes",
    "wall_s": "s",
    "num_ranks": "",
}


def measure(options: Options) -> Measured:
    with TemporaryDirectory() as folder:  # what `make demo` left is not for a quick look to replace
        out = Path(folder) / "demo" if options.quick else OUT
        quick = ["--steps", "10", "--out", str(out), "--data.cache", str(OUT.parent / "corpora")]
        code = demo(quick if options.quick else [])
        if code:
            raise UserError(f"the demo ended with exit code {code}; no result")
        summary, config = (json.loads((out / f"{n}.json").read_text()) for n in ("summary", "config"))
    row = Row(
        {"recipe": "demo", "steps": summary["step"], "precision": config["precision"]},
        {name: Number(summary[name], unit) for name, unit in _UNITS.items()},
    )
    ratio = {name: summary[f"{name}_bits_per_byte"] / summary["heldout_bits_per_byte"] for name in ("gzip", "xz")}
    targets = (
        Target("gzip -9 / this model, bits per byte", 1.0, ratio["gzip"]),
        Target("xz -9 / this model, bits per byte (the ambition)", 1.0, ratio["xz"]),
        Target("300 s / training time", 1.0, 300 / summary["wall_s"]),
    )
    return Measured((row,), targets)


BENCHMARK = Benchmark("demo", "The demo", measure)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="demo"), sys.argv[1:]))
