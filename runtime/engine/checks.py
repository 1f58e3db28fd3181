"""Checks of all ranks together before any step: equal versions, captured graphs and code; kernels that all have.

    before any group      versions, hash of the plan, the captured graph, names, shapes and dtypes of tensors
    after lowering        a hash of each stage's ops on all ranks that run it, and of its code on replicas, which differ
                          only in dp: constants of the code may depend on the other axes (a stream of dropout)

The tables list which tensors are sharded and exchanged, not the ops between: two versions of a library can lead to
equal tables and different code, which would train together to results of neither.

With ``attention: cudnn``, each rank asks torch whether cuDNN supports each attention over cp: ranks may have different
GPUs or libraries, and a call that one of them cannot make is an error on all, with the source line.
"""

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from passes.base import RankProgram, kind_of
from passes.errors import PlanError
from passes.ops.axis import AxisHandle
from passes.ops.flash import CUDNN, AttentionCall, cudnn_takes
from passes.ops.gathered_attention import parts_of
from passes.program.ops.aten import is_random
from passes.program.ops.sequence import causal_attention, gathered_attention
from passes.program.source_lines import where_of
from passes.types.types import Placement
from planner.decisions import Decisions
from planner.frozen_plan import Plan
from runtime.distributed.agreement import all_gather_json
from runtime.distributed.groups import Groups
from runtime.distributed.meeting import require_equal
from runtime.environment import PACKAGE, installed_version
from runtime.weights.initial_weights import held_tensors

_DEVICE_INDEX = re.compile(r"device\(type='(\w+)', index=\d+\)")  # of this rank's own GPU


def identity(plan: Plan) -> dict[str, str]:
    """Return the texts that ranks compare in the store, by name; first versions, which may cause other differences."""
    return {
        "the version of Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "the version of torch": torch.__version__,
        "the version of transformers": installed_version("transformers"),
        "the version of meshwright": installed_version(PACKAGE),
        "the plan (by hash)": plan.hash()[:16],
        "the captured graph (by hash)": digest(plan.to_run()[0].program.graph),
        "parameters and buffers of the model (names, shapes, dtypes)": _short(repr(held_tensors(plan))),
    }


def require_same_code(plan: Plan, program: RankProgram, groups: Groups, *, is_given: bool) -> None:
    """Raise PlanError on every rank, with the stage and the ranks, if a stage was lowered to different code.

    All ranks must call it. A program from the caller (``is_given``) is not compared.
    """
    own = {} if is_given else _code_of(plan, program, groups)
    hashes = all_gather_json(groups, own, lambda texts: {str(name): str(text) for name, text in texts.items()})
    for name in sorted({name for of_rank in hashes for name in of_rank}):
        values = {rank: of_rank[name] for rank, of_rank in enumerate(hashes) if name in of_rank}
        require_equal(f"{name} (by hash)", values, len(hashes))


def digest(*modules: nn.Module) -> str:
    """Return a hash of the code of graphs and of all graphs in them, without the index of the rank's GPU."""
    graphs = (graph for module in modules for graph in _graphs(module))
    text = "\0".join(g.graph.python_code("self").src for g in graphs)  # a copy of a program was never compiled
    return _short(_DEVICE_INDEX.sub(r"device(type='\1')", text))


def _code_of(plan: Plan, program: RankProgram, groups: Groups) -> dict[str, str]:
    """Return hashes by a description of their content."""
    axes = [axis for axis in ("tp", "cp", "ep", "etp") if plan.mesh.size(axis) > 1]
    place = "".join(f", {axis} {groups.place[axis]}" for axis in axes)
    hashes: dict[str, str] = {}
    for stage in program.stages:
        nodes = (node for graph in _graphs(stage.module) for node in graph.graph.nodes)
        ops = "\n".join(f"{node.op} {kind_of(node)}" for node in nodes)
        hashes[f"the lowered ops of stage {stage.index}"] = _short(ops)
        hashes[f"the lowered code of stage {stage.index}{place}"] = digest(stage.module)
    if program.count_module is not None:
        hashes["the code of the loss denominators"] = digest(program.count_module)
    return hashes


def _graphs(module: nn.Module) -> Iterator[fx.GraphModule]:
    """Yield all graphs, also those of regions, pieces and recomputed blocks, which are attributes, not submodules."""
    for inner in module.modules():
        if isinstance(inner, fx.GraphModule):
            yield inner
            for handle in dict.fromkeys(n.target for n in inner.graph.nodes if n.op == "get_attr"):
                held = getattr(getattr(inner, str(handle), None), "module", None)
                if isinstance(held, fx.GraphModule):
                    yield from _graphs(held)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_attention(plan: Plan, groups: Groups) -> None:
    """Raise PlanError on every rank for an attention that cuDNN does not support on one. All ranks must call it."""
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
    """Yield the source line and the operands of this rank's calls that cuDNN does not support."""
    stages, mesh = decisions.mesh.stages_of(groups.place["pp"]), decisions.mesh
    axis = AxisHandle("cp", mesh.cp, groups.place["cp"])
    for node in decisions.program.graph.graph.nodes:
        if node.target not in (causal_attention, gathered_attention) or is_random(node):
            continue  # with dropout it is computed by chunks with masks
        runs = any(decisions.stages.runs_on(node.name, stage) for stage in stages)
        if runs and node.name not in decisions.lowering.documents.attentions:
            operands = {
                n: _local(n, decisions.placements.wanted(node, at), mesh.tp, groups.device)
                for at, n in enumerate(node.all_input_nodes)
            }
            for call in _calls(node, operands, axis):
                if not cudnn_takes(call):
                    q, k, v, *_ = call
                    sizes = ", ".join(f"{name} {list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
                    yield str(where_of(node)), f"{sizes}, {str(q.dtype).removeprefix('torch.')} on {q.device.type}"


def _calls(node: fx.Node, operands: Mapping[Any, Tensor], axis: AxisHandle) -> Iterator[AttentionCall]:
    """Yield the call of each part of the attention on this rank."""
    q, k, v = (operands[operand] for operand in node.args[:3])
    mask, is_causal = None, True
    if node.target is gathered_attention:
        k, v = (x.repeat(1, 1, axis.size, 1) for x in (k, v))
        mask, is_causal = operands.get(node.args[3]), bool(node.kwargs.get("is_causal"))
    for part in (part for parts in parts_of(k.shape[2], axis, is_causal) for part in parts):
        yield part.of(AttentionCall(q, k, v, mask, is_causal, None))


def _local(node: fx.Node, wanted: Placement, tp: int, device: torch.device) -> Tensor:
    """Return zeros with the local shape; [b, h, s, d] lies in memory as [b, s, h, d], as products make it."""
    value = node.meta["val"]
    shape = list(wanted.local_shape(tuple(value.shape), tp))
    if len(shape) == 4:
        return torch.zeros(shape[0], shape[2], shape[1], shape[3], dtype=value.dtype, device=device).transpose(1, 2)
    return torch.zeros(shape, dtype=value.dtype, device=device)
