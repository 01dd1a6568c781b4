"""Loading a model that exists: a Hugging Face folder, or a run folder of `llm pretrain`."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from apps.llm.tokenizer import Tokenizer, load_tokenizer
from core.checkpoint import CheckpointConfig, Checkpointer, iterate_full
from core.config import UserError
from core.layout import detached
from core.models import load_config, load_pretrained, load_weights
from core.models.decoder import Decoder, DecoderConfig, RopeScaling
from core.nn.routing import MoEConfig
from core.quant import is_quantized
from core.train import checkpoint_path


class UnknownModel(UserError):
    """A Hugging Face folder of a model that the decoder does not compute; another program might."""


@dataclass(frozen=True)
class Source:
    """Where a model lies and what it is; nothing is loaded yet.

    folder  the Hugging Face folder, or the run folder
    is_run  whether it is a run of `megalith llm pretrain`
    """

    folder: Path
    config: DecoderConfig
    is_run: bool

    def load(self, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> Decoder:
        """The whole model in this process, in eval mode."""
        if not self.is_run:
            return load_pretrained(self.folder, dtype=dtype, device=device)
        with torch.device("meta"):
            model = Decoder(self.config)
        model = model.to(dtype or torch.float32).to_empty(device=device)
        parameters = dict(model.named_parameters())
        names = [f"model/{name}" for name in parameters]
        with torch.no_grad():
            for name, value in iterate_full(checkpoint_path(self.folder), names):
                parameters[name.removeprefix("model/")].copy_(value)
        return model.eval()

    def fill(self, model: nn.Module) -> None:
        """Fill the parameters of a (sharded) model, each rank its part."""
        if not self.is_run:
            load_weights(model, self.config, self.folder)
            return
        tensors = {f"model/{n}": detached(p) for n, p in model.named_parameters()}
        checkpointer = Checkpointer(self.folder / "checkpoints", CheckpointConfig())
        checkpointer.load(checkpoint_path(self.folder), tensors, under="model/")
        checkpointer.close()

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / "tokenizer" if self.is_run else self.folder

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer_folder)


def find_model(folder: Path) -> Source:
    """What lies in a folder.  Raises UserError where that is no model, UnknownModel where it is one of others."""
    path = folder / "config.json"
    try:
        described = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{folder} holds no config.json; give a Hugging Face folder or a run folder") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); give a Hugging Face folder or a run folder") from None
    if is_quantized(folder):
        raise UserError(
            f"{folder} is quantized, and llm computes with plain weights; give the folder that it was made from, or "
            f"serve it: megalith serve --model {folder}"
        )
    if isinstance(described, dict) and "model_type" in described:
        return Source(folder, _known_config(folder), is_run=False)
    return Source(folder, _decoder_config(described, path), is_run=True)


def _known_config(folder: Path) -> DecoderConfig:
    try:
        return load_config(folder)
    except UserError as refused:
        if isinstance(refused.__cause__, KeyError):  # of a known family, and not whole
            raise
        raise UnknownModel(str(refused)) from refused


def _decoder_config(described: Any, path: Path) -> DecoderConfig:
    model = described.get("model") if isinstance(described, dict) else None
    if not isinstance(model, dict) or not model.keys() <= {f.name for f in fields(DecoderConfig)}:
        raise UserError(f"{path} is of no model that this program knows; give a Hugging Face folder or a run folder")
    scaling = model.get("rope_scaling")
    parts = {"rope_scaling": RopeScaling(**scaling) if scaling else None, "moe": MoEConfig(**model.get("moe", {}))}
    return DecoderConfig(**{**model, **parts})
