"""Gemini's options."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from core.config import UserError
from core.gemini.order import Order
from core.gemini.residency import Policy
from core.gemini.tier import parse_bytes


@dataclass(frozen=True)
class GeminiConfig:
    RENAMED: ClassVar[Mapping[str, str]] = {"trace": "figure"}

    SAYS_OF_MOVES: ClassVar[tuple[str, ...]] = ("figure", "host", "disk", "policy", "order")
    """Options that are refused without a budget."""

    budget: str | None = None
    """device memory of a rank, such as 10GiB: model data that does not fit in it lives on the host; None: no Gemini"""

    policy: Policy = "auto"
    """auto: whatever makes the step shortest; static: what is not resident leaves after each use; cpu: nothing stays"""

    order: Order = "auto"
    """a step's microbatches one after the other (horizontal), or all through each block, which fetches it once for all
    of them and keeps what they hand on (vertical); auto: the shorter step, where results are the same bit for bit"""

    figure: Path | None = None
    """draw memory over a step here, device and host, as a PNG: as planned, and as the first two steps had it"""

    host: str | None = None
    """host memory of a rank for what lives there, such as 16GiB; refused where that is more. None: no limit"""

    disk: Path | None = None
    """folder on a drive for what the host does not hold, or several with commas between, each on a drive of its own:
    A,B; every step is then a checkpoint there"""

    durable_every: int = 1
    """with a disk: steps from one that is durable to the next; a run that is killed loses at most so many"""

    def __post_init__(self) -> None:
        if self.budget is not None:
            parse_bytes(self.budget)
        elif given := self._given_in_vain():
            raise UserError(f"{given} without a budget: nothing moves; give --gemini.budget, such as 10GiB")
        if self.host is not None:
            parse_bytes(self.host, "gemini.host")
        if self.disk is not None and (not all(str(self.disk).split(",")) or len(set(self.folders)) < len(self.folders)):
            raise UserError(f"gemini.disk={self.disk}: give each folder once, with commas between: A,B")
        if self.durable_every < 1:
            raise UserError(f"gemini.durable_every={self.durable_every}; give a number of steps, at least 1")
        if self.figure is not None and self.figure.suffix != ".png":
            raise UserError(f"gemini.figure={self.figure}: the figure is a PNG; give a name that ends in .png")

    @property
    def host_bytes(self) -> int | None:
        """The host's budget."""
        return None if self.host is None else parse_bytes(self.host, "gemini.host")

    @property
    def folders(self) -> tuple[Path, ...]:
        """Those of `disk`."""
        return () if self.disk is None else tuple(Path(name) for name in str(self.disk).split(","))

    def _given_in_vain(self) -> str | None:
        """An option that says something of moves, with its value."""
        given = {name: getattr(self, name) for name in self.SAYS_OF_MOVES}
        return next((f"gemini.{name}={value}" for name, value in given.items() if value not in (None, "auto")), None)
