"""The account of the device: how many bytes of model data are there, beside what else is there, under one budget.

On CUDA the bytes lie in the GPU's memory. On a CPU they lie in the same memory as everything, and the device is what
this account says: the same code runs, what is not on the device has no memory at all there, and the budget binds.
"""

from core.config import UserError, in_words, size_in_bytes


def parse_bytes(text: str | int, option: str = "gemini.budget") -> int:
    """ "10GiB", "800 MB", "4096" or a number as bytes.  Raises UserError for what is no positive size."""
    return size_in_bytes(text, option)


class OverBudget(RuntimeError):
    """An error: more was put on the device than its budget allows, a fault of whoever decides what goes there."""


class DeviceTier:
    """Bytes on one rank's device, and what went to and fro.

    budget_bytes   what may be there at once
    current_bytes  of model data
    other_bytes    of everything else: activations, temporaries, as the trace of a step has them at this moment
    peak_bytes     the most of both together
    fetched_bytes  that came from the host; `returned_bytes` went there
    """

    def __init__(self, budget_bytes: int):
        self.budget_bytes = budget_bytes
        self.current_bytes = self.other_bytes = self.peak_bytes = 0
        self.fetched_bytes = self.returned_bytes = 0
        self.num_evictions = 0

    @property
    def room_bytes(self) -> int:
        """Bytes that may still come."""
        return self.budget_bytes - self.current_bytes - self.other_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes between host and device, in both directions."""
        return self.fetched_bytes + self.returned_bytes

    def take(self, num_bytes: int, what: str) -> None:
        """Book bytes that come onto the device.  Raises OverBudget where there is no room for them."""
        if num_bytes > self.room_bytes:
            raise OverBudget(
                f"{what} of {num_bytes} bytes on a device with {self.current_bytes} of model data and "
                f"{self.other_bytes} of others, of {self.budget_bytes}"
            )
        self.current_bytes += num_bytes
        self._note_peak()

    def give(self, num_bytes: int) -> None:
        """Book bytes that leave."""
        self.current_bytes -= num_bytes
        assert self.current_bytes >= 0

    def set_other(self, num_bytes: int) -> None:
        """Set the bytes that are there beside model data from now on; room for them must have been made."""
        if num_bytes + self.current_bytes > self.budget_bytes:
            raise OverBudget(
                f"{num_bytes} bytes of activations beside {self.current_bytes} of model data, of {self.budget_bytes}"
            )
        self.other_bytes = num_bytes
        self._note_peak()

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.current_bytes + self.other_bytes)


class HostTier:
    """Bytes of model data on one rank's host: shards of what does not live on the device.

    budget_bytes  what may be there at once; None: no limit
    peak_bytes    the most that was there at the end of a step, when it has all that it will have
    """

    def __init__(self, budget_bytes: int | None):
        self.budget_bytes, self.peak_bytes = budget_bytes, 0

    def require(self, least_bytes: int) -> None:
        """Raises UserError where so much will be there and may not."""
        if self.budget_bytes is not None and least_bytes > self.budget_bytes:
            raise UserError(
                f"gemini.host={self.budget_bytes}: {in_words(least_bytes)} of model data are to live on the host; give "
                f"at least {least_bytes} bytes"
            )

    def note(self, num_bytes: int) -> None:
        """Note what is there.  Raises OverBudget where that is more than may be."""
        self.peak_bytes = max(self.peak_bytes, num_bytes)
        if self.budget_bytes is not None and num_bytes > self.budget_bytes:
            raise OverBudget(f"{num_bytes} bytes of model data on a host that has {self.budget_bytes} for them")
