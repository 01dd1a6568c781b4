"""A complete checkpoint on disk.

    step-00000100/
        complete.json           format, step, world size, mesh, the caller's values; its presence says "complete"
        tensors.json            name -> dtype, shape, and per chunk: offsets, sizes, file, first byte, bytes
        __0_0.distcp …          the tensors, one file a rank, in DCP's format
        rank-00000.safetensors  what belongs to one rank alone, such as the state of its random generators
        .metadata               the same as tensors.json for torch's own tools; a pickle, so never read here
    step-00000200.tmp-…/        being written, or left over from a crash: never read, removed by the next save
    step-00000100.replaced-…/   what a second save of step 100 is about to replace: read if that save crashes

Reading executes nothing that a file contains: JSON, safetensors, and tensors through `weights_only`. Whatever is
missing, truncated, foreign or of another format ends as one line that names it and a checkpoint that can be used.
"""

import json
import math
import os
import pickle
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from core.checkpoint.shards import LoadPlanner, Shard
from core.config import UserError

FORMAT = 1
COMPLETE, TENSORS = "complete.json", "tensors.json"
_STEP = re.compile(r"step-(\d{8,})(\.replaced-[0-9a-f]+)?")
_SHARD_FILE = re.compile(r"__\d+_\d+\.distcp")


@dataclass(frozen=True)
class StoredTensor:
    """What is known of a stored tensor without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Stored:
    """A complete checkpoint: what its JSON files say.  `values` are the caller's, as they came back from JSON."""

    path: Path
    step: int
    world_size: int
    mesh: dict[str, int]
    values: dict[str, Any]
    metadata: Metadata

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        return {
            name: StoredTensor(tuple(t.size), t.properties.dtype) for name, t in _tensor_metadata(self.metadata).items()
        }

    def plan(self, shards: dict[str, Shard]) -> LoadPlanner:
        """How to fill `shards`, every name of which is stored.

        Raises UserError when a shape or a kind of dtype differs, or a file that is needed is missing or truncated.
        """
        for name, shard in shards.items():
            self._check_tensor(name, shard)
        planner = LoadPlanner(shards, self.metadata)
        self._check_files(item.storage_index for item in planner.plan.items)
        self._check_filled(planner)
        return planner

    def read(self, planner: LoadPlanner) -> None:
        """Carry out a plan: read into the shards in place, cast to their dtype."""
        reader = FileSystemReader(self.path)
        reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        try:
            reader.read_data(planner.plan, planner).wait()
        except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError, AssertionError) as error:
            raise refusal(self.path, f"its tensors cannot be read ({_one_line(error)})") from None

    def rank_values(self, rank: int) -> dict[str, Tensor | bytes]:
        """What `rank` saved for itself."""
        path = self.path / rank_file(rank)
        try:
            with safe_open(path, framework="pt") as file:
                as_bytes = set(json.loads((file.metadata() or {})["bytes"]))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise refusal(self.path, f"{path.name} cannot be read ({_one_line(error)})") from None
        return {name: t.numpy().tobytes() if name in as_bytes else t for name, t in tensors.items()}

    def _check_tensor(self, name: str, shard: Shard) -> None:
        stored = _tensor_metadata(self.metadata)[name]
        if stored.size != shard.shape:
            raise UserError(
                f"{name} is {tuple(stored.size)} in {self.path} and {tuple(shard.shape)} here; "
                "load it with the configuration of the run that saved it"
            )
        # Floating dtypes are cast: a run may go on, or be evaluated, in another precision than it was trained in, and
        # rounding is what that precision means. Between integers, booleans and floats a cast would change the meaning.
        saved, here = stored.properties.dtype, shard.data.dtype
        if saved != here and not (saved.is_floating_point and here.is_floating_point):
            raise UserError(
                f"{name} is {saved} in {self.path} and {here} here; only floating dtypes are cast, "
                "load it with the configuration of the run that saved it"
            )

    def _check_files(self, indices: Iterable[MetadataIndex]) -> None:
        needed: dict[str, int] = {}
        for index in indices:
            info = self.metadata.storage_data[index]
            needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
        for name, nbytes in needed.items():
            path = self.path / name
            if not path.is_file():
                raise refusal(self.path, f"its file {name} is missing")
            if path.stat().st_size < nbytes:
                raise refusal(self.path, f"its file {name} is truncated ({path.stat().st_size} of {nbytes} bytes)")

    def _check_filled(self, planner: LoadPlanner) -> None:
        filled = dict.fromkeys(planner.state_dict, 0)
        for item in planner.plan.items:
            filled[item.dest_index.fqn] += math.prod(item.lengths)
        for name, shard in planner.state_dict.items():
            if filled[name] != shard.data.numel():
                raise refusal(self.path, f"its {TENSORS} does not cover the whole of {name}")


def inspect(path: Path) -> Stored:
    """What a complete checkpoint holds, without its tensors.

    path  a step's folder, or a folder of checkpoints, whose latest is taken.  Raises UserError for anything else.
    """
    path = Path(path)
    steps = complete_steps(path)
    if steps and not (path / COMPLETE).exists():
        path = steps[max(steps)]
    if not path.is_dir():
        raise refusal(path, "there is no such folder")
    if not (path / COMPLETE).is_file():
        raise refusal(path, f"this is not a complete Megalith checkpoint (it has no {COMPLETE})")
    record = _read_json(path, COMPLETE)
    if record.get("format") != FORMAT:
        raise refusal(path, f"it has format {record.get('format')}, and this version reads format {FORMAT}")
    try:
        metadata = _parse_tensors(_read_json(path, TENSORS))
        return Stored(
            path, int(record["step"]), int(record["world_size"]), dict(record["mesh"]), dict(record["values"]), metadata
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise refusal(path, f"its JSON files are damaged ({_one_line(error)})") from None


def read_full(path: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Whole tensors on the CPU, in one process and without a process group.  names: by default all that are stored."""
    return dict(iterate_full(path, names))


def iterate_full(path: Path, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """The same one tensor at a time, so that no more than one needs to be in memory."""
    stored = inspect(path)
    tensors = stored.tensors
    chosen = list(tensors) if names is None else list(names)
    require_names(stored.path, missing=[name for name in chosen if name not in tensors])
    for name in chosen:
        whole = torch.empty(tensors[name].shape, dtype=tensors[name].dtype)
        stored.read(stored.plan({name: Shard(whole)}))
        yield name, whole


def complete_steps(folder: Path) -> dict[int, Path]:
    """The complete checkpoints in a folder: step -> its folder, in ascending order."""
    found: dict[int, Path] = {}
    for path in sorted(Path(folder).glob("step-*")):  # step-1 comes before step-1.replaced-…, and wins
        match = _STEP.fullmatch(path.name)
        if match and (path / COMPLETE).is_file():
            found.setdefault(int(match[1]), path)
    return dict(sorted(found.items()))


def require_names(path: Path, missing: Iterable[str] = (), unexpected: Iterable[str] = ()) -> None:
    """Raises UserError, naming the first few, unless both are empty."""
    for names, what in ((sorted(missing), "lacks"), (sorted(unexpected), "has, and this run does not,")):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(
                f"{path} {what} {', '.join(names[:3])}{more}; load it with the configuration of the run that saved it"
            )


def refusal(path: Path, why: str) -> UserError:
    """One line: which checkpoint, what is wrong with it, and which other one can be used instead."""
    others = [(step, other) for step, other in complete_steps(path.parent).items() if other != path]
    if others:
        step, other = others[-1]
        return UserError(
            f"cannot load {path}: {why}; the complete checkpoint of step {step} is {other}, resume from it"
        )
    return UserError(f"cannot load {path}: {why}; there is no other complete checkpoint in {path.parent}")


def tensors_json(metadata: Metadata, written: Iterable[WriteResult]) -> dict[str, Any]:
    """DCP's plan and what all ranks wrote, as the content of tensors.json; `_parse_tensors` reads it back."""
    places = {result.index: result.storage_data for result in written}
    files: dict[str, list[dict[str, Any]]] = {name: [] for name in metadata.state_dict_metadata}
    for name, tensor in _tensor_metadata(metadata).items():
        for chunk in tensor.chunks:
            info = places[MetadataIndex(name, chunk.offsets)]
            files[name].append(
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    "file": info.relative_path,
                    "first_byte": info.offset,
                    "bytes": info.length,
                }
            )
    return {
        name: {"dtype": str(t.properties.dtype).removeprefix("torch."), "shape": list(t.size), "chunks": files[name]}
        for name, t in _tensor_metadata(metadata).items()
    }


def _parse_tensors(content: dict[str, Any]) -> Metadata:
    metadata = Metadata(state_dict_metadata={}, storage_data={})
    for name, tensor in content.items():
        dtype = getattr(torch, tensor["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} has no dtype {tensor['dtype']}")
        chunks = []
        for chunk in tensor["chunks"]:
            if not _SHARD_FILE.fullmatch(chunk["file"]):
                raise ValueError(f"{name} lies in {chunk['file']}")
            chunks.append(ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])))
            info = _StorageInfo(chunk["file"], int(chunk["first_byte"]), int(chunk["bytes"]))
            metadata.storage_data[MetadataIndex(name, chunks[-1].offsets)] = info
        metadata.state_dict_metadata[name] = TensorStorageMetadata(
            TensorProperties(dtype=dtype), torch.Size(tensor["shape"]), chunks
        )
    return metadata


def _tensor_metadata(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    return metadata.state_dict_metadata  # pyright: ignore[reportReturnType]  # a Shard is always a tensor, never bytes


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def encode_rank_values(values: dict[str, Tensor | bytes]) -> bytes:
    """A safetensors file; bytes go in as uint8 tensors, and the header says which they are."""
    as_bytes = [name for name, value in values.items() if isinstance(value, bytes)]
    tensors = {
        name: torch.from_numpy(np.frombuffer(v, np.uint8).copy()) if isinstance(v, bytes) else v.cpu().contiguous()
        for name, v in values.items()
    }
    return to_safetensors(tensors, metadata={"bytes": json.dumps(as_bytes)})


def write_file(path: Path, content: bytes) -> None:
    """Write, and return only when it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Return only when the names in a folder (new, renamed, removed) are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_json(path: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((path / name).read_bytes())
    except (OSError, ValueError) as error:
        raise refusal(path, f"its {name} cannot be read ({_one_line(error)})") from None
    if not isinstance(content, dict):
        raise refusal(path, f"its {name} is not a JSON object")
    return content


def _one_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
