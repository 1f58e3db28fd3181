"""Models of all kinds on the layouts that matter: loss, every gradient and three clipped updates of one process."""

from collections.abc import Iterable
from itertools import cycle, product
from typing import Any

import pytest

from tests.models.counted import MODELS as COUNTED
from tests.models.families import FAMILIES
from tests.models.held_weights import HELD_WEIGHTS
from tests.models.own import MODELS
from tests.models.own_functions import FUNCTIONS
from tests.models.signals import SIGNALS
from tests.tools.laboratory import Case, Lab, name_of

TP2_PP2, ALL_AXES = {"tp": 2, "pp": 2}, {"tp": 2, "pp": 2, "dp": 2}
ONE_RANK = {"dp": 1}
# The finest cuts of each axis alone, and all axes at once, by turns; what lies between is in test_layouts.
OTHERS = [{"tp": 4}, {"pp": 4}, ALL_AXES]
OF_LOSSES = [{"pp": 2, "dp": 2}, {"tp": 2, "dp": 2}]  # counted over dp, beside what cuts a loss
LOSSES = sorted(name for name in MODELS if "loss" in name or "class-weights" in name)
# What these add is in the graph and not in the mesh: one layout each.
UNUSUAL_GRAPHS = (
    "diffllama", "experts", "norm-a-head", "norm-of-heads", "slots", "state-space", "stopped-gradients", "checkpoints",
)  # fmt: skip
ELSEWHERE = {
    "gpt", "gpt2", "llama", "bert", "gpt-5-layers",  # test_layouts
    "gpt2-8-layers", "llama-8-layers",  # test_zero_bubble
    "bert-post", "bert-pre",  # both placements below
    "mixtral", "mixtral-balanced",  # test_experts, in float32: grouped products have no float64
    *LOSSES, *UNUSUAL_GRAPHS,
}  # fmt: skip
NAMES = sorted(name for name in (*FAMILIES, *MODELS) if name not in ELSEWHERE and "dropout" not in name)
SEQUENCE_PARALLEL = {"tensor_parallel": {"sequence_parallel": True, "vocabulary_multiple": 8}}
INTERLEAVED = {"pipeline": {"schedule": "interleaved_1f1b"}}

FINER = list(zip(NAMES, cycle(OTHERS), strict=False))
# The last of these layouts has tp 2 · pp 2 in it.
CASES: list[tuple[Any, ...]] = [(model, TP2_PP2) for model, layout in FINER if layout != ALL_AXES]
CASES += [(model, ALL_AXES) for model in SIGNALS]  # series, speech and images
CASES += list(zip(LOSSES, cycle(OF_LOSSES), strict=False))
CASES += product(COUNTED, (ONE_RANK, TP2_PP2))  # divisors made of shapes, loops over the batch
CASES += product(FUNCTIONS, [TP2_PP2])  # functions with a backward of their own
CASES += product(("bert-post", "bert-pre"), (TP2_PP2, {"tp": 2, "dp": 2}))
# Attention cut into windows by strides of memory, wherever its tensor is cut.
CASES += [("longformer", {"cp": 2}), ("longformer", {"tp": 2}), ("led", {"cp": 2}), ("led", TP2_PP2)]

# Along the sequence. What the sums of a step over dp add to those over tp does not follow the family; nor does tp 2
# without a pipeline.
FINEST = [{"tp": 4}, TP2_PP2]
ALONG = list(product(("gpt", "llama"), [*FINEST, {"tp": 2}, {"tp": 2, "dp": 2}]))
ALONG += product(FUNCTIONS, [{"tp": 2, "dp": 2}])
OTHERS_ALONG = (
    "gpt2", "bert", "qwen3", "gemma2", "gpt_neox", "falcon-7b", "bloom", "t5", "normed-keys", "einsum", "frozen",
)  # fmt: skip
CHUNKS = [{"pp": 2, "vpp": 2}, {"tp": 2, "pp": 2, "vpp": 2}]


def parameters(cases: Iterable[tuple[Any, ...]], *, slow: Iterable[tuple[Any, ...]] = ()) -> Any:
    marked = [pytest.param(*case, marks=pytest.mark.slow) for case in slow]
    return pytest.mark.parametrize(("model", "layout"), [*cases, *marked], ids=name_of)


@pytest.mark.thorough
@parameters(CASES, slow=FINER)
def test_family_equals_one_process(lab: Lab, model: str, layout: dict[str, int]) -> None:
    assert lab.check(Case(model, layout)).wrong == []


@pytest.mark.thorough
@parameters(ALONG, slow=zip(OTHERS_ALONG, cycle(FINEST), strict=False))
def test_sequence_parallel_equals_one_process(lab: Lab, model: str, layout: dict[str, int]) -> None:
    """What is held between blocks changes, and not what is computed."""
    assert lab.check(Case(model, layout, SEQUENCE_PARALLEL)).wrong == []


@pytest.mark.sampled(2)
@parameters([*product(UNUSUAL_GRAPHS, [ALL_AXES]), *product(("gpt", "skips"), CHUNKS)])
def test_unusual_graphs_and_chunks_of_layers_equal_one_process(lab: Lab, model: str, layout: dict[str, int]) -> None:
    assert lab.check(Case(model, layout, INTERLEAVED if "vpp" in layout else {})).wrong == []


@pytest.mark.sampled(1)
@parameters(product(HELD_WEIGHTS, [ONE_RANK, TP2_PP2]))
def test_weights_that_closures_hooks_and_views_hold_equal_one_process(
    lab: Lab, model: str, layout: dict[str, int]
) -> None:
    case = Case(model, layout)
    assert lab.check(case).wrong == []
    assert [p.name for p in lab.plan(case).parameters if "gradient" in p.reason and "no" in p.reason.split()] == []


FUSED: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp2-pp2-sp": (TP2_PP2, SEQUENCE_PARALLEL),
    "cp2-dp2": ({"cp": 2, "dp": 2}, {}),
    "tp2-recompute": ({"tp": 2}, {"recompute": "full"}),
    "graphs": ({}, {"cuda_graphs": {"impl": "emulate", "scope": []}}),
}


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("layout", FUSED)
def test_norms_of_one_op_equal_one_process(lab: Lab, layout: str) -> None:
    mesh, rest = FUSED[layout]
    case = Case("llama", mesh, {"fuse_norms": True} | rest)
    assert [row for row in lab.plan(case).diagnostics if "aten.rms_norm" in row.what]
    assert lab.check(case).wrong == []


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["gpt", "gpt2"])
def test_what_is_gathered_along_the_sequence_may_be_kept(lab: Lab, model: str) -> None:
    cut = {"tensor_parallel": {**SEQUENCE_PARALLEL["tensor_parallel"], "regather": False}}
    assert lab.check(Case(model, {"tp": 2}, cut)).wrong == []


# ---- what the plans of these models say


def test_exchanges_along_the_sequence_are_halves_of_an_all_reduce(lab: Lab) -> None:
    """And gradients of norms and biases are summed over tp once a step."""
    plan = lab.plan(Case("gpt", {"tp": 2}, SEQUENCE_PARALLEL))
    kinds = {(c.kind, c.phase) for c in plan.collectives if c.block == "blocks.1"}
    assert kinds == set(product(("all_gather", "reduce_scatter"), ("forward", "backward")))
    (step,) = [c.where for c in plan.collectives if c.phase == "step" and c.axis == "tp"]
    num_norms_and_biases = sum("norm" in p.name or p.name.endswith(("out.bias", "down.bias")) for p in plan.parameters)
    assert f"gradients of {num_norms_and_biases} parameters" in step


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", ["tied-in-lambda", "tied-in-partial"])
def test_a_head_tied_by_a_closure_is_one_parameter_on_both_stages(lab: Lab, model: str) -> None:
    rows = [p for p in lab.plan(Case(model, TP2_PP2)).parameters if p.style == "vocab"]
    assert [(row.name, row.stages) for row in rows] == [("tokens.weight", (0, 1))]


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["own-round", "own-sign", "own-reversed", "own-clamped"])
def test_elementwise_functions_are_cut_and_repeat_with_their_blocks(lab: Lab, model: str) -> None:
    plan = lab.plan(Case(model, {"tp": 2}))
    told = [row for row in plan.diagnostics if "custom Function" in row.what]
    assert len(told) == 4
    assert all("sharded over dim 2" in row.what and "own_functions.py" in row.where for row in told)
    assert plan.summary.flops_sharded_fraction == 1.0


def test_a_function_over_all_features_is_computed_alike_and_says_so(lab: Lab) -> None:
    plan = lab.plan(Case("own-unit", {"tp": 2}))
    told = {row.what for row in plan.diagnostics if "custom Function" in row.what}
    assert told == {
        "UnitGradient(_) is a custom Function with its own backward: one op, replicated on every rank; "
        "its backward is not linear and needs complete gradients"
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize("placement", ["bert-post", "bert-pre"])
def test_a_layer_of_either_placement_costs_four_all_reduces(lab: Lab, placement: str) -> None:
    rows = lab.plan(Case(placement, {"tp": 2})).collectives
    of_a_layer = [row.phase for row in rows if "blocks.1." in row.where and row.axis == "tp"]
    assert sorted(of_a_layer) == ["backward", "backward", "forward", "forward"]
