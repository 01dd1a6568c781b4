"""Models that two or more apps use: the decoder."""

from core.models.decoder import Decoder, DecoderConfig, RopeScaling, initialise

__all__ = ["Decoder", "DecoderConfig", "RopeScaling", "initialise"]
