"""Samplers step by step against diffusers' schedulers, which are made to compute in fp64."""

import math
from dataclasses import replace

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
)
from diffusers.schedulers import (
    scheduling_ddim,
    scheduling_dpmsolver_multistep,
    scheduling_euler_ancestral_discrete,
    scheduling_euler_discrete,
)

from apps.diffusion.generate import guide
from apps.diffusion.noise import NoiseSchedule, ScheduleConfig
from apps.diffusion.samplers import SAMPLERS, build_sampler, draw_noise
from core.config import UserError

THEIRS = {
    "ddim": (DDIMScheduler, scheduling_ddim),
    "dpm++": (DPMSolverMultistepScheduler, scheduling_dpmsolver_multistep),
    "euler": (EulerDiscreteScheduler, scheduling_euler_discrete),
    "euler_a": (EulerAncestralDiscreteScheduler, scheduling_euler_ancestral_discrete),
}
SPACINGS = ("leading", "trailing", "linspace")
# Predictions with whether the schedule has zero terminal SNR.
PREDICTIONS = (("epsilon", False), ("v_prediction", False), ("v_prediction", True), ("sample", False))


class _Wide:
    """A library whose float32 is float64."""

    def __init__(self, library):
        self._library = library

    def __getattr__(self, name):
        return getattr(self._library, "float64" if name == "float32" else name)


def _theirs(monkeypatch, name, schedule, steps):
    kind, module = THEIRS[name]
    for library in ("torch", "np"):
        monkeypatch.setattr(module, library, _Wide(getattr(module, library)))
    scheduler = kind.from_config(schedule.to_json())
    share_T = NoiseSchedule(schedule).alphas_cumprod_T.clone()
    if name == "ddim":
        scheduler.final_alpha_cumprod = torch.ones((), dtype=torch.float64) if schedule.set_alpha_to_one else share_T[0]
    elif schedule.rescale_betas_zero_snr:
        assert float(scheduler.alphas_cumprod[-1]) == 2.0**-24
        share_T[-1] = 2.0**-24
    torch.testing.assert_close(scheduler.alphas_cumprod, share_T, rtol=1e-4, atol=1e-7)
    scheduler.alphas_cumprod = share_T  # their betas, which are rounded to fp32
    scheduler.set_timesteps(steps)
    monkeypatch.undo()
    for library in ("torch", "np"):
        monkeypatch.setattr(module, library, _Wide(getattr(module, library)))
    return scheduler


def _predict(x, timestep):
    return torch.sin(3 * x + float(timestep) / 100)


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("name", SAMPLERS)
def test_equals_diffusers_step_by_step(name, spacing, monkeypatch):
    compared = 0
    for prediction, zero_snr in PREDICTIONS:
        if (name, prediction) == ("euler_a", "sample"):
            continue  # which diffusers' has not
        for steps, eta in ((5, 0.0), (17, 0.0), (20, 0.7 if name == "ddim" else 0.0)):
            schedule = ScheduleConfig(
                prediction_type=prediction,
                rescale_betas_zero_snr=zero_snr,
                timestep_spacing=spacing,
                set_alpha_to_one=steps == 5,
            )
            ours, theirs = build_sampler(name, schedule, steps, eta), _theirs(monkeypatch, name, schedule, steps)
            assert ours.timesteps.tolist() == theirs.timesteps.tolist()
            noise = draw_noise((4, 3, 5), [torch.Generator().manual_seed(7)]).double()
            x, y = ours.start(noise), noise * theirs.init_noise_sigma
            draws, generator = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
            draw = lambda draws=draws, x=x: torch.randn(x.shape, dtype=x.dtype, generator=draws)  # noqa: E731
            options = {"generator": generator} | ({"eta": eta} if eta else {})
            for step, timestep in enumerate(theirs.timesteps):
                seen, seen_there = ours.model_input(step, x), theirs.scale_model_input(y, timestep)
                torch.testing.assert_close(seen, seen_there, rtol=1e-10, atol=1e-10)
                x = ours.step(step, x, _predict(seen, timestep), draw)
                y = theirs.step(_predict(seen_there, timestep), timestep, y, **options).prev_sample
                assert y.dtype == torch.float64
                torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10, msg=f"{prediction} {steps} {step}")
            compared += 1
    assert compared >= 9


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_perfect_prediction_leads_to_the_sample(name):
    """Whatever noise there was, and with the coarsest steps: x_0 itself where the last step ends at no noise."""
    schedule = ScheduleConfig(prediction_type="sample", set_alpha_to_one=True, timestep_spacing="trailing")
    sampler = build_sampler(name, schedule, 8)
    x_0, noise = torch.full((1, 2), 0.25, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    x = sampler.start(noise)
    for step in range(8):
        x = sampler.step(step, x, x_0, lambda: noise)
    torch.testing.assert_close(x, x_0, rtol=1e-12, atol=1e-12)


def test_noise_of_a_row_comes_from_its_own_generator():
    alone = draw_noise((3, 2), [torch.Generator().manual_seed(5)])
    among = draw_noise((3, 2), [torch.Generator().manual_seed(s) for s in (1, 5, 9)])
    assert torch.equal(alone[0], among[1])
    assert not torch.equal(among[0], among[1])


def test_guidance():
    generator = torch.Generator().manual_seed(0)
    without, with_prompt = torch.randn(2, 3, 4, 4, 4, dtype=torch.float64, generator=generator)
    assert torch.equal(guide(without, with_prompt, 0.0, 0.0), without)
    torch.testing.assert_close(guide(without, with_prompt, 1.0, 0.0), with_prompt)
    full = guide(without, with_prompt, 9.0, 1.0)
    torch.testing.assert_close(full.std((1, 2, 3)), with_prompt.std((1, 2, 3)))
    half = guide(without, with_prompt, 9.0, 0.5)
    torch.testing.assert_close(half, (full + guide(without, with_prompt, 9.0, 0.0)) / 2)


@pytest.mark.parametrize(
    ("name", "steps", "changes", "eta", "said"),
    [
        ("heun", 5, {}, 0.0, "no sampler 'heun'; the samplers are ddim"),
        ("euler", 0, {}, 0.0, "steps is 0"),
        ("euler", 1000, {"timestep_spacing": "leading"}, 0.0, "do not fit 1000 timesteps"),
        ("ddim", 1001, {"timestep_spacing": "trailing"}, 0.0, "do not fit 1000 timesteps"),
        ("euler", 5, {}, 0.5, "eta is DDIM's"),
        ("ddim", 5, {}, 1.5, "eta is 1.5"),
        ("ddim", 5, {"rescale_betas_zero_snr": True}, 0.0, "zero terminal SNR"),
    ],
)
def test_refused(name, steps, changes, eta, said):
    with pytest.raises(UserError, match=said):
        build_sampler(name, replace(ScheduleConfig(), **changes), steps, eta)


def test_all_timesteps_of_a_schedule_can_be_taken():
    for name in SAMPLERS:
        sampler = build_sampler(name, ScheduleConfig(timestep_spacing="trailing"), 1000)
        assert sampler.timesteps.tolist() == list(range(999, -1, -1))
    assert math.isfinite(build_sampler("euler", ScheduleConfig(), 3).initial_scale)
