"""A plan held against one rank that runs it: bytes of each kind, and of each collective over each axis, to the byte.

Two independent ways lead to the same numbers. The plan has closed forms (`core.estimate.memory`,
`core.estimate.messages`). The check runs the step's own code as one rank of a process group of which no other exists,
on tensors without memory (`core.estimate.step`), and counts what is allocated and sent.

What lies on a rank for good and what it sends must be equal. The fullest moment depends on when operators free what
they were given, which closed forms round: it may differ by `PEAK_WITHIN`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from core.estimate.memory import MemoryEstimate
from core.estimate.messages import joined_name, step_bytes
from core.estimate.shape import RunShape
from core.estimate.step import StepEstimate
from core.mesh import mesh_shape
from core.models.decoder import DecoderConfig
from core.placement.messages import Sent

PEAK_WITHIN = 0.05
"""Of the counted peak, how far the plan's may be off."""


@dataclass(frozen=True)
class Line:
    """Bytes of one kind, or of one operation over one axis: by the plan, and as one rank has them.

    within  of what is counted, how far the plan may be off
    """

    what: str
    predicted: int
    counted: int
    within: float = 0.0

    @property
    def difference(self) -> int:
        return self.counted - self.predicted

    @property
    def agrees(self) -> bool:
        return abs(self.difference) <= self.within * self.counted


def lines_of(
    model: DecoderConfig, run: RunShape, place: int, memory: MemoryEstimate, counted: StepEstimate
) -> list[Line]:
    """All that a rank is held to.

    place    of the rank in its pipeline
    memory   the plan's, of that rank
    counted  on it
    """
    return [*_memory_lines(memory, counted), *_message_lines(model, run, place, counted)]


def _memory_lines(memory: MemoryEstimate, counted: StepEstimate) -> Iterator[Line]:
    for kind, planned in memory.held.items():
        found = getattr(counted, f"{kind}_bytes") - (counted.counters_bytes if kind == "state" else 0)
        yield Line(kind, planned, found)
    yield Line("fullest moment", memory.peak_bytes, counted.peak_bytes, PEAK_WITHIN)


def _message_lines(model: DecoderConfig, run: RunShape, place: int, counted: StepEstimate) -> Iterator[Line]:
    said, mesh = step_bytes(model, run, place), mesh_shape(run.mesh)
    sent: Sent = Sent()
    for (operation, axis), num_bytes in counted.sent.bytes.items():
        if name := joined_name(mesh, axis):
            sent[operation, name] += num_bytes
    for key in sorted({*said, *sent}):
        yield Line(" over ".join(key), said[key], sent[key])
