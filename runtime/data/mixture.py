"""Batches from several texts, each with a share of the samples: a pure function of the step, the same on every rank.

    block b of 65536 places      a permutation of it by (seed, b); slots 0 … c₀-1 are of text 0, the next c₁ of text 1 …
    place in slot s of text i    the text's sample number b·cᵢ + s - start of its slots

So shares are exact in every block, each text's samples come once an epoch of that text, and step 1000 is found without
the 999 before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from passes.errors import PlanError
from runtime.data.permutation import Permutation
from runtime.data.token_batches import TokenBatches

BLOCK = 1 << 16


class MixedBatches:
    """Owns the batches of each text, and the slots of each in a block. ``weights``: positive, of any sum."""

    def __init__(self, texts: Sequence[TokenBatches], weights: Sequence[float], seed: int) -> None:
        """Raises PlanError for a text with so small a share that no block would hold a sample of it."""
        self.texts, self.seed = list(texts), seed
        self.global_size = self.texts[0].global_size
        ends = np.cumsum(np.asarray(weights, np.float64)) / sum(weights)
        self._edges = np.concatenate([[0], np.rint(ends * BLOCK)]).astype(np.int64)
        if (np.diff(self._edges) == 0).any():
            fix = f"give each text a share of at least 1/{BLOCK}, or remove it"
            raise PlanError("--data: the share of a text is too small", where="--data", fix=fix)

    @property
    def num_samples(self) -> int:
        return sum(text.num_samples for text in self.texts)

    @property
    def num_batches(self) -> int:
        """Of an epoch; one at least."""
        return max(1, self.num_samples // self.global_size)

    def size_of(self, step: int) -> int:
        """Sequences of a step."""
        return self.global_size

    def places(self, step: int, rows: slice | None = None) -> list[tuple[int, int]]:
        """(text, number of the sample in the order of that text) of each row of a step."""
        wanted = np.arange(step * self.global_size, (step + 1) * self.global_size)[rows or slice(None)]
        found = []
        for block in dict.fromkeys((wanted // BLOCK).tolist()):
            inside = wanted[wanted // BLOCK == block] - block * BLOCK
            slots = Permutation(BLOCK, (self.seed, block, len(self.texts)))(inside)
            texts = np.searchsorted(self._edges, slots, side="right") - 1
            numbers = block * np.diff(self._edges)[texts] + slots - self._edges[texts]
            found += list(zip(texts.tolist(), numbers.tolist(), strict=True))
        return found

    def batch(self, step: int, rows: slice | None = None) -> dict[str, Tensor]:
        """The global batch of a step, or some of its rows: each input as [rows, *shape]."""
        samples = [self.texts[text].samples([number])[0] for text, number in self.places(step, rows)]
        return self.texts[0].stacked(samples)
