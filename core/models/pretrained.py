"""Decoders in and out of Hugging Face folders.

Loading reads safetensors, or pickles of tensors without executing them; never code from the folder. Each tensor of the
folder is used exactly once; one too many or too few is named.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from core.config import UserError
from core.layout import layout_of, local
from core.models.decoder import Decoder, DecoderConfig
from core.models.family import Names
from core.models.hf_config import config_from_hf, config_to_hf, family_of
from core.models.name_table import Entry, Stack, hf_to_ours
from core.weights import Weights, read_json, save_weights, write_json


def load_config(folder: str | Path) -> DecoderConfig:
    """The configuration of a Hugging Face folder. Raises UserError for a folder that is none, or of another family."""
    return config_from_hf(read_json(Path(folder) / "config.json"))


def load_pretrained(
    folder: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Decoder:
    """The decoder of a Hugging Face folder, in eval mode; dtype: by default that of the file's token embedding.

    Raises UserError for a folder that is foreign, truncated, lacks a tensor or holds one that the model does not know.
    """
    config = load_config(folder)
    entries, tensors = _matched(config, folder)
    with torch.device("meta"):
        model = Decoder(config)
    model.to(dtype or _embedding(entries, tensors).dtype).to_empty(device=device)
    _fill(model, entries, tensors)
    return model.eval()


def stored_dtype(config: DecoderConfig, folder: str | Path) -> torch.dtype:
    """The format of a folder's token embedding, in which `load_pretrained` loads; reads nothing but its header.

    Raises UserError for a folder without weights or without that embedding.
    """
    entries, names, weights = hf_to_ours(config), family_of(config).names, Weights(folder, hold=False)
    assert isinstance(entries[0], Entry)
    wanted = entries[0].rows[0].source
    for key in weights:
        if names.full_name(key) == wanted:
            return weights[key].dtype
    raise UserError(f"{folder} lacks {wanted}; give the folder of a whole model with its head")


def load_weights(model: nn.Module, config: DecoderConfig, folder: str | Path) -> None:
    """Fill a `Decoder(config)`, whole or sharded on any mesh: each rank reads only the slices that it holds."""
    _fill(model, *_matched(config, folder))


@torch.no_grad()
def _fill(model: nn.Module, entries: list[Entry | Stack], tensors: Mapping[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    for entry in entries:
        parameter = parameters[entry.name]
        local(parameter).copy_(entry.read(tensors, layout_of(parameter).box()))


class Parameters(Mapping[str, Tensor]):
    """The decoder's parameters, each made from the tensors of a Hugging Face folder when it is asked for.

    Nothing is held: what was read leaves memory with the parameter.
    """

    def __init__(self, config: DecoderConfig, folder: str | Path):
        """Raises UserError as `load_pretrained` does."""
        entries, self._tensors = _matched(config, folder, hold=False)
        self._entries = {entry.name: entry for entry in entries}

    def __getitem__(self, name: str) -> Tensor:
        return self._entries[name].read(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class _Renamed(Mapping[str, Tensor]):
    def __init__(self, weights: Weights, keys: Mapping[str, str]):
        """keys: name -> what it is called in the weights"""
        self._weights, self._keys = weights, keys

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[self._keys[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _matched(
    config: DecoderConfig, folder: str | Path, hold: bool = True
) -> tuple[list[Entry | Stack], Mapping[str, Tensor]]:
    """The table and their tensors by its names, each tensor wanted, present once and of the right shape."""
    entries, names, weights = hf_to_ours(config), family_of(config).names, Weights(folder, hold=hold)
    shapes = {source: shape for entry in entries for source, shape in entry.source_shapes().items()}
    keys, unknown = {}, []
    for key in weights:
        name = names.full_name(key)
        if name in shapes and name not in keys:
            keys[name] = key
        elif not name.endswith(names.ignored) and not (config.tied_head and name == names.head):
            unknown.append(key)
    for problem, found in (("lacks", sorted(set(shapes) - set(keys))), ("holds what no config.json told:", unknown)):
        if found:
            more = f" and {len(found) - 4} more" if len(found) > 4 else ""
            given = f"{folder} {problem} {', '.join(found[:4])}{more}"
            raise UserError(f"{given}; give the folder of a whole model with its head")
    tensors = _Renamed(weights, keys)
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise UserError(f"{folder}: {name} is {list(tensors[name].shape)}, but config.json says {list(shape)}")
    embedding = _embedding(entries, tensors)
    if config.tied_head and (differs := _untied(weights, names, embedding)):
        is_read = "tied_head" in family_of(config).keys
        advice = "set tie_word_embeddings to false in config.json" if is_read else "copy the folder again"
        raise UserError(f"{folder}: {differs} differs from the embedding; {advice}")
    return entries, tensors


def _untied(weights: Weights, names: Names, embedding: Tensor) -> str | None:
    """The name of a head that is there beside the embedding, and another."""
    heads = (key for key in weights if names.full_name(key) == names.head)
    return next((key for key in heads if not torch.equal(weights[key], embedding)), None)


def _embedding(entries: list[Entry | Stack], tensors: Mapping[str, Tensor]) -> Tensor:
    """The token embedding, which comes first."""
    first = entries[0]
    assert isinstance(first, Entry)
    return tensors[first.rows[0].source]


def save_pretrained(
    weights: Decoder | Iterable[tuple[str, Tensor]],
    config: DecoderConfig,
    folder: str | Path,
    dtype: torch.dtype | None = None,
    *,
    special_ids: Mapping[str, int] | None = None,
    max_shard_bytes: int = 5 << 30,
) -> None:
    """Write a folder that transformers' `AutoModelForCausalLM.from_pretrained` loads; of BERT AutoModelForMaskedLM's.

    weights      a decoder, or (name, whole tensor) of each of its parameters, taken one at a time
    dtype        of the tensors written; by default their own
    special_ids  bos_token_id, eos_token_id, pad_token_id of the tokenizer, where it has them

    Raises UserError, before anything is written, where transformers has no class that computes this decoder.
    """
    family_of(config)
    named = weights.named_parameters() if isinstance(weights, Decoder) else weights
    folder, ids = Path(folder), dict(special_ids or {})
    written: list[torch.dtype] = []
    save_weights(_exported(named, config, dtype, written), folder, max_shard_bytes)
    dtype_name = str(written[0]).removeprefix("torch.")
    content = config_to_hf(config, ids) | {"dtype": dtype_name, "torch_dtype": dtype_name}  # the latter for old readers
    if config.causal:
        write_json(folder / "generation_config.json", {"do_sample": False} | ids)
    write_json(folder / "config.json", content)


def _exported(
    named: Iterable[tuple[str, Tensor]], config: DecoderConfig, dtype: torch.dtype | None, written: list[torch.dtype]
) -> Iterable[tuple[str, Tensor]]:
    """Their tensors from ours, each once all its parameters have come, one at a time; notes the dtypes."""
    entries = {entry.name: entry for entry in hf_to_ours(config)}
    left = Counter(source for entry in entries.values() for source in entry.source_shapes())
    begun: dict[str, Tensor] = {}
    for name, value in named:
        assert name in entries, f"{name} is no parameter of this configuration, or came twice"
        value = value.detach().to(dtype or value.dtype)
        written.append(value.dtype)
        for source, tensor in entries.pop(name).write(value, begun).items():
            left[source] -= 1
            if left[source]:
                begun[source] = tensor
            else:
                begun.pop(source, None)
                yield source, tensor
    assert not entries, f"not given: {sorted(entries)}"
