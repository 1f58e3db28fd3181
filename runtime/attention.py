"""Whether cuDNN takes each attention over cp, with ``attention: cudnn``: asked of torch on every rank, before any step.

Ranks may have other GPUs or libraries. A call that one of them cannot make is an error on all, with the source line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from passes.errors import PlanError
from passes.ops import cudnn
from passes.ops.axis import AxisHandle
from passes.ops.gathered_attention import CUDNN, parts_of
from passes.program.ops.aten import is_random
from passes.program.ops.sequence import causal_attention, gathered_attention
from passes.program.source_lines import where_of
from passes.types.types import Placement
from planner.decisions import Decisions
from planner.frozen_plan import Plan
from runtime.distributed.exchange_json import all_gather_json
from runtime.distributed.groups import Groups


def check_attention(plan: Plan, groups: Groups) -> None:
    """Raises PlanError, the same on every rank. The same call on every rank."""
    decided = [each.to_run()[0] for each in plan.of_all_lengths]
    if decided[0].lowering.options.attention != CUDNN:
        return
    here = {where: call for decisions in decided for where, call in _untaken(decisions, groups)}
    for rank, untaken in enumerate(all_gather_json(groups, here)):
        for where, call in untaken.items():
            what = f"cuDNN does not take this attention on rank {rank}: {call}"
            fix = "set attention: auto, or train in bfloat16 on GPUs for which cuDNN has attention"
            raise PlanError(what, where=where, fix=fix)


def _untaken(decisions: Decisions, groups: Groups) -> Iterator[tuple[str, str]]:
    """The source lines of this rank's calls that cuDNN does not take, with their operands."""
    stages, mesh = decisions.mesh.stages_of(groups.pp_rank), decisions.mesh
    axis = AxisHandle("cp", mesh.cp, groups.place["cp"])
    for node in decisions.program.graph.graph.nodes:
        if node.target not in (causal_attention, gathered_attention) or is_random(node):
            continue  # with dropout it is computed by chunks with masks
        runs = any(decisions.stages.runs_on(node.name, stage) for stage in stages)
        if runs and node.name not in decisions.lowering.documents.attentions:
            held = {
                n: _local(n, decisions.placements.wanted(node, at), mesh.tp, groups.device)
                for at, n in enumerate(node.all_input_nodes)
            }
            for q, k, v, mask, is_causal in _calls(node, held, axis):
                if not cudnn.takes(q, k, v, mask, is_causal):
                    sizes = ", ".join(f"{name} {list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
                    yield str(where_of(node)), f"{sizes}, {str(q.dtype).removeprefix('torch.')} on {q.device.type}"


def _calls(
    node: fx.Node, held: Mapping[Any, Tensor], axis: AxisHandle
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None, bool]]:
    """The operands of each part of the attention, as this rank has them."""
    q, k, v = (held[operand] for operand in node.args[:3])
    mask, is_causal = None, True
    if node.target is gathered_attention:
        k, v = (x.repeat(1, 1, axis.size, 1) for x in (k, v))
        mask, is_causal = held.get(node.args[3]), bool(node.kwargs.get("is_causal"))
    for part in (part for parts in parts_of(k.shape[2], axis, is_causal) for part in parts):
        yield part.of_rows(q), part.of_keys(k), part.of_keys(v), mask, part.is_causal


def _local(node: fx.Node, wanted: Placement, tp: int, device: torch.device) -> Tensor:
    """In memory [b, s, h, d], as products make it."""
    value = node.meta["val"]
    shape = list(wanted.local_shape(tuple(value.shape), tp))
    if len(shape) == 4:
        return torch.zeros(shape[0], shape[2], shape[1], shape[3], dtype=value.dtype, device=device).transpose(1, 2)
    return torch.zeros(shape, dtype=value.dtype, device=device)
