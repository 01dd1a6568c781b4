"""Random numbers as jax draws them, so that a run of the original code can be made again from its key.

Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Keys are
uint32[.., 2]. Since its version 0.5 jax counts otherwise (`partitionable`); both ways are here.
"""

from dataclasses import dataclass

import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(key: np.ndarray, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two words of each counter (first, second), uint32; keys [.., 2] broadcast to counters."""
    k = [key[..., 0], key[..., 1]]
    k.append(k[0] ^ k[1] ^ np.uint32(0x1BD11BDA))
    x, y = first + k[0], second + k[1]
    for group in range(5):
        for bits in _ROTATIONS[group % 2]:
            x = x + y
            y = (y << np.uint32(bits)) | (y >> np.uint32(32 - bits))
            y = x ^ y
        x = x + k[(group + 1) % 3]
        y = y + k[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


@dataclass(frozen=True)
class JaxNumbers:
    """jax.random's functions, for one way of counting."""

    partitionable: bool

    def key(self, seed: int) -> np.ndarray:
        """The key of a seed below 2**32."""
        return np.array([0, seed], np.uint32)

    def split(self, key: np.ndarray, num: int = 2) -> np.ndarray:
        """num keys, [num, 2]."""
        if self.partitionable:
            return np.stack(threefry(key, np.zeros(num, np.uint32), np.arange(num, dtype=np.uint32)), -1)
        counts = np.arange(2 * num, dtype=np.uint32)
        return np.concatenate(threefry(key, counts[:num], counts[num:])).reshape(num, 2)

    def uniform(self, key: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """float32 from 0 to below 1, each from a key of its own, folded in dim by dim (`padding_consistent_rng`)."""
        keys = key
        for size in shape:
            counts = np.arange(size, dtype=np.uint32)
            keys = np.stack(threefry(keys[..., None, :], np.zeros_like(counts), counts), -1)
        zero = np.zeros(shape, np.uint32)
        first, second = threefry(keys, zero, zero)
        bits = first ^ second if self.partitionable else first
        return ((bits >> np.uint32(9)) | np.uint32(0x3F800000)).view(np.float32) - np.float32(1)
