"""The operations that can be cut: for each kind of module the function that does it in slices, and what that costs.

Wrapped are the forwards of modules, or a method that computes a part of one. Parameters keep their names.

    module                        what is cut                                 result
    FoldingModel.embed_pairs      rows of z                                   over the last iteration's z
    TemplatePairEmbedder          rows of z, of each template's pairs         over z
    TemplateChainsEmbedder        the same                                    over z
    ExtraEmbedder                 sequences
    RowAttentionWithPairBias      sequences (the bias: rows of z)             over m
    Column[Global]Attention       residues                                    over m
    Transition                    sequences of m, rows of z                   over its input
    OuterProductMean              rows of z (its factors: sequences)          over z
    SequenceToPair                rows of z                                   over z
    TriangleMultiplication        see products.py                             over z
    TriangleAttention             rows of z; columns around ending nodes      over z
    InvariantPointAttention       residues; z is normalised slice by slice

Shapes: B batch, S sequences, N residues, I some of them, D = c_m, Z = c_z, H heads, K head size, C channels.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from apps.fold.model.alphafold import AlphaFold
from apps.fold.model.attention import GatedAttention
from apps.fold.model.embedders import ExtraEmbedder, TemplatePairEmbedder
from apps.fold.model.esmfold import ESMFold, SequenceToPair
from apps.fold.model.features import ChainIds, Features, TemplateFeatures
from apps.fold.model.folding import FoldingModel
from apps.fold.model.layers import Transition
from apps.fold.model.msa import ColumnAttention, ColumnGlobalAttention, OuterProductMean, RowAttentionWithPairBias
from apps.fold.model.multimer import Multimer, MultimerPointAttention, TemplateChainsEmbedder
from apps.fold.model.rigid import Frames
from apps.fold.model.structure import InvariantPointAttention, Keys
from apps.fold.model.triangle import TriangleAttention, TriangleMultiplication
from apps.fold.subbatch.products import multiply
from apps.fold.subbatch.slices import (
    Cuts,
    How,
    collect,
    collect_rows,
    each,
    empty_beside,
    enough,
    send,
    update,
    update_rows,
)
from core.link import Coming

_SMALL = 4  # a row of a bias or of a factor takes less than a quarter of what a row of the operation takes


@dataclass(frozen=True)
class Work:
    """flops of products (a multiply-add is 2), bytes moved, launches of kernels or operators."""

    flops: float
    bytes: float
    launches: float


@dataclass(frozen=True)
class Operation:
    """One kind of module.

    slot     the attribute of the module that is wrapped
    run      (module, the attribute as it was, how, cuts, *arguments) -> result
    length   (module, *arguments) -> what is cut, in rows
    work     (module, *arguments) -> Work of doing it whole
    over     which argument the result is written over; None: a tensor of its own
    """

    slot: str
    run: Callable[..., Any]
    length: Callable[..., int]
    work: Callable[..., Work]
    over: int | None = 0


# --- the MSA ----------------------------------------------------------------------------------------------------------


def _row_attention(
    module: RowAttentionWithPairBias, whole: Any, how: How, cuts: Cuts, m: Tensor, z: Tensor, mask: Tensor
) -> Tensor:
    bias_BHNN = _bias(module.pair_bias, how, cuts, z, mask)
    factor = module.dropout(m)

    def sequences(at: slice) -> Tensor:
        return module.sequences(m[:, at], mask[:, at], bias_BHNN, factor)

    return update(m, cuts(m.shape[1], how.rows), 1, sequences)


def _bias(pair_bias: Callable[[Tensor], Tensor], how: How, cuts: Cuts, z_BNNZ: Tensor, like: Tensor) -> Tensor:
    """[B, H, N, N], made by slices of rows."""
    N = z_BNNZ.shape[1]
    slices = cuts(N, min(N, _SMALL * how.rows), enough(z_BNNZ, 2))
    return collect_rows(z_BNNZ, like, slices, 2, lambda _, z_BINZ: pair_bias(z_BINZ.take()))


def _column_attention(module: nn.Module, whole: Any, how: How, cuts: Cuts, m: Tensor, mask: Tensor) -> Tensor:
    return update(m, cuts(m.shape[2], how.rows), 2, lambda at: whole(m[:, :, at], mask[:, :, at]))


def _transition(module: Transition, whole: Any, how: How, cuts: Cuts, x: Tensor) -> Tensor:
    slices = cuts(x.shape[1], how.rows, enough(x))
    return update_rows(x, module.up.weight, slices, lambda _, rows: whole(rows.take()))


def _outer_product(
    module: OuterProductMean, whole: Any, how: How, cuts: Cuts, m: Tensor, z: Tensor, mask: Tensor
) -> Tensor:
    mask_BSN, S = mask.to(m.dtype), m.shape[1]
    a_BSNC, b_BSNC = _factors(module, cuts(S, min(S, _SMALL * how.rows)), m, mask_BSN)

    def rows(at: slice, z_BINZ: Coming) -> Tensor:
        return _added(module.update(a_BSNC[:, :, at], b_BSNC, mask_BSN[:, :, at], mask_BSN), z_BINZ)

    return update_rows(z, mask, cuts(z.shape[1], how.rows, enough(z)), rows)


def _added(update: Tensor, z_BINZ: Coming) -> Tensor:
    return z_BINZ.take() + update if torch.is_grad_enabled() else update.add_(z_BINZ.take())


def _factors(module: OuterProductMean, slices: list[slice], m: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """a and b, [B, S, N, C] both, made by slices of sequences."""
    if torch.is_grad_enabled():
        a, b = zip(*(module.factors(m[:, at], mask[:, at]) for at in slices))
        return torch.cat(a, 1), torch.cat(b, 1)
    shape = (*m.shape[:-1], module.left.out_features)
    a_BSNC, b_BSNC = (torch.empty(shape, dtype=m.dtype, device=m.device) for _ in range(2))

    def place(at: slice) -> None:
        a_BSNC[:, at], b_BSNC[:, at] = module.factors(m[:, at], mask[:, at])

    for at in slices:
        place(at)
    return a_BSNC, b_BSNC


def _sequence_to_pair(module: SequenceToPair, whole: Any, how: How, cuts: Cuts, m: Tensor, z: Tensor) -> Tensor:
    q_BNC, k_BNC = module.factors(m)

    def rows(at: slice, z_BINZ: Coming) -> Tensor:
        return _added(module.update(q_BNC, k_BNC[:, at]), z_BINZ)

    return update_rows(z, m, cuts(z.shape[1], how.rows, enough(z)), rows)


# --- the pairs --------------------------------------------------------------------------------------------------------


def _triangle_attention(module: TriangleAttention, whole: Any, how: How, cuts: Cuts, z: Tensor, mask: Tensor) -> Tensor:
    z_BNNZ, mask_BNN = (z, mask) if module.starting else (z.transpose(1, 2), mask.transpose(1, 2))
    bias_BHNN = _bias(lambda z_BINZ: module.pair_bias(module.norm(z_BINZ)), how, cuts, z_BNNZ, mask)
    factor = module.dropout(z_BNNZ)

    def rows(at: slice, coming: Coming) -> Tensor:
        z_BINZ = coming.take()
        return module.edges(module.norm(z_BINZ), z_BINZ, mask_BNN[:, at], bias_BHNN, factor)

    out = update_rows(z_BNNZ, mask, cuts(z.shape[1], how.rows, enough(z)), rows)
    return out if module.starting else out.transpose(1, 2)


def _embed_pairs(
    model: FoldingModel, whole: Any, how: How, cuts: Cuts, features: Features, last: Tensor, points: Tensor
) -> Tensor:
    def rows(at: slice, last_BINZ: Coming) -> Tensor:
        return model.pair_rows(features, last_BINZ.take(), points, at)

    return update_rows(last, features.msa_BSNF, cuts(last.shape[1], how.rows, enough(last)), rows)


def _template_pairs(
    module: TemplatePairEmbedder, whole: Any, how: How, cuts: Cuts, z: Tensor, templates: TemplateFeatures,
    mask: Tensor,
) -> Tensor:  # fmt: skip
    N, T = z.shape[1], templates.mask_BT.shape[1]
    slices, embedded = cuts(N, how.rows, enough(z)), []
    for t in range(T):
        t_BNNC = _beside(z, mask, slices, lambda at, t=t: module.pairs(templates, t, at))
        for block in module.blocks:
            t_BNNC = block(t_BNNC, mask)
        embedded.append(t_BNNC)

    def rows(at: slice, *coming: Coming) -> Tensor:
        z_BINZ, *t_BINC = (one.take() for one in coming)
        t_BINTC = torch.stack(t_BINC, 3)
        del t_BINC
        return z_BINZ + module.read(z_BINZ, t_BINTC, templates.mask_BT)

    return update_rows(z, mask, slices, rows, *embedded)


def _chain_templates(
    module: TemplateChainsEmbedder, whole: Any, how: How, cuts: Cuts, z: Tensor, templates: TemplateFeatures,
    mask: Tensor, ids: ChainIds,
) -> Tensor:  # fmt: skip
    """The templates' stacks one after the other, of which the sum is kept."""
    T, slices, total = templates.mask_BT.shape[1], cuts(z.shape[1], how.rows, enough(z)), None
    for t in range(T):
        t_BNNC = _rows_beside(z, mask, slices, lambda at, rows, t=t: module.pairs(rows.take(), templates, t, ids, at))
        for block in module.blocks:
            t_BNNC = block(t_BNNC, mask)
        if total is None:
            total = update_rows(t_BNNC, mask, slices, lambda at, rows: module.norm(rows.take()))
        else:
            total = update_rows(
                total, mask, slices, lambda at, rows, other: rows.take() + module.norm(other.take()), t_BNNC
            )
    assert total is not None
    return update_rows(z, mask, slices, lambda at, rows, sums: rows.take() + module.read(sums.take(), T), total)


def _rows_beside(z: Tensor, like: Tensor, slices: list[slice], part: Callable[[slice, Coming], Tensor]) -> Tensor:
    """part(at, z[:, at]) side by side along rows, where z lies; they are made where `like` lies."""
    if torch.is_grad_enabled():
        return torch.cat([part(at, Coming(z[:, at])) for at in slices], 1)
    out = None

    def place(at: slice, rows: Coming) -> None:
        nonlocal out
        made = part(at, rows)
        if out is None:
            out = empty_beside(z, *z.shape[:3], made.shape[-1])
        send(out[:, at], made)

    each(z, like, slices, lambda at: [z[:, at]], place)
    assert out is not None
    return out


def _beside(z: Tensor, like: Tensor, slices: list[slice], part: Callable[[slice], Tensor]) -> Tensor:
    """The parts side by side along rows, where z lies; they are made where `like` lies."""
    if torch.is_grad_enabled():
        return torch.cat([part(at) for at in slices], 1)
    B, N, C = z.shape[0], z.shape[1], part(slice(0, 1)).shape[-1]
    out = empty_beside(z, B, N, N, C)
    each(z, like, slices, lambda at: (), lambda at: send(out[:, at], part(at)))
    return out


def _extra(module: ExtraEmbedder, whole: Any, how: How, cuts: Cuts, features: Features) -> Tensor:
    length = features.extra_msa_BEN.shape[1]
    if length == 0:
        return whole(features)
    return collect(length, cuts(length, how.rows, 2), 1, lambda at: module.sequences(features, at))


def _gather(
    module: InvariantPointAttention, whole: Any, how: How, cuts: Cuts, q: Tensor, points: Tensor, frames: Frames,
    mask: Tensor, z: Tensor, keys: Keys,
) -> Tensor:  # fmt: skip
    def residues(at: slice, coming: Coming) -> Tensor:
        z_BINZ = module.normalise(coming.take())  # pyright: ignore[reportCallIssue]
        return whole(q[:, at], points[:, at], frames.map(lambda f: f[:, at]), mask[:, at], z_BINZ, keys)

    return collect_rows(z, q, cuts(q.shape[1], how.rows, enough(z, 2)), 1, residues)


# --- work -------------------------------------------------------------------------------------------------------------


def _attention_flops(attention: GatedAttention, tokens: float, keys: float) -> float:
    """Projections of queries, keys, values, gate and output; scores and values. Of a batch with `tokens` queries."""
    inner = attention.num_heads * attention.head_dim
    return tokens * (10 * attention.qkv.in_features * inner + 4 * inner * keys)


def _row_work(module: RowAttentionWithPairBias, m: Tensor, z: Tensor, mask: Tensor) -> Work:
    tokens = m.shape[0] * m.shape[1] * m.shape[2]
    pairs = z.numel() * 2 * module.bias.out_features
    return Work(_attention_flops(module.attention, tokens, m.shape[2]) + pairs, 8 * _bytes(m) + _bytes(z), 14)


def _column_work(module: ColumnAttention | ColumnGlobalAttention, m: Tensor, mask: Tensor) -> Work:
    tokens, keys = m.shape[0] * m.shape[1] * m.shape[2], m.shape[1]
    attention = module.attention
    if isinstance(attention, GatedAttention):
        return Work(_attention_flops(attention, tokens, keys), 10 * _bytes(m), 12)
    inner = attention.num_heads * attention.head_dim
    return Work(tokens * 2 * m.shape[3] * (2 * inner + 2 * attention.head_dim), 8 * _bytes(m), 14)


def _transition_work(module: Transition, x: Tensor) -> Work:
    factor = module.up.out_features // module.up.in_features
    return Work(4 * x.numel() * module.up.out_features, (4 + 3 * factor) * _bytes(x), 5)


def _outer_work(module: OuterProductMean, m: Tensor, z: Tensor, mask: Tensor) -> Work:
    C, pairs, (B, S, N, D) = module.left.out_features, z.numel() // z.shape[-1], m.shape
    flops = B * S * N * 4 * D * C + pairs * (2 * S * C * C + 2 * C * C * z.shape[-1])
    return Work(flops, 2 * _bytes(m) + 3 * _bytes(z) + 3 * pairs * C * C * z.element_size(), 10)


def _product_work(module: TriangleMultiplication, z: Tensor, mask: Tensor) -> Work:
    pairs, C, Z, N = z.numel() // z.shape[-1], module.get_parameter("in_bias").shape[0] // 4, z.shape[-1], z.shape[1]
    return Work(pairs * (8 * C * Z + 2 * C * N + 2 * C * Z + 2 * Z * Z), 12 * _bytes(z), 12)


def _edges_work(module: TriangleAttention, z: Tensor, mask: Tensor) -> Work:
    pairs = z.numel() // z.shape[-1]
    flops = _attention_flops(module.attention, pairs, z.shape[1]) + 2 * z.numel() * module.bias.out_features
    return Work(flops, 10 * _bytes(z), 14)


def _embed_work(model: AlphaFold, features: Features, last: Tensor, points: Tensor) -> Work:
    return Work(2 * last.numel() * model.recycling_embedder.distance.in_features, 8 * _bytes(last), 12)


def _distance_work(model: ESMFold, features: Features, last: Tensor, points: Tensor) -> Work:
    return Work(0, 8 * _bytes(last), 12)


def _sequence_work(module: SequenceToPair, m: Tensor, z: Tensor) -> Work:
    inner, pairs = module.out.in_features, z.numel() // z.shape[-1]
    return Work(2 * pairs * inner * z.shape[-1], 3 * _bytes(z) + 4 * pairs * inner * z.element_size(), 8)


def _template_work(module: TemplatePairEmbedder, z: Tensor, templates: TemplateFeatures, mask: Tensor) -> Work:
    C, T, pairs = module.embed.out_features, templates.mask_BT.shape[1], z.numel() // z.shape[-1]
    inner = module.num_heads * module.head_dim
    flops = pairs * (T * (2 * module.embed.in_features * C + 4 * C * inner + 4 * inner) + 4 * z.shape[-1] * inner)
    return Work(flops, 3 * _bytes(z) * (1 + T), 20 * (1 + T))


def _chain_template_work(
    module: TemplateChainsEmbedder, z: Tensor, templates: TemplateFeatures, mask: Tensor, ids: ChainIds
) -> Work:
    C, T, pairs = module.norm.weight.shape[0], templates.mask_BT.shape[1], z.numel() // z.shape[-1]
    flops = pairs * 2 * C * (T * (z.shape[-1] + module.distances.in_features + module.SCALARS) + z.shape[-1])
    return Work(flops, 3 * _bytes(z) * (1 + T), 30 * (1 + T))


def _extra_work(module: ExtraEmbedder, features: Features) -> Work:
    flops = 2 * features.extra_msa_BEN.numel() * module.linear.weight.numel()
    return Work(flops, 20 * flops / module.linear.in_features, 5)


def _gather_work(
    module: InvariantPointAttention, q: Tensor, points: Tensor, frames: Frames, mask: Tensor, z: Tensor, keys: Keys
) -> Work:
    H, pairs = module.num_heads, z.numel() // z.shape[-1]
    each = 4 * module.head_dim + 9 * module.query_points + 6 * module.value_points + 4 * z.shape[-1]
    return Work(pairs * H * each, 4 * _bytes(z) + 40 * pairs * H, 40)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


# --- the table --------------------------------------------------------------------------------------------------------

OPERATIONS: dict[type[nn.Module], Operation] = {
    AlphaFold: Operation("embed_pairs", _embed_pairs, lambda _, features, last, points: last.shape[1], _embed_work, 1),
    Multimer: Operation("embed_pairs", _embed_pairs, lambda _, features, last, points: last.shape[1], _embed_work, 1),
    ESMFold: Operation("embed_pairs", _embed_pairs, lambda _, features, last, points: last.shape[1], _distance_work, 1),
    TemplatePairEmbedder: Operation("forward", _template_pairs, lambda _, z, *rest: z.shape[1], _template_work),
    TemplateChainsEmbedder: Operation(
        "forward", _chain_templates, lambda _, z, *rest: z.shape[1], _chain_template_work
    ),
    ExtraEmbedder: Operation("forward", _extra, lambda _, features: features.extra_msa_BEN.shape[1], _extra_work, None),
    RowAttentionWithPairBias: Operation("forward", _row_attention, lambda _, m, *rest: m.shape[1], _row_work),
    ColumnAttention: Operation("forward", _column_attention, lambda _, m, mask: m.shape[2], _column_work),
    ColumnGlobalAttention: Operation("forward", _column_attention, lambda _, m, mask: m.shape[2], _column_work),
    Transition: Operation("forward", _transition, lambda _, x: x.shape[1], _transition_work),
    OuterProductMean: Operation("forward", _outer_product, lambda _, m, z, mask: z.shape[1], _outer_work, 1),
    SequenceToPair: Operation("forward", _sequence_to_pair, lambda _, m, z: z.shape[1], _sequence_work, 1),
    TriangleMultiplication: Operation("forward", multiply, lambda _, z, mask: z.shape[1], _product_work),
    TriangleAttention: Operation("forward", _triangle_attention, lambda _, z, mask: z.shape[1], _edges_work),
    InvariantPointAttention: Operation("gather", _gather, lambda _, q, *rest: q.shape[1], _gather_work, None),
    MultimerPointAttention: Operation("gather", _gather, lambda _, q, *rest: q.shape[1], _gather_work, None),
}


def operations_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, Operation]]:
    """(name, module, operation) of everything in the model that can be cut; one name for all blocks of a stack."""
    for name, module in model.named_modules():
        operation = OPERATIONS.get(type(module))
        if operation is not None:
            parts = ("*" if part.isdigit() else part for part in name.split("."))
            yield ".".join(parts) if name else "embed_pairs", module, operation
