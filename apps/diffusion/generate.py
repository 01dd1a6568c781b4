"""Pictures of prompts: text to embeddings, noise to latents under classifier-free guidance, latents to pixels.

Each picture is a job of a prompt and a seed, and its noise comes from a generator of that seed alone: which pictures
share its batch does not matter. Guidance: Ho and Salimans 2022, arXiv:2207.12598, equation 6; its rescaling: Lin et al.
2024, arXiv:2305.08891, section 3.4.

Latents stay in fp32 (fp64 for a pipeline in fp64), whatever the modules compute in.

Shapes: B pictures, h x w latents, H x W pixels, C latent channels, L tokens, D text width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from apps.diffusion.noise import Spacing
from apps.diffusion.pipeline import Pipeline
from apps.diffusion.samplers import (
    Sampler,
    SamplerName,
    Sigmas,
    build_scheduler,
    draw_noise,
    guidance_embedding,
    rehearse,
)
from core.config import UserError


@dataclass(frozen=True)
class Sampling:
    """The settings that draw pictures."""

    sampler: SamplerName = "dpm++"
    """model: the scheduler of the weights' folder; the others are made of its configuration"""
    steps: int = 25
    guidance: float = 7.5
    """weight of the prompt; 1: no guidance, half the work"""
    guidance_rescale: float = 0.0
    """0.7 for models with zero terminal SNR, against overexposure"""
    negative: str = ""
    """what not to draw; not of a U-Net that is told its guidance, as those of LCM are"""
    height: int | None = None
    """pixels; by default what the model was trained on"""
    width: int | None = None
    spacing: Spacing | None = None
    """which timesteps are taken; by default as the model's scheduler says"""
    sigmas: Sigmas | None = None
    """how noise levels lie between the largest and the least; by default as the model's scheduler says"""
    eta: float = 0.0
    """ddim, tcd: noise added on the way, 0 to 1"""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"steps is {self.steps}; give at least 1")
        if self.guidance < 0 or not 0 <= self.guidance_rescale <= 1:
            raise UserError(
                f"guidance is {self.guidance} and guidance_rescale {self.guidance_rescale}; "
                "give a guidance of 0 or more (7.5 is usual) and a rescale of 0 to 1"
            )

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        if self.guidance != 1.0:
            return {}
        return dict.fromkeys(("negative", "guidance_rescale"), "with guidance=1, which is none; give more, such as 7.5")


@dataclass(frozen=True)
class PictureJob:
    """One picture."""

    prompt: str
    seed: int


def num_evaluations(pipeline: Pipeline, sampling: Sampling) -> int:
    """The passes of each picture through the U-Net: `steps`, and nearly twice that for samplers of second order."""
    return len(sampler_of(pipeline, sampling).timesteps)


def generate(
    pipeline: Pipeline,
    jobs: Sequence[PictureJob],
    sampling: Sampling = Sampling(),
    batch: int = 4,
    on_step: Callable[[int], None] = lambda pictures: None,
) -> Iterator[tuple[PictureJob, Tensor]]:
    """(job, picture [3, H, W] in 0 to 1, on the CPU) in the order of the jobs, `batch` at a time.

    on_step  called after each evaluation of a batch with the number of its pictures

    Raises UserError for sizes and settings that the model or the sampler has not.
    """
    check_sampling(pipeline, sampling)
    height, width = picture_size(pipeline, sampling)
    for start in range(0, len(jobs), batch):
        now = jobs[start : start + batch]
        latents = draw_latents(pipeline, now, sampling, (height, width), on_step)
        yield from zip(now, decode(pipeline, latents))


def picture_size(pipeline: Pipeline, sampling: Sampling) -> tuple[int, int]:
    """(height, width) in pixels.  Raises UserError where latents do not divide them."""
    given, own = (sampling.height, sampling.width), pipeline.image_size
    sides = (own[0] if given[0] is None else given[0], own[1] if given[1] is None else given[1])
    for name, side in zip(("height", "width"), sides):
        if side <= 0 or side % pipeline.factor:
            nearest = max(1, round(side / pipeline.factor)) * pipeline.factor
            raise UserError(f"{name} is {side}; give a multiple of {pipeline.factor}, such as {nearest}")
    return sides


def sampler_of(pipeline: Pipeline, sampling: Sampling, device: torch.device | str = "cpu") -> Sampler:
    """Raises UserError for settings that the model or the sampler has not."""
    if pipeline.guidance_width is not None:
        for name, why in (("guidance_rescale", "rescale"), ("negative", "lead away from")):
            if getattr(sampling, name):
                raise UserError(
                    f"{name} with a U-Net that is told its guidance (time_cond_proj_dim): it predicts once, with the "
                    f"prompt, so that there is nothing to {why}; leave out --{name.replace('_', '-')}"
                )
    scheduler = build_scheduler(sampling.sampler, pipeline.schedule, sampling.spacing, sampling.sigmas, sampling.eta)
    return Sampler(scheduler, sampling.steps, device, sampling.eta)


def check_sampling(pipeline: Pipeline, sampling: Sampling) -> None:
    """Raises UserError for settings that the model or the sampler has not, before anything is drawn."""
    picture_size(pipeline, sampling)
    rehearse(sampler_of(pipeline, sampling), sampling.sampler)


class Predict(Protocol):
    """(samples [N, C, h, w], timestep, embedding of the guidance [1, width] or None) -> the U-Net's prediction, alike.

    N is the number of pictures; under guidance twice that, those without their prompts first.
    """

    def __call__(self, seen: Tensor, timestep: Tensor, guidance: Tensor | None) -> Tensor: ...


def is_guided(pipeline: Pipeline, sampling: Sampling) -> bool:
    """Return whether each step also evaluates the U-Net without the prompt; one that takes its guidance needs none."""
    return sampling.guidance != 1.0 and pipeline.guidance_width is None


def run_sampler(
    pipeline: Pipeline,
    sampling: Sampling,
    seeds: Sequence[int],
    size: tuple[int, int],
    predict: Predict,
    device: torch.device,
    wide: torch.dtype,
    on_step: Callable[[int], None] = lambda pictures: None,
) -> Tensor:
    """Latents [B, C, h, w] in the format `wide`, each from the noise of its seed.

    size     height and width in pixels
    predict  in any format
    on_step  called after each evaluation with the number of its pictures
    """
    sampler = sampler_of(pipeline, sampling, device)
    shape = (pipeline.latent_channels, size[0] // pipeline.factor, size[1] // pipeline.factor)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    width = pipeline.guidance_width
    condition = None if width is None else guidance_embedding(sampling.guidance, width)
    guided = is_guided(pipeline, sampling)
    x = sampler.start(draw_noise(shape, generators).to(device, wide))
    for timestep in sampler.timesteps:
        seen = sampler.model_input(x, timestep)
        predicted = predict(torch.cat([seen, seen]) if guided else seen, timestep, condition).to(wide)
        if guided:
            predicted = guide(*predicted.chunk(2), sampling.guidance, sampling.guidance_rescale)
        x = sampler.step(predicted, timestep, x, generators)
        on_step(len(seeds))
    return x


@torch.no_grad()
def draw_latents(
    pipeline: Pipeline,
    jobs: Sequence[PictureJob],
    sampling: Sampling,
    size: tuple[int, int],
    on_step: Callable[[int], None] = lambda pictures: None,
) -> Tensor:
    """Latents [B, C, h, w] of the jobs, as the U-Net has them (scaled)."""
    unet = pipeline.unet
    prompts = [sampling.negative] * len(jobs) * is_guided(pipeline, sampling) + [job.prompt for job in jobs]
    text_BLD = pipeline.encode_prompts(prompts).to(unet.device, unet.dtype)

    def predict(seen: Tensor, timestep: Tensor, guidance: Tensor | None) -> Tensor:
        condition = None if guidance is None else guidance.expand(len(seen), -1).to(unet.device, unet.dtype)
        return unet(
            seen.to(unet.dtype), timestep, encoder_hidden_states=text_BLD, timestep_cond=condition, return_dict=False
        )[0]

    wide = torch.float64 if unet.dtype == torch.float64 else torch.float32
    return run_sampler(pipeline, sampling, [job.seed for job in jobs], size, predict, unet.device, wide, on_step)


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
