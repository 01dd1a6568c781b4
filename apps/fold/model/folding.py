"""The common part of the models of structures: representations, a structure from them, and both again several times.

    for each recycling iteration
    1. representations of the input and of what the last iteration found: the model's `trunk`
    2. structure module
    heads, on the last iteration

Gradients flow through the last iteration only.

Shapes: B batch, S rows of the MSA, N residues, D = c_m, Z = c_z.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from apps.fold.model import residues
from apps.fold.model.config import ModelConfig
from apps.fold.model.features import Features
from apps.fold.model.layers import Linear
from apps.fold.model.structure import Structure, StructureModule
from apps.fold.model.torsions import atom37_of_atom14, table


@dataclass(frozen=True)
class Recycled:
    """One iteration's results for the next: m's first row, z, and positions of CB in Angstrom.

    alpha_BN3  those of CA, where the model asks for them (`FoldingModel.settled`)
    """

    msa_BND: Tensor
    pair_BNNZ: Tensor
    pseudo_beta_BN3: Tensor
    alpha_BN3: Tensor | None = None


@dataclass(frozen=True)
class Folding:
    """The last iteration's results, before the heads read them.

    msa_BSND, pair_BNNZ, single_BND    representations; template rows are cut off the MSA
    structure                          frames, torsions and atoms of every layer
    positions_BN373, atom_mask_BN37    atoms of the last layer, Angstrom
    num_recycles                       iterations before the last one
    """

    msa_BSND: Tensor
    pair_BNNZ: Tensor
    single_BND: Tensor
    structure: Structure
    positions_BN373: Tensor
    atom_mask_BN37: Tensor
    num_recycles: int


class FoldingModel(nn.Module, ABC):
    """The iterations.  A model gives `trunk`, `pair_rows` and `beta_of`, and the modules below."""

    config: ModelConfig
    compares_alphas = False
    single: Linear
    structure_module: StructureModule

    def fold(self, iterations: Sequence[Features]) -> Folding:
        """One recycling iteration for each element of `iterations` (the same object again, or drawn anew).

        A model may settle before: the element behind those that it has taken is then the last.
        """
        recycled, done = None, 0
        while done < len(iterations) - 1:  # one by one: a sequence may fetch them as they are asked for
            with torch.no_grad():
                last, recycled = recycled, self._recycled(iterations[done], recycled)
                done += 1
                if self.settled(last, recycled, iterations[done].mask_BN):
                    break
        features = iterations[done]
        msa_BSND, pair_BNNZ, structure, single_BND = self._iterate(features, recycled)
        return Folding(
            msa_BSND,
            pair_BNNZ,
            single_BND,
            structure,
            atom37_of_atom14(features.aatype_BN, structure.atom14[-1]),
            table(residues.ATOM37_MASK, features.aatype_BN) * features.mask_BN[..., None],
            done,
        )

    def settled(self, last: Recycled | None, now: Recycled, mask_BN: Tensor) -> bool:
        """Whether the iteration to come is the last, from what this one and the one before it found."""
        return False

    def _recycled(self, features: Features, recycled: Recycled | None) -> Recycled:
        msa_BSND, pair_BNNZ, structure, _ = self._iterate(features, recycled)
        positions = atom37_of_atom14(features.aatype_BN, structure.atom14[-1])
        first_row = msa_BSND[:, 0].clone()  # a view would keep the whole MSA
        alpha_BN3 = positions[:, :, residues.CA].clone() if self.compares_alphas else None
        return Recycled(first_row, pair_BNNZ, self.beta_of(features.aatype_BN, positions), alpha_BN3)

    def _iterate(self, features: Features, recycled: Recycled | None) -> tuple[Tensor, Tensor, Structure, Tensor]:
        msa_BSND, pair_BNNZ = self.trunk(features, recycled)
        msa_BSND = msa_BSND[:, : features.msa_BSNF.shape[1]]
        single_BND = self.single(msa_BSND[:, 0])
        structure = self.structure_module(single_BND, pair_BNNZ, features.aatype_BN, features.mask_BN)
        return msa_BSND, pair_BNNZ, structure, single_BND

    @abstractmethod
    def trunk(self, features: Features, recycled: Recycled | None) -> tuple[Tensor, Tensor]:
        """m[B, S, N, D], which may have rows of templates behind those of the MSA, and z[B, N, N, Z]."""

    def nothing(self, features: Features) -> Recycled:
        """The zeros that the first iteration gets in the place of an earlier one's results."""
        like, (B, N) = features.msa_BSNF, features.aatype_BN.shape
        row, pairs = like.new_zeros(B, N, self.config.msa_dim), like.new_zeros(B, N, N, self.config.pair_dim)
        return Recycled(row, pairs, torch.zeros(B, N, 3, device=like.device))

    def embed_pairs(self, features: Features, last_BNNZ: Tensor, points_BN3: Tensor) -> Tensor:
        """z[B, N, N, Z] of the input and of the last iteration."""
        return self.pair_rows(features, last_BNNZ, points_BN3)

    @abstractmethod
    def pair_rows(self, features: Features, last_BINZ: Tensor, points_BN3: Tensor, at: slice = slice(None)) -> Tensor:
        """The rows `at` of it, [B, I, N, Z], of which last_BINZ are the last iteration's."""

    @abstractmethod
    def beta_of(self, aatype_BN: Tensor, positions_BN373: Tensor) -> Tensor:
        """CB of each residue, [B, N, 3], whose distances the next iteration is told."""
