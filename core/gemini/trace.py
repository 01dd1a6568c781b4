"""The trace of a training step's memory: the data on which everything about residency is decided.

A step is a list of *moments* in the order in which they run. Each needs some chunks whole on the device, and has
`other_bytes` there that are not model data: activations, what autograd saved, temporaries, inputs. A *chunk* is a group
of parameters that move together. Its memory is:

    param_bytes    the buffer with the parameters as the model computes with them. Once a chunk's gradients come, they
                   take the place of the parameters: there is no second buffer
    master_bytes   the masters from which the buffer is filled, beside it; a chunk that does not learn has none, nor one
                   that is its own master where it is resident
    optim_bytes    the optimizer's state, and under gradient accumulation the reduced gradient

The life of a trainable chunk in a step:

    forward …      its parameters are read
    backward …     they are read again, and gradients are written into their place (`Moment.writes`)
    reduce         all gradients are there; they go to where its optimizer shard is, and nothing reads its parameters
                   in this microbatch any more. Under gradient accumulation the next one goes on at `forward`, with
                   parameters that are fetched anew; where microbatches run by blocks first, at `backward`, with those
                   that stayed (`Moment.keeps`)
    update         the optimizer makes new parameters: there, and nowhere else

A chunk that does not learn, and any chunk in evaluation, is only read. Sharded over ranks, param_bytes are those of the
gathered chunk, which is what the device must hold; master_bytes and optim_bytes are this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MomentKind = Literal["forward", "backward", "reduce", "update"]


@dataclass(frozen=True)
class ChunkInfo:
    """One chunk: `index` is its place in `Trace.chunks`.

    away_bytes  all that it takes of the host where it lives there; by default parameters, and of what learns a gradient
                beside the shard
    grad_bytes  the part of it that a gradient takes
    slot_bytes  all that it takes of the disk where it lives there, once; an update writes it, and reads `read_bytes` of
                it; `own_bytes` fill the buffer
    wait_bytes  of the disk for its gradient, where that waits there for the update; 0: it stays in memory
    """

    index: int
    param_bytes: int
    master_bytes: int
    optim_bytes: int
    trainable: bool
    away_bytes: int | None = None
    grad_bytes: int = 0
    slot_bytes: int = 0
    own_bytes: int = 0
    read_bytes: int = 0
    wait_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        """Bytes that the chunk takes on the host where it lives there."""
        if self.away_bytes is not None:
            return self.away_bytes
        return self.param_bytes * (2 if self.trainable else 1) + self.shard_bytes

    @property
    def shard_bytes(self) -> int:
        """Bytes that the optimizer keeps of the chunk."""
        return self.master_bytes + self.optim_bytes


@dataclass(frozen=True)
class Moment:
    """A stretch of the step in which the needed chunks do not change.

    kind         "forward", "backward" (recomputed forwards are part of it), "reduce" or "update", see the module
    name         the module's or the chunk's, to be read by people
    chunks       those that must be whole on the device; at a reduce or an update the first is the one that it is about,
                 and at a reduce others may be in use meanwhile
    other_bytes  the most that is on the device at once beside model data while the moment lasts
    seconds      how long it computes when everything is there; an update's are found from the speed of its side
    writes       chunks into which the moment puts gradients: from here to its reduce a chunk is no copy of anything
    keeps        at a reduce: the gradients stood beside the chunk (in `other_bytes`), whose parameters are read again
    """

    kind: MomentKind
    name: str
    chunks: tuple[int, ...]
    other_bytes: int
    seconds: float
    writes: tuple[int, ...] = ()
    keeps: bool = False


@dataclass(frozen=True)
class Trace:
    """One step: moments in order, chunks by index.

    updates_as_final  what lies on a disk is updated behind its last reduce, beside what computes, and not in the end

    Raises ValueError where it is none: chunks that are not numbered in order, a moment of an unknown chunk, gradients
    of one that does not learn, a chunk that is used after its update, updated without a reduce, or not updated after
    one.
    """

    moments: tuple[Moment, ...]
    chunks: tuple[ChunkInfo, ...]
    updates_as_final: bool = False

    def __post_init__(self) -> None:
        indices = [chunk.index for chunk in self.chunks]
        if indices != list(range(len(indices))):
            raise ValueError(f"chunks are numbered 0, 1, 2, …, and these {indices}")
        reduced: set[int] = set()
        updated: set[int] = set()
        for moment in self.moments:
            self._require_legal(moment, reduced, updated)
            if moment.kind == "reduce":
                reduced.add(moment.chunks[0])
            elif moment.kind == "update":
                updated.update(moment.chunks)
        if reduced - updated:
            raise ValueError(f"chunk {min(reduced - updated)} is reduced and then not updated")

    def _require_legal(self, moment: Moment, reduced: set[int], updated: set[int]) -> None:
        where, ends = f"{moment.kind} {moment.name}", moment.kind in ("reduce", "update")
        if (ends and not moment.chunks) or (moment.kind == "update" and len(moment.chunks) > 1):
            raise ValueError(f"{where}: it is about one chunk, not {len(moment.chunks)}")
        learns = {*moment.writes, *moment.chunks[:ends]}
        for chunk in (*moment.chunks, *moment.writes):
            if not 0 <= chunk < len(self.chunks):
                raise ValueError(f"{where}: there is no chunk {chunk}")
            if chunk in updated:
                raise ValueError(f"{where}: chunk {chunk} has been updated before")
            if chunk in learns and not self.chunks[chunk].trainable:
                raise ValueError(f"{where}: chunk {chunk} does not learn")
            if moment.kind == "update" and chunk not in reduced:
                raise ValueError(f"{where}: chunk {chunk} has not been reduced")

    @property
    def model_bytes(self) -> int:
        """All model data: buffers, masters, optimizer state."""
        return sum(chunk.param_bytes + chunk.shard_bytes for chunk in self.chunks)

    @property
    def other_peak_bytes(self) -> int:
        """The most that is ever on the device beside model data."""
        return max((moment.other_bytes for moment in self.moments), default=0)
