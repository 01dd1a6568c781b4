"""`quantize(model, scheme)`: the weights of a model in 8 or 4 bits, in place, for any nn.Module.

What is quantized: the weights of linear layers (also those of transformers' GPT-2, which stand as [in, out]) and of
convolutions; embeddings (of positions, too) and the head by option. Biases, norms and whatever else is small stay as
they are. A weight that several modules share is one weight and stays one: where it belongs to the embedding or the
head, it is quantized when either is asked for. So do weights that are quantized already: a model may have int4 layers
and, by a second call, an int8 head.

The head is what `get_output_embeddings` names (transformers' models), a linear layer that shares the weight of an
embedding, or a module whose own name is `head` or `lm_head`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from core.config import UserError
from core.quant.scheme import Scheme
from core.quant.weight import QuantizedWeight, quantized_weight

_HEADS = ("head", "lm_head")


Holders = Sequence[tuple[nn.Module, str]]
"""The modules that hold a parameter, and under which attribute."""


@dataclass(frozen=True)
class Chosen:
    """A weight that is to be quantized: its name, who holds it, and whether it stands as [in, out]."""

    name: str
    holders: Holders
    transposed: bool


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


def choose(model: nn.Module, *, embeddings: bool = False, head: bool = False, skip: Iterable[str] = ()) -> list[Chosen]:
    """The weights to quantize, each once. The model may be on the meta device. Raises UserError as `quantize` does."""
    skipped = _skipped(model, tuple(skip))
    names = {id(module): name for name, module in model.named_modules()}
    heads = _heads(model)
    asked = {kind for kind, is_asked in (("embedding", embeddings), ("head", head)) if is_asked}
    found = []
    for name, holders in parameter_holders(model).items():
        kinds = {_kind(module, attribute, heads) for module, attribute in holders}
        transposed = {_is_transposed(module) for module, _ in holders}
        left_out = None in kinds or len(transposed) > 1 or any(names[id(module)] in skipped for module, _ in holders)
        outer = kinds - {"layer"}  # of a weight that is also the embedding's or the head's
        if not left_out and (not outer or outer & asked):
            found.append(Chosen(name, holders, transposed.pop()))
    _check(model, found)
    return found


def _check(model: nn.Module, found: list[Chosen]) -> None:
    if found:
        return
    if any(isinstance(parameter, QuantizedWeight) for parameter in model.parameters()):
        raise UserError("the model is quantized already, and nothing more was asked for; start from its plain weights")
    raise UserError(
        f"{type(model).__name__} has no linear layer or convolution to quantize, besides what skip, embeddings and "
        "head leave out; give a model that has"
    )


def _kind(module: nn.Module, attribute: str, heads: set[int]) -> str | None:
    """`layer`, `embedding` or `head`; None for what is never quantized (norms, biases, transposed convolutions, …)."""
    weight = module._parameters[attribute] if attribute == "weight" else None
    if weight is None or isinstance(weight, QuantizedWeight) or not weight.is_floating_point():
        return None
    if isinstance(module, nn.Embedding):
        return "embedding"
    if id(module) in heads and weight.ndim == 2:
        return "head"
    if isinstance(module, _ConvNd) and not isinstance(module, _ConvTransposeNd):
        return "layer"
    return "layer" if isinstance(module, nn.Linear) or _is_transposed(module) else None


def _is_transposed(module: nn.Module) -> bool:
    """transformers' Conv1D, by what it is and without importing transformers: weight [in, out], nf outputs."""
    weight = module._parameters.get("weight")
    if type(module).__name__ != "Conv1D" or weight is None or weight.ndim != 2:
        return False
    return getattr(module, "nf", None) == weight.shape[1]


def _heads(model: nn.Module) -> set[int]:
    """ids of the modules that make the output."""
    named = dict(model.named_modules())
    looked_up = {id(m.weight) for m in named.values() if isinstance(m, nn.Embedding)}
    heads = {
        id(module)
        for name, module in named.items()
        if name.rpartition(".")[2] in _HEADS or (isinstance(module, nn.Linear) and id(module.weight) in looked_up)
    }
    for module in named.values():
        output = getattr(module, "get_output_embeddings", lambda: None)()
        if isinstance(output, nn.Module):
            heads.add(id(output))
    return heads


def _skipped(model: nn.Module, patterns: tuple[str, ...]) -> set[str]:
    """Names of the modules that the patterns match, and of all below them."""
    names = [name for name, _ in model.named_modules()]
    matched = set()
    for pattern in patterns:
        found = {name for name in names if name and (fnmatchcase(name, pattern) or name.endswith(f".{pattern}"))}
        if not found:
            known = ", ".join(list(dict(model.named_children()))[:8])
            raise UserError(f"skip={pattern!r} matches no module; the model's modules are {known}, …")
        matched |= found
    return {name for name in names if any(name == found or name.startswith(f"{found}.") for found in matched)}


def parameter_holders(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """name -> (module, attribute) of all who hold it; a shared parameter stands under its first name only."""
    first: dict[int, str] = {}
    holders: dict[str, list[tuple[nn.Module, str]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=True):
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = first.setdefault(id(parameter), f"{prefix}.{attribute}" if prefix else attribute)
            holders.setdefault(name, []).append((module, attribute))
    return holders


@torch.no_grad()
def dequantize(model: nn.Module) -> nn.Module:
    """The weights as plain tensors again, in place: what the quantized ones stand for."""
    for name, holders in parameter_holders(model).items():
        weight = model.get_parameter(name)
        if isinstance(weight, QuantizedWeight):
            put(holders, weight.dequantized().clone())
    return model
