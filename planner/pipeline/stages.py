"""Divide the blocks of a model into pipeline stages, so that the slowest stage is as fast as possible.

    minimise over contiguous ranges of blocks   max over stages of  Σ cost(block and the ops that run with it)

    cost: FLOPs of the forward, three times as many for ops with a backward

Ops outside of blocks run with the earliest block that their inputs allow: the embedding with the first block, an
encoder's last norm with the encoder's last block, the head and the loss with the last block. With few layers and a
large vocabulary, the last stage gets fewer layers; it gets none if that makes the slowest stage 5 % faster. A layout
(``planner.pipeline.layout``) may give the embedding, or the ops after the last block, a stage of their own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from torch import fx

from passes.blocks.blocks import Blocks
from passes.blocks.live_sets import (
    before_and_after_blocks,
    live_values,
    needed_anchors,
    recomputed_nodes,
    stages_of_copies,
)
from passes.errors import PlanError
from passes.program.program import Program, StageAssignment
from passes.rules.flops import node_cost
from planner.mesh import Mesh
from planner.pipeline.layout import Layout, complaint, layout_of, layout_of_sizes

WORTH_IT = 0.95  # a last stage without blocks must make the slowest stage 5 % faster: other stages hold more in flight


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """The cost of each block, with the calls that are anchored to it. ``after``: the part of the last block's cost
    that belongs to calls after the block, which may have their own stage; 0 if they may not.
    """

    of_blocks: tuple[int, ...]
    after: int = 0

    def of_copies(self, source: Sequence[int]) -> BlockCosts:
        """Return the costs of a deeper model, in which block i is a copy of block ``source[i]`` of this one."""
        return replace(self, of_blocks=tuple(self.of_blocks[block] for block in source))


def assign_stages(
    program: Program,
    blocks: Blocks,
    mesh: Mesh,
    split: Any = "auto",
    sizes: Sequence[int] = (),
) -> StageAssignment:
    """Assign the calls of ``program`` to the stages of ``mesh``. ``split``: "auto" or a notation of
    ``planner.pipeline.layout``; ``sizes``: blocks of each stage, if "auto" is already decided. Raises PlanError for a
    split that does not fit the model.
    """
    num_blocks = len(blocks.instances)
    recomputed, block_of = recomputed_nodes(program), blocks.block_of()
    anchor = needed_anchors(program, block_of, recomputed)
    if split == "auto" or not num_blocks:
        _check_enough_blocks(num_blocks, mesh.pp, mesh.vpp)
    before, after = before_and_after_blocks(anchor, block_of, max(num_blocks, 1) - 1)
    if split == "auto":
        if len(sizes) > 1 and sum(sizes) != num_blocks:
            what = f"{num_blocks} blocks repeat at this length, and {sum(sizes)} at the longest one"
            raise PlanError(what, where="inputs", fix="use one length, or set mesh.pp: 1")
        kept = sizes if sum(sizes) == num_blocks else ()  # one stage has all blocks, however many a length has
        layout = layout_of_sizes(kept or balanced_sizes(_costs(program, anchor, after, num_blocks), mesh.pp, mesh.vpp))
    else:
        layout = layout_of(split, mesh.pp, mesh.vpp, num_blocks, mesh.fold)
    stage = _stage_of_calls(anchor, layout, before, after)
    _check_ends(program, stage, layout)
    return _assignment(program, stage, recomputed, layout)


def balanced_sizes(costs: BlockCosts, pp: int, vpp: int = 1) -> list[int]:
    """Return the number of blocks of each stage, with the slowest stage as fast as possible. The last stage has 0
    blocks if the calls after the last block fill it.
    """
    of_blocks, num_stages = costs.of_blocks, pp * vpp
    if not of_blocks:
        return [0]
    sizes = balance(of_blocks, num_stages)
    if num_stages < 2 or vpp > 1 or not costs.after:
        return sizes
    without = (*of_blocks[:-1], of_blocks[-1] - costs.after)
    alone = [*balance(without, num_stages - 1), 0]
    is_worth_it = max(costs.after, _slowest(without, alone)) < WORTH_IT * _slowest(of_blocks, sizes)
    return alone if is_worth_it else sizes


def _slowest(of_blocks: Sequence[int], sizes: Sequence[int]) -> int:
    return max(sum(of_blocks[end - size : end]) for size, end in zip(sizes, accumulate(sizes), strict=True))


def block_costs(program: Program, blocks: Blocks) -> BlockCosts:
    """Return the costs that ``balanced_sizes`` balances."""
    num_blocks, block_of = len(blocks.instances), blocks.block_of()
    anchor = needed_anchors(program, block_of, recomputed_nodes(program))
    _, after = before_and_after_blocks(anchor, block_of, max(num_blocks, 1) - 1)
    return _costs(program, anchor, after, num_blocks)


def _costs(program: Program, anchor: dict[fx.Node, int], after: set[fx.Node], num_blocks: int) -> BlockCosts:
    of_blocks = [0] * num_blocks
    for node, block in anchor.items() if num_blocks else ():
        of_blocks[block] += _work(node)
    ends_with_loss = program.node(program.loss) in after
    return BlockCosts(tuple(of_blocks), sum(map(_work, after)) if ends_with_loss else 0)


def _work(node: fx.Node) -> int:
    """Return the cost of a call's forward and backward; of its forward alone if it has no gradient."""
    return node_cost(node) * (3 if node.meta["grad"] else 1)


def _stage_of_calls(
    anchor: dict[fx.Node, int], layout: Layout, before: set[fx.Node], after: set[fx.Node]
) -> dict[fx.Node, int]:
    """Return each call's stage: that of the block it is anchored to, or of E and L before and after all blocks."""
    stage_of_block = [s for s, size in enumerate(layout.sizes) for _ in range(size)] or [0]
    stage = {node: stage_of_block[block] for node, block in anchor.items()}
    stage.update(dict.fromkeys(sorted(before), layout.stage_of("E")))
    stage.update(dict.fromkeys(sorted(after), layout.stage_of("L")))
    return stage


def _check_ends(program: Program, stage: dict[fx.Node, int], layout: Layout) -> None:
    """Raise PlanError if E or L has a stage of its own, but the model computes nothing there."""
    ends = {"E": "before its first block", "L": "after its last block"}
    for letter, place in ends.items():
        home = layout.stage_of(letter)
        alone = not layout.sizes[home]
        if alone and (home not in stage.values() or (letter == "L" and stage[program.node(program.loss)] != home)):
            at = next(mark.at for mark in layout.stages[home] if mark.letter == letter)
            what = f"pipeline.split: a stage has only {letter}, but the model computes nothing {place}"
            raise complaint(layout.text, at, what, "give that stage a block (t)")


def _assignment(
    program: Program, stage: dict[fx.Node, int], recomputed: set[fx.Node], layout: Layout
) -> StageAssignment:
    num_stages = len(layout.stages)
    copies = stages_of_copies(program, stage)
    stage_of = {node.name: s for node, s in stage.items()}
    stage_of |= {node.name: stages[0] for node, stages in copies.items() if node in recomputed and stages}
    return StageAssignment(
        num_stages=num_stages,
        stage_of=stage_of,
        recomputed=frozenset(n.name for n in recomputed if copies[n]),
        copies={n.name: stages for n, stages in copies.items() if n in recomputed and stages},
        live=live_values(stage, num_stages),
        parameter_stages={n.name: copies[n] for n in program.graph.graph.nodes if n.op == "placeholder"},
        blocks_of_stage=tuple(map(tuple, layout.blocks)),
        cost_of_stage=tuple(sum(node_cost(n) for n, s in stage.items() if s == k) for k in range(num_stages)),
    )


def _check_enough_blocks(num_blocks: int, pp: int, vpp: int) -> None:
    if pp * vpp > max(num_blocks, 1):
        stages = f"pp {pp} · vpp {vpp} = {pp * vpp} stages" if vpp > 1 else f"pp {pp} stages"
        fix = f"choose pp · vpp ≤ {num_blocks}" if num_blocks > 1 else "choose pp 1: the model has no blocks to divide"
        raise PlanError(f"pipeline: {stages}, but the model has only {num_blocks} blocks", where="mesh.pp", fix=fix)


def balance(costs: Sequence[int], num_stages: int) -> list[int]:
    """Return the sizes of ``num_stages`` non-empty contiguous ranges of ``costs`` with the least possible largest sum.

    Ties go to the most even sizes (least sum of squares), then to the fewest blocks in the first stages, which hold
    the most microbatches in flight.
    """
    assert 1 <= num_stages <= len(costs), "more stages than blocks"
    total = [0, *accumulate(costs)]
    return _most_even(total, num_stages, _least_maximum(total, num_stages))


def _least_maximum(total: list[int], num_stages: int) -> int:
    """best(k, i) = min over j of max(best(k - 1, j), cost of j to i); best grows with j and the cost falls."""
    num_blocks = len(total) - 1
    best = total[1:]  # best[i - 1] for the first i blocks in one stage
    for k in range(2, num_stages + 1):
        row = [0] * num_blocks
        for i in range(k, num_blocks + 1):
            splits = range(k - 1, i)
            cross = bisect_left(splits, 0, key=lambda j, i=i, best=best: best[j - 1] - (total[i] - total[j]))
            near = [splits[c] for c in (cross - 1, cross) if 0 <= c < len(splits)]
            row[i - 1] = min(max(best[j - 1], total[i] - total[j]) for j in near)
        best = row
    return best[-1]


def _most_even(total: list[int], num_stages: int, limit: int) -> list[int]:
    """Return the sizes with the least sum of squared costs, if no stage costs more than ``limit``."""
    num_blocks = len(total) - 1
    # after[i] = (sum of squares, sizes) of the blocks from i on in the k stages still to fill
    after: list[tuple[int, tuple[int, ...]] | None] = [None] * num_blocks + [(0, ())]
    for _ in range(num_stages):
        row: list[tuple[int, tuple[int, ...]] | None] = [None] * (num_blocks + 1)
        for i in range(num_blocks):
            options = []
            for j in range(i + 1, num_blocks + 1):
                cost = total[j] - total[i]
                if cost > limit:
                    break
                if (rest := after[j]) is not None:
                    options.append((rest[0] + cost * cost, (j - i, *rest[1])))
            row[i] = min(options, default=None)
        after = row
    assert after[0] is not None
    return list(after[0][1])
