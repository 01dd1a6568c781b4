"""Narrow Stable Diffusion: topology and tensor names of v1 and v2 at small widths, with random weights, in code."""

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTokenizer

from apps.diffusion.noise import Prediction, prediction_of, schedule
from apps.diffusion.pipeline import (
    Pipeline,
    build_text_encoder,
    build_unet,
    build_vae,
)
from apps.diffusion.shapes import SD_V1, SD_V2

_WORDS = ("photo", "dog", "red", "circle", "of", "on", "star")


def narrow_pipeline(seed: int = 0, v2: bool = False, prediction_type: Prediction | None = None) -> Pipeline:
    """8.6 M parameters for 64 px; 686 tensors in the U-Net, 248 in the VAE, 12 (v2: 23) blocks of text.

    v2               OpenCLIP's depth and activation, heads of a fixed size, linear projections, v-prediction
    prediction_type  by default that of the model
    """
    shape, width = (SD_V2, 64) if v2 else (SD_V1, 32)
    heads = {"attention_head_dim": [2, 4, 8, 8]} if v2 else {}
    widths = {"block_out_channels": [32, 64, 128, 128], "cross_attention_dim": width, "sample_size": 8}
    tokenizer = narrow_tokenizer()
    text = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 4, "projection_dim": width}
    ids = {"vocab_size": len(tokenizer), "bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        unet = build_unet(shape.unet | widths | heads)
        vae = build_vae(shape.vae | {"block_out_channels": [32, 64, 128, 128], "sample_size": 64})
        text_encoder = build_text_encoder(shape.text_encoder | text | ids)
    modules = (unet.eval(), vae.eval(), text_encoder.eval())
    prediction_type = prediction_type or prediction_of(shape.schedule)
    return Pipeline(*modules, tokenizer, schedule(prediction_type=prediction_type))


def narrow_tokenizer(max_length: int = 77) -> CLIPTokenizer:
    """Bytes, bytes that end a word, and a few whole words; 512 begins and 513 ends and fills up, as in CLIP's order."""
    letters = sorted(ByteLevel.alphabet())
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        left = word[0]
        for letter in (*word[1:-1], f"{word[-1]}</w>"):
            if left + letter not in pieces:
                merges.append((left, letter))
                pieces.append(left + letter)
            left += letter
    vocab = {piece: index for index, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=max_length)
