"""A small model cut by hand into stage modules, so that the runtime is tested without capture and lowering.

Crossing every cut: an activation (sent as a transposed view), a gate with a gradient that stages only pass on, and an
integer tensor without one. The first and the last stage hold the same (tied) matrix. Rows whose target is negative
do not count, and there is a different number of them in every microbatch.
"""

import math
from typing import Any

import torch
from torch import Tensor, fx, nn

from passes.base import RankProgram, StageModule
from passes.lowering import Lowering
from passes.ops.axis import AxisHandle
from passes.ops.random_state import RandomState
from passes.parameters import LocalParameter
from passes.program.program import BoundaryPlan, Program
from passes.types.types import I
from planner.decisions import Decisions
from planner.frozen_plan import Plan
from planner.mesh import Mesh
from planner.pipeline.schedule import SchedulePlan, build_schedule
from planner.saved_plan.model import ModelOwner
from planner.sharding.boxes import Part
from planner.sharding.buffers import BufferOptions, buffers_of_rank
from planner.sharding.parameters import ParameterPlan
from planner.sharding.shards import Shards
from planner.spec.spec import Spec
from planner.tables.tables import StagePlan

WIDTH = 6
NUM_MIDDLE = 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 3)
        self.gate = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(NUM_MIDDLE))
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        valid = target[:, :1] >= 0
        hidden, gate, kind = x @ self.tied, torch.sigmoid(x * self.gate), x.argmax(-1, keepdim=True)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden)) * gate
        error = (hidden @ self.tied.T + self.shift - target) ** 2 * (1 + kind)
        return (error * valid).sum() / valid.sum()


class Stage(nn.Module):
    """Blocks [first, stop) of the model, and its head and tail where they belong."""

    def __init__(self, model: Model, index: int, num_stages: int) -> None:
        super().__init__()
        share = NUM_MIDDLE // num_stages
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.names = [f"blocks.{i}" for i in range(index * share, (index + 1) * share)]
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in self.names)
        if self.is_first or self.is_last:
            self.tied = nn.Parameter(torch.empty_like(model.tied))
        if self.is_first:
            self.gate = nn.Parameter(torch.empty_like(model.gate))
        if self.is_last:
            self.register_buffer("shift", torch.empty_like(model.shift))

    def attributes(self) -> dict[str, str]:
        own = {"tied": "tied", "gate": "gate", "shift": "shift"}
        found = {fqn: name for fqn, name in own.items() if hasattr(self, name)}
        for i, name in enumerate(self.names):
            found |= {f"{name}.{part}": f"layers.{i}.{part}" for part in ("weight", "bias")}
        return found

    def run(self, hidden, gate, kind):
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden)) * gate
        return hidden, gate, kind

    def begin(self, x):
        return self.run(x @ self.tied, torch.sigmoid(x * self.gate), x.argmax(-1, keepdim=True))

    def end(self, hidden, kind, target, count):
        error = (hidden @ self.tied.T + self.shift - target) ** 2 * (1 + kind)
        return (error * (target[:, :1] >= 0)).sum() / count


class Only(Stage):
    def forward(self, x, target, count):
        hidden, _, kind = self.begin(x)
        return (self.end(hidden, kind, target, count),)


class First(Stage):
    def forward(self, x):
        hidden, gate, kind = self.begin(x)
        return hidden.t(), gate, kind


class Middle(Stage):
    def forward(self, hidden, gate, kind):
        hidden, gate, kind = self.run(hidden.t(), gate, kind)
        return hidden.t(), gate, kind


class Last(Stage):
    def forward(self, hidden, gate, kind, target, count):
        hidden, _, kind = self.run(hidden.t(), gate, kind)
        return (self.end(hidden, kind, target, count),)


class Count(nn.Module):
    def forward(self, target, count):
        return ((target[:, :1] >= 0).sum().to(torch.float64),)


def boundary(name: str, shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool = True) -> BoundaryPlan:
    """A value that crosses a cut, whole on every tp rank."""
    size = math.prod(shape) * dtype.itemsize
    return BoundaryPlan(name, shape, str(dtype).removeprefix("torch."), size, requires_grad=requires_grad)


def build_model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def build_batch(size: int, seed: int = 0) -> dict[str, Tensor]:
    """Row i is invalid for about half of the rows; the first row is always valid."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.rand(size, WIDTH, dtype=torch.float64, generator=generator)
    target[torch.rand(size, generator=generator) < 0.5] *= -1
    target[0] = target[0].abs()
    return {"x": torch.randn(size, WIDTH, dtype=torch.float64, generator=generator), "target": target}


def build_plan(
    model: Model,
    *,
    pp: int = 1,
    dp: int = 1,
    vpp: int = 1,
    size: int = 8,
    micro: int = 1,
    kind: str = "1f1b",
    clip: float | None = 0.5,
    zero: int = 1,
) -> Plan:
    row = {"shape": [WIDTH], "dtype": "float64"}
    spec = Spec.load(
        {
            "mesh": {"pp": pp, "dp": dp, "vpp": vpp},
            "batch": {"global": size, "micro": micro},
            "inputs": {"x": row, "target": row},
            "pipeline": {"schedule": kind},
            "optimizer": {"lr": 1e-3, "clip_grad_norm": clip, "weight_decay": 0.1, "zero": zero, "bucket_size": 40},
        }
    )
    mesh = Mesh(pp=pp, dp=dp, vpp=vpp)
    schedule = build_schedule(kind, pp, spec.num_microbatches, vpp=vpp)
    num_stages = pp * vpp
    parameters = [
        ParameterPlan.of(
            Part(I),
            name=name,
            shape=tuple(p.shape),
            dtype="float64",
            style="replicate",
            reason="",
            stages=_stages_of(name, num_stages),
        )
        for name, p in model.named_parameters()
    ]
    return Plan(
        spec=spec.to_dict(),
        mesh=mesh,
        parameters=tuple(parameters),
        collectives=(),
        stages=tuple(StagePlan(i, i % pp, i // pp, (), 0) for i in range(num_stages)),
        schedule=SchedulePlan(kind, spec.num_microbatches, schedule.orders),
        decisions=_decisions(mesh),
        shards=_shards(model, mesh, spec),
        owner=ModelOwner(model),
    )


def _decisions(mesh: Mesh) -> Decisions:
    """Nothing was captured: the stages are made by hand."""
    nothing: Any = None
    graph = fx.Graph()
    graph.output(())
    program = Program(fx.GraphModule(nn.Module(), graph), {}, {}, {}, {}, {}, {}, "")
    return Decisions(Lowering(program, nothing, nothing, mesh), nothing, nothing, mesh, 1234)


def _shards(model: Model, mesh: Mesh, spec: Spec) -> Shards:
    num_stages, buffers = mesh.pp * mesh.vpp, []
    for pp_rank in range(mesh.pp):
        held = [p for stage in range(pp_rank, num_stages, mesh.pp) for p in _parameters(model, stage, num_stages)]
        buffers += buffers_of_rank(pp_rank, held, BufferOptions(spec.optimizer, {"dp": mesh.dp}))
    return Shards((), (), tuple(buffers), ())


def _parameters(model: Model, stage: int, num_stages: int) -> tuple[LocalParameter, ...]:
    """What a stage holds, in the model's order."""
    places = {name: _stages_of(name, num_stages) for name, _ in model.named_parameters()}
    return tuple(_parameter(n, p, places[n], stage) for n, p in model.named_parameters() if stage in places[n])


def lower(plan: Plan, rank: int) -> RankProgram:
    """This rank's stage modules, by hand."""
    m = plan.mesh
    coordinate = m.coordinate(rank)
    stages = [_stage(plan, chunk * m.pp + coordinate["pp"], chunk) for chunk in range(m.vpp)]
    axes = {"tp": AxisHandle("tp", 1, 0)}
    return RankProgram(stages, axes, RandomState(1234, 0), fx.symbolic_trace(Count()), ("target",))


def _stages_of(name: str, num_stages: int) -> tuple[int, ...]:
    if name == "tied":
        return tuple(sorted({0, num_stages - 1}))
    return (0,) if name == "gate" else (int(name.split(".")[1]) * num_stages // NUM_MIDDLE,)


def _stage(plan: Plan, index: int, chunk: int) -> StageModule:
    model, num_stages, micro = plan.model, plan.mesh.pp * plan.mesh.vpp, plan.spec["batch"]["micro"]
    first, last = index == 0, index == num_stages - 1
    kind = Only if first and last else First if first else Last if last else Middle
    module = kind(model, index, num_stages)
    attributes = module.attributes()
    crossing = (
        boundary("hidden", (WIDTH, micro), torch.float64),
        boundary("gate", (micro, WIDTH), torch.float64),
        boundary("kind", (micro, 1), torch.int64, requires_grad=False),
    )
    parameters = _parameters(model, index, num_stages)
    return StageModule(
        index,
        chunk,
        fx.symbolic_trace(module),
        () if first else crossing,
        () if last else crossing,
        (("x",) if first else ()) + (("target",) if last else ()),
        (0,) if last else (),
        parameters,
        ("shift",) if last else (),
        attributes,
        last,
    )


def _parameter(fqn: str, parameter: nn.Parameter, stages: tuple[int, ...], stage: int) -> LocalParameter:
    shape, tied = tuple(parameter.shape), len(stages) > 1
    return LocalParameter(
        fqn,
        shape,
        parameter.dtype,
        I,
        shape,
        ("embedding",) if tied else (),
        stage == stages[0],
        stages if tied else (),
    )
