"""A tp over which nothing at all is cut is an error: every rank would compute the same."""

from __future__ import annotations

from collections.abc import Iterator

from passes.blocks.blocks import Blocks
from passes.errors import PlanError
from passes.partition.placements import Placements
from passes.program.program import Program
from planner.placement.attention.sites import AttentionSite
from planner.placement.decide import decide_placements
from planner.placement.divisibility import divisors

_TRIES = 3  # sizes tried on each side; each costs a decision of its own


def check_something_is_cut(
    program: Program, blocks: Blocks, placements: Placements, sites: tuple[AttentionSite, ...], vocabulary_multiple: int
) -> None:
    """Raise PlanError if tp > 1 and shards nothing, unless overrides replicate every matrix."""
    tp = placements.tp
    if tp == 1 or any(option.out.is_sharded for option in placements.options.values()):
        return
    matrices = _matrices(program)
    if placements.styles and all(placements.styles.get(name) == "replicate" for name in matrices):
        return
    if not matrices:
        raise PlanError(f"tp = {tp} shards nothing: the model has no matrix", where="mesh.tp", fix="set mesh.tp: 1")
    sizes = [n for n in _sizes(matrices) if not sites or any(site.divides(n) for site in sites)]
    found = list(_that_cut(program, blocks, tp, sizes, vocabulary_multiple))
    choice = f"choose tp from {{{', '.join(map(str, [1, *sorted(found)]))}}}" if found else "set mesh.tp: 1"
    raise PlanError(
        f"tp = {tp} shards nothing: no layer gains from sharding over {tp} ranks",
        where="mesh.tp",
        fix=choice,
    )


def _matrices(program: Program) -> dict[str, tuple[int, ...]]:
    """Shapes of the matrices that reach the loss, by placeholder."""
    nodes = [program.node(name) for name in program.parameters]
    return {n.name: tuple(n.meta["val"].shape) for n in nodes if n.users and n.meta["val"].dim() > 1}


def _sizes(matrices: dict[str, tuple[int, ...]]) -> list[int]:
    """Every number that divides some size of some matrix, in rising order."""
    return sorted({d for shape in matrices.values() for size in shape for d in divisors(int(size)) if d > 1})


def _that_cut(program: Program, blocks: Blocks, tp: int, sizes: list[int], vocabulary_multiple: int) -> Iterator[int]:
    """The nearest tp below and above that do cut something: tried, not guessed."""
    for side in ([n for n in reversed(sizes) if n < tp], [n for n in sizes if n > tp]):
        for size in side[:_TRIES]:
            tried = decide_placements(program, blocks, size, vocabulary_multiple=vocabulary_multiple)
            if any(option.out.is_sharded for option in tried.options.values()):
                yield size
                break
