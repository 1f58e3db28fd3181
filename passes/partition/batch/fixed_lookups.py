"""Rows that a forward looks up by numbers of its own, such as positions: they must be there.

    wpe[n, h](arange(length))        length ≤ n, else a sequence is longer than the positions of the model

No batch holds these numbers, so no check of a batch can find them; the shapes alone are fine, and the first step fails.
"""

from __future__ import annotations

import torch
from torch import fx

from passes.errors import PlanError
from passes.program.known_values import value_of
from passes.program.ops.aten import named, shape_of
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.program.walks import operands, walk


def check_fixed_lookups(program: Program) -> None:
    """Raise PlanError if a constant id exceeds the rows of an embedding, for every batch."""
    for node in program.graph.graph.nodes:
        if getattr(node.target, "_opname", "") != "embedding":
            continue
        given = named(node)
        num_rows = shape_of(given["weight"])[0]
        with torch.no_grad():
            asked = value_of(given["indices"], program.graph, {})
        if asked is not None and asked.numel() and int(asked.max()) >= num_rows:
            raise PlanError(
                f"the embedding {_name(given['weight'], program)} has {num_rows} rows, but the model looks up row "
                f"{int(asked.max())}: a sequence is longer than the positions of the model",
                where=where_of(node),
                fix=f"give the inputs of the spec a length of at most {num_rows}, or the model more positions",
            )


def _name(weight: fx.Node, program: Program) -> str:
    names = (program.parameters[n.name] for n in walk([weight], operands) if n.name in program.parameters)
    return next(names, "of no parameter").removesuffix(".weight")
