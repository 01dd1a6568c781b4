"""Forty models of transformers, diffusers and our own, tiny: what is planned as it is, and compared with one rank.

Each is its library's own, from a configuration, without a download. No dropout; a batch that two and three ranks share
alike and four do not, a length and sizes within that many do not divide. In fp64 all of a model computes in fp64 within
`tests.support.zoo.in_fp64`.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import foreign, traced
from tests.support.foreign import GROUPED, TEXT, VOCABULARY, of_family
from tests.support.traced import Case

os.environ["HF_HUB_OFFLINE"] = "1"
ROWS, LENGTH, CLASSES = 6, 7, 5


def _ids() -> Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=_generator())


def _drawn(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, generator=_generator())


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


# --- text -------------------------------------------------------------------------------------------------------------


def _tokens() -> dict[str, Any]:
    """Of a causal model: the shift is its own."""
    ids = _ids()
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def _masked_tokens() -> dict[str, Any]:
    ids = _ids()
    return {"input_ids": ids, "labels": ids.flip(1)}


def _pairs() -> dict[str, Any]:
    """Of an encoder and a decoder: lengths that differ."""
    ids = _ids()
    return {"input_ids": ids[:, :5], "labels": ids.flip(1), "use_cache": False}


def _causal(family: str, **sizes: Any) -> Case:
    return Case(of_family("CausalLM", family, **sizes), _tokens)


def _seen_causal(name: str) -> Case:
    return Case((foreign.CASES | foreign.UNSEEN)[name].make, _tokens)


_MPT = {"vocab_size": VOCABULARY, "d_model": 48, "n_heads": 4, "n_layers": 2, "max_seq_len": 16}
_CODEGEN = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 48, "n_layer": 2, "n_head": 4, "rotary_dim": 4}
_NEO = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 16}
_NEO |= {"attention_types": [[["global", "local"], 1]], "window_size": 4}
CAUSAL = {
    **{name: _seen_causal(name) for name in ("gpt2", "opt", "bloom", "llama", "mixtral")},
    **{name: _seen_causal(name) for name in ("gpt_neox", "gptj", "phi3", "gemma2", "qwen3", "falcon")},
    "mistral": _causal("mistral", **GROUPED, sliding_window=4),
    "qwen2": _causal("qwen2", **GROUPED),
    "phi": _causal("phi", **TEXT),
    "gemma": _causal("gemma", **GROUPED, head_dim=6),
    "gemma3": _causal("gemma3_text", **GROUPED, head_dim=6, sliding_window=4),
    "stablelm": _causal("stablelm", **GROUPED),
    "starcoder2": _causal("starcoder2", **GROUPED),
    "olmo": _causal("olmo", **GROUPED),
    "olmo2": _causal("olmo2", **GROUPED),
    "cohere": _causal("cohere", **GROUPED),
    "mpt": _causal("mpt", **_MPT),
    "codegen": _causal("codegen", **_CODEGEN),
    "gpt_neo": _causal("gpt_neo", **_NEO),
}


# --- pictures, speech, proteins ---------------------------------------------------------------------------------------


def _pictures() -> dict[str, Any]:
    return {"pixel_values": _drawn(3, 16, 16), "labels": torch.arange(ROWS) % CLASSES}


def _captions() -> dict[str, Any]:
    return {"input_ids": _ids(), "pixel_values": _drawn(3, 16, 16), "return_loss": True}


def _spoken() -> dict[str, Any]:
    return {"input_features": _drawn(8, 20), "labels": _ids(), "use_cache": False}


def _waves() -> dict[str, Any]:
    return {"input_values": _drawn(120), "labels": torch.arange(ROWS) % CLASSES}


def _noisy() -> dict[str, Any]:
    return {"sample": _drawn(2, 8, 8), "timestep": torch.arange(ROWS)}


def _prompted() -> dict[str, Any]:
    return _noisy() | {"encoder_hidden_states": _drawn(3, 8)}


def _labelled() -> dict[str, Any]:
    return {
        "hidden_states": _drawn(2, 8, 8),
        "timestep": torch.arange(ROWS),
        "class_labels": torch.arange(ROWS) % CLASSES,
    }


def _square(output: Any) -> Tensor:
    return output.sample.square().mean()


def resnet() -> nn.Module:
    """With BatchNorm, whose moments are of the whole batch."""
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes: dict[str, Any] = {"embedding_size": 12, "hidden_sizes": [12, 20], "depths": [1, 2], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(**sizes | {"num_labels": CLASSES}))


def wav2vec2() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    sizes: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 80, "conv_dim": (12, 20), "conv_kernel": (5, 3), "conv_stride": (3, 2)}
    sizes |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 20}
    none = ("hidden", "attention", "activation", "feat_proj", "final")
    sizes |= {f"{name}_dropout": 0.0 for name in none} | {"layerdrop": 0.0, "apply_spec_augment": False}
    return Wav2Vec2ForSequenceClassification(Wav2Vec2Config(**sizes | {"num_labels": CLASSES}))


def unet_2d() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        in_channels=2,
        out_channels=2,
        block_out_channels=(12, 20),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=4,
    )


def unet_2d_condition() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        in_channels=2,
        out_channels=2,
        block_out_channels=(12, 20),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
        norm_num_groups=4,
    )


def vae() -> nn.Module:
    from diffusers import AutoencoderKL

    widths: dict[str, Any] = {"block_out_channels": (12, 20), "layers_per_block": 1, "norm_num_groups": 4}
    blocks: dict[str, Any] = {
        f"{way}_block_types": (f"{way.title()}{coder}Block2D",) * 2
        for way, coder in (("down", "Encoder"), ("up", "Decoder"))
    }
    return AutoencoderKL(in_channels=2, out_channels=2, latent_channels=4, sample_size=8, **widths, **blocks)


def dit() -> nn.Module:
    """Which drops no class: a drawn number would decide."""
    from diffusers import DiTTransformer2DModel
    from diffusers.models.embeddings import LabelEmbedding

    model = DiTTransformer2DModel(
        num_attention_heads=3,
        attention_head_dim=4,
        in_channels=2,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=CLASSES,
        norm_num_groups=4,
    )
    for module in model.modules():
        if isinstance(module, LabelEmbedding):
            module.dropout_prob = 0.0
    return model


OTHERS = {
    "bert": Case(foreign.bert, _masked_tokens),
    "roberta": Case(of_family("MaskedLM", "roberta", **TEXT), _masked_tokens),
    "electra": Case(foreign.UNSEEN["electra"].make, _masked_tokens),
    "t5": Case(foreign.t5, _pairs),
    "vit": Case(foreign.vit, _pictures),
    "swin": Case(foreign.UNSEEN["swin"].make, _pictures),
    "convnext": Case(lambda: traced.convnext(drop_path=0.0), _pictures),
    "resnet": Case(resnet, _pictures),
    "clip": Case(foreign.clip, _captions),
    "whisper": Case(foreign.whisper, _spoken),
    "wav2vec2": Case(wav2vec2, _waves),
    "unet_2d": Case(unet_2d, _noisy, _square),
    "unet_2d_condition": Case(unet_2d_condition, _prompted, _square),
    "vae": Case(vae, lambda: {"sample": _drawn(2, 8, 8)}, _square),
    "dit": Case(dit, _labelled, _square),
    "evoformer": traced.CASES["evoformer"],
}

MODELS: dict[str, Case] = CAUSAL | OTHERS


def made(
    name: str, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, dict[str, Any], Callable[[Any], Tensor] | None]:
    """The model in training, its parameters always the same; its inputs; its loss, where its output has none."""
    case = MODELS[name]
    torch.manual_seed(0)
    model, inputs = case.make().to(dtype).train(), case.inputs()
    wide = {
        key: given.to(dtype) if isinstance(given, Tensor) and given.is_floating_point() else given
        for key, given in inputs.items()
    }
    return model, wide, case.loss
