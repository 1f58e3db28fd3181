"""The spec's split of blocks into stages: every notation becomes one layout.

    [6, 6]                      blocks of each stage, in the order of the model
    [[3, 3], [2, 4]]            of each pp rank the blocks of each of its chunks
    Et*3|t*4|tL                 a layout: it places embedding and loss
    {first: 4, last: 5}         evenly, but so many on the first and on the last rank
    {embedding: true}           evenly, with the embedding (or the loss) as a block

Evenly means without a rest: blocks (with embedding and loss, if they count) divide by the ranks left, and those of
a rank by its chunks. `auto`, the default, asks for none of this and balances costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from passes.errors import PlanError
from planner.fold import LOOP, Fold, chunk_of, rank_of
from planner.pipeline.layout import KEY, Layout, complaint, layout_of_sizes, read_layout

AUTO = "auto"


def stage_problems(split: Any, pp: int, vpp: int) -> Iterator[PlanError]:
    """The errors of a ``split`` with too many or too few stages: known before the model is."""
    stages = f"mesh.pp · mesh.vpp = {pp} · {vpp} = {pp * vpp}"
    if isinstance(split, str) and split != AUTO:
        layout = read_layout(split)
        if len(layout.stages) != pp * vpp:
            at = layout.ends[min(len(layout.stages), pp * vpp) - 1]
            fix = f"write {pp * vpp - 1} `|`: each one ends a stage"
            yield complaint(split, at, f"{KEY} has {len(layout.stages)} stages, {stages}", fix)
    elif _is_rows(split):
        if len(split) != pp or any(not isinstance(row, Sequence) or len(row) != vpp for row in split):
            what = f"{KEY} {_plain(split)} is not a list of {pp} lists (ranks) of {vpp} numbers (chunks)"
            yield PlanError(what, where=KEY, fix=f"give {pp} lists of {vpp} numbers of blocks each, or write auto")
    elif isinstance(split, Sequence) and split != AUTO and len(split) != pp * vpp:
        fix = f"list {pp * vpp} numbers of blocks, or write auto"
        yield PlanError(f"{KEY} has {len(split)} stages, {stages}", where=KEY, fix=fix)


def layout_of(split: Any, pp: int, vpp: int, num_blocks: int, fold: Fold = LOOP) -> Layout:
    """The layout that ``split`` (not auto) says for a model. Raises PlanError if it does not fit."""
    for problem in stage_problems(split, pp, vpp) if isinstance(split, str) or _is_rows(split) else ():
        raise problem
    if isinstance(split, str):
        layout = read_layout(split)
        layout.check_num_blocks(num_blocks)
        return layout
    if isinstance(split, Sequence):
        sizes = by_stage(split, fold) if _is_rows(split) else list(split)
        _check_sizes(split, sizes, pp * vpp, num_blocks)
        return layout_of_sizes(sizes)
    return layout_of_sizes(by_stage(even_split(num_blocks, pp, vpp, fold, **dict(split)), fold))


def may_be_alone(split: Any) -> bool:
    """Whether the embedding, or the loss, may have a stage without blocks."""
    if isinstance(split, str):
        return split == AUTO or not all(read_layout(split).sizes)
    return not isinstance(split, Sequence) and any(dict(split).get(end) for end in ("embedding", "loss"))


def by_stage(sizes_of_ranks: Sequence[Sequence[int]], fold: Fold = LOOP) -> list[int]:
    """Sizes of each chunk of each rank, as sizes of each stage."""
    pp, num_stages = len(sizes_of_ranks), sum(map(len, sizes_of_ranks))
    return [sizes_of_ranks[rank_of(s, pp, fold)][chunk_of(s, pp, fold)] for s in range(num_stages)]


def even_split(
    num_blocks: int,
    pp: int,
    vpp: int = 1,
    fold: Fold = LOOP,
    *,
    first: int | None = None,
    last: int | None = None,
    embedding: bool = False,
    loss: bool = False,
) -> list[list[int]]:
    """Of each pp rank, the blocks of each of its chunks. Raises PlanError if something would be left over."""
    if embedding or loss:
        if first is not None or last is not None:
            raise _problem("embedding and loss count as blocks only if first and last are not given", "keep one")
        return _with_ends(num_blocks, pp, vpp, fold, embedding, loss)
    fixed = [n for n in (first, last) if n is not None]
    ranks, blocks = pp - len(fixed), num_blocks - sum(fixed)
    between = f"{blocks} blocks of {num_blocks}" if fixed else f"{num_blocks} blocks"
    if ranks < 0 or blocks < 0 or (blocks % ranks if ranks else blocks):
        what = f"{between} are left for {ranks} ranks" if fixed else f"{between} do not divide by {pp} pipeline ranks"
        raise _problem(what, "write auto, or a layout with the number of blocks of each stage")
    sizes = [blocks // ranks if ranks else 0] * pp
    if first is not None:
        sizes[0] = first
    if last is not None:
        sizes[-1] = last
    return [_in_chunks(size, rank, vpp) for rank, size in enumerate(sizes)]


def _with_ends(num_blocks: int, pp: int, vpp: int, fold: Fold, embedding: bool, loss: bool) -> list[list[int]]:
    """Evenly, with the embedding on the first stage and the loss on the last, each instead of a block."""
    total = num_blocks + embedding + loss
    if total % pp:
        counted = " + ".join([f"{num_blocks} blocks", *["embedding"] * embedding, *["loss"] * loss])
        raise _problem(f"{counted} = {total} do not divide by {pp} pipeline ranks", "write auto, or a layout")
    sizes = [_in_chunks(total // pp, rank, vpp) for rank in range(pp)]
    sizes[0][0] -= embedding
    sizes[rank_of(pp * vpp - 1, pp, fold)][-1] -= loss
    return sizes


def _in_chunks(size: int, rank: int, vpp: int) -> list[int]:
    if size % vpp:
        raise _problem(
            f"the {size} blocks of rank {rank} do not divide by {vpp} chunks", "change vpp, or write a layout"
        )
    return [size // vpp] * vpp


def _check_sizes(split: Sequence[Any], sizes: list[int], num_stages: int, num_blocks: int) -> None:
    given = f"{KEY} {_plain(split)}"
    fix = f"give {num_stages} positive numbers of blocks that add up to {num_blocks}, or `auto`"
    if len(sizes) != num_stages:
        raise PlanError(f"{given} has {len(sizes)} entries for {num_stages} stages", where=KEY, fix=fix)
    if any(not isinstance(n, int) or n < 1 for n in sizes):
        fix = f"{fix}, or a layout that gives the embedding or the loss a stage of its own: E|t*{num_blocks}L"
        raise PlanError(f"{given} leaves a stage without blocks", where=KEY, fix=fix)
    if sum(sizes) != num_blocks:
        raise PlanError(f"{given} adds up to {sum(sizes)}, but the model has {num_blocks} blocks", where=KEY, fix=fix)


def _is_rows(split: Any) -> bool:
    return not isinstance(split, str) and isinstance(split, Sequence) and any(isinstance(n, Sequence) for n in split)


def _plain(split: Sequence[Any]) -> list[Any]:
    return [list(n) if isinstance(n, Sequence) else n for n in split]


def _problem(what: str, fix: str) -> PlanError:
    return PlanError(f"{KEY}: {what}", where=KEY, fix=fix)
