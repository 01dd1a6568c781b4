"""The network's features: one value object a recycling iteration.

Shapes: B batch, N residues, S rows of the clustered MSA, E of the extra MSA, T templates.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class TemplateFeatures:
    """Structures that were aligned with the sequence.

    aatype_BTN            residue types of the template, gaps included (0..21)
    mask_BT               1 where there is a template
    pseudo_beta_BTN3      CB (CA of glycine), Angstrom; pseudo_beta_mask_BTN 1 where known
    backbone_mask_BTN     1 where N, CA and C are known
    torsions_BTNA2        (sin, cos) of the 7 torsions; alternative_BTNA2 with symmetric chi turned by pi;
                          torsion_mask_BTNA 1 where known
    backbone_BTN33        N, CA and C, Angstrom; what only complexes' models read
    own_directions_BTN3   unit vectors from CA to itself, which golden runs have (apps/fold/golden_rounding.py); None: 0
    """

    aatype_BTN: Tensor
    mask_BT: Tensor
    pseudo_beta_BTN3: Tensor
    pseudo_beta_mask_BTN: Tensor
    backbone_mask_BTN: Tensor
    torsions_BTNA2: Tensor
    alternative_BTNA2: Tensor
    torsion_mask_BTNA: Tensor
    backbone_BTN33: Tensor | None = None
    own_directions_BTN3: Tensor | None = None

    def to(self, dtype: torch.dtype, device: torch.device | str | None = None) -> "TemplateFeatures":
        """Move and cast: `dtype`, coordinates in at least fp32."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None)

        def points(tensor: Tensor) -> Tensor:
            return tensor.to(device, torch.promote_types(dtype, torch.float32))

        backbone = None if self.backbone_BTN33 is None else points(self.backbone_BTN33)
        return replace(_mapped(self, moved), pseudo_beta_BTN3=points(self.pseudo_beta_BTN3), backbone_BTN33=backbone)


@dataclass(frozen=True)
class ChainIds:
    """The chain of each residue of a complex, [B, N] all, numbered from 1.

    asym_BN    the chain
    entity_BN  its sequence
    sym_BN     which of the chains of that sequence
    """

    asym_BN: Tensor
    entity_BN: Tensor
    sym_BN: Tensor


@dataclass(frozen=True)
class Features:
    """One sequence's, or a batch's of sequences of one length.

    aatype_BN           residue types, 0..20
    residue_index_BN    positions in the chain; gaps are kept
    mask_BN             1 where a residue is, 0 for padding
    target_BNF          22 channels: a break before the residue, one-hot residue type
    msa_BSNF            49 channels: one-hot letter (23), has a deletion before it, its length as 2/pi atan(n / 3),
                        the cluster's profile (23) and mean deletion
    msa_mask_BSN        1 where a row is
    extra_msa_BEN       letters 0..22; extra_has_deletion_BEN and extra_deletion_BEN as above; extra_mask_BEN
    templates           None where there are none
    chains              of a complex, whose target_BNF has no channel for breaks (21); else None
    """

    aatype_BN: Tensor
    residue_index_BN: Tensor
    mask_BN: Tensor
    target_BNF: Tensor
    msa_BSNF: Tensor
    msa_mask_BSN: Tensor
    extra_msa_BEN: Tensor
    extra_has_deletion_BEN: Tensor
    extra_deletion_BEN: Tensor
    extra_mask_BEN: Tensor
    templates: TemplateFeatures | None = None
    chains: ChainIds | None = None

    @property
    def num_residues(self) -> int:
        return self.aatype_BN.shape[1]

    def sizes(self) -> tuple[int, int, int, int]:
        """Residues, rows of the MSA, extra rows, templates."""
        templates = 0 if self.templates is None else self.templates.mask_BT.shape[1]
        return self.num_residues, self.msa_BSNF.shape[1], self.extra_msa_BEN.shape[1], templates

    def map(self, function: Callable[[Tensor], Tensor]) -> "Features":
        """`function` applied to every tensor."""
        templates = None if self.templates is None else _mapped(self.templates, function)
        chains = None if self.chains is None else _mapped(self.chains, function)
        return _mapped(replace(self, templates=None, chains=None), function, templates=templates, chains=chains)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Features":
        """Move to a device, with floating-point features in `dtype`, but coordinates in at least fp32."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None)

        templates = None if self.templates is None else self.templates.to(dtype, device)
        return replace(replace(self, templates=None).map(moved), templates=templates)


def _mapped(value, function: Callable[[Tensor], Tensor], **others):
    tensors = {f.name: getattr(value, f.name) for f in fields(value)}
    return replace(value, **{n: function(t) for n, t in tensors.items() if isinstance(t, Tensor)}, **others)
