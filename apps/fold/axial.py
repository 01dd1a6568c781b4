"""The Evoformer over several ranks: the MSA and the pairs sharded along one axis each (core.parallel.axial).

Between operations m is sharded by sequences and z by rows; each operation has whole what it works along:

    row attention             m by sequences; its bias is made by rows of z and gathered
    column attention          m is switched to residues, and stays so until the block's end
    MSA transition            either
    outer product mean        m by residues, z by rows; one factor is gathered. Then m is on its way back
    outgoing edges            z by rows; one factor is gathered, or without gradients comes in pieces
    incoming edges            the same on columns: z is switched there and back, without gradients in place
    starting node             z by rows; its bias is gathered
    ending node               the same on columns
    transition                either
    structure module          residues of a rank attend to all; what they gather is joined

Where the outer product mean comes first, as in models of complexes, m is by sequences: one factor is switched to
residues, the other gathered, and m goes back to sequences at the block's end.

m is switched by all-to-all, and so is z with gradients. Parameters are whole on every rank. Of those that work on
shards a rank finds a part of the gradient, and the whole is the sum over the axis (`_PARTIAL`); of the others, whose
inputs all ranks have whole, each rank finds all of it. What comes behind the shards, the loss too, is computed alike on
every rank.

`shard_evoformer(model, axis)` wraps a model so; it takes and returns what it did. With `apply_subbatches` before it the
operations work in slices of what a rank has, in place where no gradient is recorded. `axial_plan` is the same as a
plan, with which `core.compose` trains over the mesh's axis tp; axial_messages.py has what it sends.

Shapes: B batch, S sequences, N residues, I of these on a rank, D = c_m, Z = c_z, C channels, H heads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from apps.fold.axial_messages import messages
from apps.fold.model.alphafold import AlphaFold
from apps.fold.model.embedders import ExtraEmbedder, TemplatePairEmbedder
from apps.fold.model.evoformer import EvoformerBlock
from apps.fold.model.features import ChainIds, Features, TemplateFeatures
from apps.fold.model.folding import Recycled
from apps.fold.model.heads import Heads, Logits, aligned_tm_scores, chain_tm_scores, predicted_aligned_error
from apps.fold.model.layers import Transition
from apps.fold.model.msa import ColumnAttention, ColumnGlobalAttention, OuterProductMean, RowAttentionWithPairBias
from apps.fold.model.multimer import MultimerPointAttention, TemplateChainsEmbedder
from apps.fold.model.rigid import Frames
from apps.fold.model.structure import InvariantPointAttention, Keys
from apps.fold.model.triangle import TriangleAttention, TriangleMultiplication
from apps.fold.subbatch.execute import as_the_model_has_it, replace_method
from apps.fold.subbatch.operations import operations_of
from apps.fold.subbatch.products import A, B, Product
from apps.fold.subbatch.reading import PairNumbers, best_of_both
from apps.fold.subbatch.slices import How, collect, every, first_only, put, stands_for_host, update
from core.comm.collectives import all_reduce_max, copy_to, gather_from, join_from, split_to, take_shard
from core.kernels.gated_output import gated_residual
from core.kernels.triangle import pair_product
from core.parallel.axial import Switch, begin_switch, pieces, shard_of, switch, transpose_
from core.parallel.draws import replicated
from core.parallel.recompute import RecomputeConfig
from core.placement.style import AXIS, Plan, Style
from core.trace.segments import Segments

_ROWS, _COLUMNS = 1, 2  # dims of z[B, I, J, Z], and of m[B, S, N, D]
_PARTS, _PIECE_BYTES = 8, 2**24  # a factor of the triangle product travels in so many parts, not in smaller ones


def shard_evoformer(model: AlphaFold, axis: DeviceMesh, choices: Mapping[str, How] | None = None) -> AlphaFold:
    """Shard what the model computes over the axis; `model.fold` then gives this rank's rows of z, all else whole.

    choices  slices by operation (apps.fold.subbatch); of a rank's rows
    """
    hows = choices or {}
    blocks = [module for module in model.modules() if isinstance(module, EvoformerBlock)]
    first = {id(block.outer_product_mean) for block in blocks if block.outer_first}
    for name, module, _ in operations_of(model):
        run = _outer_product_first if id(module) in first else _RUNS.get(type(module))
        if run is not None:
            slot = "gather" if isinstance(module, InvariantPointAttention) else "forward"
            original = as_the_model_has_it(module, slot)
            replace_method(module, slot, partial(run, module, original, hows.get(name), axis))
    for block in blocks:
        replace_method(block, "forward", partial(_block, block, type(block).forward.__get__(block), axis))
    replace_method(model, "nothing", partial(_nothing, model, axis))
    replace_method(model, "settled", partial(_settled, type(model).settled.__get__(model), axis))
    replace_method(model, "embed_pairs", partial(_embed_pairs, model, hows.get("embed_pairs"), axis))
    replace_method(model, "embed_msa", partial(_embed_msa, AlphaFold.embed_msa.__get__(model), axis))
    replace_method(model, "trunk", partial(_trunk, AlphaFold.trunk.__get__(model), axis))
    extra = model.extra_embedder
    replace_method(extra, "forward", partial(_extra, extra, axis))
    replace_method(model.heads, "forward", partial(_heads, model.heads, axis))
    return model


def _trained(model: AlphaFold, axis: DeviceMesh) -> AlphaFold:
    """The model over the axis, with dropouts whose factors all ranks draw alike, by their place in the whole."""
    return replicated.wrap(shard_evoformer(model, axis), axis)


_PARTIAL = (
    *("input_embedder.left.**", "input_embedder.right.**", "input_embedder.position.**"),
    *("recycling_embedder.distance.**", "recycling_embedder.pair_norm.**"),
    *("template_embedder.pairs.**", "extra_embedder.**", "extra_blocks.**", "blocks.**"),
    *("structure_module.pair_norm.**", "structure_module.attention.bias.**", "structure_module.attention.point_weight"),
    *("heads.distogram.**", "heads.pae.**"),
)
"""Patterns of the parameters whose gradients are sums over the axis of what each rank finds."""


def axial_plan(recompute: RecomputeConfig | None = None, segments: Segments | None = None) -> Plan:
    """The plan of a model to be trained, whose blocks are computed again as `recompute` says.

    segments  those of mode budget, of all blocks

    Raises UserError for that mode without them.
    """
    sent = messages(recompute or RecomputeConfig(), segments)
    return {"": Style(partial=dict.fromkeys(_PARTIAL, (AXIS,)), messages=sent, wrap=_trained)}


AXIAL = axial_plan()


@dataclass(frozen=True)
class FirstTwo(How):
    """A loop that computes two slices only, which are enough to see what it allocates."""


def _slices(how: How | None, length: int) -> list[slice]:
    if length == 0:
        return []
    rows = length if how is None else min(length, how.rows)
    return first_only(length, rows, 2) if isinstance(how, FirstTwo) else every(length, rows)


def _gathered(x: Tensor, dim: int, length: int, axis: DeviceMesh) -> Tensor:
    """Whole along `dim`, for every rank's own use: gradients are sums."""
    return gather_from(x, dim, axis).narrow(dim, 0, length)


def _bias(pair_bias: Callable[[Tensor], Tensor], how: How | None, z: Tensor) -> Tensor:
    """[B, H, I, N] of a rank's rows, made by slices of them."""
    rows = z.shape[1]
    return collect(rows, _slices(how, rows), 2, lambda at: pair_bias(z[:, at]))


# --- a block ----------------------------------------------------------------------------------------------------------


def _block(block: EvoformerBlock, whole: Callable[..., Any], axis: DeviceMesh, m: Tensor, z: Tensor, *masks: Tensor):
    """m goes back to shards of sequences while the pairs are worked on, or, where they are told first, behind that."""
    if block.outer_first:
        m, z = whole(m, z, *masks)
        return switch(m, 2, 1, z.shape[2], axis), z
    try:
        _, z = whole(m, z, *masks)
    finally:  # a checkpoint that has computed again what it needs leaves the block before its end
        returning: Switch | None = block.outer_product_mean.__dict__.pop("returning", None)
        if returning is not None:
            returning.wait()
    assert returning is not None
    return returning.finish(), z


def _row_attention(
    module: RowAttentionWithPairBias, whole: Any, how: How | None, axis: DeviceMesh, m: Tensor, z: Tensor, mask: Tensor
) -> Tensor:
    bias_BHNN = _gathered(_bias(module.pair_bias, how, z), 2, z.shape[2], axis)
    mask_BSN, factor = take_shard(mask, 1, axis), module.dropout(m)
    return update(
        m, _slices(how, m.shape[1]), 1, lambda at: module.sequences(m[:, at], mask_BSN[:, at], bias_BHNN, factor)
    )


def _column_attention(
    module: nn.Module, whole: Any, how: How | None, axis: DeviceMesh, m: Tensor, mask: Tensor
) -> Tensor:
    m, mask_BSI = switch(m, 1, 2, mask.shape[1], axis), take_shard(mask, 2, axis)
    return update(m, _slices(how, m.shape[2]), 2, lambda at: whole(m[:, :, at], mask_BSI[:, :, at]))


def _transition(module: Transition, whole: Any, how: How | None, axis: DeviceMesh, x: Tensor) -> Tensor:
    return update(x, _slices(how, x.shape[1]), 1, lambda at: whole(x[:, at]))


def _outer_product(
    module: OuterProductMean, whole: Any, how: How | None, axis: DeviceMesh, m: Tensor, z: Tensor, mask: Tensor
) -> Tensor:
    mask_BSN = mask.to(m.dtype)
    mask_BSI = take_shard(mask_BSN, 2, axis)
    a_BSIC, b_BSIC = module.factors(m, mask_BSI)
    module.__dict__["returning"] = begin_switch(m, 2, 1, mask.shape[2], axis)
    b_BSNC = _gathered(b_BSIC, 2, mask.shape[2], axis)
    return _outer_update(module, how, z, a_BSIC, b_BSNC, mask_BSI, mask_BSN)


def _outer_product_first(
    module: OuterProductMean, whole: Any, how: How | None, axis: DeviceMesh, m: Tensor, z: Tensor, mask: Tensor
) -> Tensor:
    """m is by sequences, and stays so."""
    mask_BSN, S = mask.to(m.dtype), mask.shape[1]
    a_BRNC, b_BRNC = module.factors(m, take_shard(mask_BSN, 1, axis))
    coming, b_BSNC = begin_switch(a_BRNC, 1, 2, S, axis), _gathered(b_BRNC, 1, S, axis)
    del a_BRNC, b_BRNC
    return _outer_update(module, how, z, coming.finish(), b_BSNC, take_shard(mask_BSN, 2, axis), mask_BSN)


def _outer_update(
    module: OuterProductMean, how: How | None, z: Tensor, a_BSIC: Tensor, b_BSNC: Tensor, mask_BSI: Tensor,
    mask_BSN: Tensor,
) -> Tensor:  # fmt: skip
    def rows(at: slice) -> Tensor:
        return z[:, at] + module.update(a_BSIC[:, :, at], b_BSNC, mask_BSI[:, :, at], mask_BSN)

    return update(z, _slices(how, z.shape[1]), 1, rows)


# --- triangles --------------------------------------------------------------------------------------------------------


def _multiply(
    module: TriangleMultiplication, whole: Any, how: How | None, axis: DeviceMesh, z: Tensor, mask: Tensor
) -> Tensor:
    N = mask.shape[1]
    like = z.new_empty(()).expand(z.shape[0], N, N, z.shape[-1])  # one draw for all ranks
    factor_B1NZ = module.dropout(like)
    if module.outgoing:
        return _edges_product(module, how, axis, z, take_shard(mask, 1, axis), factor_B1NZ)
    factor = None if factor_B1NZ is None else take_shard(factor_B1NZ, 2, axis).transpose(1, 2)
    mask_BJN = take_shard(mask.transpose(1, 2), 1, axis)
    return _on_columns(lambda z_BJNZ: _edges_product(module, how, axis, z_BJNZ, mask_BJN, factor), z, N, axis)


def _on_columns(run: Callable[[Tensor], Tensor], z_BINZ: Tensor, N: int, axis: DeviceMesh) -> Tensor:
    """Do what works on rows on this rank's columns: z is switched there and back, without gradients in place."""
    if not torch.is_grad_enabled():
        return transpose_(run(transpose_(z_BINZ, N, axis)), N, axis)
    columns = run(switch(z_BINZ, _ROWS, _COLUMNS, N, axis).transpose(1, 2))
    return switch(columns.transpose(1, 2), _COLUMNS, _ROWS, N, axis)


def _edges_product(
    module: TriangleMultiplication, how: How | None, axis: DeviceMesh, z_BINZ: Tensor, mask_BIN: Tensor,
    dropout: Tensor | None,
) -> Tensor:  # fmt: skip
    """The product over rows (products.py), of which this rank has some."""
    product, N = Product(module), z_BINZ.shape[2]
    recorded = torch.is_grad_enabled()
    slices = _slices(how, z_BINZ.shape[1])
    b_BCIN = collect(
        z_BINZ.shape[1], slices, 2, lambda at: product.factor(product.norm(z_BINZ[:, at]), mask_BIN[:, at], B)
    )
    if recorded:
        b_BCNN = _gathered(b_BCIN, 2, N, axis)
    parts = min(_PARTS, max(1, b_BCIN.numel() * b_BCIN.element_size() // _PIECE_BYTES))

    def rows(at: slice) -> Tensor:
        z, n = z_BINZ[:, at], product.norm(z_BINZ[:, at])
        a = product.factor(n, mask_BIN[:, at], A)
        if recorded:
            x = pair_product(a, b_BCNN, outgoing=True)
        else:
            x = a.new_empty(*a.shape[:3], N)
            for part, b in pieces(b_BCIN, 2, N, axis, parts):
                x[..., part] = pair_product(a, b, outgoing=True)
                del b  # before the one after the next is made room for
        if dropout is None:
            return product.result(x, z, n)
        factor = dropout if dropout.shape[1] == 1 else dropout[:, at]
        return gated_residual(product.result(x, z, n) - z, mask=factor, residual=z)

    return update(z_BINZ, slices, 1, rows)


def _triangle_attention(
    module: TriangleAttention, whole: Any, how: How | None, axis: DeviceMesh, z: Tensor, mask: Tensor
) -> Tensor:
    N = mask.shape[1]
    mask_BIN = take_shard(mask if module.starting else mask.transpose(1, 2), 1, axis)

    def around(z: Tensor) -> Tensor:
        factor = module.dropout(z)
        bias_BHNN = _gathered(_bias(lambda z_BJNZ: module.pair_bias(module.norm(z_BJNZ)), how, z), 2, N, axis)

        def rows(at: slice) -> Tensor:
            return module.edges(module.norm(z[:, at]), z[:, at], mask_BIN[:, at], bias_BHNN, factor)

        return update(z, _slices(how, z.shape[1]), 1, rows)

    return around(z) if module.starting else _on_columns(around, z, N, axis)


# --- before and after the stacks --------------------------------------------------------------------------------------


def _padded(x: Tensor, length: int, axis: DeviceMesh) -> Tensor:
    """x[B, I, ..] with rows of zeros up to a shard's size."""
    surplus = -(-length // axis.size()) - x.shape[1]
    return x if surplus == 0 else torch.cat([x, x.new_zeros(x.shape[0], surplus, *x.shape[2:])], 1)


def _nothing(model: AlphaFold, axis: DeviceMesh, features: Features) -> Recycled:
    like, (B, N) = features.msa_BSNF, features.aatype_BN.shape
    pairs = like.new_zeros(B, -(-N // axis.size()), N, model.config.pair_dim)
    row = like.new_zeros(B, N, model.config.msa_dim)
    return Recycled(row, pairs, torch.zeros(B, N, 3, device=like.device))


def _embed_pairs(
    model: AlphaFold, how: How | None, axis: DeviceMesh, features: Features, last: Tensor, points: Tensor
) -> Tensor:
    """This rank's rows of z, over those of the last iteration; the filling stays what it was."""
    N = last.shape[2]
    mine = shard_of(N, axis)
    count = mine.stop - mine.start

    def rows(at: slice) -> Tensor:
        there = slice(mine.start + at.start, mine.start + at.stop)
        return model.input_embedder.pairs(features, there) + model.recycling_embedder.pairs(last[:, at], points, there)

    if torch.is_grad_enabled():
        return _padded(rows(slice(0, count)), N, axis)
    return update(last, _slices(how, count), 1, rows)


def _template_pairs(
    module: TemplatePairEmbedder, whole: Any, how: How | None, axis: DeviceMesh, z: Tensor,
    templates: TemplateFeatures, mask: Tensor,
) -> Tensor:  # fmt: skip
    N, embedded = mask.shape[1], []
    for t in range(templates.mask_BT.shape[1]):
        t_BINC = _padded(module.pairs(templates, t, shard_of(N, axis)), N, axis)
        for block in module.blocks:
            t_BINC = block(t_BINC, mask)
        embedded.append(t_BINC)

    def rows(at: slice) -> Tensor:
        return z[:, at] + module.read(z[:, at], torch.stack([t[:, at] for t in embedded], 3), templates.mask_BT)

    return update(z, _slices(how, z.shape[1]), 1, rows)


def _chain_templates(
    module: TemplateChainsEmbedder, whole: Any, how: How | None, axis: DeviceMesh, z: Tensor,
    templates: TemplateFeatures, mask: Tensor, ids: ChainIds,
) -> Tensor:  # fmt: skip
    """As one rank does it (apps.fold.subbatch.operations), of this rank's rows."""
    N, T, total = mask.shape[1], templates.mask_BT.shape[1], None
    mine = shard_of(N, axis)
    count, slices = mine.stop - mine.start, _slices(how, z.shape[1])
    for t in range(T):

        def part(at: slice, t: int = t) -> Tensor:
            there = slice(mine.start + at.start, mine.start + at.stop)
            return module.pairs(z[:, at], templates, t, ids, there)

        if count:
            t_BINC = _padded(collect(count, _slices(how, count), 1, part), N, axis)
        else:
            t_BINC = z.new_zeros(*z.shape[:3], module.norm.weight.shape[0])
        for block in module.blocks:
            t_BINC = block(t_BINC, mask)
        t_BINC = update(t_BINC, slices, 1, lambda at, x=t_BINC: module.norm(x[:, at]))
        if total is None:
            total = t_BINC
        else:
            total = update(total, slices, 1, lambda at, x=total, y=t_BINC: x[:, at] + y[:, at])
    assert total is not None
    sums = total
    return update(z, slices, 1, lambda at: z[:, at] + module.read(sums[:, at], T))


def _settled(whole: Callable[..., bool], axis: DeviceMesh, last: Recycled | None, now: Recycled, mask: Tensor) -> bool:
    """All ranks end recycling together, though one of them may round otherwise."""
    if now.alpha_BN3 is None or now.alpha_BN3.is_meta:
        return False
    return bool(all_reduce_max(torch.tensor(float(whole(last, now, mask)), device=mask.device), axis))


def _extra(module: ExtraEmbedder, axis: DeviceMesh, features: Features) -> Tensor:
    """This rank's sequences."""
    length = features.extra_msa_BEN.shape[1]
    return _padded(module.sequences(features, shard_of(length, axis)), length, axis)


def _embed_msa(whole: Callable[..., tuple[Tensor, Tensor]], axis: DeviceMesh, *given: Any) -> tuple[Tensor, Tensor]:
    m_BSND, mask_BSN = whole(*given)
    return split_to(m_BSND, 1, axis).clone(), mask_BSN  # a view would keep the whole alive


def _trunk(
    whole: Callable[..., tuple[Tensor, Tensor]], axis: DeviceMesh, features: Features, recycled: Recycled | None
) -> tuple[Tensor, Tensor]:
    m_BSND, z_BINZ = whole(features, recycled)
    return join_from(m_BSND, 1, axis), z_BINZ


def _gather(
    module: InvariantPointAttention, whole: Any, how: How | None, axis: DeviceMesh, q: Tensor, points: Tensor,
    frames: Frames, mask: Tensor, z: Tensor, keys: Keys,
) -> Tensor:  # fmt: skip
    N, mine = mask.shape[1], shard_of(mask.shape[1], axis)
    q, points, frames = copy_to(q, axis), copy_to(points, axis), frames.map(lambda f: copy_to(f, axis))
    keys = replace(
        keys, **{name: copy_to(getattr(keys, name), axis) for name in ("k_BNHK", "k_BNHP3", "v_BNHK", "v_BNHV3")}
    )
    normalise = module.__dict__.get("normalise", lambda z: z)

    def residues(at: slice) -> Tensor:
        there = slice(mine.start + at.start, mine.start + at.stop)
        own = frames.map(lambda f: f[:, there])
        return whole(q[:, there], points[:, there], own, mask[:, there], normalise(z[:, at]), keys)

    count = mine.stop - mine.start
    if count:
        found = collect(count, _slices(how, count), 1, residues)
    else:
        found = whole(q[:, :1], points[:, :1], frames.map(lambda f: f[:, :1]), mask[:, :1], normalise(z[:, :1]), keys)[
            :, :0
        ]
    return join_from(_padded(found, N, axis), 1, axis).narrow(1, 0, N)


def _heads(heads: Heads, axis: DeviceMesh, m: Tensor, z: Tensor, s: Tensor, structure: Tensor) -> Logits:
    N = z.shape[2]

    def whole(rows_BINX: Tensor) -> Tensor:
        return join_from(rows_BINX, 1, axis).narrow(1, 0, N)

    half = heads.distogram(z)
    back = switch(half, _ROWS, _COLUMNS, N, axis).transpose(1, 2)
    return Logits(
        plddt=heads.plddt(structure),
        distogram=whole(half + back),
        masked_msa=heads.masked_msa(m),
        experimentally_resolved=heads.experimentally_resolved(s),
        pae=None if heads.pae is None else whole(heads.pae(z)),
    )


def read_shards(
    heads: Heads,
    z_BINZ: Tensor,
    mask_BN: Tensor,
    axis: DeviceMesh,
    how: How | None = None,
    host: Callable[..., Tensor] = torch.empty,
    *,
    distances: bool = True,
    chains_N: Tensor | None = None,
) -> PairNumbers:
    """Read a rank's rows as `apps.fold.subbatch.reading.read_pairs`; the axis' first rank gets all, others theirs.

    how        slices of a rank's rows
    host       makes the results' tensors
    distances  whether they are asked for
    chains_N   the chain of each residue of a complex, from 0
    """
    N, mine, rows = z_BINZ.shape[2], shard_of(z_BINZ.shape[2], axis), z_BINZ.shape[1]
    near = _distances(heads, z_BINZ, axis, how, host) if distances else None
    pae = None if heads.pae is None else host((rows, N), dtype=torch.float32)
    scores = [z_BINZ.new_zeros(1, 1, dtype=torch.promote_types(z_BINZ.dtype, torch.float32))]
    across, by_chain = [scores[0][0]], []
    for at in _slices(how, rows):
        if heads.pae is not None and pae is not None:
            logits = heads.pae(z_BINZ[:, at])
            put(pae[at], predicted_aligned_error(logits)[0])
            there = slice(mine.start + at.start, min(mine.stop, mine.start + at.stop))
            count = max(0, there.stop - there.start)
            scores.append(aligned_tm_scores(logits, mask_BN)[:, :count])
            if chains_N is not None and count:
                found = chain_tm_scores(logits[0, :count], chains_N, chains_N[there])
                across.append(found[0])
                by_chain.append(found[1])
    near = None if near is None else _on_first(near, N, axis)
    if pae is None:
        return PairNumbers(near, None, None)
    ptm = all_reduce_max(torch.cat(scores, 1).amax(), axis)
    pae = _on_first(pae, N, axis)
    if chains_N is None:
        return PairNumbers(near, pae, ptm)
    iptm = all_reduce_max(torch.cat(across).amax(), axis)
    return PairNumbers(near, pae, ptm, iptm, _best_of_chains(by_chain, chains_N[mine], chains_N, scores[0], axis))


def _best_of_chains(by_chain: list[Tensor], own: Tensor, chains_N: Tensor, like: Tensor, axis: DeviceMesh) -> Tensor:
    """[chains, chains] of all ranks' rows, of which by_chain are this one's."""
    C = int(chains_N.max()) + 1
    best = like.new_zeros(C, C)
    for chain in own.unique().tolist():
        best[chain] = torch.cat(by_chain)[own == chain].amax(0)
    return best_of_both(all_reduce_max(best, axis))


def _distances(heads: Heads, z_BINZ: Tensor, axis: DeviceMesh, how: How | None, host: Callable[..., Tensor]) -> Tensor:
    """Distances of a rank's rows, fp16[I, N, 64]."""
    rows, N = z_BINZ.shape[1:3]
    half = heads.distogram(z_BINZ)
    back = transpose_(half.clone(), N, axis)
    found = host((rows, N, half.shape[-1]), dtype=torch.float16)
    for at in _slices(how, rows):
        put(found[at], torch.softmax((half[:, at] + back[:, at]).float(), -1)[0])
    return found


def _on_first(own: Tensor, length: int, axis: DeviceMesh) -> Tensor:
    """Rows [I, ..] of all ranks, on their hosts, on the first one's, [N, ..]; elsewhere what came in."""
    size = axis.size()
    if size == 1 or stands_for_host(own):
        return own[:length]
    whole = own.new_empty(size * len(own), *own.shape[1:]) if axis.get_local_rank() == 0 else None
    if not own.is_meta:
        parts = None if whole is None else list(whole.chunk(size))
        dist.gather(own, parts, group=axis.get_group(), group_dst=0)
    return own if whole is None else whole[:length]


_RUNS: dict[type[nn.Module], Callable[..., Tensor]] = {
    TemplatePairEmbedder: _template_pairs,
    TemplateChainsEmbedder: _chain_templates,
    RowAttentionWithPairBias: _row_attention,
    ColumnAttention: _column_attention,
    ColumnGlobalAttention: _column_attention,
    Transition: _transition,
    OuterProductMean: _outer_product,
    TriangleMultiplication: _multiply,
    TriangleAttention: _triangle_attention,
    InvariantPointAttention: _gather,
    MultimerPointAttention: _gather,
}
