"""Class images of prior preservation, drawn by the pipeline itself before it learns (Ruiz et al. 2023, section 3.3).

With several prompts each picture gets its own as its caption (NAME.txt beside NAME.png, as in any folder of pictures).
The ranks of a run share the drawing. A picture depends on the seed and its number alone, and appears when it is whole,
so a run that was stopped while drawing goes on.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from apps.diffusion.config import FinetuneConfig
from apps.diffusion.data.folder import image_files
from apps.diffusion.generate import PictureJob, Sampling, generate
from apps.diffusion.images import save_png, to_pil
from apps.diffusion.pipeline import Pipeline
from core.config import UserError
from core.files import replace_file
from core.precision import compute_dtype
from core.runtime import Runtime, freed_memory_given_back

DEFAULT_IMAGES = 100
"""class images that are drawn where nobody says how many"""


def draw_class_images(config: FinetuneConfig, load: Callable[[torch.dtype], Pipeline], runtime: Runtime) -> None:
    """Fill --class-dir up to --num-class-images with pictures of the class's prompts, in turn.

    load  format of the weights -> the pipeline that draws

    Raises UserError where images are lacking and no prompt says what to draw.
    """
    assert config.class_dir is not None
    prompts = config.prompts_of_class()
    default = DEFAULT_IMAGES if prompts else 0
    names = _missing(config.class_dir, default if config.num_class_images is None else config.num_class_images)
    if runtime.world_size > 1:
        dist.barrier()  # nobody draws before everybody has looked
    if not names:
        return
    if not prompts:
        raise UserError(
            f"{config.class_dir} lacks {len(names)} of {config.num_class_images} class images; give --class-prompt or "
            "--class-prompts, which they are drawn of, or a lower --num-class-images"
        )
    if runtime.leads:
        subject = repr(prompts[0]) if len(prompts) == 1 else f"{len(prompts)} prompts"
        print(f"drawing {len(names)} images of {subject} into {config.class_dir}")
    own = names[runtime.rank :: runtime.world_size]
    pipeline = load(compute_dtype(config.precision)).to(runtime.device)
    jobs = [PictureJob(prompts[number % len(prompts)], config.seed + number) for number, _ in own]
    with freed_memory_given_back(pipeline.stored_bytes, runtime.device):
        for (_, path), (job, picture) in zip(own, generate(pipeline, jobs, class_sampling(config)), strict=True):
            if config.class_prompts is not None:
                _write_caption(path, job.prompt)
            save_png(to_pil(picture), path, {"prompt": job.prompt, "seed": job.seed})
    if runtime.world_size > 1:
        dist.barrier()


def class_sampling(config: FinetuneConfig) -> Sampling:
    """The settings that draw class images, in the size that the run learns from."""
    given, side = config.class_sampling, config.data.resolution
    height, width = (side if one is None else one for one in (given.height, given.width))
    return replace(given, height=height, width=width)


def _write_caption(picture: Path, caption: str) -> None:
    """Beside the picture and before it, so that no picture is there without."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    replace_file(picture.with_suffix(".txt"), f"{caption}\n".encode())


def _missing(folder: Path, num: int) -> list[tuple[int, Path]]:
    """Number and path of the pictures that a folder lacks, under names that it has not."""
    lacking = max(0, num - len(image_files(folder)))
    named = ((number, folder / f"class-{number:05d}.png") for number in itertools.count())
    return list(itertools.islice(((number, path) for number, path in named if not path.exists()), lacking))
