"""Samplers against diffusers' own pipeline, evaluation by evaluation, for schedules of note and drawn at random."""

from copy import copy

import diffusers
import pytest
import torch
from diffusers import StableDiffusionPipeline

from apps.diffusion.generate import PictureJob, Sampling, check_sampling, draw_latents, guide
from apps.diffusion.noise import fields_of, own_scheduler, schedule
from apps.diffusion.samplers import CLASSES, MODEL, SAMPLERS, Sampler, build_scheduler, draw_noise
from core.config import UserError
from tests.support.schedules import FEW_TIMESTEPS, Case, case, compare, compare_or_refuse, shallow_pipeline

JOBS = [PictureJob("a dog", 1), PictureJob("a cat", 2)]
SEEDS = range(16)
REFUSED_SEEDS = (3, 7, 8, 12, 13)
"""Of these diffusers' pipeline raises; the latents of 7 are not finite."""
PREDICTS = {"dpm2": "v_prediction", "dpm2_a": "v_prediction", "heun": "v_prediction", "euler_a": "v_prediction"}
"""samplers of which diffusers' has no prediction of the sample"""
# What a folder may say that the samplers of this program used to leave out.
SAID = {
    "karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    "sde": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    "dpmsolver": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"}),
    "third order": ("DPMSolverMultistepScheduler", {"solver_order": 3}),
    "heun": ("DPMSolverMultistepScheduler", {"solver_type": "heun"}),
    "thresholding": ("DDIMScheduler", {"thresholding": True}),
    "old folder": ("DDIMScheduler", {"steps_offset": 0, "clip_sample": True}),
    "cosine": ("DDPMScheduler", {"beta_schedule": "squaredcos_cap_v2"}),
    "own betas": ("DDIMScheduler", {"trained_betas": torch.linspace(1e-4, 0.03, 1000).tolist()}),
    "of few steps": ("LCMScheduler", {}),
}


@pytest.fixture(scope="module")
def pipeline():
    torch.set_num_threads(1)
    return shallow_pipeline()


@pytest.mark.parametrize("name", SAMPLERS)
def test_each_sampler_is_that_of_diffusers(pipeline, name):
    few = FEW_TIMESTEPS if name.startswith("dpm2") else {}
    pipeline.schedule = schedule(prediction_type=PREDICTS.get(name, "epsilon"), **few)
    if name in ("lcm", "tcd"):
        pipeline.schedule |= {"_class_name": CLASSES[name]}
    compare(pipeline, Case(dict(pipeline.schedule), name, 4), Sampling(name, 4, 3.0, negative="star"), JOBS)


@pytest.mark.parametrize("what", SAID)
def test_what_a_folder_says_is_obeyed(pipeline, what):
    kind, changes = SAID[what]
    stored = schedule(**changes) | {"_class_name": kind}
    pipeline.schedule = {field: value for field, value in stored.items() if field != "timestep_spacing"}
    names = (MODEL,) if kind == "LCMScheduler" else (MODEL, "ddim", "dpm++")
    for name in names:
        if (what, name) == ("dpmsolver", "ddim"):
            continue
        compare(pipeline, Case(dict(pipeline.schedule), name, 5), Sampling(name, 5, 3.0), JOBS)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_schedules_equal_the_pipeline_of_diffusers(pipeline, seed):
    drawn = case(seed)
    pipeline.schedule = drawn.stored
    is_drawn = compare_or_refuse(pipeline, drawn, Sampling(drawn.name, drawn.steps, 3.0), JOBS)
    assert is_drawn == (seed not in REFUSED_SEEDS)


def test_options_are_those_of_from_config(pipeline):
    pipeline.schedule = schedule()
    for spacing in ("trailing", "linspace"):
        stored = schedule(timestep_spacing=spacing)
        other = copy(pipeline)
        other.schedule = stored
        found = draw_latents(pipeline, JOBS, Sampling("euler", 3, spacing=spacing), (16, 16))
        assert torch.equal(found, draw_latents(other, JOBS, Sampling("euler", 3), (16, 16)))
    scheduler = build_scheduler("dpm++", schedule(use_exponential_sigmas=True), sigmas="karras")
    assert (scheduler.config.use_karras_sigmas, scheduler.config.use_exponential_sigmas) == (True, False)
    noisy = draw_latents(pipeline, JOBS, Sampling("ddim", 3, eta=0.8), (16, 16))
    assert (noisy - draw_latents(pipeline, JOBS, Sampling("ddim", 3), (16, 16))).abs().max() > 0.01


@pytest.mark.parametrize("kind", CLASSES.values())
def test_a_folders_scheduler_is_mended_as_the_pipeline_of_diffusers_does(kind):
    changes = {field: value for field, value in (("steps_offset", 0), ("clip_sample", True)) if field in fields_of(
        getattr(diffusers, kind))}  # fmt: skip
    for stored in ({"_class_name": kind, **FEW_TIMESTEPS}, {"_class_name": kind, **FEW_TIMESTEPS, **changes}):
        parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "unet", "safety_checker", "feature_extractor"))
        scheduler = getattr(diffusers, kind).from_config(stored)
        theirs = StableDiffusionPipeline(**parts, scheduler=scheduler, requires_safety_checker=False).scheduler
        found, wanted = dict(own_scheduler(stored).config), dict(theirs.config)
        wanted.pop("_diffusers_version", None)
        assert set(found.pop("_use_default_values", ())) == set(wanted.pop("_use_default_values", ()))
        assert found == wanted


@pytest.mark.parametrize("name", ["euler_a", "ddpm", "dpm2_a", "lcm", "sde"])
def test_a_row_draws_from_its_own_generator(pipeline, name):
    """Whoever is beside it: noise that is added on the way too."""
    stored = {"lcm": {"_class_name": "LCMScheduler"}, "sde": {"_class_name": "DPMSolverMultistepScheduler"}}
    more = {"sde": {"algorithm_type": "sde-dpmsolver++"}, "dpm2_a": FEW_TIMESTEPS}.get(name, {})
    pipeline.schedule = schedule(**more) | stored.get(name, {})
    sampling = Sampling("model" if name == "sde" else name, 3, 3.0)
    among = draw_latents(pipeline, JOBS, sampling, (16, 16))
    for job, row in zip(JOBS, among):
        torch.testing.assert_close(draw_latents(pipeline, [job], sampling, (16, 16))[0], row, rtol=1e-6, atol=1e-6)
    assert (among[0] - among[1]).abs().max() > 0.1


@pytest.mark.parametrize("name", ["ddim", "dpm++", "euler", "heun", "unipc", "lms"])
def test_a_perfect_prediction_leads_to_the_sample(name):
    """Whatever noise there was, and with the coarsest steps: x_0 itself where the last step ends at no noise."""
    stored = schedule(prediction_type="sample", set_alpha_to_one=True, timestep_spacing="trailing")
    if name in ("heun", "lms"):
        stored = schedule(timestep_spacing="trailing")
    sampler = Sampler(build_scheduler(name, stored), 8)
    x_0 = torch.full((1, 1, 1, 2), 0.25, dtype=torch.float64)
    x = sampler.start(torch.ones_like(x_0))
    for timestep in sampler.timesteps:
        seen = sampler.model_input(x, timestep)
        share = _share(stored, float(timestep))
        predicted = x_0 if stored["prediction_type"] == "sample" else (seen - share**0.5 * x_0) / (1 - share) ** 0.5
        x = sampler.step(predicted, timestep, x, [])
    torch.testing.assert_close(x, x_0, rtol=2e-3, atol=2e-3)


def _share(stored, timestep):
    levels = own_scheduler(stored).alphas_cumprod.double()
    return float(levels[round(timestep)])


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


REFUSED = [
    ("euler", 0, {}, {}, "steps is 0"),
    ("euler", 1000, {"timestep_spacing": "leading"}, {}, "do not fit 1000 timesteps"),
    ("ddim", 1001, {"timestep_spacing": "trailing"}, {}, "do not fit 1000 timesteps"),
    ("euler", 5, {}, {"eta": 0.5}, "eta is 0.5, which euler has not; .* take --sampler ddim or tcd"),
    ("ddim", 5, {}, {"eta": 1.5}, "eta is 1.5"),
    ("ddim", 5, {"rescale_betas_zero_snr": True}, {}, "zero terminal SNR"),
    ("dpm++_single", 5, {}, {"spacing": "trailing"}, "spacing is trailing, and dpm\\+\\+_single has none"),
    ("ddim", 5, {}, {"sigmas": "karras"}, "sigmas is karras, which ddim has not"),
    ("lcm", 60, {"_class_name": "LCMScheduler"}, {}, "LCMScheduler takes no 60 steps"),
    ("dpm++", 5, {"_class_name": "LCMScheduler"}, {}, "distilled for LCMScheduler, .* give --sampler lcm --steps 4"),
    ("euler_a", 5, {"prediction_type": "sample"}, {}, "the folder's schedule does not fit euler_a"),
    ("dpm++", 5, {"algorithm_type": "dpmsolver", "_class_name": "DPMSolverMultistepScheduler"}, {}, "final_sigmas_t"),
]


@pytest.mark.parametrize(("name", "steps", "changes", "options", "said"), REFUSED)
def test_refused(pipeline, name, steps, changes, options, said):
    pipeline.schedule = schedule(**changes)
    with pytest.raises(UserError, match=said):
        check_sampling(pipeline, Sampling(name, steps, **options))
    with pytest.raises(UserError, match="no sampler 'plms'; the samplers are model, ddim"):
        build_scheduler("plms", schedule())


@pytest.mark.parametrize("options", [{"negative": "a blue circle"}, {"guidance_rescale": 0.7}])
def test_what_a_unet_that_is_told_its_guidance_cannot_obey_is_refused(pipeline, options, monkeypatch):
    monkeypatch.setattr(type(pipeline), "guidance_width", 8)
    monkeypatch.setattr(pipeline, "schedule", schedule())
    check_sampling(pipeline, Sampling("lcm", 2))
    (name,) = options
    with pytest.raises(UserError, match=f"{name} with a U-Net .*leave out --{name.replace('_', '-')}"):
        check_sampling(pipeline, Sampling("lcm", 2, **options))


@pytest.mark.parametrize("name", ["ddim", "dpm++", "euler", "euler_a", "unipc"])
def test_all_timesteps_of_a_schedule_can_be_taken(name):
    sampler = Sampler(build_scheduler(name, schedule(timestep_spacing="trailing")), 1000)
    assert sampler.timesteps.tolist() == list(range(999, -1, -1))
