"""The numbers of a prediction, out of its logits."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from apps.fold.model import heads
from apps.fold.model.alphafold import Prediction


@dataclass(frozen=True)
class Folded:
    """One prediction of one sequence, on the CPU.

    positions[N, 37, 3] in Angstrom, mask[N, 37], plddt[N] 0 to 100, pae[N, N] in Angstrom or None, ptm or None,
    distances[N, N, 64] probabilities of distances between CB
    """

    sequence: str
    positions: np.ndarray
    mask: np.ndarray
    plddt: np.ndarray
    pae: np.ndarray | None
    ptm: float | None
    distances: np.ndarray

    @property
    def mean_plddt(self) -> float:
        """What predictions are ranked by."""
        return float(self.plddt.mean())


def folded(sequence: str, prediction: Prediction) -> Folded:
    """The numbers of a prediction with a batch of one."""
    logits = prediction.logits
    mask_BN = torch.ones(prediction.single_BND.shape[:2], device=prediction.single_BND.device)
    pae = ptm = None
    if logits.pae is not None:
        pae = _array(heads.predicted_aligned_error(logits.pae))
        ptm = float(heads.predicted_tm_score(logits.pae, mask_BN))
    return Folded(
        sequence,
        _array(prediction.positions_BN373),
        _array(prediction.atom_mask_BN37),
        _array(heads.plddt(logits.plddt)),
        pae,
        ptm,
        _array(torch.softmax(logits.distogram.float(), -1)).astype(np.float16),
    )


def _array(x: Tensor) -> np.ndarray:
    return x[0].detach().to("cpu", torch.float32).numpy()
