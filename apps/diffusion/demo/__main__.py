"""`make demo-diffusion`: teach the tiny pipeline a subject from four pictures, and show what became of it.

1. Draw four pictures of the subject, a teal star upside down, on white, black and gray grounds.
2. Train the detector on what the pipeline's VAE makes of drawn pictures, and paint the "before".
3. `diffusion dreambooth`, the same command as anybody's, with class pictures that the pipeline paints itself.
4. Paint the "after" with the same noise; show both side by side (PNG) with the detector's figures.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor

from apps.diffusion.demo.captions import GROUNDS, caption, subject_prompt, things
from apps.diffusion.demo.detector import Detector, train_detector
from apps.diffusion.demo.metrics import Paint, SubjectFigures, ceiling, drift_points, subject_figures
from apps.diffusion.demo.pictures import as_images, write_subject_folder
from apps.diffusion.demo.sheet import before_and_after
from apps.diffusion.dreambooth import main as dreambooth
from apps.diffusion.generate import PictureJob, Sampling, generate
from apps.diffusion.loading import load_pipeline
from apps.diffusion.pipeline import EMBEDDED, Pipeline
from core.config import UserError, parse, run_command
from core.run_folder import made_anew

SUBJECT = "subject"
BATCH = 8
AVERAGE = 0.95
"""decay of the weights' moving average: the last steps of so few pictures differ much"""
CAPTION_DROPOUT = 0.15
SAMPLING = Sampling(sampler="dpm++", steps=15, guidance=1.5)
"""with little guidance: more of it makes blots of stars on gray, before anything is taught"""
SHOWN = (
    *(subject_prompt(ground) for ground in GROUNDS),
    "a red star on a white ground",
    "a blue circle on a gray ground",
)


@dataclass(frozen=True)
class DemoConfig:
    """DreamBooth of a drawn subject, with its figures."""

    model: Path = EMBEDDED
    """the pipeline to start from; one of coloured shapes, as the figures are about them"""
    out: Path = Path("runs/demo-diffusion")
    steps: int = 500
    lr: float = 2.5e-4
    """of its first step; it falls to a tenth"""
    prior: bool = True
    """with class pictures (prior preservation); without them, see what they are for"""
    class_images: int = 240
    """class pictures, which the pipeline paints itself: of all 120 things equally many"""
    repeats: int = 4
    """pictures of each class thing that the figures are taken from, and a quarter of those of the subject a ground"""
    sampling_steps: int = SAMPLING.steps
    """of every picture that is painted; fewer are quicker, and worse"""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sampling_steps < 1:
            raise UserError(f"sampling_steps={self.sampling_steps}; a picture takes at least 1")

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        return {} if self.prior else {"class_images": "without class pictures; leave out --no-prior, or this"}


def main(argv: list[str]) -> int:
    config = parse({"demo": DemoConfig}, argv, "python -m apps.diffusion.demo", default="demo")
    show(run(config), config)
    return 0


def run(config: DemoConfig, detector: Detector | None = None) -> dict[str, Any]:
    """The demo's figures; its files are in config.out.

    detector  one of pictures as the pipeline's VAE gives them back; by default it is trained here
    """
    pipeline = load_pipeline(config.model)
    with made_anew(config.out):
        summary = figures_of(pipeline, config, detector)
        (config.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def figures_of(pipeline: Pipeline, config: DemoConfig, detector: Detector | None) -> dict[str, Any]:
    subject = write_subject_folder(config.out / SUBJECT, config.seed, captioned=True)
    detector = detector or train_detector(pipeline.vae, seed=config.seed)
    most = ceiling(pipeline.vae, detector, repeats=1, seed=config.seed + 7)
    before, shown_before = look(pipeline, config, detector)
    begin, cpu = time.perf_counter(), time.process_time()
    if dreambooth(options(config, subject)):
        raise UserError("DreamBooth did not end well; what it said stands above")
    spent = {"dreambooth_wall_s": time.perf_counter() - begin, "dreambooth_cpu_s": time.process_time() - cpu}
    after, shown_after = look(load_pipeline(config.out / "pipeline"), config, detector)
    before_and_after(subject, SHOWN, shown_before, shown_after).save(config.out / "before-after.png")
    figures = {"before": asdict(before), "after": asdict(after), "drift_points": drift_points(before, after)}
    return figures | {"ceiling": most, "steps": config.steps, "prior": config.prior, **spent}


def options(config: DemoConfig, subject: Path) -> list[str]:
    """The command line of `megalith diffusion dreambooth`."""
    return [
        *("--model", str(config.model), "--instance-dir", str(subject)),
        *(prior_options(config) if config.prior else ()),
        *("--data.global-batch", str(BATCH), "--train-text-encoder"),
        *("--optim.lr", str(config.lr), "--optim.schedule.shape", "cosine", "--average", str(AVERAGE)),
        *("--steps", str(config.steps), "--seed", str(config.seed), "--checkpoint.every", "0"),
        *("--out", str(config.out / "pipeline")),
    ]


def prior_options(config: DemoConfig) -> list[str]:
    """Class images of everything that captions can say: what no class image shows gets the subject's corners.

    They are painted without guidance, which on gray makes blots of shapes, and a part of them is learned without its
    caption, so that guidance goes on leading away from all that there is and not from the subject.
    """
    prompts = config.out / "class-prompts.txt"
    prompts.write_text("".join(f"{caption(thing)}\n" for thing in things()))
    return [
        *("--class-dir", str(config.out / "class"), "--class-prompts", str(prompts)),
        *("--num-class-images", str(config.class_images), "--class-sampling.guidance", "1"),
        *("--class-sampling.steps", str(config.sampling_steps)),
        *("--data.caption-dropout", str(CAPTION_DROPOUT)),
    ]


def painter(pipeline: Pipeline, sampling: Sampling = SAMPLING, batch: int = 32) -> Paint:
    """Pictures [B, 3, H, W] from -1 to 1 of prompts; the noise of picture b is of (seed, b)."""

    def paint(prompts: Sequence[str], seed: int) -> Tensor:
        jobs = [PictureJob(prompt, seed * 100_003 + index) for index, prompt in enumerate(prompts)]
        return torch.stack([picture for _, picture in generate(pipeline, jobs, sampling, batch)]).mul(2).sub(1)

    return paint


def look(pipeline: Pipeline, config: DemoConfig, detector: Detector) -> tuple[SubjectFigures, list[Image.Image]]:
    """The figures of a pipeline, and four pictures of each prompt that the sheet shows."""
    paint = painter(pipeline, replace(SAMPLING, steps=config.sampling_steps))
    figures = subject_figures(paint, detector, repeats=config.repeats, seed=config.seed + 1)
    return figures, as_images(paint([prompt for prompt in SHOWN for _ in range(4)], config.seed + 2))


def _as_seen(before: dict[str, Any], after: dict[str, Any]) -> Table:
    """The names that a viewer would give the pictures; the subject is right where colour and outline both are."""
    table = Table("as a viewer sees it", "before", "after", "called after")
    for ground, seen in after["subject_seen"].items():
        shares = (f"{figures['subject_seen'][ground]['all_three']:.0%}" for figures in (before, after))
        table.add_row(f"subject on {ground}", *shares, seen["mostly"])
    for name, what in (("shape", "shape"), ("colour", "colour"), ("ground", "ground"), ("all_three", "all three")):
        shares = (f"{figures['things_seen'][name]:.0%}" for figures in (before, after))
        table.add_row(f"everything: {what} right", *shares, "")
    return table


def show(summary: dict[str, Any], config: DemoConfig) -> None:
    console = Console(highlight=False)
    table = Table("by the detector", "before", "after", "after the VAE, drawn pictures")
    before, after, most = summary["before"], summary["after"], summary["ceiling"]
    table.add_row(
        "subject, on grounds it was seen on", *(f"{f['seen']:.2f}" for f in (before, after)), f"{most['subject']:.2f}"
    )
    table.add_row(
        "subject, on other grounds", *(f"{f['unseen']:.2f}" for f in (before, after)), f"{most['subject']:.2f}"
    )
    table.add_row(
        "subject in pictures of its class (leak)", *(f"{f['leak']:.3f}" for f in (before, after)), f"{most['leak']:.3f}"
    )
    for name, what in (("shape", "shape"), ("colour", "colour"), ("ground", "ground"), ("all_three", "all three")):
        table.add_row(
            f"class: {what} right",
            *(f"{f['class_attributes'][name]:.0%}" for f in (before, after)),
            f"{most[name]:.0%}",
        )
    console.print(table)
    console.print(_as_seen(before, after))
    print(
        f"drift of everything, as seen: {summary['drift_points']:.1f} points; {config.steps} steps of DreamBooth took "
        f"{summary['dreambooth_cpu_s']:.0f} s of CPU"
    )
    print(f"before and after  {config.out / 'before-after.png'}")
    print(f"the pipeline      {config.out / 'pipeline'}")


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
