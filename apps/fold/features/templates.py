"""Structures as templates: a chain aligned with the sequence, residue by residue.

The alignment is global (Needleman and Wunsch with affine gaps and BLOSUM62, ends free), so any structure file serves
without a search. Residues of the sequence without a partner are gaps.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from apps.fold.features.arrays import template_features
from apps.fold.features.sequences import residue_types
from apps.fold.features.structures import Chain, read_structure
from apps.fold.model import residues
from apps.fold.model.features import TemplateFeatures
from core.config import UserError

_FEWEST = 10  # aligned residues of a template


def read_templates(paths: Sequence[Path], sequence: str) -> TemplateFeatures | None:
    """The features of one template for each file, the chain that matches best; None for no files.

    Raises UserError for a file that holds no chain like the sequence.
    """
    if not paths:
        return None
    aligned = []
    for path in paths:
        candidates = [(align(sequence, chain.sequence), chain) for chain in read_structure(path)]
        pairs, chain = max(candidates, key=lambda c: _identities(sequence, c[1].sequence, c[0]))
        if len(pairs) < _FEWEST:
            raise UserError(f"{path} is no template: only {len(pairs)} of its residues align with the sequence")
        aligned.append(_on_sequence(len(sequence), chain, pairs))
    aatype, positions, mask = (torch.from_numpy(np.stack(parts))[None] for parts in zip(*aligned))
    return template_features(aatype, torch.ones(1, len(paths)), positions, mask)


def align(query: str, other: str) -> np.ndarray:
    """Pairs [n, 2] of residue numbers, from 0, that a global alignment puts below each other."""
    from Bio.Align import PairwiseAligner, substitution_matrices

    aligner = PairwiseAligner()
    aligner.mode = "global"
    aligner.substitution_matrix = substitution_matrices.load("BLOSUM62")
    aligner.open_gap_score, aligner.extend_gap_score = -11, -1
    aligner.end_gap_score = 0
    first, second = ("".join(c if c in residues.THREE_LETTERS else "X" for c in s) for s in (query, other))
    blocks = np.array(aligner.align(first, second)[0].aligned)
    pairs = [np.stack([np.arange(*a), np.arange(*b)], 1) for a, b in zip(*blocks)]
    return np.concatenate([np.zeros((0, 2), np.int64), *pairs])


def _identities(query: str, other: str, pairs: np.ndarray) -> int:
    return sum(query[i] == other[j] for i, j in pairs)


def _on_sequence(length: int, chain: Chain, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """aatype [N], positions [N, 37, 3] and mask [N, 37] at the query's residues."""
    aatype = np.full(length, residues.GAP, np.int64)
    positions = np.zeros((length, residues.NUM_ATOM37, 3), np.float32)
    mask = np.zeros((length, residues.NUM_ATOM37), np.float32)
    here, there = pairs.T
    aatype[here] = residue_types(chain.sequence)[there]
    positions[here], mask[here] = chain.positions[there], chain.mask[there]
    return aatype, positions, mask
