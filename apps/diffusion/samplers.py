"""Samplers: from noise to latents in a few evaluations of a U-Net.

    ddim      Song et al. 2021, arXiv:2010.02502, equations 12 and 16; with eta > 0 noise is added on the way
    dpm++     DPM-Solver++(2M), Lu et al. 2022, arXiv:2211.01095, algorithm 2: of second order, by the last step's x_0
    euler     Karras et al. 2022, arXiv:2206.00364, algorithm 1 with Euler steps
    euler_a   Euler with ancestral noise, as in k-diffusion

Each takes the timesteps and the steps of diffusers' scheduler of that name for the same configuration. With a_t the
share of the sample's variance at timestep t, and VP for variance preserving and VE for exploding:

    VP: x = sqrt(a) x_0 + sqrt(1 - a) eps        VE: x = x_0 + s eps        s = sqrt((1 - a) / a)

DDIM and DPM-Solver++ keep VP samples, Euler VE samples, which the U-Net sees divided by sqrt(1 + s^2).
Coefficients are computed in fp64; samples keep their format.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from apps.diffusion.noise import NoiseSchedule, Prediction, ScheduleConfig
from core.config import UserError

SamplerName = Literal["ddim", "dpm++", "euler", "euler_a"]
SAMPLERS: tuple[str, ...] = get_args(SamplerName)

# s at a timestep of pure noise, where it would be infinite: a = 2^-24, as diffusers has it.
_LEAST_SHARE = 2.0**-24

Draw = Callable[[], Tensor]
"""Makes standard normal noise of the samples' shape and format."""


class Sampler(ABC):
    """One run of a sampler over a batch; `timesteps` are the U-Net's, one for each step."""

    def __init__(self, schedule: ScheduleConfig, steps: int):
        self.prediction: Prediction = schedule.prediction_type
        self.share_T: np.ndarray = NoiseSchedule(schedule).alphas_cumprod_T.numpy().astype(np.float64)
        self.timesteps = self._timesteps(schedule, steps)
        last = len(self.share_T) - 1
        if len(self.timesteps) != steps or self.timesteps.max() > last or len(set(self.timesteps)) < steps:
            raise UserError(
                f"{steps} steps with {schedule.timestep_spacing} spacing do not fit {last + 1} timesteps; "
                "take fewer steps, or --spacing trailing"
            )

    def _timesteps(self, schedule: ScheduleConfig, steps: int) -> np.ndarray:
        return spaced(schedule, steps).round()

    def start(self, noise: Tensor) -> Tensor:
        """The first sample, from standard normal noise."""
        return noise

    def model_input(self, step: int, x: Tensor) -> Tensor:
        """What the U-Net sees of a sample."""
        return x

    @abstractmethod
    def step(self, step: int, x: Tensor, predicted: Tensor, draw: Draw) -> Tensor:
        """The next sample, from this one and what the U-Net predicts of it.  `draw` is called where noise is added."""

    def shares(self, s: float) -> tuple[float, float]:
        """sqrt(a) and sqrt(1 - a) of a noise level s."""
        signal = 1 / math.sqrt(1 + s * s)
        return signal, s * signal


def spaced(schedule: ScheduleConfig, steps: int, ends: int = 0) -> np.ndarray:
    """Timesteps from high to low, Lin et al. 2024, arXiv:2305.08891, table 2.

    ends  1: the last of `steps + 1` timesteps is left out (leading and linspace)
    """
    T, spacing = schedule.num_train_timesteps, schedule.timestep_spacing
    if spacing == "linspace":
        return np.linspace(0, T - 1, steps + ends)[::-1][:steps]
    if spacing == "leading":
        return (np.arange(steps + ends) * (T // (steps + ends)))[::-1][:steps] + float(schedule.steps_offset)
    return np.arange(T, 0, -T / steps)[:steps].round() - 1


class Ddim(Sampler):
    """eta 0: no noise is added; 1: as much as in DDPM."""

    def __init__(self, schedule: ScheduleConfig, steps: int, eta: float = 0.0):
        super().__init__(schedule, steps)
        self.eta, self.stride = eta, schedule.num_train_timesteps // steps
        self.final_share = 1.0 if schedule.set_alpha_to_one else self.share_T[0]

    def step(self, step: int, x: Tensor, predicted: Tensor, draw: Draw) -> Tensor:
        t = int(self.timesteps[step])
        share, before = float(self.share_T[t]), t - self.stride  # by stride, also where the next timestep is another
        next_share = float(self.share_T[before]) if before >= 0 else float(self.final_share)
        signal, spread = math.sqrt(share), math.sqrt(1 - share)
        if self.prediction == "epsilon":
            x_0, eps = (x - spread * predicted) / signal, predicted
        elif self.prediction == "v_prediction":
            x_0, eps = signal * x - spread * predicted, signal * predicted + spread * x
        else:
            x_0, eps = predicted, (x - signal * predicted) / spread
        variance = self.eta**2 * (1 - next_share) / (1 - share) * (1 - share / next_share)
        moved = math.sqrt(next_share) * x_0 + math.sqrt(max(1 - next_share - variance, 0.0)) * eps
        return moved + math.sqrt(variance) * draw() if variance > 0 else moved


class _BySigma(Sampler):
    """A sampler whose noise levels are s at each timestep, and 0 at the end."""

    def __init__(self, schedule: ScheduleConfig, steps: int):
        super().__init__(schedule, steps)
        share_T = np.maximum(self.share_T, _LEAST_SHARE)
        levels = np.interp(self.timesteps, np.arange(len(share_T)), np.sqrt((1 - share_T) / share_T))
        self.sigmas = [*map(float, levels), 0.0]


class DpmSolver(_BySigma):
    """The first step and the last, which ends at no noise, are of first order."""

    def __init__(self, schedule: ScheduleConfig, steps: int):
        super().__init__(schedule, steps)
        self.previous_x_0: Tensor | None = None

    def _timesteps(self, schedule: ScheduleConfig, steps: int) -> np.ndarray:
        return spaced(schedule, steps, ends=1).round()

    def step(self, step: int, x: Tensor, predicted: Tensor, draw: Draw) -> Tensor:
        s, s_next = self.sigmas[step], self.sigmas[step + 1]
        signal, spread = self.shares(s)
        if self.prediction == "epsilon":
            x_0 = (x - spread * predicted) / signal
        elif self.prediction == "v_prediction":
            x_0 = signal * x - spread * predicted
        else:
            x_0 = predicted
        next_signal, next_spread = self.shares(s_next)
        toward = next_signal * (1 - s_next / s)  # -alpha_t (exp(-h) - 1), h = ln s - ln s_next
        moved = next_spread / spread * x + toward * x_0
        if step > 0 and s_next > 0:
            assert self.previous_x_0 is not None
            ratio = math.log(s / s_next) / math.log(self.sigmas[step - 1] / s)
            moved = moved + 0.5 * toward * ratio * (x_0 - self.previous_x_0)
        self.previous_x_0 = x_0
        return moved


class Euler(_BySigma):
    """Timesteps of linspace are not rounded: noise levels between two are interpolated."""

    def __init__(self, schedule: ScheduleConfig, steps: int):
        super().__init__(schedule, steps)
        largest = max(self.sigmas)
        self.initial_scale = math.hypot(largest, 1.0) if schedule.timestep_spacing == "leading" else largest

    def _timesteps(self, schedule: ScheduleConfig, steps: int) -> np.ndarray:
        return spaced(schedule, steps)

    def start(self, noise: Tensor) -> Tensor:
        return self.initial_scale * noise

    def model_input(self, step: int, x: Tensor) -> Tensor:
        return x / math.hypot(self.sigmas[step], 1.0)

    def x_0(self, step: int, x: Tensor, predicted: Tensor) -> Tensor:
        s = self.sigmas[step]
        if self.prediction == "epsilon":
            return x - s * predicted
        if self.prediction == "v_prediction":
            signal, spread = self.shares(s)
            return signal**2 * x - spread * predicted
        return predicted

    def step(self, step: int, x: Tensor, predicted: Tensor, draw: Draw) -> Tensor:
        s, s_next = self.sigmas[step], self.sigmas[step + 1]
        return x + (s_next - s) / s * (x - self.x_0(step, x, predicted))


class EulerAncestral(Euler):
    def step(self, step: int, x: Tensor, predicted: Tensor, draw: Draw) -> Tensor:
        s, s_next = self.sigmas[step], self.sigmas[step + 1]
        up = math.sqrt(s_next**2 * (s**2 - s_next**2)) / s
        down = math.sqrt(s_next**2 - up**2)
        moved = x + (down - s) / s * (x - self.x_0(step, x, predicted))
        return moved + up * draw() if up > 0 else moved


def build_sampler(name: str, schedule: ScheduleConfig, steps: int, eta: float = 0.0) -> Sampler:
    """Raises UserError for an unknown name, for steps that the schedule has not, for a schedule that the model's
    prediction does not fit, and for eta with another sampler than DDIM.
    """
    if name not in SAMPLERS:
        raise UserError(f"no sampler {name!r}; the samplers are {', '.join(SAMPLERS)}")
    if steps < 1:
        raise UserError(f"steps is {steps}; give at least 1")
    if schedule.rescale_betas_zero_snr and schedule.prediction_type == "epsilon":
        raise UserError(
            "the model predicts the noise and its schedule has zero terminal SNR, where noise tells nothing of the "
            "picture; correct its scheduler_config.json: such models predict v or the sample"
        )
    if eta and name != "ddim":
        raise UserError(f"eta is DDIM's, and {name} was asked for; leave it out, or take --sampler ddim")
    if not 0 <= eta <= 1:
        raise UserError(f"eta is {eta}; give 0 (no noise on the way) to 1 (as much as DDPM)")
    if name == "ddim":
        return Ddim(schedule, steps, eta)
    return {"dpm++": DpmSolver, "euler": Euler, "euler_a": EulerAncestral}[name](schedule, steps)


def draw_noise(shape: tuple[int, ...], generators: list[torch.Generator], like: Tensor | None = None) -> Tensor:
    """Standard normal noise [B, *shape]: each row from its own generator on the CPU, whoever is beside it."""
    rows = [torch.randn(shape, generator=generator) for generator in generators]
    noise = torch.stack(rows)
    return noise if like is None else noise.to(like)
