"""Hugging Face's names for the decoder's parameters.

The table of a model says, for each parameter of ours, which rows of which tensors of theirs it consists of; how their
modules are called, the family's record says. It is read in both directions, so import and export cannot drift apart,
and a rank that holds a box of a parameter reads only those slices. What differs between the layouts:

- qkv: ours groups rows by key/value head (its query heads, its key, its value). OPT and Llama keep three matrices,
  GPT-2 stacks them, BLOOM's layout is ours.
- Phi-3 stacks an MLP's gate and up in one matrix.
- GPT-2 stores the blocks' weights as [in, out] (`transposed`).
- A tied head has no tensor of its own.
- Experts: ours are stacked in one parameter, Mixtral's are a tensor each.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from core.models.decoder import Decoder, DecoderConfig
from core.models.hf_config import family_of


@dataclass(frozen=True)
class Rows:
    """Rows start:stop of one of their tensors, counted in the orientation [out, in]."""

    source: str
    start: int
    stop: int


@dataclass(frozen=True)
class Entry:
    """One parameter of ours as a concatenation of rows of their tensors.

    shape       the parameter's full shape
    transposed  they store [in, out]
    beside      rows behind these that the source has of other parameters
    """

    name: str
    shape: tuple[int, ...]
    rows: tuple[Rows, ...]
    transposed: bool = False
    beside: int = 0

    def source_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {}
        for source in dict.fromkeys(part.source for part in self.rows):
            stop = max(part.stop for part in self.rows if part.source == source) + self.beside
            shape = (stop, *self.shape[1:])
            shapes[source] = shape[::-1] if self.transposed else shape
        return shapes

    def read(self, tensors: Mapping[str, Tensor], box: tuple[slice, ...] | None = None) -> Tensor:
        """The parameter, or its part `box`, from their tensors; touches only what it needs."""
        box = box or tuple(slice(0, n) for n in self.shape)
        parts, first = [], 0
        sources: dict[str, Tensor] = {}
        for part in self.rows:
            begin, end = max(box[0].start - first, 0), min(box[0].stop - first, part.stop - part.start)
            first += part.stop - part.start
            if begin < end:
                if part.source not in sources:
                    sources[part.source] = self._oriented(tensors[part.source])
                parts.append(sources[part.source][part.start + begin : part.start + end, *box[1:]])
        if not parts:
            return next(iter(tensors.values())).new_empty([s.stop - s.start for s in box])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def write(self, value: Tensor, begun: Mapping[str, Tensor] = MappingProxyType({})) -> dict[str, Tensor]:
        """Their tensors from the whole parameter.

        begun  those that other parameters have filled in part; they are filled on
        """
        out = {s: begun[s] if s in begun else value.new_empty(shape) for s, shape in self.source_shapes().items()}
        first = 0
        for part in self.rows:
            rows = slice(first, first + part.stop - part.start)
            self._oriented(out[part.source])[part.start : part.stop] = value[rows]
            first = rows.stop
        return out

    def _oriented(self, tensor: Tensor) -> Tensor:
        return tensor.T if self.transposed else tensor


@dataclass(frozen=True)
class Stack:
    """One parameter of ours whose rows of dim 0 are tensors of theirs."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]

    def source_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(self.sources, self.shape[1:])

    def read(self, tensors: Mapping[str, Tensor], box: tuple[slice, ...] | None = None) -> Tensor:
        """The parameter, or its part `box`, from their tensors; touches only what it needs."""
        box = box or tuple(slice(0, n) for n in self.shape)
        parts = [tensors[source][box[1:]] for source in self.sources[box[0]]]
        return torch.stack(parts) if parts else next(iter(tensors.values())).new_empty([s.stop - s.start for s in box])

    def write(self, value: Tensor, begun: Mapping[str, Tensor] = MappingProxyType({})) -> dict[str, Tensor]:
        """Their tensors from the whole parameter, each of which is in one parameter alone."""
        return {source: part.clone() for source, part in zip(self.sources, value, strict=True)}


def hf_to_ours(config: DecoderConfig) -> list[Entry | Stack]:
    """The name table: an entry for each parameter of `Decoder(config)`, with their names as transformers saves them."""
    with torch.device("meta"):
        shapes = {name: tuple(parameter.shape) for name, parameter in Decoder(config).named_parameters()}
    return [_entry(name, shape, config) for name, shape in shapes.items()]


def _entry(name: str, shape: tuple[int, ...], config: DecoderConfig) -> Entry | Stack:
    names = family_of(config).names
    if name == "head.weight":
        return Entry(name, shape, (Rows(names.head, 0, shape[0]),))
    module, _, kind = name.rpartition(".")
    number = module.split(".")[1] if module.startswith("blocks.") else ""
    pattern = module.replace(f"blocks.{number}.", "blocks.{n}.") if number else module

    def theirs(module: str) -> str:
        return names.prefix + module.replace("{n}", number) + "." + kind

    if pattern in names.experts:
        return Stack(name, shape, tuple(theirs(names.experts[pattern].replace("{e}", str(e))) for e in range(shape[0])))
    for fused, parts in names.fused.items():
        if pattern in parts:
            place, rows = parts.index(pattern), shape[0]
            at = Rows(theirs(fused), place * rows, (place + 1) * rows)
            return Entry(name, shape, (at,), beside=(len(parts) - place - 1) * rows)
    transposed = names.transposed and len(shape) == 2 and pattern.startswith("blocks.")
    if pattern in names.modules:
        return Entry(name, shape, (Rows(theirs(names.modules[pattern]), 0, shape[0]),), transposed)
    return Entry(name, shape, tuple(_qkv_rows([theirs(module) for module in names.qkv], config)), transposed)


def _qkv_rows(sources: list[str], config: DecoderConfig) -> Iterable[Rows]:
    """Ours: for each key/value head its query heads, its key, its value. Theirs: all queries, all keys, all values."""
    K, H, J = config.head_size, config.num_heads, config.kv_heads
    stacked = len(sources) == 1
    q, k, v = sources * 3 if stacked else sources
    k_first, v_first = (H * K, (H + J) * K) if stacked else (0, 0)
    for head in range(J):
        group = K * H // J
        yield Rows(q, head * group, (head + 1) * group)
        yield Rows(k, k_first + head * K, k_first + (head + 1) * K)
        yield Rows(v, v_first + head * K, v_first + (head + 1) * K)
