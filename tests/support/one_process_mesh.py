"""A mesh in one process: an operator runs on the parts that a strategy gives to every rank, and the parts are combined.

Partial sums are asymmetric and of either sign: what holds for equal or for positive parts alone is seen.
Nothing of `core.layout` or of the rules' own arithmetic is used: parts are what `torch.chunk` makes of places.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from core.auto.rule import Rule, Spec, Strategy

Coordinate = tuple[int, ...]


def faults(rule: Rule, mesh: Sequence[int], every: int = 1) -> Iterator[str]:
    """What is wrong with the rule of a call whose tensors are real: of every so many of its strategies."""
    for strategy in rule.strategies(mesh)[::every]:
        if said := fault(rule, strategy, mesh):
            yield f"{rule.call.op} {strategy} on {'x'.join(map(str, mesh))}: {said}"


def fault(rule: Rule, strategy: Strategy, mesh: Sequence[int]) -> str | None:
    """Why this strategy does not compute what the operator does; None if it does."""
    ranks = list(itertools.product(*map(range, mesh)))
    parts: dict[Coordinate, list[Tensor]] = {rank: [] for rank in ranks}
    for seed, (whole, spec) in enumerate(zip(rule.call.inputs, strategy.inputs, strict=True)):
        for rank, part in _spread(whole, spec, mesh, seed).items():
            parts[rank].append(part)
    try:
        made = _run(rule, strategy, mesh, parts)
    except (RuntimeError, IndexError, AssertionError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    for n, (expected, spec) in enumerate(zip(rule.call.outputs, strategy.outputs, strict=True)):
        if expected is None or spec is None:
            continue
        found = {rank: _several(outputs)[n] for rank, outputs in made.items()}
        if said := _difference(found, expected, spec, mesh):
            return f"output {n}: {said}"
    return None


def _several(outputs: Any) -> Sequence[Any]:
    return outputs if isinstance(outputs, (tuple, list)) else (outputs,)


def _places(spec: Spec, shape: Sequence[int], mesh: Sequence[int], rank: Coordinate) -> list[Tensor]:
    """Of every dim the places that a rank holds."""
    held = []
    for size, axes in zip(shape, spec.dims, strict=True):
        places = torch.arange(size)
        for axis in axes:
            chunks = places.chunk(mesh[axis])
            places = chunks[rank[axis]] if rank[axis] < len(chunks) else places[:0]
        held.append(places)
    return held


def _spread(whole: Tensor, spec: Spec, mesh: Sequence[int], seed: int) -> dict[Coordinate, Tensor]:
    addends = _addends(whole, [mesh[axis] for axis in spec.partial], seed)
    found = {}
    for rank in itertools.product(*map(range, mesh)):
        addend = addends[tuple(rank[axis] for axis in spec.partial)]
        held = _places(spec, whole.shape, mesh, rank)
        found[rank] = addend[torch.meshgrid(*held, indexing="ij")].clone() if held else addend.clone()
    return found


def _addends(whole: Tensor, sizes: Sequence[int], seed: int) -> dict[Coordinate, Tensor]:
    """One for every rank of the partial axes: large, of either sign, and with the whole as their sum."""
    places = list(itertools.product(*map(range, sizes)))
    generator = torch.Generator().manual_seed(seed)
    found = {
        place: (n + 1.5) * torch.randn(whole.shape, generator=generator, dtype=torch.float64).to(whole.dtype)
        for n, place in enumerate(places[:-1])
    }
    return found | {places[-1]: whole - sum(found.values()) if found else whole}


def _run(rule: Rule, strategy: Strategy, mesh: Sequence[int], parts: dict[Coordinate, list[Tensor]]) -> dict[Any, Any]:
    axes = rule.talks_over(dict(strategy.cuts))
    if not axes or rule.talk is None:
        return {rank: rule.run(given, rule.here(strategy, mesh, rank)) for rank, given in parts.items()}
    groups: dict[Coordinate, list[Coordinate]] = {}
    for rank in parts:
        groups.setdefault(tuple(place for axis, place in enumerate(rank) if axis not in axes), []).append(rank)
    made: dict[Coordinate, Any] = {}
    for group in groups.values():
        talks = {rank: rule.talk.run(parts[rank], rule.here(strategy, mesh, rank)) for rank in group}
        said = {rank: next(talk) for rank, talk in talks.items()}
        for message in strategy.messages:
            assert message.axes == axes
            assert all(one.tensor.numel() <= message.elements for one in said.values()), "a message is longer than said"
            stacked = torch.stack([one.tensor for one in said.values()])
            heard = stacked.amax(0) if said[group[0]].kind == "max" else stacked.sum(0)
            said = {}
            for rank, talk in talks.items():
                try:
                    said[rank] = talk.send(heard)
                except StopIteration as ended:
                    made[rank] = ended.value
        assert not said, "more is said than the strategy has messages"
    return made


def _difference(found: dict[Coordinate, Tensor], expected: Tensor, spec: Spec, mesh: Sequence[int]) -> str | None:
    """Combine the parts of all ranks, and hold the whole against what is expected."""
    used = {axis for axes in spec.dims for axis in axes} | set(spec.partial)
    whole = torch.zeros_like(expected)
    for rank, part in found.items():
        home = tuple(place if axis in used else 0 for axis, place in enumerate(rank))
        if not _near(part, found[home]):
            return f"ranks {rank} and {home} should hold the same"
        if home != rank:
            continue
        held = _places(spec, expected.shape, mesh, rank)
        shape = tuple(len(places) for places in held)
        if tuple(part.shape) != shape:
            return f"rank {rank} holds {tuple(part.shape)}, not {shape}"
        where = torch.meshgrid(*held, indexing="ij") if held else ()
        whole[where] = whole[where] + part if spec.partial else part
    return None if _near(whole, expected) else f"{whole.flatten()[:3].tolist()}, not {expected.flatten()[:3].tolist()}"


def _near(found: Tensor, expected: Tensor) -> bool:
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    scale = 1e-10 * max(1.0, float(expected.abs().max()) if expected.numel() else 0.0)
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-10, atol=scale, equal_nan=True)
