"""The real make_graphed_callables, from its source: what it asks, and what it does with what it is given.

Its code runs on a CPU, with graphs that are recorded op by op (tests.tools.recorded_graphs); nothing of it is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from passes.lower import lower
from passes.ops.axis import AxisHandle
from planner import PlanError, plan
from planner.pipeline.schedule import Action, build_schedule
from runtime import Engine
from runtime.cuda_graphs import transformer_engine as backend
from runtime.cuda_graphs.te_arguments import numbered, sample_index
from runtime.cuda_graphs.te_modules import RegionModule
from runtime.cuda_graphs.transformer_engine import TransformerEngineGraphs
from runtime.distributed.launch import launch
from runtime.optimizer.buffers import GradientBuffers
from tests.models import families
from tests.tools.graphed_runs import SCOPES, Trained, differences, engine_of, spec_of, train
from tests.tools.paths import ORACLES
from tests.tools.recorded_graphs import on_a_cpu
from tests.tools.region_stages import program_of, same, walk
from tests.tools.transformer_engine_source import checks, parameters

CPU = torch.device("cpu")
CASES = [c for c in json.loads((ORACLES / "schedules.json").read_text())["cases"] if c.get("num_layers_per_chunk")]
GPIPE = {"pipeline": {"schedule": "gpipe"}}
INTERLEAVED = {"pipeline": {"schedule": "interleaved_1f1b"}}


# ---- what it asks


def test_its_parameters_are_those_that_are_recorded(te_source, te_facts):
    recorded = {p["name"]: (p["kind"], p["default"]) for p in te_facts["parameters"]}
    found = parameters(te_source)
    assert {name: found.get(name) for name in recorded} == recorded
    assert list(found)[:2] == ["modules", "sample_args"]


@pytest.mark.parametrize("function", ["_make_graphed_callables", "make_graphed_callables"])
def test_each_of_its_checks_is_one_that_is_recorded(te_source, te_facts, function):
    assert checks(te_source, function) == te_facts["checks"][function].keys()


# ---- what it does, on stages made by hand


def captured(chunks: list[list[bool]], order: tuple[Action, ...]) -> tuple[Any, TransformerEngineGraphs]:
    program = program_of(chunks)
    graphs = TransformerEngineGraphs(program, order, CPU)
    graphs.capture()
    return program, graphs


@pytest.mark.slow
def test_every_schedule_of_the_oracle_gives_what_it_gives_eagerly(te_source, tmp_path):
    """Regions of two kinds, one of which has no gradient for an input that the other has one for."""
    for case in CASES:
        order = tuple(Action(*step) for step in case["steps"])
        chunks = [[bool((chunk + i) % 2) for i in range(n)] for chunk, n in enumerate(case["num_layers_per_chunk"])]
        with on_a_cpu(te_source, tmp_path):
            program, graphs = captured(chunks, order)
            eager = walk(program, order)
            graphs.is_on = True
            for _ in range(2):
                assert same(eager, walk(program, order, graphs.before_forward)), case["id"]
        assert graphs.num_replays == 2 * sum(len(chunks[a.chunk]) for a in order)


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


@pytest.mark.parametrize("name", ["gpt2", "t5"])
@pytest.mark.parametrize(
    ("mesh", "sections"), [({"pp": 2}, {}), ({"pp": 2}, GPIPE), ({"pp": 2, "vpp": 2}, INTERLEAVED), ({}, {})]
)
def test_the_plan_counts_its_graphs_and_static_inputs(name, mesh, sections):
    entry = families.build(name)
    spec = spec_of(entry, ["attn", "mlp"], mesh=mesh, **sections)
    spec["cuda_graphs"]["impl"] = "transformer_engine"
    planned = plan(entry.model, spec)
    for rank, order in enumerate(planned.schedule.actions):
        given = TransformerEngineGraphs(lower(planned, rank, CPU), order, CPU).arguments()
        rows = [row for row in planned.graph_slots if row.pp_rank == rank]
        assert sum(row.num_graphs for row in rows) == 2 * len(given.sample_args)
        inputs = {id(t): t.nbytes for sample in given.sample_args for t in sample}
        assert sum(row.input_bytes for row in rows) == sum(inputs.values())


# ---- what it does, in an engine


@contextmanager
def graphed(name: str, scope: list[str], source: str, folder: Path, **sections: Any) -> Iterator[Any]:
    """An engine whose regions the real code captured."""
    with on_a_cpu(source, folder), (made := engine_of(name, scope, **sections))[0] as engine:
        yield engine, made[1], attach(engine)


def attach(engine: Engine) -> TransformerEngineGraphs:
    order = engine.plan.schedule.actions[engine.groups.pp_rank]
    deaf = engine.optimizer.buffers.deaf
    graphs = TransformerEngineGraphs(engine.program, order, engine.groups.device, no_gradient_hooks=deaf)
    engine.graphs = None
    engine.executor.before_forward = graphs.before_forward
    graphs.capture()
    graphs.is_on = True
    return graphs


def close(a: Trained, b: Trained) -> bool:
    """To the last few bits: addends of an input's gradient meet in another order."""
    pairs = [(x[1][n], y[1][n]) for x, y in zip(a[0], b[0], strict=True) for n in x[1]]
    pairs += [(a[1][n], b[1][n]) for n in a[1]]
    losses = all(abs(x[0] - y[0]) < 1e-12 for x, y in zip(a[0], b[0], strict=True))
    return losses and all(torch.allclose(x, y, rtol=1e-10, atol=1e-13) for x, y in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("sections", [{}, GPIPE], ids=["one-by-one", "all-in-flight"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert-classes", "t5", "falcon-new", "twice", "frozen"])
def test_regions_give_what_they_give_eagerly(name, sections, te_source, tmp_path):
    with (made := engine_of(name, None, **sections))[0] as engine:
        eager = train(engine, made[1])
    for scope in SCOPES:
        with graphed(name, scope, te_source, tmp_path, **sections) as (engine, entry, graphs):
            found = train(engine, entry)
            assert close(eager, found), scope
            goes_on = any(module.call.through for module in graphs._modules)
            assert goes_on or differences(eager, found) == [], scope
            num_regions = len(graphs._modules)
            assert graphs.num_graphs == 2 * num_regions * (4 if sections else 1)
            assert graphs.num_replays == 2 * num_regions * 4 * 3


@pytest.mark.slow
def test_a_capture_leaves_no_gradient_and_can_be_made_again(te_source, tmp_path):
    with (made := engine_of("gpt2", None))[0] as engine:
        eager = train(engine, made[1])
    with graphed("gpt2", ["attn"], te_source, tmp_path) as (engine, entry, graphs):
        trained = [p for stage in engine.program.stages for p in stage.module.parameters()]
        assert all(p.grad is None for p in trained)
        graphs.capture()
        assert differences(eager, train(engine, entry)) == []


@pytest.mark.slow
def test_an_evaluation_runs_eagerly(te_source, tmp_path):
    with graphed("gpt2", ["attn"], te_source, tmp_path) as (engine, entry, graphs):
        engine.evaluate(entry.batch(8, 0))
        assert graphs.num_replays == 0


def graphed_ranks(layouts: list[Any], source: str, folder: str) -> list[tuple[bool, bool]]:
    """On this rank, for each layout: whether it gives what it gives eagerly, and counts the same collectives."""
    found = []
    for mesh, sections in layouts:
        with (made := engine_of("llama", None, mesh=mesh, **sections))[0] as engine:
            eager, counts = train(engine, made[1], 2), counted(engine)
        own = Path(folder) / str(engine.groups.rank)
        own.mkdir(exist_ok=True)
        with graphed("llama", ["attn", "mlp"], source, own, mesh=mesh, **sections) as (engine, entry, graphs):
            assert graphs.num_graphs > 0
            found.append((close(eager, train(engine, entry, 2)), counts == counted(engine)))
    return found


def counted(engine: Engine) -> Any:
    axes: dict[str, AxisHandle] = engine.program.axes
    return {name: (axis.counts, axis.bytes) for name, axis in axes.items()}


LAYOUTS = [
    ({"tp": 2, "pp": 2}, {}),
    ({"tp": 2, "dp": 2}, {"tensor_parallel": {"sequence_parallel": True}, "optimizer": {"bucket_size": 5000}}),
    ({"tp": 2, "pp": 2, "vpp": 2}, INTERLEAVED),
]


@pytest.mark.slow
def test_layouts_give_what_they_give_eagerly(te_source, tmp_path):
    for found in launch(graphed_ranks, 4, LAYOUTS, te_source, str(tmp_path), timeout_seconds=280):
        assert found == [(True, True)] * len(LAYOUTS)


# ---- mutants: each is wrong in a way that the real code does not report


def not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of inputs stay where the next backward may write."""
    monkeypatch.setattr(backend._Kept, "apply", staticmethod(lambda x: x))


def hooks_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks of the buffers take the gradients of the capture away: its graphs then have none for weights."""
    monkeypatch.setattr(GradientBuffers, "deaf", lambda self: torch.enable_grad())


def first_microbatch_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransformerEngineGraphs, "before_forward", lambda self, action: None)


def backwards_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured as if each backward came directly after its forward."""
    monkeypatch.setattr(backend, "signed_order", lambda order: [1, -1] * (len(order) // 2))


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [not_copied, hooks_listen, first_microbatch_for_all, backwards_first])
def test_a_mistake_shows_as_numbers(mutant, te_source, tmp_path, monkeypatch):
    name = {not_copied: "t5", backwards_first: "gpt2"}.get(mutant, "llama")
    with (made := engine_of(name, None, **GPIPE))[0] as engine:
        eager = train(engine, made[1], 1)
    mutant(monkeypatch)
    with graphed(name, ["attn", "mlp"], te_source, tmp_path, **GPIPE) as (engine, entry, _):
        assert not close(eager, train(engine, entry, 1))


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


def test_a_version_without_a_keyword_that_is_given_is_too_old():
    with pytest.raises(PlanError, match=r"too old: .* knows no .*clone_param_grads_on_return"):
        backend._check_keywords({"modules": None, "sample_args": None, "_order": None})


@pytest.mark.gpu
@pytest.mark.parametrize("sections", [{}, GPIPE], ids=["one-by-one", "all-in-flight"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_regions_on_a_gpu_give_what_they_give_eagerly(name, sections):
    pytest.importorskip("transformer_engine.pytorch", exc_type=(ImportError, OSError))
    runs = []
    for impl in ("none", "transformer_engine"):
        entry = families.build(name)
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
