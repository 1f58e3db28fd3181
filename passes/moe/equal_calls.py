"""Equal calls that read one weight are one call: experts that share their first layers compute them once, for all.

    norm(x), norm(x) … of each expert  →  one norm(x), which all read

Values stay the same to the bit; gradients are added up before the call's backward instead of behind it.
"""

from __future__ import annotations

from torch import fx
from torch._ops import OpOverload

from passes.program.ops.aten import draws
from passes.program.program import Program
from passes.program.weights import is_parameter


def merge_equal_calls(program: Program) -> bool:
    """In place; returns whether there were any. Not merged: draws, and functions that are no op of PyTorch."""
    graph = program.graph.graph
    work = [n for n in graph.nodes if is_parameter(n) and len(n.users) > 1]
    changed = False
    while work:
        alike: dict[object, list[fx.Node]] = {}
        for user in sorted(work.pop().users):
            if isinstance(user.target, OpOverload) and user.target.namespace == "aten" and not draws(user.target):
                alike.setdefault(_call(user), []).append(user)
        for first, *others in alike.values():
            for other in others:
                first.meta["grad"] = first.meta["grad"] or other.meta["grad"]  # one of them may lead to choices alone
                other.replace_all_uses_with(first)
                graph.erase_node(other)
            if others:
                work.append(first)
                changed = True
    if changed:
        program.graph_changed()
    return changed


def _call(node: fx.Node) -> object:
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.name)
    return node.target, repr(args), repr(kwargs)
