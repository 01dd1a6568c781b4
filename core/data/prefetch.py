"""An iterator over batches with a background thread: the next few are ready while the current one trains."""

from __future__ import annotations

import queue
import threading
from typing import Any

import torch
from torch import Tensor

from core.data.batches import Batches
from core.streams import take_device


class Prefetch:
    """Batches of one rank from `step` on; up to `depth` are made ahead.

    device  where they will be: for a GPU they are in pinned memory, from which it copies by itself

    An exception in `batch` is raised by the `next` that would have returned that batch. Close it (or use `with`) to
    stop the thread. `state()` is the JSON-able position: the step that `next` hands out next.
    """

    def __init__(
        self, batches: Batches, rank: int = 0, num_ranks: int = 1, *, step: int = 0, depth: int = 2,
        device: torch.device | None = None,
    ):  # fmt: skip
        self._batches = batches
        self._rank = rank
        self._num_ranks = num_ranks
        self._step = step
        self._depth = depth
        self._gpu = device if device is not None and device.type == "cuda" else None
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> dict[str, Tensor]:
        if self._thread is None:
            self._start()
        batch, error = self._ready.get()
        if error is not None:
            self.close()
            raise error
        self._step += 1
        return batch

    def state(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue at a saved position, whatever was prefetched."""
        self.close()
        self._step = int(state["step"])

    def close(self) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> None:
        self._ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(self._depth)
        self._stop = threading.Event()
        # A daemon: a program that dies without closing must not hang on its data.
        self._thread = threading.Thread(
            target=self._produce, args=(self._step, self._ready, self._stop), name="prefetch", daemon=True
        )
        self._thread.start()

    def _made(self, step: int) -> dict[str, Tensor]:
        batch = self._batches.batch(step, self._rank, self._num_ranks)
        return batch if self._gpu is None else {name: tensor.pin_memory() for name, tensor in batch.items()}

    def _produce(self, step: int, ready: queue.Queue, stop: threading.Event) -> None:
        if self._gpu is not None:
            take_device(self._gpu)
        while not stop.is_set():
            try:
                made = self._made(step), None
            except BaseException as error:
                made = None, error
            while not stop.is_set():
                try:
                    ready.put(made, timeout=0.05)
                    break
                except queue.Full:
                    continue
            if made[1] is not None:
                return
            step += 1
