"""Values of earlier positions of a sequence, kept so that a later position is computed alone.

    keep      all positions of a value      →  the buffer; the value itself
    extend    a value at one position       →  the buffer with it: the value of all positions
    row_at    a value of all positions      →  that at one position
    seen_at   a value of all positions      →  those up to one position: the keys that a causal query sees

A dim may hold several sequences behind each other, and several elements of each position.
"""

import torch

from passes.ops.random_state import RandomState

Tensor = torch.Tensor


class KeptRows:
    """The kept values of a rank, by microbatch and name. ``at``: the position that the next forwards compute."""

    def __init__(self, random: RandomState) -> None:
        self._random = random
        self.at = 0
        self.buffers: dict[tuple[int, str], Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """The bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers.values())

    def of_microbatch(self, name: str) -> tuple[int, str]:
        return self._random.microbatch, name

    def __repr__(self) -> str:
        return "kept"


def keep(x: Tensor, kept: KeptRows, name: str) -> Tensor:
    """x [.., s, ..], which is returned; its values go to the buffer ``name``."""
    place = kept.of_microbatch(name)
    if place in kept.buffers:
        kept.buffers[place].copy_(x)
    else:
        kept.buffers[place] = x.detach().clone(memory_format=torch.contiguous_format)
    return x


def extend(x: Tensor, kept: KeptRows, name: str, dim: int, num_sequences: int) -> Tensor:
    """x [.., num_sequences · k, ..] at this position → the buffer [.., num_sequences · s · k, ..] that has it."""
    buffer = kept.buffers[kept.of_microbatch(name)]
    rows = x.unflatten(dim, (num_sequences, -1))
    width = rows.shape[dim + 1]
    whole = buffer.unflatten(dim, (num_sequences, -1))
    whole.narrow(dim + 1, kept.at * width, width).copy_(rows)
    return buffer


def row_at(x: Tensor, kept: KeptRows, dim: int, num_sequences: int, length: int) -> Tensor:
    """x [.., num_sequences · length · k, ..] → [.., num_sequences · k, ..] at this position."""
    width = x.shape[dim] // num_sequences // length
    rows = x.unflatten(dim, (num_sequences, -1)).narrow(dim + 1, kept.at * width, width)
    return rows.flatten(dim, dim + 1)


def seen_at(x: Tensor, kept: KeptRows) -> Tensor:
    """x [.., s, d] → [.., at + 1, d]."""
    return x.narrow(-2, 0, kept.at + 1)
