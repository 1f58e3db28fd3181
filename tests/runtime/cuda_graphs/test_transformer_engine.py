"""The real make_graphed_callables, from its source: what it asks, and what it does with what it is given.

Its code runs on a CPU, with graphs that are recorded op by op (tests.tools.recorded_graphs); nothing of it is kept.
"""

import json
import os
from typing import Any

import pytest
import torch

from planner import PlanError
from planner.pipeline.schedule import Action, build_schedule
from runtime.cuda_graphs import transformer_engine as backend
from runtime.cuda_graphs.te_arguments import numbered, sample_index
from runtime.cuda_graphs.transformer_engine import RegionModule, TransformerEngineGraphs
from tests.tools.graphed_runs import engine_of
from tests.tools.paths import ORACLES
from tests.tools.recorded_graphs import on_a_cpu
from tests.tools.region_stages import Kind, Walked, program_of, same, walk
from tests.tools.transformer_engine_source import (
    NotThere,
    checks,
    fetched_source,
    parameters,
)

CPU = torch.device("cpu")


def shapes() -> list[dict[str, Any]]:
    """Of the oracle's cases the first of each (stages, chunks, layers), of up to 16 microbatches."""
    cases = json.loads((ORACLES / "schedules.json").read_text())["cases"]
    few = [c for c in cases if c.get("num_layers_per_chunk") and c["num_microbatches"] <= 16]
    return list({(c["pp"], c["vpp"]): c for c in reversed(few)}.values())


# ---- what it asks


@pytest.mark.thorough
def test_its_parameters_are_those_that_are_recorded(te_source, te_facts):
    recorded = {p["name"]: (p["kind"], p["default"]) for p in te_facts["parameters"]}
    found = parameters(te_source.graph)
    assert {name: found.get(name) for name in recorded} == recorded
    assert list(found)[:2] == ["modules", "sample_args"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("function", ["_make_graphed_callables", "make_graphed_callables"])
def test_each_of_its_checks_is_one_that_is_recorded(te_source, te_facts, function):
    assert checks(te_source.graph, function) == te_facts["checks"][function].keys()


# ---- what it does, on stages made by hand


def eager_and_graphed(chunks: list[list[Any]], order: tuple[Action, ...]) -> tuple[Walked, list[Walked], Any]:
    """A walk without graphs, two with them, and the graphs."""
    program = program_of(chunks)
    eager = walk(program, order)
    graphs = TransformerEngineGraphs(program, order, CPU)
    graphs.capture()
    return eager, [walk(program, order, graphs.before_forward) for _ in range(2)], graphs


@pytest.mark.thorough
@pytest.mark.slow
def test_every_schedule_of_the_oracle_gives_what_it_gives_eagerly(te_device):
    """Regions of two kinds, one of which has no gradient for an input that the other has one for."""
    for case in shapes():
        order = tuple(Action(*step) for step in case["steps"])
        chunks = [[bool((chunk + i) % 2) for i in range(n)] for chunk, n in enumerate(case["num_layers_per_chunk"])]
        eager, found, graphs = eager_and_graphed(chunks, order)
        assert all(same(eager, each) for each in found), case["id"]
        assert graphs.num_replays == 2 * sum(len(chunks[a.chunk]) for a in order)


ORDER = build_schedule("1f1b", 3, 6).orders[0]
KINDS: dict[str, list[Kind]] = {
    "a value without a gradient in front": [Kind(), Kind(sign=True), Kind()],
    "the same, captured first in the backward": [Kind(), Kind(), Kind(sign=True)],
    "no gradient at all": [Kind(), Kind(still=True), Kind(side=False)],
    "none in the whole chunk": [Kind(still=True), Kind(still=True, sign=True)],
}


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_outputs_without_a_gradient_stand_where_they_stand(kinds, te_device):
    """Its memory for gradients of outputs is shared by the outputs that have one, whatever stands between them."""
    eager, found, graphs = eager_and_graphed([kinds], ORDER)
    assert all(same(eager, each) for each in found)
    assert graphs.num_graphs == 2 * 6 * len(kinds)
    assert graphs.num_replays == 2 * 6 * sum(1 if kind.still else 2 for kind in kinds)


@pytest.mark.slow
def test_it_runs_each_forward_on_the_inputs_that_lie_at_its_place(te_source, tmp_path, monkeypatch):
    """Its queue shares what is shared already: every module is called with the very tensors that it was given."""
    called: list[tuple[int, tuple[int, ...]]] = []
    real = RegionModule.forward

    def forward(self: RegionModule, *inputs: torch.Tensor) -> Any:
        called.append((self.call.index, tuple(map(id, inputs))))
        return real(self, *inputs)

    monkeypatch.setattr(RegionModule, "forward", forward)
    order, sizes = build_schedule("interleaved_1f1b", 2, 6, 2).orders[0], [2, 3]
    with on_a_cpu(te_source, tmp_path):
        program = program_of([[True] * n for n in sizes])
        graphs = TransformerEngineGraphs(program, order, CPU)
        given = graphs.arguments()
        monkeypatch.setattr(graphs, "arguments", lambda: given)
        graphs.capture()
    number = numbered(order)
    expected = [
        (
            sum(sizes[: a.chunk]) + layer,
            tuple(
                map(id, given.sample_args[sample_index(order, sizes, a.chunk, number[a.chunk, a.microbatch], layer)])
            ),
        )
        for a in order
        if a.kind == "F"
        for layer in range(sizes[a.chunk])
    ]
    assert called[-len(expected) :] == expected


# ---- what the plan says of it


# ---- what it does, in an engine


# ---- mutants: each is wrong in a way that the real code does not report


def not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of inputs stay where the next backward may write."""
    monkeypatch.setattr(backend._Kept, "apply", staticmethod(lambda x: x))


def first_microbatch_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransformerEngineGraphs, "before_forward", lambda self, action: None)


def backwards_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured as if each backward came directly after its forward."""
    monkeypatch.setattr(backend, "signed_order", lambda order: [1, -1] * (len(order) // 2))


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [not_copied, first_microbatch_for_all, backwards_first])
def test_a_mistake_shows_as_numbers(mutant, te_device, monkeypatch):
    mutant(monkeypatch)
    kinds = [Kind(), Kind(side=False), Kind(side=False), Kind()]  # the last one's gradient of the side waits long
    before, found, _ = eager_and_graphed([kinds], GPIPE_ORDER)
    assert not any(same(before, each) for each in found)


GPIPE_ORDER = build_schedule("gpipe", 1, 3).orders[0]


# ---- the hooks of the buffers, other versions, and a GPU


def test_gradients_of_no_step_stay_where_they_are_and_reach_no_buffer():
    engine, _ = engine_of("gpt2", None)
    with engine:
        slot = engine.optimizer.buffers.slots[0]
        before, weight = slot.main_grad.clone(), slot.parameters[0]
        with engine.optimizer.buffers.deaf():
            weight.sum().backward()
        assert weight.grad is not None
        assert torch.equal(slot.main_grad, before)
        weight.grad = None
        weight.sum().backward()
        assert weight.grad is None
        assert torch.equal(slot.main_grad, torch.ones_like(before))


def test_without_a_network_there_is_a_reason_and_no_wait(tmp_path, monkeypatch):
    for name, value in {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "http://127.0.0.1:9",
        "PIP_FIND_LINKS": "",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NotThere, match=r"pip fetched no wheel.*transformer-engine"):
        fetched_source(tmp_path)


def test_a_version_without_a_keyword_that_is_given_is_too_old():
    with pytest.raises(PlanError, match=r"too old: .* does not accept .*clone_param_grads_on_return"):
        backend._check_keywords({"modules": None, "sample_args": None, "_order": None})
