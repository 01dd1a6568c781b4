"""Command C, third: Stable Diffusion v1 with random weights at 512 px: DreamBooth's steps, and pictures.

DreamBooth is the command, watched from outside (`benchmarks.dreambooth_run`): 1 + 1 pictures a step, the U-Net alone,
in bf16. Sampling: four pictures at once by DDIM with guidance.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from apps.diffusion.generate import PictureJob as Picture
from apps.diffusion.generate import Sampling, generate
from apps.diffusion.loading import load_pipeline
from apps.diffusion.shapes import SD_V1, Shape
from benchmarks.dreambooth import DreamBoothJob, narrow_job, numbers_of, our_command, watched, write_inputs
from benchmarks.dreambooth_run import WARM_UP
from benchmarks.gpu.protocol import Entry, Phase, Where
from benchmarks.result import Number, Row

STEPS, PICTURES = 20, 4


def phases(where: Where) -> list[Phase]:
    return [Phase([Entry("Stable Diffusion", run, least_s=60, most_s=150)])]


def run(where: Where) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="pictures-") as name:
        folder = Path(name) / "sd"
        shape, job, title = _job(folder, where)
        write_inputs(folder, shape, job.pixels)
        seen = watched(our_command(job, folder / "out"), folder / "out.json")
        yield Row({"model": title, "work": "DreamBooth, 1 + 1"}, numbers_of([seen]))
        yield from _sampled(job, title, where)


def _job(folder: Path, where: Where) -> tuple[Shape, DreamBoothJob, str]:
    shape, job, title, _ = narrow_job(folder, quick=True)
    if where.quick:
        return shape, job, title
    return SD_V1, replace(job, pixels=512, steps=WARM_UP + 15, bf16=where.on_gpu), "v1, 512 px"


@torch.no_grad()
def _sampled(job: DreamBoothJob, title: str, where: Where) -> Iterator[Row]:
    pipeline = load_pipeline(job.weights)
    for module in pipeline.modules.values():
        module.to(where.device, torch.bfloat16 if where.on_gpu else torch.float32)
    sampling = Sampling("ddim", 2 if where.quick else STEPS, 7.5)
    pictures = [Picture("a red circle", number) for number in range(1 if where.quick else PICTURES)]
    taken = []
    for _ in range(2):  # the first compiles and chooses
        began = time.perf_counter()
        found = torch.stack([picture.cpu() for _, picture in generate(pipeline, pictures, sampling, len(pictures))])
        taken.append(time.perf_counter() - began)
    if not bool(found.float().isfinite().all()):
        raise ArithmeticError("a picture is not finite")
    numbers = {"picture": Number(taken[-1] / len(pictures), "s")}
    yield Row({"model": title, "work": f"{len(pictures)} pictures, {sampling.steps} steps"}, numbers)
