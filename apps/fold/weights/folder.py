"""Folders of our own: config.json, which says what the model is, and model.safetensors with our names.

config.json may hold a note, which every prediction with these weights is marked with.
"""

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any

from torch import Tensor

from apps.fold.model.config import ModelConfig, MultimerConfig
from apps.fold.weights.alphafold import check_names
from apps.fold.weights.table import name_table
from core.config import UserError, as_json
from core.weights import Weights, read_json, save_weights, write_json

FORMAT = "megalith-fold"


def save_folder(folder: Path, config: ModelConfig, parameters: dict[str, Tensor], note: str = "") -> None:
    """Write the weights, then config.json, which makes the folder a model's."""
    save_weights(parameters.items(), folder)
    content = {"format": FORMAT, "model": as_json(config)}
    write_json(folder / "config.json", content | ({"note": note} if note else {}))


def load_folder(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The model's configuration and its parameters.  Raises UserError for a folder of another kind or a damaged one."""
    stored = _stored(folder)
    model = stored.get("model")
    complexes = isinstance(model, dict) and "recycle_tolerance" in model
    config = _from_json(MultimerConfig if complexes else ModelConfig, model, f"{folder}/config.json")
    weights = Weights(folder)
    expected = {entry.name: entry.shape for entry in name_table(config)}
    check_names(folder, expected, {name: tuple(value.shape) for name, value in weights.items()})
    return config, dict(weights)


def read_note(path: Path) -> str:
    """The note that predictions with these weights are marked with; empty for most folders, and for files."""
    return str(read_json(path / "config.json").get("note", "")) if path.is_dir() else ""


def _stored(folder: Path) -> dict[str, Any]:
    stored = read_json(folder / "config.json")
    if stored.get("format") != FORMAT:
        raise UserError(f"{folder} is no folder of `megalith fold convert` (its config.json has no format {FORMAT})")
    return stored


def _from_json(kind: Any, value: Any, origin: str) -> Any:
    """A dataclass from what `as_json` made of it.  Raises UserError for other fields."""
    if isinstance(kind, types.UnionType):
        kind = next(k for k in typing.get_args(kind) if k is not type(None)) if value is not None else type(None)
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
        return value
    names = {f.name for f in dataclasses.fields(kind)}
    if not isinstance(value, dict) or set(value) - names:
        given = ", ".join(sorted(set(value) - names)) if isinstance(value, dict) else repr(value)
        raise UserError(f"{origin} does not describe a model ({given}); convert the weights again")
    hints = typing.get_type_hints(kind)
    return kind(**{name: _from_json(hints[name], part, origin) for name, part in value.items()})
