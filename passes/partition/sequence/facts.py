"""The facts of a sharding over cp: the types while they are decided; later the number of ranks, and the sequences. And
its errors, with the op and its line.

Zigzag: of 2·cp equal chunks rank r holds r and 2cp−1−r, in that order. The tokens of chunk c see c chunks before them
and the half of their own: causal attention is 2cp−1 chunks and two halves on every rank.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from passes.errors import PlanError
from passes.partition.typings.base import Option
from passes.program.ops.aten import shape_of
from passes.program.source_lines import where_of
from passes.types.types import Placement, R

WITHOUT = "set mesh.cp: 1"


@dataclass(frozen=True, slots=True)
class Context:
    """``lengths``: tokens of each sequence that is cut, of all ranks."""

    cp: int = 1
    lengths: tuple[int, ...] = ()


Range = tuple[int, int]


def chunks(cp: int, rank: int) -> Range:
    """Return the two chunks of a rank, first to last."""
    return rank, 2 * cp - 1 - rank


def owner(cp: int, chunk: int) -> tuple[int, int]:
    """Return (rank, 0 or 1): the holder of a chunk, and whether it is the first or second of its two."""
    return (chunk, 0) if chunk < cp else (2 * cp - 1 - chunk, 1)


def rows(size: int, cp: int, rank: int) -> tuple[Range, Range]:
    """Return [start, end) of each of the two chunks that a rank holds of ``size`` tokens, a multiple of 2·cp."""
    assert size % (2 * cp) == 0, f"{size} tokens are no {2 * cp} equal chunks"
    length = size // (2 * cp)
    first, second = (c * length for c in chunks(cp, rank))
    return (first, first + length), (second, second + length)


@dataclass
class Types:
    """``natives``: the type of each value with a sharded input, V or P. ``options``: how each of these, and of the
    replicated values made of them, reads its operands. ``lengths``: sizes of the sharded sequences. ``chunks``: equal
    ones in which a sequence is cut: 2 for each rank of cp. ``recut``: values that every rank computes of all tokens, to
    take its own. ``whole``: those as large as a sequence that cannot be cut, with the dim of its tokens.
    ``cuts_again``: whether there may be such values. ``begun``: products at which a sequence begins that no input has.
    ``undivided``: ops on a sequence that has no equal chunks, and its size. ``not_begun``: the error of
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


class Undivided(PlanError):
    """A sequence that 2·cp does not divide. ``cp``: 0 of an error that was copied without it."""

    cp = 0

    def fix_for(self, lengths: Sequence[int]) -> str:
        """Return the fix for all ``lengths`` of a spec; that of the one sequence if there are none."""
        if not (self.cp and lengths):
            return self.fix
        return f"choose cp from {_set(valid_cp(lengths, self.cp))}, or lengths that {2 * self.cp} divides"


def not_divisible(node: fx.Node, size: int, cp: int) -> PlanError:
    chunks = 2 * cp
    below = size // chunks * chunks
    nearest = " or ".join(str(n) for n in (below, below + chunks) if n)
    fix = f"use sequences of {nearest} tokens, or choose cp from {_set(valid_cp([size], cp))}"
    what = f"cp = {cp}: a sequence of {size} tokens is not divisible by 2·cp = {chunks}"
    error = Undivided(what, where=where_of(node), fix=fix)
    error.cp = cp
    return error


def valid_cp(sizes: Sequence[int], cp: int) -> list[int]:
    """Return 1, and the sizes nearest to ``cp`` over which sequences of all ``sizes`` can be cut."""
    found = [n for n in range(2, min(min(sizes) // 2, 4 * cp) + 1) if all(size % (2 * n) == 0 for size in sizes)]
    return [1, *sorted(sorted(found, key=lambda n: abs(n - cp))[:3])]


def _set(sizes: Iterable[int]) -> str:
    return f"{{{', '.join(map(str, sizes))}}}"


def reads_whole(node: fx.Node, value: fx.Node) -> PlanError:
    what = f"cp: {op(node)} reads the whole sequence, {list(shape_of(value))}, and its result is no smaller"
    return PlanError(what, where=where_of(node), fix=f"{WITHOUT}, or write it without dependence between tokens")


def no_typing(node: fx.Node) -> PlanError:
    what = f"cp: {op(node)} cannot run on a shard of the sequence or on partial sums"
    return PlanError(what, where=where_of(node), fix=WITHOUT)


def no_sequence(cp: int) -> PlanError:
    return PlanError(
        f"cp = {cp}: the model has no sequence to shard",
        where="mesh.cp",
        fix=f"{WITHOUT}; a sequence is the dim after the batch, of ids [b, s] or of floats [b, s, features], "
        "or the rows of the first product with a weight, as patches of an image are",
    )


def op(node: fx.Node) -> str:
    """Return the name of an op, as ``aten.cumsum``."""
    return str(getattr(node.target, "name", lambda: node.target)()).replace("::", ".").removesuffix(".default")
