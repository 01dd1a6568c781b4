"""OpenFold's .pt files: state dicts with present or former names, bare or inside a training checkpoint.

Accepted: a state dict; {"ema": {"params": …}}; {"state_dict": …}; names with `model.` or `module.` in front; names of
the first release. Nothing in the file is executed (weights_only).
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from apps.fold.model.config import (
    EvoformerConfig,
    HeadsConfig,
    ModelConfig,
    PairConfig,
    StructureConfig,
    TemplateConfig,
)
from apps.fold.weights.alphafold import check_names
from apps.fold.weights.table import name_table
from core.config import UserError
from core.weights import load_pickled

_RENAMED = (
    (r"^template_angle_embedder\.", "template_single_embedder."),
    (r"\.core\.(msa_transition|outer_product_mean)\.", r".\1."),
    (r"\.core\.(tri_|pair_transition)", r".pair_stack.\1"),
    (r"\.ipa\.linear_(q|kv)_points\.(weight|bias)$", r".ipa.linear_\1_points.linear.\2"),
    (r"^template_(single_embedder|pair_embedder|pair_stack|pointwise_att)\.", r"template_embedder.template_\1."),
)


def read_pt(path: Path) -> dict[str, Tensor]:
    """The tensors of an OpenFold file by their present names.  Raises UserError where it is none."""
    loaded = load_pickled(path)
    for keys in (("ema", "params"), ("state_dict",), ("module",)):
        inner = loaded
        for key in keys:
            inner = inner.get(key) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            loaded = inner
            break
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise UserError(f"{path} holds something else than tensors by name; give an OpenFold state dict")
    return {_present_name(name): value for name, value in loaded.items()}


def _present_name(name: str) -> str:
    name = re.sub(r"^((model|module)\.)+", "", name)
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def config_of(tensors: Mapping[str, Tensor], origin: object = "the file") -> ModelConfig:
    """The model that these tensors belong to.  Raises UserError when a name that tells is missing."""

    def at(name: str) -> tuple[int, ...]:
        if name not in tensors:
            raise UserError(f"{origin} lacks {name}; it is no complete set of OpenFold weights")
        return tuple(tensors[name].shape)

    def count(prefix: str) -> int:
        numbers = {int(m[1]) for name in tensors if (m := re.match(re.escape(prefix) + r"\.(\d+)\.", name))}
        return len(numbers)

    def stack(scope: str) -> EvoformerConfig:
        block = f"{scope}.blocks.0"
        heads = at(f"{block}.msa_att_row.linear_z.weight")[0]
        inner, dim = at(f"{block}.msa_att_row.mha.linear_q.weight")
        return EvoformerConfig(
            num_blocks=count(f"{scope}.blocks"),
            msa_heads=heads,
            msa_head_dim=inner // heads,
            msa_transition_factor=at(f"{block}.msa_transition.linear_1.weight")[0] // dim,
            outer_dim=at(f"{block}.outer_product_mean.linear_1.weight")[0],
            pair=pair(f"{block}.pair_stack"),
        )

    def pair(scope: str) -> PairConfig:
        heads = at(f"{scope}.tri_att_start.linear.weight")[0]
        inner, dim = at(f"{scope}.tri_att_start.mha.linear_q.weight")
        return PairConfig(
            num_heads=heads,
            head_dim=inner // heads,
            product_dim=at(f"{scope}.tri_mul_out.linear_a_p.weight")[0],
            transition_factor=at(f"{scope}.pair_transition.linear_1.weight")[0] // dim,
        )

    templates, embedder = None, "template_embedder.template_"
    if f"{embedder}pointwise_att.mha.linear_q.weight" in tensors:
        block = f"{embedder}pair_stack.blocks"
        template_pair = pair(f"{block}.0")
        inner = at(f"{embedder}pointwise_att.mha.linear_q.weight")[0]
        templates = TemplateConfig(
            dim=at(f"{embedder}pair_embedder.linear.weight")[0],
            num_blocks=count(block),
            pair=template_pair,
            num_heads=template_pair.num_heads,  # not to be read off the shapes; the same in all released models
            head_dim=inner // template_pair.num_heads,
        )
    return ModelConfig(
        msa_dim=at("input_embedder.linear_msa_m.weight")[0],
        pair_dim=at("input_embedder.linear_tf_z_i.weight")[0],
        single_dim=at("evoformer.linear.weight")[0],
        extra_dim=at("extra_msa_embedder.linear.weight")[0],
        evoformer=stack("evoformer"),
        extra=stack("extra_msa_stack"),
        templates=templates,
        structure=_structure_of(at),
        heads=HeadsConfig(
            plddt_dim=at("aux_heads.plddt.linear_1.weight")[0],
            plddt_bins=at("aux_heads.plddt.linear_3.weight")[0],
            distogram_bins=at("aux_heads.distogram.linear.weight")[0],
            masked_msa_types=at("aux_heads.masked_msa.linear.weight")[0],
            pae_bins=at("aux_heads.tm.linear.weight")[0] if "aux_heads.tm.linear.weight" in tensors else None,
        ),
    )


def _structure_of(at) -> StructureConfig:
    ipa = "structure_module.ipa"
    heads = at(f"{ipa}.head_weights")[0]
    inner, dim = at(f"{ipa}.linear_q.weight")
    query_points = at(f"{ipa}.linear_q_points.linear.bias")[0] // (3 * heads)
    return StructureConfig(
        dim=dim,
        num_heads=heads,
        head_dim=inner // heads,
        query_points=query_points,
        value_points=at(f"{ipa}.linear_kv_points.linear.bias")[0] // (3 * heads) - query_points,
        angle_dim=at("structure_module.angle_resnet.linear_in.bias")[0],
    )


def load_pt(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The model's configuration and its parameters by our names, every tensor consumed exactly once.

    Raises UserError that names tensors that are missing, unknown, or of another shape.
    """
    tensors = read_pt(path)
    if "input_embedder.linear_tf_z_i.weight" not in tensors:
        raise UserError(
            f"{path} holds no OpenFold weights (no input_embedder.linear_tf_z_i.weight); give a finetuning_*.pt"
        )
    if any(".linear_ab_p." in name for name in tensors):
        raise UserError(
            f"{path} holds the weights of a multimer model (fused triangle projections), which is not supported"
        )
    config = config_of(tensors, path)
    table = name_table(config)
    expected = {source.openfold: source.our_shape for entry in table for source in entry.sources}
    check_names(path, expected, {name: tuple(value.shape) for name, value in tensors.items()})
    return config, {entry.name: torch.cat([tensors[s.openfold] for s in entry.sources]) for entry in table}
