"""A complete checkpoint on disk.

    step-00000100/
        complete.json           format, step, world size, mesh, the caller's values, size and checksum of each file that
                                holds no tensors, and its own checksum; its presence says "complete"
        tensors.json            name -> dtype, shape, and per chunk: offsets, sizes, file, first byte, bytes, checksum
        __0_0.distcp …          the tensors, one file a rank, in DCP's format
        rank-00000.safetensors  what belongs to one rank alone, such as the state of its random generators
        .metadata               the same as tensors.json for torch's own tools; a pickle, so never unpickled here
    step-00000200.tmp-…/        being written, or left over from a crash: never read, removed by the next save
    step-00000100.replaced-…/   what a second save of step 100 is about to replace: read if that save crashes

Reading executes nothing that a file contains: JSON, safetensors, and tensors through `weights_only`. Whatever is
missing, truncated, damaged, foreign or of another format ends as one line that names it and the nearest checkpoint that
is whole. Each rank compares the chunks that it reads, and its share of the other files, with their checksums.

Format 1 is the same without checksums: it is read, and a line says that damage in it is not seen.
"""

import json
import math
import pickle
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from core.checkpoint.shards import LoadPlanner, Shard
from core.checkpoint.tensor_file import Chunk, ChunkReader, open_chunks
from core.compat import narrowed
from core.config import UserError
from core.files import Damaged, check_stamp, unsigned

FORMAT = 2
_WITHOUT_CHECKSUMS = 1
COMPLETE, TENSORS, METADATA = "complete.json", "tensors.json", ".metadata"
_STEP = re.compile(r"step-(\d{8,})(\.replaced-[0-9a-f]+)?")
_SHARD_FILE = re.compile(r"__\d+_\d+\.distcp")


@dataclass(frozen=True)
class StoredTensor:
    """A stored tensor's description, without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Stored:
    """A complete checkpoint: what its JSON files say.

    values  the caller's, as they came back from JSON
    files   size and checksum of each file that holds no tensors; none in format 1
    """

    path: Path
    step: int
    world_size: int
    mesh: dict[str, int]
    values: dict[str, Any]
    files: dict[str, dict[str, Any]]
    metadata: Metadata

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        return {
            name: StoredTensor(tuple(t.size), t.properties.dtype) for name, t in _tensor_metadata(self.metadata).items()
        }

    def plan(self, shards: dict[str, Shard]) -> LoadPlanner:
        """Plan how to fill `shards`, every name of which is stored.

        Raises UserError when a shape or a kind of dtype differs, or a file that is needed is missing or truncated.
        """
        for name, shard in shards.items():
            self._check_tensor(name, shard)
        planner = LoadPlanner(shards, self.metadata)
        with _refusing(self.path):
            self._check_sizes({self.chunks[item.storage_index].file for item in planner.plan.items})
            self._check_filled(planner)
        return planner

    def read(self, planner: LoadPlanner) -> None:
        """Carry out a plan: read into the shards in place, cast to their dtype.  Raises UserError for damage."""
        items = sorted(planner.plan.items, key=lambda item: self._place(self.chunks[item.storage_index]))
        with _refusing(self.path), open_chunks(self.path) as reader:
            for item in items:
                stored = _read_chunk(reader, self.chunks[item.storage_index])
                target = planner.resolve_tensor(item).detach()
                part = narrowed(stored, item.storage_offsets, item.lengths)
                if target.shape != part.shape:
                    raise Damaged(f"its {TENSORS} and {self.chunks[item.storage_index].file} differ in shapes")
                target.copy_(part)
            for name in self._without_elements.keys() & planner.state_dict.keys():
                for chunk in self._without_elements[name]:  # of which nothing is read
                    reader.check(chunk)

    def rank_values(self, rank: int) -> dict[str, Tensor | bytes]:
        """Read what `rank` saved for itself."""
        path = self.path / rank_file(rank)
        with _refusing(self.path):
            if path.name in self.files:
                check_stamp(path, self.files[path.name])
            try:
                with safe_open(path, framework="pt") as file:
                    as_bytes = set(json.loads((file.metadata() or {})["bytes"]))
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
                raise Damaged(f"{path.name} cannot be read ({_one_line(error)})") from None
        return {name: t.numpy().tobytes() if name in as_bytes else t for name, t in tensors.items()}

    def check_files(self, part: int = 0, of: int = 1) -> None:
        """Compare the files that hold no tensors with their checksums: of `of` equal parts, one.  Raises UserError."""
        with _refusing(self.path):
            self._check_stamps(sorted(self.files)[part::of])

    def check_all(self) -> None:
        """Compare every byte of the checkpoint with its checksum.  Raises Damaged."""
        self._check_stamps(self.files)
        self._check_sizes({chunk.file for chunk in self.chunks.values()})
        with open_chunks(self.path) as reader:
            for chunk in sorted(self.chunks.values(), key=self._place):
                reader.check(chunk)

    @property
    def chunks(self) -> Mapping[MetadataIndex, Chunk]:
        return self.metadata.storage_data

    @cached_property
    def _ends(self) -> dict[str, int]:
        """file -> the bytes that its chunks reach to. Looked for once: tensors may be read one by one."""
        ends: dict[str, int] = {}
        for chunk in self.chunks.values():
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.first_byte + chunk.num_bytes)
        return ends

    @cached_property
    def _without_elements(self) -> dict[str, list[Chunk]]:
        """The tensors that have none, and their chunks."""
        found: dict[str, list[Chunk]] = {name: [] for name, t in self.tensors.items() if not math.prod(t.shape)}
        for index, chunk in self.chunks.items():
            if index.fqn in found:
                found[index.fqn].append(chunk)
        return found

    @staticmethod
    def _place(chunk: Chunk) -> tuple[str, int]:
        return chunk.file, chunk.first_byte

    def _check_stamps(self, names: Iterable[str]) -> None:
        for name in names:
            check_stamp(self.path / name, self.files[name])

    def _check_tensor(self, name: str, shard: Shard) -> None:
        stored = _tensor_metadata(self.metadata)[name]
        if stored.size != shard.shape:
            raise UserError(
                f"{name} is {tuple(stored.size)} in {self.path} and {tuple(shard.shape)} here; "
                "load it with the configuration of the run that saved it"
            )
        # Floating dtypes are cast: a run may go on, or be evaluated, in another precision than it was trained in, and
        # rounding is what that precision means. Between integers, booleans and floats a cast would change the meaning.
        saved, here = stored.properties.dtype, shard.dtype
        if saved != here and not (saved.is_floating_point and here.is_floating_point):
            raise UserError(
                f"{name} is {saved} in {self.path} and {here} here; only floating dtypes are cast, "
                "load it with the configuration of the run that saved it"
            )

    def _check_sizes(self, names: set[str]) -> None:
        for name in sorted(names):
            path, nbytes = self.path / name, self._ends[name]
            if not path.is_file():
                raise Damaged(f"its file {name} is missing")
            if (size := path.stat().st_size) != nbytes:
                state = "truncated" if size < nbytes else "too long"
                raise Damaged(f"its file {name} is {state} ({size} of {nbytes} bytes)")

    def _check_filled(self, planner: LoadPlanner) -> None:
        filled = dict.fromkeys(planner.state_dict, 0)
        for item in planner.plan.items:
            filled[item.dest_index.fqn] += math.prod(item.lengths)
        for name, shard in planner.state_dict.items():
            if filled[name] != shard.numel():
                raise Damaged(f"its {TENSORS} does not cover the whole of {name}")


def inspect(path: Path) -> Stored:
    """Describe a complete checkpoint without reading its tensors.

    path  a step's folder, or a folder of checkpoints, whose latest is taken.  Raises UserError for anything else.
    """
    path = Path(path)
    steps = complete_steps(path)
    if steps and not (path / COMPLETE).exists():
        path = steps[max(steps)]
    with _refusing(path):
        return _inspect(path)


def _inspect(path: Path) -> Stored:
    """The contents of the JSON files of a step's folder.  Raises Damaged."""
    if not path.is_dir():
        raise Damaged("there is no such folder")
    if not (path / COMPLETE).is_file():
        raise Damaged(f"this is not a complete Megalith checkpoint (it has no {COMPLETE})")
    record = _read_record(path / COMPLETE)
    try:
        files = dict(record["files"]) if record["format"] == FORMAT else {}
        if files:
            check_stamp(path / TENSORS, files[TENSORS])
        metadata = _parse_tensors(_read_json(path / TENSORS))
        return Stored(
            path,
            int(record["step"]),
            int(record["world_size"]),
            dict(record["mesh"]),
            dict(record["values"]),
            files,
            metadata,
        )
    except Damaged:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"its JSON files are damaged ({_one_line(error)})") from None


def _read_record(path: Path) -> dict[str, Any]:
    """complete.json, of a format that this version reads."""
    record = _read_json(path)
    found = record.get("format")
    # A damaged digit must not make of a checkpoint with checksums one without.
    if found == _WITHOUT_CHECKSUMS and not {"files", "crc32"} & record.keys():
        return record
    try:
        signed = unsigned(path.read_bytes())
    except Damaged as error:
        if found not in (_WITHOUT_CHECKSUMS, FORMAT):
            raise _unknown(found) from None
        raise Damaged(f"{path.name} {error}") from None
    if found != FORMAT:
        raise _unknown(found)
    return signed


def _unknown(found: Any) -> Damaged:
    return Damaged(f"its {COMPLETE} says format {found}, and this version reads {_WITHOUT_CHECKSUMS} and {FORMAT}")


def read_full(path: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Whole tensors on the CPU, in one process and without a process group.  names: by default all that are stored."""
    return dict(iterate_full(path, names))


def iterate_full(path: Path, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """The same one tensor at a time, so that no more than one needs to be in memory."""
    stored = inspect(path)
    tell_of_format(stored)
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
                f"{path} {what} {', '.join(names[:3])}{more}; load it with the configuration (and version) of the run "
                "that saved it"
            )


def tell_of_format(stored: Stored) -> None:
    """A line on stderr where a checkpoint has no checksums."""
    if not stored.files:
        print(
            f"note: {stored.path} was saved without checksums (format {_WITHOUT_CHECKSUMS}), so damage in it is not "
            "seen; what is saved from now on has them",
            file=sys.stderr,
        )


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except Damaged as error:
        raise refusal(path, str(error)) from None


def refusal(path: Path, why: str) -> UserError:
    """One line: which checkpoint, what is wrong with it, and the nearest one that can be used instead.

    The others are read for that, the nearest first, until one is whole.
    """
    match = _STEP.fullmatch(path.name)
    step = int(match[1]) if match else None
    others = [(other, folder) for other, folder in complete_steps(path.parent).items() if folder != path]
    others.sort(key=lambda found: (abs(found[0] - step), found[0]) if step is not None else (-found[0],))
    what = f"cannot load {path if step is None else f'step {step} ({path})'}: {why}"
    for other, folder in others:
        if _is_whole(folder):
            hint = f"the nearest good checkpoint is that of step {other}; resume from it, into another --out: {folder}"
            return UserError(f"{what}; {hint}")
    return UserError(f"{what}; there is no {'good' if others else 'other complete'} checkpoint in {path.parent}")


def _is_whole(path: Path) -> bool:
    try:
        _inspect(path).check_all()
    except (Damaged, OSError):
        return False
    return True


def _read_chunk(reader: ChunkReader, chunk: Chunk) -> Tensor:
    try:
        return reader.read(chunk)
    except Damaged:
        raise
    except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise Damaged(f"its tensors cannot be read: {chunk.file}: {_one_line(error)}") from None


def tensors_json(metadata: Metadata, chunks: Mapping[MetadataIndex, Chunk]) -> dict[str, Any]:
    """The plan and what all ranks wrote, as the content of tensors.json; `_parse_tensors` reads it back."""
    found: dict[str, Any] = {}
    for name, tensor in _tensor_metadata(metadata).items():
        listed = []
        for box in tensor.chunks:
            chunk = chunks[MetadataIndex(name, box.offsets)]
            listed.append(
                {
                    "offsets": list(box.offsets),
                    "sizes": list(box.sizes),
                    "file": chunk.file,
                    "first_byte": chunk.first_byte,
                    "bytes": chunk.num_bytes,
                    "crc32": chunk.crc32,
                }
            )
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        found[name] = {"dtype": dtype, "shape": list(tensor.size), "chunks": listed}
    return found


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
            place = Chunk(chunk["file"], int(chunk["first_byte"]), int(chunk["bytes"]), chunk.get("crc32"))
            metadata.storage_data[MetadataIndex(name, chunks[-1].offsets)] = place
        metadata.state_dict_metadata[name] = TensorStorageMetadata(
            TensorProperties(dtype=dtype), torch.Size(tensor["shape"]), chunks
        )
    return metadata


def _tensor_metadata(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    return metadata.state_dict_metadata  # pyright: ignore[reportReturnType]  # a Shard is always a tensor, never bytes


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def shard_file(rank: int) -> str:
    return f"__{rank}_0.distcp"


def encode_rank_values(values: dict[str, Tensor | bytes]) -> bytes:
    """A safetensors file; bytes go in as uint8 tensors, and the header says which they are."""
    as_bytes = [name for name, value in values.items() if isinstance(value, bytes)]
    tensors = {
        name: torch.from_numpy(np.frombuffer(v, np.uint8).copy()) if isinstance(v, bytes) else v.cpu().contiguous()
        for name, v in values.items()
    }
    return to_safetensors(tensors, metadata={"bytes": json.dumps(as_bytes)})


def decode_rank_values(raw: bytes) -> dict[str, Tensor | bytes]:
    """What `encode_rank_values` was given, of bytes that are known to be whole."""
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    as_bytes = json.loads(header["__metadata__"]["bytes"])
    return {name: t.numpy().tobytes() if name in as_bytes else t for name, t in from_safetensors(raw).items()}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Damaged(f"its {path.name} cannot be read ({_one_line(error)})") from None
    if not isinstance(content, dict):
        raise Damaged(f"its {path.name} is not a JSON object")
    return content


def _one_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
