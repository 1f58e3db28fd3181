"""Values that must be equal on all ranks besides the plan: versions, the captured graph, and the code of each stage.

    before any group      versions, the hash of the plan, the captured graph, names, shapes and dtypes of tensors
    after lowering        of each stage, a hash of its ops on all ranks that run it, and of its code on replicas, which
                          differ in dp alone: numbers in it may name a place on the other axes (a stream of dropout)

The tables say which tensors are cut and exchanged, not which ops compute between: two versions of a library can give
equal tables and other code, and would then train together to the numbers of neither.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator

import torch
from torch import fx, nn

from passes.base import kind_of
from passes.moe.domain import has_branches
from passes.stage_module import RankProgram
from planner.frozen_plan import Plan
from runtime.distributed.exchange_json import all_gather_json
from runtime.distributed.groups import Groups
from runtime.distributed.meeting import require_equal
from runtime.environment import PACKAGE, installed_version
from runtime.weights.initial_weights import identity_of

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
        "parameters and buffers of the model (names, shapes, dtypes)": identity_of(plan),
    }


def require_same_code(plan: Plan, program: RankProgram, groups: Groups, *, is_given: bool) -> None:
    """Raises PlanError on every rank, with the stage and the ranks, if a stage was lowered to different code.

    The same call on every rank. A program that the caller gave (``is_given``) is not compared.
    """
    found = all_gather_json(groups, {} if is_given else _code_of(plan, program, groups), _texts)
    for name in sorted({name for of_rank in found for name in of_rank}):
        told = {rank: of_rank[name] for rank, of_rank in enumerate(found) if name in of_rank}
        require_equal(f"{name} (by hash)", told, len(found))


def digest(*modules: nn.Module) -> str:
    """Of the code of graphs and of all graphs that they hold; which of its GPUs a rank has does not count."""
    graphs = (graph for module in modules for graph in _graphs(module))
    text = "\0".join(g.graph.python_code("self").src for g in graphs)  # a copy of a program was never compiled
    return _short(_DEVICE_INDEX.sub(r"device(type='\1')", text))


def _code_of(plan: Plan, program: RankProgram, groups: Groups) -> dict[str, str]:
    """Hashes, by a description of their content. With experts as branches, ranks of ep run different ops."""
    decided = plan.decisions if plan.mesh.ep > 1 else None
    is_apart = decided is not None and has_branches(decided.program.graph.graph)
    here = f" for the experts of ep rank {groups.place['ep']}" if is_apart else ""
    axes = [axis for axis in ("tp", "cp", "ep", "etp") if plan.mesh.size(axis) > 1]
    place = "".join(f", {axis} {groups.place[axis]}" for axis in axes)
    found: dict[str, str] = {}
    for stage in program.stages:
        found[f"the lowered ops of stage {stage.index}{here}"] = _ops_of(stage.module)
        found[f"the lowered code of stage {stage.index}{place}"] = digest(stage.module)
    if program.count_module is not None:
        found["the code of the loss denominators"] = digest(program.count_module)
    return found


def _ops_of(module: nn.Module) -> str:
    nodes = (node for graph in _graphs(module) for node in graph.graph.nodes)
    return _short("\n".join(f"{node.op} {kind_of(node)}" for node in nodes))


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


def _texts(values: dict[str, str]) -> dict[str, str]:
    return {str(name): str(value) for name, value in values.items()}
