"""Small models for the tests of quantization."""

from pathlib import Path

import torch
from torch import Tensor, nn

from core.models import Decoder, DecoderConfig, initialise, save_pretrained

_SHARED = {"vocab_size": 61, "dim": 48, "num_layers": 2, "num_heads": 3, "ffn_dim": 192, "max_length": 24}
_FAMILIES = {
    "gpt2": {},
    "opt": {"position_offset": 2, "activation": "relu"},
    "bloom": {"positions": "alibi", "embedding_norm": True},
    "llama": {"positions": "rotary", "norm": "rms_norm", "activation": "swiglu", "num_kv_heads": 1},
    "gpt_neox": {"positions": "rotary", "rotary_share": 0.5, "activation": "gelu", "parallel_residual": True},
}
_FAMILIES["phi3"] = _FAMILIES["llama"] | {"attention_bias": False, "mlp_bias": False}
_FAMILIES["qwen3"] = _FAMILIES["phi3"] | {"qk_norm": True, "head_dim": 32}
FAMILIES = tuple(_FAMILIES)


def decoder(family: str = "opt", **changes: object) -> Decoder:
    """Random, with weights large enough that every layer matters."""
    model = Decoder(DecoderConfig(**(_SHARED | {"family": family} | _FAMILIES[family] | changes)))
    initialise(model, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
    return model


def saved(folder: Path, family: str = "opt", max_shard_bytes: int = 5 << 30, **changes: object) -> Decoder:
    """The same, also written as a Hugging Face folder."""
    model = decoder(family, **changes)
    save_pretrained(model, model.config, folder, max_shard_bytes=max_shard_bytes)
    (folder / "tokenizer.json").write_text("{}")
    return model


def tokens(rows: int = 2, length: int = 9) -> Tensor:
    return torch.randint(0, 61, (rows, length), generator=torch.Generator().manual_seed(2))


class UNet(nn.Module):
    """Convolutions, a transposed one, time embedding, cross attention and norms, as in diffusers' U-Nets."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(4, 16, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 16))
        self.norm = nn.GroupNorm(4, 16)
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.attention = nn.MultiheadAttention(32, 4, kdim=20, vdim=20, batch_first=True)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.conv_out = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.norm(self.conv_in(x) + self.time(time)[..., None, None])
        h = self.down(x)
        flat = h.flatten(2).mT
        h = (flat + self.attention(flat, text, text)[0]).mT.reshape(h.shape)
        return self.conv_out(x + self.up(h))


def unet_inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(shape, generator=generator) for shape in ((2, 4, 8, 8), (2, 8), (2, 5, 20)))
