"""Explicit attention masks that say nothing new: provably causal ones become is_causal, provably full ones go away.

A mask made of constants alone (positions, comparisons) is computed here, once, and looked at. Flash attention then
needs no mask in memory, and the ops that built it are dead. One that reads a batch tensor or a parameter stays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from planner.canonical.form import prune
from planner.program import Program
from planner.source_lines import where_of

aten = torch.ops.aten
MAX_ELEMENTS = 1 << 27


def simplify_masks(program: Program) -> None:
    """Rewrite the attention calls of ``program`` in place; ``program.rewrites`` says which and why."""
    values: dict[fx.Node, torch.Tensor] = {}
    meanings: dict[fx.Node, str] = {}
    constant = _constants(program)
    for node in program.graph.graph.nodes:
        if node.target is not aten.scaled_dot_product_attention.default or len(node.args) < 4:
            continue
        mask = node.args[3]
        if not isinstance(mask, fx.Node) or mask not in constant or (len(node.args) > 5 and node.args[5]):
            continue
        if mask not in meanings:
            meanings[mask] = _meaning(_evaluate(mask, program, values))
        if meanings[mask]:
            _replace(node, meanings[mask] == "causal")
            program.rewrites.append((f"the attention mask is {meanings[mask]}", where_of(node)))
    if any(meanings.values()):
        prune(program.graph)
        program.__dict__.pop("_nodes", None)


def _constants(program: Program) -> set[fx.Node]:
    """Values that no batch tensor, parameter or buffer enters, and that draw no random numbers."""
    found: set[fx.Node] = set()
    for node in program.graph.graph.nodes:
        if node.op == "placeholder":
            known = program.constants.get(node.name)
            if known is not None and not known.is_meta:
                found.add(node)
        elif node.op == "call_function" and all(n in found for n in node.all_input_nodes) and not _is_random(node):
            found.add(node)
    return found


def _is_random(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def _evaluate(node: fx.Node, program: Program, values: dict[fx.Node, Any]) -> torch.Tensor | None:
    """The value of a constant node on the CPU; None where it would be too large to look at."""
    for inner in _in_order(node):
        if inner in values:
            continue
        if inner.op == "placeholder":
            values[inner] = program.constants[inner.name]
            continue
        if inner.meta["val"].numel() > MAX_ELEMENTS:
            return None
        args = fx.map_arg(inner.args, lambda n: values[n])
        kwargs = dict(fx.map_arg(inner.kwargs, lambda n: values[n]))
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        values[inner] = inner.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
    return values[node]


def _in_order(node: fx.Node) -> list[fx.Node]:
    seen: set[fx.Node] = set()
    order: list[fx.Node] = []
    stack = [(node, False)]
    while stack:
        current, done = stack.pop()
        if done:
            order.append(current)
        elif current not in seen:
            seen.add(current)
            stack.append((current, True))
            stack.extend((n, False) for n in current.all_input_nodes)
    return order


def _meaning(mask: torch.Tensor | None) -> str:
    """ "causal", "full" or "" for a boolean or an additive mask [.., s, t]."""
    if mask is None or mask.dim() < 2:
        return ""
    if mask.dtype == torch.bool:
        allowed = mask
    else:
        lowest = torch.finfo(mask.dtype).min
        allowed = mask == 0
        if not bool((allowed | (mask <= lowest)).all()):
            return ""
    if bool(allowed.all()):
        return "full"
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    return "causal" if mask.shape[-1] == mask.shape[-2] and bool((allowed == causal).all()) else ""


def _replace(node: fx.Node, causal: bool) -> None:
    query, key, value, _, *rest = node.args
    dropout = rest[0] if rest else node.kwargs.get("dropout_p", 0.0)
    node.args = (query, key, value, None, dropout, causal)
    node.kwargs = {k: v for k, v in node.kwargs.items() if k not in ("dropout_p", "is_causal", "attn_mask")}
