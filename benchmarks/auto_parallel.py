"""The search for a plan of any module: seconds and memory of trace, build and solve, each model in its own process.

search       GPT-3's 96 layers and the shape of Llama-3 8B (32 layers) on 8 x 8 ranks, 32 layers of which no two are
             alike, and some of the forty tiny models on 2 x 2; beside what the peer, meta-pytorch/autoparallel,
             published for 32 layers on 64 GPUs. It wants a GPU and a nightly torch, and does not run here
layouts      bytes of DTensor's redistribution and ours (`benchmarks.layout_conversion`)
checkpoints  torch's activation_memory_budget beside our segments (`benchmarks.checkpointing`)
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks import checkpointing, layout_conversion
from benchmarks.result import ROOT, Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import UserError, run_command

LARGE = {
    "GPT-3, 96 layers": "gpt3",
    "Llama-3 8B, 32 layers": "llama3_8b",
    "32 unlike layers": "unlike",
}
TINY = ("gpt2", "llama", "bert", "t5", "vit", "swin", "resnet", "whisper", "unet_2d_condition", "evoformer")
PUBLISHED_S, PUBLISHED_GIB = {"trace": 13.4, "build": 15.5, "solve": 17.5}, 2.76
"""Of autoparallel: Llama-3 8B, 32 layers, 64 GPUs (its pull request 521, July 2026)."""
MOST_S, MOST_GIB, MOST_GAP = 20.0, 1.0, 0.1
"""What GPT-3 may take, and per cent."""


def measure(options: Options) -> Measured:
    if options.quick:
        rows = [row_of("5 layers", search("small", [2])), row_of("GPT-2, tiny", search("gpt2", [2]), "2")]
        return Measured(tuple(rows), (), NOTES)
    figures = [published()]
    for name, model in LARGE.items():
        figures.append(row_of(name, search(model, [8, 8]), "8 x 8"))
        options.kept(figures[-1])
    targets = targets_of({str(row.case["model"]): row for row in figures})
    for model in TINY:
        figures.append(row_of(f"{model}, tiny", search(model, [2, 2]), "2 x 2"))
        options.kept(figures[-1])
    figures += [_part("layouts", row) for row in (layout_conversion.beside_dtensor((2, 2)),)]
    beside_torch = checkpointing.measure(replace(options, kept=lambda row: None))
    figures += [_part("checkpoints", row) for row in beside_torch.figures]
    return Measured(tuple(figures), (*targets, *beside_torch.targets), (*NOTES, *beside_torch.notes))


NOTES = (
    "seconds: of a process that has torch, transformers and SciPy imported; peak: its resident memory at the most, "
    "with what it imported. Steps are of 64 x 2,048 tokens on 8 x 8, forward, backward and gradients.",
    "published: the peer's own figures on its own machine.",
)


def search(model: str, mesh: Sequence[int]) -> dict[str, float]:
    given = json.dumps({"model": model, "mesh": list(mesh)})
    command = [sys.executable, "-m", "benchmarks.auto_parallel_search", given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"the search for {model} on {mesh} failed: {(done.stderr or '').strip().splitlines()[-1:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def row_of(name: str, found: dict[str, float], mesh: str = "2") -> Row:
    parts = {part: found[f"{part}_s"] for part in PUBLISHED_S}
    numbers = {part: Number(seconds, "s") for part, seconds in parts.items()}
    numbers |= {
        "all": Number(sum(parts.values()), "s"),
        "peak": Number(found["peak_bytes"] / 2**30, "GiB"),
        "imported": Number(found["before_bytes"] / 2**30, "GiB"),
        "gap": Number(100 * found["gap"], "%"),
        "operators": Number(found["operators"], ""),
        "decided": Number(found["nodes"], "nodes"),
    }
    return Row({"part": "search", "model": name, "mesh": mesh}, numbers)


def published() -> Row:
    numbers = {part: Number(seconds, "s") for part, seconds in PUBLISHED_S.items()}
    numbers |= {"all": Number(sum(PUBLISHED_S.values()), "s"), "peak": Number(PUBLISHED_GIB, "GiB")}
    return Row({"part": "search", "model": "autoparallel, Llama-3 8B, published", "mesh": "64"}, numbers)


def targets_of(rows: dict[str, Row]) -> list[Target]:
    def of(name: str, number: str) -> float:
        return rows[name].numbers[number].value

    gpt3, llama, _ = LARGE
    return [
        Target(f"{MOST_S:g} s / seconds, {gpt3} on 8 x 8", 1.0, MOST_S / of(gpt3, "all")),
        Target(f"{MOST_GIB:g} GiB / peak, {gpt3} on 8 x 8", 1.0, MOST_GIB / of(gpt3, "peak")),
        Target(f"100 % - gap, {gpt3} on 8 x 8", 100 - MOST_GAP, 100 - of(gpt3, "gap")),
        Target(f"autoparallel's published seconds / ours, {llama}", 1.0, sum(PUBLISHED_S.values()) / of(llama, "all")),
        Target(f"autoparallel's published peak / ours, {llama}", 1.0, PUBLISHED_GIB / of(llama, "peak")),
    ]


def _part(part: str, row: Row) -> Row:
    return Row({"part": part, **row.case}, row.numbers)


BENCHMARK = Benchmark(
    "auto_parallel",
    "Plans of any module: seconds, memory and gap of the search",
    measure,
    measures=(
        "core/auto",
        "core/trace",
        "benchmarks/auto_parallel.py",
        "benchmarks/auto_parallel_search.py",
    ),
)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="auto_parallel"), sys.argv[1:]))
