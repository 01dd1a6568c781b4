"""The place of a running step in the traced one, and when each chunk is needed next.

A moment has a kind and a name. A step may differ from the traced one: evaluation has no backward, other data may take
another way through the model. The search for a moment begins at the step's place, and goes on from the trace's
beginning; a moment that was never traced leaves the place as it is. So does a reduce that comes later than in the
trace: autograd need not hand on the gradients of one module in the order of the trace, and no step begins with one.
Where a chunk is reduced for each microbatch in turn, a reduce is not taken for that of the next one, either.
"""

from bisect import bisect_right
from collections.abc import Sequence

from core.gemini.trace import MomentKind, Trace


class Schedule:
    def __init__(self, trace: Trace):
        self.trace = trace
        self.place = -1
        self._places: dict[tuple[MomentKind, str], list[int]] = {}
        self._uses: list[list[int]] = [[] for _ in trace.chunks]
        self._runs = [k for k, m in enumerate(trace.moments) if m.kind in ("forward", "backward")]
        self._repeats = any(moment.keeps for moment in trace.moments)
        for k, moment in enumerate(trace.moments):
            self._places.setdefault((moment.kind, moment.name), []).append(k)
            if moment.kind != "update":
                for chunk in {*moment.chunks, *moment.writes}:
                    self._uses[chunk].append(k)

    def advance(self, kind: MomentKind, name: str) -> range:
        """Go on to a moment.  Returns the moments passed, this one the last; empty, if it was never traced."""
        places = self._places.get((kind, name))
        if places is None:
            return range(0)
        before, place = self.place, _next(places, self.place)
        if kind == "reduce" and (place <= before or (self._repeats and self._is_of_another(place))):
            return range(0)
        self.place = place
        return range(before + 1 if self.place > before else 0, self.place + 1)

    def _is_of_another(self, reduce: int) -> bool:
        """Return whether something is computed between the step's place and a reduce."""
        return _next(self._runs, self.place) in range(self.place + 1, reduce)

    def next_use(self, chunk: int) -> int:
        """Count the moments until a chunk is needed, in this step or the next; beyond all, if it never is."""
        uses, length = self._uses[chunk], len(self.trace.moments)
        if not uses:
            return 2 * length
        use = _next(uses, self.place)
        return use - self.place if use > self.place else use + length - self.place


def _next(places: Sequence[int], place: int) -> int:
    """The first place behind `place`; where there is none, the first of all."""
    at = bisect_right(places, place)
    return places[at] if at < len(places) else places[0]
