"""What the PAE and pLDDT say of the interfaces of a complex: pDockQ2 and ipSAE.

For chains A and B, PAE(i, j) being the error of j when aligned on i, in Angstrom:

    pDockQ2(A, B) = 1.31 / (1 + exp(-0.075 (x - 84.733))) + 0.005
        x the mean of 1 / (1 + (PAE(i, j) / 10)^2) over pairs of i in A and j in B whose CB (CA of glycine) are within
        8 Angstrom, times the mean pLDDT of the residues in such pairs; 0 without any (Zhu et al., Bioinformatics 39,
        btad424, 2023; constants as rounded in ipsae.py)
    ipSAE(A, B) = max over i in A of the mean of 1 / (1 + (PAE(i, j) / d0)^2) over j in B with PAE(i, j) < 10
        d0 = max(1, 1.24 (n - 15)^(1/3) - 1.8), n the number of such j, at least 26; 0 without any (Dunbrack 2025,
        bioRxiv 2025.02.10.637595, with d0 of each residue)

Neither is symmetric.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from apps.fold.features.sequences import chain_id
from apps.fold.model import residues
from apps.fold.output.confidence import Folded

_NEAR, _CERTAIN = 8.0, 10.0  # Angstrom: of CB, of the PAE
_SCALE = 10.0  # Angstrom, pDockQ2's d0


def pdockq2(folded: Folded) -> np.ndarray:
    """[chains, chains], 0 to 1.315; its diagonal is 0."""
    assert folded.pae is not None
    glycine = np.array([letter == "G" for letter in folded.sequence])
    beta = np.where(glycine[:, None], folded.positions[:, residues.CA], folded.positions[:, residues.CB])
    pae, plddt = folded.pae, folded.plddt

    def of_pair(first: slice, second: slice) -> float:
        near = np.linalg.norm(beta[first][:, None] - beta[second][None], axis=-1) <= _NEAR
        if not near.any():
            return 0.0
        error = pae[first, second][near].astype(np.float64)
        inside = np.concatenate([plddt[first][near.any(1)], plddt[second][near.any(0)]])
        x = (1 / (1 + (error / _SCALE) ** 2)).mean() * inside.mean()
        return 1.31 / (1 + np.exp(-0.075 * (x - 84.733))) + 0.005

    return _of_pairs(folded, of_pair)


def ipsae(folded: Folded) -> np.ndarray:
    """[chains, chains], 0 to 1; its diagonal is 0."""
    assert folded.pae is not None
    pae = folded.pae

    def of_pair(first: slice, second: slice) -> float:
        error = pae[first, second].astype(np.float64)
        certain = error < _CERTAIN
        count = certain.sum(1)
        d0 = np.maximum(1.0, 1.24 * (np.maximum(count, 26) - 15) ** (1 / 3) - 1.8)
        terms = certain / (1 + (error / d0[:, None]) ** 2)
        return (terms.sum(1) / np.maximum(count, 1)).max()

    return _of_pairs(folded, of_pair)


def _of_pairs(folded: Folded, of_pair: Callable[[slice, slice], float]) -> np.ndarray:
    """[chains, chains], ordered pairs of a complex's chains; of a chain with itself 0."""
    rows = folded.chain_rows()
    found = np.zeros((len(rows), len(rows)))
    for a, b in itertools.permutations(range(len(rows)), 2):
        found[a, b] = of_pair(rows[a], rows[b])
    return found


def interfaces(folded: Folded) -> dict[str, Any]:
    """The numbers of a complex for its json; empty for a single chain."""
    if folded.iptm is None or folded.chain_pairs is None:
        return {}

    def listed(matrix: np.ndarray) -> list[list[float]]:
        return [[round(float(value), 4) for value in row] for row in matrix]

    return {
        "iptm": round(folded.iptm, 4),
        "confidence": round(folded.confidence, 3),
        "chains": [chain_id(number) for number in range(1, len(folded.lengths) + 1)],
        "chain_pair_iptm": listed(folded.chain_pairs),
        "pdockq2": listed(pdockq2(folded)),
        "ipsae": listed(ipsae(folded)),
    }
