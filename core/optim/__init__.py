"""Optimizers, for one rank and for parameters that are sharded in any way; `build_optimizer` makes them by name."""

from core.optim.adafactor import Adafactor

__all__ = ["Adafactor"]
