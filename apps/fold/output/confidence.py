"""The numbers of a prediction, read by the heads a few rows of pairs at a time."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from apps.fold.model.folding import Folding
from apps.fold.model.heads import plddt
from apps.fold.model.network import NetworkHeads
from apps.fold.subbatch.reading import PairNumbers


@dataclass(frozen=True)
class Folded:
    """One prediction of one sequence, on the CPU.

    positions[N, 37, 3] in Angstrom, mask[N, 37], plddt[N] 0 to 100, pae[N, N] in Angstrom or None, ptm or None,
    distances[N, N, 64] probabilities of distances between CB, or None
    """

    sequence: str
    positions: np.ndarray
    mask: np.ndarray
    plddt: np.ndarray
    pae: np.ndarray | None
    ptm: float | None
    distances: np.ndarray | None

    @property
    def mean_plddt(self) -> float:
        """The mean pLDDT, which predictions are ranked by."""
        return float(self.plddt.mean())


def folded(sequence: str, folding: Folding, heads: NetworkHeads, pairs: PairNumbers) -> Folded:
    """The numbers of a prediction with a batch of one; `pairs`: what the heads read of its pair representation."""
    return Folded(
        sequence,
        _array(folding.positions_BN373),
        _array(folding.atom_mask_BN37),
        _array(plddt(heads.plddt(folding.structure.single_BND))),
        None if pairs.pae is None else pairs.pae.numpy(),
        None if pairs.ptm is None else float(pairs.ptm),
        None if pairs.distances is None else pairs.distances.numpy(),
    )


def _array(x: Tensor) -> np.ndarray:
    return x[0].detach().to("cpu", torch.float32).numpy()
