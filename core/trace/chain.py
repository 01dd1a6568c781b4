"""A model as a chain of blocks, each fed by the one before it: what they cost, and what a step takes by its segments.

The embedding stands before the chain and head and loss behind it; they keep what they keep. What all blocks are given
alike (masks, rotary angles, a bias that the first one makes) is no part of their inputs: it is alive as long as one of
them may run again, and `shared` says what a block that keeps everything may find gone. One that is given something else
than what the one before it hands on (the first of a decoder behind an encoder, a block of a U-Net that also gets a
skip) has its input kept anyway, and no segment goes on over it.

What is alive is told as levels. Beside blocks' inputs and what they keep, there are everybody's parameters, gradients
made so far, the gradient that is on its way: `first`, `again` and `back` are the bytes of all that when a block's
forward begins, when it runs again, when its backward begins. The rest is counted from there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from core.trace.segments import Away, Form, Lean, Results, Segments, size_of


@dataclass(frozen=True)
class Kept:
    """What a block keeps that does not run again from an input, and what that takes.

    peak           the most above the level before it, while it runs
    num_bytes      what its backward needs, and what it hands on
    back           beside inputs and what blocks keep, all that is alive when its backward begins
    backward_peak  the most above that level, until the next backward begins
    again_s, again_flops   of what its backward computes again, where it has not kept everything, and of what encodes
    away           bytes of these that are elsewhere from the end of the next block's forward to the beginning of its
                   backward; form: where
    send_s, fetch_s   seconds of their copies
    """

    peak: int
    num_bytes: int
    back: int
    backward_peak: int
    again_s: float = 0.0
    again_flops: float = 0.0
    away: int = 0
    send_s: float = 0.0
    fetch_s: float = 0.0


Keeps = Results | Form | None
"""In what way a block is kept: some results, everything elsewhere, or, None, everything where it is."""


@dataclass(frozen=True)
class Line:
    """Copies between a device and where activations wait.

    send_bytes_per_s, fetch_bytes_per_s   one way and the other
    overlaps      whether they run beside what computes
    """

    send_bytes_per_s: float
    fetch_bytes_per_s: float
    overlaps: bool


@dataclass(frozen=True)
class ChainBlock:
    """The cost of one block of a chain: bytes, seconds, FLOPs.

    input            what the block before hands on to it; 0 where that is alive anyway
    begins           whether a segment has to begin with it, since its input is not that
    first, again     beside inputs and what blocks keep, all that is alive: when its forward begins, when it is asked to
                     run again in the backward
    dropping_peak    the most above the level before it, while it runs and keeps nothing
    shared           when its backward begins if it has kept everything: what is alive only where a block before it, as
                     far back as one `begins`, has not
    whole, lean      where it keeps everything, and where the results of some operators
    away             where it keeps everything in another place or form
    refill_peak      the most above the level before it, while it runs as the last one of a segment, to be followed by
                     its backward at once; refilled: what there is then beside its input
    refilled_peak    the most above that level, until the backward of the block before it begins
    forward_s, refill_s, backward_s   seconds of a run, of one that is the last of a segment, of the backward
    forward_flops, refill_flops       of the same runs
    """

    input: int
    first: int
    again: int
    dropping_peak: int
    whole: Kept
    refill_peak: int
    refilled: int
    refilled_peak: int
    forward_s: float
    refill_s: float
    backward_s: float
    forward_flops: float = 0.0
    refill_flops: float = 0.0
    shared: int = 0
    begins: bool = False
    lean: Mapping[Results, Kept] = field(default_factory=dict)
    away: Mapping[Form, Kept] = field(default_factory=dict)

    @property
    def here(self) -> dict[Keeps, Kept]:
        """The ways in which it can be kept where it is."""
        return {None: self.whole, **self.lean}

    @property
    def ways(self) -> dict[Keeps, Kept]:
        """All in which it can be kept."""
        return {**self.here, **self.away}

    def keeps_all(self, how: Kept | None) -> bool:
        return how is self.whole or any(how is other for other in self.away.values())


@dataclass(frozen=True)
class Chain:
    """A chain of blocks.

    output  bytes that the last block hands on
    head    the most that is alive beside inputs, that output and what blocks keep, while what stands behind runs
    shared  of that, what is alive only where some block does not keep everything
    least   the most that is alive in the rest of the step, such as the update: no segments change it
    single  whether no segment may be of several blocks, since in one's backward the parameters of others are not there
    lines   of copies, by where they go
    flying  microbatches of a pipeline's stage of which a forward has run and no backward, at the fullest moment
    ahead, behind  blocks of the model before and behind the chain, which are called several times: each call runs again
    """

    blocks: tuple[ChainBlock, ...]
    output: int
    head: int
    shared: int = 0
    least: int = 0
    single: bool = False
    flying: int = 1
    lines: Mapping[Form, Line] = field(default_factory=dict)
    ahead: int = 0
    behind: int = 0

    def of_model(self, segments: Segments) -> Segments:
        """The segments of all blocks of the model, of those of the chain."""
        alone: Segments = ((1,),)
        return (*alone * self.ahead, *segments, *alone * self.behind)


def stage_of(chain: Chain, blocks: range, flying: int) -> Chain:
    """The chain of a pipeline's stage, cut out of that of the whole model.

    Its levels are counted from the least of them: what is alive beside on the rank that has it, is not known here.
    """
    own = chain.blocks[blocks.start : blocks.stop]
    base = min(min(of.first, of.again, *(how.back for how in of.ways.values())) for of in own)

    def lower(how: Kept) -> Kept:
        return replace(how, back=how.back - base)

    lowered = [
        replace(
            of,
            first=of.first - base,
            again=of.again - base,
            whole=lower(of.whole),
            lean={keeps: lower(how) for keeps, how in of.lean.items()},
            away={form: lower(how) for form, how in of.away.items()},
        )
        for of in own
    ]
    lowered[0] = replace(lowered[0], input=0, begins=False)  # it is received, and alive anyway
    is_last = blocks.stop == len(chain.blocks)
    output = chain.output if is_last else chain.blocks[blocks.stop].input
    head, shared = (chain.head - base, chain.shared) if is_last else (0, 0)
    return Chain(tuple(lowered), output, head, shared, single=chain.single, flying=flying, lines=chain.lines)


def textbook_chain(
    activations: Sequence[int],
    kept: Sequence[int],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    forward_overhead: Sequence[int] | None = None,
    backward_overhead: Sequence[int] | None = None,
) -> Chain:
    """The chain of Beaumont et al. 2019 (arXiv 1911.13214), section 4, from its sizes and times.

    activations  of the input and of each stage's output: one more than there are stages; gradients are as large
    kept         by a stage for its backward, its output included
    """
    stages = range(len(kept))
    forward_overhead, backward_overhead = forward_overhead or [0] * len(kept), backward_overhead or [0] * len(kept)
    blocks = []
    for k in stages:
        output, gradient = activations[k + 1], activations[k + 1]
        most = kept[k] + forward_overhead[k]
        blocks.append(
            ChainBlock(
                input=activations[k] if k else 0,
                first=activations[0],
                again=activations[0] + gradient,
                dropping_peak=output + forward_overhead[k],
                whole=Kept(most, kept[k], activations[0] + gradient, backward_overhead[k]),
                refill_peak=most,
                refilled=kept[k],
                refilled_peak=backward_overhead[k],
                forward_s=forward_s[k],
                refill_s=forward_s[k],
                backward_s=backward_s[k],
                forward_flops=forward_s[k],
                refill_flops=forward_s[k],
            )
        )
    return Chain(tuple(blocks), output=activations[-1], head=activations[0])


@dataclass(frozen=True)
class Simulated:
    """A step of a chain.

    peak_bytes      the most alive at once; forward_bytes: what is kept of the chain when its forward ends, of each
                    microbatch in flight
    seconds         of its blocks: forwards, repeated forwards, backwards
    again_s, again_flops   those of the repeated forwards alone
    runs            of each block, how often its forward ran
    back_bytes      of each block, what there is of the chain when its backward begins
    waits_s         in which nothing is computed, for copies
    away_bytes      of each microbatch that wait elsewhere, by where
    standing_bytes  of all microbatches in flight, while another stage of the same rank is at work
    """

    peak_bytes: int
    forward_bytes: int
    seconds: float
    again_s: float
    again_flops: float
    runs: tuple[int, ...]
    back_bytes: tuple[int, ...]
    waits_s: float = 0.0
    away_bytes: Mapping[Form, int] = field(default_factory=dict)
    standing_bytes: int = 0


def keeps_of(item: int | Lean | Away) -> Keeps:
    """The way in which these blocks are kept."""
    if isinstance(item, int):
        return None
    return item.keeps if isinstance(item, Lean) else item.form


def item_of(keeps: Keeps) -> int | Lean | Away:
    """One block that is kept in this way."""
    match keeps:
        case None:
            return 1
        case "host" | "disk" | "compressed":
            return Away(1, keeps)
        case _:
            return Lean(1, keeps)


def simulate(chain: Chain, segments: Segments) -> Simulated:
    """Run the step on a chain, block by block, as `core.parallel.recompute_chain` runs it on a model."""
    return _Simulation(chain).run(segments)


class _Simulation:
    """What is alive of the chain, by block: its input, where a segment begins with it, and what it has kept."""

    def __init__(self, chain: Chain):
        self.chain, self.blocks = chain, chain.blocks
        self.inputs: dict[int, int] = {}
        self.kept: dict[int, int] = {}
        self.alive = 0  # bytes of both
        self.how: dict[int, Kept | None] = {}  # None: refilled
        self.segments: dict[int, Segments] = {}
        self.peak, self.seconds, self.again_s, self.again_flops = 0, 0.0, 0.0, 0.0
        self.runs, self.back_bytes = [0] * len(chain.blocks), [0] * len(chain.blocks)
        self.forms: dict[int, Form] = {}  # block -> where what it has saved waits
        self.gone: set[int] = set()  # those that are there now
        self.waits_s = 0.0
        self.copied: dict[Form, tuple[float, float]] = dict.fromkeys(
            chain.lines, (0.0, 0.0)
        )  # when the last copies are made, there and back
        self.arrives: dict[int, float] = {}  # block -> when its copy is made
        self.away_bytes: dict[Form, int] = {}

    def run(self, segments: Segments) -> Simulated:
        last = len(self.blocks) - 1
        self._sweep(0, segments, None)
        forward = self.alive
        nobody_shares = all(of.keeps_all(self.how.get(index)) for index, of in enumerate(self.blocks))
        head = self.chain.head - (self.chain.shared if nobody_shares else 0)
        handed_on = 0 if last in self.kept else self.chain.output
        # Of the microbatch that ran last the last block is still there, whatever it sends, until a block runs again.
        still = sum(self._how_of(index).away for index in self.forms.keys() - self.gone)
        each_other, flying = forward - still + handed_on, self.chain.flying
        others = (flying - 1) * each_other + (still if flying > 1 else 0)
        self._note(head, handed_on)
        if still and flying > 1:  # that of the one whose backward begins has to come back
            self._wait(self.seconds + self._how_of(last).fetch_s)
        for index in range(last, -1, -1):
            self._fetch(index - 1)
            if index not in self.kept:
                begin = max(self.segments)
                self._sweep(begin, self.segments.pop(begin), index)
            self._back(index)
        assert self.alive == 0
        sums = self.seconds, self.again_s, self.again_flops
        each = tuple(self.runs), tuple(self.back_bytes)
        peak = max(self.chain.least, self.peak + others)
        return Simulated(peak, forward, *sums, *each, self.waits_s, self.away_bytes, flying * each_other + still)

    def _note(self, beside: int, more: int) -> None:
        self.peak = max(self.peak, beside + self.alive + more)

    def _sweep(self, index: int, segments: Segments, until: int | None) -> None:
        """Run blocks from `index` on: in the forward all, in the backward as far as the block whose turn it is."""
        for item in segments:
            size = size_of(item)
            if not isinstance(item, tuple):
                for block in range(index, index + size):
                    self._keep(block, until, keeps_of(item))
                    self._let_go(block - 1, until)
            else:
                self.segments[index] = item
                if index not in self.inputs and index - 1 not in self.kept:
                    self.inputs[index] = self.blocks[index].input
                    self.alive += self.inputs[index]
                if until is not None and index + size - 1 == until:
                    self._sweep(index, self.segments.pop(index), until)
                    return
                for block in range(index, index + size):
                    of = self.blocks[block]
                    self._note(self._beside(block, until), of.dropping_peak + (0 if block == index else of.input))
                    self._ran(block, of.forward_s, of.forward_flops, until)
                    self._let_go(block - 1, until)
            index += size

    def _keep(self, index: int, until: int | None, keeps: Keeps) -> None:
        of = self.blocks[index]
        running = 0 if index in self.inputs or index - 1 in self.kept else of.input
        if index == until:
            self._note(of.again, running + of.refill_peak)
            self._ran(index, of.refill_s, of.refill_flops, until)
            self.how[index], kept = None, of.refilled
        else:
            how = of.ways[keeps]
            self._note(self._beside(index, until), running + how.peak)
            begin = self.seconds
            self._ran(index, of.forward_s, of.forward_flops, until)
            self.how[index], kept = how, how.num_bytes
            if how.away:
                self._send(index, how, begin)
        self.kept[index] = running + kept
        self.alive += self.kept[index]

    def _shares(self, index: int) -> bool:
        """Whether a block before it may run again, and holds what it has been given."""
        while index and not self.blocks[index].begins:
            index -= 1
            if not self.blocks[index].keeps_all(self.how.get(index)):
                return True
        return False

    # Copies.

    def _send(self, index: int, how: Kept, begin: float) -> None:
        """What a block saves is sent from when it begins to run on, one after the other."""
        form: Form = next(form for form, other in self.blocks[index].away.items() if other is how)
        sent, fetched = self.copied[form]
        line = self.chain.lines[form]
        made = max(sent, begin if line.overlaps else self.seconds) + how.send_s
        self.forms[index], self.copied[form] = form, (made, fetched)
        self.arrives[index] = made
        self.away_bytes[form] = self.away_bytes.get(form, 0) + how.away
        if not line.overlaps:
            self._wait(made)

    def _let_go(self, index: int, until: int | None) -> None:
        """The forward of the next block is over, which waits for what was sent."""
        if until is None and index in self.forms:
            self._wait(self.arrives[index])
            self._move(index, -self._how_of(index).away)
            self.gone.add(index)

    def _fetch(self, index: int) -> None:
        """The backward of the next block begins."""
        if index not in self.gone:
            return
        self.gone.remove(index)
        how, form = self._how_of(index), self.forms[index]
        sent, fetched = self.copied[form]
        made = max(fetched, self.seconds) + how.fetch_s
        self.copied[form], self.arrives[index] = (sent, made), made
        self._move(index, how.away)
        if not self.chain.lines[form].overlaps:
            self._wait(made)

    def _move(self, index: int, num_bytes: int) -> None:
        self.kept[index] += num_bytes
        self.alive += num_bytes

    def _how_of(self, index: int) -> Kept:
        how = self.how[index]
        assert how is not None
        return how

    def _wait(self, until_s: float) -> None:
        waits = max(0.0, until_s - self.seconds)
        self.waits_s += waits
        self.seconds += waits

    # What is alive.

    def _beside(self, index: int, until: int | None) -> int:
        return self.blocks[index].first if until is None else self.blocks[until].again

    def _ran(self, index: int, seconds: float, flops: float, until: int | None) -> None:
        self.runs[index] += 1
        self.seconds += seconds
        if until is not None:
            self.again_s += seconds
            self.again_flops += flops

    def _back(self, index: int) -> None:
        of = self.blocks[index]
        self.back_bytes[index] = self.alive
        how = self.how.pop(index)
        if how is None:
            self._note(of.again, of.refilled_peak)
        else:
            shared = of.shared if of.keeps_all(how) and self._shares(index) else 0
            self._note(how.back + shared, how.backward_peak)
            self.back_bytes[index] -= how.num_bytes - of.refilled  # what it has handed on is gone
            if of.keeps_all(how):
                self.seconds += how.again_s
            else:
                self._ran(index, how.again_s, how.again_flops, index)
        self.seconds += of.backward_s
        if index in self.forms:
            self._wait(self.arrives[index])
        self.alive -= self.kept.pop(index) + self.inputs.pop(index, 0)
        self.segments.pop(index, None)
