"""Class images of prior preservation, drawn by the pipeline itself before it learns (Ruiz et al. 2023, section 3.3).

The ranks of a run share the drawing. A picture depends on the seed and its number alone, and appears when it is whole,
so a run that was stopped while drawing goes on.
"""

import itertools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from apps.diffusion.config import FinetuneConfig
from apps.diffusion.data.folder import image_files
from apps.diffusion.generate import Job, Sampling, generate
from apps.diffusion.images import save_png, to_pil
from apps.diffusion.pipeline import Pipeline
from core.precision import compute_dtype
from core.runtime import Runtime


def draw_class_images(config: FinetuneConfig, load: Callable[[torch.dtype], Pipeline], runtime: Runtime) -> None:
    """Fill --class-dir up to --num-class-images with pictures of --class-prompt.

    load  format of the weights -> the pipeline that draws
    """
    assert config.class_dir is not None
    assert config.class_prompt is not None
    names = _missing(config.class_dir, config.num_class_images)
    if runtime.world_size > 1:
        dist.barrier()  # nobody draws before everybody has looked
    if not names:
        return
    if runtime.leads:
        print(f"drawing {len(names)} images of {config.class_prompt!r} into {config.class_dir}")
    own = names[runtime.rank :: runtime.world_size]
    pipeline = load(compute_dtype(config.precision)).to(runtime.device)
    side = config.data.resolution
    sampling = Sampling(height=side, width=side)
    jobs = [Job(config.class_prompt, config.seed + number) for number, _ in own]
    for (_, path), (job, picture) in zip(own, generate(pipeline, jobs, sampling), strict=True):
        save_png(to_pil(picture), path, {"prompt": job.prompt, "seed": job.seed})
    if runtime.world_size > 1:
        dist.barrier()


def _missing(folder: Path, num: int) -> list[tuple[int, Path]]:
    """Number and path of the pictures that a folder lacks, under names that it has not."""
    lacking = max(0, num - len(image_files(folder)))
    named = ((number, folder / f"class-{number:05d}.png") for number in itertools.count())
    return list(itertools.islice(((number, path) for number, path in named if not path.exists()), lacking))
