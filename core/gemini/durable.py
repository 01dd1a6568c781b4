"""The steps of a run that are durable on the disk of every rank: what a training loop asks of Gemini's disk."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from core.gemini.disk import Disk


class DurableSteps:
    """See `core.parallel.parallel_model.KeepsSteps`.  All but `folder` and `every` are collectives."""

    def __init__(self, disk: Disk, folder: Path, every: int):
        self.disk, self.folder, self.every = disk, folder, every

    def latest(self) -> tuple[int, str] | None:
        """The last step that all ranks have, and the run that it is of."""
        own = {step: found.run for step, found in self.disk.folder.generations.items()}
        of_ranks: list[dict[int, str]] = [{}] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
        common = set.intersection(*map(set, of_ranks))
        return (max(common), of_ranks[0][max(common)]) if common else None

    def commit(self, step: int, run: str, values: Mapping[str, Any], blob: bytes) -> None:
        self.disk.commit(step, run, values, blob)
        if dist.get_world_size() > 1:  # only now may the slots of the step before be written over
            dist.barrier()

    def restore(self, step: int) -> tuple[dict[str, Any], bytes]:
        """Within `loading`."""
        generation = self.disk.folder.generations[step]
        self.disk.restore(generation)
        return generation.values, generation.blob

    @contextmanager
    def loading(self) -> Iterator[None]:
        with self.disk.loading():
            yield
        self.disk.forget()
