"""Stages of a captured program, computed in turn in one process as ranks would: their loss is that of the whole."""

import torch
from torch import Tensor

from passes.blocks.blocks import find_blocks
from passes.program.program import Program, StageAssignment
from planner.mesh import Mesh
from planner.pipeline.stages import assign_stages


def stages_of(program: Program, pp: int, vpp: int = 1, split: str | list[int] = "auto") -> StageAssignment:
    return assign_stages(program, find_blocks(program), Mesh(pp=pp, vpp=vpp), split)


def sizes(stages: StageAssignment) -> list[int]:
    return [len(blocks) for blocks in stages.blocks_of_stage]


def stage_of_parameter(program: Program, stages: StageAssignment, fqn: str) -> tuple[int, ...]:
    names = [name for name, own in program.parameters.items() if own == fqn]
    return tuple(sorted({stage for name in names for stage in stages.parameter_stages[name]}))


def run_stage_by_stage(program: Program, stages: StageAssignment, inputs: dict[str, Tensor]) -> Tensor:
    """Compute the loss as ranks would: a stage has placeholders that it is said to read, and what it received."""
    received: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for stage in range(stages.num_stages):
        values = dict(received)
        values |= {name: inputs[name] for name, where in stages.parameter_stages.items() if stage in where}
        for node in program.graph.graph.nodes:
            if node.op == "call_function" and stages.runs_on(node.name, stage):
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n, values=values: values[n.name])
                kwargs = {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}
                values[node.name] = node.target(*args, **kwargs)
        if stage < stages.num_stages - 1:
            received = {name: values[name] for name in stages.live[stage]}
    return values[program.loss]


def check_equals_whole(program: Program, stages: StageAssignment) -> None:
    """The loss of the stages in turn is that of the whole graph, and nothing crosses a cut unread."""
    generator = torch.Generator().manual_seed(0)
    inputs = {
        node.name: _filled(node.meta["val"], program, node.name, generator)
        for node in program.graph.graph.nodes
        if node.op == "placeholder"
    }
    one = stages_of(program, 1)
    torch.manual_seed(1)
    whole = run_stage_by_stage(program, one, inputs)
    torch.manual_seed(1)
    torch.testing.assert_close(run_stage_by_stage(program, stages, inputs), whole, rtol=1e-5, atol=1e-6)
    for cut, names in enumerate(stages.live):
        for name in names:
            assert any(stages.stage_of.get(user.name, 0) > cut for user in program.node(name).users), name


def _filled(value: Tensor | None, program: Program, name: str, generator: torch.Generator) -> Tensor:
    assert value is not None
    if name in program.constants and program.constants[name].device.type != "meta":
        return program.constants[name]
    if not value.is_floating_point():
        return torch.randint(0, 2, value.shape, generator=generator).to(value.dtype)
    return torch.randn(value.shape, generator=generator) * 0.1
