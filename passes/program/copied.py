"""copied(program): an independent program, with the same names; rewriting it leaves the original unchanged."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from passes.program.program import Program
from passes.program.unwritten import Unwritten


def copied(program: Program) -> Program:
    """The full program again. Values in ``node.meta`` (tensors without memory) and constants are shared."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in program.graph.graph.nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
        env[node].name = node.name
    return program_of(program, graph)


def program_of(program: Program, graph: fx.Graph) -> Program:
    """``program`` with ``graph``, which holds copies of all or some of its nodes under their names."""
    there = {node.name for node in graph.nodes}

    def left(names: dict) -> dict:
        return {name: value for name, value in names.items() if name in there}

    return replace(
        program,
        graph=Unwritten(program.graph, graph),
        parameters=left(program.parameters),
        aliases=dict(program.aliases),
        buffers=left(program.buffers),
        constants=left(program.constants),
        inputs=dict(program.inputs),
        outputs=dict(program.outputs),
        notes=list(program.notes),
        rewrites=list(program.rewrites),
        traced=list(program.traced),
        untrained=list(program.untrained),
        assumptions=list(program.assumptions),
    )
