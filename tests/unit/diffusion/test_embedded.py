"""The pipeline that comes with the program: what it is, that it is small, and that an installation has it."""

import tomllib
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import load_file

from apps.diffusion.config import FinetuneConfig
from apps.diffusion.demo import captions, sizes
from apps.diffusion.demo.autoencoder import psnr_db, reconstruct
from apps.diffusion.demo.pictures import pixels_of, varied_drawings
from apps.diffusion.images import read_settings
from apps.diffusion.loading import load_pipeline
from apps.diffusion.pipeline import EMBEDDED
from apps.diffusion.sample import main as sample
from apps.diffusion.train import weights_of

ROOT = Path(__file__).parents[3]
MOST_BYTES = 6_000_000


def test_it_is_small_and_of_the_sizes_that_the_demo_says(tmp_path: Path) -> None:
    files = [path for path in EMBEDDED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
    for path in EMBEDDED.rglob("*.safetensors"):
        assert {tensor.dtype for tensor in load_file(path).values()} == {torch.float16}, path
    pipeline = load_pipeline(EMBEDDED)
    assert pipeline.schedule == sizes.tiny_schedule()
    tokenizer = sizes.write_tokenizer(captions.words(), tmp_path / "tokenizer")
    assert pipeline.tokenizer.get_vocab() == tokenizer.get_vocab()
    prompts = ["a red star on a pink ground", "ünknown, wörds!"]
    assert pipeline.tokenizer(prompts).input_ids == tokenizer(prompts).input_ids
    wanted = sizes.tiny_unet(), sizes.tiny_vae(), sizes.tiny_text_encoder(tokenizer)
    for found, made in zip((pipeline.unet, pipeline.vae, pipeline.text_encoder), wanted):
        assert _shapes(found) == _shapes(made)
    assert pipeline.unet.config.attention_head_dim == wanted[0].config.attention_head_dim


def test_its_vae_gives_pictures_back() -> None:
    drawn = pixels_of(varied_drawings(128, seed=1)[1::2])
    assert psnr_db(reconstruct(load_pipeline(EMBEDDED).vae, drawn), drawn) > 30, "dB; edges are sharp from there on"


def _shapes(module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def test_diffusers_loads_it() -> None:
    theirs, ours = StableDiffusionPipeline.from_pretrained(EMBEDDED, local_files_only=True), load_pipeline(EMBEDDED)
    for name in ("unet", "vae"):
        for key, tensor in getattr(theirs, name).state_dict().items():
            assert tensor.equal(getattr(ours, name).state_dict()[key]), key


def test_an_installation_has_every_file() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    package = ROOT / "apps" / "diffusion" / "demo"
    packed = {path for pattern in patterns["apps.diffusion.demo"] for path in package.glob(pattern)}
    assert {path for path in EMBEDDED.rglob("*") if path.is_file()} <= packed


def test_commands_start_from_it_where_no_weights_are_given(tmp_path: Path) -> None:
    assert weights_of(FinetuneConfig()) == EMBEDDED
    assert weights_of(FinetuneConfig(model=tmp_path)) == tmp_path
    assert sample(["--prompt", "a red star", "--steps", "1", "--out", str(tmp_path), "--device", "cpu"]) == 0
    assert read_settings(tmp_path / "00000-0.png")["model"] == str(EMBEDDED)
