"""Everything that is known of a model family, as one record. A family is a file in `core.models.families`.

The record says how a config.json of transformers is read and written, what the family fixes, and how it names its
tensors. The one decoder computes all families: there is no second forward.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from core.config import UserError

_ACTIVATION_OF = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu",
}  # fmt: skip
_GATED_OF = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}
_NAME_OF = {
    "gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu", "swiglu": "silu", "geglu": "gelu",
    "geglu_tanh": "gelu_pytorch_tanh",
}  # fmt: skip


@dataclass(frozen=True)
class Key:
    """The key of config.json that stands for a field of DecoderConfig.

    default  what transformers takes where config.json lacks the key
    read     (its value, the fields before it in the table) -> the field; by default the value
    write    DecoderConfig -> its value; by default the field
    """

    name: str
    default: Any
    read: Callable[[Any, Mapping[str, Any]], Any] = lambda value, fields: value
    write: Callable[[Any], Any] | None = None


def activation(name: str, default: str, *, gated: bool = False) -> Key:
    """The key of the field `activation`. Reading raises UserError for one that the decoder does not compute."""
    known = _GATED_OF if gated else _ACTIVATION_OF

    def read(value: str, fields: Mapping[str, Any]) -> str:
        if value not in known:
            raise UserError(f"activation {value!r} is not one that this decoder computes: {', '.join(known)}")
        return known[value]

    return Key(name, default, read, lambda config: _NAME_OF[config.activation])


HEAD = "lm_head.weight"
"""As transformers calls a head, whatever the family's files do."""
FULL, LOCAL = "full_attention", "sliding_attention"
"""transformers' types of layers: one that sees all, and one with a window."""


def _full_layers(types: list[str], fields: Mapping[str, Any]) -> tuple[int, ...]:
    if len(types) != fields["num_layers"] or set(types) - {FULL, LOCAL}:
        raise UserError(
            f"config.json has layer_types of {len(types)} layers: {', '.join(sorted(set(types)))}; give {FULL} or "
            f"{LOCAL} for each of the {fields['num_layers']}"
        )
    return () if fields["window"] is None else tuple(index for index, kind in enumerate(types) if kind == FULL)


FULL_LAYERS = Key(
    "layer_types", None, _full_layers,
    lambda config: [FULL if config.layer_window(n) is None else LOCAL for n in range(config.num_layers)],
)  # fmt: skip
"""The key of the field `full_layers`, of a family whose `modern` fills it in."""


@dataclass(frozen=True)
class Names:
    """How a family names its modules. {n} stands for the block's number.

    prefix      in front of all names but the head's; files of a bare model lack it, or its first part
    modules     module of ours -> module of theirs
    qkv         the three (or one) modules behind our qkv
    fused       module of theirs -> modules of ours whose rows it stacks, equally many of each
    transposed  the blocks' weights are [in, out]
    head        the head's weight, where it is not tied
    renamed     last part of a name in old files -> what it is called now
    ignored     last parts of names that files hold beside the weights
    experts     stacked module of ours -> module of theirs; {e} stands for the expert's number
    """

    prefix: str
    modules: Mapping[str, str]
    qkv: tuple[str, ...] = ()
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    transposed: bool = False
    head: str = HEAD
    renamed: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    experts: Mapping[str, str] = field(default_factory=dict)

    def full_name(self, key: str) -> str:
        """The name of a tensor as transformers saves it, from a file that may lack the prefix or its first part."""
        for former, now in self.renamed.items():
            key = key.removesuffix(former) + now if key.endswith(former) else key
        if key in (self.head, HEAD):
            return self.head
        if key.startswith(self.prefix):
            return key
        _, _, rest = self.prefix.partition(".")
        return self.prefix + (key.removeprefix(rest) if rest else key)


@dataclass(frozen=True)
class Family:
    """A model family of transformers that the decoder computes.

    name            model_type in config.json
    architecture    the class of transformers
    keys            field of DecoderConfig (dotted: of its experts) -> key of config.json
    names           of its tensors
    fixed           field that has no key -> its value; a field that is in neither has DecoderConfig's default
    family          DecoderConfig.family, where it is not the name: families with experts are those without
    needs           of a family with experts: which decoders it computes, in words
    aliases         other key that transformers takes -> the key
    only            key -> the value without which the decoder would not compute the same; also transformers' default
    refuse          (config.json, the fields read) -> why the decoder does not compute it, or nothing
    written         key -> its value in every config.json that is written, or how it comes of the DecoderConfig
    modern          config.json -> the same in the keys of today, where older ones said it otherwise
    rope_theta      transformers' default, where positions are rotary
    local_rope_theta  the same of layers with a window, where rope_parameters are told for each type of layer
    rotary_share    transformers' default of DecoderConfig's field, where config.json may say another; None: 1 alone
    rope_keys       what older files call rope_theta and partial_rotary_factor
    original_length transformers' default of original_max_position_embeddings, where that stands beside rope_parameters
    rope_kinds      rope_type in config.json -> RopeScaling.kind, of those that its class computes
    gated           whether its MLP is
    mask_positions  positions count the tokens that the attention mask shows, not the columns
    check           DecoderConfig -> what else is wrong with it, or nothing
    """

    name: str
    architecture: str
    keys: Mapping[str, Key]
    names: Names
    fixed: Mapping[str, Any] = field(default_factory=dict)
    family: str = ""
    needs: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    refuse: Callable[[Mapping[str, Any], Mapping[str, Any]], str] = lambda hf, fields: ""
    written: Mapping[str, Any] = field(default_factory=dict)
    modern: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda hf: hf
    rope_theta: float | None = None
    local_rope_theta: float | None = None
    rotary_share: float | None = None
    rope_keys: tuple[str, str] = ("rope_theta", "partial_rotary_factor")
    original_length: int | None = None
    rope_kinds: Mapping[str, Any] = field(default_factory=dict)
    gated: bool = False
    mask_positions: bool = False
    check: Callable[[Any], str] = lambda config: ""
