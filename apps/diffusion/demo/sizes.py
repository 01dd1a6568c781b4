"""The modules of the tiny pipeline: Stable Diffusion's own classes, for pictures of 32 x 32 pixels.

The VAE makes 8 x 8 latents of 4 channels of them, as far as that of Stable Diffusion goes in channels, and half as far
in size. The tokenizer is CLIP's byte-level BPE whose merges are learned from the words of the captions alone: each is
one token, and any other text is spelled.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKL, UNet2DConditionModel
from tokenizers import pre_tokenizers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from apps.diffusion.initialise import begin_as_identity
from apps.diffusion.modules import VAE, TextEncoder, UNet
from apps.diffusion.noise import Schedule, schedule

PIXELS = 32
LATENT_CHANNELS, LATENT_SIZE = 4, 8
PROMPT_TOKENS = 16
_WIDTH = 64
_START, _END = "<|startoftext|>", "<|endoftext|>"


def tiny_vae(scaling_factor: float = 1.0) -> VAE:
    """[B, 3, 32, 32] <-> [B, 4, 8, 8]"""
    make_vae: Any = AutoencoderKL  # whose widths are annotated as one number
    vae = make_vae(
        block_out_channels=(16, 32, 64),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=2,  # groups of few channels would normalise plain colours away
        sample_size=PIXELS,
        scaling_factor=scaling_factor,
        mid_block_add_attention=False,
        force_upcast=False,
    )
    begin_as_identity(vae)
    return vae


def tiny_unet() -> UNet:
    unet = UNet2DConditionModel(
        sample_size=LATENT_SIZE,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        block_out_channels=(48, 96),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=_WIDTH,
        attention_head_dim=4,  # the number of heads, as in Stable Diffusion v1
        norm_num_groups=8,
    )
    begin_as_identity(unet)
    return unet


def tiny_text_encoder(tokenizer: Any) -> TextEncoder:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=_WIDTH,
        intermediate_size=4 * _WIDTH,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=PROMPT_TOKENS,
        projection_dim=_WIDTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config)


def tiny_schedule() -> Schedule:
    """The schedule of Stable Diffusion, with the velocity as the target: few steps of training go further with it."""
    return schedule(prediction_type="v_prediction")


def learned_merges(words: Iterable[str]) -> list[tuple[str, str]]:
    """Merges that make each word one token, the most frequent pair first and of equals the first in the alphabet.

    Sennrich et al. 2016, arXiv:1508.07909, algorithm 1. The trainer of `tokenizers` breaks ties by chance.
    """
    pieces = [[*word[:-1], f"{word[-1]}</w>"] for word in sorted(set(words))]
    merges: list[tuple[str, str]] = []
    while counts := Counter(pair for parts in pieces for pair in itertools.pairwise(parts)):
        merges.append(min(counts, key=lambda pair: (-counts[pair], pair)))
        pieces = [_merged(parts, merges[-1]) for parts in pieces]
    return merges


def _merged(parts: list[str], pair: tuple[str, str]) -> list[str]:
    made: list[str] = []
    for part in parts:
        # A piece that was just joined is no left half: it is longer than any piece of the pair.
        if made and (made[-1], part) == pair:
            made[-1] += part
        else:
            made.append(part)
    return made


def write_tokenizer(words: Iterable[str], folder: Path) -> CLIPTokenizer:
    """The tokenizer's folder: vocab.json and merges.txt as CLIP has them.  Returns what transformers loads of it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = learned_merges(words)
    entries = [*alphabet, *(f"{letter}</w>" for letter in alphabet), *("".join(pair) for pair in merges), _START, _END]
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {entry: index for index, entry in enumerate(dict.fromkeys(entries))}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False) + "\n", encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    special = dict.fromkeys(("eos_token", "pad_token", "unk_token"), _END) | {"bos_token": _START}
    settings = special | {"model_max_length": PROMPT_TOKENS, "tokenizer_class": "CLIPTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return CLIPTokenizer.from_pretrained(folder, local_files_only=True)
