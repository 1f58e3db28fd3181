"""Collectives of the forward of one position, and bytes of the kept rows before it, read off a run without values.

They are no part of a plan, which lists those of training: only ``Engine.generate`` runs them, for each position once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from passes.add_next_rows import WANTED
from passes.blocks.places import Places
from passes.keep_rows import KEPT
from passes.ops.kept_rows import KeptRows
from passes.ops.next_rows import Wanted
from passes.stage_module import RankProgram, StageModule
from passes.types.collectives import CollectivePlan
from planner.decisions import Decisions
from planner.frozen_plan import Plan
from planner.lower import lower, lower_kept_rows


def one_position_rows(plan: Plan) -> tuple[CollectivePlan, ...]:
    """One row for each message of a microbatch, on the ranks that are first on every axis but pp.

    Raises PlanError, with the op and its line, if one position needs more than kept rows.
    """
    return tuple(row for _, rows in _one_position(plan) for row in rows)


def kept_bytes(plan: Plan) -> tuple[int, ...]:
    """Bytes of keys and values that a rank of each pp rank keeps while ``Engine.generate`` runs. Raises PlanError, with
    the op and its line, if they cannot be kept.
    """
    return tuple(kept.num_bytes * plan.schedule.num_microbatches for kept, _ in _one_position(plan))


def _one_position(plan: Plan) -> Iterator[tuple[KeptRows, list[CollectivePlan]]]:
    """Of each pp rank the buffers of a microbatch, and the messages of a position."""
    decisions, _ = plan.to_run()
    for pp in range(plan.mesh.pp):
        rank = plan.mesh.rank_of(pp=pp)
        program = lower(plan, rank, "meta")
        keeping, alone, _ = lower_kept_rows(plan, rank, program, "meta")
        program.random.training = False  # no dropout: nothing is drawn
        kept, found = KeptRows(program.random), list[CollectivePlan]()
        for whole, one in zip(keeping, alone, strict=True):
            for stage in (whole, one):
                setattr(stage.module, KEPT, kept)
            messages = [_Messages(stage, program, decisions) for stage in (whole, one)]
            messages[0].run(*_inputs(whole, decisions))
            messages[1].run(*_inputs(one, decisions))
            found += messages[1].found
        yield kept, found


def _inputs(stage: StageModule, decisions: Decisions) -> list[torch.Tensor]:
    """Tensors without values, as a microbatch has them."""
    program, made = decisions.program, []
    if hasattr(stage.module, WANTED):
        wanted: Wanted = getattr(stage.module, WANTED)
        (labels,) = (n for n, key in program.inputs.items() if key == decisions.scored.key)
        wanted.places = torch.empty(1, len(program.node(labels).meta["val"]), dtype=torch.int64, device="meta")
    for border in stage.receives:
        made.append(torch.empty(border.shape, dtype=getattr(torch, border.dtype), device="meta"))
    of_keys = {key: program.node(name).meta["val"] for name, key in program.inputs.items()}
    made += [torch.empty_like(of_keys[key], device="meta") for key in stage.inputs]
    return made + [torch.empty((), dtype=torch.float64, device="meta") for _ in stage.denominators]


class _Messages(fx.Interpreter):
    """Runs a stage op by op; ``found``: the messages of each, as its axes count them."""

    def __init__(self, stage: StageModule, program: RankProgram, decisions: Decisions) -> None:
        super().__init__(stage.module)
        self.found: list[CollectivePlan] = []
        self._stage, self._axes, self._decisions = stage.index, list(program.axes.values()), decisions

    def run_node(self, n: fx.Node) -> Any:
        before = [(axis, dict(axis.counts), dict(axis.bytes)) for axis in self._axes]
        result = super().run_node(n)
        for axis, counts, sizes in before:
            for key, count in axis.counts.items():
                times = count - counts.get(key, 0)
                if times:
                    self._add(n, axis.name, key, times, axis.bytes[key] - sizes.get(key, 0))
        return result

    def _add(self, node: fx.Node, axis: str, key: Sequence[str], times: int, size: int) -> None:
        origin = self._decisions.program.node(node.meta["origin"])
        where = Places(self._decisions.blocks).text(origin)
        row = CollectivePlan(key[0], axis, key[1], where, size // times, times, "microbatch", self._stage)
        self.found.append(row)
