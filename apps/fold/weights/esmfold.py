"""ESMFold folders of transformers (what EsmForProteinFolding saves, such as facebook/esmfold_v1), read.

The trunk's pair updates and the structure module have OpenFold's names, so their part of the table is OpenFold's
(table.py) but for a few. What differs from ours:

- q, k and v of the row attention are one matrix, head by head; ours has all q, then k, then v.
- The distogram is the mean of both directions; our head adds them, and its weights are half as large.

Read, and of no use here: the language model's head for contacts, and buffers of former versions of transformers.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from apps.fold.model import residues
from apps.fold.model.config import (
    ESMFoldConfig,
    EvoformerConfig,
    HeadsConfig,
    LanguageConfig,
    PairConfig,
    StructureConfig,
)
from apps.fold.model.esmfold import LETTERS, RECYCLE_BINS, language_model
from apps.fold.weights.alphafold import check_names
from apps.fold.weights.table import Scope, pair_updates, structure
from core.config import UserError
from core.weights import Weights, read_json

Shape = tuple[int, ...]

_OPENFOLD = (
    (r"\.pair_transition\.layer_norm\.", ".mlp_pair.mlp.0."),
    (r"\.pair_transition\.linear_1\.", ".mlp_pair.mlp.1."),
    (r"\.pair_transition\.linear_2\.", ".mlp_pair.mlp.3."),
    (r"\.linear_(q|kv)_points\.linear\.", r".linear_\1_points."),
)
"""names of OpenFold's -> those of transformers"""
_FREQUENCIES = re.compile(r"esm\.encoder\.layer\.(\d+|\*)\.attention\.self\.rotary_embeddings\.inv_freq")
_FORMER_NORM, _LEAF = re.compile(r"(\.LayerNorm\.)(gamma|beta)$"), {"gamma": "weight", "beta": "bias"}
_UNUSED = re.compile(
    r"esm\.contact_head\..*|esm\.embeddings\.(position_ids|position_embeddings\.weight)|" + _FREQUENCIES.pattern
)
_TRANSITION = {"norm": "0", "up": "1", "down": "3"}  # places in nn.Sequential


@dataclass(frozen=True)
class Entry:
    """A parameter of ours, of their tensors of these shapes below each other, changed by `change`."""

    name: str
    sources: Mapping[str, Shape]
    change: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def made_of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        given = [tensors[name] for name in self.sources]
        return self.change(given[0] if len(given) == 1 else torch.cat(given))


def is_esmfold(folder: Path) -> bool:
    """Return whether the folder is one of transformers' with an ESM model."""
    return (folder / "config.json").is_file() and read_json(folder / "config.json").get("model_type") == "esm"


def load_esmfold(folder: Path) -> tuple[ESMFoldConfig, dict[str, Tensor]]:
    """The model's configuration and its parameters by our names, every tensor consumed exactly once.

    Raises UserError that names tensors that are missing, unknown, or of another shape, and options of the configuration
    that no released model has.
    """
    config = config_of(read_json(folder / "config.json"), folder)
    tensors = _present(Weights(folder))
    table = esmfold_table(config)
    expected = {name: shape for entry in table for name, shape in entry.sources.items()}
    expected["af2_to_esm"] = (residues.UNKNOWN + 2,)
    given = {name: tuple(value.shape) for name, value in tensors.items() if not _UNUSED.fullmatch(name)}
    check_names(folder, expected, given, "the weights of ESMFold")
    if tensors["af2_to_esm"].tolist() != _words(config.language.vocabulary):
        raise UserError(f"{folder}: af2_to_esm is not the order of config.json's vocab_list; copy the folder again")
    return config, {entry.name: entry.made_of(tensors) for entry in table}


def _present(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by their present names.

    Versions 4 had frequencies in every layer, all of them the same, and names of norms that versions 5 still write.
    """
    found = {_FORMER_NORM.sub(lambda m: m[1] + _LEAF[m[2]], name): value for name, value in tensors.items()}
    former = [name for name in found if _FREQUENCIES.fullmatch(name)]
    if former:
        found.setdefault("esm.rotary_embeddings.inv_freq", found[former[0]])
    return found


def _words(vocabulary: tuple[str, ...]) -> list[int]:
    return [vocabulary.index(word) for word in ("<pad>", *residues.RESTYPES, "X")]


# --- the configuration ------------------------------------------------------------------------------------------------


def config_of(stored: dict[str, Any], origin: object = "config.json") -> ESMFoldConfig:
    """Read transformers' config.json.  Raises UserError for a language model alone, and for options we do not have."""
    if not stored.get("is_folding_model"):
        raise UserError(f"{origin} holds ESM-2 alone, which does not fold; give a folder of ESMFold (esmfold_v1)")
    parsed = _parsed(stored, origin)
    folding, trunk = parsed.esmfold_config, parsed.esmfold_config.trunk
    module = trunk.structure_module
    _check(parsed, origin)
    return ESMFoldConfig(
        msa_dim=trunk.sequence_state_dim,
        pair_dim=trunk.pairwise_state_dim,
        single_dim=module.sequence_dim,
        evoformer=EvoformerConfig(
            num_blocks=trunk.num_blocks,
            msa_heads=trunk.sequence_state_dim // trunk.sequence_head_width,
            msa_head_dim=trunk.sequence_head_width,
            msa_dropout=0.0,
            outer_dim=trunk.pairwise_state_dim // 2,
            pair=PairConfig(
                num_heads=trunk.pairwise_state_dim // trunk.pairwise_head_width,
                head_dim=trunk.pairwise_head_width,
                product_dim=trunk.pairwise_state_dim,
                dropout=0.0,
            ),
        ),
        extra=EvoformerConfig(num_blocks=0),
        templates=None,
        structure=StructureConfig(
            dim=module.sequence_dim,
            num_layers=module.num_blocks,
            num_heads=module.num_heads_ipa,
            head_dim=module.ipa_dim,
            query_points=module.num_qk_points,
            value_points=module.num_v_points,
            angle_dim=module.resnet_dim,
            angle_blocks=module.num_resnet_blocks,
            dropout=0.0,
            length_scale=float(module.trans_scale_factor),
        ),
        heads=HeadsConfig(plddt_dim=folding.lddt_head_hid_dim, masked_msa_types=LETTERS, pae_bins=64),
        num_recycles=trunk.max_recycles - 1,
        max_msa=1,
        max_extra_msa=0,
        max_templates=0,
        hidden_share=0.0,
        language=LanguageConfig(
            vocabulary=tuple(parsed.vocab_list),
            dim=parsed.hidden_size,
            num_layers=parsed.num_hidden_layers,
            num_heads=parsed.num_attention_heads,
            inner_dim=parsed.intermediate_size,
            norm_eps=parsed.layer_norm_eps,
            rope_theta=parsed.rope_theta,
            token_dropout=bool(parsed.token_dropout),
            norm_before=bool(parsed.emb_layer_norm_before),
        ),
        structure_pair_dim=module.pairwise_dim,
        position_bins=trunk.position_bins,
    )


def _parsed(stored: dict[str, Any], origin: object) -> Any:
    """Parse a configuration as transformers reads it, with its defaults."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import EsmConfig

    try:
        return EsmConfig.from_dict(stored)
    except (TypeError, ValueError, AttributeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{origin} is no configuration of ESMFold: {reason}; copy the folder again") from error


def _check(parsed: Any, origin: object) -> None:
    folding, trunk = parsed.esmfold_config, parsed.esmfold_config.trunk
    wanted = {
        "position_embedding_type": (parsed.position_embedding_type, "rotary"),
        "embed_aa": (folding.embed_aa, True),
        "bypass_lm": (folding.bypass_lm, False),
        "esm_ablate_sequence": (folding.esm_ablate_sequence, False),
        "num_transition_layers": (trunk.structure_module.num_transition_layers, 1),
        "num_angles": (trunk.structure_module.num_angles, residues.NUM_TORSIONS),
    }
    for name, (given, needed) in wanted.items():
        if given != needed:
            raise UserError(f"{origin}: {name}={given}, which no released ESMFold has; it is to be {needed}")
    if trunk.max_recycles < 1:
        raise UserError(f"{origin}: max_recycles={trunk.max_recycles}; it is to be 1 or more")
    needed = ("<cls>", "<pad>", "<eos>", "<mask>", *residues.RESTYPES, "X")
    missing = [word for word in needed if word not in parsed.vocab_list]
    if missing:
        raise UserError(f"{origin}: vocab_list lacks {', '.join(missing)}")


# --- the table --------------------------------------------------------------------------------------------------------


def esmfold_table(config: ESMFoldConfig) -> list[Entry]:
    """An entry for every parameter and buffer of `ESMFold(config)`."""
    row, pair = config.msa_dim, config.pair_dim
    positions = "trunk.pairwise_positional_embedding.embedding.weight"
    entries = _language(config)
    entries.append(_same("position.weight", positions, (2 * config.position_bins + 2, pair)))
    entries.append(_same("recycling_embedder.distance.weight", "trunk.recycle_disto.weight", (RECYCLE_BINS[2], pair)))
    entries += _norm("recycling_embedder.msa_norm", "trunk.recycle_s_norm", row)
    entries += _norm("recycling_embedder.pair_norm", "trunk.recycle_z_norm", pair)
    for number in range(config.evoformer.num_blocks):
        entries += _block(f"blocks.{number}", f"trunk.blocks.{number}", config)
    entries += _linear("single", "trunk.trunk2sm_s", row, config.single_dim)
    entries += _linear("structure_module.pair_norm.project", "trunk.trunk2sm_z", pair, config.structure_pair_dim)
    widths = (config.single_dim, config.structure_pair_dim, config.structure)
    names = ("structure_module", "trunk.structure_module")
    entries += _of_openfold(*names, lambda scope: structure(scope, *widths))
    return entries + _heads(config)


def _language(config: ESMFoldConfig) -> list[Entry]:
    row, dim = config.msa_dim, config.language.dim
    return [
        *(_same(f"language.model.{name}", f"esm.{name}", shape) for name, shape in _language_model(config.language)),
        _same("language.layer_weight", "esm_s_combine", (config.language.num_layers + 1,)),
        *_norm("language.norm", "esm_s_mlp.0", dim),
        *_linear("language.up", "esm_s_mlp.1", dim, row),
        *_linear("language.down", "esm_s_mlp.3", row, row),
        _same("language.letters.weight", "embedding.weight", (LETTERS, row)),
    ]


@lru_cache(maxsize=4)
def _language_model(config: LanguageConfig) -> tuple[tuple[str, Shape], ...]:
    """Names and shapes of transformers' language model."""
    with torch.device("meta"):
        state = language_model(config).state_dict()
    return tuple((name, tuple(value.shape)) for name, value in state.items())


def _block(ours: str, theirs: str, config: ESMFoldConfig) -> list[Entry]:
    row, pair, c = config.msa_dim, config.pair_dim, config.evoformer
    inner, attention = c.msa_heads * c.msa_head_dim, f"{ours}.row_attention.attention"

    def by_kind(weight: Tensor) -> Tensor:
        """Rows of heads with q, k and v each -> all of q, then of k, then of v."""
        return weight.unflatten(0, (c.msa_heads, 3, c.msa_head_dim)).transpose(0, 1).reshape(weight.shape)

    return [
        *_norm(f"{ours}.row_attention.norm", f"{theirs}.layernorm_1", row),
        *_norm(f"{ours}.row_attention.pair_norm", f"{theirs}.pair_to_sequence.layernorm", pair),
        _same(f"{ours}.row_attention.bias.weight", f"{theirs}.pair_to_sequence.linear.weight", (c.msa_heads, pair)),
        Entry(f"{attention}.qkv.weight", {f"{theirs}.seq_attention.proj.weight": (3 * inner, row)}, by_kind),
        *_linear(f"{attention}.gate", f"{theirs}.seq_attention.g_proj", row, inner),
        _same(f"{attention}.out_weight", f"{theirs}.seq_attention.o_proj.weight", (row, inner)),
        _same(f"{attention}.out_bias", f"{theirs}.seq_attention.o_proj.bias", (row,)),
        *_transition(f"{ours}.msa_transition", f"{theirs}.mlp_seq.mlp", row, c.msa_transition_factor),
        *_norm(f"{ours}.sequence_to_pair.norm", f"{theirs}.sequence_to_pair.layernorm", row),
        *_linear(f"{ours}.sequence_to_pair.project", f"{theirs}.sequence_to_pair.proj", row, 2 * c.outer_dim),
        *_linear(f"{ours}.sequence_to_pair.out", f"{theirs}.sequence_to_pair.o_proj", 2 * c.outer_dim, pair),
        *_of_openfold(ours, theirs, lambda scope: pair_updates(scope, "pair", "", pair, c.pair)),
    ]


def _heads(config: ESMFoldConfig) -> list[Entry]:
    heads, pair, dim = config.heads, config.pair_dim, config.structure.dim
    assert heads.pae_bins is not None
    distogram = [
        Entry(entry.name, entry.sources, lambda tensor: tensor / 2)
        for entry in _linear("heads.distogram", "distogram_head", pair, heads.distogram_bins)
    ]
    return [
        *_norm("heads.plddt.norm", "lddt_head.0", dim),
        *_linear("heads.plddt.first", "lddt_head.1", dim, heads.plddt_dim),
        *_linear("heads.plddt.second", "lddt_head.2", heads.plddt_dim, heads.plddt_dim),
        *_linear("heads.plddt.out", "lddt_head.3", heads.plddt_dim, residues.NUM_ATOM37 * heads.plddt_bins),
        *distogram,
        *_linear("heads.letters", "lm_head", config.msa_dim, heads.masked_msa_types),
        *_linear("heads.pae", "ptm_head", pair, heads.pae_bins),
    ]


def _of_openfold(ours: str, theirs: str, build: Callable[[Scope], None]) -> list[Entry]:
    """The part of OpenFold's table that `build` makes, by transformers' names."""
    scope = Scope(ours, "", theirs)
    build(scope)
    entries = []
    for entry in scope.entries:
        name = entry.name.replace("structure_module.pair_norm.", "structure_module.pair_norm.norm.")
        entries.append(Entry(name, {_renamed(source.openfold): source.our_shape for source in entry.sources}))
    return entries


def _renamed(name: str) -> str:
    for pattern, replacement in _OPENFOLD:
        name = re.sub(pattern, replacement, name)
    return name


def _same(ours: str, theirs: str, shape: Shape) -> Entry:
    return Entry(ours, {theirs: shape})


def _linear(ours: str, theirs: str, in_dim: int, out_dim: int) -> list[Entry]:
    return [
        _same(f"{ours}.weight", f"{theirs}.weight", (out_dim, in_dim)),
        _same(f"{ours}.bias", f"{theirs}.bias", (out_dim,)),
    ]


def _norm(ours: str, theirs: str, dim: int) -> list[Entry]:
    return [_same(f"{ours}.{leaf}", f"{theirs}.{leaf}", (dim,)) for leaf in ("weight", "bias")]


def _transition(ours: str, theirs: str, dim: int, factor: int) -> list[Entry]:
    place = {name: f"{theirs}.{number}" for name, number in _TRANSITION.items()}
    return [
        *_norm(f"{ours}.norm", place["norm"], dim),
        *_linear(f"{ours}.up", place["up"], dim, factor * dim),
        *_linear(f"{ours}.down", place["down"], factor * dim, dim),
    ]
