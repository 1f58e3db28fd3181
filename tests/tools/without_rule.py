"""Calls of a program that carry a gradient and have no rule: every rank computes all of them."""

from passes.partition.typings.table import has_rule
from passes.program.program import Program
from passes.program.source_lines import where_of


def without_rule(program: Program) -> dict[str, str]:
    """Op → its first place in the user's code."""
    found: dict[str, str] = {}
    for node in program.graph.graph.nodes:
        if node.op != "call_function" or has_rule(node.target):
            continue
        if node.meta.get("grad") or any(n.meta.get("grad") for n in node.all_input_nodes):
            found.setdefault(str(node.target), str(where_of(node)))
    return found
