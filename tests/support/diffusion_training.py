"""A pipeline of a few thousand parameters for 16 px, pictures to train it on, and batches without an encoder."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from apps.diffusion.data.batches import Draws, LatentBatches
from apps.diffusion.data.encoding import Entry
from apps.diffusion.noise import Prediction, schedule
from apps.diffusion.pipeline import Pipeline, build_text_encoder, build_unet, build_vae
from tests.support.diffusion import narrow_tokenizer

LATENTS = (4, 8, 8)
TOKENS = 16


def tiny_pipeline(
    seed: int = 0, prediction: Prediction = "epsilon", width: int = 16, shallow: bool = False
) -> Pipeline:
    """
    shallow  with a U-Net of one block that reads the prompt: a third of the parameters, for what no depth matters to
    """
    tokenizer = narrow_tokenizer(TOKENS)
    unet = {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
        "block_out_channels": [8, 16],
        "layers_per_block": 1,
        "cross_attention_dim": width,
        "attention_head_dim": 2,
        "norm_num_groups": 4,
    }
    one_block = {"down_block_types": ["CrossAttnDownBlock2D"], "up_block_types": ["UpBlock2D"], "mid_block_type": None}
    vae = {
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
        "block_out_channels": [4, 8],
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 4,
        "sample_size": 16,
    }
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": TOKENS,
        "bos_token_id": 512,
        "eos_token_id": 513,
        "pad_token_id": 513,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        unet |= one_block | {"block_out_channels": [8]} if shallow else {}
        modules = (build_unet(unet).eval(), build_vae(vae).eval(), build_text_encoder(text).eval())
    return Pipeline(*modules, tokenizer, schedule(prediction_type=prediction))


def write_pictures(folder: Path, num: int, captions: bool = True, sizes=((24, 24), (40, 20))) -> Path:
    folder.mkdir(parents=True)
    generator = np.random.default_rng(num)
    for number in range(num):
        width, height = sizes[number % len(sizes)]
        pixels = generator.integers(0, 256, (height // 4, width // 4, 3)).astype(np.uint8)
        Image.fromarray(pixels).resize((width, height)).save(folder / f"{number}.png")
        if captions:
            (folder / f"{number}.txt").write_text(f"a red circle on {number}")
    return folder


def drawn_batches(rows: int, classes: bool, tokens: bool, seed: int = 5, **draws) -> LatentBatches:
    """Seven images of two sizes whose moments and texts are random numbers, and three of a class."""
    sizes = ((16, 16), (16, 8))
    entries = [Entry(f"{n}", {sizes[n % 2]: (f"{n}.0", f"{n}.1")}) for n in range(7)]
    class_entries = [Entry("100", {size: (f"{50 + n}.{side}",) for side, size in enumerate(sizes)}) for n in range(3)]

    def moments(key: str) -> torch.Tensor:
        number, variant = map(int, key.split("."))
        size = sizes[variant if number >= 50 else number % 2]
        generator = torch.Generator().manual_seed(1000 * number + variant)
        return torch.randn(2, 4, size[1] // 2, size[0] // 2, generator=generator)

    def text(caption: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int(caption or 999))
        if tokens:
            return torch.randint(0, 500, (TOKENS,), generator=generator)
        return torch.randn(TOKENS, 16, generator=generator)

    options = {"num_timesteps": 1000, "scaling_factor": 0.7, "caption_dropout": 0.2, **draws}
    return LatentBatches(entries, moments, text, rows, seed, Draws(**options), class_entries if classes else ())
