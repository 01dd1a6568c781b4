"""Samplers: from noise to latents in a few evaluations of a U-Net, by diffusers' own schedulers.

`--sampler NAME` is what a user of diffusers does: the folder's scheduler where it is of that class already, otherwise
`Scheduler.from_config(pipeline.scheduler.config)`. So whatever the folder says (Karras' noise levels, the solver's
order and kind, thresholding) is obeyed by the code that defines it, and steps equal those of diffusers' pipeline.

    ddim        Song et al. 2021, arXiv:2010.02502         ddpm       Ho et al. 2020, arXiv:2006.11239
    pndm        Liu et al. 2022, arXiv:2202.09778          unipc      Zhao et al. 2023, arXiv:2302.04867
    dpm++       DPM-Solver++(2M), Lu et al. 2022, arXiv:2211.01095; dpm++_single takes single steps
    deis        Zhang and Chen 2023, arXiv:2204.13902      lms        linear multistep, as in k-diffusion
    euler, heun Karras et al. 2022, arXiv:2206.00364       euler_a    Euler with ancestral noise
    dpm2        DPM-Solver-2 of k-diffusion; dpm2_a with ancestral noise
    lcm         Luo et al. 2023, arXiv:2310.04378          tcd        Zheng et al. 2024, arXiv:2402.19159

The last two are for U-Nets that were distilled for few steps.
"""

import inspect
import warnings
from collections.abc import Sequence
from typing import Any, Literal, get_args

import diffusers
import torch
from torch import Tensor

from apps.diffusion.noise import Schedule, fields_of, first_line, own_scheduler, prediction_of
from core.config import UserError

SamplerName = Literal[
    "model",
    "ddim",
    "ddpm",
    "pndm",
    "dpm++",
    "dpm++_single",
    "unipc",
    "deis",
    "euler",
    "euler_a",
    "heun",
    "dpm2",
    "dpm2_a",
    "lms",
    "lcm",
    "tcd",
]
SAMPLERS: tuple[str, ...] = get_args(SamplerName)
MODEL = "model"
"""the scheduler of the folder, as it is"""
CLASSES: dict[str, str] = {
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
    "pndm": "PNDMScheduler",
    "dpm++": "DPMSolverMultistepScheduler",
    "dpm++_single": "DPMSolverSinglestepScheduler",
    "unipc": "UniPCMultistepScheduler",
    "deis": "DEISMultistepScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler_a": "EulerAncestralDiscreteScheduler",
    "heun": "HeunDiscreteScheduler",
    "dpm2": "KDPM2DiscreteScheduler",
    "dpm2_a": "KDPM2AncestralDiscreteScheduler",
    "lms": "LMSDiscreteScheduler",
    "lcm": "LCMScheduler",
    "tcd": "TCDScheduler",
}
"""name -> class of diffusers"""
_OF_FEW_STEPS = ("lcm", "tcd")

Sigmas = Literal["karras", "exponential", "beta"]


class Sampler:
    """One run of a scheduler over a batch of B pictures, each with a generator of its own."""

    def __init__(self, scheduler: Any, steps: int, device: torch.device | str = "cpu", eta: float = 0.0):
        self._scheduler = scheduler
        _set_timesteps(scheduler, steps, device)
        self.timesteps: Tensor = scheduler.timesteps
        """what the U-Net is told at each of its evaluations; samplers of second order have nearly two a step"""
        taken = inspect.signature(scheduler.step).parameters
        self._draws = "generator" in taken
        self._options = {"eta": eta} if "eta" in taken else {}

    def start(self, noise: Tensor) -> Tensor:
        """The first sample, from standard normal noise."""
        return noise * self._scheduler.init_noise_sigma

    def model_input(self, x: Tensor, timestep: Tensor) -> Tensor:
        """Scale a sample as the U-Net takes it."""
        return self._scheduler.scale_model_input(x, timestep)

    def step(self, predicted: Tensor, timestep: Tensor, x: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """The next sample, from this one and what the U-Net predicts of it.

        generators  one a row on the CPU, from which each row draws the noise that is added on the way
        """
        drawn = {"generator": list(generators)} if self._draws else {}
        # a sample in a wider format than the scheduler's tables keeps it
        return self._scheduler.step(predicted, timestep, x, **drawn, **self._options, return_dict=False)[0].to(x.dtype)


def rehearse(sampler: Sampler, name: str) -> None:
    """Every step on a sample of one number, which uses the sampler up: not all that a folder can say goes together.

    Raises UserError for what the scheduler refuses on the way.
    """
    generators = [torch.Generator()]
    x = sampler.start(torch.zeros(1, 1, 1, 1))
    try:
        for timestep in sampler.timesteps:
            x = sampler.step(sampler.model_input(x, timestep), timestep, x, generators)
    except Exception as error:  # schedulers raise whatever a value that they do not expect leads to
        raise UserError(
            f"the folder's schedule does not fit {name} ({first_line(error)}); take another --sampler"
        ) from error
    if not x.isfinite().all():
        raise UserError(f"the folder's schedule leads {name} to numbers that are not finite; take another --sampler")


def _set_timesteps(scheduler: Any, steps: int, device: torch.device | str) -> None:
    last = scheduler.config.num_train_timesteps - 1
    said = (
        f"{steps} steps with {scheduler.config.get('timestep_spacing', 'linspace')} spacing do not fit {last + 1} "
        "timesteps; take fewer steps, or --spacing trailing"
    )
    if steps > last + 1:
        raise UserError(said)
    try:
        scheduler.set_timesteps(steps, device=device)
    except Exception as error:  # as in `rehearse`
        raise UserError(f"{type(scheduler).__name__} takes no {steps} steps: {first_line(error)}") from error
    timesteps = scheduler.timesteps
    levels = any(scheduler.config.get(f"use_{name}_sigmas") for name in get_args(Sigmas))
    few = not levels and len(set(timesteps.tolist())) < steps  # levels may round to one timestep
    if few or float(timesteps.max()) > last or float(timesteps.min()) < 0:
        raise UserError(said)


def build_scheduler(
    name: str, stored: Schedule, spacing: str | None = None, sigmas: Sigmas | None = None, eta: float = 0.0
) -> Any:
    """diffusers' scheduler for a run of the sampler `name` with the schedule of a folder.

    spacing, sigmas  other than the folder says
    eta              of samplers that take one

    Raises UserError for an unknown name, for a schedule that the model's prediction does not fit, for U-Nets of few
    steps with another sampler than theirs, and for options that the sampler has not.
    """
    if name not in SAMPLERS:
        raise UserError(f"no sampler {name!r}; the samplers are {', '.join(SAMPLERS)}")
    if stored.get("rescale_betas_zero_snr") and prediction_of(stored) == "epsilon":
        raise UserError(
            "the model predicts the noise and its schedule has zero terminal SNR, where noise tells nothing of the "
            "picture; correct its scheduler_config.json: such models predict v or the sample"
        )
    own = own_scheduler(stored)
    kind = type(own) if name == MODEL else getattr(diffusers, CLASSES[name])
    distilled = [few for few in _OF_FEW_STEPS if type(own).__name__ == CLASSES[few]]
    if distilled and kind is not type(own):
        raise UserError(
            f"the weights were distilled for {type(own).__name__}, and {name} draws noise with them; give "
            f"--sampler {distilled[0]} --steps 4"
        )
    if not 0 <= eta <= 1:
        raise UserError(f"eta is {eta}; give 0 (no noise on the way) to 1 (as much as DDPM)")
    if eta and not _takes_eta(kind):
        takes = [one for one, of in CLASSES.items() if _takes_eta(getattr(diffusers, of))]
        raise UserError(f"eta is {eta}, which {name} has not; leave --eta out, or take --sampler {' or '.join(takes)}")
    changes = _changes(kind, name, spacing, sigmas)
    if kind is type(own) and not changes:
        return own
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fields that only the folder's scheduler has
        try:
            return kind.from_config(own.config, **changes)
        except Exception as error:  # as in `rehearse`
            raise UserError(f"the folder's schedule does not fit {name}: {first_line(error)}") from error


def _takes_eta(kind: type[Any]) -> bool:
    return "eta" in inspect.signature(kind.step).parameters


def _changes(kind: type, name: str, spacing: str | None, sigmas: Sigmas | None) -> dict[str, Any]:
    """Fields of the scheduler's configuration.  Raises UserError for those that it has not."""
    fields, changes = fields_of(kind), {}
    if spacing is not None:
        if "timestep_spacing" not in fields:
            raise UserError(f"spacing is {spacing}, and {name} has none; leave --spacing out")
        changes["timestep_spacing"] = spacing
    if sigmas is not None:
        if f"use_{sigmas}_sigmas" not in fields:
            raise UserError(f"sigmas is {sigmas}, which {name} has not; leave --sigmas out, or take --sampler dpm++")
        changes |= {f"use_{other}_sigmas": other == sigmas for other in get_args(Sigmas)}
        changes = {field: value for field, value in changes.items() if field in fields}
    return changes


def draw_noise(shape: tuple[int, ...], generators: Sequence[torch.Generator], like: Tensor | None = None) -> Tensor:
    """Standard normal noise [B, *shape]: each row from its own generator on the CPU, whoever is beside it."""
    rows = [torch.randn(shape, generator=generator) for generator in generators]
    noise = torch.stack(rows)
    return noise if like is None else noise.to(like)


def guidance_embedding(guidance: float, width: int) -> Tensor:
    """[1, width] in fp32, which tells a U-Net that was distilled with guidance how much of it is wanted.

    Meng et al. 2023, arXiv:2210.03142, section 3.1.
    """
    from diffusers import StableDiffusionPipeline  # slow to import, and few models need it

    embed: Any = StableDiffusionPipeline.get_guidance_scale_embedding  # reads nothing of its pipeline
    return embed(None, torch.tensor([guidance - 1.0]), width)
