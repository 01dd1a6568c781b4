"""The configurations of U-Net, VAE and text encoder, read off the shapes of a single-file checkpoint.

Numbers of heads are in no shape: v1 has 8 throughout, v2 heads of 64 channels, the text encoders too.
"""

from collections.abc import Mapping
from typing import Any

from apps.diffusion.formats.ldm_names import CLIP, OPEN_CLIP, UNET, VAE
from core.config import UserError

Shapes = Mapping[str, tuple[int, ...]]

_HEAD_DIM = 64
_V1_HEADS = 8
_MOST_BLOCKS = 100
# Blocks of OpenCLIP's text tower; the last one is not used.
_OPEN_CLIP_BLOCKS = 24


class _At:
    """Shapes by name under a prefix.  Raises UserError where one is missing that tells the topology."""

    def __init__(self, shapes: Shapes, prefix: str, origin: object):
        self._shapes, self._prefix, self._origin = shapes, prefix, origin

    def __call__(self, key: str) -> tuple[int, ...]:
        if self._prefix + key not in self._shapes:
            raise UserError(f"{self._origin} lacks {self._prefix}{key}; it is no whole Stable Diffusion checkpoint")
        return self._shapes[self._prefix + key]

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self._shapes

    def count(self, pattern: str) -> int:
        """How many of the keys `pattern.format(0)`, `pattern.format(1)`, … there are in a row."""
        number = 0
        while pattern.format(number) in self:
            number += 1
        return number


def unet_config(shapes: Shapes, open_clip: bool, origin: object) -> dict[str, Any]:
    at = _At(shapes, UNET, origin)
    ends = [i for i in range(1, _MOST_BLOCKS) if f"input_blocks.{i}.0.op.weight" in at]
    if not ends:
        raise UserError(f"{origin} has a U-Net of one resolution; Stable Diffusion v1 and v2 have four")
    layers, blocks = ends[0] - 1, len(ends) + 1
    firsts = [block * (layers + 1) + 1 for block in range(blocks)]
    channels = [at(f"input_blocks.{i}.0.out_layers.3.weight")[0] for i in firsts]
    attends = [f"input_blocks.{i}.1.norm.weight" in at for i in firsts]
    if not any(attends):
        raise UserError(f"{origin} has a U-Net without attention to a text; it is no Stable Diffusion checkpoint")
    block = f"input_blocks.{firsts[attends.index(True)]}.1"
    return {
        "sample_size": 64,
        "in_channels": at("input_blocks.0.0.weight")[1],
        "out_channels": at("out.2.weight")[0],
        "down_block_types": ["CrossAttnDownBlock2D" if a else "DownBlock2D" for a in attends],
        "up_block_types": ["CrossAttnUpBlock2D" if a else "UpBlock2D" for a in reversed(attends)],
        "block_out_channels": channels,
        "layers_per_block": layers,
        "cross_attention_dim": at(f"{block}.transformer_blocks.0.attn2.to_k.weight")[1],
        "attention_head_dim": [max(1, c // _HEAD_DIM) for c in channels] if open_clip else _V1_HEADS,
        "use_linear_projection": len(at(f"{block}.proj_in.weight")) == 2,
    }


def vae_config(shapes: Shapes, origin: object) -> dict[str, Any]:
    at = _At(shapes, VAE, origin)
    blocks = at.count("encoder.down.{}.block.0.conv1.weight")
    return {
        "in_channels": at("encoder.conv_in.weight")[1],
        "out_channels": at("decoder.conv_out.weight")[0],
        "down_block_types": ["DownEncoderBlock2D"] * blocks,
        "up_block_types": ["UpDecoderBlock2D"] * blocks,
        "block_out_channels": [at(f"encoder.down.{b}.block.0.conv1.weight")[0] for b in range(blocks)],
        "layers_per_block": at.count("encoder.down.0.block.{}.conv1.weight"),
        "latent_channels": at("post_quant_conv.weight")[1],
        "sample_size": 512,
        "scaling_factor": 0.18215,
    }


def text_config(shapes: Shapes, open_clip: bool, origin: object) -> dict[str, Any]:
    if open_clip:
        at = _At(shapes, OPEN_CLIP, origin)
        blocks = at.count("transformer.resblocks.{}.ln_1.weight")
        vocabulary, width = at("token_embedding.weight")
        wide, positions = at("transformer.resblocks.0.mlp.c_fc.weight")[0], at("positional_embedding")[0]
        blocks -= blocks == _OPEN_CLIP_BLOCKS
    else:
        at = _At(shapes, CLIP, origin)
        blocks = at.count("encoder.layers.{}.layer_norm1.weight")
        vocabulary, width = at("embeddings.token_embedding.weight")
        wide, positions = at("encoder.layers.0.mlp.fc1.weight")[0], at("embeddings.position_embedding.weight")[0]
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": wide,
        "num_hidden_layers": blocks,
        "num_attention_heads": max(1, width // _HEAD_DIM),
        "max_position_embeddings": positions,
        "hidden_act": "gelu" if open_clip else "quick_gelu",
        "projection_dim": 512 if open_clip else width,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
    }
