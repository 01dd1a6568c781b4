"""Models of any task that the installed transformers build from a folder's config.json, and batches that they train on.

Nothing is loaded, and no code of the folder is run. The model is of the first class in the config's `architectures`, or
without one the family's bare model; a batch is what the class's `main_input_name` says, with labels where it takes any.
"""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from core.config import UserError

USUAL_LENGTH, USUAL_WAVE = 1024, 16000
"""Tokens of a row where nothing says how many, and samples of a second of sound."""
_OF_ROWS = ("SequenceClassification", "ImageClassification", "AudioClassification", "VideoClassification")
"""Tasks whose labels are one a row."""


class AnyModel:
    """A model of a folder.  Raises UserError where transformers build none; `refused` is why our decoder does not."""

    def __init__(self, folder: Path, refused: UserError):
        import transformers

        self.folder, self.refused = folder, refused
        try:
            self.config: Any = transformers.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            name = next(iter(getattr(self.config, "architectures", None) or ()), None)
            self.kind: Any = getattr(transformers, name, None) if name is not None else None
            self.task: str = name or "" if self.kind is not None else ""
            self.model = self._build(transformers)
        except (ValueError, KeyError, TypeError, AttributeError, OSError, ImportError) as error:
            said = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(f"{refused}; nor do transformers build a model of {folder}: {said}") from error

    def _build(self, transformers: Any) -> nn.Module:
        """On the meta device, as it trains."""
        with torch.device("meta"):
            if self.kind is not None:
                return self.kind(self.config).train()
            return transformers.AutoModel.from_config(self.config, trust_remote_code=False).train()

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @property
    def longest(self) -> int | None:
        """Tokens that it has positions for, where that is said."""
        own = self.config.get_text_config()
        return getattr(own, "max_position_embeddings", None) or getattr(own, "n_positions", None)

    def batch(self, rows: int, length: int | None) -> dict[str, Any]:
        """Inputs of so many rows, without memory, by name.

        length  tokens of a row; by default 1024, or what the model has positions for

        Raises UserError for a model whose inputs are not known here, and for rows that are longer than it is made for.
        """
        takes = inspect.signature(self.model.forward).parameters
        main = str(getattr(self.model, "main_input_name", "input_ids"))
        if length is not None and main == "input_ids" and self.longest is not None and length > self.longest:
            raise UserError(
                f"data.sequence_length={length} and the model of {self.folder} has positions for {self.longest}; "
                "shorten the sequence"
            )
        tokens = length or min(USUAL_LENGTH, self.longest or USUAL_LENGTH)
        batch: dict[str, Any] = {main: self._main(main, rows, tokens)}
        if main != "input_ids" and "input_ids" in takes and "labels" not in takes:  # beside pictures: their captions
            batch["input_ids"] = _ids(rows, tokens)
        if "labels" in takes:
            batch["labels"] = _ids(rows) if any(task in self.task for task in _OF_ROWS) else _ids(rows, tokens)
        elif {"start_positions", "end_positions"} <= {*takes}:
            batch |= {"start_positions": _ids(rows), "end_positions": _ids(rows)}
        elif "decoder_input_ids" in takes:
            batch["decoder_input_ids"] = _ids(rows, tokens)
        if "use_cache" in takes:
            batch["use_cache"] = False
        return batch

    def _main(self, name: str, rows: int, tokens: int) -> torch.Tensor:
        config = self.config
        if name == "input_ids":
            return _ids(rows, tokens)
        if name == "pixel_values":
            vision = getattr(config, "vision_config", config)
            size, channels = getattr(vision, "image_size", 224), getattr(vision, "num_channels", 3)
            height, width = size if isinstance(size, list | tuple) else (size, size)
            return torch.empty(rows, channels, height, width, device="meta")
        if name == "input_features" and hasattr(config, "max_source_positions"):
            return torch.empty(rows, config.num_mel_bins, 2 * config.max_source_positions, device="meta")
        if name == "input_values":
            return torch.empty(rows, USUAL_WAVE, device="meta")
        raise UserError(
            f"{self.name} takes {name}, of which no batch is known here; trace it yourself and ask "
            "core.auto.staged.plan_stages (docs/auto_solver.md)"
        )


def _ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64, device="meta")
