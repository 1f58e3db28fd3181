"""Each check turns red for a pass that breaks what it proves, and says where; whole passes break none."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from passes import lower as lowering
from passes.base import LowerContext, Pass, PassError, StageGraph
from passes.lower import PASSES
from passes.ops import collectives
from passes.ops.parameter_gate import await_bucket
from passes.types.types import P
from planner import Plan, plan
from planner.lower import lower
from tests.models.own_functions import FUNCTIONS
from tests.models.plannable import build, spec_of
from tests.models.tiny import planned

aten = torch.ops.aten
Rewrite = Callable[[StageGraph, LowerContext], None]


@pytest.fixture
def mlps() -> Plan:
    return planned("mlp mlp", 0.1, tp=2, pp=2)


@pytest.fixture
def attention() -> Plan:
    return planned("attention", tp=2)


def broken(monkeypatch: pytest.MonkeyPatch, name: str, then: Rewrite | None) -> None:
    """The pass ``name`` is followed by ``then``; with None it does nothing."""

    def replaced(step: Pass) -> Pass:
        def run(stage: StageGraph, context: LowerContext) -> None:
            if then is not None:
                step.run(stage, context)
                then(stage, context)

        run.__name__ = step.name
        return replace(step, run=run) if step.name == name else step

    monkeypatch.setattr(lowering, "PASSES", tuple(map(replaced, PASSES)))


def caught(plan: Plan, *, rank: int = 0, device: str = "cpu") -> PassError:
    with pytest.raises(PassError) as error:
        lower(plan, rank, device, thorough=True)
    return error.value


def find(stage: StageGraph, target: object) -> fx.Node:
    return next(n for n in stage.graph.nodes if n.target is target)


def take_out(target: object) -> Rewrite:
    def rewrite(stage: StageGraph, context: LowerContext) -> None:
        node = find(stage, target)
        node.replace_all_uses_with(node.all_input_nodes[0])
        stage.graph.erase_node(node)

    return rewrite


@pytest.mark.parametrize("target", [collectives.f, collectives.g, collectives.g_f])
def test_a_missing_collective_leaves_a_reader_with_another_type(mlps, monkeypatch, target):
    broken(monkeypatch, "insert_collectives", take_out(target))
    error = caught(mlps)
    assert (error.name, error.fact) == ("insert_collectives", "readers_get_the_type_that_they_want")


def test_a_partial_sum_at_a_reader_that_wants_a_whole_value_is_told_with_the_line_of_the_user(mlps, monkeypatch):
    broken(monkeypatch, "insert_collectives", take_out(collectives.g))
    assert_expected_inline(
        str(caught(mlps)),
        """\
after the pass insert_collectives this does not hold of stage 0: readers get the type that they want
  node:     linear_3 = aten.add.Tensor(linear_2, p_blocks_0_down_bias)
  at:       blocks.0.down   (tiny.py:24, `return x + self.dropout(self.down(F.gelu(self.up(x))))`)
  expected: linear_2 in type I
  found:    type P
This is a bug in meshwright, not of your model or spec: please report it, with this message.""",
    )


def test_a_value_without_a_type_is_found(mlps, monkeypatch):
    broken(monkeypatch, "insert_collectives", lambda stage, _: find(stage, aten.gelu.default).meta.pop("placement"))
    assert caught(mlps).violation.found == "no type"


def test_a_partial_sum_that_would_be_sent_is_found(mlps, monkeypatch):
    def partial(stage: StageGraph, context: LowerContext) -> None:
        sent = stage.env[stage.sends[0]]
        sent.meta["placement"] = P

    broken(monkeypatch, "insert_collectives", partial)
    error = caught(mlps)
    assert error.violation.node is not None
    assert error.violation.node.op == "output"


def test_a_loss_over_all_classes_does_not_fit_its_part_of_the_logits(attention, monkeypatch):
    broken(monkeypatch, "localize", None)
    assert caught(attention).fact == "values_have_their_local_shape"


@pytest.mark.parametrize("target", [aten.reshape.default, aten.split_with_sizes.default])
def test_a_size_that_stayed_global_is_found(attention, monkeypatch, target):
    def forgotten(stage: StageGraph, context: LowerContext) -> None:
        node = find(stage, target)
        node.update_arg(1, context.lowering.program.node(node.meta["origin"]).args[1])

    broken(monkeypatch, "localize", forgotten)
    error = caught(attention)
    assert (error.name, error.fact) == ("localize", "values_have_their_local_shape")


def test_a_wrong_local_size_that_runs_is_found(attention, monkeypatch):
    def halved(stage: StageGraph, context: LowerContext) -> None:
        node = next(n for n in stage.graph.nodes if n.target is aten.reshape.default and len(n.args[1]) == 4)
        node.update_arg(1, [2, 4, 2, 2])

    broken(monkeypatch, "localize", halved)
    violation = caught(attention).violation
    assert (violation.expected, violation.found) == ("its local shape [2, 4, 1, 4]", "[2, 4, 2, 2]")


def test_shapes_are_tried_only_where_a_lowering_is_thorough(attention, monkeypatch):
    broken(monkeypatch, "localize", lambda stage, _: find(stage, aten.reshape.default).update_arg(1, [2, 4, 2, 2]))
    assert lower(attention, 0).stages
    assert caught(attention).fact == "values_have_their_local_shape"


def test_a_draw_from_the_default_generator_is_found(mlps, monkeypatch):
    broken(monkeypatch, "name_streams", None)
    error = caught(mlps)
    assert error.fact == "no_op_draws_from_the_default_generator"
    assert error.violation.node is not None
    assert error.violation.node.target is aten.dropout.default


def test_an_op_on_the_device_of_capture_is_found(mlps, monkeypatch):
    broken(monkeypatch, "place_devices", None)
    error = caught(mlps, device="meta")
    assert (error.fact, error.violation.found) == ("no_op_names_another_device", "device cpu")


@pytest.mark.parametrize("name", [step.name for step in PASSES])
def test_an_unsound_graph_is_found_after_every_pass(mlps, monkeypatch, name):
    def reversed_(stage: StageGraph, context: LowerContext) -> None:
        first, last = (next(n for n in nodes if n.op == "call_function") for nodes in _both_ways(stage.graph))
        last.append(first)

    broken(monkeypatch, name, reversed_)
    error = caught(mlps)
    assert (error.name, error.fact) == (name, "is_sound")


def _both_ways(graph: fx.Graph) -> tuple[fx.graph._node_list, fx.graph._node_list]:
    return graph.nodes, reversed(graph.nodes)  # pyright: ignore[reportReturnType]


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["llama, one key head", "sureness", "normed queries"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_whole_passes_break_no_check(model, sequence_parallel):
    cut = {"sequence_parallel": sequence_parallel, "vocabulary_multiple": 8}
    made = plan(build(model), spec_of(model, mesh={"tp": 2}, tensor_parallel=cut))
    assert lower(made, 1, thorough=True).stages


@pytest.mark.thorough
def test_items_of_a_function_that_was_not_tried_break_no_check():
    model = FUNCTIONS["own-quantised"]()
    made = plan(model.model, {"mesh": {"tp": 2}, "batch": {"global": 4, "micro": 2}}, model.batch(2, 0))
    assert lower(made, 1, thorough=True).stages


def in_buckets() -> Plan:
    """On two dp ranks, with several buckets."""
    return plan(build("gpt"), spec_of("gpt", mesh={"dp": 2}, optimizer={"bucket_size": 2000}))


def test_a_parameter_that_is_read_before_its_bucket_is_here_is_told(monkeypatch):
    made = in_buckets()

    def later(stage: StageGraph, context: LowerContext) -> None:
        wait = find(stage, await_bucket)
        next(n for n in reversed(stage.graph.nodes) if n.op == "call_function").append(wait)

    for then in (later, None):
        broken(monkeypatch, "await_parameters", then)
        error = caught(made)
        assert (error.name, error.fact) == ("await_parameters", "parameters_are_awaited")
        monkeypatch.undo()


@pytest.mark.thorough
def test_a_stage_awaits_each_bucket_once_and_in_the_order_of_its_gathers():
    made = in_buckets()
    (stage,) = lower(made, 0).stages
    awaited = [n.args[1:] for n in stage.module.graph.find_nodes(op="call_function", target=await_bucket)]
    buckets = [(0, i) for i in range(len(made.to_run()[1].buffers[0].layout.buckets))]
    assert len(buckets) > 1
    assert sorted(awaited) == buckets
    assert awaited == buckets[::-1]  # the backward fills the first bucket first, and the forward reads it last


def with_regions() -> Plan:
    return plan(build("gpt"), spec_of("gpt", mesh={"tp": 2}, cuda_graphs={"impl": "emulate", "scope": ["attn", "mlp"]}))


@pytest.mark.thorough
def test_a_region_that_is_not_cut_is_told(monkeypatch):
    broken(monkeypatch, "cut_regions", None)
    error = caught(with_regions())
    assert (error.name, error.fact) == ("cut_regions", "regions_are_those_of_the_plan")


def test_a_value_that_crosses_beside_the_plan_is_told(monkeypatch):
    def forget(stage: StageGraph, context: LowerContext) -> None:
        call = getattr(
            stage.root, str(next(n for n in stage.graph.nodes if str(n.target).startswith("region_")).target)
        )
        call.inputs = call.inputs[1:]

    broken(monkeypatch, "cut_regions", forget)
    error = caught(with_regions())
    assert (error.name, error.fact) == ("cut_regions", "regions_are_those_of_the_plan")
    assert "to cross, in" in str(error)


@pytest.mark.thorough
def test_an_exchange_over_cp_that_was_not_put_in(monkeypatch):
    made = plan(build("gpt"), spec_of("gpt", mesh={"cp": 2}))
    broken(monkeypatch, "exchange_sequence", None)
    error = caught(made)
    assert (error.name, error.fact) == ("exchange_sequence", "no_cp_placeholder_is_left")
