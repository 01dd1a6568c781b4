"""Hugging Face's config.json in and out, as the family's record says.

What a family's own forward computes and this decoder does not is refused by name, never ignored. Dropout is: it is not
part of the function that the weights define.
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from core.config import UserError
from core.models.decoder import DecoderConfig
from core.models.families import FAMILIES
from core.models.family import Family
from core.models.hf_rope import rope_from_hf, rope_to_hf
from core.nn.routing import MoEConfig

NO_ARCHITECTURE = "transformers has no architecture of these experts; it has " + "; ".join(
    f"{family.architecture.removesuffix('ForCausalLM')}: {family.needs}" for family in FAMILIES.values() if family.needs
)


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """The configuration that a config.json describes; a key that it lacks is as transformers has it by default.

    Raises UserError for what this decoder does not compute.
    """
    if (name := hf.get("model_type")) not in FAMILIES:
        raise UserError(f"model_type is {name!r}; this decoder loads {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    hf = family.modern({**hf, **{key: hf[alias] for alias, key in family.aliases.items() if alias in hf}})
    _refuse(hf, family.only)
    fields = dict(family.fixed)
    for ours, key in family.keys.items():
        fields[ours] = key.read(hf.get(key.name, key.default), fields)
    if family.rope_theta is not None:
        fields |= rope_from_hf(hf, family, fields["max_length"])
    if why := family.refuse(hf, fields):
        raise UserError(f"config.json has {why}")
    moe = {ours: fields.pop(ours) for ours in list(fields) if ours.startswith("moe.")}
    experts = MoEConfig(**{ours.removeprefix("moe."): value for ours, value in moe.items()})
    return DecoderConfig(**fields, moe=experts, family=family.family or family.name)


def _refuse(hf: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, value in expected.items():
        if hf.get(name, value) != value:
            raise UserError(f"config.json has {name}={hf[name]!r}; this decoder computes only {value!r}")


def _found(config: DecoderConfig) -> Family | None:
    for family in FAMILIES.values():
        alike = (family.family or family.name, bool(family.names.experts)) == (
            config.family,
            config.moe.num_experts > 0,
        )
        if alike and all(attrgetter(name)(config) == value for name, value in family.fixed.items()):
            return family
    return None


def has_architecture(config: DecoderConfig) -> bool:
    """Return whether transformers has a class that computes this decoder."""
    return _found(config) is not None


def family_of(config: DecoderConfig) -> Family:
    """The family of transformers that computes this decoder.  Raises UserError where it has no such class."""
    if (family := _found(config)) is None:
        raise UserError(f"cannot write a Hugging Face folder: {NO_ARCHITECTURE}; the checkpoints hold the weights")
    return family


def config_to_hf(config: DecoderConfig, special_ids: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The content of config.json. special_ids: bos_token_id, eos_token_id, pad_token_id, where there are such.

    Raises UserError where transformers has no class that computes this decoder.
    """
    family = family_of(config)
    content: dict[str, Any] = {"model_type": family.name, "architectures": [family.architecture]}
    for ours, key in family.keys.items():
        content[key.name] = (key.write or attrgetter(ours))(config)
    rope = rope_to_hf(config, family) if family.rope_theta is not None else {}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | dict(special_ids or {})
    written = {key: value(config) if callable(value) else value for key, value in family.written.items()}
    return content | rope | written | ids
