"""The steps of a run that are durable on the disk of every rank: what a training loop asks of Gemini's disk."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from core.gemini.disk import Disk


class DurableSteps:
    """See `core.parallel.parallel_model.KeepsSteps`.  All but `folder` and `every` are collectives.

    at_once  a step is durable when `commit` returns: with several ranks, where updates begin beside the backward, in
             which they may not wait for one another
    """

    def __init__(self, disk: Disk, folder: Path, every: int, at_once: bool = False):
        self.disk, self.folder, self.every, self.at_once = disk, folder, every, at_once
        disk.ranks = dist.get_world_size()
        if disk.ranks > 1:
            disk.agree = dist.barrier

    def latest(self) -> tuple[int, str] | None:
        """The last step that all ranks have, and the run that it is of."""
        of_ranks = self._of_ranks()
        common = set.intersection(*map(set, of_ranks))
        return (max(common), of_ranks[0][max(common)][0]) if common else None

    def of_other_ranks(self) -> tuple[int, str, int] | None:
        """The last step that some rank has of another number of ranks, its run, and that number."""
        every = ((step, run, ranks) for found in self._of_ranks() for step, (run, ranks) in found.items())
        return max(((s, run, n) for s, run, n in every if n not in (None, self.disk.ranks)), default=None)

    def _of_ranks(self) -> list[dict[int, tuple[str, int | None]]]:
        """Of each rank the steps that it has: their run, and the number of its ranks."""
        own = {step: (found.run, found.ranks) for step, found in self.disk.folders.generations.items()}
        of_ranks: list[dict[int, tuple[str, int | None]]] = [{}] * self.disk.ranks
        dist.all_gather_object(of_ranks, own)
        return of_ranks

    def commit(self, step: int, run: str, values: Mapping[str, Any], blob: bytes) -> None:
        self.disk.commit(step, run, values, blob)
        if self.at_once:
            self.disk.confirm()

    def confirm(self) -> None:
        self.disk.confirm()

    def restore(self, step: int) -> tuple[dict[str, Any], bytes]:
        """Within `loading`."""
        generation = self.disk.folders.generations[step]
        self.disk.restore(generation)
        return generation.values, generation.blob

    @contextmanager
    def loading(self) -> Iterator[None]:
        with self.disk.loading():
            yield
        self.disk.forget()
