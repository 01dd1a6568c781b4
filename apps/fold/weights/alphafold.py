"""AlphaFold's params_model_*.npz: arrays by `scope//leaf`; read, recognised, and written bit for bit.

Widths, depths and heads are read off the arrays' shapes. What is not in them, the number of recycling iterations and of
structure layers (which share their weights), is as in the released models unless told otherwise.
"""

import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apps.fold.model.config import (
    EvoformerConfig,
    HeadsConfig,
    ModelConfig,
    MultimerConfig,
    PairConfig,
    StructureConfig,
    TemplateConfig,
    multimer_preset,
)
from apps.fold.weights.table import ROOT, PublishedTensor, name_table
from core.config import UserError
from core.files import replacing

MULTIMER_KEY = f"{ROOT}evoformer/~_relative_encoding/position_activations//weights"
_ITERATION = "evoformer/evoformer_iteration"
_BLOCK = f"{ROOT}{_ITERATION}/"


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file of AlphaFold's weights, nothing in it executed.

    Raises UserError for a file that cannot be read, and for other arrays.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        reason = "it holds more than arrays" if "pickle" in str(error) else error
        raise UserError(f"{path} cannot be read as an npz file of weights ({reason}); copy it again") from error
    for name, array in arrays.items():
        if array.dtype.kind != "f":
            raise UserError(f"{path} has no numbers in {name} but {array.dtype}; copy it again")
    if not any(name.startswith(_BLOCK) for name in arrays):
        raise UserError(f"{path} holds no AlphaFold weights (no key begins with {_BLOCK}); give params_model_*.npz")
    return arrays


def config_of(shapes: Mapping[str, tuple[int, ...]], origin: object = "the file") -> ModelConfig:
    """The model that arrays of these shapes belong to.  Raises UserError when a key that tells is missing."""

    complexes = MULTIMER_KEY in shapes
    fused = f"{ROOT}{_ITERATION}/triangle_multiplication_outgoing/projection//weights" in shapes

    def at(key: str) -> tuple[int, ...]:
        if ROOT + key not in shapes:
            raise UserError(f"{origin} lacks {ROOT}{key}; it is no complete set of AlphaFold weights")
        return shapes[ROOT + key]

    def stack(scope: str) -> EvoformerConfig:
        blocks, dim, heads, head_dim = at(f"{scope}/msa_row_attention_with_pair_bias/attention//query_w")
        return EvoformerConfig(
            num_blocks=blocks,
            msa_heads=heads,
            msa_head_dim=head_dim,
            msa_transition_factor=at(f"{scope}/msa_transition/transition1//weights")[2] // dim,
            outer_dim=at(f"{scope}/outer_product_mean//output_w")[1],
            pair=pair(scope),
        )

    def pair(scope: str) -> PairConfig:
        _, dim, heads, head_dim = at(f"{scope}/triangle_attention_starting_node/attention//query_w")
        return PairConfig(
            num_heads=heads,
            head_dim=head_dim,
            product_dim=product(f"{scope}/triangle_multiplication_outgoing"),
            transition_factor=at(f"{scope}/pair_transition/transition1//weights")[2] // dim,
        )

    def product(scope: str) -> int:
        return at(f"{scope}/projection//weights")[2] // 2 if fused else at(f"{scope}/left_projection//weights")[2]

    templates, embedding = None, "evoformer/template_embedding"
    if complexes:
        stacked = f"{embedding}/single_template_embedding/template_embedding_iteration"
        templates = TemplateConfig(
            dim=at(f"{embedding}/output_linear//weights")[0],
            num_blocks=at(f"{stacked}/pair_transition/transition1//weights")[0],
            pair=pair(stacked),
        )
    elif f"{ROOT}{embedding}/attention//query_w" in shapes:
        inner = f"{embedding}/single_template_embedding"
        stacked = f"{inner}/template_pair_stack/__layer_stack_no_state"
        _, heads, head_dim = at(f"{embedding}/attention//query_w")
        templates = TemplateConfig(
            dim=at(f"{inner}/embedding2d//weights")[1],
            num_blocks=at(f"{stacked}/pair_transition/transition1//weights")[0],
            pair=pair(stacked),
            num_heads=heads,
            head_dim=head_dim,
        )
    pae = f"{ROOT}predicted_aligned_error_head/logits//bias"
    kind = partial(MultimerConfig, fused_products=fused, **_rows_of(fused)) if complexes else ModelConfig
    return kind(
        msa_dim=at("evoformer/preprocess_msa//bias")[0],
        pair_dim=at("evoformer/left_single//bias")[0],
        single_dim=at("evoformer/single_activations//bias")[0],
        extra_dim=at("evoformer/extra_msa_activations//bias")[0],
        evoformer=stack("evoformer/evoformer_iteration"),
        extra=stack("evoformer/extra_msa_stack"),
        templates=templates,
        structure=_structure_of_complexes(at) if complexes else _structure_of(at),
        heads=HeadsConfig(
            plddt_dim=at("predicted_lddt_head/act_0//bias")[0],
            plddt_bins=at("predicted_lddt_head/logits//bias")[0],
            distogram_bins=at("distogram_head/half_logits//bias")[0],
            masked_msa_types=at("masked_msa_head/logits//bias")[0],
            pae_bins=shapes[pae][0] if pae in shapes else None,
        ),
    )


def _structure_of(at) -> StructureConfig:
    fold = "structure_module/fold_iteration"
    ipa = f"{fold}/invariant_point_attention"
    heads = at(f"{ipa}//trainable_point_weights")[0]
    dim, queries = at(f"{ipa}/q_scalar//weights")
    query_points = at(f"{ipa}/q_point_local//bias")[0] // (3 * heads)
    return StructureConfig(
        dim=dim,
        num_heads=heads,
        head_dim=queries // heads,
        query_points=query_points,
        value_points=at(f"{ipa}/kv_point_local//bias")[0] // (3 * heads) - query_points,
        angle_dim=at(f"{fold}/rigid_sidechain/unnormalized_angles//weights")[0],
    )


def _structure_of_complexes(at) -> StructureConfig:
    fold = "structure_module/fold_iteration"
    ipa = f"{fold}/invariant_point_attention"
    dim, heads, head_dim = at(f"{ipa}/q_scalar_projection//weights")
    return StructureConfig(
        dim=dim,
        num_heads=heads,
        head_dim=head_dim,
        query_points=at(f"{ipa}/q_point_projection/point_projection//bias")[1] // 3,
        value_points=at(f"{ipa}/v_point_projection/point_projection//bias")[1] // 3,
        angle_dim=at(f"{fold}/rigid_sidechain/unnormalized_angles//weights")[0],
        length_scale=MultimerConfig().structure.length_scale,
    )


def _rows_of(fused: bool) -> dict[str, int]:
    """Rows that complexes' models read, as released: those of version 3, or of 1 and 2, which no array tells apart."""
    version = multimer_preset("model_1_multimer_v3" if fused else "model_1_multimer")
    return {"max_msa": version.max_msa, "max_extra_msa": version.max_extra_msa}


def parameters_of(arrays: Mapping[str, np.ndarray], config: ModelConfig, origin: object) -> dict[str, Tensor]:
    """Our parameters by name, every key consumed exactly once.

    Raises UserError that names keys that are missing, unknown, or of another shape.
    """
    table = name_table(config)
    expected = {source.key: source.stored_shape for entry in table for source in entry.sources}
    check_names(origin, expected, {name: array.shape for name, array in arrays.items()})
    return {
        entry.name: torch.cat([_to_ours(arrays[source.key], source) for source in entry.sources]) for entry in table
    }


def check_names(
    origin: object,
    expected: Mapping[str, tuple[int, ...]],
    given: Mapping[str, tuple[int, ...]],
    wanted: str = "weights of a released model",
) -> None:
    """Raises UserError unless both hold the same names with the same shapes; `wanted` is what should be given."""
    missing, unknown = sorted(set(expected) - set(given)), sorted(set(given) - set(expected))
    other = [name for name in sorted(set(expected) & set(given)) if tuple(given[name]) != expected[name]]
    said = [f"lacks {_some(missing)}"] if missing else []
    said += [f"holds {_some(unknown)}, which the model has not"] if unknown else []
    said += [f"has {other[0]} of shape {list(given[other[0]])} and not {list(expected[other[0]])}"] if other else []
    if said:
        raise UserError(f"{origin} {'; '.join(said)}; give {wanted}, complete")


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _to_ours(array: np.ndarray, source: PublishedTensor) -> Tensor:
    value = torch.from_numpy(array if source.block is None else array[source.block[0]])
    rows = value.reshape(source.our_shape[::-1]).T if source.num_inputs else value.reshape(-1)
    return _halves_swapped(rows) if source.swapped else rows


def _halves_swapped(rows: Tensor) -> Tensor:
    return rows.roll(len(rows) // 2, 0)


def arrays_of(parameters: Mapping[str, Tensor], config: ModelConfig) -> dict[str, np.ndarray]:
    """AlphaFold's arrays of our parameters: the inverse of `parameters_of`, bit for bit."""
    arrays: dict[str, np.ndarray] = {}
    for entry in name_table(config):
        value, first = parameters[entry.name].detach().cpu(), 0
        for source in entry.sources:
            rows = value[first : first + source.our_shape[0]]
            first += source.our_shape[0]
            rows = _halves_swapped(rows) if source.swapped else rows
            theirs = (rows.T if source.num_inputs else rows).reshape(source.shape).numpy()
            if source.block is None:
                arrays[source.key] = theirs.copy()
            else:
                arrays.setdefault(source.key, np.empty(source.stored_shape, theirs.dtype))[source.block[0]] = theirs
    return arrays


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write aside, then rename: the file is never half there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    by_name: dict[str, Any] = dict(arrays)
    with replacing(path) as aside, open(aside, "wb") as file:
        np.savez(file, **by_name)


def load_npz(path: Path, num_recycles: int | None = None, num_layers: int | None = None) -> tuple[ModelConfig, dict]:
    """The model's configuration and its parameters by our names.

    num_recycles, num_layers  what the arrays do not say; None: as released, 3 (for complexes 20) and 8
    """
    arrays = read_npz(path)
    config = config_of({name: array.shape for name, array in arrays.items()}, path)
    if num_layers is not None:
        config = replace(config, structure=replace(config.structure, num_layers=num_layers))
    if num_recycles is not None:
        config = replace(config, num_recycles=num_recycles)
    return config, parameters_of(arrays, config, path)
