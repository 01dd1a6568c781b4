"""Rotary frequencies of every rope_parameters are those of transformers' own functions, or are refused by name."""

import math

import pytest
import torch

from core.config import UserError
from core.models.decoder import rotary_angles
from core.models.hf_config import config_from_hf, config_to_hf
from core.models.rope import RopeScaling
from tests.unit.models.test_pretrained import example

YARN = {"rope_type": "yarn", "factor": 4.0}
PAIRS = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 4.0, 7.0]}
GIVEN = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "old linear": {"type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN | {"original_max_position_embeddings": 6},
    "yarn of all the length": YARN,
    "yarn's bounds": YARN | {"beta_fast": 3.0, "beta_slow": 0.5, "original_max_position_embeddings": 12},
    "yarn not truncated": YARN | {"beta_fast": 3, "truncate": False, "original_max_position_embeddings": 12},
    "yarn's gain": YARN | {"attention_factor": 1.7},
    "yarn as DeepSeek has it": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"rope_type": "longrope"} | PAIRS,
    "longrope's gain": {"rope_type": "longrope", "attention_factor": 1.2} | PAIRS,
    "longrope's factor": {"rope_type": "longrope", "factor": 9.0} | PAIRS,
}


def content(name):
    of_phi3 = name.startswith("longrope")
    made = config_to_hf(example("phi3" if of_phi3 else "gpt_neox", max_length=24, rotary_share=0.75))
    more = {"original_max_position_embeddings": 9} if of_phi3 else {}
    return made | more | {"rope_parameters": GIVEN[name] | {"rope_theta": 50.0, "partial_rotary_factor": 0.75}}


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("length", [5, 24, 61])
def test_angles_of_transformers(name, length):
    from transformers import CONFIG_MAPPING
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = content(name)
    theirs = CONFIG_MAPPING[given["model_type"]].from_dict(given)
    positions = torch.arange(length)[None]
    frequency, gain = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs, seq_len=length)
    angle = positions[..., None] * frequency.double()
    cos, sin = rotary_angles(config_from_hf(given), positions, torch.float64)
    torch.testing.assert_close(cos, angle.cos() * gain, rtol=0, atol=1e-5)  # theirs are of fp32 frequencies
    torch.testing.assert_close(sin, angle.sin() * gain, rtol=0, atol=1e-5)
    assert config_from_hf(config_to_hf(config_from_hf(given))) == config_from_hf(given)


@pytest.mark.parametrize(
    ("family", "rope", "why"),
    [
        ("llama", {"rope_type": "linear"}, "lacks factor of its rope_parameters"),
        (
            "llama",
            {"rope_type": "longrope"} | PAIRS,
            "type 'longrope'; in family llama this decoder computes default and",
        ),
        ("llama", {"rope_type": "default", "mrope_section": [2, 1]}, "mrope_section in rope_parameters"),
        ("llama", {"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5; in family llama"),
        ("phi3", {"rope_type": "linear", "factor": 2.0}, "type 'linear'; in family phi3 .* default and longrope"),
        ("phi3", {"rope_type": "longrope"} | PAIRS, "short_factor of rope_scaling has 3 numbers; a head turns 4 pairs"),
        ("gpt_neox", {"rope_type": "linear", "factor": -1.0}, "factor of rope_scaling is -1.0; give a positive number"),
        ("gpt_neox", {"rope_type": "linear", "factor": "2"}, "factor of rope_scaling is '2'; give a positive number"),
        (
            "phi3",
            {"rope_type": "longrope"} | PAIRS | {"long_factor": 2.0},
            "long_factor of rope_scaling is 2.0; give a",
        ),
        ("gpt_neox", {"rope_type": "default", "partial_rotary_factor": 0.4}, "of a head of 8 is 3 features"),
        (
            "gpt_neox",
            {"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.25},
            "not stretch a single pair",
        ),
    ],
)
def test_what_is_not_computed(family, rope, why):
    known = config_to_hf(example(family, rotary_share=1.0))
    with pytest.raises(UserError, match=why) as error:
        config_from_hf(known | {"rope_parameters": rope})
    assert "\n" not in str(error.value)


def test_each_text_has_its_own_length():
    """And a part of a text, as context parallelism has it, the length of the whole."""
    config = example("llama", max_length=8, rope_scaling=RopeScaling(2.0, kind="dynamic"))
    short, long = torch.arange(8)[None], torch.arange(12)[None]
    both = torch.cat((torch.cat((short, torch.zeros(1, 4).long()), 1), long))
    cos, _ = rotary_angles(config, both, torch.float64)
    torch.testing.assert_close(cos[:1, :8], rotary_angles(config, short, torch.float64)[0], rtol=0, atol=0)
    torch.testing.assert_close(cos[1:], rotary_angles(config, long, torch.float64)[0], rtol=0, atol=0)
    part, _ = rotary_angles(config, long[:, 3:5], torch.float64, long)
    torch.testing.assert_close(part, cos[1:, 3:5], rtol=0, atol=0)
    assert not math.isclose(float(cos[0, 7, 1]), float(cos[1, 7, 1]))


def test_kinds_of_a_family():
    with pytest.raises(
        UserError, match="rope_scaling is of kind longrope; a model of family llama has linear, dynamic"
    ):
        example("llama", rope_scaling=RopeScaling(kind="longrope", short_factor=(1.0,) * 4, long_factor=(1.0,) * 4))
    assert RopeScaling(kind="linear").unread()["beta_fast"].endswith("but with yarn")
