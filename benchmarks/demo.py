"""The demo as a benchmark: what `make demo` learns in its minutes, beside what compressors make of the same bytes."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from apps.llm.demo import OUT
from apps.llm.demo import main as demo
from benchmarks.result import ROOT, Measured, Number, Row, Target
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


QUICK = ("--steps=2", "--model.dim=32", "--model.ffn-dim=32", "--model.num-layers=1", "--nproc=1")


def measure(options: Options) -> Measured:
    if options.quick:
        # In a folder of its own: what `make demo` trained stays, and is served.
        with tempfile.TemporaryDirectory(prefix="demo-benchmark-") as folder:
            out, cache = Path(folder) / "demo", ROOT / "runs" / "corpora"
            summary, config = _trained(out, [*QUICK, f"--out={out}", f"--data.cache={cache}"])
    else:
        summary, config = _trained(OUT, [])
    row = Row(
        {
            "recipe": "demo",
            "optimizer": config["optim"]["name"],
            "steps": summary["step"],
            "precision": config["precision"],
        },
        {name: Number(summary[name], unit) for name, unit in _UNITS.items()},
    )
    ratio = {name: summary[f"{name}_bits_per_byte"] / summary["heldout_bits_per_byte"] for name in ("gzip", "xz")}
    targets = (
        Target("gzip -9 / this model, bits per byte", 1.0, ratio["gzip"]),
        Target("xz -9 / this model, bits per byte (the ambition)", 1.0, ratio["xz"]),
        Target("300 s / training time", 1.0, 300 / summary["wall_s"]),
    )
    return Measured((row,), targets)


def _trained(out: Path, argv: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """summary.json and config.json of the demo."""
    if code := demo(argv):
        raise UserError(f"the demo ended with exit code {code}; no result")
    summary, config = (json.loads((out / f"{name}.json").read_text()) for name in ("summary", "config"))
    return summary, config


MEASURES = (
    "apps/llm",
    "core/train",
    "core/models",
    "core/nn",
    "core/optim",
    "core/parallel",
    "core/placement",
    "core/data",
    "benchmarks/demo.py",
)
BENCHMARK = Benchmark("demo", "The demo", measure, MEASURES)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="demo"), sys.argv[1:]))
