"""Hugging Face's config.json in and out, as the family's record says.

What a family's own forward computes and this decoder does not is refused by name, never ignored. Dropout is: it is not
part of the function that the weights define.
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from core.config import UserError
from core.models.decoder import DecoderConfig, RopeScaling
from core.models.families import FAMILIES
from core.models.family import FULL, LOCAL, Family
from core.nn.routing import MoEConfig

NO_ARCHITECTURE = "transformers has no architecture of these experts; it has " + "; ".join(
    f"{family.architecture.removesuffix('ForCausalLM')}: {family.needs}" for family in FAMILIES.values() if family.needs
)
_ROPE_KEYS = {
    "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
    "original_max_length": "original_max_position_embeddings",
}  # fmt: skip


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
    if family.local_rope_theta is not None:
        hf, fields["local_rope_theta"] = _of_layer_types(hf, family.local_rope_theta)
    if family.rope_theta is not None:
        fields["rope_theta"], fields["rope_scaling"] = _rope_from_hf(hf, family.rope_theta, fields["max_length"])
    if why := family.refuse(hf, fields):
        raise UserError(f"config.json has {why}")
    moe = {ours: fields.pop(ours) for ours in list(fields) if ours.startswith("moe.")}
    experts = MoEConfig(**{ours.removeprefix("moe."): value for ours, value in moe.items()})
    return DecoderConfig(**fields, moe=experts, family=family.family or family.name)


def _refuse(hf: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, value in expected.items():
        if hf.get(name, value) != value:
            raise UserError(f"config.json has {name}={hf[name]!r}; this decoder computes only {value!r}")


def _of_layer_types(hf: Mapping[str, Any], local_theta: float) -> tuple[dict[str, Any], float]:
    """(config.json with the rotary positions of layers that see all alone, the base of layers with a window)."""
    ropes = hf.get("rope_parameters") or {}
    if unknown := ropes.keys() - {FULL, LOCAL}:
        raise UserError(f"config.json has rope_parameters of {', '.join(sorted(unknown))}; give {FULL}, {LOCAL}")
    local = ropes.get(LOCAL) or {}
    _refuse(local, {"rope_type": "default", "partial_rotary_factor": 1.0})
    full = {**(ropes.get(FULL) or {}), **(hf.get("rope_scaling") or {})}
    return {**hf, "rope_parameters": full}, local.get("rope_theta") or hf.get("rope_local_base_freq", local_theta)


def _rope_from_hf(hf: Mapping[str, Any], theta: float, max_length: int) -> tuple[float, RopeScaling | None]:
    """transformers 5 writes rope_parameters; 4 wrote rope_theta and rope_scaling."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or hf.get("rope_theta", theta)
    kind = rope.get("rope_type") or rope.get("type", "default")
    _refuse(rope, {"partial_rotary_factor": 1.0})
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"rotary positions of type {kind!r}; this decoder computes default and llama3")
    rope = {"original_max_position_embeddings": max_length, **rope}
    if lacking := [key for key in _ROPE_KEYS.values() if key not in rope]:
        raise UserError(f"config.json lacks {', '.join(lacking)} of its rope_parameters; copy the folder again")
    return theta, RopeScaling(**{ours: rope[key] for ours, key in _ROPE_KEYS.items()})


def _rope_to_hf(config: DecoderConfig) -> dict[str, Any]:
    rope = {"rope_type": "default" if config.rope_scaling is None else "llama3", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {key: getattr(config.rope_scaling, ours) for ours, key in _ROPE_KEYS.items()}
    return {"rope_parameters": rope}


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
    rope = _rope_to_hf(config) if family.rope_theta is not None else {}
    if family.local_rope_theta is not None:
        local = {"rope_type": "default", "rope_theta": config.local_rope_theta or config.rope_theta}
        rope = {"rope_parameters": {FULL: rope["rope_parameters"], LOCAL: local}}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | dict(special_ids or {})
    return content | rope | dict(family.written) | ids
