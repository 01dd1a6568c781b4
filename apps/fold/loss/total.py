"""The weighted sum of all losses (supplement, 1.9, eq. 7), for training from the start and for fine-tuning.

Of a complex also those of Evans et al. 2021, section 7.4: chains as they lie to each other.
"""

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from apps.fold.loss.heads import (
    distogram_loss,
    experimentally_resolved_loss,
    masked_msa_loss,
    pae_loss,
    plddt_loss,
)
from apps.fold.loss.structure import (
    angle_norm_loss,
    backbone_fape,
    centre_loss,
    chi_loss,
    complex_fape,
    side_chain_fape,
)
from apps.fold.loss.truth import Truth, renamed
from apps.fold.loss.violation import violation_loss
from apps.fold.model import residues
from apps.fold.model.alphafold import Prediction
from apps.fold.model.features import Features
from core.config import UserError


@dataclass(frozen=True)
class LossConfig:
    """Weights. The defaults are those of training from the start; `fine_tuning` those of the second stage."""

    backbone: float = 0.5
    side_chain: float = 0.5
    chi: float = 0.5
    angle_norm: float = 0.01
    distogram: float = 0.3
    masked_msa: float = 2.0
    plddt: float = 0.01
    experimentally_resolved: float = 0.0
    violation: float = 0.0
    pae: float = 0.1
    """counts only in models that have the head"""
    interface: float = 0.5
    """the backbone's error between chains; counts only in models of complexes"""
    centres: float = 1.0
    """of chains that are too near each other; counts only in models of complexes"""
    interface_clamp: float | None = 30.0
    """the largest error between chains that counts, in Angstrom; None: no limit"""
    unclamped: float = 0.1
    """share of the backbone's error that is taken without the limit of 10 Angstrom (1.11.5)"""
    resolution: tuple[float, float] = (0.1, 3.0)
    """Angstrom between which a structure teaches the confidence heads; NMR has 0"""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not (value >= 0 and math.isfinite(value)):
                raise UserError(f"loss.{item.name}={value}; give a number, at least 0")
        if self.unclamped > 1:
            raise UserError(f"loss.unclamped={self.unclamped}; give a share from 0 to 1")
        least, most = self.resolution
        if not 0 <= least <= most:
            raise UserError(f"loss.resolution={least} {most}; give two numbers of Angstrom, the smaller one first")


def fine_tuning() -> LossConfig:
    return LossConfig(experimentally_resolved=0.01, violation=1.0)


def total_loss(
    prediction: Prediction,
    features: Features,
    truth: Truth,
    letters_BSN: Tensor,
    hidden_BSN: Tensor,
    resolution_B: Tensor,
    config: LossConfig = LossConfig(),
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, a mean over the batch, and its parts [B] before their weights; arguments as those of `losses`."""
    parts = losses(prediction, features, truth, letters_BSN, hidden_BSN, resolution_B, config)
    return weighted(parts, config).mean(), parts


def weighted(parts: dict[str, Tensor], config: LossConfig) -> Tensor:
    """The weighted sum of the parts, [B]."""
    return torch.stack([getattr(config, name) * part for name, part in parts.items()]).sum(0)


def losses(
    prediction: Prediction,
    features: Features,
    truth: Truth,
    letters_BSN: Tensor,
    hidden_BSN: Tensor,
    resolution_B: Tensor,
    config: LossConfig = LossConfig(),
) -> dict[str, Tensor]:
    """The parts of the loss [B], before their weights.

    letters_BSN, hidden_BSN  the MSA's true letters, and 1 where they were hidden
    resolution_B             of the experiment, in Angstrom
    """
    structure, logits, chains = prediction.structure, prediction.logits, features.chains
    with torch.no_grad():
        suited = renamed(truth, structure.atom14[-1])
    low, high = config.resolution
    precise_B = ((resolution_B >= low) & (resolution_B <= high)).to(structure.atom14.dtype)
    parts = {
        **_backbone(prediction, features, truth, config),
        "side_chain": side_chain_fape(structure, suited),
        "chi": chi_loss(structure, truth),
        "angle_norm": angle_norm_loss(structure, features.mask_BN),
        "distogram": distogram_loss(logits.distogram, truth),
        "masked_msa": masked_msa_loss(logits.masked_msa, letters_BSN, hidden_BSN),
        "plddt": precise_B * plddt_loss(logits.plddt, prediction.positions_BN373, truth),
    }
    if config.experimentally_resolved:
        resolved = experimentally_resolved_loss(logits.experimentally_resolved, truth)
        parts["experimentally_resolved"] = precise_B * resolved
    if config.violation:
        of_chains = None if chains is None else chains.asym_BN
        shape = structure.atom14[-1], features.aatype_BN, features.residue_index_BN
        parts["violation"] = violation_loss(*shape, of_chains)
    if logits.pae is not None:
        parts["pae"] = precise_B * pae_loss(logits.pae, structure, truth)
    return parts


def _backbone(prediction: Prediction, features: Features, truth: Truth, config: LossConfig) -> dict[str, Tensor]:
    """Of a complex the error between chains is a part of its own."""
    structure, chains = prediction.structure, features.chains
    if chains is None:
        return {"backbone": backbone_fape(structure, truth, config.unclamped)}
    within, between = complex_fape(structure, truth, chains.asym_BN, config.unclamped, config.interface_clamp)
    predicted, true = (x[..., residues.CA, :] for x in (prediction.positions_BN373, truth.atom37_BN373))
    seen_BN = truth.atom37_mask_BN37[..., residues.CA]
    return {"backbone": within, "interface": between, "centres": centre_loss(predicted, true, seen_BN, chains.asym_BN)}
