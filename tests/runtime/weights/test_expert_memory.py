"""No rank has an expert that is not its own: of all tensors that live on it, weights, gradients and optimizer state."""

import gc
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from passes.errors import PlanError
from planner import meta_parameters
from planner.frozen_plan import Plan
from runtime.distributed.agreement import agree, broadcast_json
from runtime.distributed.launch import launch
from runtime.engine.engine import Engine
from runtime.fuzz.forks import StoreHost
from tests.models.plannable import MODELS, spec_of
from tests.tools.captures import plan_again
from tests.tools.handmade_stages import build_batch, build_model, build_plan, lower
from tests.tools.laboratory import session_lab
from tests.tools.limits import HANG_SECONDS
from tests.tools.ranks import Ranks
from tests.tools.tiers import chosen

MESHES = {
    "dp4 ep2": {"dp": 4, "ep": 2},
    "dp4 ep4": {"dp": 4, "ep": 4},
    "tp2 dp2 ep2, etp 1": {"tp": 2, "dp": 2, "ep": 2, "etp": 1},
    "dp4 ep2 etp2": {"dp": 4, "ep": 2, "etp": 2},
}
CASES = [(model, mesh) for model in ("mixtral", "loop of experts") for mesh in MESHES]


def planned(model: str, mesh: str) -> Plan:
    """Weights are on meta until a rank draws its own."""
    with meta_parameters():
        made = MODELS[model].make()
    return plan_again(made, spec_of(model, mesh=MESHES[mesh], optimizer={"alignment": "none", "bucket_size": None}))


def live() -> int:
    """Bytes of all storages that tensors of this process have, each once."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and type(x) in (Tensor, torch.nn.Parameter)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x.device.type == "cpu"}
    return sum(storages.values())


def run_case(made: Plan) -> dict[str, Any]:
    """Of this rank after a step: elements of each parameter of experts, of their buffers, bytes of all that lives."""
    before = live()
    generator = torch.Generator().manual_seed(0)
    batch = {
        n: torch.randint(0, x["high"], (8, *x["shape"]), generator=generator) for n, x in made.spec["inputs"].items()
    }
    with Engine(made, timeout_seconds=HANG_SECONDS) as engine:
        engine.train_step(batch)
        engine.optimizer.wait_parameters()
        stages = engine.program.stages
        held = {p.fqn: s.parameter(p.fqn).numel() for s in stages for p in s.parameters if p.expert is not None}
        modules = {n for s in stages for n, _ in s.module.named_parameters()}
        return {
            "ep": engine.groups.place["ep"],
            "held": held,
            "named": len(modules) == sum(len(s.parameters) for s in stages),
            "buffers": sum(
                len(slot.world)
                for b in engine.optimizer.buffers.buffers
                for slot in b.slots.values()
                if slot.local.expert
            ),
            "memory": engine.optimizer.measured_bytes(),
            "more": live() - before,
        }


Ran = tuple[Plan, list[dict[str, Any]]]


def run_all(host: StoreHost, cases: list[tuple[str, str]]) -> dict[tuple[str, str], Ran]:
    """Of each case its plan, without what it was decided on, and what each rank found."""
    found = {}
    for case in cases:
        made = planned(*case)
        gc.collect()
        gc.freeze()  # ranks look at what they make themselves, and copy no page of what was there before
        found[case] = type(made).of(made), Ranks(made, "forks", host).run(run_case)
    return found


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[tuple[str, str], Ran]:
    return session_lab().call(run_all, chosen(request, "case"))


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_a_rank_has_its_part_of_the_experts_and_no_more(runs: dict[tuple[str, str], Ran], case: tuple[str, str]):
    made, ranks = runs[case]
    shapes = {row.name: row for row in made.parameters if row.expert is not None}
    ep, etp = made.mesh.ep, made.mesh.etp
    for found in ranks:
        mine = {n for n, row in shapes.items() if row.expert is not None and row.expert.is_held(ep, found["ep"])}
        assert found["held"].keys() == mine
        assert found["named"]
        for name in mine:
            row = shapes[name]
            parts = (ep if row.expert is not None and row.expert.dim >= 0 else 1) * (
                etp if row.placement.is_sharded else 1
            )
            assert found["held"][name] * parts == torch.Size(row.shape).numel(), name
        assert found["buffers"] == sum(found["held"].values())
        assert found["more"] < sum(found["memory"].values()) + 40_000, "something else is as large as experts"


SIZE = 8


def gather_without_the_device_group() -> dict[str, torch.Tensor]:
    """The group for the device carries nothing from host memory: it is not there."""
    rank = int(os.environ["RANK"])
    plan = build_plan(build_model(), size=SIZE, pp=2)
    with Engine(plan, program=lower(plan, rank), timeout_seconds=HANG_SECONDS) as engine:
        engine.forward_backward(build_batch(SIZE, 0))
        no_group: Any = "no group"
        engine.groups.world = engine.groups.by_name["pp"] = no_group
        assert broadcast_json(engine.groups, f"said by {rank}") == "said by 0"
        with pytest.raises(PlanError, match="rank 1 will not"):
            agree(engine.groups, PlanError("rank 1 will not", fix="wait") if rank else None)
        engine.gather_gradients()
        return engine.gather_parameters()


@pytest.mark.slow
def test_weights_and_objects_go_over_the_host_group_alone():
    found, nothing = launch(gather_without_the_device_group, 2, timeout_seconds=HANG_SECONDS)
    expected = dict(build_model().named_parameters())
    assert nothing == {}
    assert set(found) == set(expected)
    for name, value in found.items():
        assert torch.equal(value, expected[name])
