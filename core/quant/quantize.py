"""`quantize(model, scheme)`: the weights of a model in 8 or 4 bits, in place, for any nn.Module."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from core.config import UserError
from core.quant.choose import Chosen, Holders, choose, parameter_holders
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
) -> nn.Module:
    """Quantize a model's weights in place and return it. One layer's weight at a time is there twice.

    scheme      `int8`, `w8a8`, `llm.int8` or `int4`; see `Scheme`
    group_size  int4: columns that share a scale, 32, 64 or 128; a row's last group is filled up with zeros
    symmetric   int4: without zeros
    threshold   llm.int8: inputs above it (in absolute value) are not rounded
    embeddings  also embeddings (looked up, so by every scheme only rounded)
    head        also the output layer
    skip        names of modules or patterns of them (`blocks.0.*`, `*.attention`), left as they are, with all below

    Raises UserError for what is no scheme, a pattern that matches nothing, a model without a layer to quantize, and
    weights that are not finite. Nothing is changed by then, but for the last.
    """
    scheme = scheme_of(scheme, group_size, symmetric, threshold)
    for chosen in choose(model, embeddings=embeddings, head=head, skip=skip):
        put(chosen.holders, quantized(_parameter(chosen.holders), chosen, scheme))
    return model


def scheme_of(scheme: str | Scheme, group_size: int, symmetric: bool, threshold: float) -> Scheme:
    return scheme if isinstance(scheme, Scheme) else Scheme(scheme, group_size, symmetric, threshold)


def quantized(weight: Tensor, chosen: Chosen, scheme: Scheme) -> QuantizedWeight:
    """The weight, rounded. Raises UserError for values that are not finite."""
    try:
        return quantized_weight(weight.detach(), scheme, chosen.transposed)
    except ValueError as error:
        raise UserError(f"{chosen.name} {error}; a model that has diverged cannot be quantized") from error


def put(holders: Holders, value: Tensor) -> None:
    """One parameter for all of its holders."""
    parameter = nn.Parameter(value, requires_grad=False)
    for module, attribute in holders:
        setattr(module, attribute, parameter)


def _parameter(holders: Holders) -> Tensor:
    module, attribute = holders[0]
    return module.get_parameter(attribute)


@torch.no_grad()
def dequantize(model: nn.Module) -> nn.Module:
    """The weights as plain tensors again, in place: what the quantized ones stand for."""
    for name, holders in parameter_holders(model).items():
        weight = model.get_parameter(name)
        if isinstance(weight, QuantizedWeight):
            put(holders, weight.dequantized().clone())
    return model
