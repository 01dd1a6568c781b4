"""How much memory drawing and training take of their process on a CPU, beside what `diffusion plan` says.

python -m tests.support.diffusion_memory 0 30     prints a line of json for each of the seeds 0 to 29
"""

import ctypes
import gc
import io
import json
import random
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from apps.diffusion import finetune, sample
from apps.diffusion.footprint import footprint
from apps.diffusion.pipeline import save_pipeline
from apps.diffusion.plan_config import DiffusionPlanConfig
from core.gemini.config import GeminiConfig
from core.parallel.recompute import RecomputeConfig
from core.runtime import process_holding
from tests.support.diffusion import narrow_pipeline
from tests.support.diffusion_training import write_pictures
from tests.support.resident import in_child, rise_of


@dataclass(frozen=True)
class Size:
    """A run with the narrow pipeline: `batch` pictures of so many pixels at once.

    budget  Gemini's, in smallest budgets in which the step runs
    """

    task: Literal["sample", "train"]
    pixels: int
    batch: int
    guided: bool = True
    method: Literal["full", "lora"] = "full"
    recompute: Literal["none", "full"] = "none"
    budget: float | None = None

    def plan(self, weights: Path) -> DiffusionPlanConfig:
        config = DiffusionPlanConfig(
            task=self.task,
            model=str(weights),
            batch=self.batch,
            pixels=self.pixels,
            precision="fp32",
            guided=self.guided,
            method=self.method,
            recompute=RecomputeConfig(self.recompute),
        )
        if self.budget is None:
            return config
        least = footprint(replace(config, gemini=GeminiConfig("1GB"))).least_bytes
        return replace(config, gemini=GeminiConfig(f"{int(self.budget * least)}B"))


@dataclass(frozen=True)
class Found:
    """Bytes: the rise of resident memory over a run of 64 px, and what the plan says; and the run's exit code."""

    rise: int
    planned: int
    code: int

    @property
    def allowed(self) -> int:
        """The most that the plan may say: 1.6 times the rise, and the part of `process_holding` that is constant."""
        return int(1.6 * self.rise) + process_holding(0)


def measured(size: Size) -> Found:
    """In a child of its own."""
    return in_child(_measured, size)


def random_size(seed: int) -> Size:
    draw = random.Random(seed)
    task = draw.choice(("sample", "train"))
    pixels, batch = 64 * draw.randint(1, 3), draw.randint(1, 3)
    if task == "sample":
        return Size("sample", pixels, batch, guided=draw.random() < 0.5)
    recompute, method = draw.choice(("none", "full")), draw.choice(("full", "lora"))
    budget = draw.choice((None, None, 1.02, 1.5))
    return Size("train", pixels, batch, method=method, recompute=recompute, budget=budget)


def _measured(size: Size) -> Found:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_pipeline(narrow_pipeline(0), folder / "narrow")
        write_pictures(folder / "pictures", 4, sizes=((size.pixels, size.pixels),))
        write_pictures(folder / "small", 4, sizes=((64, 64),))
        plan = size.plan(folder / "narrow")
        planned = footprint(plan).process_bytes
        _run(
            replace(size, pixels=64, batch=1), folder, "small", size.budget and "1GB"
        )  # imports, and what is made once
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what the small run has left is not to be used again unseen
        rise, code = rise_of(lambda: _run(size, folder, "pictures", plan.gemini.budget))
        return Found(rise, planned, code)


def _run(size: Size, folder: Path, pictures: str, budget: str | float | None) -> int:
    argv: list[Any] = ["--model", folder / "narrow", "--device", "cpu", "--precision", "fp32", "--steps", 2]
    argv += ["--out", folder / f"out-{pictures}"]
    if size.task == "sample":
        argv += ["--prompt", "a red circle", "--images", size.batch, "--batch", size.batch, "--width", size.pixels]
        argv += ["--height", size.pixels, "--guidance", 7.5 if size.guided else 1.0]
        run = sample.main
    else:  # the second step is taken beside the first one's checkpoint
        argv += ["--data.images", folder / pictures, "--data.global-batch", size.batch, "--checkpoint.every", 1]
        argv += ["--data.resolution", size.pixels, "--method", size.method, "--recompute.mode", size.recompute]
        argv += ["--log.no-tensorboard"]
        argv += [] if budget is None else ["--gemini.budget", budget]
        run = finetune.main
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return run([str(word) for word in argv])


if __name__ == "__main__":
    first, last = map(int, sys.argv[1:])
    for size in map(random_size, range(first, last)):
        found = measured(size)
        print(json.dumps({**asdict(size), **asdict(found), "share": found.planned / found.rise}), flush=True)
