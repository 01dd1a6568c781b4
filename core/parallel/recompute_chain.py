"""Activation checkpointing over several blocks: segments (`core.trace.segments`) at work on a model's blocks.

The model's own forward calls its blocks one after the other; nothing else is known of it. So:

1. A block that keeps everything runs as it is. One whose activations wait elsewhere does as `core.parallel.stored`
   says: they are let go when the next block has run, and fetched when that one's backward begins. Every other block
   runs with a place for each tensor that autograd would save (`core.parallel.pipeline.recompute`), and leaves a record:
   its arguments, its generators, and how to run again. A lean one is a segment of its own, and keeps results of its
   operators beside (`core.parallel.results`).
2. Of its arguments, tensors that the block before has just handed on are not held but linked, unless a segment begins
   with it. All others (masks, rotary angles, what goes through several blocks, what the model has changed on the way)
   are held, for they are alive anyway.
3. When the backward asks a block for what it has not kept, records are followed back to the next block whose input is
   there. From it blocks run again as that segment says: keeping nothing but what they hand on, or the input that an
   inner segment begins with, or some results, or everything; the block that has been asked runs as far as its last
   place, and is handed the results that it has kept.

What runs again draws what it drew, under the same autocast. Values are the same to the bit, and gradients go through
the graph of the first forward, so no order of runs changes them. A block that is called in another order, or
several times, or whose input is of another kind, computes the same and keeps more.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from core.compat import tree_flatten, tree_leaves, tree_unflatten
from core.parallel.drive import OnDrive
from core.parallel.offload import Offloaded
from core.parallel.pipeline.recompute import Places, Surroundings, check_given, versions_of
from core.parallel.plan import RECOMPUTED, blocks_of
from core.parallel.results import OPERATORS, KeptResults
from core.parallel.stored import Call, StoredBlocks, let_go
from core.trace.segments import Away, Form, Lean, Results, Segments, first_blocks, size_of

Observer = Callable[[str, int, Sequence[Tensor], Sequence[Tensor]], None]
"""(what begins, block, tensors that are linked or handed on, tensors that are held); see `RecomputedChain.observe`."""

ALONE: Segments = (1,)
"""The segment of a block that runs again from its own input."""


class RecomputedChain:
    """The blocks of a model whose forwards do as the segments say.

    observe  told when a block begins and ends its first run ("begin", "end"), when the backward asks it for what it
             has not kept and when it has it ("ask", "filled")
    kept     operators whose results some block has kept
    stores   where and how what blocks save may wait
    """

    def __init__(
        self, blocks: Sequence[nn.Module], segments: Segments, stores: Mapping[Form, StoredBlocks] | None = None
    ):
        self.blocks, self.stores = list(blocks), dict(stores or {})
        self.kept: set[str] = set()
        self.observe: Observer | None = None
        self._before: ref[_Record] | None = None  # of the block that ran last
        self._stored: Call | None = None  # the same, where it is stored
        for index, block in enumerate(self.blocks):
            setattr(block, RECOMPUTED, block.forward)
            block.forward = partial(self._forward, index)
        self.follow(segments)

    def follow(self, segments: Segments) -> None:
        """Do as these say from the next forward on."""
        self._begins: dict[int, Segments] = {}  # block -> its segment
        self._lean: dict[int, Results] = {}  # block -> what it keeps beside its input
        self._away: dict[int, Form] = {}  # block -> where what it saves waits
        self._whole: set[int] = set()  # blocks that keep everything
        index = 0
        for item in segments:
            blocks = range(index, index + size_of(item))
            if isinstance(item, int):
                self._whole |= set(blocks)
            elif isinstance(item, Away):
                self._away |= dict.fromkeys(blocks, item.form)
            elif isinstance(item, Lean):
                self._lean |= dict.fromkeys(blocks, item.keeps)
                self._begins |= dict.fromkeys(blocks, ALONE)
            else:
                self._begins[index] = item
            index = blocks.stop

    def _forward(self, index: int, *args: Any, **kwargs: Any) -> Any:
        forward = getattr(self.blocks[index], RECOMPUTED)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if index in self._whole or index in self._away:
            self._before = None
            self._tell("begin", index, (), ())
            if index in self._away:
                outputs, call = self.stores[self._away[index]].call(index, self.blocks[index], args, kwargs)
            else:
                outputs, call = forward(*args, **kwargs), None
            self._ran(index, outputs, call, [x for x in tree_leaves(outputs) if isinstance(x, Tensor)], ())
            return outputs
        before = None if self._before is None else self._before()
        self._before = None
        record = _Record(self, index, before, args, kwargs)
        if index in self._begins:
            record.begin(self._begins[index], record.linked)
        self._tell("begin", index, record.linked, record.held)
        places = record.places()
        with record.keeping(self._lean.get(index), places.leave, places.take):
            outputs = forward(*args, **kwargs)
        record.note(outputs)
        self._before = ref(record)
        self._ran(index, outputs, None, record.handed_on(outputs), record.held)
        record.linked = []
        return outputs

    def _ran(
        self, index: int, outputs: Any, call: Call | None, passed: Sequence[Tensor], held: Sequence[Tensor]
    ) -> None:
        """A block has run: what the one before it has stored is let go, and will be fetched when its backward begins.

        call  what stores what it has saved
        """
        before, self._stored = self._stored, call
        if before is not None:
            let_go(before.own)
        self._tell("end", index, passed, held)
        if before is not None and before.index < index:
            for x in tree_leaves(outputs):
                if isinstance(x, Tensor) and x.requires_grad:
                    x.register_hook(partial(_fetch, before))

    def bytes_away(self, form: Form = "host") -> int:
        """Bytes that have been stored there so far."""
        store = self.stores.get(form)
        return store.tier.sent_bytes if isinstance(store, Offloaded | OnDrive) else 0

    def _tell(self, what: str, index: int, passed: Sequence[Tensor], held: Sequence[Tensor]) -> None:
        if self.observe is not None:
            self.observe(what, index, passed, held)


def _fetch(call: Call, gradient: Tensor) -> None:
    call.fetch()


def chain_of(model: nn.Module) -> RecomputedChain:
    """The chain of a model whose blocks run by segments."""
    forward = blocks_of(model)[0].forward
    assert isinstance(forward, partial)
    return forward.func.__self__


class _Link(NamedTuple):
    """In the place of an argument: a tensor that the block before hands on."""

    place: int
    trained: bool


class _Output(NamedTuple):
    """A tensor that a block hands on, as it was then."""

    place: int
    tensor: ref[Tensor]
    version: int

    def is_still(self, leaf: Tensor) -> bool:
        return self.tensor() is leaf and leaf._version == self.version


class _Held(NamedTuple):
    """In the place of an argument: a tensor without its graph, which would hold what is to go."""

    tensor: Tensor
    trained: bool


class _Record:
    """One call of a block, and how to run it again.

    before  the record that its links are of
    linked  the tensors of its links, while it runs for the first time
    inputs  the same, kept for the segment that begins with it; None: not kept
    results  what it keeps of its operators until it runs again; None: nothing
    """

    def __init__(
        self,
        chain: RecomputedChain,
        index: int,
        before: "_Record | None",
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ):
        self.chain, self.index = chain, index
        leaves, self._form = tree_flatten((args, kwargs))
        handed = {} if before is None else before.outputs
        self.linked: list[Tensor] = []
        self._leaves: list[Any] = []
        self._given = {id(leaf): place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        for leaf in leaves:
            found = handed.get(id(leaf)) if isinstance(leaf, Tensor) else None
            if found is not None and found.is_still(leaf):
                self._leaves.append(_Link(found.place, leaf.requires_grad))
                self.linked.append(leaf)
            elif isinstance(leaf, Tensor) and leaf.requires_grad and not isinstance(leaf, nn.Parameter):
                self._leaves.append(_Held(leaf.detach(), True))
            else:
                self._leaves.append(leaf)
        self._links = [leaf for leaf in self._leaves if isinstance(leaf, _Link)]
        self.before = before if self._links else None
        self.inputs: list[Tensor] | None = None
        self.segment: Segments | None = None
        self.results: KeptResults | None = None
        self.outputs: dict[int, _Output] = {}
        self._versions = [versions_of([leaf])[0] if isinstance(leaf, Tensor) else 0 for leaf in leaves]
        self._input_versions: list[int] = []
        self.around = Surroundings(tuple(leaf for leaf in leaves if isinstance(leaf, Tensor)))
        self._places: ref[Places] | None = None

    def places(self) -> Places:
        """Those of its first run: the graph holds them, and they hold the record."""
        places = Places(self._asked)
        self._places = ref(places)
        return places

    @property
    def held(self) -> list[Tensor]:
        found = (leaf.tensor if isinstance(leaf, _Held) else leaf for leaf in self._leaves)
        return [leaf for leaf in found if isinstance(leaf, Tensor)]

    def begin(self, segment: Segments, inputs: Sequence[Tensor]) -> None:
        """Keep the input, and by which segment to go on from it."""
        self.segment, self.inputs = segment, [x.detach() for x in inputs]
        self._input_versions = versions_of(self.inputs)

    @contextmanager
    def keeping(
        self, keeps: Results | None, leave: Callable[[Tensor], Any], take: Callable[[Any], Tensor]
    ) -> Iterator[None]:
        """Around a run whose tensors for the backward are left and taken so, and that keeps results beside."""
        if keeps is None:
            with saved_tensors_hooks(leave, take):
                yield
            return
        self.results = KeptResults(OPERATORS[keeps])
        with saved_tensors_hooks(self.results.before(leave), take), self.results.keep():
            yield
        self.chain.kept |= self.results.kept

    def note(self, outputs: Any) -> None:
        """Know what the block hands on; what it hands through is held, since blocks behind it will be given it, too."""
        for place, leaf in enumerate(tree_leaves(outputs)):
            if not isinstance(leaf, Tensor):
                continue
            given = self._given.get(id(leaf))
            if given is None:
                self.outputs[id(leaf)] = _Output(place, ref(leaf), leaf._version)
            elif isinstance(link := self._leaves[given], _Link):
                self._hold(given, link, leaf)
        self._given = {}

    def _hold(self, given: int, link: _Link, tensor: Tensor) -> None:
        place = self._links.index(link)
        self._leaves[given] = _Held(tensor.detach(), link.trained)
        self._links.pop(place)
        self.linked.pop(place)
        if self.inputs is not None:
            self.inputs.pop(place)
            self._input_versions.pop(place)
        if not self._links:
            self.before = None

    def handed_on(self, outputs: Any) -> list[Tensor]:
        return [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and id(x) in self.outputs]

    def kept_inputs(self) -> list[Tensor]:
        """Those that the segment that begins with it has kept.  Raises RuntimeError where they are others by now."""
        inputs = self.inputs or []
        check_given(inputs, self._input_versions)
        return inputs

    def is_ready(self) -> bool:
        """Whether it can run without the block before it."""
        return not self._links or self.inputs is not None

    # Running again.

    def _asked(self, places: Places) -> None:
        self.chain._tell("ask", self.index, (), ())
        path: list[_Record] = [self]
        while not path[-1].is_ready():
            assert path[-1].before is not None
            path.append(path[-1].before)
        path.reverse()
        _run_again(path)
        self.chain._tell("filled", self.index, (), ())

    def drop(self, inputs: Sequence[Tensor], keeps: Results | None = None) -> Any:
        """Run it, and keep nothing, or results of operators alone."""
        with self.around.put_back(), torch.enable_grad(), self.keeping(keeps, lambda x: None, _never):
            return self._detached(self._call(inputs))

    def keep(self, inputs: Sequence[Tensor], to_the_end: bool) -> Any:
        """Run it, and keep what its backward needs."""
        places = None if self._places is None else self._places()
        if places is None:  # its graph is gone, and what runs is only on the way
            return self.drop(inputs)
        results, self.results = self.results, None
        with nullcontext() if results is None else results.hand_out():
            outputs = places.fill(partial(self._call, inputs), self.around, to_the_end=to_the_end)
        self.inputs, self._input_versions = None, []
        return self._detached(outputs)

    def _call(self, inputs: Sequence[Tensor]) -> Any:
        held = [k for k, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor | _Held)]
        check_given(self.held, [self._versions[k] for k in held])
        given = iter(inputs)
        leaves = []
        for leaf in self._leaves:
            if isinstance(leaf, _Link):
                leaves.append(next(given).detach().requires_grad_(leaf.trained))
            elif isinstance(leaf, _Held):
                leaves.append(leaf.tensor.detach().requires_grad_(leaf.trained))
            else:
                leaves.append(leaf)
        args, kwargs = tree_unflatten(leaves, self._form)
        return getattr(self.chain.blocks[self.index], RECOMPUTED)(*args, **kwargs)

    @staticmethod
    def _detached(outputs: Any) -> list[Any]:
        return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(outputs)]

    def inputs_of(self, outputs: Sequence[Any]) -> list[Tensor]:
        """What it takes of that which the block before hands on."""
        return [outputs[link.place] for link in self._links]


def _never(packed: Any) -> Any:
    raise AssertionError("a block that keeps nothing has no backward")


def _run_again(path: Sequence[_Record]) -> None:
    """Run the blocks of a path from the first one's input on, until the last one has what its backward needs."""
    first = path[0]
    segments, inputs = first.segment, first.kept_inputs()
    index = 0
    for item in first_blocks(segments or (), len(path)):
        assert not isinstance(item, Away)
        size = size_of(item)
        if not isinstance(item, tuple):
            for place in range(index, index + size):
                record, is_last = path[place], place == len(path) - 1
                if isinstance(item, Lean) and not is_last:
                    record.begin(ALONE, inputs)
                    outputs = record.drop(inputs, item.keeps)
                else:
                    outputs = record.keep(inputs, to_the_end=not is_last)
                inputs = [] if is_last else path[place + 1].inputs_of(outputs)
                del outputs
        else:
            path[index].begin(item, inputs)
            if index + size == len(path):
                del inputs
                _run_again(path[index:])
                return
            for place in range(index, index + size):
                outputs = path[place].drop(inputs)
                inputs = path[place + 1].inputs_of(outputs)
                del outputs
        index += size
