"""Which labels of a batch the loss skips: those that a cross-entropy of the captured graph reads as ignored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from planner.capture.canonical.products import NOTHING_IGNORED
from planner.graph.program import Program
from planner.graph.walks import ancestors, operands, walk

_MOVES = (
    *("reshape", "permute", "slice", "expand", "contiguous", "clone", "to", "cat", "pad", "roll", "slice_scatter"),
    *("select_scatter", "index_put", "local_rows"),
)


def ignored_labels(program: Program) -> dict[str, int]:
    """Batch key → the value that the loss skips; without keys with values that are also ids of an embedding."""
    nodes = program.graph.graph.nodes
    found = {}
    for node in nodes:
        if _name(node) == "cross_entropy_loss":
            ignored = node.args[4] if len(node.args) > 4 else node.kwargs.get("ignore_index", -100)
            labels = [n for n in sorted(ancestors([node.args[1]])) if n.name in program.inputs]
            found |= {program.inputs[n.name]: ignored for n in labels if ignored != NOTHING_IGNORED}
    read_as_ids = {program.inputs[n.name] for n in _looked_up(nodes) if n.name in program.inputs}
    return {name: ignored for name, ignored in found.items() if name not in read_as_ids}


def _name(node: fx.Node) -> str:
    return getattr(node.target, "_opname", getattr(node.target, "__name__", ""))


def _looked_up(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Inputs with values that are used directly as ids of an embedding, also shifted by one: an ignored label would be
    no row of it.

    ``where`` and ``masked_fill`` end the search: they replace an ignored id by another.
    """
    ids = [node.args[1] for node in nodes if _name(node) == "embedding"]
    start = [value for value in ids if isinstance(value, fx.Node)]
    return walk(start, operands, stop=lambda node: _name(node) not in _MOVES)
