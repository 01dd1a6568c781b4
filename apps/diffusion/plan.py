"""`diffusion plan`: the memory and the time of sampling or of training at full size, before anything is loaded.

    diffusion plan --model sd_v1 --scheme int8 --precision fp16 --memory 4GiB
    diffusion plan --task train --model sd_v2_base --batch 16 --recompute.mode full --gemini.budget 5.2GiB
    diffusion plan --recipe dreambooth_6gb

How it is counted: `apps.diffusion.footprint`.
"""

import sys

from rich.console import Console
from rich.table import Table

from apps.diffusion.footprint import STEPS, Footprint, footprint, pixels_of, shape_of
from apps.diffusion.plan_config import RECIPES, DiffusionPlanConfig, without_effect
from core.config import in_words, option, parse, time_in_words, typed
from core.trace.machine import SHARE_OF_PEAK

NO_TIME = "how long a CPU takes is not foreseen; --gpu, such as A100, plans for a GPU, and says"

MEASURED = (
    f"seconds are as Gemini sees them before a first step: copies as measured on this CPU now, computing at "
    f"{SHARE_OF_PEAK:.0%} of what its products reach"
)


def main(argv: list[str]) -> int:
    config = parse(RECIPES, argv, "megalith diffusion plan", default="default")
    found = footprint(config)
    side = pixels_of(config, shape_of(config))
    title = f"{config.model}, {config.task}, {config.batch} of {side} x {side} px, {config.format}"
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_table(found, title))
    if found.said:
        console.print(found.said)
    console.print(_process(found))
    console.print(_time(config, found) if config.kind == "cuda" else MEASURED if config.measured else NO_TIME)
    if ignored := sorted(typed(argv, config) & without_effect(config)):
        console.print(f"the plan is the same without {', '.join(map(option, ignored))}")
    if (line := _fits(config, found)) is not None:
        console.print(line)
    return 0


def _table(found: Footprint, title: str) -> Table:
    table = Table("on a device", "bytes", title=title)
    for name, num_bytes in found.resident.items():
        table.add_row(name, in_words(num_bytes))
    fullest = max(found.moments, key=lambda name: found.moments[name])
    for name, num_bytes in found.moments.items():
        table.add_row(f"{name}, at its fullest" if name == fullest else f"({name})", in_words(num_bytes))
    table.add_row("together", in_words(found.peak_bytes))
    if found.host_bytes:
        table.add_row("on the host", in_words(found.host_bytes))
    return table


def _process(found: Footprint) -> str:
    fullest = max(found.on_cpu, key=lambda name: found.on_cpu[name])
    return (
        f"on a CPU the process takes {in_words(found.process_bytes)}, most of it in {fullest} "
        f"({in_words(found.on_cpu[fullest])} of tensors)"
    )


def _time(config: DiffusionPlanConfig, found: Footprint) -> str:
    """Parts of a second that matter, and what they come to."""
    whole = sum(found.seconds.values())
    parts = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in found.seconds.items())
    of = f"at {config.utilisation:.0%} of the {config.sheet}'s peak ({parts})"
    if config.task == "sample":
        return f"{config.batch} picture{'s' * (config.batch > 1)} in {whole:.3g} s {of}"
    steps = config.steps or STEPS["train"]
    pictures = config.batch * config.nproc / whole
    return f"a step in {whole:.3g} s {of}; {pictures:.3g} pictures/s, {steps:,} steps in {time_in_words(steps * whole)}"


def _fits(config: DiffusionPlanConfig, found: Footprint) -> str | None:
    advice = "try --gemini.budget {memory}, --recompute.mode full, --optim.name adamw8bit"
    if config.task == "sample":
        advice = "try --scheme int8, --vae-tile 256 or a smaller --batch"
    if config.kind == "cpu":
        return config.fits(found.process_bytes, advice, "CPU")
    return config.fits(found.peak_bytes, advice)
