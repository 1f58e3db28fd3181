"""Lower a plan for one rank: captured graph → this rank's stage modules.

extract    the stage's part of the graph
convert    a collective on every edge whose ends differ in type
localize   local sizes, parallel forms
streams    named random streams
peephole   biases back into products; devices
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from passes.dropout import name_streams
from passes.extract import StageGraph, extract_stage
from passes.insert_collectives import insert_collectives
from passes.localize import localize
from passes.ops.axis import AxisHandle
from passes.ops.random_state import RandomState
from passes.peephole import fuse_bias, place_devices
from passes.stage_module import Boundary, LocalParameter, RankProgram, StageModule
from planner.capture.model.meta_init import buffer_value
from planner.decisions import PlanSource
from planner.frozen_plan import Plan
from planner.graph.program import Program
from planner.sharding.type_changes import sent_type, type_changes


def lower(plan: Plan, rank: int, device: torch.device | str = "cpu") -> RankProgram:
    """All that ``rank`` runs, with parameters and buffers on meta for the runtime to fill."""
    source = plan.source
    assert isinstance(source, PlanSource), "a loaded plan has no captured program"
    place = source.mesh.coordinate(rank)
    tp = AxisHandle("tp", source.mesh.tp, place["tp"])
    random = RandomState(source.seed, tp.rank)
    chunks = range(place["pp"], source.stages.num_stages, source.mesh.pp)
    modules = [
        lower_stage(source, index, chunk, tp, random, torch.device(device)) for chunk, index in enumerate(chunks)
    ]
    counts = source.terms.counts
    if counts is not None:
        counts = fx.GraphModule(_constants_of(source, counts), _with_constants(source.program, counts))
        place_devices(counts.graph, torch.device(device))
        counts.recompile()
    inputs = tuple(source.program.inputs[n] for n in source.terms.count_inputs if n in source.program.inputs)
    return RankProgram(modules, {"tp": tp}, random, counts, inputs)


def lower_stage(
    source: PlanSource, index: int, chunk: int, tp: AxisHandle, random: RandomState, device: torch.device
) -> StageModule:
    """One stage: the passes in their order."""
    program, stages, placements = source.program, source.stages, source.placements
    stage = extract_stage(program, stages, source.terms.denominators, index)
    insert_collectives(stage, type_changes(placements, stages, program, index), tp)
    localize(stage, placements, tp)
    name_streams(stage.graph, stage.root, random)
    fuse_bias(stage.graph)
    place_devices(stage.graph, device)
    return _finish(source, stage, chunk, tp.rank, device)


def _finish(source: PlanSource, stage: StageGraph, chunk: int, tp_rank: int, device: torch.device) -> StageModule:
    program = source.program
    parameters = tuple(local_parameter(source, name, stage.index, tp_rank) for name in stage.parameters)
    for name, local in zip(stage.parameters, parameters, strict=True):
        empty = torch.empty(local.shape, dtype=local.dtype, device="meta")
        stage.root.register_parameter(name, nn.Parameter(empty, local.requires_grad))
    for name, buffer in list(stage.root.named_buffers()):
        if name not in stage.buffers:
            stage.root.register_buffer(name, buffer.to(device))
    stage.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    stage.graph.lint()
    module = fx.GraphModule(stage.root, stage.graph)
    attributes = {program.parameters[n]: n for n in stage.parameters} | {program.buffers[n]: n for n in stage.buffers}
    held = {n.target for n in stage.graph.nodes if n.op == "get_attr"}
    for handle in ("tp", "random"):
        if handle in held:
            setattr(module, handle, getattr(stage.root, handle))
    return StageModule(
        stage.index,
        chunk,
        module,
        _boundaries(source, stage.receives),
        _boundaries(source, stage.sends),
        tuple(program.inputs[n] for n in stage.inputs),
        tuple(source.terms.denominators.index(n) for n in stage.denominators),
        parameters,
        tuple(program.buffers[n] for n in stage.buffers),
        attributes,
        stage.has_loss,
    )


def _boundaries(source: PlanSource, names: tuple[str, ...]) -> tuple[Boundary, ...]:
    """What crosses a cut, in local shapes."""
    result = []
    for name in names:
        node = source.program.node(name)
        placement = sent_type(source.placements.of(node))
        shape = placement.local_shape(tuple(node.meta["val"].shape), source.mesh.tp)
        result.append(Boundary(name, shape, node.meta["val"].dtype, bool(node.meta["grad"]), placement))
    return tuple(result)


def local_parameter(source: PlanSource, name: str, stage: int, tp_rank: int) -> LocalParameter:
    """A parameter as a rank of ``stage`` has it. Of equal copies, over tp or stages, the first alone is counted."""
    node = source.program.node(name)
    placement, tp = source.placements.of(node), source.mesh.tp
    stages = source.stages.parameter_stages.get(name, (stage,))
    partial = tp > 1 and (placement.kind == "R" or placement.has_whole_segment)
    over = (("tp",) if partial else ()) + (("embedding",) if len(stages) > 1 else ())
    shape = tuple(node.meta["val"].shape)
    counted = (placement.is_sharded or tp_rank == 0) and stage == min(stages)
    return LocalParameter(
        source.program.parameters[name],
        placement.local_shape(shape, tp),
        node.meta["val"].dtype,
        placement,
        shape,
        over,
        counted,
        stages if len(stages) > 1 else (),
        bool(node.meta["grad"]),
    )


def _constants_of(source: PlanSource, graph: fx.GraphModule) -> nn.Module:
    """What the counts read beside the batch: lifted constants, and buffers of the model (such as class weights)."""
    root, program = nn.Module(), source.program
    for node in graph.graph.nodes:
        if node.op == "placeholder" and node.name in program.constants:
            root.register_buffer(node.name, program.constants[node.name].detach().clone())
        elif node.op == "placeholder" and node.name in program.buffers:
            assert source.model is not None, "the model was let go before its buffers were read"
            value = buffer_value(source.model, program.buffers[node.name])
            root.register_buffer(node.name, value.detach().to(program.node(node.name).meta["val"].dtype, copy=True))
    return root


def _with_constants(program: Program, module: fx.GraphModule) -> fx.Graph:
    """The graph of the counts with constants as attributes, so that only batch tensors are its arguments."""
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder" and (node.name in program.constants or node.name in program.buffers):
            env[node] = graph.create_node("get_attr", node.name)
        else:
            env[node] = graph.node_copy(node, lambda n: env[n])
    return graph
