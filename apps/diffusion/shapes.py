"""The published Stable Diffusion models, as configurations of diffusers' and transformers' modules.

v1   CLIP ViT-L/14's text tower, 8 heads throughout, predicts the noise, 512 px
     (`attention_head_dim` means the number of heads in this U-Net, a misnomer that stayed)
v2   OpenCLIP ViT-H/14's text tower without its last block, heads of 64 channels, linear projections;
     `sd_v2_base` predicts the noise at 512 px, `sd_v2` the velocity at 768 px

The three share the autoencoder. Rombach et al. 2022, arXiv:2112.10752.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from apps.diffusion.noise import Schedule, schedule

Modules = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Configurations of `unet`, `vae` and `text_encoder`, and the noise they were trained with."""

    unet: dict[str, Any]
    vae: dict[str, Any]
    text_encoder: dict[str, Any]
    schedule: Schedule = field(default_factory=schedule)


_UNET = {
    "sample_size": 64,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
    "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
    "block_out_channels": [320, 640, 1280, 1280],
    "layers_per_block": 2,
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
    "norm_num_groups": 32,
}
_VAE = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 4,
    "norm_num_groups": 32,
    "sample_size": 512,
    "scaling_factor": 0.18215,
}
_TEXT = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "projection_dim": 768,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
_V2_UNET = {"attention_head_dim": [5, 10, 20, 20], "cross_attention_dim": 1024, "use_linear_projection": True}
_V2_TEXT = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
    "hidden_act": "gelu",
    "projection_dim": 512,
}

SD_V1 = Shape(_UNET, _VAE, _TEXT)
SD_V2_BASE = Shape(_UNET | _V2_UNET, _VAE, _TEXT | _V2_TEXT)
SD_V2 = replace(
    SD_V2_BASE,
    # fp16 overflows in 2.1's attention: scores are computed in fp32
    unet=_UNET | _V2_UNET | {"sample_size": 96, "upcast_attention": True},
    vae=_VAE | {"sample_size": 768},
    schedule=schedule(prediction_type="v_prediction"),
)

SHAPES: dict[str, Shape] = {"sd_v1": SD_V1, "sd_v2_base": SD_V2_BASE, "sd_v2": SD_V2}


def meta_modules(shape: Shape) -> Modules:
    """`unet`, `vae` and `text_encoder` without memory: names, shapes and forwards."""
    from apps.diffusion.pipeline import build_text_encoder, build_unet, build_vae

    with torch.device("meta"):
        return {
            "unet": build_unet(shape.unet),
            "vae": build_vae(shape.vae),
            "text_encoder": build_text_encoder(shape.text_encoder),
        }
