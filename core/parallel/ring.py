"""Ring self-attention: keys and values travel round the ranks, queries stay, and no rank holds a whole row of scores.

Forward, N - 1 messages: while the own block of keys and values is on its way to the next rank, attention over it is
computed; then the block that has arrived. Each part's output is merged by its log-sum-exp:

    lse = log(exp lse_a + exp lse_b),   o = o_a exp(lse_a - lse) + o_b exp(lse_b - lse)

Backward, a second ring: keys and values travel again, and behind each block, in fp32 or wider, the gradients that the
ranks have added for it so far, until after N - 1 messages they are home. What the forward keeps is q, k, v, o and lse
of this rank's places alone. Every rank sends

    forward    (N - 1) x 2 B L_cp J K elements
    backward   (N - 1) x 2 B L_cp J K elements, and as many gradients in fp32 or wider

Under a causal mask pieces that lie after the queries are not computed; the zig-zag cut makes that alike much work for
every rank. Neither are pieces that a window hides whole; they travel all the same. Documents and padding become a bias
for one pair of pieces at a time, ALiBi the distance of their places.

Li et al. 2021, Sequence Parallelism: Long Sequence Training from System Perspective, section 3.2 (the ring); Liu et al.
2023, Ring Attention with Blockwise Transformers for Near-Infinite Context, section 3 (blockwise softmax, overlap).

Shapes: B batch, L places of this rank, H query heads, J key/value heads, K head size, N ranks.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from core.comm.collectives import pass_on
from core.kernels.partial_attention import Part, partial_attention, partial_gradients
from core.parallel.context import ONE_AXIS, SequenceCut, ShardedContext, head_size, heads_here
from core.parallel.grid import Side
from core.placement.style import AXIS, Message, Messages, Site, Style


def ring_attention(axis: DeviceMesh, *, causal: bool = True) -> Callable[..., Tensor]:
    """An `attend` over the sequence that the axis shards: q, k and v are this rank's places, and so is the result.

    Its `context` is a `ShardedContext`, whose cut is over this axis.
    """

    @torch.compiler.disable()
    def attend(
        q: Tensor, k: Tensor, v: Tensor, /, *, slopes: Tensor | None, window: int | None = None, mask: Tensor | None,
        positions: Tensor, context: ShardedContext,
    ) -> Tensor:  # fmt: skip
        whole = context.documents_BL, context.mask_BL
        pairs = _Pairs(context.cut, axis.get_local_rank(), causal, window, *whole, slopes, q.dtype)
        return _Ring.apply(q, k, v, axis, pairs)  # pyright: ignore[reportReturnType]

    return attend


def attend_to_places(q: Tensor, k: Tensor, v: Tensor, cut: SequenceCut, axis: DeviceMesh, causal: bool) -> Tensor:
    """Attention by a ring of q[B, L_cp, H, K], k and v[B, L_cp, J, K] to all places that are not padding."""
    pairs = _Pairs(cut, axis.get_local_rank(), causal, None, None, None, None, q.dtype)
    return _Ring.apply(q, k, v, axis, pairs)  # pyright: ignore[reportReturnType]


def attend_by_ring(causal: bool = True, side: Side = ONE_AXIS) -> Style:
    """Attention modules whose `attend` becomes that of a ring over the axis.

    side  where tensor parallelism has their heads, and sequences
    """

    def wrap(attention: Any, axis: DeviceMesh) -> nn.Module:
        attention.attend = ring_attention(axis, causal=causal)
        return attention

    def passed(site: Site) -> int:
        return elements_passed(site.size(), side.tokens(site), heads_here(site, side)[1], head_size(site))

    return Style(messages=ring_messages(passed), wrap=wrap)


def elements_passed(num_ranks: int, tokens: int, num_kv_heads: int, size: int) -> int:
    """Elements of its tokens' keys and values that a rank sends once round a ring."""
    return (num_ranks - 1) * 2 * tokens * num_kv_heads * size


def ring_messages(passed: Callable[[Site], int], axis: str = AXIS) -> Messages:
    """The messages of a style: keys and values in both directions, and behind them their gradients."""
    keys, gradients = Message("send", passed, axis), Message("send", passed, axis, width="wide")
    return Messages((keys,), (keys, gradients))


@dataclass(frozen=True)
class _Pairs:
    """Which pieces of the queries see which pieces of a block of keys, and how."""

    cut: SequenceCut
    rank: int
    causal: bool
    window: int | None
    documents_BL: Tensor | None
    mask_BL: Tensor | None
    slopes: Tensor | None
    dtype: torch.dtype

    def seen(self, source: int) -> Iterator[tuple[slice, slice, Part]]:
        """(queries, keys, part) of each pair with the block of rank `source`: rows of q and of the block."""
        for index, start in enumerate(self.cut.starts(self.rank)):
            for key_index, key_start in enumerate(self.cut.starts(source)):
                num_queries, num_keys = self.cut.real(start), self.cut.real(key_start)
                if num_queries and num_keys and not self._hidden(start, num_queries, key_start, num_keys):
                    queries, keys = self._local(index, num_queries), self._local(key_index, num_keys)
                    bias = self._bias(start, num_queries, key_start, num_keys)
                    causal = self.causal and start == key_start
                    yield queries, keys, Part(start - key_start, causal, bias, self.slopes, self.window)

    def _hidden(self, start: int, num_queries: int, key_start: int, num_keys: int) -> bool:
        """Return whether all keys of a piece lie after all of the queries, or too far away from them."""
        if self.causal and key_start > start:
            return True
        away = max(start - (key_start + num_keys - 1), key_start - (start + num_queries - 1))
        return self.window is not None and away >= self.window

    def _local(self, index: int, num_places: int) -> slice:
        first = index * self.cut.piece_length
        return slice(first, first + num_places)

    def _bias(self, start: int, num_queries: int, key_start: int, num_keys: int) -> Tensor | None:
        """[B, 1, queries, keys], -inf for other documents' keys and padding; every query sees itself."""
        visible = None
        if self.documents_BL is not None:
            query_BL1 = self.documents_BL[:, start : start + num_queries, None]
            visible = query_BL1 == self.documents_BL[:, None, key_start : key_start + num_keys]
        if self.mask_BL is not None:
            tokens_B1S = self.mask_BL[:, None, key_start : key_start + num_keys] != 0
            visible = tokens_B1S.expand(-1, num_queries, -1) if visible is None else visible & tokens_B1S
        if visible is None:
            return None
        if start == key_start:
            visible = visible | torch.eye(num_queries, dtype=torch.bool, device=visible.device)
        zeros = torch.zeros(visible.shape, dtype=self.dtype, device=visible.device)
        return zeros.masked_fill_(~visible, -math.inf)[:, None]


class _Ring(Function):
    @staticmethod
    def forward(ctx, q, k, v, axis: DeviceMesh, pairs: _Pairs):
        num_ranks, rank = axis.size(), axis.get_local_rank()
        wide = torch.promote_types(q.dtype, torch.float32)
        o = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=wide, device=q.device)
        block = torch.stack((k, v))
        for step in range(num_ranks):
            arrives = pass_on(block, axis) if step < num_ranks - 1 else None
            for queries, keys, part in pairs.seen((rank - step) % num_ranks):
                found = partial_attention(q[:, queries], block[0, :, keys], block[1, :, keys], part)
                _merge(o[:, queries], lse[:, :, queries], *found)
            if arrives is not None:
                block = arrives()
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.axis, ctx.pairs = axis, pairs
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        num_ranks, rank = ctx.axis.size(), ctx.axis.get_local_rank()
        wide = torch.promote_types(q.dtype, torch.float32)
        dq = torch.zeros(q.shape, dtype=wide, device=q.device)
        block, own, sums_arrive = torch.stack((k, v)), None, None
        for step in range(num_ranks):
            arrives = pass_on(block, ctx.axis) if step < num_ranks - 1 else None
            dblock = torch.zeros(block.shape, dtype=wide, device=q.device)
            for queries, keys, part in ctx.pairs.seen((rank - step) % num_ranks):
                key_rows, whole = block[:, :, keys], (o[:, queries], lse[:, :, queries])
                dq_rows, dk_rows, dv_rows = partial_gradients(
                    do[:, queries], q[:, queries], key_rows[0], key_rows[1], *whole, part
                )
                dq[:, queries] += dq_rows
                dblock[0, :, keys] += dk_rows
                dblock[1, :, keys] += dv_rows
            if arrives is not None:
                block = arrives()
            if step == 0:
                own = dblock  # the others' parts of it arrive last
                continue
            if sums_arrive is not None:
                dblock += sums_arrive()
            sums_arrive = pass_on(dblock, ctx.axis)
        assert own is not None
        if sums_arrive is not None:
            own += sums_arrive()
        dk, dv = own.to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None


def _merge(o: Tensor, lse: Tensor, o_part: Tensor, lse_part: Tensor) -> None:
    """Add a part's attention to what has been seen, in place; where neither has a visible key, nothing."""
    merged = torch.logaddexp(lse, lse_part)
    finite = merged.masked_fill(merged == -math.inf, 0.0)
    o.mul_(_by_query(torch.exp(lse - finite))).addcmul_(o_part.to(o.dtype), _by_query(torch.exp(lse_part - finite)))
    lse.copy_(merged)


def _by_query(x_BHL: Tensor) -> Tensor:
    return x_BHL.transpose(1, 2)[..., None]
