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
        if dist.get_world_size() > 1:
            disk.agree = dist.barrier

    def latest(self) -> tuple[int, str] | None:
        """The last step that all ranks have, and the run that it is of."""
        own = {step: found.run for step, found in self.disk.folders.generations.items()}
        of_ranks: list[dict[int, str]] = [{}] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
        common = set.intersection(*map(set, of_ranks))
        return (max(common), of_ranks[0][max(common)]) if common else None

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
