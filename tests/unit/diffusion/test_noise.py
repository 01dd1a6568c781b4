"""The forward process against diffusers' DDPMScheduler and the formulae of the papers, in fp64."""

import pytest
import torch
from diffusers import DDPMScheduler

from apps.diffusion.noise import NoiseSchedule, schedule, with_offset, with_zero_terminal_snr
from core.config import UserError

F64 = torch.float64
PREDICTIONS = ("epsilon", "v_prediction", "sample")
SCHEDULES = [
    {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012},
    {"beta_schedule": "linear", "beta_start": 1e-4, "beta_end": 0.02},
    {"beta_schedule": "squaredcos_cap_v2", "num_train_timesteps": 250},
    {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "rescale_betas_zero_snr": True},
]
IDS = ["scaled_linear", "linear", "squaredcos", "zero_terminal_snr"]


def _pair(options: dict, prediction: str) -> tuple[NoiseSchedule, DDPMScheduler]:
    theirs = DDPMScheduler(**options, prediction_type=prediction)
    return NoiseSchedule({**theirs.config, "_class_name": "DDPMScheduler"}), theirs


@pytest.mark.parametrize("options", SCHEDULES, ids=IDS)
def test_levels_noise_and_velocity_are_those_of_diffusers(options: dict) -> None:
    ours, theirs = _pair(options, "v_prediction")
    assert torch.equal(ours.alphas_cumprod_T, theirs.alphas_cumprod.double())
    generator = torch.Generator().manual_seed(0)
    T = len(theirs.alphas_cumprod)
    timesteps = torch.cat([torch.tensor([0, T - 1]), torch.randint(T, (6,), generator=generator)])
    sample, noise = (torch.randn(8, 4, 3, 5, dtype=F64, generator=generator) for _ in range(2))
    # diffusers takes the roots of fp32 levels in fp64 where the sample is fp64, and so do we
    assert (ours.add_noise(sample, noise, timesteps) - theirs.add_noise(sample, noise, timesteps)).abs().max() < 1e-14
    assert (ours.target(sample, noise, timesteps) - theirs.get_velocity(sample, noise, timesteps)).abs().max() < 1e-14
    for prediction in ("epsilon", "sample"):
        if prediction == "epsilon" and options.get("rescale_betas_zero_snr"):
            continue
        other, _ = _pair(options, prediction)
        assert torch.equal(other.target(sample, noise, timesteps), noise if prediction == "epsilon" else sample)


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_a_prediction_gives_back_the_sample(prediction: str) -> None:
    ours, _ = _pair(SCHEDULES[0], prediction)
    sample, noise = torch.randn(2, 7, 4, 2, 2, dtype=F64).unbind()
    timesteps = torch.tensor([0, 1, 10, 250, 500, 900, 999])
    noisy, target = ours.add_noise(sample, noise, timesteps), ours.target(sample, noise, timesteps)
    assert torch.allclose(ours.sample_of(target, noisy, timesteps), sample, rtol=0, atol=1e-11)


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_min_snr_weighs_the_error_in_the_sample(prediction: str) -> None:
    """Whatever is predicted, the weighted error is min(SNR, gamma) times the squared error in x_0."""
    ours, theirs = _pair(SCHEDULES[0], prediction)
    levels = theirs.alphas_cumprod.double()
    timesteps = torch.tensor([0, 3, 100, 200, 300, 999])
    snr = levels[timesteps] / (1 - levels[timesteps])
    assert ours.snr(timesteps).tolist() == pytest.approx(snr.tolist(), rel=1e-12)
    assert snr[-1].item() == pytest.approx(0.00468, rel=1e-3)
    sample, noise, wrong = torch.randn(3, 6, 4, 2, 2, dtype=F64).unbind()
    noisy, target = ours.add_noise(sample, noise, timesteps), ours.target(sample, noise, timesteps)
    predicted = target + 1e-3 * wrong
    error = (ours.sample_of(predicted, noisy, timesteps) - sample).square().mean((1, 2, 3))
    weighted = ours.min_snr_weight(timesteps, 5.0) * (predicted - target).square().mean((1, 2, 3))
    assert weighted.tolist() == pytest.approx((snr.clamp(max=5.0) * error).tolist(), rel=1e-9)
    assert (snr > 5).any()
    assert (snr < 5).any()


def test_at_zero_snr_nothing_is_divided_by_it() -> None:
    for prediction, at_zero in (("v_prediction", 0.0), ("sample", 0.0)):
        ours, _ = _pair(SCHEDULES[3], prediction)
        assert ours.snr(torch.tensor([999])).item() == 0.0
        assert ours.min_snr_weight(torch.tensor([999]), 5.0).item() == at_zero
    epsilon, _ = _pair(SCHEDULES[0], "epsilon")
    epsilon.alphas_cumprod_T[-1] = 0.0
    assert epsilon.min_snr_weight(torch.tensor([999]), 5.0).item() == 1.0
    with pytest.raises(UserError, match="noise alone"):
        NoiseSchedule(schedule(rescale_betas_zero_snr=True))


def test_sixteen_bits_round_the_noisy_sample_and_not_the_levels() -> None:
    ours, _ = _pair(SCHEDULES[0], "epsilon")
    sample, noise = torch.randn(2, 500, 1, 2, 2, dtype=F64).unbind()
    timesteps = torch.arange(0, 1000, 2)
    exact = ours.add_noise(sample.bfloat16().double(), noise.bfloat16().double(), timesteps)
    wide = ours.add_noise(sample.bfloat16().float(), noise.bfloat16().float(), timesteps)
    assert (wide.double() - exact).abs().max() < 1e-6


def test_offset_noise_is_alike_in_a_channel() -> None:
    noise, offset = torch.zeros(2, 3, 4, 4), torch.randn(2, 3, 1, 1)
    shifted = with_offset(noise, offset, 0.1)
    assert torch.equal(shifted, (0.1 * offset).expand(2, 3, 4, 4))


def test_zero_terminal_snr_is_a_field_of_the_folders_scheduler_or_makes_it_ddims() -> None:
    euler = with_zero_terminal_snr({"_class_name": "EulerDiscreteScheduler", "prediction_type": "v_prediction"})
    assert euler["_class_name"] == "EulerDiscreteScheduler"
    pndm = with_zero_terminal_snr(schedule(_class_name="PNDMScheduler", prediction_type="v_prediction"))
    assert pndm["_class_name"] == "DDIMScheduler"
    for stored in (euler, pndm):
        assert (stored["rescale_betas_zero_snr"], stored["timestep_spacing"]) == (True, "trailing")
        assert NoiseSchedule(stored).snr(torch.tensor([999])).item() == 0.0
    assert (pndm["beta_schedule"], pndm["beta_end"], pndm["prediction_type"]) == (
        "scaled_linear",
        0.012,
        "v_prediction",
    )
