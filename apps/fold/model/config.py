"""Widths and depths of the model. The defaults are those of the released weights (supplement, 1.6 to 1.9)."""

import re
from dataclasses import dataclass, field, fields, replace
from typing import Any

from core.config import UserError

TARGET_DIM = 22  # a break before the residue, 20 residue types, X
MSA_DIM = 49  # 23 letters, deletion, its value, 23 of the cluster's profile, its mean deletion
EXTRA_DIM = 25  # 23 letters, deletion, its value
RELATIVE_POSITIONS = 32  # clipped at +-32
MULTIMER_TARGET_DIM = 21  # 20 residue types, X
CHAIN_REACH = 2  # which copy of a sequence, clipped at +-2
MULTIMER_TORSION_DIM = 34  # 22 types, (sin, cos) of four chi, their mask
RECYCLE_BINS = (3.25, 20.75, 15)
TEMPLATE_BINS = (3.25, 50.75, 39)
TEMPLATE_PAIR_DIM = 88  # 39 distances, their mask, twice 22 types, unit vector, the backbone's mask
TEMPLATE_TORSION_DIM = 57  # 22 types, twice 7 (sin, cos), their mask


@dataclass(frozen=True)
class PairConfig:
    """The updates of a pair representation."""

    num_heads: int = 4
    head_dim: int = 32
    product_dim: int = 128
    """channels of the triangle product"""
    transition_factor: int = 4
    dropout: float = 0.25


@dataclass(frozen=True)
class EvoformerConfig:
    """A stack of Evoformer blocks."""

    num_blocks: int = 48
    msa_heads: int = 8
    msa_head_dim: int = 32
    msa_transition_factor: int = 4
    msa_dropout: float = 0.15
    outer_dim: int = 32
    pair: PairConfig = field(default_factory=PairConfig)


@dataclass(frozen=True)
class TemplateConfig:
    """The template pair stack and the attention that reads it."""

    dim: int = 64
    num_blocks: int = 2
    pair: PairConfig = field(default_factory=lambda: PairConfig(head_dim=16, product_dim=64, transition_factor=2))
    num_heads: int = 4
    head_dim: int = 16


@dataclass(frozen=True)
class StructureConfig:
    """The structure module. Its layers share their weights."""

    dim: int = 384
    num_layers: int = 8
    num_heads: int = 12
    head_dim: int = 16
    query_points: int = 4
    value_points: int = 8
    transition_layers: int = 3
    angle_dim: int = 128
    angle_blocks: int = 2
    dropout: float = 0.1
    length_scale: float = 10.0
    """Angstrom of one unit inside"""


@dataclass(frozen=True)
class HeadsConfig:
    """The heads' predictions, and their numbers of bins."""

    plddt_dim: int = 128
    plddt_bins: int = 50
    distogram_bins: int = 64
    masked_msa_types: int = 23
    pae_bins: int | None = None
    """bins of the predicted aligned error; None: no such head (the models without `ptm` in their name)"""


@dataclass(frozen=True)
class ModelConfig:
    """AlphaFold 2, monomer."""

    msa_dim: int = 256
    pair_dim: int = 128
    single_dim: int = 384
    extra_dim: int = 64
    evoformer: EvoformerConfig = field(default_factory=EvoformerConfig)
    extra: EvoformerConfig = field(default_factory=lambda: EvoformerConfig(num_blocks=4, msa_head_dim=8))
    templates: TemplateConfig | None = field(default_factory=TemplateConfig)
    structure: StructureConfig = field(default_factory=StructureConfig)
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    num_recycles: int = 3
    max_msa: int = 512
    """rows of the MSA, those of templates included where there are any"""
    max_extra_msa: int = 5120
    max_templates: int = 4
    hidden_share: float = 0.15
    """of the MSA's letters, hidden in training and in predictions: masked, or replaced"""

    def __post_init__(self) -> None:
        if not 0 <= self.hidden_share < 1:
            raise UserError(f"hidden_share={self.hidden_share}; give a share from 0 to below 1")
        if self.num_recycles < 0:
            raise UserError(f"num_recycles={self.num_recycles}; give 0 or more")


@dataclass(frozen=True)
class LanguageConfig:
    """ESM-2, as transformers builds it. The defaults are those of the released ESMFold's."""

    vocabulary: tuple[str, ...]
    dim: int = 2560
    num_layers: int = 36
    num_heads: int = 40
    inner_dim: int = 10240
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    token_dropout: bool = True
    norm_before: bool = False
    """whether embeddings are normalised before the layers"""

    def for_transformers(self) -> dict[str, Any]:
        """Arguments of its EsmConfig."""
        return {
            "vocab_size": len(self.vocabulary),
            "mask_token_id": self.vocabulary.index("<mask>"),
            "pad_token_id": self.vocabulary.index("<pad>"),
            "hidden_size": self.dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "intermediate_size": self.inner_dim,
            "layer_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "position_embedding_type": "rotary",
            "token_dropout": self.token_dropout,
            "emb_layer_norm_before": self.norm_before,
        }


@dataclass(frozen=True, kw_only=True)
class ESMFoldConfig(ModelConfig):
    """ESMFold: of the model above a row of an MSA, without templates and extra rows.

    msa_dim is the row's, single_dim the structure module's, evoformer.outer_dim half of what a pair is told.
    """

    language: LanguageConfig
    structure_pair_dim: int = 128
    """channels of the pairs that the structure module reads"""
    position_bins: int = 32
    """positions are clipped at this distance"""


@dataclass(frozen=True, kw_only=True)
class MultimerConfig(ModelConfig):
    """AlphaFold-Multimer (Evans et al. 2021), whose versions 1 to 3 compute alike.

    max_msa counts rows that are drawn; those of templates come on top.
    """

    templates: TemplateConfig | None = field(default_factory=TemplateConfig)
    structure: StructureConfig = field(default_factory=lambda: StructureConfig(length_scale=20.0))
    heads: HeadsConfig = field(default_factory=lambda: HeadsConfig(masked_msa_types=22, pae_bins=64))
    num_recycles: int = 20
    max_msa: int = 508
    max_extra_msa: int = 2048
    recycle_tolerance: float = 0.5
    """Angstrom: recycling ends when distances of CA change by no more, by the root of the mean square; negative: never
    before num_recycles"""
    fused_products: bool = True
    """whether projections of the triangle product lie in one array, as in the files of version 3"""


def multimer_preset(name: str) -> MultimerConfig:
    """model_1_multimer to model_5_multimer, and with _v2 and _v3: how many rows they read.

    Raises UserError for any other name.
    """
    known = re.fullmatch(r"model_([1-5])_multimer(_v[23])?", name)
    if known is None:
        raise UserError(f"no preset '{name}'; those of complexes are model_1_multimer to model_5_multimer_v3")
    if known[2] != "_v3":
        return MultimerConfig(max_msa=252, max_extra_msa=1152, fused_products=False)
    return MultimerConfig(max_extra_msa=2048 if known[1] in "123" else 1152)


def preset(name: str) -> ModelConfig:
    """model_1 to model_5 and model_1_ptm to model_5_ptm (supplement, table 5): which have templates, how many rows.

    Raises UserError for any other name.
    """
    stem, _, rest = name.removesuffix("_ptm").partition("_")
    if stem != "model" or rest not in ("1", "2", "3", "4", "5"):
        raise UserError(f"no preset '{name}'; the presets are model_1 to model_5 and model_1_ptm to model_5_ptm")
    config = ModelConfig(
        heads=HeadsConfig(pae_bins=64 if name.endswith("_ptm") else None),
        max_extra_msa=5120 if rest in ("1", "3", "4") else 1024,
    )
    return config if rest in ("1", "2") else replace(config, templates=None)


PRESETS = [f"model_{n}{suffix}" for suffix in ("", "_ptm") for n in range(1, 6)]


def released(name: str) -> ModelConfig:
    """The released model of this name, of single chains or of complexes.  Raises UserError for any other name."""
    return multimer_preset(name) if "multimer" in name else preset(name)


MULTIMER_PRESETS = [f"model_{n}_multimer{version}" for version in ("", "_v2", "_v3") for n in range(1, 6)]


def tiny(templates: bool = True) -> ModelConfig:
    """The whole model at small widths, for trying things and for tests: a second on one core."""
    pair = PairConfig(num_heads=2, head_dim=8, product_dim=16, transition_factor=2)
    stack = EvoformerConfig(num_blocks=2, msa_heads=4, msa_head_dim=8, outer_dim=8, pair=pair)
    return ModelConfig(
        msa_dim=32,
        pair_dim=16,
        single_dim=24,
        extra_dim=16,
        evoformer=stack,
        extra=replace(stack, num_blocks=1, msa_head_dim=4),
        templates=TemplateConfig(16, 1, pair, 2, 8) if templates else None,
        structure=StructureConfig(24, 2, 4, 8, 4, 8, 3, 16, 2),
        heads=HeadsConfig(plddt_dim=16, pae_bins=64),
        num_recycles=1,
        max_msa=16,
        max_extra_msa=32,
    )


def tiny_multimer() -> MultimerConfig:
    """The whole model of complexes at small widths, as `tiny`."""
    return _of_complexes(tiny())


def _of_complexes(model: ModelConfig) -> MultimerConfig:
    """A model of complexes as wide as one of single chains that reads templates."""
    given = {item.name: getattr(model, item.name) for item in fields(model)}
    given["structure"] = replace(model.structure, length_scale=20.0)
    given["heads"] = replace(model.heads, masked_msa_types=22, pae_bins=64)
    return MultimerConfig(**given)


def demo_multimer() -> MultimerConfig:
    """`demo` for complexes, with the least that a stack of templates can be."""
    model = demo()
    return _of_complexes(
        replace(
            model,
            templates=TemplateConfig(8, 0, model.evoformer.pair, 1, 8),
            max_templates=1,
        )
    )


def demo() -> ModelConfig:
    """A small model for a few small proteins: less than 3 MB of weights, no templates, no extra MSA.

    It is to learn in minutes what it has seen: no dropout, no recycling, and no letter hidden. Of a sequence alone a
    hidden letter hides what its neighbours are told apart by.
    """
    pair = PairConfig(num_heads=2, head_dim=16, product_dim=32, transition_factor=2, dropout=0.0)
    stack = EvoformerConfig(2, 4, 16, 2, msa_dropout=0.0, outer_dim=8, pair=pair)
    return ModelConfig(
        msa_dim=64,
        pair_dim=32,
        single_dim=96,
        extra_dim=16,
        evoformer=stack,
        extra=replace(stack, num_blocks=0),
        templates=None,
        structure=StructureConfig(96, 4, 4, 16, 4, 8, 3, 64, 2, dropout=0.0),
        heads=HeadsConfig(plddt_dim=64),
        num_recycles=0,
        max_msa=16,
        max_extra_msa=32,
        hidden_share=0.0,
    )
