"""Which labels of a batch the loss skips: those that a cross-entropy of the captured graph reads as ignored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from passes.canonical.products import NOTHING_IGNORED
from passes.program.ops.aten import aten, packet_of
from passes.program.ops.groups import MOVES, PLACING
from passes.program.ops.sequence import local_rows
from passes.program.program import Program
from passes.program.walks import ancestors, operands, walk


def ignored_labels(program: Program) -> dict[str, int]:
    """Batch key → the value that the loss skips; without keys with values that are also ids of an embedding."""
    nodes = program.graph.graph.nodes
    found = {}
    for node in nodes:
        if packet_of(node.target) is aten.cross_entropy_loss:
            ignored = node.args[4] if len(node.args) > 4 else node.kwargs.get("ignore_index", -100)
            labels = [n for n in sorted(ancestors([node.args[1]])) if n.name in program.inputs]
            found |= {program.inputs[n.name]: ignored for n in labels if ignored != NOTHING_IGNORED}
    read_as_ids = {program.inputs[n.name] for n in _looked_up(nodes) if n.name in program.inputs}
    return {name: ignored for name, ignored in found.items() if name not in read_as_ids}


def _looked_up(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Inputs with values that are used directly as ids of an embedding, also shifted by one: an ignored label would be
    no row of it.

    ``where`` and ``masked_fill`` end the search: they replace an ignored id by another.
    """
    ids = [node.args[1] for node in nodes if packet_of(node.target) is aten.embedding]
    start = [value for value in ids if isinstance(value, fx.Node)]
    return walk(start, operands, stop=lambda node: node.target not in MOVES | PLACING and node.target is not local_rows)
