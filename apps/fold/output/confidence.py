"""The numbers of a prediction, read by the heads a few rows of pairs at a time."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from apps.fold.model.folding import Folding
from apps.fold.model.heads import plddt
from apps.fold.model.network import NetworkHeads
from apps.fold.subbatch.reading import PairNumbers

_OF_INTERFACES = 0.8  # of a complex's confidence; the rest is of the whole (Evans et al. 2021, section 7.9)


@dataclass(frozen=True)
class Folded:
    """One prediction of one sequence, on the CPU.

    positions[N, 37, 3] in Angstrom, mask[N, 37], plddt[N] 0 to 100, pae[N, N] in Angstrom or None, ptm or None,
    distances[N, N, 64] probabilities of distances between CB, or None

    lengths  of a complex's chains, one behind the other; empty for one chain
    iptm     of a complex, with chain_pairs[chains, chains] (`apps.fold.model.heads.chain_tm_scores`); else None
    """

    sequence: str
    positions: np.ndarray
    mask: np.ndarray
    plddt: np.ndarray
    pae: np.ndarray | None
    ptm: float | None
    distances: np.ndarray | None
    lengths: tuple[int, ...] = ()
    iptm: float | None = None
    chain_pairs: np.ndarray | None = None

    @property
    def mean_plddt(self) -> float:
        """The mean pLDDT, which predictions of single chains are ranked by."""
        return float(self.plddt.mean())

    @property
    def confidence(self) -> float:
        """What predictions are ranked by, 0 to 100: the mean pLDDT; of a complex 80 ipTM + 20 pTM."""
        if self.iptm is None or self.ptm is None:
            return self.mean_plddt
        return 100 * (_OF_INTERFACES * self.iptm + (1 - _OF_INTERFACES) * self.ptm)

    def chain_rows(self) -> list[slice]:
        """The residues of each chain."""
        lengths = self.lengths or (len(self.sequence),)
        return [slice(end - length, end) for end, length in zip(np.cumsum(lengths).tolist(), lengths)]


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
        (),
        None if pairs.iptm is None else float(pairs.iptm),
        None if pairs.chain_pairs is None else pairs.chain_pairs.float().cpu().numpy(),
    )


def of_chains(one: Folded, lengths: tuple[int, ...], order: np.ndarray, chains: np.ndarray) -> Folded:
    """The same with chains in the order in which they were given.

    lengths  of the chains as they were given
    order    the network's residue of each residue
    chains   the chain, as it was given, of each of the network's
    """
    at = np.argsort(chains)
    return replace(
        one,
        positions=one.positions[order],
        mask=one.mask[order],
        plddt=one.plddt[order],
        pae=None if one.pae is None else one.pae[order][:, order],
        distances=None if one.distances is None else one.distances[order][:, order],
        chain_pairs=None if one.chain_pairs is None else one.chain_pairs[at][:, at],
        lengths=lengths,
    )


def _array(x: Tensor) -> np.ndarray:
    return x[0].detach().to("cpu", torch.float32).numpy()
