"""One rank's part of a full tensor: its placement over one axis, and for experts those of its ep rank.

    [.., n, ..] --pad--> [.., n + padding, ..] --Placement.slices(size, rank)--> [.., n / size, ..]       over tp or etp
    [.., E, ..] --ExpertPart.first(ep, ep_rank)--> [.., E / ep, ..]                                        over ep

The two shard different dims. A tensor of one expert alone is complete on one ep rank, and absent on the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from passes.errors import require
from passes.moe.parts import ExpertPart
from passes.types.types import Placement
from planner.mesh import Mesh

Ranges = Mapping[int, tuple[tuple[int, int], ...]]  # of each dim that is cut: half open, in local order


@dataclass(frozen=True, slots=True)
class Part:
    """``placement`` over ``size`` ranks; ``rank``: this one; ``expert`` over ``ep``."""

    placement: Placement
    size: int = 1
    rank: int = 0
    expert: ExpertPart | None = None
    ep: int = 1
    ep_rank: int = 0

    def __post_init__(self) -> None:
        is_twice = self.expert is not None and self.placement.is_sharded and self.placement.dim == self.expert.dim
        require(not is_twice, f"dim {self.placement.dim} of a stack of experts is cut over etp, and over ep")

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a rank's part of a tensor of global ``shape``, if it holds any."""
        local = self.placement.local_shape(shape, self.size)
        return local if self.expert is None else self.expert.local_shape(local, self.ep)

    @property
    def ranges(self) -> Ranges:
        """Its ranges of each sharded dim, in the padded global tensor."""
        found = {self.placement.dim: self.placement.slices(self.size, self.rank)} if self.placement.is_sharded else {}
        if self.expert is not None and self.expert.dim >= 0:
            first = self.expert.first(self.ep, self.ep_rank)
            found[self.expert.dim] = ((first, first + self.expert.num_experts // self.ep),)
        return found


class OfTensor(Protocol):
    """The sharding of a parameter: the plan's row, or a rank's LocalParameter."""

    @property
    def axis(self) -> str: ...

    @property
    def placement(self) -> Placement: ...

    @property
    def expert(self) -> ExpertPart | None: ...


def part_of(parameter: OfTensor, mesh: Mesh, place: Mapping[str, int]) -> Part:
    """The part of the rank at ``place`` (Mesh.place)."""
    axis = parameter.axis
    return Part(parameter.placement, mesh.size(axis), place[axis], parameter.expert, mesh.ep, place["ep"])


def pieces(ranges: Ranges) -> Iterator[tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]]]:
    """Each run of elements that lie together in both: its (start, stop) by dim in the full tensor, and in the part."""
    runs = [list(_placed(of_dim)) for of_dim in ranges.values()]
    for chosen in product(*runs):
        yield (
            {dim: whole for dim, (whole, _) in zip(ranges, chosen, strict=True)},
            {dim: local for dim, (_, local) in zip(ranges, chosen, strict=True)},
        )


def _placed(of_dim: tuple[tuple[int, int], ...]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    offset = 0
    for start, stop in of_dim:
        yield (start, stop), (offset, offset + stop - start)
        offset += stop - start
