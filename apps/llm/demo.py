"""`make demo`: pretrain a small GPT on the source of this Python's standard library, and show what became of it.

The same command as anybody's, `llm pretrain --recipe demo`, one rank a core; then the held-out bits per byte beside
gzip and xz on the same bytes, and a sample that the Hugging Face folder writes through `transformers`.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from apps.llm.corpus import heldout_bytes
from apps.llm.generate import GenerateConfig, write
from apps.llm.model import find_model
from apps.llm.pretrain import main as pretrain
from apps.llm.recipes import demo
from core.config import run_command
from core.metrics import compression_baselines

PROMPT = "def read_lines(path):\n"


def main(argv: list[str]) -> int:
    config = demo()
    if config.out.exists():
        shutil.rmtree(config.out)  # the demo always shows a run from scratch
    code = pretrain(["--recipe", "demo", "--nproc", str(num_ranks(config.data.global_batch)), *argv])
    if code:
        return code
    baselines = compression_baselines(heldout_bytes(config.data))
    path = config.out / "summary.json"
    summary = json.loads(path.read_text()) | baselines
    path.write_text(json.dumps(summary, indent=2) + "\n")
    show(summary, config.out)
    return 0


def num_ranks(global_batch: int) -> int:
    """One rank on a GPU; else one a core, as far as the batch divides and rows are left for each."""
    if torch.cuda.is_available():
        return 1
    most = min(os.cpu_count() or 1, global_batch // 2)
    return max(n for n in range(1, most + 1) if global_batch % n == 0)


def show(summary: dict, folder: Path) -> None:
    """The table of the README, and what lies where."""
    console = Console(highlight=False)
    table = Table("", "", title="held-out source code, bits per byte", show_header=False)
    table.add_row("this model", f"{summary['heldout_bits_per_byte']:.3f}")
    table.add_row("gzip -9", f"{summary['gzip_bits_per_byte']:.3f}")
    table.add_row("xz -9", f"{summary['xz_bits_per_byte']:.3f}")
    console.print(table)
    table = Table("", "", title="the run", show_header=False)
    table.add_row("training time", f"{summary['wall_s']:.0f} s on {summary['num_ranks']} ranks")
    table.add_row("throughput", f"{summary['tokens_per_s']:,.0f} tokens/s")
    table.add_row("MFU", f"{summary['mfu']:.0%} of what this machine's matrix products reach")
    table.add_row("peak memory", f"{summary['device_peak_bytes'] / 1e6:,.0f} MB of tensors a rank")
    table.add_row("loss curve", str(folder / "loss.png"))
    table.add_row("metrics", str(folder / "metrics.jsonl"))
    table.add_row("Hugging Face folder", str(folder / "hf"))
    console.print(table)
    console.print("a sample:\n")
    source = find_model(folder / "hf")
    print(PROMPT, end="")
    options = GenerateConfig(prompt=PROMPT, max_new_tokens=120, temperature=0.7)
    write(source.load(), source.tokenizer(), options, seed=0, show=lambda text: print(text, end="", flush=True))
    print()


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
