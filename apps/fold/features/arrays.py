"""Features from arrays by the original code's names: golden batches, and dumps of other pipelines."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from apps.fold.model import residues
from apps.fold.model.features import Features, TemplateFeatures
from apps.fold.model.torsions import pseudo_beta, torsions_of_atoms


def features_of_arrays(arrays: Mapping[str, np.ndarray], undefined: tuple[float, float] = (0.0, 0.0)) -> Features:
    """The features of a batch, every array with the batch's dim in front.

    undefined  what templates' undefined torsions are set to (`torsions_of_atoms`)
    """

    def real(name: str) -> Tensor:
        return torch.from_numpy(np.asarray(arrays[name], np.float32))

    def whole(name: str) -> Tensor:
        return torch.from_numpy(np.asarray(arrays[name], np.int64))

    templates = None
    if "template_aatype" in arrays and arrays["template_aatype"].shape[1]:
        templates = template_features(
            whole("template_aatype"),
            real("template_mask"),
            real("template_all_atom_positions"),
            real("template_all_atom_masks"),
            undefined,
        )
        if "template_pseudo_beta" in arrays:  # given apart from the atoms, they count
            given = {"pseudo_beta_BTN3": "template_pseudo_beta", "pseudo_beta_mask_BTN": "template_pseudo_beta_mask"}
            templates = replace(templates, **{ours: real(theirs) for ours, theirs in given.items()})
    return Features(
        aatype_BN=whole("aatype"),
        residue_index_BN=whole("residue_index"),
        mask_BN=real("seq_mask"),
        target_BNF=real("target_feat"),
        msa_BSNF=real("msa_feat"),
        msa_mask_BSN=real("msa_mask"),
        extra_msa_BEN=whole("extra_msa"),
        extra_has_deletion_BEN=real("extra_has_deletion"),
        extra_deletion_BEN=real("extra_deletion_value"),
        extra_mask_BEN=real("extra_msa_mask"),
        templates=templates,
    )


def template_features(
    aatype_BTN: Tensor,
    mask_BT: Tensor,
    positions_BTN373: Tensor,
    atom_mask_BTN37: Tensor,
    undefined: tuple[float, float] = (0.0, 0.0),
    *,
    backbone: bool = False,
) -> TemplateFeatures:
    """The network's features of templates' atoms (atom37, Angstrom; residue types 0..21, 21 for gaps).

    backbone  whether the backbone's atoms are among them, which complexes' models read
    """
    torsions = torsions_of_atoms(aatype_BTN, positions_BTN373, atom_mask_BTN37, undefined)
    slots = [residues.N, residues.CA, residues.C]
    return TemplateFeatures(
        aatype_BTN=aatype_BTN,
        mask_BT=mask_BT,
        pseudo_beta_BTN3=pseudo_beta(aatype_BTN, positions_BTN373),
        pseudo_beta_mask_BTN=pseudo_beta(aatype_BTN, atom_mask_BTN37),
        backbone_mask_BTN=atom_mask_BTN37[..., slots].prod(-1),
        torsions_BTNA2=torsions.sin_cos,
        alternative_BTNA2=torsions.alternative,
        torsion_mask_BTNA=torsions.mask,
        backbone_BTN33=positions_BTN373[..., slots, :] if backbone else None,
    )
