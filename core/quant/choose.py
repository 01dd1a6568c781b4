"""The choice of a model's weights that are quantized, and the modules that hold them.

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

from torch import nn

from core.compat import Convolution, TransposedConvolution
from core.config import UserError
from core.quant.weight import QuantizedWeight

_HEADS = ("head", "lm_head")

Holders = Sequence[tuple[nn.Module, str]]
"""The modules that hold a parameter, and under which attribute."""


@dataclass(frozen=True)
class Chosen:
    """A weight that is to be quantized: its name, who holds it, and whether it stands as [in, out]."""

    name: str
    holders: Holders
    transposed: bool

    @property
    def weight(self) -> nn.Parameter:
        module, attribute = self.holders[0]
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
    if isinstance(module, Convolution) and not isinstance(module, TransposedConvolution):
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
