"""The messages of axial parallelism in training, as closed forms: of a forward with gradients and its backward.

A shard of a dim of n rows has ceil(n / ranks), so that a gathered dim has that many times the ranks: n' below. For the
blocks of a stack with D channels of s sequences, and of pairs with Z channels:

    gathered    biases and factors of products   n' n (H + 2 C + 2 H_pairs), and s n' C_outer
    exchanged   m there and back                 2 (s' / ranks) n' D
                z there and back, twice          4 (n' / ranks) n' Z

Where the outer product mean comes first (models of complexes) a factor is gathered by sequences, s' n C_outer, and the
other exchanged, (s' / ranks) n' C_outer.

In the backward what was gathered is reduced and scattered, and what was exchanged and used goes back. Beside the
stacks: m is joined behind them, and so are the heads' rows and what points gathered; the gradients of queries, keys and
values, whole on every rank, are summed. Alignments are of full size. Blocks that are computed again send what they sent
once more each time (`core.trace.segments`), but for m on its way back where that comes behind all that the backward
asks for, in models of complexes; what mode selective keeps of products, none of which is sent, changes nothing. An
iteration without gradients sends z from rank to rank, and factors in pieces, instead (`apps.fold.axial`).

Cheng et al. 2022, FastFold, table 3.
"""

from collections.abc import Iterable, Iterator

from torch import nn

from apps.fold.model.config import EvoformerConfig, ModelConfig, MultimerConfig, PairConfig
from core.config import UserError
from core.parallel.plan import block_lists, blocks_of
from core.parallel.recompute import RecomputeConfig
from core.placement.style import Message, Messages, Site
from core.trace.segments import NAMED, Again, Segments, runs_again


def _config(site: Site) -> ModelConfig:
    return site.module.config


def _whole(site: Site, rows: int) -> int:
    """Rows that are gathered of a dim of so many."""
    return site.size() * -(-rows // site.size())


def _pairs(site: Site) -> int:
    return site.batch * _whole(site, site.length) * site.length


def _shown(site: Site) -> int:
    """Rows of the MSA with those of templates."""
    config = _config(site)
    return config.max_msa + (config.max_templates if config.templates is not None else 0)


def _pair_stack(site: Site, config: PairConfig, dim: int) -> tuple[int, int]:
    """Elements that the updates of pairs gather, and exchange."""
    gathered = _pairs(site) * 2 * (config.product_dim + config.num_heads)
    return gathered, 4 * site.batch * _whole(site, site.length) ** 2 // site.size() * dim


def _stack(site: Site, config: EvoformerConfig, dim: int, rows: int) -> tuple[int, int]:
    """The same of a block."""
    gathered, exchanged = _pair_stack(site, config.pair, _config(site).pair_dim)
    gathered += _biases(site, config)
    if _outer_first(site):
        gathered += site.batch * _whole(site, rows) * site.length * config.outer_dim
        exchanged += _switched(site, rows, config.outer_dim)
    else:
        gathered += site.batch * rows * _whole(site, site.length) * config.outer_dim
    return gathered, exchanged + 2 * _switched(site, rows, dim)


def _outer_first(site: Site) -> bool:
    return isinstance(_config(site), MultimerConfig)


def _biases(site: Site, config: EvoformerConfig) -> int:
    """Elements that the row attention of a block gathers."""
    return _pairs(site) * config.msa_heads


def _switched(site: Site, rows: int, dim: int) -> int:
    """Elements of a switch of so many sequences."""
    return site.batch * _whole(site, rows) * _whole(site, site.length) // site.size() * dim


def _stacks(site: Site) -> tuple[tuple[EvoformerConfig, int, int], ...]:
    """Of the extra MSA's stack and the Evoformer: its blocks, channels and sequences."""
    model = _config(site)
    return (model.extra, model.extra_dim, model.max_extra_msa), (model.evoformer, model.msa_dim, _shown(site))


def _blocks(site: Site) -> Iterator[tuple[int, int]]:
    """What each stack's blocks gather and exchange, all together."""
    model = _config(site)
    for config, dim, rows in _stacks(site):
        gathered, exchanged = _stack(site, config, dim, rows)
        yield config.num_blocks * gathered, config.num_blocks * exchanged
    if (templates := model.templates) is not None:
        many = templates.num_blocks * model.max_templates
        gathered, exchanged = _pair_stack(site, templates.pair, templates.dim)
        yield many * gathered, many * exchanged


def _runs_again(network: nn.Module, recompute: RecomputeConfig, segments: Segments | None) -> dict[nn.Module, Again]:
    """How often each block is computed again in the backward, of those that are."""
    if segments is not None:
        return dict(zip(blocks_of(network), runs_again(segments), strict=True))
    if recompute.mode in NAMED:
        each = [zip(blocks, runs_again(NAMED[recompute.mode](len(blocks)))) for blocks in block_lists(network)]
        return {block: again for found in each for block, again in found}
    return dict.fromkeys(blocks_of(network)[:: recompute.every], Again(cut=1)) if recompute.recomputes else {}


def _again(site: Site, recompute: RecomputeConfig, segments: Segments | None) -> Iterator[tuple[int, int]]:
    """What the blocks of each stack gather and exchange when they are computed again."""
    model, network = _config(site), site.module
    runs = _runs_again(network, recompute, segments)

    def sent(blocks: Iterable[nn.Module], gathered: int, exchanged: int, unread: int = 0) -> tuple[int, int]:
        """unread: what of it a block sends at its end, which nothing in its own backward asks for"""
        again = [runs[block] for block in blocks if block in runs]
        cut = sum(one.cut for one in again)
        many = cut + sum(one.whole for one in again)
        return many * gathered, many * exchanged - cut * unread

    for (config, dim, rows), stack in zip(_stacks(site), (network.extra_blocks, network.blocks)):
        yield sent(stack, *_stack(site, config, dim, rows), _switched(site, rows, dim) if _outer_first(site) else 0)
    if (templates := model.templates) is not None:
        gathered, exchanged = sent(
            network.template_embedder.pairs.blocks, *_pair_stack(site, templates.pair, templates.dim)
        )
        yield model.max_templates * gathered, model.max_templates * exchanged


def _gathered(site: Site) -> int:
    return sum(gathered for gathered, _ in _blocks(site))


def _exchanged(site: Site) -> int:
    bins = site.batch * _whole(site, site.length) ** 2 // site.size() * _config(site).heads.distogram_bins
    return bins + sum(exchanged for _, exchanged in _blocks(site))


def _returned(site: Site) -> int:
    """The same in the backward: nothing reads the extra MSA that the last of its blocks sends back.

    Where the outer product mean comes first nothing reads what that block makes of the extra MSA.
    """
    config = _config(site)
    if not config.extra.num_blocks:
        return _exchanged(site)
    return _exchanged(site) - (1 + _outer_first(site)) * _switched(site, config.max_extra_msa, config.extra_dim)


def _reduced(site: Site) -> int:
    """What was gathered in the backward: but for that block's biases, where nothing reads what it makes."""
    config = _config(site)
    unread = _outer_first(site) and config.extra.num_blocks > 0
    return _gathered(site) - (_biases(site, config.extra) if unread else 0)


def _msa(site: Site) -> int:
    return site.batch * _whole(site, _shown(site)) * site.length * _config(site).msa_dim


def _joined(site: Site) -> int:
    """m, what points gather in each layer, and the heads' rows."""
    config = _config(site)
    points = config.structure.num_heads * (
        config.structure.head_dim + 4 * config.structure.value_points + config.pair_dim
    )
    bins = config.heads.distogram_bins + (config.heads.pae_bins or 0)
    layers = site.batch * _whole(site, site.length) * config.structure.num_layers
    return _msa(site) + layers * points + _pairs(site) * bins


def _scalars(site: Site) -> int:
    """Queries, keys and values of all layers."""
    structure = _config(site).structure
    return structure.num_layers * site.batch * site.length * structure.num_heads * 3 * structure.head_dim


def _points(site: Site) -> int:
    """Their points, and the places of frames, but those where all frames begin."""
    structure = _config(site).structure
    points = structure.num_heads * (2 * structure.query_points + structure.value_points)
    places = structure.num_layers * points + structure.num_layers - 1
    return site.batch * site.length * 3 * places


def messages(recompute: RecomputeConfig, segments: Segments | None = None) -> Messages:
    """The messages of a microbatch, with those of blocks that are computed again in the backward.

    segments  those of mode budget

    Raises UserError for that mode without them: nobody knows its blocks before a step has been traced.
    """
    if recompute.mode == "budget" and segments is None:
        raise UserError(
            "recompute.mode=budget with axial parallelism: nobody has chosen which blocks send their messages again "
            "(core.train.segments does); use full, sqrt or recursive here"
        )
    again = (
        Message("all_gather", lambda site: sum(gathered for gathered, _ in _again(site, recompute, segments))),
        Message("all_to_all", lambda site: sum(exchanged for _, exchanged in _again(site, recompute, segments))),
    )
    return Messages(
        forward=(
            Message("all_gather", _gathered),
            Message("all_gather", _joined),
            Message("all_to_all", _exchanged),
        ),
        backward=(
            Message("reduce_scatter", _reduced),
            Message("all_gather", _msa),
            Message("all_to_all", _returned),
            Message("all_reduce", _scalars),
            Message("all_reduce", _points, width="wide"),
            *(again if recompute.recomputes or recompute.segmented else ()),
        ),
    )
