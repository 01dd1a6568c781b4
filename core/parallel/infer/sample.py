"""Arguments of a model's forward in a trace, of which only the shapes matter, by their names.

The names are those of transformers and diffusers, and their sizes those of the model's configuration. Two rows, and
lengths that no other size is likely to have.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from core.config import UserError

ROWS, LENGTH, OTHER_LENGTH = 2, 24, 12
_SWITCHES = {"use_cache": False, "return_dict": True}


def sample_of(model: nn.Module) -> dict[str, Any]:
    """Keyword arguments for the model's forward.  Raises UserError where it needs some that are not known."""
    config = getattr(model, "config", None)
    accepted = inspect.signature(model.forward).parameters
    sizes = _Sizes(config)
    found: dict[str, Any] = {}
    for name, parameter in accepted.items():
        wanted = parameter.default is inspect.Parameter.empty or name in _usual(accepted)
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or not wanted:
            continue
        if name not in _MAKERS:
            raise UserError(
                f"{type(model).__name__} takes {name}, of which nothing is known; say how the model's modules are cut, "
                "or find it from a sample of what its forward takes: core.parallel.infer.infer_plan"
            )
        try:
            found[name] = _MAKERS[name](sizes)
        except (AttributeError, TypeError) as error:
            raise UserError(
                f"{type(model).__name__}'s configuration does not say how large {name} is ({error})"
            ) from error
    if not found:
        raise UserError(f"{type(model).__name__} takes no input that is known; say how its modules are cut")
    return found | {name: value for name, value in _SWITCHES.items() if name in accepted}


def _usual(accepted: Mapping[str, Any]) -> set[str]:
    """The arguments with defaults that a model cannot do without."""
    inputs = [n for n in ("input_ids", "pixel_values", "input_features", "input_values") if n in accepted]
    decoder = ["decoder_input_ids"] if "decoder_input_ids" in accepted else []
    return {*inputs, *decoder, "encoder_hidden_states"} if "sample" in accepted else {*inputs, *decoder}


class _Sizes:
    """A configuration's sizes, also of its parts."""

    def __init__(self, config: Any):
        self.config = config

    def __getattr__(self, name: str) -> Any:
        for place in (self.config, *(getattr(self.config, part, None) for part in ("vision_config", "text_config"))):
            value = place.get(name) if isinstance(place, Mapping) else getattr(place, name, None)
            if value is not None:
                return value
        raise AttributeError(f"it has no {name}")

    def side(self, name: str) -> tuple[int, int]:
        size = getattr(self, name)
        return (size, size) if isinstance(size, int) else tuple(size)


def _ids(wanted: int) -> Callable[[_Sizes], Tensor]:
    def make(sizes: _Sizes) -> Tensor:
        names = ("max_position_embeddings", "n_positions", "max_target_positions")
        longest = next((getattr(sizes, name) for name in names if hasattr(sizes, name)), wanted)
        length = next((n for n in (wanted, 12, 6) if n <= longest), longest)
        return torch.zeros(ROWS, length, dtype=torch.int64)

    return make


def _channels(sizes: _Sizes) -> int:
    return getattr(sizes, "num_channels", 3) if hasattr(sizes, "num_channels") else 3


_MAKERS: dict[str, Callable[[_Sizes], Any]] = {
    "input_ids": _ids(LENGTH),
    "decoder_input_ids": _ids(OTHER_LENGTH),
    "pixel_values": lambda sizes: torch.zeros(ROWS, _channels(sizes), *sizes.side("image_size")),
    "input_features": lambda sizes: torch.zeros(ROWS, sizes.num_mel_bins, 2 * sizes.max_source_positions),
    "input_values": lambda sizes: torch.zeros(ROWS, 4000),
    "sample": lambda sizes: torch.zeros(ROWS, sizes.in_channels, *sizes.side("sample_size")),
    "hidden_states": lambda sizes: torch.zeros(ROWS, sizes.in_channels, *sizes.side("sample_size")),
    "timestep": lambda sizes: torch.zeros(ROWS, dtype=torch.int64),
    "class_labels": lambda sizes: torch.zeros(ROWS, dtype=torch.int64),
    "encoder_hidden_states": lambda sizes: torch.zeros(ROWS, OTHER_LENGTH, sizes.cross_attention_dim),
}
