"""The facts of a sharding over cp: the types while they are decided; later the number of ranks, and the sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from passes.errors import PlanError
from passes.partition.options.base import Option
from passes.types.types import Placement, R


@dataclass(frozen=True, slots=True)
class Context:
    """``lengths``: tokens of each sequence that is cut, of all ranks."""

    cp: int = 1
    lengths: tuple[int, ...] = ()


@dataclass
class Types:
    """``natives``: the type of each value with a sharded input, V or P. ``options``: how each of these, and of the
    replicated values made of them, reads its operands. ``lengths``: sizes of the sharded sequences. ``chunks``: equal
    ones in which a sequence is cut: 2 for each rank of cp. ``recut``: values that every rank computes of all tokens, to
    take its own. ``whole``: those as large as a sequence that cannot be cut, with the dim of its tokens.
    ``cuts_again``: whether there may be such values. ``begun``: products at which a sequence begins that no input has.
    ``undivided``: ops at which a sequence begins that has no equal chunks, and its size. ``not_begun``: the error of
    the first op that reads all of an input's sequence.
    """

    cp: int
    chunks: int
    natives: dict[fx.Node, Placement] = field(default_factory=dict)
    options: dict[fx.Node, Option] = field(default_factory=dict)
    lengths: set[int] = field(default_factory=set)
    recut: set[fx.Node] = field(default_factory=set)
    whole: dict[fx.Node, int] = field(default_factory=dict)
    cuts_again: bool = True
    begun: list[fx.Node] = field(default_factory=list)
    undivided: list[tuple[fx.Node, int]] = field(default_factory=list)
    not_begun: PlanError | None = None

    def of(self, node: fx.Node) -> Placement:
        return self.natives.get(node, R)
