"""The options of a plan that describe the machine, which need not be here: one place for every app's `plan`."""

from dataclasses import dataclass

import torch

from core.compose import ParallelConfig
from core.config import UserError, in_words, size_in_bytes
from core.estimate.time import Machine
from core.metrics import peak_flops
from core.metrics.throughput import gpu_peak_flops
from core.precision import compute_dtype
from core.trace.machine import UNKNOWN_FLOPS, Speed


@dataclass(frozen=True)
class PlannedMachine:
    """Mixed into a configuration: the machine that it is planned for."""

    gpu: str | None = None
    """a name such as A100 or H100, for the time of a step; by default this machine's device"""
    memory: str | None = None
    """say whether the run fits a device of that size, such as 24GiB (24 alone is GiB), and what would"""
    bandwidth_gb_s: float = 25.0
    """of the links between ranks, and with --gemini.budget to the host"""
    memory_gb_s: float = 1000.0
    """what the device reads of its memory in a second, where the step is foreseen operator by operator"""
    utilisation: float = 0.4
    """of the device's peak, what is reached"""

    def check_machine(self) -> None:
        """Raises UserError for what no machine has."""
        for name in ("bandwidth_gb_s", "memory_gb_s", "utilisation"):
            value = getattr(self, name)
            if not value > 0:  # nor what is no number
                raise UserError(f"{name}={value}; give a positive number")
        if self.memory is not None:
            size_in_bytes(self.memory, "memory", "GiB")

    def fits(self, needed_bytes: int, advice: str, where: str = "device") -> str | None:
        """Return a line that says so; None without --memory.

        Raises UserError where the run needs more, with the advice.
        """
        if self.memory is None:
            return None
        size = size_in_bytes(self.memory, "memory", "GiB")
        words = in_words(size)
        if needed_bytes > size:
            advice = advice.replace("{memory}", words.replace(" ", ""))
            raise UserError(f"the run needs {in_words(needed_bytes)} per rank, the {where} has {words}; {advice}")
        return f"fits {words}"


@dataclass(frozen=True)
class PlannedRun(PlannedMachine, ParallelConfig):
    """Mixed into a run's configuration: the same run, and the machine that it is planned for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_machine()
        self.check_gpu()

    def check_gpu(self) -> None:
        """Raises UserError for a device of which nobody knows what it computes in the run's format."""
        if self.gpu is not None and self.peak_flops is None:
            raise UserError(f"gpu={self.gpu} has no known {self.precision} peak; give A100, H100, H200, B200, L4, …")

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s of the device that is planned for; None where they are unknown."""
        dtype = compute_dtype(self.precision)
        if self.gpu is None:
            return peak_flops("cuda" if torch.cuda.is_available() else "cpu", dtype)
        return gpu_peak_flops(self.gpu, dtype)

    @property
    def machine(self) -> Machine | None:
        """The machine for closed forms; None where its peak is unknown."""
        peak = self.peak_flops
        return None if peak is None else Machine(peak, self.bandwidth_gb_s * 1e9, self.utilisation)

    @property
    def speed(self) -> Speed:
        """The machine for traces."""
        machine = self.machine
        flops_per_s = UNKNOWN_FLOPS if machine is None else machine.peak_flops * machine.utilisation
        return Speed(flops_per_s, 1e9 * self.memory_gb_s)
