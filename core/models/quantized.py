"""The decoder's families, for `core.quant`'s functions that take folders."""

from pathlib import Path

import torch
from torch import nn

from core.models.decoder import Decoder
from core.models.families import FAMILIES
from core.models.pretrained import Parameters, load_config
from core.quant.folder import ARCHITECTURES, Architecture


def build(folder: Path) -> Decoder:
    """The decoder of a folder, on the meta device."""
    config = load_config(folder)
    with torch.device("meta"):
        return Decoder(config)


def parameters(model: nn.Module, folder: Path) -> Parameters:
    """The decoder's parameters from a Hugging Face folder, each read when it is asked for."""
    assert isinstance(model, Decoder)
    return Parameters(model.config, folder)


ARCHITECTURES.update(dict.fromkeys(FAMILIES, Architecture(build, parameters)))
