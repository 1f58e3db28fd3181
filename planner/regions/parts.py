"""The parts of one block: its attention, and the rest. Found by the ops that compute scores, never by a module's name.

    attn    the scores times the values, their inputs, and the ops up to the residual add:
            norm → q, k, v → scores → @ v → output projection | + x
    mlp     the rest of the block

A block with two attentions (a decoder that also reads an encoder) has a part for each. A part contains all its inputs
within the block that are not in the parts before it, so none of its inputs depends on its outputs: it can run as one
call.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from passes.program.walks import operands, readers, walk
from planner.placement.attention.scores import mixes_values

ATTENTION, REST = "attn", "mlp"


def parts_of(block: Sequence[fx.Node], on_batch: Collection[fx.Node]) -> list[tuple[str, list[fx.Node]]]:
    """(part, nodes) in the order in which they run; ``on_batch``: the nodes that read a batch tensor."""
    inside, taken = set(block), set[fx.Node]()
    parts: list[tuple[str, list[fx.Node]]] = []
    for mixed in (node for node in block if mixes_values(node)):
        if mixed in taken:
            continue
        branch = _until_the_residual(mixed, inside, on_batch)
        feeding = set(walk(branch, operands, into=lambda n, before=frozenset(taken): n in inside and n not in before))
        parts.append((ATTENTION, [node for node in block if node in feeding]))
        taken |= feeding
    rest = [node for node in block if node not in taken]
    return [*parts, (REST, rest)] if rest else parts


def _until_the_residual(mixed: fx.Node, inside: Collection[fx.Node], on_batch: Collection[fx.Node]) -> list[fx.Node]:
    """The scores times values and their dependents, up to a sum with another value of the batch."""
    made = set(walk([mixed], readers, into=lambda n: n in inside))

    def goes_on(node: fx.Node) -> bool:
        others = [n for n in node.all_input_nodes if n not in made and n in on_batch and n.meta.get("grad")]
        return node in inside and not (getattr(node.target, "_opname", "") == "add" and others)

    return list(walk([mixed], readers, into=goes_on))
