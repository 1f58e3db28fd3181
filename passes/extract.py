"""Cut one stage out of the captured graph; its values still have their global shapes.

    placeholders   received boundary values, batch tensors, loss denominators     (in that order)
    attributes     parameters and buffers (on meta, filled by the runtime), lifted constants
    output         the values sent on, then the loss where the stage computes it

Needs:   a stage of every node (planner.pipeline.stages).
Leaves:  nodes with ``meta["origin"]`` (name in the captured graph), in its order.
"""

from __future__ import annotations

import torch
from torch import fx, nn

from passes.base import LowerContext, StageGraph
from passes.moe import exchange
from passes.moe.domain import is_here
from passes.partition.type_changes import runs_here
from passes.program.program import Program
from passes.program.stages import StageAssignment


def extract(context: LowerContext, index: int) -> StageGraph:
    """The part of the graph that stage ``index`` computes."""
    lowering = context.lowering
    program, stages, denominators = lowering.program, lowering.stages, lowering.denominators
    stage = StageGraph(index, fx.Graph(), nn.Module())
    captured = [n for n in program.graph.graph.nodes if n.op != "output"]
    ep_rank = context.place.get("ep", 0)
    captured = [n for n in captured if is_here(n, lowering.sizes, ep_rank)]
    mine = [n for n in captured if n.op == "call_function" and stages.runs_on(n.name, index)]
    read = {v for n in mine for v in n.all_input_nodes}
    stage.receives = stages.live[index - 1] if index else ()
    stage.sends = stages.live[index] if index < stages.num_stages - 1 else ()
    read |= {program.node(name) for name in stage.sends}
    holders = [n for n in captured if n.op == "placeholder" and n in read]
    stage.inputs = tuple(n.name for n in holders if n.name in program.inputs)
    stage.denominators = tuple(n.name for n in holders if n.name in denominators)
    for name in (*stage.receives, *stage.inputs, *stage.denominators):
        _place(stage, program.node(name), stage.graph.placeholder(name))
    for node in holders:
        if node.name not in stage.env:
            _attribute(stage, program, node)
    for node in mine:
        if node.target is exchange.join:  # of all experts in the captured graph, of this rank's here
            parts = tuple(stage.env[n.name] for n in node.all_input_nodes if n.name in stage.env)
            new = stage.graph.call_function(exchange.join, parts, dict(node.kwargs))
        else:
            new = stage.graph.node_copy(node, lambda n: stage.env[n.name])
        _place(stage, node, new)
    _output(stage, program, stages)
    return stage


def _place(stage: StageGraph, origin: fx.Node, node: fx.Node) -> None:
    node.meta = {**origin.meta, "origin": origin.name}
    stage.env[origin.name] = node


def _attribute(stage: StageGraph, program: Program, node: fx.Node) -> None:
    """A parameter, buffer or constant becomes an attribute of the stage module."""
    name = node.name
    if name in program.parameters:
        stage.parameters[name] = name
    elif name in program.buffers:
        stage.buffers[name] = name
        stage.root.register_buffer(name, torch.empty_like(node.meta["val"], device="meta"))
    else:
        stage.root.register_buffer(name, program.constants[name].detach().clone())
    _place(stage, node, stage.graph.create_node("get_attr", name, name=name))


def _output(stage: StageGraph, program: Program, stages: StageAssignment) -> None:
    loss = program.node(program.loss)
    stage.has_loss = runs_here(stages, loss, stage.index)
    names = [*stage.sends, *([loss.name] if stage.has_loss else [])]
    node = stage.graph.output(tuple(stage.env[n] for n in names))
    node.meta["names"] = tuple(names)
