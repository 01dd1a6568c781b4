"""Models that were never written for Gemini, tiny: of transformers, diffusers and peft, and their losses on any rows.

No dropout: n ranks learn from the same rows what one rank does. In fp64 all of a model computes in fp64 (`in_fp64`).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"
VOCABULARY, ROWS, LENGTH = 37, 4, 3  # few tokens: it is model data that is to be more than fits

LIBRARIES = (
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.opt.modeling_opt",
    "transformers.models.t5.modeling_t5",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.clip.modeling_clip",
    "diffusers.models.unets.unet_2d_condition",
    "peft",
)
"""Modules that take long to import."""


def gpt2(dim: int = 48) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": 8, "n_embd": dim, "n_layer": 3, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def recomputing_gpt2() -> nn.Module:
    model = gpt2()
    model.gradient_checkpointing_enable()
    return model.train()


def opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 48, "ffn_dim": 96, "num_hidden_layers": 3}
    return OPTForCausalLM(
        OPTConfig(**sizes, num_attention_heads=4, max_position_embeddings=8, word_embed_proj_dim=24, dropout=0.0)
    )


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0))


def mixtral() -> nn.Module:
    """Experts of which each token sees two of six: some are not routed to in some steps."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    return MixtralForCausalLM(
        MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=6, num_experts_per_tok=2)
    )


def lora() -> nn.Module:
    """Most of the model is frozen, and moves too: wide, since without gradients it is less beside activations."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(gpt2(128), LoraConfig(r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))


def unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=4,
        in_channels=2,
        out_channels=2,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
        norm_num_groups=4,
    )


def clip() -> nn.Module:
    """With a parameter of no dims (its temperature), which no rank can have a part of; and one without elements."""
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8,
        "bos_token_id": 0,
        "eos_token_id": VOCABULARY - 1,
        **sizes,
    }
    model = CLIPModel(
        CLIPConfig(text_config=text, vision_config={"image_size": 8, "patch_size": 4, **sizes}, projection_dim=32)
    )
    model.nothing = nn.Parameter(torch.empty(0, 3))
    return model


Batch = dict[str, Tensor]


def text(step: int) -> Batch:
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def language_loss(model: nn.Module, batch: Batch) -> Tensor:
    """What a model computes itself it computes in fp32."""
    return F.cross_entropy(model(input_ids=batch["input_ids"]).logits.flatten(0, 1), batch["labels"].flatten())


def translation_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(input_ids=batch["input_ids"], decoder_input_ids=batch["labels"].flip(1)).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def pictures(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    drawn = {name: torch.randn(ROWS, 2, 4, 4, generator=generator) for name in ("noisy", "noise")}
    context = torch.randn(ROWS, 3, 8, generator=generator)
    return {**drawn, "context": context, "t": torch.randint(0, 1000, (ROWS,), generator=generator)}


def denoising_loss(model: nn.Module, batch: Batch) -> Tensor:
    dtype = next(model.parameters()).dtype
    noisy, context = (batch[name].to(dtype) for name in ("noisy", "context"))
    sample = model(noisy, batch["t"], encoder_hidden_states=context).sample
    return F.mse_loss(sample.float(), batch["noise"])


def captioned(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return {
        "input_ids": text(step)["input_ids"],
        "pixel_values": torch.randn(ROWS, 3, 8, 8, generator=generator),
        "alike": torch.randn(ROWS, generator=generator),
    }


def likeness_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Of each picture and its own text, so that a row's loss does not depend on the others."""
    pixels = batch["pixel_values"].to(next(model.parameters()).dtype)
    found = model(input_ids=batch["input_ids"], pixel_values=pixels)
    return F.mse_loss(found.logits_per_image.diagonal().float(), batch["alike"])


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch] = text
    loss: Callable[[nn.Module, Batch], Tensor] = language_loss

    def share(self, model: nn.Module, step: int, rank: int = 0, num_ranks: int = 1) -> Tensor:
        """What a rank's rows add to the loss of the whole batch."""
        rows = ROWS // num_ranks
        mine = {name: values[rank * rows :][:rows] for name, values in self.batch(step).items()}
        return self.loss(model, mine) * (rows / ROWS)


CASES = {
    "gpt2": Case(gpt2),
    "recomputing gpt2": Case(recomputing_gpt2),
    "opt": Case(opt),
    "t5": Case(t5, loss=translation_loss),
    "mixtral": Case(mixtral),
    "lora": Case(lora),
    "unet": Case(unet, pictures, denoising_loss),
    "clip": Case(clip, captioned, likeness_loss),
}


@contextmanager
def in_fp64() -> Iterator[None]:
    """Within, what asks for fp32 of something in fp64 gets it as it is: norms and routers of some models do.

    And torch's grouped products, which know no fp64, are one product an expert.
    """
    convert, of_type, softmax, grouped_mm = Tensor.to, Tensor.type, F.softmax, F.grouped_mm

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.dtype == torch.float64 and (args[:1] == (torch.float32,) or kwargs.get("dtype") == torch.float32):
            return self
        return convert(self, *args, **kwargs)

    def as_type(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self if self.dtype == torch.float64 and args[:1] == (torch.float32,) else of_type(self, *args, **kwargs)

    def wide_softmax(x: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
        return softmax(x, dim, _stacklevel, None if x.dtype == torch.float64 else dtype)

    def wide_grouped_mm(x: Tensor, weights: Tensor, *, offs: Tensor) -> Tensor:
        if x.dtype != torch.float64:
            return grouped_mm(x, weights, offs=offs)
        expert = torch.searchsorted(offs, torch.arange(len(x), device=x.device), right=True)
        return sum((expert == e).unsqueeze(1) * (x @ weight) for e, weight in enumerate(weights.unbind()))

    with (
        patch.object(Tensor, "to", to),
        patch.object(Tensor, "type", as_type),
        patch.object(Tensor, "float", lambda self: convert(self, torch.float64)),
        patch.object(F, "softmax", wide_softmax),
        patch.object(F, "grouped_mm", wide_grouped_mm),
    ):
        yield
