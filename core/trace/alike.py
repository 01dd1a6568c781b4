"""Blocks that are alike: a step is traced with a few of them, and told of any number.

1. `alike_blocks` finds module lists whose blocks repeat: each has the class, shapes, formats and plain attributes of
   the one a period before it, down to its submodules. Attributes that count the blocks (`layer_idx`) set none apart.
2. The step is traced with a few periods, and once more for every list with one more period in the middle.
3. `grown` compares them section by section: a section is what runs between two marks, where a block's forward begins or
   ends and where its backward begins.

Why that is exact. In a model with n periods every moment of the step is that of a block counted from the front of its
list or from the back, or of no block. Each period adds the same bytes before or behind such a moment, so what is alive
then, as messages and FLOPs of the step, is affine in n, and two numbers of periods give it for all. Between the ends it
is affine in the block's number, too, so that the fullest block is one next to an end, which the few have: they keep one
period at each end, where neighbours differ, and at least one between them. What depends on n otherwise is not left to
this: messages of several blocks (`Growth.period` is a multiple of what they repeat after), matrices dealt out by cost.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

_PLAIN = (type(None), bool, int, float, str, torch.dtype)
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


class NotAlike(Exception):
    """Blocks that look alike do not run alike."""


@dataclass(frozen=True)
class AlikeBlocks:
    """Blocks `start` to `stop` of a module list, the kinds of which repeat after `period`."""

    name: str
    start: int
    stop: int
    period: int


def alike_blocks(
    model: nn.Module, beside: Callable[[str, int], Hashable] = lambda name, index: None, *, copied: bool = True
) -> list[AlikeBlocks]:
    """The runs of alike blocks in the model's outermost module lists: at most one a list, whole and unshared.

    beside  (list, place in it) -> what else sets a block apart, such as the plan's words of it
    copied  whether they are to be: then none in a model whose modules have been given other forwards or hooks
    """
    found, inside = [], set()
    if copied and any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return []
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inside:
            inside |= {id(m) for m in module.modules()}
            repeated = _repeated(_kinds(module, [beside(name, index) for index in range(len(module))]))
            if repeated is not None and all(uses[id(parameter)] == 1 for parameter in module.parameters()):
                found.append(AlikeBlocks(name, *repeated))
    return found


def _repeated(kinds: Sequence[Any]) -> tuple[int, int, int] | None:
    """(start, stop, period) of the stretch that goes on longest behind its first four periods; None without any."""
    best, most = None, 0
    for period in range(1, len(kinds) // 5 + 1):
        start = 0
        for index in range(len(kinds) - period + 1):
            if index + period < len(kinds) and kinds[index] == kinds[index + period]:
                continue
            if (saved := index + period - start - 4 * period) > most:
                best, most = (start, index + period, period), saved
            start = index + 1
    return best


def _kinds(blocks: nn.ModuleList, beside: Sequence[Hashable]) -> list[dict[Any, Any]]:
    kinds = [_facts(block) | {"beside": fact} for block, fact in zip(blocks, beside, strict=True)]
    for key, first in list(kinds[0].items()) if kinds else ():
        numbers = ((index, kind[key]) for index, kind in enumerate(kinds) if key in kind)
        if type(first) is int and len(kinds) > 1 and all(number == first + index for index, number in numbers):
            for kind in kinds:
                kind.pop(key, None)
    return kinds


def _facts(block: nn.Module) -> dict[Any, Any]:
    """All that the step can depend on and that is told without running it, by submodule and attribute."""
    facts: dict[Any, Any] = {}
    for path, module in block.named_modules():
        facts[path, ""] = type(module)
        facts |= {(path, name): _fact(v) for name, v in vars(module).items() if name not in _OF_EVERY_MODULE}
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            facts[path, name] = tensor if tensor is None else (tensor.shape, tensor.dtype, tensor.requires_grad)
    return facts


def _fact(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_fact, value))
    return getattr(value, "__qualname__", type(value))


# --- fewer of them ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Growth:
    """Alike blocks of a list, all in one stage of it, cut down to `few`, and grown by periods.

    name    of the list
    blocks  their places in the whole list
    first   place of the first of them in the list that is cut down
    period  of their kinds and of all else that repeats with them
    back    blocks at the end whose edges differ: messages that have not begun to repeat
    front   blocks beside the first period whose edges differ: nothing is gathered ahead of the first block's backward
    """

    name: str
    blocks: range
    first: int
    period: int
    back: int = 0
    front: int = 0

    @property
    def few(self) -> int:
        """A period at each end and one between, those whose edges differ, and what is no whole period."""
        least = 3 * self.period + self.front + self.back
        return least + (len(self.blocks) - least) % self.period

    @property
    def steps(self) -> int:
        """Periods that are left out."""
        return (len(self.blocks) - self.few) // self.period

    def kept(self, number: int) -> Sequence[int]:
        """Their places in the whole list, where so many are left: those in the middle go."""
        first = self.period + self.front
        return [*self.blocks[:first], *self.blocks[len(self.blocks) - (number - first) :]]

    def partners(self, index: int) -> Sequence[int]:
        """Places of a block of the few where there is one period more, by those before it and by those behind it."""
        place = index - self.first
        by_front = [index] if place < self.few - self.period - self.back else []
        return by_front + ([index + self.period] if place >= self.period + self.front else [])


Part = range | Growth


@dataclass(frozen=True)
class Cut:
    """A module list by its name, in stages one behind the other, and these in parts: places of blocks that stay."""

    name: str
    stages: tuple[tuple[Part, ...], ...]

    @property
    def growths(self) -> Sequence[Growth]:
        return [part for stage in self.stages for part in stage if isinstance(part, Growth)]

    def kept(self, longer: Growth | None = None) -> Sequence[Sequence[int]]:
        """Places in the whole list of what stays of each stage; of one growth, with one period more."""
        return [[place for part in stage for place in _kept(part, longer)] for stage in self.stages]


def _kept(part: Part, longer: Growth | None) -> Sequence[int]:
    return part if isinstance(part, range) else part.kept(part.few + part.period * (part == longer))


def shortened(model: nn.Module, cuts: Sequence[Cut], longer: Growth | None = None) -> nn.Module:
    """A copy of a model on the meta device with the blocks that stay; without cuts the model itself."""
    if not cuts:
        return model
    lists = {cut: model.get_submodule(cut.name) for cut in cuts}
    whole = {cut: dict(blocks._modules) for cut, blocks in lists.items()}
    try:
        for cut, blocks in lists.items():
            places = [place for stage in cut.kept(longer) for place in stage]
            blocks._modules = {str(index): whole[cut][str(place)] for index, place in enumerate(places)}
        return copy.deepcopy(model)
    finally:
        for cut, blocks in lists.items():
            blocks._modules = whole[cut]


# --- the same step with more of them ----------------------------------------------------------------------------------


class Label(NamedTuple):
    """A mark: what begins there, and of which block of which list."""

    what: Any
    name: str = ""
    place: int = 0


Maker = tuple[Any, tuple[tuple[int, ...], ...]]
"""What made bytes come to be, and the shapes of its tensors."""


@dataclass
class Section:
    """What runs between two marks: what made bytes come to be, and how many were alive then."""

    label: Label
    phase: Any = None
    makers: list[Maker] = field(default_factory=list)
    alive_bytes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Traced:
    """A step's sections in their order, and its sums: bytes by kind, FLOPs, messages, whatever adds up over blocks."""

    sums: Mapping[Any, float]
    sections: Sequence[Section]

    def placed(self) -> Iterator[tuple[tuple[Label, int], Section]]:
        """Each section with its label and how many of that label came before it."""
        seen: Counter[Label] = Counter()
        for section in self.sections:
            yield (section.label, seen[section.label]), section
            seen[section.label] += 1


def grown(few: Traced, more: Sequence[tuple[Growth, Traced]] = ()) -> tuple[dict[Any, float], dict[Any, int]]:
    """(sums, most bytes alive in each phase) of the step of the whole model.

    more  for each list, the step with one period more of its blocks

    Raises NotAlike where their sections do not fit each other.
    """
    sums = dict(few.sums)
    for growth, traced in more:
        for key in {**few.sums, **traced.sums}:
            sums[key] = sums.get(key, 0) + growth.steps * (traced.sums.get(key, 0) - few.sums.get(key, 0))
    known = [(growth, dict(traced.placed())) for growth, traced in more]
    phases: dict[Any, int] = {}
    for place, section in few.placed():
        rises = [_rises(section, place, growth, sections) for growth, sections in known]
        alive = (sum(at) for at in zip(section.alive_bytes, *rises, strict=True))
        phases[section.phase] = max(phases.get(section.phase, 0), *alive)
    return sums, phases


def _rises(section: Section, place: tuple[Label, int], growth: Growth, sections: Mapping[Any, Section]) -> list[int]:
    """Bytes that each moment of a section has more when all periods are there."""
    label, number = place
    places = growth.partners(label.place) if label.name == growth.name else [label.place]
    rises = [[] for _ in section.alive_bytes]
    for at in places:
        other = sections.get((label._replace(place=at), number))
        if other is None:
            raise NotAlike(f"{label} {number} is missing with more blocks")
        for rise, alive, found in zip(rises, section.alive_bytes, _same_moments(section, other), strict=True):
            rise += [growth.steps * (n - alive) for n in found]
    return [max(rise) for rise in rises]


def _same_moments(section: Section, other: Section) -> list[list[int]]:
    """Of each moment of a section, the bytes at that moment of the other, which may have more of them in its loops over
    parameters: counted from the front of a loop, and from its back.
    """
    ours, theirs = section.makers, other.makers
    if len(ours) == len(theirs) and all(a[0] == b[0] for a, b in zip(ours, theirs)):
        return [[n] for n in other.alive_bytes]
    front, back = _places(ours, theirs), _places(ours[::-1], theirs[::-1])
    if section.label.name or front is None or back is None:
        raise NotAlike(f"{section.label} does other things with more blocks")
    from_back = [len(theirs) - 1 - place for place in reversed(back)]
    return [[other.alive_bytes[place] for place in places] for places in zip(front, from_back, strict=True)]


def _places(ours: Sequence[Maker], theirs: Sequence[Maker]) -> list[int] | None:
    """The first places at which ours stand in theirs in the same order; None where they do not."""
    places, start = [], 0
    for maker in ours:
        rest = range(start, len(theirs))
        place = next((place for place in rest if theirs[place] == maker), None)
        if place is None:
            place = next((place for place in rest if _is_of_more(theirs[place], maker)), None)
        if place is None:
            return None
        places.append(place)
        start = place + 1
    return places


def _is_of_more(theirs: Maker, ours: Maker) -> bool:
    """Return whether the same was made of more parameters: a row for each, or a list of tensors."""
    (maker, shapes), (other, fewer) = theirs, ours
    if maker != other:
        return False
    if len(shapes) == len(fewer) == 1:
        (shape,), (less,) = shapes, fewer
        return shape[1:] == less[1:] and shape[:1] > less[:1]
    rest = iter(shapes)
    return all(shape in rest for shape in fewer)
