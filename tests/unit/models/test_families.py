"""What a family's record says is what transformers' own classes say: architectures, keys, what a missing key means."""

import copy
from pathlib import Path

import pytest

from core.config import UserError
from core.models import DecoderConfig, families
from core.models.families import FAMILIES
from core.models.hf_config import config_from_hf

OTHER = {  # than by default, such that leaving out any one of them still describes a decoder
    "vocab_size": 61, "hidden_size": 384, "n_embd": 384, "num_hidden_layers": 3, "n_layer": 3,
    "num_attention_heads": 16,
    "n_head": 4, "num_key_value_heads": 2, "head_dim": 10, "intermediate_size": 100, "ffn_dim": 100, "n_inner": 100,
    "max_position_embeddings": 72, "n_positions": 72, "seq_length": 72, "rms_norm_eps": 1e-3,
    "layer_norm_epsilon": 1e-3,
    "activation_function": "silu", "hidden_act": "gelu", "attention_bias": True, "mlp_bias": True, "enable_bias": False,
    "do_layer_norm_before": False, "_remove_final_layer_norm": True, "layer_norm_elementwise_affine": False,
    "word_embed_proj_dim": 20, "apply_residual_connection_post_layernorm": True, "num_local_experts": 5,
    "sliding_window": 7, "hidden_activation": "gelu", "query_pre_attn_scalar": 100,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "type_vocab_size": 3, "layer_norm_eps": 1e-3, "use_parallel_residual": False,
    "num_experts_per_tok": 3, "router_aux_loss_coef": 0.5, "router_jitter_noise": 0.5,
}  # fmt: skip
ROPE = {
    "rope_type": "llama3", "rope_theta": 50.0, "factor": 4.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0,
    "original_max_position_embeddings": 36,
}  # fmt: skip
ROPES = dict.fromkeys(FAMILIES, ROPE) | {
    "phi3": {
        "rope_type": "longrope", "rope_theta": 50.0, "short_factor": [2.0] * 12, "long_factor": [3.0] * 12,
        "original_max_position_embeddings": 36,
    },
}  # fmt: skip


def rope_of(family, rope):
    """Parameters of rotary positions, under the keys of the layers' types where the family has several."""
    if family.local_rope_theta is None:
        return {"rope_parameters": rope}
    return {"rope_parameters": {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}}


def as_read(name, content, by_transformers=False):
    """Our configuration of a config.json, or why there is none; of all keys, as transformers' class completes them."""
    from transformers import CONFIG_MAPPING

    content = copy.deepcopy(content)
    if by_transformers:
        content = CONFIG_MAPPING[name].from_dict(content).to_dict()
    try:
        return config_from_hf(content | {"model_type": name})
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_missing_key_means_what_transformers_takes(name):
    family = FAMILIES[name]
    keys = [key.name for key in family.keys.values()]
    tied = {"tie_word_embeddings": not family.keys["tied_head"].default} if "tied_head" in family.keys else {}
    content = {key: (OTHER | tied)[key] for key in keys if key not in family.only}
    rope = {} if family.rope_theta is None else rope_of(family, ROPES[name])
    content |= {"use_sliding_window": True} if name == "qwen3" else {}
    content |= {} if name == "phi3" else rope  # whose numbers are as many as the keys of sizes say
    assert isinstance(as_read(name, content), DecoderConfig)
    needed = {"num_hidden_layers"} if "layer_types" in content else set()  # they tell of as many layers
    given = [{}, content, content | rope]
    given += [{k: v for k, v in content.items() if k != key} for key in content if key not in needed]
    if family.rope_theta is not None:
        for left in ("rope_theta", "original_max_position_embeddings"):
            given += [content | rope_of(family, {k: v for k, v in ROPES[name].items() if k != left})]
        given += [{"rope_theta": 7.0}, rope_of(family, {"rope_type": "default"})]
    if family.local_rope_theta is not None:
        given += [{"rope_local_base_freq": 9.0}, {"rope_theta": 7.0, "rope_scaling": ROPE}]
    if family.rotary_share is not None:
        given += [dict(zip(family.rope_keys, (7.0, 0.5))), {"original_max_position_embeddings": 36}]
        given += [{"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}]
    given += [content | {key.name: None} for key in family.keys.values() if key.default is None]
    given += [{alias: OTHER[key]} for alias, key in family.aliases.items()]
    for one in given:
        assert as_read(name, one) == as_read(name, one, by_transformers=True), one


@pytest.mark.parametrize("name", FAMILIES)
def test_names_of_transformers(name):
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    causal = FAMILIES[name].fixed.get("causal", True)
    architectures = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if causal else MODEL_FOR_MASKED_LM_MAPPING_NAMES
    assert FAMILIES[name].name == name
    assert FAMILIES[name].architecture == architectures[name]
    assert CONFIG_MAPPING[name].attribute_map.items() <= FAMILIES[name].aliases.items()


def test_each_file_is_collected():
    files = {path.stem for path in Path(families.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == set(FAMILIES)


@pytest.mark.parametrize("name", ["mixtral", "t5"])
def test_what_is_no_family_of_decoders(name):
    with pytest.raises(UserError, match=f"family is '{name}'; give one of gpt2, opt, bloom, llama"):
        DecoderConfig(vocab_size=7, dim=4, num_layers=1, num_heads=1, ffn_dim=4, family=name)
