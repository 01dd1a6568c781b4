"""Gemini's options."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from core.config import UserError
from core.gemini.residency import Policy
from core.gemini.tier import parse_bytes


@dataclass(frozen=True)
class GeminiConfig:
    RENAMED: ClassVar[Mapping[str, str]] = {"trace": "figure"}

    budget: str | None = None
    """device memory of a rank, such as 10GiB: model data that does not fit in it lives on the host; None: no Gemini"""

    policy: Policy = "auto"
    """auto: whatever makes the step shortest; static: what is not resident leaves after each use; cpu: nothing stays"""

    figure: Path | None = None
    """draw memory over a step here, device and host, as a PNG: as planned, and as the first two steps had it"""

    def __post_init__(self) -> None:
        if self.budget is not None:
            parse_bytes(self.budget)
        elif self.figure is not None or self.policy != "auto":
            given = f"gemini.figure={self.figure}" if self.figure is not None else f"gemini.policy={self.policy}"
            raise UserError(f"{given} without a budget: nothing moves; give --gemini.budget, such as 10GiB")
        if self.figure is not None and self.figure.suffix != ".png":
            raise UserError(f"gemini.figure={self.figure}: the figure is a PNG; give a name that ends in .png")
