"""Which copy of a sequence in the experiment each predicted chain is compared with (Evans et al. 2021, section 7.3).

Chains of one sequence may be exchanged. Of a predicted complex, or a crop of one:

1. the anchor is a chain of the sequence with the fewest copies, of these the one with the most residues seen
2. for each copy in the experiment of the anchor: the prediction is superposed so that the anchor lies on it (Kabsch)
3. the other chains, one after the other, take of the copies that are left the one whose centre is nearest
4. of these assignments the one with the least RMSD of CA, the whole superposed, is taken

The files' own assignment stands unless another one is better by more than rounding, so that ranks agree where all are
alike, as they are before anything is learned.

Shapes: B batch, N residues, K copies of a sequence at most.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from apps.fold.score import superpose

_MARGIN = 1e-3  # relative
_FEWEST = 3  # residues that a superposition takes


@dataclass(frozen=True)
class Copies:
    """A predicted complex beside all copies of its chains' sequences in the experiment; arrays of N residues.

    predicted_N3        CA, Angstrom
    true_NK3, seen_NK   CA of the same residue in each copy, and whether it is known
    asym_N, entity_N    the chain and its sequence; 0 for padding
    own_N               the copy that the chain is in the file, from 0
    copies_N            how many copies there are
    """

    predicted_N3: np.ndarray
    true_NK3: np.ndarray
    seen_NK: np.ndarray
    asym_N: np.ndarray
    entity_N: np.ndarray
    own_N: np.ndarray
    copies_N: np.ndarray

    def rmsd(self, copy_N: np.ndarray) -> float:
        """Root mean square distance of CA in Angstrom, if residues are compared with these copies, superposed."""
        rows = np.arange(len(copy_N))
        seen = np.flatnonzero(self.seen_NK[rows, copy_N] & (self.asym_N > 0))
        if len(seen) < _FEWEST:
            return np.inf
        return superpose(self.predicted_N3[seen], self.true_NK3[seen, copy_N[seen]])[1]


def matched(one: Copies) -> np.ndarray:
    """int64[N]: the copy that each residue is compared with; alike within a chain, different for chains alike."""
    chains = [np.flatnonzero(one.asym_N == asym) for asym in np.unique(one.asym_N) if asym > 0]
    if not chains or (one.copies_N <= 1).all():
        return one.own_N.copy()

    def rank(at: np.ndarray) -> tuple[int, int]:
        return -int(one.copies_N[at[0]]), int(one.seen_NK[at, one.own_N[at]].sum())

    anchor = max(chains, key=rank)
    best, least = one.own_N.copy(), one.rmsd(one.own_N)
    for copy in range(int(one.copies_N[anchor[0]])):
        known = anchor[one.seen_NK[anchor, copy]]
        if len(known) < _FEWEST:
            continue
        moved, _ = superpose(one.predicted_N3, one.true_NK3[:, copy], known)
        found = _nearest(one, chains, moved, (anchor, copy))
        error = one.rmsd(found)
        if error < (1 - _MARGIN) * least:
            best, least = found, error
    return best


def _nearest(
    one: Copies, chains: list[np.ndarray], moved_N3: np.ndarray, anchored: tuple[np.ndarray, int]
) -> np.ndarray:
    """The copies of all chains, given the anchor's."""
    anchor, taken = anchored[0], {int(one.entity_N[anchored[0][0]]): {anchored[1]}}
    found = one.own_N.copy()
    found[anchor] = anchored[1]
    for at in chains:
        if at is anchor:
            continue
        entity, own = int(one.entity_N[at[0]]), int(one.own_N[at[0]])
        used = taken.setdefault(entity, set())
        free = [copy for copy in (own, *range(int(one.copies_N[at[0]]))) if copy not in used]
        best, least = free[0], np.inf
        for copy in free:
            known = at[one.seen_NK[at, copy]]
            if len(known):
                between = float(np.linalg.norm(moved_N3[known].mean(0) - one.true_NK3[known, copy].mean(0)))
                if between < (1 - _MARGIN) * least:
                    best, least = copy, between
        used.add(best)
        found[at] = best
    return found


@torch.no_grad()
def matched_copies(predicted_BN3: Tensor, true_BNK3: Tensor, seen_BNK: Tensor, ids: dict[str, Tensor]) -> Tensor:
    """`matched` of a batch, int64[B, N], on the device of true_BNK3.

    ids  asym, entity, sym (from 1) and copies, [B, N] each, 0 for padding
    """
    own_BN = (ids["sym"] - 1).clamp(min=0)
    if true_BNK3.shape[2] == 1:
        return own_BN
    given = (predicted_BN3.detach().double(), true_BNK3.double(), seen_BNK > 0)
    given += (ids["asym"], ids["entity"], own_BN, ids["copies"])
    rows = zip(*(tensor.cpu().numpy() for tensor in given))
    return torch.from_numpy(np.stack([matched(Copies(*row)) for row in rows])).to(true_BNK3.device)
