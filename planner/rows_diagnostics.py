"""What the user should know: ops computed whole for want of a rule, what could not be made exact, the shares cut."""

from __future__ import annotations

from planner.flops import node_flops
from planner.plan_rows import Diagnostic, ParameterPlan, Summary
from planner.rules import rule_of
from planner.source import PlanSource
from planner.source_lines import where_of


def diagnostic_rows(source: PlanSource) -> tuple[Diagnostic, ...]:
    """Warnings and notes, each once."""
    rows: dict[Diagnostic, None] = {}
    for note in source.program.notes:
        rows[Diagnostic("warning", note)] = None
    for what, where in source.terms.inexact:
        rows[Diagnostic("warning", f"the loss is no sum over tokens at {what}: it is averaged over microbatches", str(where),
                        "keep one microbatch, or write the loss as a sum over a count")] = None
    for node in source.program.graph.graph.nodes:
        if source.mesh.tp > 1 and node.op == "call_function" and node.meta.get("grad") and rule_of(node.target) is None:
            rows[Diagnostic("warning", f"{node.target} has no rule: every rank computes all of it", str(where_of(node)))] = None
    return tuple(rows)


def summary_row(source: PlanSource, parameters: tuple[ParameterPlan, ...]) -> Summary:
    """Shares of matrix-product FLOPs and of parameter elements that are cut over tp."""
    total = cut = 0
    for node in source.program.graph.graph.nodes:
        if node.op == "call_function":
            flops = node_flops(node)
            total += flops
            cut += 0 if source.placements.options[node.name].whole else flops
    elements = sum(p.num_elements for p in parameters)
    sharded = sum(p.num_elements for p in parameters if p.dim is not None)
    return Summary(cut / total if total else 0.0, sharded / elements if elements else 0.0, elements)
