"""What an operator allows: how its tensors may be cut over a mesh, derived from one description of its dims.

A rule is written as an einsum is: every dim of every tensor is made of letters, and tensors that share a letter are cut
alike. `m k, k n -> m n` says all of a matrix product:

1. A letter of an input and an output may be cut: each rank computes its rows, columns, heads.
2. A letter that no output has is summed: each rank's output is a partial sum. What is added once (a bias) and lacks the
   letter must be partial, too.
3. A letter of outputs alone is made by the operator (`expand`, `embedding_dense_backward`): each rank makes its part.
4. An operator is linear in some of its tensors: those may be partial, and so is what reads them. Through anything else
   a partial sum is wrong (gelu(a) + gelu(b) is not gelu(a + b)), and such a strategy does not exist.
5. A dim that is made of several letters, `(h d)` of a view, is cut by its first alone, into parts that are equal.
6. Letters that stay whole are named, and those for which ranks say something to each other inside the operator (`Talk`:
   the maximum and the sum of a softmax, the moments of a norm).

Every axis of the mesh takes one of these, or none, in which case its ranks do the same work. Cut twice, a letter is cut
in either order: S01 is not S10. Shards follow `torch.chunk` axis by axis, as `core.layout` and DTensor do, and those
that would leave a rank without rows do not exist.
"""

import itertools
import math
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from core.auto.specs import Spec
from core.compat import tree_flatten, tree_unflatten

Dims = tuple[tuple[str, ...], ...]
"""Of a tensor, dim by dim, the letters of which it is made; () is a dim that is whole and nobody's."""


@dataclass(frozen=True)
class Here:
    """A rank's part: of every letter its first place and how many it has, and the shapes of its outputs."""

    starts: Mapping[str, int]
    sizes: Mapping[str, int]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class AllReduce:
    """What a `Talk` yields, to be sent the sum or maximum over the ranks that share the cut letters."""

    tensor: Tensor
    kind: Literal["sum", "max"] = "sum"


Run = Callable[[Sequence[Tensor], Here], Any]
Talking = Callable[[Sequence[Tensor], Here], Generator[AllReduce, Tensor, Any]]


@dataclass(frozen=True)
class Talk:
    """What an operator does where one of `letters` is cut: computes, says something, computes on.

    messages  the letters of every tensor that is all-reduced, over the axes that cut `letters`
    told      outputs that all ranks then know; others that lack the letter are partial
    """

    letters: frozenset[str]
    run: Talking
    messages: tuple[tuple[str, ...], ...]
    told: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Message:
    """An all-reduce of `elements` (a rank's, the most of any) over the axes."""

    axes: tuple[int, ...]
    elements: int


@dataclass(frozen=True)
class Strategy:
    """One way to run an operator on a mesh.

    cuts      (letter, the axes that cut it in their order)
    split     into how many parts the work is split; other ranks repeat it
    messages  inside of the operator
    """

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec | None, ...]
    cuts: tuple[tuple[str, tuple[int, ...]], ...]
    split: int
    messages: tuple[Message, ...]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


@dataclass(frozen=True, eq=False)
class Call:
    """An operator of ATen and its arguments by name, tensors real or fake."""

    op: Any
    arguments: Mapping[str, Any]
    outputs: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> "Call":
        """outputs: what the operator returns, a tensor or several."""
        named = {argument.name: value for argument, value in zip(op._schema.arguments, args)} | dict(kwargs)
        defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
        ordered = {a.name: named.get(a.name, defaults.get(a.name)) for a in op._schema.arguments}
        return cls(op, ordered, tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,))

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(leaf for leaf in tree_flatten(list(self.arguments.values()))[0] if isinstance(leaf, Tensor))

    def places(self, name: str) -> tuple[int, ...]:
        """The places of an argument's tensors among the inputs; a list has several."""
        before = 0
        for other, value in self.arguments.items():
            num_tensors = sum(isinstance(leaf, Tensor) for leaf in tree_flatten(value)[0])
            if other == name:
                return tuple(range(before, before + num_tensors))
            before += num_tensors
        raise KeyError(name)

    @property
    def made(self) -> Tensor:
        """The first of the outputs."""
        return next(tensor for tensor in self.outputs if tensor is not None)

    def named(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """The arguments, with these tensors in the place of its own."""
        leaves, tree = tree_flatten(list(self.arguments.values()))
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return dict(zip(self.arguments, tree_unflatten(leaves, tree), strict=True))

    def __call__(self, tensors: Sequence[Tensor], **changed: Any) -> Any:
        """The operator of other tensors, and other arguments where they are named."""
        named = self.named(tensors) | changed
        schema = self.op._schema.arguments
        positional = [named[a.name] for a in schema if not a.kwarg_only]
        return self.op(*positional, **{a.name: named[a.name] for a in schema if a.kwarg_only})


@dataclass(frozen=True, eq=False)
class Rule:
    """An operator's description; see the module.

    linear  sets of inputs that may be partial together
    added   inputs that are added to a sum once
    reads   the inputs on which each output depends
    """

    call: Call
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims | None, ...]
    sizes: Mapping[str, int]
    run: Run
    linear: tuple[frozenset[int], ...] = ()
    whole: frozenset[str] = frozenset()
    added: frozenset[int] = frozenset()
    reads: tuple[frozenset[int], ...] = ()
    talk: Talk | None = None
    letters: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        tensors = [*self.inputs, *(dims for dims in self.outputs if dims is not None)]
        found = dict.fromkeys(letter for dims in tensors for dim in dims for letter in dim)
        inside = {letter for dims in tensors for dim in dims for letter in dim[1:]}
        stays = (self.whole - (self.talk.letters if self.talk else frozenset())) | inside
        object.__setattr__(self, "letters", tuple(letter for letter in found if letter not in stays))

    def strategies(self, mesh: Sequence[int]) -> list[Strategy]:
        """Every strategy that is allowed on a mesh of these sizes; where two lie alike, the one that splits more."""
        ways: list[str | int | None] = [None, *self.letters, *range(len(self.linear))]
        found: dict[tuple[Any, ...], Strategy] = {}
        for taken in itertools.product(ways, repeat=len(mesh)):
            cut: dict[str, list[int]] = {}
            for axis, way in enumerate(taken):
                if isinstance(way, str):
                    cut.setdefault(way, []).append(axis)
            passed = {axis: self.linear[way] for axis, way in enumerate(taken) if isinstance(way, int)}
            orders = [[(letter, order) for order in itertools.permutations(axes)] for letter, axes in cut.items()]
            for cuts in itertools.product(*orders):
                if all(self._divides(letter, [mesh[axis] for axis in axes]) for letter, axes in cuts):
                    strategy = self._strategy(mesh, dict(cuts), passed)
                    key = (strategy.inputs, strategy.outputs)
                    if key not in found or found[key].split < strategy.split:
                        found[key] = strategy
        return list(found.values())

    def _divides(self, letter: str, parts: Sequence[int]) -> bool:
        size = self.sizes[letter]
        tensors = [*self.inputs, *(dims for dims in self.outputs if dims is not None)]
        if any(letter in dim and len(dim) > 1 for dims in tensors for dim in dims):
            return size % math.prod(parts) == 0
        return _leaves_nobody_out(size, parts)

    def _strategy(
        self, mesh: Sequence[int], cuts: Mapping[str, tuple[int, ...]], passed: Mapping[int, frozenset[int]]
    ) -> Strategy:
        inputs = []
        for n, dims in enumerate(self.inputs):
            partial = [axis for axis, linear in passed.items() if n in linear]
            if n in self.added:
                partial += [axis for letter, axes in cuts.items() if self._is_summed(letter) for axis in axes]
            inputs.append(_spec(dims, cuts, partial))
        outputs: list[Spec | None] = []
        for n, dims in enumerate(self.outputs):
            if dims is None:
                outputs.append(None)
                continue
            reads = self.reads[n] if self.reads else frozenset(range(len(self.inputs)))
            partial = [axis for axis, linear in passed.items() if linear & reads]
            for letter, axes in cuts.items():
                told = self.talk and letter in self.talk.letters and n in self.talk.told
                if not told and not _has(dims, letter) and any(_has(self.inputs[i], letter) for i in reads):
                    partial += axes
            outputs.append(_spec(dims, cuts, partial))
        split = math.prod(mesh[axis] for axes in cuts.values() for axis in axes)
        return Strategy(tuple(inputs), tuple(outputs), tuple(cuts.items()), split, self._messages(mesh, cuts))

    def _is_summed(self, letter: str) -> bool:
        """The first output, of an operator that adds something to a sum, does not have it."""
        dims = self.outputs[0]
        return dims is not None and not _has(dims, letter)

    def _messages(self, mesh: Sequence[int], cuts: Mapping[str, tuple[int, ...]]) -> tuple[Message, ...]:
        axes = self.talks_over(cuts)
        if not axes or self.talk is None:
            return ()
        most = {letter: share(size, [mesh[a] for a in cuts.get(letter, ())], [0] * len(cuts.get(letter, ())))[1]
                for letter, size in self.sizes.items()}  # fmt: skip
        return tuple(Message(axes, math.prod(most[letter] for letter in letters)) for letters in self.talk.messages)

    def talks_over(self, cuts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The axes over which ranks say something inside of the operator."""
        if self.talk is None:
            return ()
        return tuple(sorted(axis for letter, axes in cuts.items() if letter in self.talk.letters for axis in axes))

    def here(self, strategy: Strategy, mesh: Sequence[int], coordinate: Sequence[int]) -> Here:
        """The part of the rank that has this place on every axis."""
        cuts = dict(strategy.cuts)
        starts, sizes = {}, {}
        for letter, size in self.sizes.items():
            axes = cuts.get(letter, ())
            starts[letter], sizes[letter] = share(size, [mesh[a] for a in axes], [coordinate[a] for a in axes])
        shapes = tuple(
            () if dims is None or tensor is None else _local_shape(dims, tensor.shape, sizes)
            for dims, tensor in zip(self.outputs, self.call.outputs, strict=True)
        )
        return Here(starts, sizes, shapes)


def describe(
    call: Call,
    inputs: Mapping[str, str | Dims | Sequence[Dims]],
    outputs: str | Sequence[Dims | None],
    *,
    linear: Sequence[str] = (),
    whole: str | frozenset[str] = "",
    added: str = "",
    reads: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    run: Run | None = None,
    talk: Talk | None = None,
) -> Rule:
    """A rule of what arguments' dims are made of: "b (h d)", "." for a dim that stays whole, "" for a scalar.

    inputs   argument -> its dims; of an argument that is a list, dims of each. None and numbers need none
    outputs  dims of each, with commas between
    linear   arguments that may be partial together, by names with blanks between; sets in which one is no tensor of
             floating point numbers are left out
    reads    by output the arguments on which it depends; all, if not given
    sizes    of letters that no dim has alone
    """
    dims: dict[int, Dims] = {}
    for name, given in inputs.items():
        at = call.places(name)
        several: list[Any] = [dims_of(given)] if isinstance(given, str) else [given] if _is_dims(given) else list(given)
        if at:
            dims |= dict(zip(at, several, strict=True))
    tensors = call.inputs
    missing = [n for n in range(len(tensors)) if n not in dims]
    assert not missing, f"{call.op}: inputs {missing} have no dims"
    made = [dims_of(text) for text in outputs.split(",")] if isinstance(outputs, str) else list(outputs)
    made = [None if tensor is None else out for tensor, out in zip(call.outputs, made, strict=True)]

    def places(names: str) -> frozenset[int]:
        return frozenset(place for name in names.split() for place in call.places(name))

    known = dict(sizes or {})
    for tensor, of in [*zip(tensors, (dims[n] for n in range(len(tensors)))), *zip(call.outputs, made)]:
        if tensor is None or of is None:
            continue
        assert len(of) == tensor.ndim, f"{call.op}: {of} for {tuple(tensor.shape)}"
        for dim, size in zip(of, tensor.shape, strict=True):
            if len(dim) == 1:
                assert known.setdefault(dim[0], size) == size, f"{call.op}: {dim[0]} is {known[dim[0]]} and {size}"
    reading = tuple(places(names) for names in reads) or tuple(frozenset(range(len(tensors))) for _ in made)
    sets = [
        places(names)
        for names in linear
        if all(call.places(name) for name in names.split())
        and all(tensors[n].is_floating_point() for n in places(names))
        and all(
            out is None or out.is_floating_point() or not reading[n] & places(names)
            for n, out in enumerate(call.outputs)
        )
    ]
    return Rule(
        call=call,
        inputs=tuple(dims[n] for n in range(len(tensors))),
        outputs=tuple(made),
        sizes=known,
        run=run or (lambda parts, here: call(parts)),
        linear=tuple(dict.fromkeys(sets)),
        whole=frozenset(whole.split()) if isinstance(whole, str) else whole,
        added=places(added),
        reads=reading,
        talk=talk,
    )


def share(size: int, parts: Sequence[int], coordinate: Sequence[int]) -> tuple[int, int]:
    """First row and number of rows of a rank, of `size` cut into parts, and these again, as torch.chunk cuts."""
    start = 0
    for n, place in zip(parts, coordinate, strict=True):
        rows = -(-size // n)
        begin = min(place * rows, size)
        start, size = start + begin, min(rows, size - begin)
    return start, size


def _leaves_nobody_out(size: int, parts: Sequence[int]) -> bool:
    if not parts:
        return size > 0
    rows = -(-size // parts[0])
    last = size - rows * (parts[0] - 1)
    return last > 0 and all(_leaves_nobody_out(n, parts[1:]) for n in (rows, last))


def _local_shape(dims: Dims, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[letter] for letter in dim) if dim else size for dim, size in zip(dims, shape))


def _spec(dims: Dims, cuts: Mapping[str, tuple[int, ...]], partial: Sequence[int]) -> Spec:
    return Spec(tuple(cuts.get(dim[0], ()) if dim else () for dim in dims), tuple(sorted(set(partial))))


def _has(dims: Dims, letter: str) -> bool:
    return any(letter in dim for dim in dims)


def _is_dims(given: Any) -> bool:
    return isinstance(given, tuple) and all(
        isinstance(dim, tuple) and all(isinstance(letter, str) for letter in dim) for dim in given
    )


def dims_of(text: str) -> Dims:
    """ "b (h d) ." -> (("b",), ("h", "d"), ())"""
    tokens = re.findall(r"\(([^)]*)\)|(\S+)", text)
    return tuple(tuple(inside.split()) if inside else () if alone == "." else (alone,) for inside, alone in tokens)
