"""Pictures of prompts: text to embeddings, noise to latents under classifier-free guidance, latents to pixels.

Each picture is a job of a prompt and a seed, and its noise comes from a generator of that seed alone: which pictures
share its batch does not matter. Guidance: Ho and Salimans 2022, arXiv:2207.12598, equation 6; its rescaling: Lin et al.
2024, arXiv:2305.08891, section 3.4.

Latents stay in fp32 (fp64 for a pipeline in fp64), whatever the modules compute in.

Shapes: B pictures, h x w latents, H x W pixels, C latent channels, L tokens, D text width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from apps.diffusion.noise import Spacing
from apps.diffusion.pipeline import Pipeline
from apps.diffusion.samplers import Sampler, SamplerName, build_sampler, draw_noise
from core.config import UserError


@dataclass(frozen=True)
class Sampling:
    """How pictures are drawn."""

    sampler: SamplerName = "dpm++"
    steps: int = 25
    guidance: float = 7.5
    """weight of the prompt; 1: no guidance, half the work"""
    guidance_rescale: float = 0.0
    """0.7 for models with zero terminal SNR, against overexposure"""
    negative: str = ""
    """what not to draw"""
    height: int | None = None
    """pixels; by default what the model was trained on"""
    width: int | None = None
    spacing: Spacing | None = None
    """which timesteps are taken; by default as the model's scheduler says"""
    eta: float = 0.0
    """ddim: noise added on the way, 0 to 1"""

    def __post_init__(self) -> None:
        if self.guidance < 0 or not 0 <= self.guidance_rescale <= 1:
            raise UserError(
                f"guidance is {self.guidance} and guidance_rescale {self.guidance_rescale}; "
                "give a guidance of 0 or more (7.5 is usual) and a rescale of 0 to 1"
            )


@dataclass(frozen=True)
class Job:
    """One picture."""

    prompt: str
    seed: int


def generate(
    pipeline: Pipeline,
    jobs: Sequence[Job],
    sampling: Sampling = Sampling(),
    batch: int = 4,
    on_step: Callable[[int], None] = lambda pictures: None,
) -> Iterator[tuple[Job, Tensor]]:
    """(job, picture [3, H, W] in 0 to 1, on the CPU) in the order of the jobs, `batch` at a time.

    on_step  told, after each step of a batch, how many pictures took it

    Raises UserError for sizes and settings that the model or the sampler has not.
    """
    height, width = picture_size(pipeline, sampling)
    sampler_of(pipeline, sampling)  # complains before the first batch
    for start in range(0, len(jobs), batch):
        now = jobs[start : start + batch]
        latents = draw_latents(pipeline, now, sampling, (height, width), on_step)
        yield from zip(now, decode(pipeline, latents))


def picture_size(pipeline: Pipeline, sampling: Sampling) -> tuple[int, int]:
    """(height, width) in pixels.  Raises UserError where latents do not divide them."""
    sides = (sampling.height or pipeline.image_size, sampling.width or pipeline.image_size)
    for name, side in zip(("height", "width"), sides):
        if side <= 0 or side % pipeline.factor:
            nearest = max(1, round(side / pipeline.factor)) * pipeline.factor
            raise UserError(f"{name} is {side}; give a multiple of {pipeline.factor}, such as {nearest}")
    return sides


def sampler_of(pipeline: Pipeline, sampling: Sampling) -> Sampler:
    schedule = pipeline.schedule
    if sampling.spacing is not None:
        schedule = replace(schedule, timestep_spacing=sampling.spacing)
    return build_sampler(sampling.sampler, schedule, sampling.steps, sampling.eta)


@torch.no_grad()
def draw_latents(
    pipeline: Pipeline,
    jobs: Sequence[Job],
    sampling: Sampling,
    size: tuple[int, int],
    on_step: Callable[[int], None] = lambda pictures: None,
) -> Tensor:
    """Latents [B, C, h, w] of the jobs, as the U-Net has them (scaled)."""
    unet, sampler = pipeline.unet, sampler_of(pipeline, sampling)
    guided = sampling.guidance != 1.0
    prompts = [sampling.negative] * len(jobs) * guided + [job.prompt for job in jobs]
    text_BLD = pipeline.encode_prompts(prompts).to(unet.device, unet.dtype)
    shape = (pipeline.latent_channels, size[0] // pipeline.factor, size[1] // pipeline.factor)
    generators = [torch.Generator().manual_seed(job.seed) for job in jobs]
    wide = torch.float64 if unet.dtype == torch.float64 else torch.float32

    def draw() -> Tensor:
        return draw_noise(shape, generators).to(unet.device, wide)

    x = sampler.start(draw())
    for step, timestep in enumerate(sampler.timesteps):
        seen = sampler.model_input(step, x).to(unet.dtype)
        seen = torch.cat([seen, seen]) if guided else seen
        predicted = unet(seen, float(timestep), encoder_hidden_states=text_BLD, return_dict=False)[0].to(wide)
        if guided:
            predicted = guide(*predicted.chunk(2), sampling.guidance, sampling.guidance_rescale)
        x = sampler.step(step, x, predicted, draw)
        on_step(len(jobs))
    return x


def guide(without: Tensor, with_prompt: Tensor, guidance: float, rescale: float) -> Tensor:
    """Away from what is predicted without the prompt; `rescale` brings each picture's spread back to the prompt's."""
    guided = without + guidance * (with_prompt - without)
    if not rescale:
        return guided
    dims = tuple(range(1, guided.ndim))
    share = with_prompt.std(dims, keepdim=True) / guided.std(dims, keepdim=True)
    return guided * (rescale * share + 1 - rescale)


@torch.no_grad()
def decode(pipeline: Pipeline, latents_BChw: Tensor) -> Iterator[Tensor]:
    """Pictures [3, H, W] in 0 to 1 on the CPU, decoded one by one.

    What overflows in fp16 is decoded again in fp32.  Raises UserError where that is not finite either.
    """
    vae = pipeline.vae
    for latent in latents_BChw / pipeline.scaling_factor:
        picture = vae.decode(latent[None].to(vae.device, vae.dtype)).sample
        if not picture.isfinite().all() and vae.dtype == torch.float16:
            vae.to(torch.float32)
            picture = vae.decode(latent[None].to(vae.device, vae.dtype)).sample
        if not picture.isfinite().all():
            raise UserError(
                "the model makes pictures that are not finite; sample in fp32 or bf16, or check its weights"
            )
        yield (picture[0].float() / 2 + 0.5).clamp(0, 1).cpu()
