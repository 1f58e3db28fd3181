"""Checks of all ranks together before any step: the same versions, captured graph and code; kernels that all have.

    before any group      versions, the hash of the plan, the captured graph, names, shapes and dtypes of tensors
    after lowering        of each stage, a hash of its ops on all ranks that run it, and of its code on replicas, which
                          differ in dp alone: numbers in it may name a place on the other axes (a stream of dropout)

The tables say which tensors are cut and exchanged, not which ops compute between: two versions of a library can give
equal tables and other code, and would then train together to the numbers of neither.

With ``attention: cudnn``, torch is asked on every rank whether cuDNN takes each attention over cp: ranks may have other
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
    """The texts that the ranks compare in the store, by name. Versions come first: other differences may follow from
    them.
    """
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
    """Raises PlanError on every rank, with the stage and the ranks, if a stage was lowered to different code.

    The same call on every rank. A program that the caller gave (``is_given``) is not compared.
    """
    own = {} if is_given else _code_of(plan, program, groups)
    found = all_gather_json(groups, own, lambda texts: {str(name): str(text) for name, text in texts.items()})
    for name in sorted({name for of_rank in found for name in of_rank}):
        told = {rank: of_rank[name] for rank, of_rank in enumerate(found) if name in of_rank}
        require_equal(f"{name} (by hash)", told, len(found))


def digest(*modules: nn.Module) -> str:
    """Of the code of graphs and of all graphs that they hold; which of its GPUs a rank has does not count."""
    graphs = (graph for module in modules for graph in _graphs(module))
    text = "\0".join(g.graph.python_code("self").src for g in graphs)  # a copy of a program was never compiled
    return _short(_DEVICE_INDEX.sub(r"device(type='\1')", text))


def _code_of(plan: Plan, program: RankProgram, groups: Groups) -> dict[str, str]:
    """Hashes, by a description of their content."""
    axes = [axis for axis in ("tp", "cp", "ep", "etp") if plan.mesh.size(axis) > 1]
    place = "".join(f", {axis} {groups.place[axis]}" for axis in axes)
    found: dict[str, str] = {}
    for stage in program.stages:
        nodes = (node for graph in _graphs(stage.module) for node in graph.graph.nodes)
        ops = "\n".join(f"{node.op} {kind_of(node)}" for node in nodes)
        found[f"the lowered ops of stage {stage.index}"] = _short(ops)
        found[f"the lowered code of stage {stage.index}{place}"] = digest(stage.module)
    if program.count_module is not None:
        found["the code of the loss denominators"] = digest(program.count_module)
    return found


def _graphs(module: nn.Module) -> Iterator[fx.GraphModule]:
    """All graphs, those of regions, pieces and recomputed blocks too: they are attributes, not submodules."""
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
    stages, mesh = decisions.mesh.stages_of(groups.place["pp"]), decisions.mesh
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
            for call in _calls(node, held, axis):
                if not cudnn_takes(call):
                    q, k, v, *_ = call
                    sizes = ", ".join(f"{name} {list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
                    yield str(where_of(node)), f"{sizes}, {str(q.dtype).removeprefix('torch.')} on {q.device.type}"


def _calls(node: fx.Node, held: Mapping[Any, Tensor], axis: AxisHandle) -> Iterator[AttentionCall]:
    """The operands of each part of the attention, as this rank has them."""
    q, k, v = (held[operand] for operand in node.args[:3])
    mask, is_causal = None, True
    if node.target is gathered_attention:
        k, v = (x.repeat(1, 1, axis.size, 1) for x in (k, v))
        mask, is_causal = held.get(node.args[3]), bool(node.kwargs.get("is_causal"))
    for part in (part for parts in parts_of(k.shape[2], axis, is_causal) for part in parts):
        yield part.of(AttentionCall(q, k, v, mask, is_causal, None))


def _local(node: fx.Node, wanted: Placement, tp: int, device: torch.device) -> Tensor:
    """In memory [b, s, h, d], as products make it."""
    value = node.meta["val"]
    shape = list(wanted.local_shape(tuple(value.shape), tp))
    if len(shape) == 4:
        return torch.zeros(shape[0], shape[2], shape[1], shape[3], dtype=value.dtype, device=device).transpose(1, 2)
    return torch.zeros(shape, dtype=value.dtype, device=device)
