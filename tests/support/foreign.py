"""Transformers' own models, tiny, as it has them, and their losses: what tensor parallelism is inferred for.

No dropout, sizes that do not divide alike: n ranks learn from the same rows what one rank does.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"
ROWS, LENGTH, VOCABULARY = 4, 6, 98
Batch = dict[str, Tensor]
_ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BLOCKS = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, **_BLOCKS}
    return BertForMaskedLM(BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 48, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, **_ENDS, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 48, "ffn_dim": 80, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 16, "word_embed_proj_dim": 24}
    return OPTForCausalLM(OPTConfig(**sizes, dropout=0.0))


def bloom() -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 48, "n_layer": 2, "n_head": 4}
    return BloomForCausalLM(BloomConfig(**sizes, hidden_dropout=0.0, attention_dropout=0.0))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**_BLOCKS, "vocab_size": VOCABULARY, "num_attention_heads": 8, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {**_BLOCKS, "vocab_size": VOCABULARY, "num_attention_heads": 8, "num_key_value_heads": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": 48, "d_kv": 10, "d_ff": 80, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**_BLOCKS, image_size=16, patch_size=4, num_labels=5, attention_probs_dropout_prob=0.0)
    return ViTForImageClassification(config)


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {**_BLOCKS, **_ENDS, "vocab_size": VOCABULARY, "max_position_embeddings": 8}
    return CLIPModel(
        CLIPConfig(text_config=text, vision_config={**_BLOCKS, "image_size": 16, "patch_size": 4}, projection_dim=24)
    )


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": 48, "num_mel_bins": 8, "max_source_positions": 10}
    sizes |= {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in _WHISPER.items()}
    config = WhisperConfig(**sizes, **_ENDS, max_target_positions=16, decoder_start_token_id=1, dropout=0.0)
    return WhisperForConditionalGeneration(config)


_WHISPER = {"layers": 2, "attention_heads": 4, "ffn_dim": 80}


def batch_of(step: int) -> Batch:
    """A batch of all kinds of inputs, of float64."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(ROWS, *shape, dtype=torch.float64, generator=generator)

    return {
        "input_ids": ids[:, :-1],
        "labels": ids[:, 1:],
        "pixel_values": drawn(3, 16, 16),
        "input_features": drawn(8, 20),
        "classes": ids[:, 0] % 5,
    }


def _tokens(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def _padded_tokens(model: nn.Module, batch: Batch) -> Tensor:
    """Sequences of which each has another number of tokens, of a length that two and four ranks do not divide."""
    ids, labels = batch["input_ids"][:, :5], batch["labels"][:, :5].clone()
    there = torch.arange(5) < (5 - labels[:, :1] % 3)
    logits = model(input_ids=ids, attention_mask=there.long()).logits
    losses = F.cross_entropy(logits.flatten(0, 1), labels.masked_fill_(~there, -100).flatten(), reduction="sum")
    return losses / len(ids)


def _translation(name: str) -> Callable[[nn.Module, Batch], Tensor]:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(**{name: batch[name]}, decoder_input_ids=batch["labels"].flip(1)).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    return loss


def _classes(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(pixel_values=batch["pixel_values"]).logits, batch["classes"])


def _captions(model: nn.Module, batch: Batch) -> Tensor:
    """Each row by itself, so that ranks may have different rows."""
    found = model(input_ids=batch["input_ids"], pixel_values=batch["pixel_values"])
    return -(found.text_embeds * found.image_embeds).sum(-1).mean()


class Twice(nn.Module):
    """One head of keys for all, whose gradient is a sum over the ranks, and which columns take, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(VOCABULARY, 24), nn.LayerNorm(24), nn.Linear(24, VOCABULARY)
        self.query, self.key, self.out = nn.Linear(24, 24), nn.Linear(24, 6), nn.Linear(24, 24)
        self.up, self.down = nn.Linear(6, 40), nn.Linear(40, 24)

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        key = self.key(self.norm(x))
        query = self.query(self.norm(x)).unflatten(-1, (-1, 6)).transpose(1, 2)
        seen = (query @ key.transpose(1, 2)[:, None]).softmax(-1) @ key[:, None]
        x = x + self.out(seen.transpose(1, 2).flatten(2)) + self.down(self.up(key).relu())
        return SimpleNamespace(logits=self.head(self.norm(x)))


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]


CASES = {
    **{make.__name__: Case(make, _tokens) for make in (bert, gpt2, opt, bloom, llama, mixtral)},
    "t5": Case(t5, _translation("input_ids")),
    "whisper": Case(whisper, _translation("input_features")),
    "vit": Case(vit, _classes),
    "clip": Case(clip, _captions),
    "twice": Case(Twice, _tokens),
}


def _dropping_gpt2(attention: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 48, "n_layer": 2, "n_head": 4}
        return GPT2LMHeadModel(GPT2Config(**sizes, **_ENDS, attn_implementation=attention))

    return make


def _dropping_outside_attention() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 48, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, **_ENDS, attn_pdrop=0.0))


PADDED = {f"{name} with padding": Case(CASES[name].make, _padded_tokens) for name in ("bert", "gpt2", "llama")}
DROPPING = {
    "gpt2 with dropout": Case(_dropping_gpt2("eager"), _tokens),
    "gpt2 with fused dropout": Case(_dropping_gpt2("sdpa"), _tokens),
    "gpt2 with dropout outside of attention": Case(_dropping_outside_attention, _tokens),
}
"""Models with a dropout of a tenth wherever they have one."""


def of_family(kind: str, family: str, **sizes: Any) -> Callable[[], nn.Module]:
    """A model of a family, by transformers' automatic classes, of which every dropout is 0."""

    def make() -> nn.Module:
        import transformers

        config = transformers.AutoConfig.for_model(family, **sizes, architectures=[])
        for name, value in vars(config).items():
            if ("drop" in name or "pdrop" in name) and isinstance(value, float):
                setattr(config, name, 0.0)
        return getattr(transformers, f"AutoModelFor{kind}").from_config(config)

    return make


TEXT = {**_BLOCKS, **_ENDS, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
GROUPED = {**TEXT, "num_attention_heads": 8, "num_key_value_heads": 4}
_SEEN = {**_BLOCKS, "image_size": 16, "patch_size": 4, "num_labels": 5}
_BART = {"vocab_size": VOCABULARY, "d_model": 48, "max_position_embeddings": 16, **_ENDS, "decoder_start_token_id": 1}
_BART |= {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in _WHISPER.items()}
_SWIN = {"embed_dim": 24, "depths": [2], "num_heads": [4], "window_size": 2, "image_size": 16, "patch_size": 4}
_GPT = {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 2, "n_head": 4, **_ENDS}
_FALCON = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_DISTIL = {"vocab_size": VOCABULARY, "dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 80}
UNSEEN = {
    "distilbert": Case(of_family("MaskedLM", "distilbert", **_DISTIL), _tokens),
    "albert": Case(of_family("MaskedLM", "albert", **TEXT, embedding_size=24), _tokens),
    "electra": Case(of_family("MaskedLM", "electra", **TEXT, embedding_size=24), _tokens),
    "gpt_neox": Case(of_family("CausalLM", "gpt_neox", **TEXT), _tokens),
    "gptj": Case(of_family("CausalLM", "gptj", **_GPT, rotary_dim=4), _tokens),
    "gpt_bigcode": Case(of_family("CausalLM", "gpt_bigcode", **_GPT), _tokens),
    "phi3": Case(of_family("CausalLM", "phi3", **GROUPED), _tokens),
    "gemma2": Case(of_family("CausalLM", "gemma2", **GROUPED, head_dim=6), _tokens),
    "qwen3": Case(of_family("CausalLM", "qwen3", **GROUPED, head_dim=6), _tokens),
    "falcon": Case(of_family("CausalLM", "falcon", **_FALCON), _tokens),
    "bart": Case(of_family("Seq2SeqLM", "bart", **_BART), _translation("input_ids")),
    "deit": Case(of_family("ImageClassification", "deit", **_SEEN), _classes),
    "swin": Case(of_family("ImageClassification", "swin", **_SWIN, num_labels=5), _classes),
}
"""Models that the inference was not written with."""


def _tokens_and_routers(model: nn.Module, batch: Batch) -> Tensor:
    """With what the routers add, which is of all tokens of a forward."""
    found = model(input_ids=batch["input_ids"])
    loss = F.cross_entropy(found.logits.flatten(0, 1), batch["labels"].flatten())
    return loss if getattr(found, "aux_loss", None) is None else loss + 0.1 * found.aux_loss


def _implemented(make: Callable[[], nn.Module], experts: str) -> Callable[[], nn.Module]:
    """A model of transformers whose experts compute in one of its ways."""

    def made() -> nn.Module:
        model: Any = make()
        model.set_experts_implementation(experts)
        return model

    return made


_ROUTED = {**GROUPED, "num_experts_per_tok": 2, "output_router_logits": True}
_MIXTRAL = {**_ROUTED, "num_local_experts": 6}
_QWEN = {**_ROUTED, "num_experts": 4, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 40}
_DEEPSEEK = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
_DEEPSEEK |= {
    "num_key_value_heads": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "moe_intermediate_size": 20,
    "n_group": 2,
    "topk_group": 1,
}
_six = of_family("CausalLM", "mixtral", **_MIXTRAL)
EXPERTS = {
    "6 of mixtral": Case(_six, _tokens_and_routers),
    "6 of mixtral, eager": Case(_implemented(_six, "eager"), _tokens_and_routers),
    "6 of mixtral, batched_mm": Case(_implemented(_six, "batched_mm"), _tokens_and_routers),
    "qwen2_moe": Case(of_family("CausalLM", "qwen2_moe", **_QWEN), _tokens_and_routers),
    "qwen3_moe": Case(of_family("CausalLM", "qwen3_moe", **_QWEN, head_dim=6), _tokens_and_routers),
    "olmoe": Case(of_family("CausalLM", "olmoe", **_ROUTED, num_experts=6), _tokens_and_routers),
    "gpt_oss": Case(of_family("CausalLM", "gpt_oss", **_MIXTRAL, head_dim=6), _tokens_and_routers),
    "deepseek_v3": Case(of_family("CausalLM", "deepseek_v3", **_ROUTED | _DEEPSEEK), _tokens_and_routers),
}
"""Models with experts: softmax before and after the choice, or sigmoid; normalised or not; biases; shared experts."""
_QUIET = {"output_router_logits": False}
QUIET = {
    "qwen2_moe in silence": Case(of_family("CausalLM", "qwen2_moe", **_QWEN | _QUIET), _tokens),
    "olmoe in silence": Case(of_family("CausalLM", "olmoe", **_ROUTED | _QUIET, num_experts=6), _tokens),
}
"""Models with experts whose routers add nothing to the loss, which is of all tokens of a forward."""
