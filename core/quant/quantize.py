"""`quantize(model, scheme)`: the weights of a model in 8 or 4 bits, in place, for any nn.Module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from core.config import UserError
from core.quant.calibrate import calls_of, moments
from core.quant.choose import Chosen, Holders, choose, parameter_holders
from core.quant.gptq import Moments
from core.quant.scheme import Scheme
from core.quant.weight import QuantizedWeight, quantized_weight


def quantize(
    model: nn.Module,
    scheme: str | Scheme = "int8",
    *,
    group_size: int = 64,
    symmetric: bool = False,
    threshold: float = 6.0,
    embeddings: bool = False,
    head: bool = False,
    skip: Iterable[str] = (),
    calibration: Iterable[Any] | None = None,
    progress: Callable[[str, int], None] | None = None,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Quantize a model's weights in place and return it. One layer's weight at a time is there twice.

    scheme      `int8`, `w8a8`, `llm.int8` or `int4`; see `Scheme`
    group_size  int4: columns that share a scale, 32, 64 or 128; a row's last group is filled up with zeros
    symmetric   int4: without zeros
    threshold   llm.int8: inputs above it (in absolute value) are not rounded
    embeddings  also embeddings (looked up, so by every scheme only rounded)
    head        also the output layer
    skip        names of modules or patterns of them (`blocks.0.*`, `*.attention`), left as they are, with all below
    calibration int4: batches of what the model is called with, each a tensor, a tuple of arguments or a mapping of
                keywords. Weights are rounded so that results for these change little: see `core.quant.calibrate`
    progress    called with the name of each finished weight and the bytes of plain weights so far
    device      where weights are rounded, one at a time, and with `calibration` the model is read, a block at a time;
                the model stays where it is. None: there

    Raises UserError for what is no scheme, a pattern that matches nothing, a model without a layer to quantize,
    calibration of another scheme, and weights (or what they are calibrated by) that are not finite. Nothing is changed
    by then, but for the last.
    """
    scheme, num_bytes = scheme_of(scheme, group_size, symmetric, threshold), 0
    device = None if device is None else torch.device(device)
    found = choose(model, embeddings=embeddings, head=head, skip=skip)
    for chosen, known in _calibrated(model, found, scheme, calibration, device):
        weight = chosen.weight
        num_bytes += weight.nbytes
        put(chosen.holders, quantized(weight, chosen, scheme, known, device))
        if progress is not None:
            progress(chosen.name, num_bytes)
    return model


def _calibrated(
    model: nn.Module,
    found: list[Chosen],
    scheme: Scheme,
    calibration: Iterable[Any] | None,
    device: torch.device | None,
) -> Iterable[tuple[Chosen, Moments | None]]:
    if calibration is None:
        return ((chosen, None) for chosen in found)
    if scheme.name != "int4":
        raise UserError(f"calibration is for int4, and {scheme.name} was asked for; leave calibration out")
    return moments(model, calls_of(calibration), found, device)


def scheme_of(scheme: str | Scheme, group_size: int, symmetric: bool, threshold: float) -> Scheme:
    return scheme if isinstance(scheme, Scheme) else Scheme(scheme, group_size, symmetric, threshold)


def quantized(
    weight: Tensor,
    chosen: Chosen,
    scheme: Scheme,
    known: Moments | None = None,
    device: torch.device | str | None = None,
) -> QuantizedWeight:
    """The weight, rounded, by its inputs if they are known; on a device, if one is given, and back where it was.

    Raises UserError for values that are not finite.
    """
    plain = weight.detach()
    try:
        rounded = quantized_weight(plain if device is None else plain.to(device), scheme, chosen.transposed, known)
    except ValueError as error:
        raise UserError(f"{chosen.name} {error}; a model that has diverged cannot be quantized") from error
    return rounded if rounded.device == weight.device else rounded.mapped(lambda part: part.to(weight.device))


def put(holders: Holders, value: Tensor) -> None:
    """One parameter for all of its holders."""
    parameter = nn.Parameter(value, requires_grad=False)
    for module, attribute in holders:
        setattr(module, attribute, parameter)


@torch.no_grad()
def dequantize(model: nn.Module) -> nn.Module:
    """The weights as plain tensors again, in place: what the quantized ones stand for."""
    for name, holders in parameter_holders(model).items():
        weight = model.get_parameter(name)
        if isinstance(weight, QuantizedWeight):
            put(holders, weight.dequantized().clone())
    return model
