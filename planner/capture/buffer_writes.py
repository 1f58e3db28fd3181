"""A forward that writes into its buffers: reported if no write reaches the loss, refused if one would.

running_mean, num_batches_tracked     written for later evaluation: the plan does not carry it out, and says so
codebook.mul_(d).add_(…); x @ codebook      read again by the next step: a plan would train with the first values
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import fx

from passes.errors import PlanError
from passes.program.constants import is_made_of
from passes.program.source_lines import where_of
from passes.program.walks import ancestors

FIX = "update it outside the forward, or pass changing values as an input"


def notes_of_writes(
    graph: fx.Graph, written: Mapping[str, str], names: Mapping[str, str], fixed: set[str], outputs: list[str]
) -> Iterator[str]:
    """A note for each write of a value that changes from step to step.

    Raises PlanError if the loss reads a buffer that this call and later ones write.

    ``written``: placeholder → the node of its last value; ``names``: placeholder → dotted name; ``fixed``: placeholders
    that are the same at each step, if nothing writes them; ``outputs``: the results of the forward.
    """
    nodes = {node.name: node for node in graph.nodes}
    reaching = ancestors([nodes[name] for name in outputs])
    the_same = {nodes[name] for name in fixed - written.keys() if name in nodes}
    for holder, last in written.items():
        if holder not in names:
            continue
        if is_made_of(nodes[last], the_same):
            continue
        if nodes[holder] in reaching:
            raise PlanError(
                f"the forward updates {names[holder]} and computes with it: a plan would freeze its first value",
                where=where_of(nodes[last]),
                fix=FIX,
            )
        yield f"the forward updates buffer {names[holder]}: the plan drops this update"
