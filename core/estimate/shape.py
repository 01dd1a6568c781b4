"""The shapes that are estimated: a model as plain numbers, and how a run cuts it.

A model is its weights, what one block keeps for its backward, and its head. `decoder_shape` derives that from our
decoder's configuration; `megatron_block` is the published formula; any other model fills the dataclasses itself.

Sources: Rajbhandari et al., "ZeRO" (2020), section 3, for the bytes of the training state; Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (2022), equations 1 to 6, for activations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import groupby
from typing import Any, Literal, NamedTuple

from core.comm.block_code import BlockCode
from core.comm.volume import wire_share
from core.config import UserError
from core.kernels.cross_entropy import TILE_BYTES
from core.layout import Layout
from core.mesh import MeshConfig, TpMode, Zero, axis_size, mesh_shape
from core.models.decoder import DecoderConfig, decoder_without_memory
from core.models.plan import decoder_plan
from core.nn.mlp import is_gated
from core.optim.build import OptimConfig
from core.optim.roles import role_of
from core.optim.size import beside_bytes, state_bytes
from core.parallel.compress import COMPRESSIONS, CommConfig, takes, wire_bytes
from core.parallel.local import WORKERS
from core.parallel.pipeline.schedule import PipelineConfig
from core.parallel.recompute import SEGMENTED, STORED, RecomputeMode
from core.placement.messages import Sent, Widths, microbatch_bytes, microbatch_calls
from core.placement.table import Placed, Table, placement, shard_rows
from core.precision import Precision, compute_dtype, master_dtype
from core.trace.segments import NAMED, Segments, runs_of


@dataclass(frozen=True)
class Weight:
    """One parameter tensor.

    block   index of the block it belongs to; -1 before the blocks (embedding), num_blocks behind them (final norm)
    experts a stack of matrices, one for each expert, which expert parallelism deals out
    name    in the module, where it is one's; blocks that are alike have one name, that of the first
    """

    shape: tuple[int, ...]
    block: int = 0
    experts: bool = False
    name: str = ""


@dataclass(frozen=True)
class Part:
    """A block, or what is outside the blocks, on a rank: its weights' largest parts, weight by weight, in elements.

    block    index of the block, as of `Weight`
    whole    what the rank computes with
    updated  what its optimizer updates
    experts  elements of `whole` that are experts'
    state    bytes of the optimizer's state
    slots    in a message of all ranks' rows, of which each has as many as the largest
    kinds    (is of experts, its gradient is compressed); what a message has is of one kind
    """

    block: int
    whole: tuple[int, ...]
    updated: tuple[int, ...]
    experts: int = 0
    state: int = 0
    slots: tuple[int, ...] = ()
    kinds: tuple[tuple[bool, bool], ...] = ()

    @cached_property
    def num_whole(self) -> int:
        return sum(self.whole)

    @cached_property
    def num_updated(self) -> int:
        return sum(self.updated)

    @cached_property
    def num_sent(self) -> int:
        return sum(self.slots)

    @cached_property
    def num_summed(self) -> int:
        """Elements of whole gradients: in messages, or where they are compressed, each a tensor of its own."""
        each = zip(self.kinds, self.whole, self.slots, strict=True)
        return sum(whole if is_compressed else slot for (_, is_compressed), whole, slot in each)


class Compressed(NamedTuple):
    """The gradients that are compressed, on a rank.

    whole       elements that it computes
    updated     of these, those that its optimizer gets
    kept_bytes  that stay from step to step
    wire_bytes  that it sends over its link in their place, by rings
    """

    whole: int = 0
    updated: int = 0
    kept_bytes: int = 0
    wire_bytes: float = 0.0


def momentum_bytes(elements: int, wide: int) -> int:
    """Of a parameter's momentum and of which of its elements move, as ranks that have rows of them add them up."""
    return (wide + 1) * elements


@dataclass(frozen=True)
class Kept:
    """Activations per token of the sequence, in elements.

    replicated  the same on every tp rank, unless sequence parallelism cuts them
    sharded     cut by tensor parallelism
    gathered    whole on every tp rank in any case: the inputs of column-parallel products
    statistics  cut by tensor parallelism, and in fp32 or wider whatever the precision
    widened     whole on every tp rank: copies in fp32 of what the model computes in 16 bits
    whole       all features of the tokens that a rank has: on every tp rank, or on those of a grid's row
    routed      statistics of them, of what routes them
    """

    replicated: float = 0
    sharded: float = 0
    gathered: float = 0
    statistics: float = 0
    widened: float = 0
    whole: float = 0
    routed: float = 0

    def bytes_per_token(self, run: RunShape) -> float:
        return self._per_token(run, run.width_bytes, run.wide_bytes)

    def coded_per_token(self, run: RunShape, each: float) -> float:
        """Bytes where numbers wait for the backward in `each` bytes; statistics stay as they are."""
        return self._per_token(run, each, each)

    def _per_token(self, run: RunShape, each: float, widened_each: float) -> float:
        replicated = self.replicated / (run.tp if run.sequence_parallel else 1)
        elements = replicated + self.sharded / run.tp + self.gathered / (1 if run.tp_mode == "1d" else run.tp)
        of_row = 1 if run.tp_mode == "1d" else run.tp / run.tp_side
        elements += self.whole / of_row
        widened = widened_each * self.widened if run.width_bytes < run.wide_bytes else 0
        return each * elements + run.wide_bytes * (self.statistics / run.tp + self.routed / of_row) + widened


@dataclass(frozen=True)
class BlockShape:
    """The elements that one block keeps from its forward to its backward.

    input       its input: all that full checkpointing keeps
    everything  kept beside the input without checkpointing
    selective   kept beside the input with selective checkpointing: the results of matrix products
    weighed     of `everything` what weights' gradients are made from: inputs of products and norms; None: all of it
    working     gradients alive at once on the way back through it
    zeros       of `everything` results of a ReLU, of which about half are zero
    decoded     of `everything`, where it is compressed, alive at once as it was; None: as much as `working`
    saved       `everything` but statistics, storage by storage as a forward saves them; empty: one storage
    keys_dim    key/value heads x head size, which context parallelism sends
    scores_dim  heads x head size; q k^T and the sum over v cost 4 x scores_dim x length FLOPs a token
    """

    input: Kept
    everything: Kept
    selective: Kept
    working: Kept = field(default_factory=Kept)
    zeros: Kept = field(default_factory=Kept)
    decoded: Kept | None = None
    saved: tuple[Kept, ...] = ()
    weighed: Kept | None = None
    scores_dim: int = 0
    keys_dim: int = 0


@dataclass(frozen=True)
class HeadShape:
    """The fused head and loss of `core.kernels.cross_entropy`: it never holds more logits than one chunk.

    tile_bytes  of the chunk are in the softmax at a time, in fp32 or wider; None: all of it
    norm        what the norm before it, and BERT's layer, keep beside one input and output
    """

    vocab_size: int
    width: int
    tied: bool = True
    tile_bytes: int | None = None
    norm: Kept = Kept()


@dataclass(frozen=True)
class ModelShape:
    """A model of equal blocks, or of two kinds in turn.

    expert_block           the last of every `expert_every` blocks is of this kind
    expert_rows            rows of that kind's experts a token
    dim                    elements per token that pass between blocks
    num_matmul_parameters  weights that multiply every token (not embedding tables, but a tied head)
    tp_parts               equal parts (key/value heads) that tensor parallelism may deal out
    bias_heads             heads with a bias [heads, L, L] on the scores (ALiBi), kept for the step; 0: none
    windows                tokens that a token of each block sees at most, None: all; empty: no block has a window
    masks_windows          a window that hides something is a bias [L, L], kept for the step (on a CPU)
    table                  where its weights lie on a mesh, by their names; without one only ZeRO cuts them
    sent                   bytes of a microbatch that its plan sends on a rank of a run; None: by the published forms
    calls                  the number of those messages
    """

    weights: tuple[Weight, ...]
    num_blocks: int
    block: BlockShape
    dim: int
    head: HeadShape | None = None
    num_matmul_parameters: int = 0
    tp_parts: int = 1
    bias_heads: int = 0
    windows: tuple[int | None, ...] = ()
    masks_windows: bool = False
    expert_block: BlockShape | None = None
    expert_every: int = 1
    expert_rows: float = 0
    table: Callable[[MeshConfig, Zero], Table] | None = field(default=None, compare=False)
    sent: Callable[[RunShape], Sent] | None = field(default=None, compare=False)
    calls: Callable[[RunShape], Sent] | None = field(default=None, compare=False)
    _known: dict[Any, Any] = field(init=False, default_factory=dict, compare=False, repr=False)
    """what was asked before"""

    def parts(self, run: RunShape) -> tuple[Part, ...]:
        """The parts of all ranks of a pipeline, in their order."""
        key = "parts", run.mesh, run.zero, run.comm, run.optimizer, run.wide_bytes
        return self.once(key, lambda: self._all_parts(run))

    def _all_parts(self, run: RunShape) -> tuple[Part, ...]:
        alike: dict[tuple[Any, ...], Part] = {}
        found = []
        for block, weights in groupby(sorted(self.weights, key=lambda w: w.block), key=lambda w: w.block):
            own = tuple(weights)
            inside = 0 <= block < self.num_blocks
            kind = (inside or block, *((weight.shape, weight.experts, weight.name) for weight in own))
            if kind not in alike:
                alike[kind] = self._part(block, own, run)
            found.append(replace(alike[kind], block=block))
        return tuple(found)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns, made once for a key."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def copied_part(self, run: RunShape) -> Part:
        """A tied head's weight on another rank than the embedding, which then has its optimizer state."""
        assert self.head is not None
        weight = Weight((self.head.vocab_size, self.head.width), self.num_blocks, name="head.weight")
        return replace(self._part(self.num_blocks, (weight,), run), state=0)

    def _part(self, block: int, weights: tuple[Weight, ...], run: RunShape) -> Part:
        rows = [self._row(weight, run) for weight in weights]
        whole = [math.prod(row.layout.largest_shape()) for row in rows]
        updated = [row.master.largest_shape() for row in rows]
        ranks, state = run.num_gradient_ranks * run.tp, 0
        for weight, part in zip(weights, updated, strict=True):
            role = role_of(weight.name, weight.shape)
            state += state_bytes(run.optimizer, part, run.wide_bytes, whole=weight.shape, role=role, ranks=ranks)
            seen = (self.held(weight, run)[0], *weight.shape[1:]) if role == "experts" else weight.shape
            state += beside_bytes(run.optimizer, seen, run.wide_bytes, role)
        experts = sum(n for n, weight in zip(whole, weights, strict=True) if weight.experts)
        own = tuple(map(math.prod, updated))
        slots, kinds = tuple(whole), tuple((weight.experts, takes(weight.shape, run.comm)) for weight in weights)
        if run.zero:
            ranks = run.shard_ranks
            slots = tuple(n * (ranks // run.ep if expert else ranks) for n, (expert, _) in zip(own, kinds, strict=True))
        return Part(block, tuple(whole), own, experts, state, slots, kinds)

    def held(self, weight: Weight, run: RunShape) -> tuple[int, ...]:
        """The largest part of a weight that a rank computes with."""
        return self._row(weight, run).layout.largest_shape()

    def compressed(self, run: RunShape) -> Compressed:
        """Of a run without a pipeline, which compresses nothing."""
        if run.comm.compress is None:
            return Compressed()
        key = "compressed", run.mesh, run.zero, run.comm, run.num_gradient_ranks, run.wide_bytes
        return self.once(key, lambda: self._compressed(run))

    def _compressed(self, run: RunShape) -> Compressed:
        assert run.comm.compress is not None
        found = Compressed()
        for weight in self.weights:
            if takes(weight.shape, run.comm):
                row = self._row(weight, run)
                whole, updated = (math.prod(layout.largest_shape()) for layout in (row.layout, row.master))
                sent = wire_bytes(row.layout, run.comm, run.num_gradient_ranks, run.wide_bytes)
                if run.comm.compress == "zero_one" and not run.comm.has_local_steps and not row.whole:
                    sent += wire_share("all_reduce", run.shard_ranks) * momentum_bytes(whole, run.wide_bytes)
                sizes = whole, run.num_gradient_ranks, run.wide_bytes, run.width_bytes
                kept = COMPRESSIONS[run.comm.compress].kept(run.comm, *sizes)
                found = Compressed(
                    found.whole + whole, found.updated + updated, found.kept_bytes + kept, found.wire_bytes + sent
                )
        return found

    def unsent_elements(self, run: RunShape) -> int:
        """Elements of the errors that codes of gradients leave on a rank, of a run without a pipeline."""
        if not run.comm.feeds_back:
            return 0
        rows = (self._row(weight, run) for weight in self.weights if len(weight.shape) > 1)
        return sum(math.prod(row.layout.largest_shape()) for row in rows)

    def _row(self, weight: Weight, run: RunShape) -> Placed:
        if self.table is not None:
            return self.table(run.mesh, run.zero)[weight.name]
        whole = Layout(weight.shape)
        return Placed(whole, shard_rows(whole, mesh_shape(run.mesh)) if run.zero and weight.shape else whole)

    def num_parameters(self, *, experts: bool | None = None) -> int:
        """Elements of all weights; of experts' alone, or without them."""
        return sum(math.prod(weight.shape) for weight in self.weights if experts in (None, weight.experts))

    @cached_property
    def vectors(self) -> float:
        """The share of the elements that are of vectors, which no code of messages takes."""
        return sum(math.prod(one.shape) for one in self.weights if len(one.shape) < 2) / max(1, self.num_parameters())

    def keys_seen(self, length: int) -> list[int]:
        """Keys of so many that each block's scores are taken of, counted without the causal half."""
        return [min(window or length, length) for window in self.windows or [None] * self.num_blocks]

    def masks(self, length: int) -> bool:
        """Return whether windows are kept as a bias."""
        return self.masks_windows and min(self.keys_seen(length), default=length) < length

    @property
    def num_experts(self) -> int:
        """Experts of a block that has any."""
        return max((weight.shape[0] for weight in self.weights if weight.experts), default=0)

    @property
    def num_expert_blocks(self) -> int:
        return 0 if self.expert_block is None else self.num_blocks // self.expert_every

    def block_of(self, index: int) -> BlockShape:
        """The shape of block number `index`."""
        has_experts = self.expert_block is not None and (index + 1) % self.expert_every == 0
        return self.expert_block if has_experts and self.expert_block is not None else self.block

    @property
    def largest_block(self) -> BlockShape:
        """The kind that keeps more."""
        return self.block if self.expert_block is None else self.expert_block


@dataclass(frozen=True)
class RunShape:
    """The shape of a run: how it cuts the model and the batch.

    optimizer          says what state a parameter has
    optimizer_kernel   scratch of the update: "fused" none, "loop" two of the largest parameter, "foreach" one of all
    cp_exchange        of the cp ranks, those that exchange heads (Ulysses); rings go across them
    tp_mode, tp_depth  how tp ranks share the model: see `core.mesh.MeshConfig`
    pipeline           schedule and split of the blocks over the pp ranks
    sequence_parallel  norms and residuals cut along the sequence wherever tp > 1, as our plans do
    recompute          activation checkpointing of blocks 0, n, 2n, … for `recompute_every` n, offloading or compression
                       (with `recompute_bits` in so many a number), or checkpointing by segments of each stage's; of
                       mode budget, whose segments a step's trace chooses, there is no closed form
    microbatch_size    sequences per data-parallel rank at once; num_microbatches of them make a step
    reduce_each        gradients are reduced after each microbatch, not only after the last
    comm               how they are compressed
    local_every        steps that each rank of dp_replicate takes by itself between two averages with the others; 0: it
                       does not; outer_momentum: the average has one; local_code: of its messages, in few bits;
                       local_error: with error feedback; fragments: parts that are averaged in turn
    """

    precision: Precision = "fp32"
    optimizer: OptimConfig = field(default_factory=OptimConfig)
    optimizer_kernel: Literal["fused", "loop", "foreach"] = "fused"
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    cp_exchange: int = 1
    tp: int = 1
    tp_mode: TpMode = "1d"
    tp_depth: int = 1
    sequence_parallel: bool = True
    pp: int = 1
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    ep: int = 1
    zero: Zero = 0
    recompute: RecomputeMode = "none"
    recompute_every: int = 1
    recompute_bits: int | None = None
    microbatch_size: int = 1
    num_microbatches: int = 1
    reduce_each: bool = False
    comm: CommConfig = field(default_factory=CommConfig)
    sequence_length: int = 1024
    local_every: int = 0
    outer_momentum: bool = False
    local_code: BlockCode | None = None
    local_error: bool = False
    fragments: int = 1

    @cached_property
    def num_workers(self) -> int:
        """Workers that train by themselves; 1 where all ranks take each step together."""
        return axis_size(mesh_shape(self.mesh), WORKERS) if self.local_every else 1

    @cached_property
    def mesh(self) -> MeshConfig:
        mode = "ring" if self.cp_exchange == 1 else "ulysses" if self.cp_exchange == self.cp else "mixed"
        exchange = self.cp_exchange if mode == "mixed" else 1
        sizes = {name: getattr(self, name) for name in ("dp_replicate", "dp_shard", "tp", "tp_mode", "tp_depth", "pp")}
        return MeshConfig(**sizes, cp=self.cp, cp_mode=mode, cp_ulysses=exchange, ep=self.ep)

    @cached_property
    def width_bytes(self) -> int:
        """Bytes of an element in which the model computes."""
        return compute_dtype(self.precision).itemsize

    @cached_property
    def wide_bytes(self) -> int:
        """Bytes of an element of masters, optimizer state and reductions."""
        return master_dtype(self.precision).itemsize

    def row_bytes(self, features: int) -> int:
        """Of a token's features, as a stage hands them on and experts exchange them."""
        code = self.comm.row_code
        return features * self.width_bytes if code is None else code(features).num_bytes(self.width_bytes)

    def widths(self, features: int) -> Widths:
        """Of the messages of a model of so many features."""
        return Widths(self.width_bytes, self.wide_bytes, self.row_bytes(features) / features)

    @cached_property
    def tp_side(self) -> int:
        """Ranks over which heads and features are cut: tp, or the side of its grid."""
        power = {"1d": 1, "2d": 2, "2.5d": 2, "3d": 3}[self.tp_mode]
        return round((self.tp / self.tp_depth) ** (1 / power))

    @cached_property
    def tokens(self) -> int:
        """Tokens of one microbatch on one rank."""
        return self.microbatch_size * -(-self.sequence_length // self.cp)

    @property
    def num_stages(self) -> int:
        return self.pipeline.num_stages(self.pp) if self.pp > 1 else 1

    @property
    def num_data_ranks(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def shard_ranks(self) -> int:
        """Ranks over which ZeRO shards."""
        return self.dp_shard * self.cp

    @property
    def num_gradient_ranks(self) -> int:
        """Ranks whose gradients are added up."""
        return self.num_data_ranks // self.num_workers * self.cp

    @property
    def holds_whole_gradients(self) -> bool:
        """True where whole gradients wait between microbatches."""
        return self.num_microbatches > 1 and not (self.reduce_each and self.zero >= 2)

    def recomputes(self, block: int) -> bool:
        """Does block number `block` drop its activations, by itself?"""
        return self.recompute in ("full", "selective") and block % self.recompute_every == 0

    def stores(self, block: int) -> bool:
        """Are the activations of block number `block` kept in another place or form?"""
        return self.recompute in STORED and block % self.recompute_every == 0

    @property
    def again(self) -> float:
        """Forwards that a backward takes beside its own time, in theory: of segments about as of full."""
        return float(self.recompute == "full" or self.recompute in SEGMENTED)

    def segments(self, num_blocks: int) -> Segments:
        """What a stage of so many blocks does in a mode that goes over several of them."""
        if self.recompute not in NAMED:
            raise UserError(
                f"recompute.mode={self.recompute} has no closed form: a step's trace chooses what is computed again"
            )
        return NAMED[self.recompute](num_blocks)

    def runs_again(self, blocks: range) -> list[float]:
        """How often each of a stage's blocks runs in the backward; selective, which keeps products, counts for none."""
        if self.recompute in SEGMENTED:
            return [float(runs - 1) for runs in runs_of(self.segments(len(blocks)))]
        return [float(self.recompute == "full" and self.recomputes(index)) for index in blocks]


def megatron_block(dim: int, num_heads: int, sequence_length: int) -> BlockShape:
    """The block of Korthikanti et al.: attention materialised, dropout, 16 bit; s b h (10 + 24/t + 5 a s / (h t)).

    With sequence parallelism s b h / t (34 + 5 a s / h), selective without the second term, full 2 s b h. Masks of
    dropout count as half an element, so the bytes are those of the paper in bf16 and fp16 only.
    """
    return BlockShape(
        input=Kept(replicated=dim),
        everything=Kept(replicated=4 * dim, sharded=12 * dim + 2.5 * num_heads * sequence_length),
        selective=Kept(replicated=4 * dim, sharded=12 * dim),
        weighed=Kept(replicated=3 * dim, sharded=5 * dim),
        scores_dim=dim,
        keys_dim=dim,
    )


@lru_cache(64)
def decoder_shape(config: DecoderConfig, *, device_type: str = "cuda") -> ModelShape:
    """Our decoder: its parameters as they are, and what its eager forward leaves for the backward.

    On a CPU torch composes RMSNorm of several operators and keeps the normalised input too, and of 16 bits the input in
    fp32; and the softmax of the loss goes over small tiles.
    Attention is fused (scaled_dot_product_attention), so nothing grows with the square of the length but ALiBi's bias.
    """
    model = decoder_without_memory(config)
    period = config.moe.every if config.moe.num_experts else 1
    tables = ("embedding.tokens.weight", "embedding.positions.weight", "embedding.types.weight")
    weights, num_matmul = [], 0
    for name, parameter in model.named_parameters():
        shape, block = tuple(parameter.shape), _block_index(name, config.num_layers)
        alike = name.replace(f"blocks.{block}.", f"blocks.{block % period}.") if name.startswith("blocks.") else name
        weights.append(Weight(shape, block, experts=".experts." in name, name=alike))
        if parameter.ndim >= 2 and name.endswith(".weight") and name not in tables:
            num_matmul += round(parameter.numel() * config.active_share(name))
    composed = config.norm != "layer_norm" and device_type == "cpu"
    if config.tied_head:
        num_matmul += config.vocab_size * config.embedding_size
    return ModelShape(
        weights=tuple(weights),
        num_blocks=config.num_layers,
        block=_decoder_block(config, composed),
        dim=config.dim,
        head=HeadShape(
            config.vocab_size,
            config.embedding_size,
            config.tied_head,
            tile_bytes=TILE_BYTES if device_type == "cpu" else None,
            norm=_behind_blocks(config, composed),
        ),
        num_matmul_parameters=num_matmul,
        tp_parts=config.kv_heads,
        bias_heads=config.num_heads if config.positions == "alibi" else 0,
        windows=tuple(config.layer_window(index) for index in range(config.num_layers)),
        masks_windows=device_type == "cpu",
        expert_block=_with_experts(_decoder_block(config, composed), config) if config.moe.num_experts else None,
        expert_every=config.moe.every,
        expert_rows=_expert_rows(config),
        table=lru_cache(256)(partial(_table, _with_blocks(config, period))),
        sent=lru_cache(256)(partial(_sent, config, period, partial(_microbatch, microbatch_bytes))),
        calls=lru_cache(256)(partial(_sent, config, period, partial(_microbatch, microbatch_calls))),
    )


def _with_blocks(config: DecoderConfig, number: int) -> DecoderConfig:
    """The decoder with its first blocks alone, of which all others are alike."""
    full = tuple(index for index in config.full_layers if index < number)
    return replace(config, num_layers=min(number, config.num_layers), full_layers=full)


def _table(config: DecoderConfig, mesh: MeshConfig, zero: Zero) -> Table:
    return placement(decoder_without_memory(config), decoder_plan(config, mesh), mesh, zero)


def _sent(config: DecoderConfig, period: int, of: Callable[[DecoderConfig, RunShape], Sent], run: RunShape) -> Sent:
    """What all blocks send, by those of a few: so much for each period more."""
    periods, rest = divmod(config.num_layers, period)
    if periods < 3:
        return of(config, run)
    few, more = (of(_with_blocks(config, number * period + rest), run) for number in (1, 2))
    return Counter({key: few[key] + (periods - 1) * (n - few[key]) for key, n in more.items()})


def _microbatch(by: Callable[..., Sent], config: DecoderConfig, run: RunShape) -> Sent:
    model, plan = decoder_without_memory(config), decoder_plan(config, run.mesh)
    batch, widths = run.microbatch_size, run.widths(config.dim)
    return by(model, plan, run.mesh, batch, run.tokens // batch, widths)


def _behind_blocks(config: DecoderConfig, composed_norms: bool) -> Kept:
    """What is kept between the blocks and the head beside one input and output: of BERT's layer two activations."""
    if config.mlm_head:
        return Kept(2 * config.dim)
    return Kept(config.dim, widened=config.dim) if composed_norms else Kept()


def _block_index(name: str, num_blocks: int) -> int:
    if name.startswith("blocks."):
        return int(name.split(".")[1])
    return -1 if name.startswith("embedding.") else num_blocks


def _decoder_block(config: DecoderConfig, composed_norms: bool) -> BlockShape:
    """Tensors that autograd keeps, by operator.

    norms      two inputs, one or both of which are the block's own; two outputs, which the products behind them keep;
               of norms behind attention and MLP the inputs alone
    attention  the fused q, k, v; turned copies of q and k where positions are rotary; o and its log-sum-exp
    its norms  the queries apart from the keys and values that they lie between, where a group has several
    MLP        what the activation keeps of `up`, and `down`'s input (ReLU keeps only its output, which is that input)
    """
    queries = config.num_heads * config.head_size
    keys = config.kv_heads * config.head_size
    qkv, hidden = queries + 2 * keys, config.ffn_dim
    turned = queries + keys if config.positions == "rotary" else 0
    products = 2 * hidden if is_gated(config.activation) else hidden
    mlp = {"relu": hidden}.get(config.activation, 2 * products)
    statistics = config.num_heads + (4 if config.norm == "layer_norm" else 2)
    behind = 2 * config.dim if config.out_norms else 0
    statistics += 2 if config.out_norms else 0
    composed = 2 * config.dim + behind if composed_norms else 0
    normed = queries + keys if config.qk_norm else 0
    apart = queries if config.qk_norm and queries > keys else 0
    composed_heads = normed if composed_norms else 0
    statistics += config.num_heads + config.kv_heads if config.qk_norm else 0
    # The gradients of the hidden activations that meet before what they were made from is freed.
    meeting = 2 if config.activation == "relu" or is_gated(config.activation) else 1
    norm = Kept(widened=composed / 2), Kept(composed / 2)  # what one that is composed keeps, too
    normed_inputs = (0 if config.parallel_residual else config.dim) + behind
    return BlockShape(
        input=Kept(replicated=config.dim),
        everything=Kept(
            normed_inputs + composed,
            qkv + apart + composed_heads + turned + queries + mlp,
            2 * config.dim,
            statistics,
            composed + composed_heads,
        ),
        selective=Kept(sharded=qkv + products, gathered=2 * config.dim),
        working=Kept(sharded=meeting * hidden, gathered=config.dim),
        zeros=Kept(sharded=hidden if config.activation == "relu" else 0),
        decoded=Kept(sharded=hidden, gathered=0 if config.activation == "relu" else config.dim),
        saved=_saved(
            *norm,
            Kept(gathered=config.dim),
            *(
                Kept(sharded=elements)
                for elements in (qkv, apart + composed_heads, queries if turned else 0, keys if turned else 0, queries)
            ),
            Kept(normed_inputs),
            *norm,
            Kept(gathered=config.dim),
            *(Kept(sharded=hidden) for _ in range(mlp // hidden)),
        ),
        # A composed norm multiplies its weight with the normalised input, and needs no more.
        weighed=Kept(composed - config.dim if composed else normed_inputs, normed + queries + hidden, 2 * config.dim),
        scores_dim=queries,
        keys_dim=keys,
    )


def _saved(*storages: Kept) -> tuple[Kept, ...]:
    """Those of them that there are."""
    return tuple(storage for storage in storages if storage != Kept())


def _expert_rows(config: DecoderConfig) -> float:
    """Rows of the experts a token, where loads are balanced: no more than they have room for."""
    moe = config.moe
    return moe.per_token * min(1.0, moe.capacity) if moe.num_experts else 0.0


def _with_experts(block: BlockShape, config: DecoderConfig) -> BlockShape:
    """A block with experts in the place of its MLP, loads balanced.

    router   its input, and of what it is made; logits, probabilities and gates, in some tensors of the experts' number;
             tensor parallelism cuts none of it, since its ranks route alike
    experts  for each of their rows what an MLP keeps, its input, its output, which the gate multiplies, and its places
    """
    rows, experts, dim = _expert_rows(config), config.moe.num_experts, config.dim
    products = (2 if is_gated(config.activation) else 1) * config.ffn_dim
    mlp = {"relu": config.ffn_dim}.get(config.activation, 2 * products)
    everything, selective, working, weighed = block.everything, block.selective, block.working, block.weighed
    assert weighed is not None
    return replace(
        block,
        everything=replace(
            everything,
            sharded=everything.sharded + (rows - 1) * mlp,
            gathered=everything.gathered - dim,
            whole=2 * dim + 2 * rows * dim,
            routed=5 * experts + 6 * rows,
            widened=everything.widened + dim,
        ),
        selective=replace(
            selective,
            sharded=selective.sharded + (rows - 1) * products,
            gathered=selective.gathered - dim,
            whole=rows * dim,
            routed=experts,
        ),
        working=replace(working, sharded=rows * working.sharded, gathered=0, whole=rows * dim),
        zeros=replace(block.zeros, sharded=rows * block.zeros.sharded),
        decoded=Kept(sharded=rows * config.ffn_dim, whole=rows * dim),
        saved=(
            *block.saved[: -1 - mlp // config.ffn_dim],
            Kept(widened=dim),
            *(Kept(whole=dim) for _ in range(2)),
            Kept(whole=rows * dim),
            *(Kept(sharded=rows * config.ffn_dim) for _ in range(mlp // config.ffn_dim)),
            Kept(whole=rows * dim),
        ),
        weighed=replace(
            weighed,
            sharded=weighed.sharded + (rows - 1) * config.ffn_dim,
            whole=rows * dim,
            widened=weighed.widened + dim,
        ),
    )
