"""`make demo-disk`: train a model of ten times the device's budget and three times the host's, and show where it lies.

The same command as anybody's, `llm pretrain` with `--gemini.budget`, `--gemini.host` and `--gemini.disk`: half of the
steps, then the checkpoint is thrown away and the run goes on from the disk alone. Shown are memory by tier over a step,
as it was planned and as it was, and the step's time beside the plan's.

The folder is runs/demo-disk, or --out. What an earlier demo left there is replaced.
"""

import contextlib
import io
import json
import re
import shutil
import statistics
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from apps.llm.config import PretrainConfig
from apps.llm.pretrain import main as pretrain
from apps.llm.recipes import RECIPES
from core.config import UserError, in_words, parse, run_command
from core.models.decoder import decoder_without_memory
from core.run_folder import made_anew

OUT = Path("runs/demo-disk")
MODEL = ("--model.dim", "256", "--model.num-layers", "24", "--model.num-heads", "4", "--model.ffn-dim", "1024")
STEPS, TOKENS = 12, 128
BYTES_PER_PARAMETER = 16
"""Parameter, gradient and AdamW's two moments, all in fp32."""


def main(argv: list[str]) -> int:
    batch = ("--data.global-batch", "1", "--data.sequence-length", str(TOKENS), "--recompute.mode", "full")
    given = ["--recipe", "debug", *MODEL, *batch, "--no-hf", "--zero", "3", "--steps", str(STEPS), "--out", str(OUT)]
    given += ["--checkpoint.every", "0", "--data.heldout-fraction", "0"]
    config = parse(RECIPES, [*given, *argv], "python -m apps.llm.demo_disk", default="debug")
    if config.gemini.disk is not None or config.stop_after or config.resume:
        raise UserError(
            "the demo brings its own disk folder and stops by itself; leave out --gemini.disk, --stop-after and "
            "--resume, or use megalith llm pretrain"
        )
    with made_anew(config.out):
        return trained_and_shown(config, [*given, *argv])


def trained_and_shown(config: PretrainConfig, options: list[str]) -> int:
    model_bytes = BYTES_PER_PARAMETER * sum(p.numel() for p in decoder_without_memory(config.model).parameters())
    budgets = [*("--gemini.budget", f"{model_bytes // 10}B"), *("--gemini.host", f"{model_bytes // 3}B")]
    disk, figure = config.out / "disk", config.out / "memory.png"
    options = [*options, *budgets, "--gemini.disk", str(disk), "--gemini.figure", str(figure)]
    said = _Said(sys.stdout)
    with contextlib.redirect_stdout(said):
        code = pretrain([*options, "--stop-after", str(config.steps // 2)])
        if code:
            return code
        shutil.rmtree(config.out / "checkpoints")  # what goes on is on the disk
        if code := pretrain([*options, "--resume"]):
            return code
    show(config.out, model_bytes, said.kept.getvalue())
    shutil.rmtree(disk)
    return 0


class _Said(io.TextIOBase):
    """Writes on, and keeps what was written."""

    def __init__(self, stream: io.TextIOBase | object):
        self._stream, self.kept = stream, io.StringIO()

    def write(self, text: str) -> int:
        self.kept.write(text)
        return self._stream.write(text)  # pyright: ignore[reportAttributeAccessIssue]

    def flush(self) -> None:
        self._stream.flush()  # pyright: ignore[reportAttributeAccessIssue]


def show(folder: Path, model_bytes: int, said: str) -> None:
    """The table: budgets and what was taken of them; the plan's seconds beside those of the run."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured_s = statistics.median(TOKENS / row["tokens_per_s"] for row in rows[2:])
    planned = re.findall(r"a step takes about ([\d.e-]+) s", said)
    table = Table("", "", title="a model that fits into neither device nor host", show_header=False)
    table.add_row("model data", f"{in_words(model_bytes)}: parameters, gradients, AdamW's moments")
    table.add_row("on the device at most", f"{in_words(summary['device_peak_bytes'])} of {in_words(model_bytes // 10)}")
    table.add_row(
        "on the host at most", f"{in_words(summary['gemini_host_peak_bytes'])} of {in_words(model_bytes // 3)}"
    )
    table.add_row("a step", f"{measured_s:.2f} s, planned {float(planned[-1]):.2f} s")
    table.add_row(
        "loss", f"{rows[0]['loss']:.3f} -> {rows[-1]['loss']:.3f}, from step {len(rows) // 2} by the disk alone"
    )
    table.add_row("memory by tier", str(folder / "memory.png"))
    Console(highlight=False).print(table)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
