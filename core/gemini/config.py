"""What a user says of Gemini."""

from dataclasses import dataclass

from core.gemini.residency import Policy
from core.gemini.tier import parse_bytes


@dataclass(frozen=True)
class GeminiConfig:
    budget: str | None = None
    """device memory of a rank, such as 10GiB: model data that does not fit in it lives on the host; None: no Gemini"""

    policy: Policy = "auto"
    """auto: whatever makes the step shortest; static: what is not resident leaves after each use; cpu: nothing stays"""

    def __post_init__(self) -> None:
        if self.budget is not None:
            parse_bytes(self.budget)
