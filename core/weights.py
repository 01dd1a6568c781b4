"""Weights of a model in a folder: by name, memory-mapped, in one file or in shards with an index.

Reading: `Weights(folder)` maps names to tensors that are views of the mapped files, so a slice reads only its pages.
Safetensors first; `pytorch_model.bin` without code execution (`weights_only`).
Writing: `save_weights` cuts a stream of tensors into shards, writes each aside and renames them when all are complete.
`write_safetensors` writes one file, and says by an OSError what the disk answered.
The layout of the folder is Hugging Face's: model.safetensors, or model-0000i-of-0000n.safetensors and an index.

Training state (optimizer, shards of a mesh) is `core.checkpoint`'s.
"""

import json
import os
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from core.config import UserError
from core.files import replace_file

_STEMS = (("model", ".safetensors"), ("pytorch_model", ".bin"))


class Weights(Mapping[str, Tensor]):
    """name -> tensor on the CPU, a view of a mapped file. Do not write to the tensors."""

    def __init__(self, folder: str | Path, stem: str | None = None, hold: bool = True):
        """Raises UserError when the folder holds no weights, or a file of them is missing, truncated or foreign.

        stem  of safetensors files that are not called model
        hold  keep the files mapped. Otherwise each look-up maps its file anew, so that what was read of a tensor leaves
              memory with the tensor: for going through more weights than fit
        """
        self.folder = Path(folder)
        self._tensors: dict[str, Tensor] = {}
        self._files: dict[str, Path] = {}
        for path, promised in _files(self.folder, _STEMS if stem is None else ((stem, ".safetensors"),)):
            tensors = _open(path) if hold else {}
            names = list(tensors) if hold else _names(path)
            lacking = sorted(set(promised or ()) - set(names))
            if lacking:
                raise UserError(f"{path} lacks {_some(lacking)}, which the index promises; copy the folder again")
            self._files |= dict.fromkeys(names, path)
            self._tensors |= tensors

    def __getitem__(self, name: str) -> Tensor:
        held = self._tensors.get(name)
        return _open(self._files[name], name)[name] if held is None else held

    def __contains__(self, name: object) -> bool:
        return name in self._files  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def file_bytes(folder: str | Path, stem: str | None = None) -> int:
    """Bytes of the files that `Weights` reads, with the same errors; a folder may hold others beside them."""
    found = _files(Path(folder), _STEMS if stem is None else ((stem, ".safetensors"),))
    return sum(path.stat().st_size for path, _ in found)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises UserError when the file is missing or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}); give a folder that holds a model") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object; give a folder that holds a model")
    return value


def _files(folder: Path, stems: tuple[tuple[str, str], ...]) -> list[tuple[Path, list[str] | None]]:
    """The files that hold the weights, each with the names that an index promises in it."""
    for stem, suffix in stems:
        single, index = folder / f"{stem}{suffix}", index_of(folder, stem, suffix)
        if single.is_file():
            return [(single, None)]
        if index.is_file():
            return _sharded(index)
    files = " or ".join(stem + suffix for stem, suffix in stems)
    raise UserError(f"{folder} holds no weights; expected {files}, or an index of shards")


def index_of(folder: Path, stem: str, suffix: str = ".safetensors") -> Path:
    """The path of the index of shards; that of a variant, as the stem model.fp16, has the variant before its end."""
    plain, _, variant = stem.partition(".")
    varied = folder / f"{plain}{suffix}.index.{variant}.json"
    return varied if variant and varied.is_file() else folder / f"{stem}{suffix}.index.json"


def _sharded(index: Path) -> list[tuple[Path, list[str] | None]]:
    names_in: dict[str, list[str]] = {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index} has no weight_map; it is not an index of shards")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise UserError(f"{index} points outside its folder ({file!r}); only file names are followed")
        names_in.setdefault(file, []).append(name)
    missing = [file for file in names_in if not (index.parent / file).is_file()]
    if missing:
        raise UserError(f"{index.parent} lacks the shards {_some(missing)}; copy the folder again")
    return [(index.parent / file, names) for file, names in names_in.items()]


def _open(path: Path, only: str | None = None) -> dict[str, Tensor]:
    """All tensors of a file, or only one of them."""
    with _explained(path):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt", device="cpu") as file:  # tensors keep the mapping alive
                return {name: file.get_tensor(name) for name in (file.keys() if only is None else (only,))}
    loaded = load_pickled(path)
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise UserError(f"{path} holds something else than tensors by name; convert it to safetensors")
    return loaded


def load_pickled(path: Path) -> Any:
    """Load tensors and plain containers that torch.save wrote.  Raises UserError for all else, and runs nothing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what foreign bytes seem to be
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # the unpickler raises whatever foreign bytes lead to
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it holds {foreign[1]}, which is no tensor" if foreign else "torch.save did not write it"
        raise UserError(f"{path} is truncated or not a file of weights ({reason}); copy it again") from error


def _names(path: Path) -> list[str]:
    """Names of a file's tensors, of which nothing is mapped."""
    if path.suffix != ".safetensors":
        return list(_open(path))
    with _explained(path), safe_open(path, framework="pt", device="cpu") as file:
        return list(file.keys())


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} is truncated or not a file of weights ({reason}); copy it again") from error


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def save_weights(
    tensors: Iterable[tuple[str, Tensor]], folder: str | Path, max_shard_bytes: int = 5 << 30, stem: str = "model"
) -> None:
    """Write named tensors to safetensors files of at most `max_shard_bytes` (a larger tensor has a file of its own).

    Consumes the stream holding no more than one shard. What the folder held under these names is replaced at the end.
    """
    folder = Path(folder)
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = []
    total_bytes = 0
    try:
        for shard in _cut(tensors, max_shard_bytes):
            write_safetensors(shard, _aside(folder, len(shards)))
            shards.append(list(shard))
            total_bytes += sum(tensor.nbytes for tensor in shard.values())
    except BaseException:
        for i in range(len(shards) + 1):
            _aside(folder, i).unlink(missing_ok=True)
        if made:
            with suppress(OSError):  # somebody else has put something there
                folder.rmdir()
        raise
    count = len(shards)
    names = (
        [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        if count > 1
        else [f"{stem}.safetensors"]
    )
    weight_map = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
    index = folder / f"{stem}.safetensors.index.json"
    own = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors")
    for old in (*(path for path in folder.iterdir() if own.fullmatch(path.name)), index):
        old.unlink(missing_ok=True)
    for i, name in enumerate(names):
        os.replace(_aside(folder, i), folder / name)
    if count > 1:
        write_json(index, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def write_safetensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """One file of contiguous tensors; not aside.  Raises OSError with its name where the disk refuses or is full."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"} | dict(metadata or {}))
    except SafetensorError as error:
        if (found := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


def persistent_buffers(model: nn.Module, every_name: bool = False) -> dict[str, Tensor]:
    """name -> buffer of those that are part of the model's state; one that modules share once, or by every name."""
    persistent = model.state_dict(keep_vars=True)
    return {n: buffer for n, buffer in model.named_buffers(remove_duplicate=not every_name) if n in persistent}


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write aside, then rename: the file is never half there."""
    replace_file(path, json.dumps(value, indent=2).encode() + b"\n")


def _aside(folder: Path, index: int) -> Path:
    return folder / f".weights-{index:05d}.part"


def _cut(tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    shard_bytes = 0
    for name, tensor in tensors:
        if shard and shard_bytes + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, shard_bytes = {}, 0
        shard[name] = tensor.detach().cpu().contiguous()
        shard_bytes += tensor.nbytes
    if shard:
        yield shard
