"""Save and load sharded checkpoints: atomic, asynchronous, the last n kept.

A save, on every rank of the group:

1. Wait for the save before it; what went wrong there is raised here.
2. Plan: the coordinator gathers which boxes each rank holds, leaves each box to one of its holders, clears what crashed
   saves left behind, and makes `step-….tmp-…`.
3. Stage: each rank copies what it is to write into CPU buffers. `save` returns, and training goes on.
4. Write, in a thread: each rank its file of tensors and its file of rank values, both on the disk before it reports.
5. Complete: when all ranks have reported, the coordinator writes tensors.json and complete.json, renames the folder to
   `step-…`, and only then removes the oldest. A kill at any moment leaves the previous complete checkpoint as it was.

Phases 2 and 5 exchange objects over a gloo group that only checkpoints use, and one thread at a time (phase 1, which
waits for the saves of other Checkpointers on that group, too): these collectives cannot interleave with each
other, nor with those of training.

A load asks nothing of the mesh that saved: each rank reads, of every stored chunk, what overlaps with its own boxes.

This does not copy to remote storage, and does not hold a checkpoint in the memory of a peer.
"""

import json
import re
import shutil
import uuid
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh

from core.checkpoint.shards import LoadPlanner, SavePlanner, Shard, Staging
from core.checkpoint.stored import (
    COMPLETE,
    FORMAT,
    METADATA,
    TENSORS,
    Stored,
    complete_steps,
    encode_rank_values,
    inspect,
    rank_file,
    require_names,
    shard_file,
    tell_of_format,
    tensors_json,
)
from core.checkpoint.tensor_file import Chunk, write_chunks
from core.compat import checkpoint_ranks, storage_info
from core.config import UserError
from core.files import crc32, naming, signed, stamp, sync_folder, write_file
from core.mesh import checkpoint_group

if TYPE_CHECKING:
    from core.compat import CheckpointRanks

_LATEST: dict[str, Future] = {}
"""group's name -> the save that was begun last in a thread over it"""
_LEFTOVER = re.compile(r"step-\d{8,}\.tmp-[0-9a-f]+")


@dataclass(frozen=True)
class CheckpointConfig:
    """The options of saving: when, and how much to keep."""

    every: int = 500
    """steps between two checkpoints; 0 saves only at the end"""
    keep: int = 3
    """complete checkpoints that are kept"""
    asynchronous: bool = True
    """write in a thread while training goes on; costs CPU memory for what a rank writes"""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise UserError(f"every={self.every}; give a number of steps, or 0 to save only at the end")
        if self.keep < 1:
            raise UserError(f"keep={self.keep}; at least 1 checkpoint is kept, use --checkpoint.keep 1")


@dataclass
class _Save:
    """A save on its way from the plan to the disk, on one rank."""

    step: int
    folder: Path
    planner: SavePlanner
    plan: SavePlan
    record: dict[str, Any]
    rank_values: bytes


@dataclass(frozen=True)
class _Written:
    """A rank's files on the disk: where its chunks lie, and sizes and checksums of its other files."""

    chunks: dict[MetadataIndex, Chunk]
    files: dict[str, dict[str, Any]]


class _Load:
    """A load on one rank: `check` first, which touches no tensor, then `read`."""

    stored: Stored
    planner: LoadPlanner
    rank_values: dict[str, Tensor | bytes] | None = None

    def __init__(self, path: Path, shards: dict[str, Shard], under: str, leaves: tuple[str, ...]) -> None:
        self.path, self.shards, self.under, self.leaves = path, shards, under, leaves

    def check(self, rank: int, num_ranks: int) -> set[str]:
        """Open, compare this rank's share of the files, and plan what it reads.  Returns the names that it asks for."""
        self.stored = inspect(self.path)
        self.stored.check_files(rank, num_ranks)
        require_names(self.path, missing=self.shards.keys() - self.stored.tensors.keys())
        self.planner = self.stored.plan(self.shards)
        return set(self.shards)

    def check_all(self, names: list[set[str]]) -> None:
        """On the coordinator: every stored name is asked for by some rank (pipeline stages hold different names)."""
        tell_of_format(self.stored)
        names_under = (name for name in self.stored.tensors if name.startswith(self.under))
        stored = {name for name in names_under if not name.startswith(self.leaves)}
        require_names(self.path, unexpected=stored.difference(*names))

    def read(self, ranks: "CheckpointRanks", mesh: dict[str, int]) -> None:
        self.stored.read(self.planner)
        # On another mesh of as many ranks, too, rank 1 has another part: two ranks that must draw alike would not.
        if (self.stored.world_size, self.stored.mesh) == (ranks.get_world_size(), mesh):
            self.rank_values = self.stored.rank_values(ranks.get_rank())


class Checkpointer:
    """Checkpoints of one run, in one folder.  Constructing it, `save`, `load`, `wait` and `close` are collectives.

    folder  holds `step-00000100/` …; made by the first save
    mesh    noted in each checkpoint; rank values are only given back to the same mesh
    group   a gloo group for checkpoints alone; by default the mesh's, without a mesh a new one of all ranks, or none
            where there is no process group
    """

    def __init__(
        self, folder: Path, config: CheckpointConfig, mesh: DeviceMesh | None = None, group: ProcessGroup | None = None
    ) -> None:
        self.folder, self.config = Path(folder), config
        self._mesh: dict[str, int] = (
            {} if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        )
        group = checkpoint_group(mesh) if group is None else group
        self._owns_group = group is None and dist.is_initialized()
        if self._owns_group:
            group = cast(ProcessGroup, dist.new_group(backend="gloo"))
        self._group = group
        self._ranks = checkpoint_ranks(self._group)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._staging = Staging()
        self._running: Future | None = None

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return list(complete_steps(self.folder))

    def latest(self) -> int | None:
        """The latest complete step; None where there is none."""
        return max(self.steps(), default=None)

    def save(
        self,
        step: int,
        tensors: dict[str, Tensor],
        values: dict[str, Any],
        rank_values: dict[str, Tensor | bytes],
    ) -> None:
        """Save this rank's part of a checkpoint; a complete one of the same step is replaced.

        tensors      name -> local tensor (plain, DTensor, or tagged with its layout); names may differ between ranks
        values       JSON-able, the same on every rank (the coordinator's are kept)
        rank_values  what belongs to this rank alone

        All arguments may change as soon as this returns. Raises UserError when the disk is full or the folder refuses,
        and whatever went wrong in the save before.
        """
        self._wait_for_all()
        record = {
            "format": FORMAT,
            "step": step,
            "world_size": self._ranks.get_world_size(),
            "mesh": self._mesh,
            "values": values,
        }
        record, texts = json.loads(json.dumps(record)), encode_rank_values(rank_values)  # both may change from now on
        shards = {name: Shard(tensor) for name, tensor in tensors.items()}
        planner = SavePlanner(shards)
        with _one_error(f"cannot save step {step} in {self.folder}"):
            folder, plan = self._ranks.reduce_scatter(
                "plan", planner.create_local_plan, lambda plans: self._plan_all(step, planner, plans)
            )
        save = _Save(step, folder, planner, plan, record, texts)
        if self.config.asynchronous:
            self._staging.copy((item.index, shards[item.index.fqn]) for item in plan.items)
            self._running = self._thread.submit(self._write, save)
            if self._group is not None:
                _LATEST[self._group.group_name] = self._running
        else:
            self._write(save)

    def load(
        self, at: int | Path | None, tensors: dict[str, Tensor], under: str = "", leaves: tuple[str, ...] = ()
    ) -> tuple[int, dict[str, Any], dict[str, Tensor | bytes] | None]:
        """Load a checkpoint into `tensors`, in place, whatever mesh wrote it.

        at      a step of this folder, the path of any checkpoint, or None for the latest of this folder
        under   compare and load only names that start so ("model/"); by default all
        leaves  beginnings of names that the checkpoint may have and `tensors` of all ranks lack

        Floating dtypes are cast to those of `tensors`.

        Returns (step, values, rank values; None unless the world size and the mesh are those of the save).
        Raises UserError, the same on every rank, for a checkpoint that is missing, incomplete, damaged, foreign, or has
        other names, shapes or kinds of dtype.
        """
        self._wait_for_all()
        with _one_error(f"cannot load from {self.folder}"):
            path = self._ranks.broadcast("find", lambda: self._find(at))
            load = _Load(path, {name: Shard(tensor) for name, tensor in tensors.items()}, under, leaves)
            rank, num_ranks = self._ranks.get_rank(), self._ranks.get_world_size()
            self._ranks.all_reduce("check", lambda: load.check(rank, num_ranks), load.check_all)
            self._ranks.all_reduce("read", lambda: load.read(self._ranks, self._mesh), lambda _: None)
        return load.stored.step, load.stored.values, load.rank_values

    def values(self, at: int | Path | None) -> dict[str, Any]:
        """The values of a checkpoint that `load` would load, on every rank, without its tensors; raises as it does."""
        self._wait_for_all()
        with _one_error(f"cannot load from {self.folder}"):
            return self._ranks.broadcast("values", lambda: inspect(self._find(at)).values)

    def wait(self) -> None:
        """Return when no save is in flight; raises what went wrong in it."""
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def _wait_for_all(self) -> None:
        """`wait`, and return when no other Checkpointer's save uses the group, either; its errors are its own."""
        self.wait()
        if self._group is not None and (latest := _LATEST.get(self._group.group_name)) is not None:
            futures.wait([latest])

    def close(self) -> None:
        """Wait, and give back the thread and the group."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._owns_group and dist.is_initialized():
                _LATEST.pop(cast(ProcessGroup, self._group).group_name, None)
                dist.destroy_process_group(self._group)

    def _find(self, at: int | Path | None) -> Path:
        if isinstance(at, Path):
            return at
        complete = complete_steps(self.folder)
        step = max(complete, default=None) if at is None else at
        if step not in complete:
            what = "no complete checkpoint" if at is None else f"no complete checkpoint of step {at}"
            there = (
                f"there are those of steps {', '.join(map(str, complete))}" if complete else "start from the beginning"
            )
            raise UserError(f"{what} in {self.folder}; {there}")
        return complete[step]

    def _plan_all(self, step: int, planner: SavePlanner, plans: list[SavePlan]) -> list[tuple[Path, SavePlan]]:
        """On the coordinator: a fresh folder, and for each rank what it writes into it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path)
        folder = self.folder / f"step-{step:08d}.tmp-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        global_plans, _ = planner.create_global_plan(plans)
        return [(folder, plan) for plan in global_plans]

    def _write(self, save: _Save) -> None:
        with _one_error(f"cannot save step {save.step} in {self.folder}"):
            self._ranks.all_reduce(
                "write", lambda: self._write_mine(save), lambda results: self._complete(save, results)
            )

    def _write_mine(self, save: _Save) -> _Written:
        """This rank's files, on the disk when this returns."""
        rank, content = self._ranks.get_rank(), save.rank_values
        write_file(save.folder / rank_file(rank), content)
        files = {rank_file(rank): {"bytes": len(content), "crc32": crc32(content)}}
        # What is staged lies on the CPU, so that no CUDA stream is touched from a thread.
        tensors = ((item.index, save.planner.lookup_object(item.index)) for item in save.plan.items)
        chunks = write_chunks(save.folder / shard_file(rank), tensors) if save.plan.items else {}
        return _Written(chunks, files)

    def _complete(self, save: _Save, written: list[_Written]) -> None:
        """On the coordinator, when every rank has written: note it, give the folder its name, remove the oldest."""
        metadata, chunks = save.planner.metadata, {i: c for one in written for i, c in one.chunks.items()}
        files = {name: noted for one in written for name, noted in one.files.items()}
        write_file(save.folder / TENSORS, json.dumps(tensors_json(metadata, chunks)).encode())
        _write_metadata(save.folder, metadata, chunks)
        files |= {name: stamp(save.folder / name) for name in (TENSORS, METADATA)}
        write_file(save.folder / COMPLETE, signed(save.record | {"files": files}))
        sync_folder(save.folder)
        final = self.folder / f"step-{save.step:08d}"
        if final.exists():
            final.rename(f"{final}.replaced-{uuid.uuid4().hex[:8]}")
        save.folder.rename(final)
        sync_folder(self.folder)
        self._remove_old(save.step)

    def _remove_old(self, saved: int) -> None:
        """Keep what was just saved and the latest of the others, `keep` in all.

        Renamed before it is removed, so that what a crash leaves half removed does not look complete.
        """
        complete = complete_steps(self.folder)
        others = [step for step in complete if step != saved]
        kept = {complete[step] for step in (saved, *others[max(0, len(others) - self.config.keep + 1) :])}
        replaced = set(self.folder.glob("step-*.replaced-*"))
        for path in (replaced | set(complete.values())) - kept:
            leftover = path.rename(self.folder / f"{path.name.split('.')[0]}.tmp-{uuid.uuid4().hex[:8]}")
            shutil.rmtree(leftover, ignore_errors=True)  # what cannot be removed now is a leftover for the next save


def _write_metadata(folder: Path, metadata: Metadata, chunks: dict[MetadataIndex, Chunk]) -> None:
    """torch's own index of the folder, for its tools."""
    results = [
        WriteResult(index, chunk.num_bytes, storage_info(chunk.file, chunk.first_byte, chunk.num_bytes))
        for index, chunk in chunks.items()
    ]
    with naming(folder / METADATA):
        FileSystemWriter(folder, sync_files=True).finish(metadata, [results])


@contextmanager
def _one_error(what: str) -> Iterator[None]:
    """Raise on every rank what went wrong on the first that failed."""
    try:
        yield
    except CheckpointException as failures:
        rank, (cause, _) = min(failures.failures.items())
        if isinstance(cause, UserError):
            raise UserError(str(cause)) from None
        if isinstance(cause, OSError):
            raise UserError(
                f"{what}: {cause} (rank {rank}); free space, or choose a folder that can be written"
            ) from None
        raise RuntimeError(f"{what}: rank {rank} failed\n{failures}") from None
