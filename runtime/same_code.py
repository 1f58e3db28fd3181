"""What must be equal on all ranks beside the plan's tables: versions, the captured graph, and the code of each stage.

    before any group      versions, the hash of the plan, the captured graph, names, shapes and dtypes of tensors
    after lowering        of each stage, a hash of its code on all ranks that run it

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

from passes.stage_module import RankProgram
from planner.frozen_plan import Plan
from runtime.distributed.exchange_json import all_gather_json
from runtime.distributed.groups import Groups
from runtime.distributed.meeting import require_equal
from runtime.environment import PACKAGE, installed_version
from runtime.weights.initial_weights import identity_of

_DEVICE_INDEX = re.compile(r"device\(type='(\w+)', index=\d+\)")  # of this rank's own GPU


def identity(plan: Plan) -> dict[str, str]:
    """By name, what the ranks compare in the store. Versions first: where they differ, the rest may follow from it."""
    return {
        "the version of Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "the version of torch": torch.__version__,
        "the version of transformers": installed_version("transformers"),
        "the version of meshwright": installed_version(PACKAGE),
        "the plan (by hash)": plan.hash()[:16],
        "the captured graph (by hash)": digest(plan.to_run()[0].program.graph),
        "what the model holds (names, shapes, dtypes)": identity_of(plan),
    }


def require_same_code(plan: Plan, program: RankProgram, groups: Groups, *, is_given: bool) -> None:
    """Raises PlanError on every rank, with the stage and the ranks, where a stage was lowered to other code.

    The same call on every rank. A program that the caller gave (``is_given``) is not compared.
    """
    found = all_gather_json(groups, {} if is_given else _code_of(plan, program, groups), _texts)
    for name in sorted({name for of_rank in found for name in of_rank}):
        told = {rank: of_rank[name] for rank, of_rank in enumerate(found) if name in of_rank}
        require_equal(f"the lowered code of {name} (by hash)", told, len(found))


def digest(*modules: nn.Module) -> str:
    """Of the code of graphs and of all graphs that they hold; which of its GPUs a rank has does not count."""
    text = "\0".join(code for module in modules for code in _codes(module))
    return hashlib.sha256(_DEVICE_INDEX.sub(r"device(type='\1')", text).encode()).hexdigest()[:16]


def _code_of(plan: Plan, program: RankProgram, groups: Groups) -> dict[str, str]:
    """By stage. Ranks of ep run other code where experts are branches of the graph, ranks of cp where a stage draws
    random numbers, each those of its own tokens: those of one ep or cp rank compare."""
    has_branches = any(row.expert is not None and row.expert.dim < 0 for row in plan.parameters)
    here = f" for the experts of ep rank {groups.place['ep']}" if has_branches and plan.mesh.ep > 1 else ""
    own = f" for the tokens of cp rank {groups.place['cp']}" if plan.mesh.cp > 1 else ""
    found = {
        f"stage {stage.index}{here}{own if hasattr(stage.module, 'random') else ''}": digest(stage.module)
        for stage in program.stages
    }
    if program.count_module is not None:
        found["the counts that losses are divided by"] = digest(program.count_module)
    return found


def _codes(module: nn.Module) -> Iterator[str]:
    """Also of what regions, pieces and recomputed blocks hold: they are attributes, and no submodules."""
    for path, inner in module.named_modules():
        if isinstance(inner, fx.GraphModule):
            yield f"{path}\n{inner.graph.python_code('self').src}"  # a copy of a program was never compiled
            for handle in dict.fromkeys(n.target for n in inner.graph.nodes if n.op == "get_attr"):
                held = getattr(getattr(inner, str(handle), None), "module", None)
                if isinstance(held, fx.GraphModule):
                    yield from _codes(held)


def _texts(values: dict[str, str]) -> dict[str, str]:
    return {str(name): str(value) for name, value in values.items()}
