"""The costs of a training run: time, throughput, memory and communication."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.comm.volume import Volume, count_volume
from core.metrics import mfu, peak_flops
from core.parallel.parallel_model import ParallelModel
from core.precision import compute_dtype
from core.runtime import Runtime
from core.trace.account import MemoryAccount, peak_bytes, resident_peak_bytes
from core.train.config import TrainConfig
from core.train.state import TrainState


class Meter:
    """Time, throughput, memory and communication of the steps of one call of `fit`.

    Memory on a CPU is accounted tensor by tensor, and collectives are counted, during the second step alone: by then
    the optimizer's state exists, and what counting costs does not touch the other steps. Where gradients are compressed
    from a later step on, it is the second of those, if the run has it.
    """

    COUNTED = 2

    def __init__(self, parallel: ParallelModel, config: TrainConfig, runtime: Runtime, flops_per_token: float | None):
        self.parallel, self.runtime, self.flops_per_token = parallel, runtime, flops_per_token
        self.num_devices = parallel.whole_mesh.size()
        self.account: MemoryAccount | None = None
        self.volume: Volume | None = None
        self.dispatch = not config.compile  # a dispatch mode would send compiled blocks back to eager
        measured = flops_per_token and runtime.leads  # the others' rows are not written
        self.peak = peak_flops(runtime.device, compute_dtype(config.precision)) if measured else None
        compression = parallel.compression
        whole = 0 if compression is None else max(0, compression.start - compression.steps)
        self.counted = self.COUNTED + (whole if self.COUNTED + whole <= config.steps else 0)
        self.times: list[tuple[float, int]] = []
        self.begin = self.step_begin = time.perf_counter()

    @contextmanager
    def step(self, state: TrainState) -> Iterator[None]:
        self.step_begin = time.perf_counter()
        with ExitStack() as stack:
            if self.dispatch and len(self.times) == self.counted - 1:
                self.volume = stack.enter_context(count_volume(self.parallel.whole_mesh))
                if self.runtime.device.type == "cpu" and self.parallel.device_peak_bytes is None:
                    self.account = stack.enter_context(MemoryAccount())
                    self.account.add(self.parallel.model.parameters())
                    self.account.add(self.parallel.masters.values())
                    if self.parallel.unsent is not None:
                        self.account.add(self.parallel.unsent.held())
                    held = [
                        v for s in list(state.optimizer.state.values()) for v in s.values() if isinstance(v, Tensor)
                    ]
                    held += [] if self.parallel.local is None else self.parallel.local.tensors
                    self.account.add(held + list(state.average.tensors.values() if state.average else ()))
            yield

    def row(self, tokens: int) -> dict[str, float]:
        """Figures of the step that has just ended."""
        elapsed = time.perf_counter() - self.step_begin
        self.times.append((elapsed, tokens))
        row: dict[str, float] = {"tokens_per_s": tokens / elapsed, "step_s": elapsed}
        if self.flops_per_token:
            row |= {"mfu": share} if (share := self._mfu(tokens / elapsed)) is not None else {}
        if self.account is not None or self.parallel.device_peak_bytes or self.runtime.device.type == "cuda":
            row["memory_bytes"] = self._memory()
        return row

    def _mfu(self, tokens_per_s: float) -> float | None:
        return mfu(tokens_per_s, self.flops_per_token or 0.0, self.peak, self.num_devices)

    def _memory(self) -> int:
        return self.parallel.device_peak_bytes or peak_bytes(self.runtime.device, self.account)

    def summary(self, step: int, num_steps: int, state: TrainState) -> dict[str, Any]:
        """The run's summary; peaks are those of the rank that needed most."""
        counted = self.times[self.COUNTED :] or self.times
        tokens_per_s = sum(t for _, t in counted) / sum(s for s, _ in counted) if counted else None
        peaks = torch.tensor([self._memory(), resident_peak_bytes()], dtype=torch.int64, device=self.runtime.device)
        if self.num_devices > 1:
            dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
        device_peak, resident_peak = peaks.tolist()
        return {
            "step": step,
            "status": "complete" if step == num_steps else "stopped",
            "loss": state.loss,
            "tokens_per_s": tokens_per_s,
            "mfu": None if tokens_per_s is None or not self.flops_per_token else self._mfu(tokens_per_s),
            "peak_flops_per_device": self.peak,
            "device_peak_bytes": device_peak,
            "resident_peak_bytes": resident_peak,
            "communication_bytes_per_step": self.volume and self.volume.total_bytes,
            "communication_bytes_by_axis": self.volume and self.volume.by_axis,
            "skipped_steps": state.loss_scale.skipped_steps,
            "num_ranks": self.num_devices,
            "device": self.runtime.device.type,
            "wall_s": time.perf_counter() - self.begin,
            **self.parallel.figures(),
        }
