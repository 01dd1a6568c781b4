"""What a user gets wrong with Stable Diffusion: one line, exit code 2, before anything is drawn or trained."""

import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from apps.diffusion.__main__ import APP
from apps.diffusion.formats.lora import Pair, save_lora
from apps.diffusion.formats.single_file import save_single_file
from apps.diffusion.pipeline import Pipeline, build_unet, save_pipeline
from core.config import run_command
from tests.support.diffusion import narrow_pipeline
from tests.support.diffusion_training import tiny_pipeline, write_pictures


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """weights: whole ones, of v-prediction, of SDXL, of 9 channels, single files; pictures, subject, another's LoRA."""
    folder = tmp_path_factory.mktemp("bad")
    save_pipeline(tiny_pipeline(), folder / "weights")
    save_pipeline(tiny_pipeline(prediction="v_prediction"), folder / "weights-v")
    save_pipeline(tiny_pipeline(), folder / "weights-xl")
    index = json.loads((folder / "weights-xl" / "model_index.json").read_text())
    index |= {"_class_name": "StableDiffusionXLPipeline", "text_encoder": ["transformers", "CLIPTextModelXL"]}
    (folder / "weights-xl" / "model_index.json").write_text(json.dumps(index))
    save_pipeline(with_nine_channels(tiny_pipeline()), folder / "weights-9")
    save_single_file(narrow_pipeline(0, v2=True), folder / "said.safetensors")
    save_file(load_file(folder / "said.safetensors"), folder / "v2.safetensors")  # without its header
    write_pictures(folder / "pictures", 3)
    write_pictures(folder / "subject", 2, captions=False)
    (folder / "prompts.txt").write_text("a dog\n\na cat\n")
    lora = {"unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k": Pair(*torch.ones(2, 4, 4), 4.0)}
    save_lora(lora, folder / "lora.safetensors")
    return folder


def with_nine_channels(pipeline: Pipeline) -> Pipeline:
    """As those for inpainting have it."""
    return replace(pipeline, unet=build_unet(dict(pipeline.unet.config) | {"in_channels": 9}))


def png_that_claims(path: Path, width: int, height: int) -> None:
    """A PNG whose header says a size, and nothing behind it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b""))


def refusal(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The line with which a command refuses."""
    code = run_command(APP.dispatch, [str(word) for word in argv])
    said = capsys.readouterr().err.strip()
    assert code == 2, said
    assert said.startswith("error: ")
    assert "\n" not in said
    return said


TRAIN = ("finetune", "--model={folder}/weights", "--data.images={folder}/pictures")
DREAM = ("dreambooth", "--model={folder}/weights", "--instance-dir={folder}/subject")
DRAW = ("sample", "--model={folder}/weights", "--prompt=a dog")
CASES: list[tuple[tuple[str, ...], str]] = [
    # a wrong folder
    ((*TRAIN, "--model={folder}/pictures"), "holds no model_index.json; give a diffusers folder"),
    ((*TRAIN, "--model={folder}/weights-xl"), "is SDXL (StableDiffusionXLPipeline), which is not supported"),
    ((*TRAIN, "--model={folder}/nowhere"), "nowhere does not exist"),
    ((*TRAIN, "--data.images={folder}/weights"), "holds no image; give a folder of images"),
    ((*TRAIN, "--data.images={folder}/nowhere"), "is no folder; give one that holds images"),
    ((*DRAW, "--model={folder}/pictures"), "holds no model_index.json; give a diffusers folder"),
    (("quantize", "{folder}/pictures", "{folder}/out"), "holds no model_index.json; give a diffusers folder"),
    (("plan", "--model={folder}/pictures"), "holds no model_index.json; give a diffusers folder"),
    # channels that do not fit each other
    ((*TRAIN, "--model={folder}/weights-9"), "the U-Net takes 9 channels and makes 4, the VAE's latents have 4"),
    ((*DRAW, "--model={folder}/weights-9"), "the U-Net takes 9 channels and makes 4, the VAE's latents have 4"),
    # an empty prompt
    ((*DRAW, "--prompt= "), "prompt 1 of 1 is empty; say what to draw"),
    (("sample", "--model={folder}/weights", "--prompts={folder}/prompts.txt"), "prompt 2 of 3 is empty"),
    ((*TRAIN, "--data.prompt= "), "data.prompt is empty"),
    ((*DREAM, "--instance-prompt= "), "--instance-prompt is empty"),
    ((*DREAM, "--instance-prompt=sks", "--class-dir={folder}/c", "--class-prompt="), "--class-prompt is empty"),
    # half a character
    ((*DRAW, "--prompt=a \udcff dog"), "holds half a character (a lone surrogate); write it in UTF-8"),
    ((*TRAIN, "--data.prompt=a \udcff dog"), "holds half a character (a lone surrogate); write it in UTF-8"),
    # a LoRA for another model
    ((*DRAW, "--lora={folder}/lora.safetensors"), "was made for another model: "),
    # a v-prediction checkpoint loaded as epsilon
    ((*TRAIN, "--model={folder}/weights-v", "--noise.prediction=epsilon"), "predicts v_prediction"),
    ((*DRAW, "--model={folder}/weights-v", "--prediction-type=epsilon"), "predicts v_prediction, and --pred"),
    ((*DRAW, "--model={folder}/v2.safetensors"), "does not say what its U-Net predicts; give --prediction-type"),
    ((*DRAW, "--model={folder}/said.safetensors", "--prediction-type=epsilon"), "predicts v_prediction"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CASES)))
def test_one_line_before_anything_begins(folder: Path, tmp_path: Path, capsys, case: int) -> None:
    argv, said = CASES[case]
    out = () if argv[0] in ("quantize", "plan") else (f"--out={tmp_path}/out",)
    tokenizer = (f"--tokenizer={folder}/weights/tokenizer",) if ".safetensors" in "".join(argv[1:2] + argv[-2:]) else ()
    tokenizer = tokenizer if argv[0] == "sample" else ()
    assert said in refusal(capsys, *(word.format(folder=folder) for word in argv), *out, *tokenizer)
    assert not (tmp_path / "out").exists()
    assert not (folder / "out").exists()


def test_images_of_all_kinds_train_together_and_impossible_ones_are_left_out(folder: Path, tmp_path: Path, capsys):
    """Grey, transparent, CMYK, 16 bits and palette beside RGB; 1 pixel and 20,000 x 20,000 are named and counted."""
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (24, 24, 4)).astype(np.uint8)
    colour = Image.fromarray(pixels[..., :3])
    colour.save(pictures / "rgb.png")
    colour.convert("L").save(pictures / "grey.png")
    colour.convert("P").save(pictures / "palette.png")
    colour.convert("CMYK").save(pictures / "cmyk.jpg")
    Image.fromarray(pixels).save(pictures / "rgba.png")
    Image.fromarray(pixels[..., 0].astype(np.uint16) * 257).save(pictures / "sixteen.png")
    Image.new("RGB", (1, 1)).save(pictures / "pixel.png")
    png_that_claims(pictures / "vast.png", 20_000, 20_000)
    options: dict[str, Any] = {"model": folder / "weights", "data.images": pictures, "data.prompt": "a dog"}
    options |= {"out": tmp_path / "run", "steps": 1, "device": "cpu", "checkpoint.every": 0, "data.global-batch": 6}
    argv = ["finetune", *(f"--{name}={value}" for name, value in options.items()), "--log.no-tensorboard"]
    assert run_command(APP.dispatch, argv) == 0
    said = capsys.readouterr().out
    assert "left out: pixel.png: it has 1 x 1 pixels; give images of at least 16 x 16" in said
    assert "left out: vast.png: it has" in said
    assert "2 of 8 images" in said
    for name in ("pixel.png", "vast.png"):
        alone = tmp_path / name.partition(".")[0]
        alone.mkdir()
        (alone / name).write_bytes((pictures / name).read_bytes())
        argv[2], argv[4] = f"--data.images={alone}", f"--out={tmp_path}/other"
        assert f"no image in {alone} can be used: {name}: it has" in refusal(capsys, *argv)
        assert not (tmp_path / "other").exists()
