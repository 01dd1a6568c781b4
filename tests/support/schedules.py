"""Scheduler configurations drawn at random, and runs of diffusers' own pipeline beside ours."""

import random
import warnings
from dataclasses import dataclass
from typing import Any

import diffusers
import pytest
import torch
from diffusers import StableDiffusionPipeline
from torch import Tensor

from apps.diffusion.generate import PictureJob, Sampling, check_sampling, draw_latents
from apps.diffusion.noise import fields_of
from apps.diffusion.pipeline import Pipeline
from apps.diffusion.samplers import CLASSES, MODEL, draw_noise
from core.config import UserError
from tests.support.diffusion_training import tiny_pipeline

F64 = torch.float64
_CHOICES: dict[str, tuple[Any, ...]] = {
    "beta_schedule": ("linear", "scaled_linear", "squaredcos_cap_v2"),
    "timestep_spacing": ("leading", "trailing", "linspace"),
    "steps_offset": (0, 1),
    "prediction_type": ("epsilon", "v_prediction", "sample"),
    "set_alpha_to_one": (False, True),
    "clip_sample": (False, True),
    "thresholding": (False, False, True),
    "skip_prk_steps": (False, True),
    "algorithm_type": ("dpmsolver++", "dpmsolver", "sde-dpmsolver++", "sde-dpmsolver"),
    "solver_order": (1, 2, 3),
    "solver_type": ("midpoint", "heun"),
    "lower_order_final": (False, True),
    "euler_at_final": (False, True),
    "final_sigmas_type": ("zero", "sigma_min"),
    "predict_x0": (False, True),
    "interpolation_type": ("linear", "log_linear"),
}
_LEVELS = (None, None, "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
_SOLVERS = {"UniPCMultistepScheduler": ("bh1", "bh2"), "DEISMultistepScheduler": ("logrho",)}


_SLOW_TO_MAKE = "KDPM2"
"""schedulers whose constructor goes through all timesteps of training in Python: they get fewer of them"""
FEW_TIMESTEPS = {"num_train_timesteps": 100}


def shallow_pipeline() -> Pipeline:
    """fp64, with a U-Net of one block that reads the prompt: compared is what samplers do with a prediction."""
    return tiny_pipeline(shallow=True).to(F64)


@dataclass(frozen=True)
class Case:
    stored: dict[str, Any]
    name: str
    steps: int


def case(seed: int) -> Case:
    """A folder's scheduler_config.json, and a sampler that is named beside it."""
    rng = random.Random(seed)
    kind = rng.choice([kind for kind in CLASSES.values() if kind not in ("LCMScheduler", "TCDScheduler")])
    fields = fields_of(getattr(diffusers, kind))
    stored: dict[str, Any] = {"_class_name": kind, "beta_start": 0.00085, "beta_end": 0.012}
    for field, values in _CHOICES.items():
        if field in fields and rng.random() < 0.6:
            stored[field] = rng.choice(_SOLVERS.get(kind, values) if field == "solver_type" else values)
    if kind == "DEISMultistepScheduler":
        stored.pop("algorithm_type", None)
    level = rng.choice(_LEVELS)
    if level in fields:
        stored[level] = True
    name, steps = rng.choice([MODEL, MODEL, *CLASSES]), rng.randint(3, 7)
    if _SLOW_TO_MAKE in kind + CLASSES.get(name, ""):
        stored |= FEW_TIMESTEPS
    return Case(stored, name, steps)


def theirs(pipeline: Pipeline, case: Case, sampling: Sampling, jobs: list[PictureJob]) -> tuple[list[Tensor], Tensor]:
    """What the U-Net sees at each evaluation of diffusers' pipeline, and the latents it ends with."""
    own = getattr(diffusers, case.stored["_class_name"]).from_config(case.stored)
    parts = pipeline.modules | {"tokenizer": pipeline.tokenizer, "safety_checker": None, "feature_extractor": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = StableDiffusionPipeline(**parts, scheduler=own, requires_safety_checker=False)
        if case.name != MODEL and CLASSES[case.name] != case.stored["_class_name"]:
            pipe.scheduler = getattr(diffusers, CLASSES[case.name]).from_config(pipe.scheduler.config)
    pipe.set_progress_bar_config(disable=True)
    side = pipeline.unet.config.sample_size
    generators = [torch.Generator().manual_seed(job.seed) for job in jobs]
    noise = draw_noise((pipeline.latent_channels, side, side), generators).to(pipeline.unet.dtype)
    with watched(pipeline) as seen:
        latents = pipe(
            [job.prompt for job in jobs],
            negative_prompt=[sampling.negative] * len(jobs),
            num_inference_steps=case.steps,
            guidance_scale=sampling.guidance,
            eta=sampling.eta,
            latents=noise,
            generator=generators,
            output_type="latent",
        ).images
    return seen, latents


def ours(pipeline: Pipeline, sampling: Sampling, jobs: list[PictureJob]) -> tuple[list[Tensor], Tensor]:
    """The same of this program's."""
    side = pipeline.unet.config.sample_size * pipeline.factor
    with watched(pipeline) as seen:
        latents = draw_latents(pipeline, jobs, sampling, (side, side))
    return seen, latents


class watched:
    """Collects what the U-Net is given: samples and timesteps."""

    def __init__(self, pipeline: Pipeline):
        self._unet = pipeline.unet

    def __enter__(self) -> list[Tensor]:
        seen: list[Tensor] = []

        def note(module, args, kwargs):
            sample, timestep = args[:2]
            seen.append(torch.cat([sample.flatten().to(F64), torch.as_tensor(timestep).to(F64).reshape(1)]))

        self._handle = self._unet.register_forward_pre_hook(note, with_kwargs=True)
        return seen

    def __exit__(self, *error) -> None:
        self._handle.remove()


def compare(pipeline: Pipeline, case: Case, sampling: Sampling, jobs: list[PictureJob]) -> None:
    """Raises AssertionError unless every evaluation sees the same, and the latents agree."""
    (seen_there, wanted), (seen, found) = theirs(pipeline, case, sampling, jobs), ours(pipeline, sampling, jobs)
    assert len(seen) == len(seen_there), case
    for step, (here, there) in enumerate(zip(seen, seen_there)):
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-5, msg=lambda m, s=step: f"{case}, {s}: {m}")
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, msg=lambda m: f"{case}: {m}")


def compare_or_refuse(pipeline: Pipeline, case: Case, sampling: Sampling, jobs: list[PictureJob]) -> bool:
    """Whether the case is drawn, and then alike; what is refused must fail, or not be finite, in diffusers too."""
    try:
        check_sampling(pipeline, sampling)
    except UserError:
        with pytest.raises(Exception):  # noqa: B017
            assert theirs(pipeline, case, sampling, jobs)[1].isfinite().all()
        return False
    compare(pipeline, case, sampling, jobs)
    return True
