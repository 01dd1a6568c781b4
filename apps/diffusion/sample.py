"""`diffusion sample`: pictures of prompts, as PNGs that tell how they were made.

    diffusion sample --prompt "a red circle" "a blue star" --images 4 --model DIR --out pictures

Pictures are numbered on from those that the folder holds. Each appears when it is whole.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from rich.console import Console
from rich.progress import Progress

from apps.diffusion.attention import AttentionName, set_attention
from apps.diffusion.formats.lora import load_lora, merge_lora
from apps.diffusion.generate import PictureJob, Sampling, check_sampling, generate, num_evaluations, picture_size
from apps.diffusion.images import grid, save_png, to_pil
from apps.diffusion.loading import load_pipeline
from apps.diffusion.noise import Prediction
from apps.diffusion.pipeline import EMBEDDED, Pipeline
from apps.diffusion.text import check_prompts, check_text, read_prompts
from core.config import UserError, parse
from core.kernels.shown_right import shown
from core.nn.by_kernels import by_kernels
from core.precision import COMPUTE_DTYPE, MatmulPrecision, bf16_units, set_matmul_precision
from core.runtime import device_of, freed_memory_given_back


@dataclass(frozen=True)
class SampleConfig(Sampling):
    """Draw pictures."""

    ESSENTIAL: ClassVar[tuple[str, ...]] = (
        *("model", "prompt", "prompts", "out", "images", "grid", "sampler", "steps", "guidance", "negative"),
        *("height", "width", "lora", "seed", "precision", "device"),
    )

    model: Path | None = None
    """a diffusers folder or a single-file checkpoint; without it the small pipeline that comes with this program"""
    lora: tuple[Path, ...] = ()
    """LoRA files to draw with"""
    lora_scale: float = 1.0
    prediction_type: Prediction | None = None
    """what the U-Net predicts, for single files of v2 that do not say it"""
    tokenizer: Path | None = None
    """folder of a tokenizer, for single files, which hold none"""
    prompt: tuple[str, ...] = ()
    """one or several"""
    prompts: Path | None = None
    """or a text file with a prompt a line"""
    out: Path = Path("pictures")
    """folder of the PNGs"""
    images: int = 1
    """pictures of each prompt"""
    seed: int = 0
    """of the first picture of each prompt; the next ones count up"""
    batch: int = 4
    """pictures that are drawn at once"""
    grid: bool = False
    """also grid.png with all of them"""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto: bf16 where the device multiplies it, otherwise fp32"""
    matmul_precision: MatmulPrecision = "highest"
    """of products in fp32: highest (exact), high (on a GPU by TF32, with 11 bits) or medium (as bf16)"""
    device: str = "auto"
    """cpu, cuda, cuda:N; auto: CUDA where there is one"""
    attention: AttentionName = "flash"
    """sliced needs less memory where a device has no flash kernel"""
    vae_tile: int | None = None
    """decode in overlapping tiles of so many pixels: less memory for large pictures"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("images", "batch"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; give at least 1")
        if not 0 <= self.seed < 2**63 - self.images:
            raise UserError(f"seed is {self.seed}; give 0 or more, below 2^63")

    def unread(self) -> dict[str, str]:
        return super().unread() | ({} if self.lora else {"lora_scale": "without a LoRA; give --lora FILE, too"})


def main(argv: list[str]) -> int:
    config = parse({"default": SampleConfig}, argv, "megalith diffusion sample", default="default")
    set_matmul_precision(config.matmul_precision)
    jobs = jobs_of(config)
    device = device_of(config.device)
    dtype = dtype_of(config.precision, device)
    pipeline = load_pipeline(config.model or EMBEDDED, dtype, config.prediction_type, config.tokenizer)
    for path in config.lora:
        merge_lora(pipeline, load_lora(path, pipeline), config.lora_scale)
    for module in (pipeline.unet, pipeline.vae):
        by_kernels(module, shown())
    prepare(pipeline.to(device), config)
    for line in cut_prompts(pipeline, [config.negative, *(job.prompt for job in jobs)]):
        print(line, file=sys.stderr)
    first = next_number(config.out)
    names = []
    with freed_memory_given_back(pipeline.stored_bytes, device):
        for number, (job, picture) in enumerate(_with_progress(pipeline, jobs, config), first):
            names.append(config.out / f"{number:05d}-{job.seed}.png")
            save_png(to_pil(picture), names[-1], settings_of(pipeline, config, job))
    if config.grid:
        save_grid(names, config.out / "grid.png", columns=config.images if config.images > 1 else None)
    print(f"{config.out}: {len(names)} pictures, {names[0].name} to {names[-1].name}")
    return 0


def jobs_of(config: SampleConfig) -> list[PictureJob]:
    """Raises UserError for no prompt, and for an empty one."""
    if not config.prompt and config.prompts is None:
        raise UserError('no prompt; say what to draw, --prompt "a red circle" or --prompts FILE')
    prompts = check_prompts(list(config.prompt), "--prompt") if config.prompt else []
    prompts += [] if config.prompts is None else read_prompts(config.prompts)
    check_text(config.negative)
    return [PictureJob(prompt, config.seed + i) for prompt in prompts for i in range(config.images)]


def dtype_of(precision: str, device: torch.device) -> torch.dtype:
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" and bf16_units(device) else torch.float32
    return COMPUTE_DTYPE[precision]


def prepare(pipeline: Pipeline, config: SampleConfig) -> None:
    """Attention, tiles and memory layout.  Raises UserError for sizes that the model has not."""
    check_sampling(pipeline, config)
    for module in (pipeline.unet, pipeline.vae):
        set_attention(module, config.attention)
        module.to(memory_format=torch.channels_last)
    if config.vae_tile is not None:
        tile_vae(pipeline, config.vae_tile)


def tile_vae(pipeline: Pipeline, pixels: int) -> None:
    """Let the VAE decode tiles of so many pixels that overlap by a quarter."""
    least = 8 * pipeline.factor
    if pixels < least or pixels % pipeline.factor:
        raise UserError(f"vae_tile is {pixels}; give a multiple of {pipeline.factor} from {least} on, such as 512")
    pipeline.vae.enable_tiling()
    pipeline.vae.tile_sample_min_size = pixels
    pipeline.vae.tile_latent_min_size = pixels // pipeline.factor


def cut_prompts(pipeline: Pipeline, prompts: list[str]) -> list[str]:
    """A line for each prompt that is longer than the text encoder reads."""
    length = min(pipeline.tokenizer.model_max_length, pipeline.text_encoder.config.max_position_embeddings)
    counts = {prompt: len(pipeline.tokenizer(prompt).input_ids) for prompt in dict.fromkeys(prompts)}
    return [
        f"a prompt has {count} tokens and the text encoder reads {length}; its end is left out: {prompt[:60]!r} …"
        for prompt, count in counts.items()
        if count > length
    ]


def next_number(folder: Path) -> int:
    """One after the highest number of the PNGs there."""
    numbers = (re.match(r"\d{5,}", path.name) for path in folder.glob("*.png"))  # beyond 99999 there are more digits
    return max((int(number[0]) for number in numbers if number), default=-1) + 1


def settings_of(pipeline: Pipeline, config: SampleConfig, job: PictureJob) -> dict[str, Any]:
    """The settings that draw the picture again."""
    height, width = picture_size(pipeline, config)
    settings = {field.name: getattr(config, field.name) for field in fields(Sampling)}
    settings |= {"prompt": job.prompt, "seed": job.seed, "height": height, "width": width, "size": f"{width}x{height}"}
    if config.lora:
        settings |= {"lora": [str(path) for path in config.lora], "lora_scale": config.lora_scale}
    return settings | {
        "model": str(config.model or EMBEDDED),
        "precision": str(pipeline.unet.dtype).removeprefix("torch."),
    }


def save_grid(names: list[Path], path: Path, columns: int | None = None) -> None:
    from PIL import Image

    pictures = []
    for name in names:
        with Image.open(name) as picture:
            pictures.append(picture.copy())
    save_png(grid(pictures, columns), path)


def _with_progress(pipeline: Pipeline, jobs: list[PictureJob], config: SampleConfig) -> Iterator[Any]:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{len(jobs)} pictures", total=len(jobs) * num_evaluations(pipeline, config))
        yield from generate(
            pipeline, jobs, config, config.batch, on_step=lambda pictures: progress.advance(task, pictures)
        )
