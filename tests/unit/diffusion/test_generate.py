"""Pictures of prompts: as diffusers' pipeline draws them, by seed alone, and through the command."""

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    StableDiffusionPipeline,
)
from PIL import Image

from apps.diffusion import sample
from apps.diffusion.attention import SlicedAttention, set_attention
from apps.diffusion.generate import PictureJob, Sampling, decode, draw_latents, generate
from apps.diffusion.images import grid, read_settings
from apps.diffusion.pipeline import save_pipeline
from apps.diffusion.samplers import draw_noise
from core.config import UserError
from core.trace.account import MemoryAccount
from tests.support.diffusion import narrow_pipeline
from tests.support.diffusion_training import tiny_pipeline

THEIRS = {"ddim": DDIMScheduler, "dpm++": DPMSolverMultistepScheduler, "euler": EulerDiscreteScheduler}


@pytest.fixture(scope="module")
def narrow():
    return narrow_pipeline(0)


@pytest.fixture(scope="module")
def folder(narrow, tmp_path_factory):
    return save_pipeline(narrow, tmp_path_factory.mktemp("generate") / "narrow")


@pytest.mark.parametrize("v2", [False, True])
def test_equals_the_pipeline_of_diffusers(v2):
    """Latents and pictures, with a negative prompt, rescaled guidance, and a picture that is not square."""
    ours = narrow_pipeline(3, v2=v2)
    parts = ours.modules | {"tokenizer": ours.tokenizer, "safety_checker": None, "feature_extractor": None}
    theirs = StableDiffusionPipeline(
        **parts, scheduler=DDIMScheduler.from_config(dict(ours.schedule)), requires_safety_checker=False
    )
    theirs.set_progress_bar_config(disable=True)
    jobs = [PictureJob("a red circle", 4), PictureJob("a photo of a dog", 5)]
    noise = draw_noise((4, 8, 6), [torch.Generator().manual_seed(job.seed) for job in jobs])
    for name, scheduler in THEIRS.items():
        sampling = Sampling(name, 3, 4.0, 0.5, negative="star", height=64, width=48)
        theirs.scheduler = scheduler.from_config(dict(ours.schedule))
        pictures = theirs(
            [job.prompt for job in jobs],
            negative_prompt=["star", "star"],
            num_inference_steps=3,
            guidance_scale=4.0,
            guidance_rescale=0.5,
            latents=noise.clone(),
            output_type="pt",
            height=64,
            width=48,
        ).images
        found = torch.stack([picture for _, picture in generate(ours, jobs, sampling)])
        assert found.std() > 0.01
        torch.testing.assert_close(found, pictures, rtol=0, atol=2e-5)


def test_a_picture_depends_on_its_prompt_and_seed_alone(narrow):
    sampling = Sampling("euler_a", 2, 3.0, height=32, width=32)
    jobs = [
        PictureJob("a red circle", 1),
        PictureJob("a dog", 2),
        PictureJob("a red circle", 3),
        PictureJob("a dog", 1),
    ]
    among = [picture for _, picture in generate(narrow, jobs, sampling, batch=3)]
    for job, picture in zip(jobs, among, strict=True):
        [(_, alone)] = generate(narrow, [job], sampling)
        torch.testing.assert_close(alone, picture, rtol=0, atol=2e-5)  # sums in another order
    assert (among[0] - among[2]).abs().max() > 1e-2
    assert (among[1] - among[3]).abs().max() > 1e-2


def test_without_guidance_there_is_one_pass(narrow, monkeypatch):
    rows = []
    monkeypatch.setattr(
        narrow.unet, "forward", lambda x, *a, **k: rows.append(len(x)) or (torch.zeros_like(x),), raising=False
    )
    for guidance in (1.0, 2.0):
        draw_latents(narrow, [PictureJob("a", 0)], Sampling("ddim", 2, guidance), (64, 64))
    assert rows == [1, 1, 2, 2]


def test_sliced_attention_is_the_same_attention_in_less_memory(narrow):
    pipeline = narrow_pipeline(1).to(torch.float64)
    x, text = torch.randn(2, 4, 16, 16, dtype=torch.float64), torch.randn(2, 7, 32, dtype=torch.float64)
    peaks, results, pictures = [], [], []
    for name, heads in (("flash", 1), ("sliced", 1), ("sliced", 16)):
        for module in (pipeline.unet, pipeline.vae):
            set_attention(module, name, heads)
        account = MemoryAccount()
        with torch.no_grad(), account:
            results.append(pipeline.unet(x, 10, text)[0])
        peaks.append(account.peak_bytes)
        if heads == 1:
            pictures += decode(pipeline, x[:1])
    assert results[1].dtype == torch.float64
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(results[2], results[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(pictures[1], pictures[0])
    assert peaks[2] > peaks[1] + 10 * 8 * 256 * 256
    processors = pipeline.unet.attn_processors.values()
    assert len(processors) == 32
    assert all(isinstance(processor, SlicedAttention) for processor in processors)


def test_a_tiled_decoder_needs_less_memory():
    pipeline = narrow_pipeline(2)
    latents = torch.randn(1, 4, 24, 24)
    peaks, pictures = [], []
    for tile in (None, 192, 64):
        if tile is not None:
            sample.tile_vae(pipeline, tile)
        account = MemoryAccount()
        with account:
            pictures += decode(pipeline, latents)
        peaks.append(account.peak_bytes)
    assert torch.equal(pictures[0], pictures[1])
    assert pictures[2].shape == pictures[0].shape
    assert peaks[2] < 0.5 * peaks[0]


def test_a_decoder_that_overflows_in_fp16_runs_again_in_fp32():
    pipeline = tiny_pipeline(0).to(torch.float16)
    latents = 3e4 * torch.randn(1, 4, 8, 8)
    assert not pipeline.vae.decode(latents.half()).sample.isfinite().all()
    [picture] = decode(pipeline, latents * pipeline.scaling_factor)
    assert picture.isfinite().all()
    assert picture.std() > 0.01
    assert pipeline.vae.dtype == torch.float32
    with pytest.raises(UserError, match="makes pictures that are not finite; sample in fp32 or bf16"):
        list(decode(pipeline, latents * float("nan")))


def test_the_command(folder, tmp_path, capsys):
    out = tmp_path / "pictures"
    options = ["--model", str(folder), "--out", str(out), "--steps", "2", "--images", "2", "--grid"]
    assert sample.main([*options, "--prompt", "a red circle", "a star, wide", "--seed", "7", "--negative", "dög"]) == 0
    names = ["00000-7.png", "00001-8.png", "00002-7.png", "00003-8.png", "grid.png"]
    assert sorted(path.name for path in out.iterdir()) == names
    settings = read_settings(out / names[3])
    assert (settings["prompt"], settings["seed"], settings["steps"]) == ("a star, wide", 8, 2)
    with Image.open(out / names[3]) as picture:
        assert picture.size == (64, 64)
        assert picture.text["parameters"].splitlines() == [
            "a star, wide",
            "Negative prompt: dög",
            "Steps: 2, Sampler: dpm++, CFG scale: 7.5, Seed: 8, Size: 64x64",
        ]
    with Image.open(out / "grid.png") as whole:
        assert whole.size == (130, 130)
    assert sample.main([*options, "--prompt", "a " * 90]) == 0
    assert "00005-1.png" in {path.name for path in out.iterdir()}
    assert "92 tokens and the text encoder reads 77" in capsys.readouterr().err


def test_pictures_are_numbered_on_beyond_99999(tmp_path):
    assert sample.next_number(tmp_path) == 0
    for name in ("00003-7.png", "99999-0.png", "100000-0.png", "grid.png", "9-mine.png"):
        (tmp_path / name).touch()
    assert sample.next_number(tmp_path) == 100_001


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "no prompt; say what to draw"),
        (["--prompt", "a", " "], "prompt 2 of 2 is empty"),
        (["--prompts", "nowhere.txt"], "cannot read nowhere.txt"),
        (["--prompt", "a", "--height", "60"], "height is 60; give a multiple of 8, such as 64"),
        (["--prompt", "a", "--height", "0"], "height is 0; give a multiple of 8, such as 8"),
        (["--prompt", "a", "--width", "0"], "width is 0; give a multiple of 8, such as 8"),
        (["--prompt", "a", "--steps", "2000"], "do not fit 1000 timesteps"),
        (["--prompt", "a", "--vae-tile", "32"], "vae_tile is 32; give a multiple of 8 from 64 on"),
        (["--prompt", "a", "--guidance", "-1"], "guidance is -1"),
        (["--prompt", "a", "--images", "0"], "images is 0"),
        (["--prompt", "a", "--seed", "-3"], "seed is -3"),
        (["--prompt", "a", "--device", "tpu9"], "device=tpu9; the devices are cpu and cuda"),
        (["--prompt", "a", "--model", "nowhere"], "nowhere holds no model_index.json"),
    ],
)
def test_refused(folder, tmp_path, options, said):
    with pytest.raises(UserError, match=said):
        sample.main(["--model", str(folder), "--out", str(tmp_path / "out"), *options])
    assert not (tmp_path / "out").exists()


def test_a_grid_has_gaps_on_white():
    whole = grid([Image.new("RGB", (4, 3), "black")] * 3, columns=2, gap=1)
    assert whole.size == (9, 7)
    assert whole.getpixel((4, 0)) == (255, 255, 255)
    assert whole.getpixel((5, 0)) == (0, 0, 0)
    assert whole.getpixel((5, 4)) == (255, 255, 255)
