"""The errors of sharding the sequence, with the op and its line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from passes.errors import PlanError
from passes.program.ops.aten import shape_of
from passes.program.source_lines import where_of

WITHOUT = "set mesh.cp: 1"


class Undivided(PlanError):
    """A sequence that 2·cp does not divide. ``cp``: 0 of an error that was copied without it."""

    cp = 0

    def fix_for(self, lengths: Sequence[int]) -> str:
        """The fix for all ``lengths`` of a spec; that of the one sequence if there are none."""
        if not (self.cp and lengths):
            return self.fix
        return f"choose cp from {_set(valid_cp(lengths, self.cp))}, or lengths that {2 * self.cp} divides"


def not_divisible(node: fx.Node, size: int, cp: int) -> PlanError:
    chunks = 2 * cp
    below = size // chunks * chunks
    nearest = " or ".join(str(n) for n in (below, below + chunks) if n)
    error = Undivided(
        f"cp = {cp}: a sequence of {size} tokens is not divisible by 2·cp = {chunks}",
        where=where_of(node),
        fix=f"use sequences of {nearest} tokens, or choose cp from {_set(valid_cp([size], cp))}",
    )
    error.cp = cp
    return error


def valid_cp(sizes: Sequence[int], cp: int) -> list[int]:
    """1, and the sizes nearest to ``cp`` over which sequences of all ``sizes`` can be cut."""
    found = [n for n in range(2, min(min(sizes) // 2, 4 * cp) + 1) if all(size % (2 * n) == 0 for size in sizes)]
    return [1, *sorted(sorted(found, key=lambda n: abs(n - cp))[:3])]


def _set(sizes: Iterable[int]) -> str:
    return f"{{{', '.join(map(str, sizes))}}}"


def reads_whole(node: fx.Node, value: fx.Node) -> PlanError:
    return PlanError(
        f"cp: {op(node)} reads the whole sequence, {list(shape_of(value))}, and its result is no smaller",
        where=where_of(node),
        fix=f"{WITHOUT}, or write it without dependence between tokens",
    )


def no_typing(node: fx.Node) -> PlanError:
    return PlanError(
        f"cp: {op(node)} cannot run on a shard of the sequence or on partial sums",
        where=where_of(node),
        fix=WITHOUT,
    )


def no_sequence(cp: int) -> PlanError:
    return PlanError(
        f"cp = {cp}: the model has no sequence to shard",
        where="mesh.cp",
        fix=f"{WITHOUT}; a sequence is the dim after the batch, of ids [b, s] or of floats [b, s, features], "
        "or the rows of the first product with a weight, as patches of an image are",
    )


def op(node: fx.Node) -> str:
    """``aten.cumsum``."""
    return str(getattr(node.target, "name", lambda: node.target)()).replace("::", ".").removesuffix(".default")
