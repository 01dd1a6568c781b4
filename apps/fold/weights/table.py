"""The name table: which tensors of AlphaFold's and of OpenFold's make each parameter of ours.

Both layouts hold the same numbers. An `Entry` says that a parameter of ours is the rows of one or more published
tensors below each other; a `PublishedTensor` has AlphaFold's key, its shape there, and OpenFold's name. The table is
read in both directions, so import and export cannot drift apart. What differs:

- AlphaFold stores weights as [inputs.., outputs..], with heads as dims of their own; OpenFold and we as [out, in].
- AlphaFold stacks the blocks of a stack along a first dim.
- Ours joins what is multiplied by the same activations: q, k and v; a and b of the triangle product and their gates.
- For incoming edges AlphaFold calls b left and a right; OpenFold names them as we do.
- Of AlphaFold-Multimer version 3 has the projections of left and right in one array, as the gates; OpenFold's names are
  not given for what it alone has.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod

from apps.fold.model.config import (
    EXTRA_DIM,
    MSA_DIM,
    MULTIMER_TARGET_DIM,
    MULTIMER_TORSION_DIM,
    RECYCLE_BINS,
    RELATIVE_POSITIONS,
    TARGET_DIM,
    TEMPLATE_BINS,
    TEMPLATE_PAIR_DIM,
    TEMPLATE_TORSION_DIM,
    EvoformerConfig,
    ModelConfig,
    MultimerConfig,
    PairConfig,
    StructureConfig,
)
from apps.fold.model.multimer import COPIES, POSITIONS

ROOT = "alphafold/alphafold_iteration/"


@dataclass(frozen=True)
class PublishedTensor:
    """One tensor of theirs.

    key       AlphaFold's `scope//leaf`; shape there, without the dim of blocks; the first `num_inputs` dims are inputs
    block     (number, how many) in a stack; None outside of stacks
    openfold  OpenFold's name
    swapped   whether the halves of the outputs change places
    """

    key: str
    shape: tuple[int, ...]
    num_inputs: int
    block: tuple[int, int] | None
    openfold: str
    swapped: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of AlphaFold's array, with the dim of blocks."""
        return self.shape if self.block is None else (self.block[1], *self.shape)

    @property
    def our_shape(self) -> tuple[int, ...]:
        out = prod(self.shape[self.num_inputs :])
        return (out, prod(self.shape[: self.num_inputs])) if self.num_inputs else (out,)


@dataclass(frozen=True)
class Entry:
    """A parameter of ours: the rows of its sources below each other."""

    name: str
    sources: tuple[PublishedTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.sources[0].our_shape
        return (sum(source.our_shape[0] for source in self.sources), *first[1:])


@dataclass
class Scope:
    """The place of the builder: our prefix, AlphaFold's scope, OpenFold's prefix, the block of a stack."""

    ours: str
    alphafold: str
    openfold: str
    block: tuple[int, int] | None = None
    entries: list[Entry] = field(default_factory=list)

    def inside(self, ours: str, alphafold: str, openfold: str) -> "Scope":
        """A part of this; an empty name stays where it is."""
        return Scope(
            _joined(self.ours, ours, "."), _joined(self.alphafold, alphafold, "/"),
            _joined(self.openfold, openfold, "."), self.block, self.entries,
        )  # fmt: skip

    def source(self, leaf: str, openfold: str, shape: tuple[int, ...], num_inputs: int) -> PublishedTensor:
        scope, _, leaf = leaf.rpartition("//")
        key = f"{ROOT}{_joined(self.alphafold, scope, '/')}//{leaf}"
        return PublishedTensor(key, shape, num_inputs, self.block, _joined(self.openfold, openfold, "."))

    def add(self, name: str, *sources: PublishedTensor) -> None:
        self.entries.append(Entry(_joined(self.ours, name, "."), sources))

    def linear(self, ours: str, scope: str, openfold: str, dims: tuple[int, int], bias: bool = True) -> None:
        """A linear map of in, out = dims, whose three names are those of its module."""
        in_dim, out_dim = dims
        self.add(f"{ours}.weight", self.source(f"{scope}//weights", f"{openfold}.weight", (in_dim, out_dim), 1))
        if bias:
            self.add(f"{ours}.bias", self.source(f"{scope}//bias", f"{openfold}.bias", (out_dim,), 0))

    def norm(self, ours: str, scope: str, openfold: str, dim: int, separator: str = ".") -> None:
        self.add(f"{ours}{separator}weight", self.source(f"{scope}//scale", f"{openfold}.weight", (dim,), 0))
        self.add(f"{ours}{separator}bias", self.source(f"{scope}//offset", f"{openfold}.bias", (dim,), 0))


def _joined(first: str, second: str, separator: str) -> str:
    return separator.join(part for part in (first, second) if part)


def name_table(config: ModelConfig) -> list[Entry]:
    """An entry for every parameter of `AlphaFold(config)`, or of `Multimer(config)`."""
    complexes = isinstance(config, MultimerConfig)
    entries: list[Entry] = []
    top = Scope("", "", "", None, entries)
    _embedders(top, config)
    if config.templates is not None:
        (_template_chains if complexes else _templates)(top, config)
    fused = complexes and config.fused_products
    for number in range(config.extra.num_blocks):
        block = (number, config.extra.num_blocks)
        names = (f"extra_blocks.{number}", "evoformer/extra_msa_stack", f"extra_msa_stack.blocks.{number}")
        at = Scope(*names, block, entries)
        _evoformer_block(at, config.extra_dim, config.pair_dim, config.extra, fused, global_columns=True)
    for number in range(config.evoformer.num_blocks):
        block = (number, config.evoformer.num_blocks)
        names = (f"blocks.{number}", "evoformer/evoformer_iteration", f"evoformer.blocks.{number}")
        _evoformer_block(Scope(*names, block, entries), config.msa_dim, config.pair_dim, config.evoformer, fused)
    top.linear("single", "evoformer/single_activations", "evoformer.linear", (config.msa_dim, config.single_dim))
    scope = top.inside("structure_module", "structure_module", "structure_module")
    structure(scope, config.single_dim, config.pair_dim, config.structure, by_heads=complexes)
    _heads(top.inside("heads", "", "aux_heads"), config)
    return entries


def _embedders(top: Scope, config: ModelConfig) -> None:
    msa, pair, complexes = config.msa_dim, config.pair_dim, isinstance(config, MultimerConfig)
    target = MULTIMER_TARGET_DIM if complexes else TARGET_DIM
    positions = POSITIONS + 1 + COPIES if complexes else 2 * RELATIVE_POSITIONS + 1
    scope = top.inside("input_embedder", "evoformer", "input_embedder")
    scope.linear("target", "preprocess_1d", "linear_tf_m", (target, msa))
    scope.linear("msa", "preprocess_msa", "linear_msa_m", (MSA_DIM, msa))
    scope.linear("left", "left_single", "linear_tf_z_i", (target, pair))
    scope.linear("right", "right_single", "linear_tf_z_j", (target, pair))
    position = "~_relative_encoding/position_activations" if complexes else "pair_activiations"
    scope.linear("position", position, "linear_relpos", (positions, pair))
    scope = top.inside("recycling_embedder", "evoformer", "recycling_embedder")
    scope.linear("distance", "prev_pos_linear", "linear", (RECYCLE_BINS[2], pair))
    scope.norm("msa_norm", "prev_msa_first_row_norm", "layer_norm_m", msa)
    scope.norm("pair_norm", "prev_pair_norm", "layer_norm_z", pair)
    scope = top.inside("extra_embedder", "evoformer", "extra_msa_embedder")
    scope.linear("linear", "extra_msa_activations", "linear", (EXTRA_DIM, config.extra_dim))


def _templates(top: Scope, config: ModelConfig) -> None:
    templates = config.templates
    assert templates is not None
    scope = top.inside("template_embedder.torsions", "evoformer", "template_embedder.template_single_embedder")
    scope.linear("up", "template_single_embedding", "linear_1", (TEMPLATE_TORSION_DIM, config.msa_dim))
    scope.linear("down", "template_projection", "linear_2", (config.msa_dim, config.msa_dim))
    scope = top.inside("template_embedder.pairs", "evoformer/template_embedding", "template_embedder")
    single = "single_template_embedding"
    scope.linear("embed", f"{single}/embedding2d", "template_pair_embedder.linear", (TEMPLATE_PAIR_DIM, templates.dim))
    scope.norm("norm", f"{single}/output_layer_norm", "template_pair_stack.layer_norm", templates.dim)
    for number in range(templates.num_blocks):
        stack = scope.inside(
            f"blocks.{number}",
            f"{single}/template_pair_stack/__layer_stack_no_state",
            f"template_pair_stack.blocks.{number}",
        )
        stack.block = (number, templates.num_blocks)
        pair_updates(stack, "", "", templates.dim, templates.pair)
    heads = (templates.num_heads, templates.head_dim)
    attention = scope.inside("", "attention", "template_pointwise_att.mha")
    attention.add("query.weight", attention.source("//query_w", "linear_q.weight", (config.pair_dim, *heads), 1))
    attention.add(
        "key_value.weight",
        attention.source("//key_w", "linear_k.weight", (templates.dim, *heads), 1),
        attention.source("//value_w", "linear_v.weight", (templates.dim, *heads), 1),
    )
    _attention_output(attention, "out.weight", "out.bias", heads, config.pair_dim)


def _template_chains(top: Scope, config: ModelConfig) -> None:
    templates = config.templates
    assert templates is not None
    assert isinstance(config, MultimerConfig)
    dim, torsions = templates.dim, top.inside("template_embedder.torsions", "evoformer", "")
    torsions.linear("up", "template_single_embedding", "", (MULTIMER_TORSION_DIM, config.msa_dim))
    torsions.linear("down", "template_projection", "", (config.msa_dim, config.msa_dim))
    scope = top.inside("template_embedder.pairs", "evoformer/template_embedding", "")
    scope.linear("out", "output_linear", "", (dim, config.pair_dim))
    inner = scope.inside("", "single_template_embedding", "")
    inner.norm("query_norm", "query_embedding_norm", "", config.pair_dim)
    inner.norm("norm", "output_layer_norm", "", dim)

    def summand(number: int, leaf: str, shape: tuple[int, ...]) -> PublishedTensor:
        return inner.source(f"template_pair_embedding_{number}//{leaf}", "", shape, len(shape) - 1)

    matrices = {"distances": (0, TEMPLATE_BINS[2]), "columns": (2, 22), "rows": (3, 22), "query": (8, config.pair_dim)}
    for name, (number, width) in matrices.items():
        inner.add(f"{name}.weight", summand(number, "weights", (width, dim)))
    inner.add("scalar_weight", *(summand(number, "weights", (dim,)) for number in (1, 4, 5, 6, 7)))
    inner.add("embed_bias", *(summand(number, "bias", (dim,)) for number in range(9)))
    for number in range(templates.num_blocks):
        stack = inner.inside(f"blocks.{number}", "template_embedding_iteration", "")
        stack.block = (number, templates.num_blocks)
        pair_updates(stack, "", "", dim, templates.pair, fused=config.fused_products)


def _attention_output(scope: Scope, weight: str, bias: str, heads: tuple[int, int], dim: int) -> None:
    scope.add(weight, scope.source("//output_w", "linear_o.weight", (*heads, dim), 2))
    scope.add(bias, scope.source("//output_b", "linear_o.bias", (dim,), 0))


def _attention(scope: Scope, dim: int, num_heads: int, head_dim: int) -> None:
    """A GatedAttention; the scope's names are those of the attention itself."""
    heads = (num_heads, head_dim)
    letters = (("query_w", "q"), ("key_w", "k"), ("value_w", "v"))
    scope.add("qkv.weight", *(scope.source(f"//{leaf}", f"linear_{x}.weight", (dim, *heads), 1) for leaf, x in letters))
    _gate_and_output(scope, dim, heads)


def _gate_and_output(scope: Scope, dim: int, heads: tuple[int, int]) -> None:
    scope.add("gate.weight", scope.source("//gating_w", "linear_g.weight", (dim, *heads), 1))
    scope.add("gate.bias", scope.source("//gating_b", "linear_g.bias", heads, 0))
    _attention_output(scope, "out_weight", "out_bias", heads, dim)


def _evoformer_block(
    scope: Scope, msa: int, pair: int, config: EvoformerConfig, fused: bool, *, global_columns: bool = False
) -> None:
    heads = (config.msa_heads, config.msa_head_dim)
    rows = scope.inside("row_attention", "msa_row_attention_with_pair_bias", "msa_att_row")
    rows.norm("norm", "query_norm", "layer_norm_m", msa)
    rows.norm("pair_norm", "feat_2d_norm", "layer_norm_z", pair)
    rows.add("bias.weight", rows.source("//feat_2d_weights", "linear_z.weight", (pair, config.msa_heads), 1))
    _attention(rows.inside("attention", "attention", "mha"), msa, *heads)
    if global_columns:
        columns = scope.inside("column_attention", "msa_column_global_attention", "msa_att_col")
        columns.norm("norm", "query_norm", "layer_norm_m", msa)
        _global_attention(columns.inside("attention", "attention", "global_attention"), msa, *heads)
    else:
        columns = scope.inside("column_attention", "msa_column_attention", "msa_att_col._msa_att")
        columns.norm("norm", "query_norm", "layer_norm_m", msa)
        _attention(columns.inside("attention", "attention", "mha"), msa, *heads)
    _transition(scope.inside("msa_transition", "msa_transition", "msa_transition"), msa, config.msa_transition_factor)
    outer = scope.inside("outer_product_mean", "outer_product_mean", "outer_product_mean")
    outer.norm("norm", "layer_norm_input", "layer_norm", msa)
    outer.linear("left", "left_projection", "linear_1", (msa, config.outer_dim))
    outer.linear("right", "right_projection", "linear_2", (msa, config.outer_dim))
    shape = (config.outer_dim, config.outer_dim, pair)
    outer.add("out.weight", outer.source("//output_w", "linear_out.weight", shape, 2))
    outer.add("out.bias", outer.source("//output_b", "linear_out.bias", (pair,), 0))
    pair_updates(scope, "pair", "pair_stack", pair, config.pair, fused=fused)


def _global_attention(scope: Scope, dim: int, num_heads: int, head_dim: int) -> None:
    heads = (num_heads, head_dim)
    scope.add("query.weight", scope.source("//query_w", "linear_q.weight", (dim, *heads), 1))
    scope.add(
        "key_value.weight",
        scope.source("//key_w", "linear_k.weight", (dim, head_dim), 1),
        scope.source("//value_w", "linear_v.weight", (dim, head_dim), 1),
    )
    _gate_and_output(scope, dim, heads)


def _transition(scope: Scope, dim: int, factor: int) -> None:
    scope.norm("norm", "input_layer_norm", "layer_norm", dim)
    scope.linear("up", "transition1", "linear_1", (dim, factor * dim))
    scope.linear("down", "transition2", "linear_2", (factor * dim, dim))


def pair_updates(block: Scope, ours: str, openfold: str, dim: int, config: PairConfig, *, fused: bool = False) -> None:
    """PairUpdates within a block, by what it is called there.

    fused  whether left and right of the triangle product lie in one array
    """
    scope = block.inside(ours, "", openfold)
    for name, theirs in (("outgoing", "out"), ("incoming", "in")):
        part = scope.inside(name, f"triangle_multiplication_{name}", f"tri_mul_{theirs}")
        of_product = _fused_multiplication if fused else _triangle_multiplication
        of_product(part, dim, config.product_dim, swapped=name == "incoming")
    for name, theirs in (("starting", "start"), ("ending", "end")):
        part = scope.inside(name, f"triangle_attention_{name}_node", f"tri_att_{theirs}")
        part.norm("norm", "query_norm", "layer_norm", dim)
        part.add("bias.weight", part.source("//feat_2d_weights", "linear.weight", (dim, config.num_heads), 1))
        _attention(part.inside("attention", "attention", "mha"), dim, config.num_heads, config.head_dim)
    transition = scope.inside("transition", "pair_transition", "pair_transition")
    _transition(transition, dim, config.transition_factor)


def _triangle_multiplication(scope: Scope, dim: int, product: int, *, swapped: bool) -> None:
    scope.norm("norm", "layer_norm_input", "layer_norm_in", dim, "_")
    sides = (("right", "a"), ("left", "b")) if swapped else (("left", "a"), ("right", "b"))
    parts = [
        (f"{side}_{kind}", f"linear_{letter}_{kind[0]}") for kind in ("projection", "gate") for side, letter in sides
    ]
    for leaf, ours, shape in (("weights", "weight", (dim, product)), ("bias", "bias", (product,))):
        scope.add(
            f"in_{ours}", *(scope.source(f"{af}//{leaf}", f"{of}.{ours}", shape, len(shape) - 1) for af, of in parts)
        )
    scope.norm("product_norm", "center_layer_norm", "layer_norm_out", product, "_")
    _product_output(scope, dim, product)


def _fused_multiplication(scope: Scope, dim: int, product: int, *, swapped: bool) -> None:
    scope.norm("norm", "left_norm_input", "layer_norm_in", dim, "_")
    for leaf, ours, shape in (("weights", "weight", (dim, 2 * product)), ("bias", "bias", (2 * product,))):
        parts = []
        for kind in ("projection", "gate"):
            source = scope.source(f"{kind}//{leaf}", f"linear_ab_{kind[0]}.{ours}", shape, len(shape) - 1)
            parts.append(replace(source, swapped=swapped))
        scope.add(f"in_{ours}", *parts)
    scope.norm("product_norm", "center_norm", "layer_norm_out", product, "_")
    _product_output(scope, dim, product)


def _product_output(scope: Scope, dim: int, product: int) -> None:
    for name, af, of, in_dim in (("out", "output_projection", "z", product), ("gate", "gating_linear", "g", dim)):
        scope.add(f"{name}_weight", scope.source(f"{af}//weights", f"linear_{of}.weight", (in_dim, dim), 1))
        scope.add(f"{name}_bias", scope.source(f"{af}//bias", f"linear_{of}.bias", (dim,), 0))


def structure(scope: Scope, single: int, pair: int, c: StructureConfig, *, by_heads: bool = False) -> None:
    """The structure module on single and pair representations of these widths.

    by_heads  as complexes' models have its attention
    """
    scope.norm("single_norm", "single_layer_norm", "layer_norm_s", single)
    scope.norm("pair_norm", "pair_layer_norm", "layer_norm_z", pair)
    scope.linear("input", "initial_projection", "linear_in", (single, c.dim))
    fold = scope.inside("", "fold_iteration", "")
    (_heads_points if by_heads else _points)(fold.inside("attention", "invariant_point_attention", "ipa"), pair, c)
    fold.norm("attention_norm", "attention_layer_norm", "layer_norm_ipa", c.dim)
    for number, suffix in enumerate(_suffixes(c.transition_layers)):
        names = (f"transition.layers.{number}", f"transition{suffix}", f"transition.layers.0.linear_{number + 1}")
        fold.linear(*names, (c.dim, c.dim))
    fold.norm("transition_norm", "transition_layer_norm", "transition.layer_norm", c.dim)
    fold.linear("backbone", "quat_rigid/rigid" if by_heads else "affine_update", "bb_update.linear", (c.dim, 6))
    angles = fold.inside("angles", "rigid_sidechain", "angle_resnet")
    angles.linear("now", "input_projection", "linear_in", (c.dim, c.angle_dim))
    angles.linear("initial", "input_projection_1", "linear_initial", (c.dim, c.angle_dim))
    for number, suffix in enumerate(_suffixes(c.angle_blocks)):
        square = (c.angle_dim, c.angle_dim)
        angles.linear(f"blocks.{number}.up", f"resblock1{suffix}", f"layers.{number}.linear_1", square)
        angles.linear(f"blocks.{number}.down", f"resblock2{suffix}", f"layers.{number}.linear_2", square)
    angles.linear("out", "unnormalized_angles", "linear_out", (c.angle_dim, 14))


def _points(ipa: Scope, pair: int, c: StructureConfig) -> None:
    H, P, V = c.num_heads, c.query_points, c.value_points
    ipa.linear("query", "q_scalar", "linear_q", (c.dim, H * c.head_dim))
    ipa.linear("key_value", "kv_scalar", "linear_kv", (c.dim, 2 * H * c.head_dim))
    ipa.linear("query_point", "q_point_local", "linear_q_points.linear", (c.dim, 3 * H * P))
    ipa.linear("key_value_point", "kv_point_local", "linear_kv_points.linear", (c.dim, 3 * H * (P + V)))
    _points_shared(ipa, pair, c)


def _heads_points(ipa: Scope, pair: int, c: StructureConfig) -> None:
    H = c.num_heads
    counts = {"query": c.query_points, "key": c.query_points, "value": c.value_points}
    for name, count in counts.items():
        letter = name[0]
        shape, points = (c.dim, H, c.head_dim), (H, 3 * count)
        ipa.add(f"{name}.weight", ipa.source(f"{letter}_scalar_projection//weights", "", shape, 1))
        projection = f"{letter}_point_projection/point_projection"
        ipa.add(f"{name}_point.weight", ipa.source(f"{projection}//weights", "", (c.dim, *points), 1))
        ipa.add(f"{name}_point.bias", ipa.source(f"{projection}//bias", "", points, 0))
    _points_shared(ipa, pair, c)


def _points_shared(ipa: Scope, pair: int, c: StructureConfig) -> None:
    H, V = c.num_heads, c.value_points
    ipa.add("point_weight", ipa.source("//trainable_point_weights", "head_weights", (H,), 0))
    ipa.linear("bias", "attention_2d", "linear_b", (pair, H))
    ipa.linear("out", "output_projection", "linear_out", (H * (c.head_dim + 4 * V + pair), c.dim))


def _suffixes(count: int) -> Iterator[str]:
    """How AlphaFold tells modules of one name apart: nothing, _1, _2, …."""
    return (f"_{number}" if number else "" for number in range(count))


def _heads(scope: Scope, config: ModelConfig) -> None:
    heads, structure = config.heads, config.structure.dim
    plddt = scope.inside("plddt", "predicted_lddt_head", "plddt")
    plddt.norm("norm", "input_layer_norm", "layer_norm", structure)
    plddt.linear("first", "act_0", "linear_1", (structure, heads.plddt_dim))
    plddt.linear("second", "act_1", "linear_2", (heads.plddt_dim, heads.plddt_dim))
    plddt.linear("out", "logits", "linear_3", (heads.plddt_dim, heads.plddt_bins))
    scope.linear("distogram", "distogram_head/half_logits", "distogram.linear", (config.pair_dim, heads.distogram_bins))
    scope.linear("masked_msa", "masked_msa_head/logits", "masked_msa.linear", (config.msa_dim, heads.masked_msa_types))
    name = "experimentally_resolved"
    scope.linear(name, f"{name}_head/logits", f"{name}.linear", (config.single_dim, 37))
    if heads.pae_bins is not None:
        scope.linear("pae", "predicted_aligned_error_head/logits", "tm.linear", (config.pair_dim, heads.pae_bins))
