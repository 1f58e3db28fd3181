"""Which gradients of weights can wait: the plan names those of the products that the lowered graphs have."""

from typing import Any

import pytest
from torch import fx

from passes.own_linears import PRODUCTS
from planner.lower import lower
from planner.tables.build import AT_ONCE, BY_AUTOGRAD, CAN_WAIT, IN_GRAPH, weight_gradients
from planner.trace.lowered import Lowered
from tests.models import families
from tests.models.tiny import planned
from tests.tools.captures import plan_again
from tests.tools.graphed_runs import spec_of

HOW = {"weight_gradients": CAN_WAIT, "weight_gradients_at_once": AT_ONCE}  # by the handle of a product


def in_modules(made: Any) -> dict[str, set[str]]:
    """By how, the parameters that products of the lowered stages add gradients of."""
    found: dict[str, set[str]] = {CAN_WAIT: set(), IN_GRAPH: set(), AT_ONCE: set()}
    for pp in range(made.mesh.pp):
        for stage in lower(made, made.mesh.rank_of(pp=pp)).stages:
            names = {attribute: fqn for fqn, attribute in stage.attributes.items()}
            trained = {p.fqn for p in stage.parameters if p.requires_grad}
            regions = [(c.module.graph, g) for c, g in region_graphs(stage.module)]
            for graph, given in [(stage.module.graph, None), *regions]:
                for node in graph.nodes:
                    if node.target in PRODUCTS and node.args[0].meta.get("grad"):
                        held = [n for n in node.all_input_nodes if name_of(n, given) in names]
                        how = IN_GRAPH if given is not None else HOW[node.args[-1].target]
                        found[how] |= {names[name_of(n, given)] for n in held} & trained
    return found


def region_graphs(module: fx.GraphModule) -> list[tuple[Any, dict[str, str]]]:
    """Each region with the attribute that each of its placeholders stands for."""
    found = []
    for node in module.graph.nodes:
        if getattr(node.target, "__name__", "") == "run_region":
            call: Any = getattr(module, node.args[0].target)
            given = [n.target if n.op == "get_attr" else "" for n in (*node.args[1], *node.args[2])]
            placeholders = call.module.graph.find_nodes(op="placeholder")
            found.append((call, dict(zip([p.name for p in placeholders], given, strict=True))))
    return found


def name_of(node: fx.Node, given: dict[str, str] | None) -> str:
    return str(node.target) if given is None else given.get(node.name, "")


def decided(made: Any) -> dict[str, set[str]]:
    rows = weight_gradients(Lowered(*made.to_run(), made.regions))
    return {how: {row.name for row in rows if row.how == how} for how in (CAN_WAIT, IN_GRAPH, AT_ONCE)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", [{}, {"tp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_what_can_wait_is_what_products_of_the_stages_add(mesh):
    made = planned("mlp attention mlp", 0.1, **mesh)
    assert decided(made) == in_modules(made)
    assert decided(made)[CAN_WAIT]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scope", [None, ["attn"], ["mlp"], []], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "frozen"])
def test_in_graphs_nothing_waits(name, scope):
    entry = families.build(name)
    made = plan_again(entry.model, spec_of(entry, scope))
    assert decided(made) == in_modules(made)
    assert bool(decided(made)[IN_GRAPH]) == (scope is not None)


def test_what_autograd_makes_has_a_reason():
    rows = weight_gradients(Lowered(*planned("mlp mlp").to_run()))
    reasons = {row.name: row.reason for row in rows if row.how == BY_AUTOGRAD}
    assert reasons
    assert all(reason for reason in reasons.values())


def test_a_plan_with_w_says_what_waits_and_why_others_do_not():
    entry = families.build("gpt2")
    spec = spec_of(entry, ["mlp"], mesh={"pp": 2}, pipeline={"schedule": "zero_bubble"})
    notes = [row.what for row in plan_again(entry.model, spec).diagnostics if row.where == "pipeline.schedule"]
    waiting, *others = [note for note in notes if "wait for W" in note or "computed with the backward" in note]
    assert waiting.startswith("gradients of ")
    assert any("in CUDA graphs: transformer.h.*.mlp" in note for note in others)
    assert any("as aten.layer_norm reads it: transformer.h.*.ln_1.weight" in note for note in others)
