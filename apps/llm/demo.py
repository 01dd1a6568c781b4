"""`make demo`: pretrain a small GPT on the source of this Python's standard library, and show what became of it.

The same command as anybody's, `llm pretrain --recipe demo`, one rank a core; then the held-out bits per byte beside
gzip and xz on the same bytes, and a sample that the Hugging Face folder writes through `transformers`.

The folder is runs/demo, or --out. What an earlier demo left there is replaced; a folder with anything else is refused.

Machines differ tenfold, and the demo is to take minutes on each. So it computes in bf16 only where that
is faster, and a short trial says how many of the recipe's steps fit.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from apps.llm.config import PretrainConfig
from apps.llm.corpus import heldout_bytes
from apps.llm.generate import GenerateConfig, write
from apps.llm.model import find_model
from apps.llm.pretrain import main as pretrain
from apps.llm.recipes import RECIPES, demo
from core.config import UserError, in_words, parse, run_command
from core.metrics import compression_baselines
from core.precision import Precision, bf16_units
from core.run_folder import made_anew

OUT = Path("runs/demo")
PROMPT = "def read_lines(path):\n"
MINUTES = 4.5
TRIAL_STEPS = 5
# What the evaluation at the end costs: some 85 batches are held out, and a forward is a third of a step.
EVALUATION_STEPS = 30


def main(argv: list[str]) -> int:
    given = ["--recipe", "demo", "--out", str(OUT)]
    config = parse(RECIPES, [*given, *argv], "python -m apps.llm.demo", default="demo")
    if not config.hf or config.stop_after or not config.data.heldout_fraction:
        raise UserError(
            "the demo shows held-out bits per byte and a sample from the Hugging Face folder of a whole run; leave out "
            "--no-hf, --stop-after and --data.heldout-fraction 0, or use megalith llm pretrain --recipe demo"
        )
    with made_anew(config.out):  # the demo always shows a run from scratch
        return trained_and_shown(config, given, argv)


def trained_and_shown(config: PretrainConfig, given: list[str], argv: list[str]) -> int:
    ranks, precision = num_ranks(config.data.global_batch), fastest_precision()
    options = [*given, "--precision", precision, "--nproc", str(ranks), *argv]
    if not any(argument.partition("=")[0] in ("--steps", "steps") for argument in argv):
        options += ["--steps", str(trial(config, options))]
    code = pretrain(options)
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


def fastest_precision() -> Precision:
    """The recipe's, but fp32 on a CPU that has no units for bf16."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return demo().precision if bf16_units(device) else "fp32"


def trial(config: PretrainConfig, options: list[str]) -> int:
    """Prepare the corpus, run a few steps, and say how many to take in earnest."""
    begin = time.perf_counter()
    folder = config.out / "trial"
    print("a few steps, to see how many fit into the minutes:")
    there = ["--out", str(folder), "--data.cache", config.data.cache or str(config.out.parent / "corpora")]
    if pretrain([*options, "--stop-after", str(TRIAL_STEPS), *there]):
        raise UserError("the demo's trial did not end well; what its ranks said stands above")
    summary = json.loads((folder / "summary.json").read_text())
    shutil.rmtree(folder)
    spent_s = max(time.process_time(), time.perf_counter() - begin)  # the former knows what importing cost
    # Starting the ranks again, export and sample take about as long as what came before.
    return steps_that_fit(config, 60 * MINUTES - 1.8 * spent_s, summary["tokens_per_s"])


def steps_that_fit(config: PretrainConfig, seconds: float, tokens_per_s: float) -> int:
    """The number of the run's steps that fit; at least a tenth of them, so that something is learned on any machine."""
    fit = int(seconds * tokens_per_s / (config.data.global_batch * config.data.sequence_length)) - EVALUATION_STEPS
    return min(config.steps, max(config.steps // 10, fit))


def show(summary: dict, folder: Path) -> None:
    """The table of the README, and what lies where."""
    console = Console(highlight=False)
    table = Table("", "", title="held-out source code, bits per byte", show_header=False)
    table.add_row("this model", f"{summary['heldout_bits_per_byte']:.3f}")
    table.add_row("gzip -9", f"{summary['gzip_bits_per_byte']:.3f}")
    table.add_row("xz -9", f"{summary['xz_bits_per_byte']:.3f}")
    console.print(table)
    table = Table("", "", title="the run", show_header=False)
    precision = json.loads((folder / "config.json").read_text())["precision"]
    done = f"{summary['step']} steps in {summary['wall_s']:.0f} s on {summary['num_ranks']} ranks, {precision}"
    table.add_row("training", done)
    table.add_row("throughput", f"{summary['tokens_per_s']:,.0f} tokens/s")
    table.add_row("MFU", f"{summary['mfu']:.0%} of what this machine's matrix products reach")
    table.add_row("peak memory", f"{in_words(summary['device_peak_bytes'])} of tensors a rank")
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
