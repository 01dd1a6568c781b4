"""The forward process of diffusion: how much noise a step carries, what a network predicts of it, how its error counts.

    x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) eps          a_t = prod over s <= t of (1 - beta_s)
    v_t = sqrt(a_t) eps - sqrt(1 - a_t) x_0          SNR_t = a_t / (1 - a_t)

The betas are rounded to fp32 and multiplied in fp32 as diffusers' schedulers do it, so a network learns at the very
noise levels that it will be sampled at; what follows from them is computed in fp64 and handed out in the format of the
samples.

Ho et al. 2020, Denoising Diffusion Probabilistic Models, equation 4; Salimans and Ho 2022, Progressive Distillation,
appendix D (v); Hang et al. 2023, Efficient Diffusion Training via Min-SNR Weighting, section 3.4; Lin et al. 2024,
Common Diffusion Noise Schedules and Sample Steps are Flawed, algorithm 1 (zero terminal SNR).

Shapes: T timesteps of training, B rows, C channels.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from core.config import UserError

Prediction = Literal["epsilon", "v_prediction", "sample"]
BetaSchedule = Literal["linear", "scaled_linear", "squaredcos_cap_v2"]
Spacing = Literal["leading", "trailing", "linspace"]


@dataclass(frozen=True)
class ScheduleConfig:
    """The noise a model was trained with, by the names of diffusers' schedulers; defaults are Stable Diffusion's."""

    prediction_type: Prediction = "epsilon"
    num_train_timesteps: int = 1000
    beta_start: float = 0.00085
    beta_end: float = 0.012
    beta_schedule: BetaSchedule = "scaled_linear"
    rescale_betas_zero_snr: bool = False
    """the last timestep is pure noise (Lin et al. 2024, arXiv:2305.08891, algorithm 1)"""
    timestep_spacing: Spacing = "leading"
    """which timesteps a sampler takes (the same, table 2)"""
    steps_offset: int = 1
    set_alpha_to_one: bool = False
    """the last step of a sampler ends at no noise; otherwise at that of timestep 0"""

    def __post_init__(self) -> None:
        for name, kind in (
            ("prediction_type", Prediction),
            ("beta_schedule", BetaSchedule),
            ("timestep_spacing", Spacing),
        ):
            if getattr(self, name) not in get_args(kind):
                raise UserError(f"{name} is {getattr(self, name)!r}; known are {', '.join(get_args(kind))}")

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> "ScheduleConfig":
        """A scheduler_config.json; what it leaves out is as in diffusers' scheduler of its class.

        Raises UserError for what no sampler here knows.
        """
        kind = stored.get("_class_name", "DDIMScheduler")
        absent = {
            "prediction_type": "epsilon",
            "beta_start": 0.0001,
            "beta_end": 0.02,
            "beta_schedule": "linear",
            "timestep_spacing": "leading"
            if kind in ("DDIMScheduler", "PNDMScheduler", "DDPMScheduler")
            else "linspace",
            "steps_offset": 0,
            "set_alpha_to_one": kind == "DDIMScheduler",
        }
        if stored.get("trained_betas") is not None:
            raise UserError("the scheduler has trained_betas, a schedule of its own; give one with a beta_schedule")
        names = {f.name for f in dataclasses.fields(ScheduleConfig)}
        return ScheduleConfig(**(absent | {name: value for name, value in stored.items() if name in names}))

    def to_json(self) -> dict[str, Any]:
        """For scheduler_config.json, as diffusers' DDIMScheduler; its other schedulers load from it too."""
        return {
            "_class_name": "DDIMScheduler",
            "_diffusers_version": version("diffusers"),
            **dataclasses.asdict(self),
            "clip_sample": False,
            "trained_betas": None,
        }


def betas(config: ScheduleConfig) -> Tensor:
    """[T] in fp32."""
    T = config.num_train_timesteps
    if config.beta_schedule == "linear":
        betas_T = torch.linspace(config.beta_start, config.beta_end, T, dtype=torch.float32)
    elif config.beta_schedule == "scaled_linear":
        betas_T = torch.linspace(config.beta_start**0.5, config.beta_end**0.5, T, dtype=torch.float32) ** 2
    else:
        betas_T = _squared_cosine(T)
    return zero_terminal_snr(betas_T) if config.rescale_betas_zero_snr else betas_T


def _squared_cosine(T: int, largest: float = 0.999) -> Tensor:
    """Nichol and Dhariwal 2021, Improved DDPM, equation 17."""

    def level(t: float) -> float:
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

    steps = [min(1 - level((t + 1) / T) / level(t / T), largest) for t in range(T)]
    return torch.tensor(steps, dtype=torch.float32)


def zero_terminal_snr(betas_T: Tensor) -> Tensor:
    """Betas whose last step leaves nothing of the sample: sqrt(a) shifted to end at 0, scaled to begin where it did.

    Lin et al. 2024, algorithm 1.
    """
    root_T = torch.cumprod(1.0 - betas_T, dim=0).sqrt()
    first, last = root_T[0].clone(), root_T[-1].clone()
    root_T = (root_T - last) * (first / (first - last))
    level_T = root_T**2
    return 1 - torch.cat([level_T[:1], level_T[1:] / level_T[:-1]])


class NoiseSchedule:
    """Noise levels by timestep, and what follows from them."""

    def __init__(self, config: ScheduleConfig):
        """Raises UserError for epsilon with zero terminal SNR: a network that is shown noise alone knows the answer."""
        if config.rescale_betas_zero_snr and config.prediction_type == "epsilon":
            raise UserError(
                "with zero terminal SNR the last step is noise alone, which a network that predicts epsilon only has "
                "to repeat; use prediction v_prediction or sample, or leave the schedule as it is"
            )
        self.config = config
        self.prediction = config.prediction_type
        self.alphas_cumprod_T = torch.cumprod(1.0 - betas(config), dim=0).double()

    def __len__(self) -> int:
        return len(self.alphas_cumprod_T)

    def to(self, device: torch.device) -> "NoiseSchedule":
        """This schedule, its levels on another device."""
        self.alphas_cumprod_T = self.alphas_cumprod_T.to(device)
        return self

    def add_noise(self, sample_BC: Tensor, noise_BC: Tensor, timestep_B: Tensor) -> Tensor:
        """x_t [B, C, …] from x_0 and eps."""
        signal, spread = self._roots(timestep_B, sample_BC)
        return signal * sample_BC + spread * noise_BC

    def target(self, sample_BC: Tensor, noise_BC: Tensor, timestep_B: Tensor) -> Tensor:
        """What the network is to predict at x_t: eps, v or x_0 [B, C, …]."""
        if self.prediction == "epsilon":
            return noise_BC
        if self.prediction == "sample":
            return sample_BC
        signal, spread = self._roots(timestep_B, sample_BC)
        return signal * noise_BC - spread * sample_BC

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
