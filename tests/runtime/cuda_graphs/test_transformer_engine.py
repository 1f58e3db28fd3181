"""The real make_graphed_callables, from its source: what it asks, and what it does with what it is given.

Its code runs on a CPU, with graphs that are recorded op by op (tests.tools.recorded_graphs); nothing of it is kept.
"""

import gc
import importlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from passes.ops.axis import AxisHandle
from planner import PlanError, plan
from planner.lower import lower
from planner.pipeline.schedule import Action, build_schedule
from runtime import Engine
from runtime.cuda_graphs import transformer_engine
from runtime.cuda_graphs import transformer_engine as backend
from runtime.cuda_graphs.te_arguments import numbered, sample_index
from runtime.cuda_graphs.transformer_engine import RegionModule, TransformerEngineGraphs
from runtime.distributed.faults.failure import StepError
from runtime.engine import build
from runtime.optimizer.buffers import GradientBuffers
from tests.models import families
from tests.tools.captures import plan_again
from tests.tools.graphed_runs import Trained, engine_of, spec_of, train
from tests.tools.limits import HANG_SECONDS
from tests.tools.paths import ORACLES
from tests.tools.ranks import Ranks
from tests.tools.recorded_graphs import Device, on_a_cpu, on_a_gpu
from tests.tools.region_stages import Kind, Walked, program_of, same, walk
from tests.tools.transformer_engine_source import (
    VARIABLE,
    NotThere,
    Source,
    checks,
    fetched_source,
    local_source,
    parameters,
)

CPU = torch.device("cpu")
GPIPE = {"pipeline": {"schedule": "gpipe"}}
INTERLEAVED = {"pipeline": {"schedule": "interleaved_1f1b"}}
SEQUENCE = {"tensor_parallel": {"sequence_parallel": True}}


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


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["gpt2", "t5"])
@pytest.mark.parametrize(
    ("mesh", "sections"), [({"pp": 2}, {}), ({"pp": 2}, GPIPE), ({"pp": 2, "vpp": 2}, INTERLEAVED), ({}, {})]
)
def test_the_plan_counts_its_graphs_and_static_inputs(name, mesh, sections):
    entry = families.build(name)
    spec = spec_of(entry, ["attn", "mlp"], mesh=mesh, **sections)
    spec["cuda_graphs"]["impl"] = "transformer_engine"
    planned = plan_again(entry.model, spec)
    for rank, order in enumerate(planned.schedule.orders):
        given = TransformerEngineGraphs(lower(planned, rank, CPU), order, CPU).arguments()
        rows = [row for row in planned.graph_slots if row.pp_rank == rank]
        assert sum(row.num_graphs for row in rows) == 2 * len(given.sample_args)
        inputs = {id(t): t.nbytes for sample in given.sample_args for t in sample}
        assert sum(row.input_bytes for row in rows) == sum(inputs.values())


# ---- what it does, in an engine


def graphed(device: Device, name: str, scope: list[str], **sections: Any) -> tuple[Engine, families.Entry]:
    """An engine whose regions the real code captures before its first step."""
    entry = families.build(name)
    if "dropout" in name:
        entry.model.train()
    spec = spec_of(entry, scope, **sections)
    spec["cuda_graphs"]["impl"] = "transformer_engine"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "check_backend", lambda impl, device: None)
        engine = Engine(plan_again(entry.model, spec), timeout_seconds=HANG_SECONDS)
    device.random = engine.program.random
    engine.capture_graphs()
    return engine, entry


def close(a: Trained, b: Trained) -> bool:
    """To the last few bits: addends of an input's gradient meet in another order, and the gradient of a weight is made
    by autograd before it is added, not added within its product."""
    pairs = [(x[1][n], y[1][n]) for x, y in zip(a[0], b[0], strict=True) for n in x[1]]
    pairs += [(a[1][n], b[1][n]) for n in a[1]]
    losses = all(abs(x[0] - y[0]) < 1e-12 for x, y in zip(a[0], b[0], strict=True))
    return losses and all(torch.allclose(x, y, rtol=1e-10, atol=1e-13) for x, y in pairs)


def eager(name: str, steps: int, **sections: Any) -> Trained:
    with (made := engine_of(name, None, **sections))[0] as engine:
        return train(engine, made[1], steps)


def assert_counts(engine: Engine, steps: int) -> None:
    """Graphs, replays and static inputs of this rank are those of the plan."""
    graphs, rank = engine.graphs, engine.groups.place["pp"]
    assert isinstance(graphs, TransformerEngineGraphs)
    rows = [row for row in engine.plan.graph_slots if row.pp_rank == rank]
    assert graphs.num_graphs == sum(row.num_graphs for row in rows) > 0
    assert graphs.num_replays == steps * sum(row.num_replays for row in rows)
    assert graphs.static_bytes == sum(row.input_bytes for row in rows)


ENGINES: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "dropout, one by one": ("gpt2-dropout", ["attn"], {}),
    "dropout, all in flight": ("gpt2-dropout", [], GPIPE),
    "several readers of an input": ("t5", ["attn", "mlp"], GPIPE),
    "weights that run twice": ("twice", ["attn", "mlp"], {}),
}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(("name", "scope", "sections"), ENGINES.values(), ids=ENGINES)
def test_regions_give_what_they_give_eagerly(name, scope, sections, te_device):
    before = eager(name, 2, **sections)
    with (made := graphed(te_device, name, scope, **sections))[0] as engine:
        found = train(engine, made[1], 2)
        assert close(before, found)
        assert_counts(engine, 2)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_capture_leaves_no_gradient_and_can_be_made_again_and_an_evaluation_runs_eagerly(te_device):
    before = eager("gpt2-dropout", 1)
    engine, entry = graphed(te_device, "gpt2-dropout", ["attn"])
    with engine:
        engine.evaluate(entry.batch(8, 0))
        assert engine.graphs.num_replays == 0
        engine.graphs.capture()
        trained = [p for stage in engine.program.stages for p in stage.module.parameters()]
        assert all(p.grad is None for p in trained)
        engine.capture_graphs()
        assert close(before, train(engine, entry, 1))


def graphed_ranks(source: Source, folder: str, sections: dict[str, Any]) -> tuple[bool, bool]:
    """On this rank: whether it gives what it gives eagerly, and counts the same collectives."""
    with (made := engine_of("llama", None, **sections))[0] as engine:
        before, counts = train(engine, made[1], 2), counted(engine)
    own = Path(folder) / str(engine.groups.rank)
    own.mkdir()
    with on_a_cpu(source, own) as device, (made := graphed(device, "llama", ["attn", "mlp"], **sections))[0] as engine:
        found = close(before, train(engine, made[1], 2)), counts == counted(engine)
        assert_counts(engine, 2)
    return found


def counted(engine: Engine) -> Any:
    axes: dict[str, AxisHandle] = engine.program.axes
    return {name: (axis.counts, axis.bytes) for name, axis in axes.items()}


@pytest.mark.thorough
@pytest.mark.slow
def test_layouts_give_what_they_give_eagerly(te_running, tmp_path):
    sections = {"mesh": {"tp": 2, "pp": 2, "vpp": 2}} | INTERLEAVED | SEQUENCE
    for found in Ranks(4, "processes").run(graphed_ranks, te_running, str(tmp_path), sections):
        assert found == (True, True)


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


def hooks_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks of the buffers take the gradients of the capture away: its graphs then have none for weights."""
    monkeypatch.setattr(GradientBuffers, "deaf", lambda self: torch.enable_grad())


def stale_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay goes on where the generators are."""
    monkeypatch.setattr(RegionModule, "put_generators", lambda self: None)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("mutant", [hooks_listen, stale_masks])
def test_a_mistake_shows_as_numbers_in_an_engine(mutant, te_device, monkeypatch):
    before = eager("gpt2-dropout", 1)
    mutant(monkeypatch)
    with (made := graphed(te_device, "gpt2-dropout", ["attn"]))[0] as engine:
        assert not close(before, train(engine, made[1], 1))


@pytest.mark.thorough
@pytest.mark.slow
def test_a_generator_that_its_tracker_does_not_hold_draws_in_no_graph(te_device, monkeypatch):
    tracker = sys.modules[transformer_engine.DISTRIBUTED].CudaRNGStatesTracker
    monkeypatch.setattr(tracker, "set_states", lambda self, states: None)
    engine, entry = graphed(te_device, "gpt2-dropout", ["attn"])
    with pytest.raises(StepError, match="not registered"), engine:
        engine.train_step(entry.batch(8, 0))
    assert gc.isenabled()  # which the real code had switched off


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


@contextmanager
def its_function(folder: Path) -> Iterator[None]:
    """Of the installed package, or of a source that is given; skips without either."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as reason:
        source = local_source()
        if source is None:
            pytest.skip(f"{reason}; {VARIABLE} is not set")
        with on_a_gpu(source, folder), pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "check_backend", lambda impl, device: None)
            yield
    else:
        yield


@pytest.mark.gpu
@pytest.mark.parametrize("sections", [{}, GPIPE], ids=["one-by-one", "all-in-flight"])
@pytest.mark.parametrize("name", ["gpt2", "gpt2-dropout", "llama", "t5"])
def test_regions_on_a_gpu_give_what_they_give_eagerly(name, sections, tmp_path):
    runs = []
    with its_function(tmp_path):
        for impl in ("none", "transformer_engine"):
            entry = families.build(name)
            if "dropout" in name:
                entry.model.train()
            spec = spec_of(entry, ["attn", "mlp"], **sections)
            spec["cuda_graphs"] = {"impl": impl} if impl == "none" else spec["cuda_graphs"] | {"impl": impl}
            with Engine(plan(entry.model, spec), device="cuda:0") as engine:
                if impl != "none":
                    assert isinstance(engine.graphs, TransformerEngineGraphs)
                    engine.capture_graphs()
                runs.append(train(engine, entry))
                if impl != "none":
                    assert engine.graphs.num_replays > 0
    assert close(*runs)
