"""A permutation of 0..n-1 that is computed, not stored: any place of it at once, whatever n.

A Feistel network over the next even number of bits, keyed by integers: each round is invertible, so the composition is
a bijection of 0..2^b-1. Values outside 0..n-1 are permuted again until they are inside (cycle walking; on average less
than four times), which leaves a bijection of 0..n-1. (Black and Rogaway, "Ciphers with arbitrary finite domains".)
"""

from __future__ import annotations

import numpy as np

_ROUNDS = 6
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class Permutation:
    """Of ``size`` places, by ``key`` (integers that are not negative). Owns the keys of its rounds."""

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        self.size = size
        self._half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """The permuted indices at ``places`` (int64 [k], each below ``size``): int64 [k]."""
        found = self._network(places.astype(np.uint64))
        while (outside := found >= self.size).any():
            found[outside] = self._network(found[outside])
        return found.astype(np.int64)

    def _network(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right + key) & self._mask)
        return (left << self._half) | right


def _mixed(values: np.ndarray) -> np.ndarray:
    """Every bit of the result depends on every bit of a value (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIERS[0]
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIERS[1]
    return values ^ (values >> np.uint64(31))
