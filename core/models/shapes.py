"""Published shapes, by name. `SHAPES["gpt2_124m"]` is a DecoderConfig.

GPT-2: Radford et al. (2019). GPT-3: Brown et al. (2020), table 2.1, where two rows do not multiply out (1.3B has 24
heads of 128 in a model of 2048, 13B a model of 5140); taken as 16 heads and as 5120. OPT: Zhang et al. (2022), table 1,
and the released configurations. BLOOM: BigScience (2022), table 3. Llama: Touvron et al. (2023), Llama team (2024).
Mistral: Jiang et al. (2023), without its window, as in release 0.2, and with it, as in the first. Mixtral: Jiang et al.
(2024), table 1. Gemma 3: Gemma team (2025), table 1, and the released configuration. Qwen3: Qwen team (2025), table 1.
Phi-3: Microsoft (2024), section 2, with the window of the released mini-4k. Pythia: Biderman et al. (2023), table 1.
GPT-NeoX: Black et al. (2022). BERT: Devlin et al. (2019).
switch_gpt2_124m is GPT-2 with experts in every second block, as Switch Transformers (Fedus et al. 2021) place them.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from core.models.decoder import DecoderConfig, RopeScaling
from core.models.hf_config import config_from_hf
from core.nn.routing import MoEConfig


def shape(
    name: str, num_layers: int, dim: int, num_heads: int, ffn_dim: int = 0, num_kv_heads: int | None = None, **more: Any
) -> DecoderConfig:
    """A decoder of a family; what is not given is as transformers has it by default, and the MLP 4 * dim wide."""
    sizes = {"num_layers": num_layers, "dim": dim, "num_heads": num_heads, "ffn_dim": ffn_dim or 4 * dim}
    return replace(config_from_hf({"model_type": name}), **sizes, num_kv_heads=num_kv_heads, **more)


gpt, opt, bloom = partial(shape, "gpt2"), partial(shape, "opt"), partial(shape, "bloom")
neox, bert = partial(shape, "gpt_neox"), partial(shape, "bert")
llama = partial(shape, "llama", max_length=4096, norm_eps=1e-5)  # Llama 2
llama3 = partial(llama, vocab_size=128256, max_length=8192, rope_theta=500_000.0)
qwen3 = partial(shape, "qwen3", max_length=40960, rope_theta=1e6)
mixtral = partial(shape, "mixtral", max_length=32768, moe=MoEConfig(num_experts=8, experts_per_token=2))

SHAPES: dict[str, DecoderConfig] = {
    # 16 thin layers and 8 heads: cut by every mesh of up to 8 ranks, trained in seconds; bytes as tokens and one more.
    "debug": DecoderConfig(vocab_size=257, dim=64, num_layers=16, num_heads=8, ffn_dim=128, max_length=128),
    "debug_moe": replace(mixtral(4, 64, 8, 64), vocab_size=257, max_length=128, rope_theta=1e4),
    "debug_bert": bert(4, 64, 8, 128, vocab_size=258, max_length=128),
    "gpt2_124m": gpt(12, 768, 12),
    "gpt2_medium": gpt(24, 1024, 16),
    "gpt2_large": gpt(36, 1280, 20),
    "gpt2_xl": gpt(48, 1600, 25),
    "gpt3_125m": gpt(12, 768, 12, max_length=2048),
    "gpt3_350m": gpt(24, 1024, 16, max_length=2048),
    "gpt3_760m": gpt(24, 1536, 16, max_length=2048),
    "gpt3_1_3b": gpt(24, 2048, 16, max_length=2048),
    "gpt3_2_7b": gpt(32, 2560, 32, max_length=2048),
    "gpt3_6_7b": gpt(32, 4096, 32, max_length=2048),
    "gpt3_13b": gpt(40, 5120, 40, max_length=2048),
    "gpt3_175b": gpt(96, 12288, 96, max_length=2048),
    "opt_125m": opt(12, 768, 12),
    "opt_350m": replace(opt(24, 1024, 16), embed_dim=512, norm_first=False, final_norm=False),
    "opt_1_3b": opt(24, 2048, 32),
    "opt_2_7b": opt(32, 2560, 32),
    "opt_6_7b": opt(32, 4096, 32),
    "opt_13b": opt(40, 5120, 40),
    "opt_30b": opt(48, 7168, 56),
    "opt_66b": opt(64, 9216, 72),
    "opt_175b": opt(96, 12288, 96),
    "bloom_560m": bloom(24, 1024, 16),
    "bloom_1b1": bloom(24, 1536, 16),
    "bloom_1b7": bloom(24, 2048, 16),
    "bloom_3b": bloom(30, 2560, 32),
    "bloom_7b1": bloom(30, 4096, 32),
    "bloom_176b": bloom(70, 14336, 112),
    "bert_base": bert(12, 768, 12),
    "bert_large": bert(24, 1024, 16),
    "llama_7b": llama(32, 4096, 32, 11008),
    "llama_13b": llama(40, 5120, 40, 13824),
    "llama_70b": llama(80, 8192, 64, 28672, 8),
    "llama3_8b": llama3(32, 4096, 32, 14336, 8),
    "llama3_70b": llama3(80, 8192, 64, 28672, 8),
    "llama3_1b": replace(
        llama3(16, 2048, 32, 8192, 8), max_length=131_072, tied_head=True, rope_scaling=RopeScaling(factor=32.0)
    ),
    "mistral_7b": replace(llama(32, 4096, 32, 14336, 8), family="mistral", max_length=32768),
    "mistral_7b_v0_1": replace(llama(32, 4096, 32, 14336, 8), family="mistral", max_length=32768, window=4096),
    "gemma3_1b": shape("gemma3_text", 26, 1152, 4, 6912, 1, vocab_size=262_144, max_length=32768, window=512),
    "mixtral_8x7b": mixtral(32, 4096, 32, 14336, 8),
    "mixtral_8x22b": replace(mixtral(56, 6144, 48, 16384, 8), max_length=65536),
    "qwen3_0_6b": qwen3(28, 1024, 16, 3072, 8, head_dim=128, tied_head=True),
    "qwen3_8b": qwen3(36, 4096, 32, 12288, 8),
    "qwen3_32b": qwen3(64, 5120, 64, 25600, 8, head_dim=128),
    "phi3_3_8b": shape("phi3", 32, 3072, 32, 8192, window=2047),
    "pythia_160m": neox(12, 768, 12, vocab_size=50304),
    "pythia_6_9b": neox(32, 4096, 32),
    "neox_20b": neox(44, 6144, 64),
    "switch_gpt2_124m": replace(gpt(12, 768, 12), moe=MoEConfig(num_experts=8, every=2, router="switch")),
}
