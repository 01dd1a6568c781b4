"""Losses of the heads, and lDDT, which one of them predicts.

Shapes: B batch, N residues, S rows of the MSA, X bins.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from apps.fold.loss.truth import Truth
from apps.fold.model import residues
from apps.fold.model.heads import PAE_LIMIT, distogram_edges
from apps.fold.model.rigid import Frames
from apps.fold.model.structure import Structure
from apps.fold.model.torsions import pseudo_beta, table


def _cross_entropy(logits: Tensor, index: Tensor) -> Tensor:
    """[..] of logits[.., X] and class numbers [..], in at least fp32."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -torch.log_softmax(wide, -1).gather(-1, index[..., None])[..., 0]


def _mean(x: Tensor, mask: Tensor, num_dims: int, eps: float) -> Tensor:
    dims = tuple(range(-num_dims, 0))
    return (x * mask).sum(dims) / (eps + mask.sum(dims))


def distogram_loss(logits: Tensor, truth: Truth) -> Tensor:
    """Cross-entropy of the distance between CB, CA of glycine (supplement, 1.9.8): logits[B, N, N, X] -> [B]."""
    points = pseudo_beta(truth.aatype_BN, truth.atom37_BN373)
    mask = pseudo_beta(truth.aatype_BN, truth.atom37_mask_BN37)
    edges = distogram_edges(logits.shape[-1]).to(points) ** 2
    squared = ((points[:, :, None] - points[:, None]) ** 2).sum(-1)
    index = (squared[..., None] > edges).sum(-1)
    return _mean(_cross_entropy(logits, index), mask[:, :, None] * mask[:, None], 2, 1e-6)


def masked_msa_loss(logits: Tensor, letters_BSN: Tensor, hidden_BSN: Tensor) -> Tensor:
    """Cross-entropy of the hidden letters (supplement, 1.9.9): logits[B, S, N, 23] -> [B]."""
    return _mean(_cross_entropy(logits, letters_BSN), hidden_BSN, 2, 1e-8)


def lddt(predicted: Tensor, true: Tensor, mask: Tensor, cutoff: float = 15.0) -> Tensor:
    """lDDT of each point, 0 to 1: points [.., P, 3] in Angstrom, mask[.., P] -> [.., P] (Mariani et al. 2013).

    The share of distances to points within `cutoff` that differ by less than 0.5, 1, 2 and 4 Angstrom, their mean.
    Without stereochemical checks. A point without a neighbour scores 1.
    """
    true_distance, distance = torch.cdist(true, true), torch.cdist(predicted, predicted)
    pairs = (true_distance < cutoff) * mask[..., :, None] * mask[..., None, :]
    pairs = pairs * (1 - torch.eye(mask.shape[-1]).to(mask))
    error = (true_distance - distance).abs()
    score = sum((error < limit).to(mask.dtype) for limit in (0.5, 1.0, 2.0, 4.0)) / 4
    return (1e-10 + (pairs * score).sum(-1)) / (1e-10 + pairs.sum(-1))


def plddt_loss(logits: Tensor, positions_BN373: Tensor, truth: Truth) -> Tensor:
    """Cross-entropy of the binned lDDT of CA (algorithm 29): logits[B, N, X] -> [B]."""
    mask = truth.atom37_mask_BN37[..., residues.CA]
    true, predicted = truth.atom37_BN373[..., residues.CA, :], positions_BN373[..., residues.CA, :].detach()
    index = (lddt(predicted, true, mask) * logits.shape[-1]).long().clamp(max=logits.shape[-1] - 1)
    return _mean(_cross_entropy(logits, index), mask, 1, 1e-8)


def experimentally_resolved_loss(logits: Tensor, truth: Truth) -> Tensor:
    """Binary cross-entropy of whether an atom was seen (supplement, 1.9.10): logits[B, N, 37] -> [B]."""
    exists = table(residues.ATOM37_MASK, truth.aatype_BN, truth.atom37_mask_BN37.dtype)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    errors = F.binary_cross_entropy_with_logits(wide, truth.atom37_mask_BN37.to(wide.dtype), reduction="none")
    return _mean(errors, exists, 2, 1e-8)


def pae_loss(logits: Tensor, structure: Structure, truth: Truth) -> Tensor:
    """Cross-entropy of the error of each CA seen from each backbone frame (supplement, 1.9.7): [B, N, N, X] -> [B]."""

    def local(rotation: Tensor, translation: Tensor) -> Tensor:
        return Frames(rotation[:, :, None], translation[:, :, None]).inverse_apply(translation[:, None])

    predicted = local(structure.backbone.rotation[-1].detach(), structure.backbone.translation[-1].detach())
    true = local(truth.groups.rotation[:, :, 0], truth.groups.translation[:, :, 0])
    edges = torch.linspace(0, PAE_LIMIT, logits.shape[-1] - 1).to(true) ** 2
    index = (((predicted - true) ** 2).sum(-1)[..., None] > edges).sum(-1)
    mask = truth.group_mask_BNG[..., 0]
    return _mean(_cross_entropy(logits, index), mask[:, :, None] * mask[:, None], 2, 1e-8)
