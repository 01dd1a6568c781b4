"""Updates that need whole matrices, of parameters that are sharded in any way: each matrix has a home rank.

1. every rank sends to a matrix's home what it holds of its gradient           -> one all-to-all
   meanwhile: what needs nothing of others takes its whole step
2. the home updates its state, which lies there alone, and makes the update of the whole
   of one matrix after the other, which is applied here at once
3. every other rank gets the part of the update that it holds a part of        -> one all-to-all

So a step sends two messages among the ranks that have a stage's parameters between them, whatever the layout and the
number of matrices, and each matrix is worked on once. What several ranks hold alike, one of them sends: the home, where
it is among them. Homes are dealt out by cost, alike on every rank and without a message (`balanced`).

A matrix that no mesh is known of is this rank's alone.
"""

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from core.layout import Layout, Slice, Stretches, boxes_of, shape_of, tag, taken
from core.mesh import device_of, seen_from, stage_group
from core.optim.sharded import Batch, Held, ShardedOptimizer, own, wide_dtype


def balanced(costs: Sequence[float], num_ranks: int, before: Sequence[float] | None = None) -> list[int]:
    """The rank of each item, so that the busiest rank has little more to do than it must.

    The costliest first, each to the rank that has least (Graham 1969); then the busiest gives an item away, or changes
    one for a cheaper one, as long as that relieves it.

    before  what each rank has to do beside; None: nothing
    """
    before = [0.0] * num_ranks if before is None else before
    loads, items = [*before], [set[int]() for _ in range(num_ranks)]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(num_ranks), key=lambda r: (loads[r], r))
        items[rank].add(item)
        loads[rank] += costs[item]
    while (change := _relief(costs, loads, items)) is not None:
        for rank, gone, come in change:
            items[rank] = items[rank] - gone | come
            loads[rank] = before[rank] + sum(costs[item] for item in sorted(items[rank]))
    rank_of = {item: rank for rank, mine in enumerate(items) for item in mine}
    return [rank_of[item] for item in range(len(costs))]


_Change = tuple[int, set[int], set[int]]
"""rank, the items that it gives, those that it takes"""


def _relief(costs: Sequence[float], loads: list[float], items: list[set[int]]) -> tuple[_Change, _Change] | None:
    """An exchange of the busiest rank with another, after which both have less than it had; best with the idlest."""
    busiest = max(range(len(loads)), key=lambda r: (loads[r], -r))
    mine = {costs[item]: {item} for item in sorted(items[busiest], reverse=True)}  # of equal costs the first
    for other in sorted(range(len(loads)), key=lambda r: (loads[r], r)):
        gap = loads[busiest] - loads[other]
        theirs = {0.0: set[int]()} | {costs[item]: {item} for item in sorted(items[other], reverse=True)}
        gains = {(min(a - b, gap - a + b), a, b) for a in mine for b in theirs}
        gain, given, taken = max(gains, default=(0.0, 0.0, 0.0))
        if gain > 1e-12 * gap:
            return (busiest, mine[given], theirs[taken]), (other, theirs[taken], mine[given])
    return None


@dataclass(frozen=True)
class Piece:
    """A part of a matrix that goes from rank to rank.

    matrix  its place among all of the pool
    held    its indices
    """

    matrix: int
    source: int
    dest: int
    held: Stretches

    @property
    def size(self) -> int:
        return _size(self.held)

    def of(self, whole: Tensor) -> Tensor:
        return taken(whole, self.held)

    def put(self, part: Tensor, whole: Tensor) -> None:
        for here, there in boxes_of(self.held):
            whole[there].copy_(part[here])


def pieces_to_home(held: Sequence[Sequence[Stretches]], homes: Sequence[int]) -> Iterator[Piece]:
    """The pieces that make every home's matrices whole, each element once.  held: [rank][matrix]"""
    for matrix, home in enumerate(homes):
        holders: dict[Stretches, list[int]] = {}
        for rank, of_rank in enumerate(held):
            if _size(of_rank[matrix]):
                holders.setdefault(of_rank[matrix], []).append(rank)
        for part, ranks in holders.items():
            yield Piece(matrix, home if home in ranks else ranks[matrix % len(ranks)], home, part)


def pieces_from_home(held: Sequence[Sequence[Stretches]], homes: Sequence[int]) -> Iterator[Piece]:
    """The pieces that bring every rank what it holds of each matrix."""
    for matrix, home in enumerate(homes):
        yield from (Piece(matrix, home, r, own[matrix]) for r, own in enumerate(held) if _size(own[matrix]))


def held_by(layouts: Sequence[Layout | Slice], ranks: Sequence[int]) -> list[list[Stretches]]:
    """[rank][matrix]: what each rank holds, by its place in the mesh; without a mesh what this one holds."""
    meshes = {id(layout.mesh): layout.mesh for layout in layouts if isinstance(layout.mesh, DeviceMesh)}
    seen = {key: seen_from(mesh, ranks) for key, mesh in meshes.items()}

    def stretches(layout: Layout | Slice, at: int) -> Stretches:
        view = layout.on(seen[id(layout.mesh)][at]) if id(layout.mesh) in seen else layout
        return view.stretches()

    return [[stretches(layout, at) for layout in layouts] for at in range(len(ranks))]


def _size(held: Stretches) -> int:
    return math.prod(shape_of(held))


class Pool:
    """The matrices that go home among the ranks of one stage, and what each of these holds of them.

    homes  the rank of each, within the group
    """

    def __init__(self, layouts: Mapping[Any, Layout | Slice], costs: Sequence[float]):
        """layouts: of each matrix, by what it is asked for with: its parameter, or another key."""
        self.index = {key: index for index, key in enumerate(layouts)}
        self.layouts = list(layouts.values())
        meshes = [layout.mesh for layout in self.layouts if isinstance(layout.mesh, DeviceMesh)]
        self.group = stage_group(max(meshes, key=lambda mesh: mesh.size())) if meshes else None
        self.device = device_of(meshes[0]) if meshes else torch.device("cpu")
        self.rank, self.num_ranks = (self.group.rank(), self.group.size()) if self.group else (0, 1)
        self.homes = balanced(costs, self.num_ranks)
        self._ways: tuple[list[Piece], list[Piece]] | None = None

    def home_of(self, key: Any) -> int | None:
        """The home of a matrix; None for one that is this rank's alone."""
        index = self.index[key]
        return None if self.num_ranks == 1 or self.layouts[index].mesh is None else self.homes[index]

    def ways(self) -> tuple[list[Piece], list[Piece]]:
        """This rank's pieces on the way home, and on the way back."""
        if self._ways is None:
            held = held_by(self.layouts, dist.get_process_group_ranks(self.group))
            both = pieces_to_home(held, self.homes), pieces_from_home(held, self.homes)
            there, back = ([p for p in way if self.rank in (p.source, p.dest)] for way in both)
            self._ways = there, back
        return self._ways


class Message:
    """Pieces on their way between ranks, in one all-to-all: `put` those that are `going`, `send`, `wait` for others'.

    own    what this rank has for itself, which is not sent
    dtype  of all that is sent, alike on all ranks
    """

    def __init__(self, pool: Pool, pieces: Iterable[Piece], dtype: torch.dtype):
        pieces = list(pieces)
        between = [p for p in pieces if p.source != p.dest]
        self._pool, self.dtype = pool, dtype
        self._coming = sorted((p for p in between if p.dest == pool.rank), key=_from)
        self.own = [p for p in pieces if p.source == p.dest]
        self.going = sorted((p for p in between if p.source == pool.rank), key=_to)
        sizes = [piece.size for piece in self.going]
        self._sent = torch.empty(sum(sizes), dtype=dtype, device=pool.device)
        self._slots = dict(zip(map(_to, self.going), self._sent.split(sizes), strict=True)) if sizes else {}

    def put(self, piece: Piece, part: Tensor) -> None:
        self._slots[_to(piece)].view(part.shape).copy_(part)

    def send(self) -> None:
        going, coming = Counter[int](), Counter[int]()
        for piece in self.going:
            going[piece.dest] += piece.size
        for piece in self._coming:
            coming[piece.source] += piece.size
        sizes = [[count[rank] for rank in range(self._pool.num_ranks)] for count in (coming, going)]
        self._came = self._sent.new_empty(coming.total())
        self._work = dist.all_to_all_single(self._came, self._sent, *sizes, group=self._pool.group, async_op=True)

    def wait(self) -> list[tuple[Piece, Tensor]]:
        """What has come here; its memory is the message's."""
        assert self._work is not None
        self._work.wait()
        del self._sent, self._slots
        sizes = [piece.size for piece in self._coming]
        parts = self._came.split(sizes) if sizes else ()
        return [(piece, part.view(shape_of(piece.held))) for piece, part in zip(self._coming, parts, strict=True)]


def _to(piece: Piece) -> tuple[int, int]:
    return piece.dest, piece.matrix


def _from(piece: Piece) -> tuple[int, int]:
    return piece.source, piece.matrix


def sent_home(pool: Pool, pieces: Iterable[Piece], grads: Mapping[int, Tensor], dtype: torch.dtype) -> Message:
    """The message that brings gradients home.  grads: matrix -> what this rank holds of its gradient"""
    message = Message(pool, pieces, dtype)
    for piece in message.going:
        message.put(piece, grads[piece.matrix])
    message.send()
    return message


class Parts:
    """The parts of the gradients of matrices whose home this is, after the way there.

    Each matrix is put together when it is asked for, so that only one of them is there twice, and in the cache.
    """

    def __init__(self, message: Message, grads: Mapping[int, Tensor]):
        self._parts: dict[int, list[tuple[Piece, Tensor]]] = {}
        for piece, part in [*((piece, grads[piece.matrix]) for piece in message.own), *message.wait()]:
            self._parts.setdefault(piece.matrix, []).append((piece, part))

    def matrices(self) -> list[int]:
        return sorted(self._parts)

    def whole(self, matrix: int, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The whole gradient, on the device of another tensor; where one part is all of it, that."""
        parts = self._parts.pop(matrix)
        if parts[0][0].held == tuple((range(n),) for n in shape):
            return parts[0][1].to(like.device, dtype)
        whole = like.new_empty(shape, dtype=dtype)
        for piece, part in parts:
            piece.put(part, whole)
        return whole


class WholeMatrixOptimizer(ShardedOptimizer):
    """An optimizer some of whose groups are updated as whole matrices, each at its home; the others where they lie.

    The state of such a matrix lies at its home, and nothing of it elsewhere: a checkpoint holds it under the
    parameter's name, and on another mesh it has another home.
    """

    _pool: Pool | None = None

    @abstractmethod
    def _is_whole(self, options: dict[str, Any]) -> bool:
        """Return whether the parameters of a group are updated as whole matrices."""

    @abstractmethod
    def _cost(self, shape: tuple[int, ...], options: dict[str, Any]) -> float:
        """The work of a matrix's update at its home, relative to others."""

    @abstractmethod
    def _home_state(self, shape: tuple[int, ...], options: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """State tensor -> its shape, of a matrix of that shape in a group of those options; all begin as zeros."""

    @abstractmethod
    def _direction(self, grad: Tensor, h: Held, batch: Batch) -> Tensor:
        """At home: the update of the whole matrix, whose state goes on.  grad: whole, in the batch's wide dtype"""

    def _update_dtype(self, batch: Batch) -> torch.dtype:
        """The format of updates on their way back; alike on all ranks, and one that holds what `_direction` returns."""
        return batch.wide

    @abstractmethod
    def _move(self, h: Held, update: Tensor, batch: Batch) -> None:
        """Apply to what this rank holds its part of the update."""

    @abstractmethod
    def _update_parts(self, batches: list[Batch]) -> None:
        """One step of the other groups."""

    def takes_whole(self, parameter: Tensor) -> bool:
        """Return whether a parameter's state lies whole at a home, where ranks share it."""
        return self._is_whole(self._options_of(parameter))

    def _pool_of(self, parameter: Tensor) -> Pool:
        """The pool of the matrices that there are; made anew where they are others than before."""
        if self._pool is None or parameter not in self._pool.index:
            matrices = [(p, group) for group in self.param_groups if self._is_whole(group) for p in group["params"]]
            costs = [self._cost(self.place(p).layout.shape, group) for p, group in matrices]
            self._pool = Pool({p: self.place(p).layout for p, _ in matrices}, costs)
        return self._pool

    def _ensure_state(self, parameter: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        state = super()._ensure_state(parameter, options)
        pool = self._pool_of(parameter) if self._is_whole(options) else None
        if pool is not None and pool.home_of(parameter) not in (None, pool.rank):
            for key, value in state.items():
                if key != "step" and value.numel():  # it was whole on every rank before
                    state[key] = self._new_state(parameter, options)[key]
        return state

    def _new_state(self, parameter: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        whole, value = self.place(parameter).layout.shape, self.place(parameter).shaped(own(parameter))
        made = {}
        for key, shape in self._home_state(whole, options).items():
            if self._pool_of(parameter).home_of(parameter) is None and shape == whole:
                made[key] = self._zeros(parameter)
            else:
                layout = self._lies(parameter, key)
                made[key] = tag(value.new_zeros(layout.local_shape(), dtype=wide_dtype(parameter.dtype)), layout)
        return made

    def _lies(self, parameter: Tensor, key: str) -> Layout:
        options = self._options_of(parameter)
        pool = self._pool_of(parameter) if self._is_whole(options) else None
        if pool is None or key == "step":
            return super()._lies(parameter, key)
        home, whole = pool.home_of(parameter), self.place(parameter).layout.shape
        shape = self._home_state(whole, options)[key]
        if home is None and shape == whole:
            return super()._lies(parameter, key)
        return Layout(shape, absent=home not in (None, pool.rank))

    def _update(self, batches: list[Batch]) -> None:
        whole = [(h, batch) for batch in batches if self._is_whole(batch.options) for h in batch.held]
        shared = {}
        for h, batch in whole:
            pool = self._pool_of(h.parameter)
            if pool.home_of(h.parameter) is not None:
                shared[pool.index[h.parameter]] = h, batch
            elif h.value.numel():
                self._move(h, self._direction(h.grad.to(batch.wide), h, batch), batch)
        others = [batch for batch in batches if not self._is_whole(batch.options)]
        if not shared:
            self._update_parts(others)
            return
        grads = {matrix: h.grad for matrix, (h, _) in shared.items()}
        there, back = ([p for p in way if p.matrix in shared] for way in pool.ways())
        gradients = sent_home(pool, there, grads, _widest(batch.wide for _, batch in shared.values()))
        self._update_parts(others)
        updates = Message(pool, back, _widest(self._update_dtype(batch) for _, batch in shared.values()))
        self._update_homes(pool, Parts(gradients, grads), shared, updates)
        del gradients
        updates.send()
        for piece, update in updates.wait():
            h, batch = shared[piece.matrix]
            self._move(h, update.to(h.value.device), batch)

    def _update_homes(
        self, pool: Pool, parts: Parts, shared: Mapping[int, tuple[Held, Batch]], updates: Message
    ) -> None:
        """Make the updates whose home this is: apply them to what lies here, and put the rest into the message."""
        going: dict[int, list[Piece]] = {}
        for piece in updates.going:
            going.setdefault(piece.matrix, []).append(piece)
        own = {piece.matrix: piece for piece in updates.own}
        for matrix in parts.matrices():
            h, batch = shared[matrix]
            grad = parts.whole(matrix, h.value, pool.layouts[matrix].shape, batch.wide)
            update = self._direction(grad, h, batch)
            for piece in going.get(matrix, ()):
                updates.put(piece, piece.of(update))
            if matrix in own:
                self._move(h, own[matrix].of(update), batch)


def _widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    return reduce(torch.promote_types, dtypes)
