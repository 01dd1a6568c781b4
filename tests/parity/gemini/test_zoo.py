"""Models of transformers, diffusers and peft, as they are: bit-equal to training without Gemini, in random budgets."""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.gemini import Run, require_equal, train

os.environ["HF_HUB_OFFLINE"] = "1"
VOCABULARY = 37


def ids(step: int, length: int = 6) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(step))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=8, n_embd=32, n_layer=4, n_head=4))


def recomputing_gpt2() -> nn.Module:
    model = gpt2()
    model.gradient_checkpointing_enable()
    return model.train()


def opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 4}
    return OPTForCausalLM(OPTConfig(**sizes, num_attention_heads=4, max_position_embeddings=8, word_embed_proj_dim=24))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": 24, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(gpt2(), LoraConfig(r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))


def unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        in_channels=2,
        out_channels=2,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
        norm_num_groups=4,
    )


def language_loss(model: nn.Module, step: int) -> Tensor:
    torch.manual_seed(step)  # dropout
    return model(input_ids=ids(step), labels=ids(step)).loss


def denoising_loss(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    noisy, noise = (torch.randn(2, 2, 8, 8, generator=generator) for _ in range(2))
    context = torch.randn(2, 3, 8, generator=generator)
    return F.mse_loss(model(noisy, torch.tensor([3, 700]), encoder_hidden_states=context).sample, noise)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], Tensor] = language_loss
    steps: int = 10


CASES = [Case(gpt2), Case(recomputing_gpt2), Case(opt), Case(t5), Case(lora), Case(unet, denoising_loss, 4)]


def run(case: Case, budget: int | None) -> Run:
    options: dict[str, Any] = {} if budget is None else {"sample": lambda: lambda model: case.loss(model, 0)}

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, fused=True)

    return train(case.make, budget, adamw, case.steps, case.loss, **options)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.make.__name__)
def test_bit_equal_in_random_budgets(case: Case) -> None:
    """With all of it on the device, and in two budgets between the least and that, of which one is below half."""
    expected = run(case, None)
    everything = run(case, 1 << 30)
    require_equal(everything, expected)
    assert everything.gemini.moved_bytes == 0
    planned = everything.gemini.data.planned
    whole = planned.trace.model_bytes
    others = planned.plan.device_peak_bytes - whole
    draw = random.Random(case.make.__name__)
    for share in (draw.uniform(0.15, 0.45), draw.uniform(0.45, 0.95)):
        found = run(case, others + int(share * whole))
        require_equal(found, expected)
        tier, data = found.gemini.data.tier, found.gemini.data
        assert tier.peak_bytes <= tier.budget_bytes
        assert found.gemini.moved_bytes > 0
        assert share > 0.45 or tier.num_evictions > 0
        absent = [m for c in data.chunks if not c.is_filled for m in c.members]
        assert absent
        assert all(m.chunk.buffer.untyped_storage().nbytes() == 0 for m in absent if not m.chunk.resident)
