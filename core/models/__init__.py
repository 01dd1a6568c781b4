"""Models that two or more apps use: the decoder."""

import core.models.quantized  # noqa: F401 (folders of the decoder's families can be quantized)
from core.models.decoder import Decoder, DecoderConfig, RopeScaling, initialise
from core.models.generate import generate
from core.models.pretrained import load_config, load_pretrained, load_weights, save_pretrained, stored_dtype
from core.models.shapes import SHAPES

__all__ = [
    "SHAPES",
    "Decoder",
    "DecoderConfig",
    "RopeScaling",
    "generate",
    "initialise",
    "load_config",
    "load_pretrained",
    "load_weights",
    "save_pretrained",
    "stored_dtype",
]
