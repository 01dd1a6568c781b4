"""Bytes of an optimizer's state, before there is any: what the memory estimate asks."""

import math

from core.kernels.blockwise import in_8_bits, scales_shape
from core.optim.build import OptimConfig
from core.optim.factored import factored_dims


def state_bytes(
    config: OptimConfig, shape: tuple[int, ...], wide_bytes: int, *, whole: tuple[int, ...] = (), hidden: bool = False
) -> int:
    """Bytes that the state of one parameter takes on a rank, step counters left out.

    shape       of this rank's part
    wide_bytes  of an element of masters and state
    whole       shape of the whole parameter; by default `shape`
    hidden      a matrix of the repeated blocks (Muon keeps one moment of those, and AdamW's two of others)
    """
    options, whole = config.options(), whole or shape
    elements = wide_bytes * math.prod(shape)
    moment = _moment_8bit(shape, wide_bytes) if in_8_bits(whole) else elements
    dims = factored_dims(whole, options.get("factored") or "last")
    factors = elements if dims is None else sum(math.prod(shape) // max(1, shape[d]) for d in dims) * wide_bytes
    if config.name == "adafactor":
        formats = {"fp32": elements, "bf16": elements // (1 if wide_bytes == 8 else 2), "8bit": moment}
        return factors + (0 if options["beta1"] is None else formats[options["momentum_format"]])
    if config.name == "came":
        return elements + factors * (1 if dims is None else 2)
    if config.name == "sm3":
        accumulators = wide_bytes * sum(shape) if shape else wide_bytes
        return accumulators + (elements if options["momentum"] else 0)
    if config.name == "adamw8bit":
        return 2 * moment
    if config.name in ("lars", "muon", "sgd"):
        return elements * (2 if config.name == "muon" and not hidden else 1)
    return 2 * elements


def _moment_8bit(shape: tuple[int, ...], wide_bytes: int) -> int:
    return math.prod(shape) + wide_bytes * math.prod(scales_shape(shape))
