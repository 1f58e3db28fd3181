"""Batches of several lengths, and batches from several texts: pure functions of the step, the same on every rank.

Several lengths: each document is in sequences of the shortest length that holds it, and each batch has one length.

    lengths 256, 512, 1024      documents up to 256 tokens | up to 512 | longer ones (cut at 1024, or refused)
    cycle c                     a permutation by (seed, c) of n₀ steps of the first length, n₁ of the second, …
    step s of cycle c           batch c·nᵢ + k of length i, if k earlier steps of the cycle have length i

A cycle has enough epochs that the number of batches of each length is within 1/64 of its share.

Several texts, each with a share of the samples:

    block b of 65536 samples     a permutation by (seed, b); slots 0 … c₀-1 belong to text 0, the next c₁ to text 1, …
    slot s of text i             sample b·cᵢ + s - first slot of text i, in the order of that text
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from torch import Tensor

from passes.errors import PlanError
from planner.spec.inputs import tokens_of
from planner.spec.spec import Spec
from runtime.data.objectives.samples import Within
from runtime.data.token_batches import OfSamples, Permutation, TokenBatches, token_batches
from runtime.data.tokens import Tokens

BLOCK = 1 << 16


class MixedBatches(OfSamples):
    """Batches from several texts. ``weights``: the share of each, positive, with any sum."""

    def __init__(self, texts: Sequence[TokenBatches], weights: Sequence[float], seed: int) -> None:
        """Raises PlanError if the share of a text is too small for one sample in a block."""
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

    def places(self, step: int, rows: slice | None = None) -> list[tuple[int, int]]:
        """Return (text, number of the sample in the order of that text) for each row of a step."""
        wanted = np.arange(step * self.global_size, (step + 1) * self.global_size)[rows or slice(None)]
        places = []
        for block in dict.fromkeys((wanted // BLOCK).tolist()):
            inside = wanted[wanted // BLOCK == block] - block * BLOCK
            slots = Permutation(BLOCK, (self.seed, block, len(self.texts)))(inside)
            texts = np.searchsorted(self._edges, slots, side="right") - 1
            numbers = block * np.diff(self._edges)[texts] + slots - self._edges[texts]
            places += list(zip(texts.tolist(), numbers.tolist(), strict=True))
        return places

    def batch(self, step: int, rows: slice | None = None) -> dict[str, Tensor]:
        """Return the global batch of a step, or some of its rows: each input as [rows, *shape]."""
        samples = [self.texts[text].samples([number])[0] for text, number in self.places(step, rows)]
        return self.texts[0].stacked(samples)


OfLength = TokenBatches | MixedBatches
_FINE = 32  # batches of the rarest length in a cycle: rounding to whole batches is then within 1/64
_OF_LENGTHS = 1  # in the key of a permutation: lengths of steps, not samples


class BucketBatches:
    """Batches of several lengths. Owns the order of the last cycle.

    ``samples``: sequences of each length in an epoch, by the shares of the texts. ``num_batches``: batches in an epoch.
    """

    def __init__(self, of_lengths: Sequence[OfLength], samples: Sequence[float], seed: int) -> None:
        self.of_lengths, self.seed = list(of_lengths), seed
        sizes = [batches.global_size for batches in self.of_lengths]
        of_epoch = np.asarray(samples, np.float64) / sizes
        epochs = np.ceil(_FINE / of_epoch.min()).clip(1, _FINE)
        counts = np.rint(epochs * of_epoch).clip(1)
        self.num_batches = max(1, int(of_epoch.sum()))
        self._edges = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._last: tuple[int, np.ndarray, np.ndarray] | None = None

    @property
    def num_samples(self) -> int:
        return sum(batches.num_samples for batches in self.of_lengths)

    def place(self, step: int) -> tuple[int, int]:
        """Return (index of the length, number of the batch among those of this length)."""
        cycle, inside = divmod(step, int(self._edges[-1]))
        lengths, before = self._cycle(cycle)
        length = int(lengths[inside])
        return length, cycle * int(self._edges[length + 1] - self._edges[length]) + int(before[inside])

    def _cycle(self, cycle: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the length of each step of a cycle, and the number of earlier steps with it: both int64 [steps]."""
        last = self._last  # read once: a thread makes batches ahead
        if last is None or last[0] != cycle:
            size = int(self._edges[-1])
            permuted = Permutation(size, (self.seed, cycle, len(self.of_lengths), _OF_LENGTHS))
            lengths = np.searchsorted(self._edges, permuted(np.arange(size)), side="right") - 1
            order, before = np.argsort(lengths, kind="stable"), np.empty(size, np.int64)
            before[order] = np.arange(size) - self._edges[lengths[order]]
            last = self._last = cycle, lengths, before
        return last[1:]

    def size_of(self, step: int) -> int:
        """Return the number of sequences in a step."""
        return self.of_lengths[self.place(step)[0]].global_size

    def batch(self, step: int, rows: slice | None = None) -> dict[str, Tensor]:
        """Return the global batch of a step, or some of its rows: each input as [rows, *shape]."""
        length, number = self.place(step)
        return self.of_lengths[length].batch(number, rows)


def batches_of(texts: Sequence[Tokens], weights: Sequence[float], specs: Sequence[Spec]) -> OfLength | BucketBatches:
    """Return batches of one text, or of several by their ``weights``. ``specs``: one for each length, ascending.

    Raises PlanError if a text has no sample for any of them.
    """
    if len(specs) == 1:
        return _mixed([token_batches(tokens, specs[0]) for tokens in texts], weights, specs[0])
    shares = np.asarray(weights or [1.0], np.float64) / sum(weights or [1.0])
    by_text = [_of_lengths(tokens, specs) for tokens in texts]
    numbers = np.array([[b.num_samples if b is not None else 0 for b in row] for row in by_text], np.float64)
    samples = numbers / numbers.sum(1, keepdims=True) * shares[:, None]  # [texts, lengths]
    of_lengths = []
    for place, spec in enumerate(specs):
        here = [(row[place], share) for row, share in zip(by_text, samples[:, place], strict=True)]
        of_texts, weights_here = [b for b, _ in here if b is not None], [float(s) for b, s in here if b is not None]
        if of_texts:
            mixed = _mixed(of_texts, weights_here if weights else [], spec)
            of_lengths.append((mixed, samples[:, place].sum() * numbers.sum()))
    return BucketBatches([b for b, _ in of_lengths], [n for _, n in of_lengths], specs[0].seed)


def _of_lengths(tokens: Tokens, specs: Sequence[Spec]) -> list[TokenBatches | None]:
    """Return batches of each length, None if it has no documents. Raises PlanError if all are None."""
    lengths = [tokens_of(spec.require_inputs()) for spec in specs]
    by_length = [
        token_batches(tokens, spec, within) if (within.of(tokens)[1] > 1).any() else None
        for spec, within in zip(specs, ranges(lengths), strict=True)
    ]
    if all(batches is None for batches in by_length):
        token_batches(tokens, specs[-1])  # raises the error that names the lack
    return by_length


def ranges(lengths: Sequence[int]) -> Iterator[Within]:
    """Yield the range of document sizes for each length; documents longer than all lengths belong to the last."""
    for above, most in pairwise((0, *lengths)):
        yield Within(above, most if most != lengths[-1] else None)


def _mixed(texts: Sequence[TokenBatches], weights: Sequence[float], spec: Spec) -> OfLength:
    return MixedBatches(texts, weights, spec.seed) if weights else texts[0]


def token_batches_in(batches: OfLength | BucketBatches) -> list[TokenBatches]:
    """Return the batches of every length and text."""
    of_lengths = batches.of_lengths if isinstance(batches, BucketBatches) else [batches]
    return [text for b in of_lengths for text in (b.texts if isinstance(b, MixedBatches) else [b])]


def rows_of(tokens: Tokens, lengths: Sequence[int]) -> list[tuple[str, ...]]:
    """Return a row of text for each length: length, documents, tokens, padding, mean document size of a token.

    Padding is the share of tokens that pad sequences with one document each.
    """
    rows = []
    for length, within in zip(lengths, ranges(lengths), strict=True):
        _, sizes = within.of(tokens)
        total, sequences = int(sizes.sum()), int((-(-sizes // length)).sum())
        padding = 1 - total / (sequences * length) if total else 0.0
        pieces = np.concatenate([np.repeat(length, int((sizes // length).sum())), sizes % length])
        mean = int((pieces.astype(np.float64) ** 2).sum() / total) if total else 0
        rows.append((str(length), f"{len(sizes):,}", f"{total:,}", f"{padding:.0%}", str(mean)))
    return rows
