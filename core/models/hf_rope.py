"""Rotary positions in config.json, in and out: transformers' `rope_parameters`, and what its version 4 wrote.

A key of `rope_parameters` that no kind of stretching knows is refused by name; one of another kind than theirs is not
read, as transformers does not.
"""

import math
from collections.abc import Mapping
from typing import Any

from core.config import UserError
from core.models.family import Family
from core.models.rope import RopeScaling

_LENGTH = "original_max_position_embeddings"
_OPTIONAL = ("beta_fast", "beta_slow", "truncate", "attention_factor")
_OTHERS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mscale", "mscale_all_dim", "finetuned"}
"""Keys beside those of fields; YaRN's own files say that their weights are `finetuned`."""


def _key(field: str) -> str:
    """The key of rope_parameters that stands for a field of RopeScaling."""
    return _LENGTH if field == "original_max_length" else field


_KNOWN = {_key(field) for read in RopeScaling.READ.values() for field in read} | _OTHERS


def rope_from_hf(hf: Mapping[str, Any], family: Family, max_length: int) -> dict[str, Any]:
    """DecoderConfig's rope_theta, rope_scaling and rotary_share.  Raises UserError for what it does not compute."""
    rope = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    if unknown := sorted(rope.keys() - _KNOWN):
        raise UserError(f"config.json has {', '.join(unknown)} in rope_parameters; this decoder does not know them")
    beside = (hf.get(key) for key in family.rope_keys)
    theta, share = (rope.get(key) or other for key, other in zip(("rope_theta", "partial_rotary_factor"), beside))
    fields: dict[str, Any] = {
        "rope_theta": theta or family.rope_theta,
        "rope_scaling": _scaling(hf, rope, family, max_length),
    }
    if family.rotary_share is not None:
        return fields | {"rotary_share": share or family.rotary_share}
    if share not in (None, 1.0):
        raise UserError(f"config.json has partial_rotary_factor={share}; in family {family.name} it is 1.0")
    return fields


def _scaling(hf: Mapping[str, Any], rope: dict[str, Any], family: Family, max_length: int) -> RopeScaling | None:
    name = rope.get("rope_type") or rope.get("type") or "default"
    if name == "default":
        return None
    if name not in family.rope_kinds:
        known = " and ".join(("default", *family.rope_kinds))
        raise UserError(f"rotary positions of type {name!r}; in family {family.name} this decoder computes {known}")
    kind = family.rope_kinds[name]
    if family.original_length is None:
        rope.setdefault(_LENGTH, max_length)
    else:
        rope[_LENGTH] = hf.get(_LENGTH, family.original_length)
    if kind in _BY_LENGTHS:
        rope |= _BY_LENGTHS[kind](rope, max_length)
    given: dict[str, Any] = {field: rope.get(_key(field)) for field in RopeScaling.READ[kind]}
    absent = [field for field, value in given.items() if value is None]
    if lacking := [_key(field) for field in absent if field not in _OPTIONAL]:
        raise UserError(f"config.json lacks {', '.join(lacking)} of its rope_parameters; copy the folder again")
    return RopeScaling(kind=kind, **{field: value for field, value in given.items() if field not in absent})


def _yarn(rope: Mapping[str, Any], max_length: int) -> dict[str, Any]:
    """The factor where it is null, and the attention_factor that DeepSeek's keys stand for."""
    factor = rope.get("factor")
    if factor is None and "factor" in rope:
        factor = max_length / rope[_LENGTH]
    gain, over, under = (rope.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if gain is None and over and under and factor:
        stretched = math.log(max(factor, 1.0))
        gain = (0.1 * over * stretched + 1) / (0.1 * under * stretched + 1)
    return {"factor": factor, "attention_factor": gain}


def _longrope(rope: Mapping[str, Any], max_length: int) -> dict[str, Any]:
    """The attention_factor, where a factor says another than the lengths do."""
    factor, gain = rope.get("factor"), rope.get("attention_factor")
    if factor and gain is None:
        gain = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(rope[_LENGTH]))
    return {"attention_factor": gain}


_BY_LENGTHS = {"yarn": _yarn, "longrope": _longrope}


def rope_to_hf(config: Any, family: Family) -> dict[str, Any]:
    """The keys of config.json that stand for a DecoderConfig's rotary positions."""
    scaling, rope = config.rope_scaling, {"rope_type": "default", "rope_theta": config.rope_theta}
    if family.rotary_share is not None:
        rope["partial_rotary_factor"] = config.rotary_share
    if scaling is None:
        return {"rope_parameters": rope}
    rope["rope_type"] = next(name for name, kind in family.rope_kinds.items() if kind == scaling.kind)
    for field in RopeScaling.READ[scaling.kind]:
        value = getattr(scaling, field)
        if value is not None:
            rope[_key(field)] = list(value) if isinstance(value, tuple) else value
    beside = {} if family.original_length is None else {_LENGTH: scaling.original_max_length}
    return {"rope_parameters": rope, **beside}
