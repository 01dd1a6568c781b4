"""Mixtral (Jiang et al. 2024): Mistral with experts in every block, which are a tensor each."""

from dataclasses import replace

from core.models.families.mistral import FAMILY as MISTRAL
from core.models.family import Key

FAMILY = replace(
    MISTRAL,
    name="mixtral",
    architecture="MixtralForCausalLM",
    family="llama",
    needs="family llama, swiglu, no biases, router topk, experts in every block",
    keys={
        **{ours: key for ours, key in MISTRAL.keys.items() if ours != "window"},
        "norm_eps": Key("rms_norm_eps", 1e-5),
        "moe.num_experts": Key("num_local_experts", 8),
        "moe.experts_per_token": Key("num_experts_per_tok", 2, write=lambda config: config.moe.per_token),
        "moe.balance_weight": Key("router_aux_loss_coef", 0.001),
        "moe.jitter": Key("router_jitter_noise", 0.0),
    },
    fixed={**MISTRAL.fixed, "activation": "swiglu", "moe.router": "topk", "moe.every": 1},
    names=replace(
        MISTRAL.names,
        modules={ours: theirs for ours, theirs in MISTRAL.names.modules.items() if ".mlp." not in ours}
        | {"blocks.{n}.mlp.router": "layers.{n}.block_sparse_moe.gate"},
        experts={
            "blocks.{n}.mlp.experts.gate": "layers.{n}.block_sparse_moe.experts.{e}.w1",
            "blocks.{n}.mlp.experts.down": "layers.{n}.block_sparse_moe.experts.{e}.w2",
            "blocks.{n}.mlp.experts.up": "layers.{n}.block_sparse_moe.experts.{e}.w3",
        },
    ),
    aliases={"num_experts": "num_local_experts"},
    only={**MISTRAL.only, "hidden_act": "silu", "sliding_window": None},
    rope_theta=1e6,
)
