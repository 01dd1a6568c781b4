"""The forward process of diffusion: how much noise a step carries, what a network predicts of it, how its error counts.

    x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) eps          a_t = prod over s <= t of (1 - beta_s)
    v_t = sqrt(a_t) eps - sqrt(1 - a_t) x_0          SNR_t = a_t / (1 - a_t)

A schedule is what a folder's scheduler_config.json says, and diffusers' own schedulers make of it the levels, the noisy
samples and the velocity, so a network learns at the very noise levels that it is sampled at.

Ho et al. 2020, Denoising Diffusion Probabilistic Models, equation 4; Salimans and Ho 2022, Progressive Distillation,
appendix D (v); Hang et al. 2023, Efficient Diffusion Training via Min-SNR Weighting, section 3.4; Lin et al. 2024,
Common Diffusion Noise Schedules and Sample Steps are Flawed, algorithm 1 (zero terminal SNR).

Shapes: T timesteps of training, B rows, C channels.
"""

import inspect
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, Literal

import diffusers
import torch
from diffusers import DDPMScheduler
from diffusers.configuration_utils import FrozenDict
from torch import Tensor

from core.config import UserError

Prediction = Literal["epsilon", "v_prediction", "sample"]
Spacing = Literal["leading", "trailing", "linspace"]
Schedule = Mapping[str, Any]
"""A scheduler_config.json: the class of one of diffusers' schedulers, and its fields"""

STABLE_DIFFUSION: Schedule = MappingProxyType(
    {
        "_class_name": "DDIMScheduler",
        "_diffusers_version": version("diffusers"),
        "prediction_type": "epsilon",
        "num_train_timesteps": 1000,
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "rescale_betas_zero_snr": False,
        "timestep_spacing": "leading",
        "steps_offset": 1,
        "set_alpha_to_one": False,
        "clip_sample": False,
        "trained_betas": None,
    }
)
"""The noise of Stable Diffusion v1 and v2"""
_MENDED = {"steps_offset": 1, "clip_sample": False}


def schedule(**changes: Any) -> dict[str, Any]:
    """Stable Diffusion's schedule with other values in some of its fields."""
    return {**STABLE_DIFFUSION, **changes}


def own_scheduler(stored: Schedule, origin: object = "the schedule") -> Any:
    """diffusers' scheduler of a schedule, set up as its pipeline of Stable Diffusion does it.

    That pipeline takes every `steps_offset` for 1 and `clip_sample` for false, since old folders leave both out.
    Raises UserError for values that the scheduler refuses.
    """
    kind = getattr(diffusers, stored["_class_name"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fields that only other schedulers have
        try:
            scheduler = kind.from_config(dict(stored))
        except Exception as error:  # the classes raise whatever a value that they do not expect leads to
            raise UserError(f"{origin}: {stored['_class_name']} refuses it ({first_line(error)})") from error
    config = dict(scheduler.config)
    config |= {name: value for name, value in _MENDED.items() if name in config}
    scheduler._internal_dict = FrozenDict(config)
    return scheduler


def prediction_of(stored: Schedule) -> Prediction:
    """The network's prediction by its schedule; the noise where the schedule is silent, as in diffusers."""
    return stored.get("prediction_type", "epsilon")


def with_zero_terminal_snr(stored: Schedule) -> dict[str, Any]:
    """The schedule whose last timestep is noise alone, and whose sampler begins there (Lin et al. 2024, section 3).

    It is DDIM's where the schedule's own class cannot have it.
    """
    changes = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    kind = getattr(diffusers, stored["_class_name"])
    if changes.keys() <= fields_of(kind):
        return {**stored, **changes}
    plain: Any = diffusers.DDIMScheduler.from_config(own_scheduler(stored).config, **changes)
    return {name: value for name, value in plain.config.items() if name != "_use_default_values"}


def fields_of(kind: type) -> set[str]:
    """The fields of the configuration of a class of diffusers."""
    return set(inspect.signature(kind.__init__).parameters) - {"self", "args", "kwargs"}


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


class NoiseSchedule:
    """Noise levels by timestep, and what follows from them."""

    def __init__(self, stored: Schedule):
        """Raises UserError for epsilon with zero terminal SNR: a network that is shown noise alone knows the answer."""
        self.prediction = prediction_of(stored)
        if stored.get("rescale_betas_zero_snr") and self.prediction == "epsilon":
            raise UserError(
                "with zero terminal SNR the last step is noise alone, which a network that predicts epsilon only has "
                "to repeat; use prediction v_prediction or sample, or leave the schedule as it is"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fields of the sampler that noise does not need
            self._scheduler: Any = DDPMScheduler.from_config(own_scheduler(stored).config)
        self.alphas_cumprod_T = self._scheduler.alphas_cumprod.double()

    def __len__(self) -> int:
        return len(self.alphas_cumprod_T)

    def to(self, device: torch.device) -> "NoiseSchedule":
        """This schedule, its levels on another device."""
        self.alphas_cumprod_T = self.alphas_cumprod_T.to(device)
        return self

    def add_noise(self, sample_BC: Tensor, noise_BC: Tensor, timestep_B: Tensor) -> Tensor:
        """x_t [B, C, …] from x_0 and eps."""
        return self._scheduler.add_noise(sample_BC, noise_BC, timestep_B)

    def target(self, sample_BC: Tensor, noise_BC: Tensor, timestep_B: Tensor) -> Tensor:
        """The network's target at x_t: eps, v or x_0 [B, C, …]."""
        if self.prediction == "epsilon":
            return noise_BC
        if self.prediction == "sample":
            return sample_BC
        return self._scheduler.get_velocity(sample_BC, noise_BC, timestep_B)

    def sample_of(self, predicted_BC: Tensor, noisy_BC: Tensor, timestep_B: Tensor) -> Tensor:
        """The x_0 [B, C, …] that a prediction at x_t amounts to."""
        if self.prediction == "sample":
            return predicted_BC
        signal, spread = self._roots(timestep_B, noisy_BC)
        if self.prediction == "epsilon":
            return (noisy_BC - spread * predicted_BC) / signal
        return signal * noisy_BC - spread * predicted_BC

    def snr(self, timestep_B: Tensor) -> Tensor:
        """[B] in fp64; 0 at the last step of a schedule with zero terminal SNR."""
        level_B = self.alphas_cumprod_T.to(timestep_B.device)[timestep_B]
        return level_B / (1 - level_B)

    def min_snr_weight(self, timestep_B: Tensor, gamma: float) -> Tensor:
        """Weights [B] in fp64 of the prediction's squared errors, with which the error in x_0 counts min(SNR, gamma).

            |x_0 error|^2 = |eps error|^2 / SNR = |v error|^2 / (SNR + 1)

        For epsilon this is min(1, gamma / SNR), which is 1 at SNR 0 and no division by it.
        """
        snr_B = self.snr(timestep_B)
        if self.prediction == "epsilon":
            return (gamma / snr_B).clamp(max=1.0)
        clamped = snr_B.clamp(max=gamma)
        return clamped if self.prediction == "sample" else clamped / (snr_B + 1)

    def _roots(self, timestep_B: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """sqrt(a_t) and sqrt(1 - a_t), [B, 1, …] in the format of `like`."""
        level_B = self.alphas_cumprod_T.to(like.device)[timestep_B.to(like.device)]
        level = level_B.view(-1, *[1] * (like.ndim - 1))
        return level.sqrt().to(like.dtype), (1 - level).sqrt().to(like.dtype)


def with_offset(noise_BC: Tensor, offset_BC: Tensor, strength: float) -> Tensor:
    """Noise [B, C, H, W] with a share that is alike in a whole channel (offset [B, C, 1, 1], standard normal).

    It lets a network learn brightness: SNR at the last step is not zero, and what noise leaves over is the mean.
    """
    return noise_BC + strength * offset_BC
