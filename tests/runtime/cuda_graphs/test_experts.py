"""Graphs up to where rows leave for experts give what eager steps give; the host waits for the routing behind them."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from planner import plan
from runtime import Engine
from runtime.cuda_graphs.region_graphs import GraphsBySlot
from tests.models import experts, selected_rows
from tests.models.families import Entry, tokens
from tests.tools.captures import plan_again
from tests.tools.graphed_runs import (
    Trained,
    differ,
    differences,
    engine_of,
    figures,
    on_ranks,
    planned,
    spec_of,
    train,
    train_on,
)
from tests.tools.host_watch import HostWatch
from tests.tools.laboratory import Case, Lab
from tests.tools.limits import HANG_SECONDS
from tests.tools.ranks import Ranks

PARTS = ["attn", "moe_router", "moe_preprocess"]
WAYS = [experts.masks, experts.stacked, experts.looked_up, experts.slots, selected_rows.index_add]


def entry_of(way: experts.Way, shared: bool = False) -> Entry:
    torch.manual_seed(3)
    layer = partial(selected_rows.Selecting if way in selected_rows.WAYS else experts.Layer, way)
    model: nn.Module = experts.Blocks(layer, shared).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    ids = ((experts.LENGTH,), torch.int64, experts.VOCABULARY)
    return Entry(model, {"input_ids": ids, "labels": ids})


def trained(way: experts.Way, shared: bool, scope: list[str], *, captures: bool = True) -> Trained:
    entry = entry_of(way, shared)
    with Engine(plan_again(entry.model, spec_of(entry, scope)), timeout_seconds=HANG_SECONDS) as engine:
        if captures:
            engine.capture_graphs()
        found = train(engine, entry, 2)
        expected = planned(engine, steps=2) if captures else (0, 0, 0)
        assert figures(engine) == expected
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
def test_parts_of_experts_give_what_they_give_eagerly(way, shared):
    eager = trained(way, shared, PARTS, captures=False)  # as with graphs, a loop computes every token
    for scope in (PARTS, ["attn", "moe"]) if shared else (["moe_router"], PARTS, ["moe"]):
        assert differences(eager, trained(way, shared, scope)) == [], scope


@pytest.mark.thorough
def test_an_expert_that_all_share_stays_outside_where_its_gradient_would_be_added_sooner():
    captured = []
    for way in (experts.slots, experts.masks):
        entry = entry_of(way, shared=True)
        decided = plan(entry.model, spec_of(entry, PARTS))
        program = decided.to_run()[0].program
        shared = {node for node, fqn in program.parameters.items() if ".shared." in fqn}
        readers = {user.name for node in shared for user in program.node(node).users}
        routers = {name for region in decided.regions if region.scope == "moe_router" for name in region.nodes}
        captured.append(len(readers & routers) / len(readers))
    assert captured == [1, 0]


# ---- ranks

MESHES = [{"tp": 2, "pp": 2, "ep": 2, "etp": 1}, {"tp": 2, "dp": 2, "ep": 2, "etp": 2}]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_experts_on_other_ranks_with_graphs_give_what_they_give_without(lab: Lab, mesh):
    eager = on_ranks(lab, "experts", None, mesh=mesh)
    for scope in (PARTS, ["moe_router"]):
        assert differ(eager, on_ranks(lab, "experts", scope, mesh=mesh)) == [[]] * 4, scope


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh", [{"dp": 2, "ep": 2}, *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES)], ids=str
)
def test_slots_of_experts_on_other_ranks_are_captured_whole(lab: Lab, mesh):
    """A step also counts the same tokens of experts and drops as many; some are dropped."""
    eager = on_ranks(lab, "slots", None, mesh=mesh)
    for scope in (["attn", "moe"], ["full_iteration"]):
        graphed = on_ranks(lab, "slots", scope, mesh=mesh)
        assert differ(eager, graphed) == [[]] * len(eager), scope
        assert [rank.report for rank in graphed] == [rank.report for rank in eager]
    assert all(rank.report[1] for rank in eager)


def watched_step() -> tuple[list[str], list[str]]:
    """What a rank does in a step, in its order: regions that begin to be replayed, and where the host then waits for
    values; and where it waits while one is replayed."""
    engine, entry = engine_of("experts", PARTS, mesh={"dp": 2, "ep": 2})
    with engine:
        assert isinstance(engine.graphs, GraphsBySlot)
        watch = HostWatch(engine.program)
        order: list[str] = []
        within: list[str] = []
        scopes = {region.index: region.scope for region in engine.plan.regions}

        def seen() -> list[str]:
            found = [sight.where.partition(":")[0] for sight in watch.sights]
            watch.sights.clear()
            return found

        def watched(run: Any) -> Any:
            def run_region(call: Any, *given: Any) -> Any:
                order.extend([*seen(), scopes[call.index]])
                made = run(call, *given)
                within.extend(seen())
                return made

            return run_region

        for region in (region for chunk in engine.graphs.regions for region in chunk):
            region.call.run = watched(region.call.run)
        before = engine.graphs.num_replays
        with watch:
            engine.forward_backward(entry.batch(8, 0))
            order.extend(seen())
        assert order.pop() == "runtime/engine/build.py"  # the loss that is returned
        assert engine.graphs.num_replays > before
    return order, within


@pytest.mark.thorough
def test_the_host_waits_for_the_routing_behind_what_is_captured_and_nowhere_else():
    for order, within in Ranks(2, "processes").run(watched_step):
        assert within == []
        a_layer = [*PARTS, "passes/ops/experts.py"]
        assert order == a_layer * 2 * 2  # layers · microbatches; nothing in a backward


WIDTH, VOCABULARY = 16, 37


class Layer(nn.Module):
    """Adds its own loss, as a part of the layer and so of the region."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, labels: Tensor, total: Tensor | float) -> tuple[Tensor, Tensor]:
        x = x + self.down(F.gelu(self.up(x)))
        return x, total + F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class LossInEachLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Layer() for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, total = self.table(input_ids), 0.0
        for layer in self.layers:
            x, total = layer(x, labels, total)
        return total


@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro", [2, 8])
def test_a_loss_that_a_region_makes_is_the_loss_after_its_backward_too(micro):
    runs = []
    for scope in (None, ["mlp"]):
        torch.manual_seed(0)
        entry = Entry(LossInEachLayer().double(), tokens(VOCABULARY))
        spec = spec_of(entry, scope, batch={"global": 8, "micro": micro})
        with Engine(plan_again(entry.model, spec), timeout_seconds=HANG_SECONDS) as engine:
            if engine.graphs is not None:
                engine.capture_graphs()
                assert engine.plan.graph_regions[-1].captured
            runs.append(train(engine, entry, 2))
    assert differences(*runs) == []


class _Later:
    """A send whose bytes leave when it is waited for."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self._args, self._named = args, named

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        dist.send(*self._args, **self._named)


def train_with_late_sends(plan: Any, batches: Any) -> Trained:
    """On a rank: two steps; messages leave as late as they may."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine, pytest.MonkeyPatch.context() as patch:
        if engine.graphs is not None:
            engine.capture_graphs()
        if engine.groups.place["pp"] == 0:
            patch.setattr(dist, "isend", _Later)
        return train_on(engine, batches[:2])


@pytest.mark.thorough
@pytest.mark.slow
def test_messages_of_a_stage_that_waits_for_no_gradient_are_those_of_their_microbatch(lab: Lab):
    split = {"pipeline": {"split": [2, 2]}}
    graphs = {"cuda_graphs": {"impl": "emulate", "scope": []}}
    cases = [Case("untrained:detached", {"pp": 2}, split | rest, job=train_with_late_sends) for rest in ({}, graphs)]
    for eager, graphed in zip(*map(lab.run, cases), strict=True):
        assert differences(eager, graphed) == []
