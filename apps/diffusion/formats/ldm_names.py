"""Names of the tensors of U-Net, VAE and text encoder in single-file checkpoints, v1 and v2.

Those names are of the modules of the original code (CompVis/latent-diffusion, Stability-AI/stablediffusion): blocks of
the U-Net are counted through from input to output, those of the VAE's decoder from the output, v1's text encoder stands
as in transformers, v2's as in OpenCLIP, whose queries, keys and values are one matrix.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

UNET, VAE = "model.diffusion_model.", "first_stage_model."
CLIP, OPEN_CLIP = "cond_stage_model.transformer.text_model.", "cond_stage_model.model."


@dataclass(frozen=True)
class Stored:
    """The place of a tensor in a file.

    third      of the rows of that matrix, 0 to 2; None: the whole
    is_kernel  it stands as a convolution of 1 x 1
    """

    key: str
    third: int | None = None
    is_kernel: bool = False

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole entry in the file, for a tensor of this shape."""
        shape = shape if self.third is None else (3 * shape[0], *shape[1:])
        return (*shape, 1, 1) if self.is_kernel else shape

    def read(self, value: Tensor) -> Tensor:
        """Our tensor, of the file's."""
        value = value.flatten(1) if self.is_kernel else value
        return value if self.third is None else value.chunk(3)[self.third]


Names = dict[str, Stored]


def stored_names(component: str, names: Iterable[str], config: Mapping[str, Any], open_clip: bool = False) -> Names:
    """The place in the file of each tensor of a component of this configuration."""
    if component == "unet":
        return {name: Stored(UNET + _unet_key(name, config)) for name in names}
    if component == "vae":
        return {name: _vae_stored(name, len(config["block_out_channels"])) for name in names}
    return {name: _open_clip_stored(name) if open_clip else Stored(CLIP + name) for name in names}


def to_file(names: Names, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The file's entries of a component's tensors."""
    pieces: dict[Stored, Tensor] = {stored: tensors[name] for name, stored in names.items()}
    entries: dict[str, Tensor] = {}
    for stored, tensor in pieces.items():
        if stored.third is None:
            entries[stored.key] = tensor[..., None, None] if stored.is_kernel else tensor
        elif stored.third == 0:
            entries[stored.key] = torch.cat([pieces[Stored(stored.key, third)] for third in range(3)])
    return entries


# --- U-Net ------------------------------------------------------------------------------------------------------------

_UNET_ENDS = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_UNET_MIDDLE = {"resnets.0": "0", "attentions.0": "1", "resnets.1": "2"}
_UNET_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}


def _unet_key(name: str, config: Mapping[str, Any]) -> str:
    layers = config["layers_per_block"]
    module, _, kind = name.rpartition(".")
    if module in _UNET_ENDS:
        return f"{_UNET_ENDS[module]}.{kind}"
    if name.startswith("mid_block."):
        _, part, index, rest = name.split(".", 3)
        return f"middle_block.{_UNET_MIDDLE[f'{part}.{index}']}.{_inside(part, rest)}"
    side, block, part, index, rest = name.split(".", 4)
    first = int(block) * (layers + 1)
    if side == "down_blocks":
        if part == "downsamplers":
            return f"input_blocks.{first + layers + 1}.0.op.{kind}"
        return f"input_blocks.{first + int(index) + 1}.{_slot(part)}.{_inside(part, rest)}"
    if part == "upsamplers":
        attends = config["up_block_types"][int(block)].startswith("CrossAttn")
        return f"output_blocks.{first + layers}.{2 if attends else 1}.conv.{kind}"
    return f"output_blocks.{first + int(index)}.{_slot(part)}.{_inside(part, rest)}"


def _slot(part: str) -> int:
    return {"resnets": 0, "attentions": 1}[part]


def _inside(part: str, rest: str) -> str:
    if part == "attentions":
        return rest
    module, _, kind = rest.rpartition(".")
    return f"{_UNET_RESNET[module]}.{kind}"


# --- VAE --------------------------------------------------------------------------------------------------------------

_VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}


def _vae_stored(name: str, blocks: int) -> Stored:
    attention = re.fullmatch(r"(\w+)\.mid_block\.attentions\.0\.(.+)\.(weight|bias)", name)
    if attention:
        coder, module, kind = attention.groups()
        is_kernel = module != "group_norm" and kind == "weight"
        return Stored(f"{VAE}{coder}.mid.attn_1.{_VAE_ATTENTION[module]}.{kind}", is_kernel=is_kernel)
    key = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
    key = re.sub(r"mid_block\.resnets\.(\d+)", lambda m: f"mid.block_{int(m[1]) + 1}", key)
    key = re.sub(r"down_blocks\.(\d+)\.resnets\.(\d+)", r"down.\1.block.\2", key)
    key = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", key)
    key = re.sub(r"up_blocks\.(\d+)\.resnets\.(\d+)", lambda m: f"up.{blocks - 1 - int(m[1])}.block.{m[2]}", key)
    key = re.sub(r"up_blocks\.(\d+)\.upsamplers\.0", lambda m: f"up.{blocks - 1 - int(m[1])}.upsample", key)
    return Stored(VAE + key)


# --- OpenCLIP ---------------------------------------------------------------------------------------------------------

_OPEN_CLIP = {
    "embeddings.position_embedding.weight": "positional_embedding",
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "final_layer_norm.weight": "ln_final.weight",
    "final_layer_norm.bias": "ln_final.bias",
}
_OPEN_CLIP_BLOCK = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}
_THIRDS = {"self_attn.q_proj": 0, "self_attn.k_proj": 1, "self_attn.v_proj": 2}


def _open_clip_stored(name: str) -> Stored:
    if name in _OPEN_CLIP:
        return Stored(OPEN_CLIP + _OPEN_CLIP[name])
    _, _, index, rest = name.split(".", 3)
    block = f"{OPEN_CLIP}transformer.resblocks.{index}"
    module, _, kind = rest.rpartition(".")
    if module in _THIRDS:
        return Stored(f"{block}.attn.in_proj_{kind}", third=_THIRDS[module])
    return Stored(f"{block}.{_OPEN_CLIP_BLOCK[module]}.{kind}")
