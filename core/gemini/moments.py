"""A traced step by parameters as one by chunks, on which residency is planned; and its correction."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from core.gemini.trace import ChunkInfo, Moment, Trace
from core.trace.tracer import StepTrace, Stretch


def on_chunks(step: StepTrace, chunks: Sequence[ChunkInfo], parameters: Sequence[Sequence[str]]) -> Trace:
    """The step by chunks, `parameters[i]` being the names in chunk i.

    A moment begins with each forward or backward of a module that uses parameters, and is named as that; and when a
    chunk has all its gradients, or its backward has ended without them: this reduce is named as the first and last
    parameter of the chunk. Chunks are updated in order of first use.
    """
    trace = _OnChunks(chunks, parameters).trace(step.microbatches, step.by_blocks)
    return replace(trace, updates_as_final=step.updates_as_final)


def corrected(trace: Trace, measured: Sequence[tuple[int, float]]) -> Trace:
    """The trace with (other_bytes, seconds) of each moment as a real step had them.

    Raises ValueError where the step had another number of moments: it was another step than the one that was traced.
    """
    if len(measured) != len(trace.moments):
        raise ValueError(f"{len(measured)} moments were measured, and {len(trace.moments)} were traced")
    pairs = zip(trace.moments, measured, strict=True)
    moments = tuple(replace(m, other_bytes=other, seconds=seconds) for m, (other, seconds) in pairs)
    return replace(trace, moments=moments)


def _from_first_beginning(stretches: Sequence[Stretch]) -> Sequence[Stretch]:
    """Moments before the first module begins are counted with it."""
    first = next((i for i, stretch in enumerate(stretches) if stretch.begins), 0)
    before, begins = stretches[:first], stretches[first]
    other_bytes = max([begins.other_bytes, *(stretch.other_bytes for stretch in before)])
    seconds = begins.seconds + sum(stretch.seconds for stretch in before)
    return [replace(begins, other_bytes=other_bytes, seconds=seconds), *stretches[first + 1 :]]


class _OnChunks:
    """Stretches by parameters -> moments by chunks, with the reduces and updates that a runtime puts between them."""

    def __init__(self, chunks: Sequence[ChunkInfo], parameters: Sequence[Sequence[str]]):
        self.chunks = tuple(chunks)
        self.chunk_of = {name: index for index, names in enumerate(parameters) for name in names}
        self.names = parameters
        self.moments: list[Moment] = []

    def trace(self, microbatches: Sequence[Sequence[Stretch]], by_blocks: bool) -> Trace:
        """by_blocks: a backward is that of a part of the model, and reduces what it has gradients for"""
        learns = any(stretch.writes for stretches in microbatches for stretch in stretches)
        for stretches in map(_from_first_beginning, microbatches):
            waiting = {c.index: set(self.names[c.index]) for c in self.chunks if c.trainable and learns}
            if by_blocks:
                written = {self.chunk_of[name] for stretch in stretches for name in stretch.writes}
                waiting = {chunk: names for chunk, names in waiting.items() if chunk in written}
            for stretch in stretches:
                self._add(stretch)
                for name in stretch.writes:
                    self._write(name, waiting, stretch.other_bytes)
            for chunk in waiting:  # some of its parameters got no gradient: it reduces with zeros for those
                self._reduce(chunk, stretches[-1].other_bytes)
        if by_blocks:
            self.moments = _keeping(self.moments, self.chunks)
        return Trace((*self.moments, *(self._updates() if learns else ())), self.chunks)

    def _add(self, stretch: Stretch) -> None:
        writes = {self.chunk_of[name] for name in stretch.writes}
        used = {self.chunk_of[name] for name in stretch.parameters} | writes
        last = self.moments[-1] if self.moments else None
        if last is None or stretch.begins or (last.kind == "reduce" and last.chunks[0] in used):
            last = Moment(stretch.kind, stretch.name, (), 0, 0.0)
            self.moments.append(last)
        self.moments[-1] = replace(
            last,
            chunks=(*last.chunks, *sorted(used.difference(last.chunks))),
            other_bytes=max(last.other_bytes, stretch.other_bytes),
            seconds=last.seconds + stretch.seconds,
            writes=tuple(sorted({*last.writes, *writes})),
        )

    def _write(self, name: str, waiting: dict[int, set[str]], other_bytes: int) -> None:
        chunk = self.chunk_of[name]
        # Under a reentrant checkpoint a parameter that is used twice gets two gradients: the chunk reduces once more.
        left = waiting.setdefault(chunk, set(self.names[chunk]))
        left.discard(name)
        if not left:
            del waiting[chunk]
            self._reduce(chunk, other_bytes)

    def _reduce(self, chunk: int, other_bytes: int) -> None:
        self.moments.append(Moment("reduce", self._name(chunk), (chunk,), other_bytes, 0.0))

    def _updates(self) -> Iterator[Moment]:
        used = dict.fromkeys(chunk for moment in self.moments for chunk in moment.chunks)
        for chunk in used:
            if self.chunks[chunk].trainable:
                yield Moment("update", self._name(chunk), (chunk,), 0, 0.0)

    def _name(self, chunk: int) -> str:
        return " … ".join(dict.fromkeys((self.names[chunk][0], self.names[chunk][-1])))


def _keeping(moments: Sequence[Moment], chunks: Sequence[ChunkInfo]) -> list[Moment]:
    """The same, with gradients of chunks that are reduced again later beside their parameters, which stay."""
    found = list(moments)
    begun: dict[int, int] = {}  # chunk -> moment with its first gradient since the last reduce
    last = {moment.chunks[0]: k for k, moment in enumerate(moments) if moment.kind == "reduce"}
    for k, moment in enumerate(moments):
        for chunk in moment.writes:
            begun.setdefault(chunk, k)
        if moment.kind != "reduce":
            continue
        chunk = moment.chunks[0]
        first = begun.pop(chunk, k)
        if k == last[chunk]:
            continue
        for place in range(first, k + 1):
            one = found[place]
            writes = tuple(written for written in one.writes if written != chunk)
            found[place] = replace(one, writes=writes, other_bytes=one.other_bytes + chunks[chunk].param_bytes)
        found[k] = replace(found[k], keeps=True)
    return found
