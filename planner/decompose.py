"""Ops that are no more than a few other ops (tensordot, inner, hstack, cosine_similarity …), written out.

PyTorch says itself how such a composite op is made. It is written out where it carries a gradient and has no rule of
its own, and kept whole (and reported) where its parts would have none either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from planner.rules import rule_of


def written_out(node: fx.Node, args: Any, kwargs: Any, spellings: Any) -> fx.GraphModule | None:
    """The graph that the call ``node`` stands for, over its tensor arguments in order; None where it stays a call.

    ``spellings``: ops that canonical form rewrites, and which therefore need no rule.
    """
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or rule_of(target) is not None or not target._can_decompose():
        return None
    inputs = list(dict.fromkeys(n for n in _nodes((args, kwargs))))
    if not any(n.meta["grad"] for n in inputs):
        return None

    def run(*values: torch.Tensor) -> Any:
        env = dict(zip(inputs, values, strict=True))
        given, named = fx.map_arg((args, kwargs), lambda n: env[n])
        return target.decompose(*given, **named)

    try:
        graph = make_fx(run, tracing_mode="real")(*(n.meta["val"].detach() for n in inputs))
    except Exception:
        return None  # what PyTorch cannot write out stays a call, and is reported
    calls = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    known = all(rule_of(op) is not None or op in spellings for op in calls) and bool(calls)
    return graph if known and not graph.graph.find_nodes(op="get_attr") else None


def _nodes(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found
