"""With ``packing: documents`` tokens attend within their document: every attention of the plan has to read the input
that keeps documents apart, beside its queries, keys and values.

Attention that a model spells out (a softmax of scores) is not looked at: its mask is anywhere before it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from passes.errors import PlanError
from passes.program.ops.groups import ATTENTION
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.program.walks import readers, walk
from planner.spec.roles import TELLING


def check_attention(program: Program, roles: Mapping[str, str]) -> None:
    """``roles``: input -> role. Raises PlanError, with the line, for an attention over the ends of documents."""
    names = [name for name, role in roles.items() if role in TELLING]
    if not names:
        return  # the objective says so, and how to mend it
    told = [n for n in program.graph.graph.find_nodes(op="placeholder") if program.inputs.get(n.name) in names]
    below = set(walk(told, readers))
    for node in program.graph.graph.nodes:
        if node.target in ATTENTION and not any(n in below for n in _beside(node)):
            raise PlanError(
                f"this attention does not read {' or '.join(names)}: tokens attend over the ends of documents",
                where=where_of(node),
                fix="mask other documents in the model (Hugging Face models do, with position_ids and use_cache: false "
                "in their config); or set data.packing: false, or true",
            )


def _beside(node: fx.Node) -> list[fx.Node]:
    """Operands but for queries, keys and values."""
    return [n for n in node.all_input_nodes if n not in node.args[:3]]
