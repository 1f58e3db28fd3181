"""A loop over a ModuleList of experts computes, without ep, the rows that chose each expert, and no others."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from planner import Plan, plan
from planner.tables.tables import Diagnostic
from runtime.engine.engine import Engine
from tests.models import experts, selected_rows
from tests.numeric.test_expert_layouts import OPENED, batch_of, built, check, layer_of
from tests.tools.simulated_mesh import spec_of

MESHES: dict[str, dict[str, int]] = {
    "one": {},
    "tp2": {"tp": 2},
    "dp2·tp2": {"dp": 2, "tp": 2},
}


def make_net(way: Callable[..., Tensor]) -> Callable[[], nn.Module]:
    return lambda: built(partial(layer_of, way))


def two_layers() -> nn.Module:
    torch.manual_seed(3)
    return experts.Blocks(partial(experts.Layer, experts.masks), shared=True).double()


def planned(make: Callable[[], nn.Module], batch: Mapping[str, Tensor], **more: object) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan(make(), spec_of(dict(batch), {}, **more), example_inputs=dict(batch))


def notes(found: Plan) -> list[Diagnostic]:
    return [row for row in found.diagnostics if " experts" in row.what]


@pytest.mark.check
@pytest.mark.sampled(2)
@pytest.mark.covering(pairs=2)
@pytest.mark.parametrize("mesh", ["one", "tp2", "dp2·tp2"])
@pytest.mark.parametrize("way", OPENED, ids=lambda w: w.__name__)
def test_every_spelling_trains_as_one_process(way, mesh):
    check(make_net(way), MESHES[mesh])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("more", [{}, {"recompute": "full"}, {"compile": True}], ids=["plain", "recompute", "compile"])
def test_two_layers_beside_a_shared_expert(mesh, more):
    check(two_layers, MESHES[mesh], **more)


@pytest.mark.sampled(1)
@pytest.mark.check
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_products_of_experts_are_those_of_the_chosen_rows(recompute: str):
    batch = batch_of(4)
    rows, up, down = 4 * experts.LENGTH, 2 * 8 * 12, 2 * 12 * 8  # forward FLOPs of a row in one expert
    found = planned(make_net(experts.masks), batch, recompute=recompute)
    with FlopCounterMode(display=False) as counter, Engine(found) as engine:
        engine.train_step(batch)
    others = 2 * 8 * (4 + experts.VOCABULARY)  # the router and the head
    again = counter.get_total_flops() - 3 * rows * (others + 2 * (up + down))
    if recompute == "none":
        assert again == 0
    else:  # the router, the hidden features of both experts, and those results by which weights get a gradient
        assert rows * (2 * 8 * 4 + 2 * up) <= again <= rows * (2 * 8 * 4 + 2 * (up + down))


@pytest.mark.check
def test_the_plan_says_which_rows_experts_compute():
    (note,) = notes(planned(make_net(experts.masks), batch_of(2)))
    assert note.what == "4 experts, 2 per token (the rows that chose it): every rank holds all of them"


@pytest.mark.check
def test_the_plan_says_why_experts_compute_every_token():
    kept, dense, *_ = notes(planned(two_layers, batch_of(2), cuda_graphs={"impl": "emulate", "scope": ["mlp"]}))
    assert "(every token, weighted)" in kept.what
    assert dense.what == "each of the 4 experts computes every token, 2× the work: CUDA graphs capture fixed shapes"
    assert dense.fix == "remove cuda_graphs, or set mesh.ep"


@pytest.mark.sampled(1)
@pytest.mark.check
@pytest.mark.parametrize("mesh", ["one", "dp2·tp2"])
def test_a_loop_that_is_not_understood_stays_as_it_is(mesh):
    make = make_net(selected_rows.overwritten)
    check(make, MESHES[mesh])
    dense = notes(planned(make, batch_of(2)))[-1]
    assert dense.what.endswith("computes every token, 2× the work: the result of one is overwritten by that of another")
    assert "experts.py:" in dense.where
