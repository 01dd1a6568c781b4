import re
from dataclasses import replace

import pytest
import torch

from core.models import SHAPES
from core.models.hf_config import config_from_hf, config_to_hf, has_architecture

# As the releases state them (parameters of the published checkpoints, a tied head once).
PUBLISHED = {
    "gpt2_124m": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "opt_125m": 125_239_296,
    "opt_350m": 331_196_416,
    "bloom_560m": 559_214_592,
    "bloom_176b": 176_247_271_424,
    "llama_7b": 6_738_415_616,
    "llama_13b": 13_015_864_320,
    "llama_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_1b": 1_235_814_400,
    "gemma3_1b": 999_885_952,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name):
    assert SHAPES[name].num_parameters() == PUBLISHED[name]


def test_names_say_the_size():
    """Every name's size is its parameters, to the nearest number the papers print."""
    num_stated = 0
    for name, config in SHAPES.items():
        found = re.fullmatch(r"[a-z0-9]+_(\d+)(?:_(\d))?([mb])(\d)?", name)
        if found and name != "llama3_1b":  # Meta rounds 1.24 to 1
            whole, tenths, unit, bloom_tenths = found.groups()
            stated = float(f"{whole}.{tenths or bloom_tenths or 0}") * {"m": 1e6, "b": 1e9}[unit]
            assert abs(config.num_parameters() / stated - 1) < 0.08, name
            num_stated += 1
    assert num_stated > 25


@pytest.mark.parametrize("name", ["gpt2_xl", "gpt3_175b", "opt_350m", "opt_66b", "bloom_7b1", "llama3_1b"])
def test_counts_as_transformers(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    hf = config_to_hf(SHAPES[name])
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf))
    assert sum(p.numel() for p in theirs.parameters()) == SHAPES[name].num_parameters()


@pytest.mark.parametrize("name", [name for name, config in SHAPES.items() if has_architecture(config)])
def test_a_shape_comes_back_from_its_config_json(name):
    assert config_from_hf(config_to_hf(SHAPES[name])) == SHAPES[name]


def test_key_value_heads_of_each_head_are_no_other_model():
    """What a command line may give is what a folder is read as."""
    debug = SHAPES["debug_moe"]
    given = replace(debug, num_kv_heads=debug.num_heads)
    assert config_from_hf(config_to_hf(given)) == given == debug


def test_debug_divides_over_eight_ranks():
    debug = SHAPES["debug"]
    assert (debug.num_heads, debug.num_layers) == (8, 16)
    assert debug.vocab_size % 2 == 1
