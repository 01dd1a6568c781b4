"""Context parallelism: every activation is sharded along the sequence, from the embedding to the loss.

    tokens[B, L] -> take -> tokens[B, L_cp] -> model, whose `attend` sees the whole -> sum of losses{cp} -> all-reduce

1. `shard_sequence`, a style for the whole model: each rank takes its places of the sequence (`SequenceCut`) of ids,
   positions and targets. Targets were shifted before, so none is lost where two ranks meet. The loss that comes back is
   that of the whole sequence on every rank, and logits are whole, so who calls the model sees no difference.
2. Parameters are replicated over the axis, or sharded over it by ZeRO; their gradients are partial sums, which data
   parallelism adds up together with its own.
3. Attention needs the keys of the other ranks: `core.parallel.ring` and `core.parallel.ulysses` fit the `attend` slot.
   They find the cut, and what concerns the whole sequence (documents, padding), in the forward's `context`.

Zig-zag: under a causal mask the last tokens see the most keys. Of 2N pieces, rank r holds the r-th from the front and
the r-th from the back, so that every rank computes alike much (Brandon et al. 2023, Striped Attention, names the
problem; this cut is that of Llama 3's training, Grattafiori et al. 2024, section 3.3.2).

A length that the pieces do not divide is padded once, behind the last token; no attention looks at the padding.

Shapes: B batch, L length, N ranks of the axis, P pieces of a rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from core.comm.collectives import all_gather, reduce_from, reduce_scatter
from core.config import UserError
from core.parallel.grid import Side
from core.placement.style import Message, Messages, Site, Style

ONE_AXIS = Side((), "tp")
"""Attention's activations under 1d tensor parallelism: heads over tp, all sequences everywhere."""

_IGNORED = -100


@dataclass(frozen=True)
class SequenceCut:
    """The places of a sequence that each rank holds: one piece in order, or with `zigzag` one from each end.

    length  of the sequence, without padding
    """

    length: int
    num_ranks: int
    zigzag: bool

    @property
    def pieces(self) -> int:
        """Pieces of one rank."""
        return 2 if self.zigzag else 1

    @property
    def piece_length(self) -> int:
        return -(-self.length // (self.pieces * self.num_ranks))

    @property
    def local_length(self) -> int:
        """Places of one rank, padding included."""
        return self.pieces * self.piece_length

    def starts(self, rank: int) -> tuple[int, ...]:
        """The begins of a rank's pieces, in ascending order."""
        last = 2 * self.num_ranks - 1 - rank
        return tuple(self.piece_length * n for n in ((rank, last) if self.zigzag else (rank,)))

    def places(self, rank: int, device: torch.device) -> Tensor:
        """The indices of a rank's places, padding included, which counts on behind the sequence."""
        pieces = (torch.arange(start, start + self.piece_length, device=device) for start in self.starts(rank))
        return torch.cat(list(pieces))

    def real(self, start: int) -> int:
        """Places of the piece that begins at `start` that are not padding."""
        return min(max(self.length - start, 0), self.piece_length)

    def coarser(self, by: int) -> "SequenceCut":
        """The cut over N / by ranks, each of which holds what `by` neighbours held; the padded length is the same."""
        return _Coarse(self.length, self.num_ranks // by, self.zigzag, by * self.piece_length)

    def take(self, x: Tensor, dim: int, rank: int, fill: int | float = 0) -> Tensor:
        """The places of `rank` of x[.., L, ..]; padding is `fill`."""
        parts = []
        for start in self.starts(rank):
            real = self.real(start)
            parts.append(x.narrow(dim, min(start, self.length), real))
            if real < self.piece_length:
                shape = list(x.shape)
                shape[dim] = self.piece_length - real
                parts.append(x.new_full(shape, fill))
        return torch.cat(parts, dim)

    def join(self, parts: list[Tensor], dim: int) -> Tensor:
        """The sequence [.., L, ..] of what the ranks hold, in rank order."""
        pieces = [piece for part in parts for piece in part.split(self.piece_length, dim)]
        starts = [start for rank in range(self.num_ranks) for start in self.starts(rank)]
        ordered = [piece for _, piece in sorted(zip(starts, pieces), key=lambda pair: pair[0])]
        return torch.cat(ordered, dim).narrow(dim, 0, self.length)


@dataclass(frozen=True)
class _Coarse(SequenceCut):
    length_of_piece: int = 0

    @property
    def piece_length(self) -> int:
        return self.length_of_piece


@dataclass
class ShardedContext:
    """The `context` of a forward on shards of a sequence. What it says is about the whole sequence.

    documents_BL  number of the document of each token; None: one document
    mask_BL       nonzero where there is a token and not padding; None: everywhere
    positions_BL  [B or 1, L]
    rows_R        None: the head computes the logits of all local places
    whole         what the caller gave, for an `attend` that sees the whole sequence
    num_targets_B targets of each sequence that are counted; None: no targets
    auxiliary     as in `core.nn.attention.StepContext`
    """

    cut: SequenceCut
    documents_BL: Tensor | None
    mask_BL: Tensor | None
    positions_BL: Tensor
    whole: Any = None
    num_targets_B: Tensor | None = None
    rows_R: Tensor | None = field(default=None, init=False)
    auxiliary: Any = field(default=None, init=False)

    def once(self, name: tuple, inputs: tuple, build: Callable[[], Any]) -> Any:
        """build(), once a step where the caller gave something that remembers it."""
        return build() if self.whole is None else self.whole.once(name, inputs, build)

    def of_sequences(self, choose: Callable[[Tensor], Tensor]) -> "ShardedContext":
        """The same for the sequences that `choose` takes of a tensor [B, ..]."""
        documents, mask = (None if x is None else choose(x) for x in (self.documents_BL, self.mask_BL))
        positions = choose(self.positions_BL) if self.positions_BL.shape[0] > 1 else self.positions_BL
        whole = None if self.whole is None else self.whole.of_sequences(choose)
        return ShardedContext(self.cut, documents, mask, positions, whole)


def shard_sequence(zigzag: bool) -> Style:
    """A whole model of the one forward signature: its sequence is sharded over the axis.

    model(input_ids[B, L], attention_mask, positions, context, targets=…) -> the sum of the losses, or logits[B, L, V]:
    on every rank, as without the style. The gradients of the parameters are partial sums over the axis; who uses the
    logits must use them alike on every rank. While it runs, `model.sequence_cut` says (cut, rank).
    """

    def wrap(model: nn.Module, axis: DeviceMesh) -> nn.Module:
        inner, rank = model.forward, axis.get_local_rank()
        model.sequence_cut = None  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]

        def forward(
            input_ids: Tensor,
            attention_mask: Tensor | None = None,
            positions: Tensor | None = None,
            context: Any = None,
            **options: Tensor | None,
        ) -> Tensor:
            cut = SequenceCut(input_ids.shape[1], axis.size(), zigzag)
            if positions is None:
                positions = _positions_of(model, input_ids, attention_mask)
            documents = getattr(context, "documents_BL", None)
            targets = options.pop("targets", None)
            num_targets = None if targets is None else (targets != _IGNORED).sum(1)
            sharded = ShardedContext(cut, documents, attention_mask, positions, context, num_targets)
            if targets is not None:
                options["targets"] = cut.take(targets, 1, rank, _IGNORED)
            ids, places = cut.take(input_ids, 1, rank), cut.take(positions, 1, rank)
            model.sequence_cut = cut, rank  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
            try:
                out = inner(ids, positions=places, context=sharded, **options)
            finally:
                model.sequence_cut = None  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
            if targets is not None:
                return reduce_from(out, axis)
            whole, rows = join_sequence(out, cut, axis), getattr(context, "rows_R", None)
            return whole if rows is None else whole[:, rows]

        model.forward = forward
        return model

    return Style(messages=Messages((Message("all_reduce", lambda site: 1, width="wide"),)), wrap=wrap)


def _positions_of(model: nn.Module, input_ids: Tensor, mask: Tensor | None) -> Tensor:
    default: Callable[[Tensor, Tensor | None], Tensor] | None = getattr(model, "default_positions", None)
    if default is not None:
        return default(input_ids, mask)
    return torch.arange(input_ids.shape[1], device=input_ids.device)[None]


class _Join(Function):
    @staticmethod
    def forward(ctx, x, cut, axis):
        ctx.cut, ctx.rank = cut, axis.get_local_rank()
        return cut.join(list(all_gather(x[None], 0, axis)), 1)

    @staticmethod
    def backward(ctx, grad):
        return ctx.cut.take(grad, 1, ctx.rank), None, None


def join_sequence(x_BL: Tensor, cut: SequenceCut, axis: DeviceMesh) -> Tensor:
    """x[B, L_cp, ..] -> x[B, L, ..] on every rank, which all use alike: the gradient is a slice."""
    return _Join.apply(x_BL, cut, axis)  # pyright: ignore[reportReturnType]


class _Gather(Function):
    @staticmethod
    def forward(ctx, x, cut, axis):
        ctx.cut, ctx.axis = cut, axis
        return cut.join(list(all_gather(x[None], 0, axis)), 1)

    @staticmethod
    def backward(ctx, grad):
        parts = [ctx.cut.take(grad, 1, rank) for rank in range(ctx.axis.size())]
        return reduce_scatter(torch.cat(parts, 1), 1, ctx.axis), None, None


def gather_sequence(x_BL: Tensor, cut: SequenceCut, axis: DeviceMesh) -> Tensor:
    """x[B, L_cp, ..] -> x[B, L, ..] on every rank, whose gradients are partial sums of the whole."""
    return _Gather.apply(x_BL, cut, axis)  # pyright: ignore[reportReturnType]


def head_size(site: Site) -> int:
    """The size of an attention module's heads: its fused projection has those of queries, keys and values."""
    return site.shape("qkv.weight")[0] // (site.module.num_heads + 2 * site.module.num_kv_heads)


def heads_here(site: Site, side: Side) -> tuple[int, int]:
    """Query and key/value heads that tensor parallelism leaves on a rank, those of the side's columns."""
    keys = site.share(site.module.num_kv_heads, side.cols)
    return keys * (site.module.num_heads // site.module.num_kv_heads), keys


def check_length(length: int, num_ranks: int) -> None:
    """Raises UserError where some rank would have no token."""
    if length < num_ranks:
        raise UserError(f"a sequence of {length} tokens has none for some of cp={num_ranks} ranks; use a smaller cp")
