"""Ulysses: before attention the ranks exchange heads for sequence, after it sequence for heads, each all to all.

    q, k, v[B, L_cp, H, K] -> all-to-all -> [B, L, H_cp, K] -> any `attend` of the whole sequence -> all-to-all back

Two messages a forward and two a backward; rank r gives away, of B L_cp (H + 2 J) K elements and of B L H_r K, all but
what it keeps. Attention itself is that of one rank with fewer heads: the module's own `attend`, whatever that is. Or a
ring: on two axes the ranks of the inner one exchange heads, and each then passes its heads' keys round the outer one
(Fang and Zhao 2024, USP: A Unified Sequence Parallelism Approach).

Any number of heads that is at least the ranks' will do (`HeadCut`): key/value heads are dealt out with all their query
heads; where there are fewer of them than ranks, query heads are, and the ranks that share a key/value head each get it.

Jacobs et al. 2023, DeepSpeed Ulysses, section 3.

Shapes: B batch, L length, H query heads, J key/value heads, G = H / J, K head size, N ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from core.comm.collectives import all_to_all
from core.config import UserError
from core.layout import shares
from core.mesh import CONTEXT_AXES, AnyMesh, axis_size, split_axis
from core.parallel.context import ONE_AXIS, SequenceCut, ShardedContext, head_size, heads_here
from core.parallel.grid import Side
from core.parallel.ring import elements_passed, ring_attention, ring_messages
from core.placement.style import AXIS, Message, Messages, Site, Style

Elements = Callable[[Site, slice], int]


@dataclass(frozen=True)
class HeadCut:
    """The heads that each of the ranks attends with. Shares differ by at most one (key/value) head."""

    num_heads: int
    num_kv_heads: int
    num_ranks: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def queries(self, rank: int) -> range:
        if self.num_kv_heads < self.num_ranks:
            return _share(self.num_heads, rank, self.num_ranks)
        keys = _share(self.num_kv_heads, rank, self.num_ranks)
        return range(keys.start * self.group, keys.stop * self.group)

    def keys(self, rank: int) -> range:
        """The key/value heads of the rank's query heads; a neighbour may have them, too."""
        queries = self.queries(rank)
        return range(queries.start // self.group, (queries.stop - 1) // self.group + 1)

    def sizes(self, rank: int) -> tuple[int, int, int]:
        """Heads of q, k and v at the rank."""
        return len(self.queries(rank)), len(self.keys(rank)), len(self.keys(rank))

    def spread(self, k: Tensor, rank: int) -> Tensor:
        """k[B, L, J_r, K], or with a head for each query head where the rank's are not groups of one size."""
        queries, keys = self.queries(rank), self.keys(rank)
        if len(keys) == 1 or len(queries) == len(keys) * self.group:
            return k
        index = torch.tensor([head // self.group - keys.start for head in queries], device=k.device)
        return k.index_select(2, index)


def _share(count: int, rank: int, num_ranks: int) -> range:
    return range(rank * count // num_ranks, (rank + 1) * count // num_ranks)


def ulysses_attention(axis: DeviceMesh, inner: Callable[..., Tensor], ring: DeviceMesh | None = None) -> Callable:
    """An `attend` over a sequence that the axis shards, and with `ring` the ring's ranks the axis of each.

    inner  the `attend` of what the exchange brings together: the whole sequence, or what the ring then passes round
    Its `context` is a `ShardedContext`. Raises UserError where there are fewer heads than ranks.
    """

    @torch.compiler.disable()
    def attend(
        q: Tensor, k: Tensor, v: Tensor, /, *, slopes: Tensor | None, window: int | None = None, mask: Tensor | None,
        positions: Tensor, context: ShardedContext,
    ) -> Tensor:  # fmt: skip
        cut, seen = context.cut, {"mask": context.mask_BL, "context": context.whole}
        if ring is not None:
            cut = SequenceCut(axis.size() * cut.local_length, axis.size(), cut.zigzag)
            seen = {"mask": None, "context": replace(context, cut=context.cut.coarser(axis.size()))}

        def inside(q: Tensor, k: Tensor, v: Tensor, mine: range) -> Tensor:
            own = None if slopes is None else slopes[mine.start : mine.stop]
            return inner(q, k, v, slopes=own, window=window, positions=context.positions_BL, **seen)

        return exchange(q, k, v, cut, axis, inside)

    return attend


def exchange(
    q: Tensor, k: Tensor, v: Tensor, cut: SequenceCut, axis: DeviceMesh, attend: Callable[..., Tensor]
) -> Tensor:
    """q[B, L_cp, H, K], k and v[B, L_cp, J, K] -> o[B, L_cp, H, K], by attention to the whole sequence.

    attend  (q[B, L, H_r, K], k, v, the heads of q among all) -> o[B, L, H_r, K]

    Raises UserError where there are fewer heads than ranks.
    """
    heads, rank = HeadCut(q.shape[2], k.shape[2], axis.size()), axis.get_local_rank()
    check_exchange(heads.num_heads, heads.num_ranks)
    q, k, v = _ToHeads.apply(q, k, v, heads, cut, axis)  # pyright: ignore[reportGeneralTypeIssues]
    o = attend(q, heads.spread(k, rank), heads.spread(v, rank), heads.queries(rank))
    return _ToSequence.apply(o, heads, cut, axis)  # pyright: ignore[reportReturnType]


def _refuse_exchange(num_ranks: Callable[[AnyMesh, str], int], side: Side) -> Callable[[Any, AnyMesh, str], None]:
    def refuse(attention: Any, mesh: AnyMesh, axis: str) -> None:
        tp = axis_size(mesh, side.cols) if side.cols in (mesh.mesh_dim_names or ()) else 1
        fewest = shares(attention.num_kv_heads, tp)[-1]
        group = attention.num_heads // attention.num_kv_heads
        check_exchange(group * (fewest.stop - fewest.start), num_ranks(mesh, axis))

    return refuse


def exchange_messages(
    axis: str,
    heads: Callable[[Site], tuple[int, int]],
    size: Callable[[Site], int] = head_size,
    side: Side = ONE_AXIS,
) -> Messages:
    """Heads for sequence: what a rank has of all heads; and sequence for heads: of its heads, what all ranks have.

    heads  queries' and keys', of what a rank has before, of that size
    side   where the sequences lie
    """

    def cut(site: Site) -> HeadCut:
        return HeadCut(*heads(site), site.size(axis))

    def places(site: Site) -> int:
        return side.tokens(site) * size(site)

    def of_all(site: Site, parts: slice) -> int:
        return places(site) * sum(sum(cut(site).sizes(rank)[parts]) for rank in range(site.size(axis)))

    def of_mine(site: Site, parts: slice) -> int:
        return places(site) * site.size(axis) * sum(cut(site).sizes(site.index(axis))[parts])

    def messages(given: Elements, returned: Elements) -> tuple[Message, ...]:
        each, queries = slice(None), slice(1)
        return (
            Message("all_to_all", lambda site: given(site, each), axis),
            Message("all_to_all", lambda site: returned(site, queries), axis),
        )

    return Messages(messages(of_all, of_mine), messages(of_mine, of_all))


def _by_exchange(attention: Any, axis: DeviceMesh) -> nn.Module:
    attention.attend = ulysses_attention(axis, attention.attend)
    return attention


def attend_by_ulysses(side: Side = ONE_AXIS) -> Style:
    """Attention modules with their own `attend`, over the whole sequence and a share of the heads.

    side  where tensor parallelism has their heads, and sequences
    """
    return Style(
        messages=exchange_messages(AXIS, lambda site: heads_here(site, side), side=side),
        refuse=_refuse_exchange(axis_size, side),
        wrap=_by_exchange,
    )


def attend_by_both(num_exchange: int, causal: bool = True, side: Side = ONE_AXIS) -> Style:
    """Attention modules: neighbours of `num_exchange` ranks exchange heads, rings go across them."""
    across, within = CONTEXT_AXES

    def wrap(attention: Any, axis: DeviceMesh) -> nn.Module:
        ring, exchange = split_axis(axis, num_exchange, CONTEXT_AXES)
        attention.attend = ulysses_attention(exchange, ring_attention(ring, causal=causal), ring)
        return attention

    def passed(site: Site) -> int:
        heads, rank = HeadCut(*heads_here(site, side), num_exchange), site.index(within)
        queries, keys, _ = heads.sizes(rank)
        held = keys if keys == 1 or queries == keys * heads.group else queries  # as `HeadCut.spread`
        return elements_passed(site.size(across), num_exchange * side.tokens(site), held, head_size(site))

    return Style(
        messages=exchange_messages(within, lambda site: heads_here(site, side), side=side)
        + ring_messages(passed, across),
        refuse=_refuse_exchange(lambda mesh, axis: num_exchange, side),
        wrap=wrap,
    )


def check_exchange(num_heads: int, num_ranks: int) -> None:
    """Raises UserError where some rank would have no head."""
    if num_heads < num_ranks:
        raise UserError(
            f"{num_heads} heads have none for some of the {num_ranks} ranks that exchange them; use "
            f"mesh.cp_mode=mixed with mesh.cp_ulysses of at most {num_heads}, or mesh.cp_mode=ring"
        )


class _ToHeads(Function):
    """q[B, L_cp, H, K], k and v[B, L_cp, J, K] -> q[B, L, H_r, K], k and v[B, L, J_r, K]."""

    @staticmethod
    def forward(ctx, q, k, v, heads: HeadCut, cut: SequenceCut, axis: DeviceMesh):
        ctx.constants = heads, cut, axis
        ctx.shapes = q.shape, k.shape
        ranks, rank = range(axis.size()), axis.get_local_rank()
        parts = [torch.cat((_of(q, heads.queries(r)), _of(k, heads.keys(r)), _of(v, heads.keys(r))), 2) for r in ranks]
        shape = (q.shape[0], q.shape[1], sum(heads.sizes(rank)), q.shape[3])
        joined = cut.join(all_to_all(parts, [shape for _ in ranks], axis), 1)
        return tuple(x.contiguous() for x in joined.split(heads.sizes(rank), 2))

    @staticmethod
    def backward(ctx, dq, dk, dv):
        heads, cut, axis = ctx.constants
        ranks, (q_shape, k_shape) = range(axis.size()), ctx.shapes
        whole = torch.cat((dq, dk, dv), 2)
        shapes = [(*q_shape[:2], sum(heads.sizes(r)), q_shape[3]) for r in ranks]
        found = all_to_all([cut.take(whole, 1, r) for r in ranks], shapes, axis)
        dq, dk, dv = dq.new_zeros(q_shape), dq.new_zeros(k_shape), dq.new_zeros(k_shape)
        for r, part in enumerate(found):
            of_q, of_k, of_v = part.split(heads.sizes(r), 2)
            _of(dq, heads.queries(r)).copy_(of_q)
            _of(dk, heads.keys(r)).add_(of_k)
            _of(dv, heads.keys(r)).add_(of_v)
        return dq, dk, dv, None, None, None


class _ToSequence(Function):
    """o[B, L, H_r, K] -> o[B, L_cp, H, K]."""

    @staticmethod
    def forward(ctx, o, heads: HeadCut, cut: SequenceCut, axis: DeviceMesh):
        ctx.constants = heads, cut, axis
        ranks = range(axis.size())
        shapes = [(o.shape[0], cut.local_length, len(heads.queries(r)), o.shape[3]) for r in ranks]
        return torch.cat(all_to_all([cut.take(o, 1, r) for r in ranks], shapes, axis), 2)

    @staticmethod
    def backward(ctx, grad):
        heads, cut, axis = ctx.constants
        ranks = range(axis.size())
        mine = heads.queries(axis.get_local_rank())
        shape = (*grad.shape[:2], len(mine), grad.shape[3])
        parts = [_of(grad, heads.queries(r)) for r in ranks]
        return cut.join(all_to_all(parts, [shape for _ in ranks], axis), 1), None, None, None


def _of(x_BLHK: Tensor, heads: range) -> Tensor:
    return x_BLHK[:, :, heads.start : heads.stop]
