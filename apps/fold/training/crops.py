"""The residues of a complex that a step learns from (Evans et al. 2021, section 7.2.1).

    contiguous    a stretch of each chain, chains in random order (algorithm 1)
    spatial       the residues nearest to a random one of an interface (algorithm 2)

Each for half of the rows; a complex without an interface is always cropped contiguously. Both give the numbers of the
residues that are kept, rising, as many as there is room for.

Shapes: N residues.
"""

from collections.abc import Sequence

import numpy as np

SPATIAL_SHARE = 0.5
INTERFACE = 10.0
"""Angstrom: a residue whose CA is as near to one of another chain lies in an interface"""
_TIE = 1e-3  # Angstrom a residue, added to its distance


def crop_of_complex(
    alpha_N3: np.ndarray, seen_N: np.ndarray, asym_N: np.ndarray, size: int, generator: np.random.Generator
) -> np.ndarray:
    """int64[at most size]: CA in Angstrom, whether each was seen, the chain of each residue."""
    if len(asym_N) <= size:
        return np.arange(len(asym_N))
    if generator.random() < SPATIAL_SHARE:
        interface = np.flatnonzero(in_interface(alpha_N3, seen_N, asym_N))
        if len(interface):
            return spatial_crop(alpha_N3, seen_N, int(generator.choice(interface)), size)
    _, lengths = np.unique(asym_N, return_counts=True)
    return contiguous_crop(lengths.tolist(), size, generator)


def contiguous_crop(lengths: Sequence[int], size: int, generator: np.random.Generator) -> np.ndarray:
    """A stretch of each of the chains that stand side by side; a chain may have none."""
    starts = np.cumsum([0, *lengths])
    kept, added, remaining = [], 0, int(sum(lengths))
    for chain in generator.permutation(len(lengths)):
        length = lengths[chain]
        remaining -= length
        most = min(size - added, length)
        least = min(length, max(0, size - added - remaining))
        count = int(generator.integers(least, most + 1))
        first = int(generator.integers(length - count + 1))
        kept.append(np.arange(count) + starts[chain] + first)
        added += count
    return np.sort(np.concatenate(kept))


def spatial_crop(alpha_N3: np.ndarray, seen_N: np.ndarray, centre: int, size: int) -> np.ndarray:
    """The residues whose CA are nearest to a residue's; those that were not seen come last."""
    distance = np.linalg.norm(alpha_N3.astype(np.float64) - alpha_N3[centre], axis=-1) + _TIE * np.arange(len(seen_N))
    order = np.argsort(np.where(seen_N > 0, distance, np.inf), kind="stable")
    return np.sort(order[:size])


def in_interface(alpha_N3: np.ndarray, seen_N: np.ndarray, asym_N: np.ndarray) -> np.ndarray:
    """bool[N]: whether a residue's CA is near one of another chain."""
    found, alpha = np.zeros(len(asym_N), bool), alpha_N3.astype(np.float64)
    for chain in np.unique(asym_N):
        mine = np.flatnonzero((asym_N == chain) & (seen_N > 0))
        others = np.flatnonzero((asym_N != chain) & (seen_N > 0))
        for first in range(0, len(mine), 256):  # some at a time: large complexes have thousands
            part = mine[first : first + 256]
            squared = ((alpha[part, None] - alpha[None, others]) ** 2).sum(-1)
            found[part] = (squared <= INTERFACE**2).any(1)
    return found
