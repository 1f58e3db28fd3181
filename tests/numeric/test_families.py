"""Many families and unusual code on the layouts that matter: all equal one process."""

from __future__ import annotations

from itertools import cycle

import pytest

from tests.models.families import FAMILIES
from tests.models.own import MODELS
from tests.models.signals import SIGNALS
from tests.tools.laboratory import Case, Lab, name_of

ALWAYS = {"tp": 2, "pp": 2}
# The finest cuts of each axis alone, and all axes at once, by turns; what lies between is in test_layouts.
OTHERS = [{"tp": 4}, {"pp": 4}, {"tp": 2, "pp": 2, "dp": 2}]
IN_LAYOUT_TESTS = {"gpt", "gpt2", "llama", "bert", "gpt-5-layers"}
OF_LOSSES = [{"pp": 2, "dp": 2}, {"tp": 2, "dp": 2}]  # counted over dp, beside what cuts a loss
LOSSES = sorted(name for name in MODELS if "loss" in name or "class-weights" in name)
# What these add is in the graph and not in the mesh: one layout each.
UNUSUAL_GRAPHS = [
    "diffllama",
    "experts",
    "norm-a-head",
    "norm-of-heads",
    "slots",
    "state-space",
    "stopped-gradients",
    "checkpoints",
]
IN_PIPELINE_TESTS = {"gpt2-8-layers", "llama-8-layers"}
IN_BERT_TESTS = {"bert-post", "bert-pre"}
IN_EXPERT_TESTS = {"mixtral", "mixtral-balanced"}  # in float32: grouped products have no float64
ELSEWHERE = {*IN_LAYOUT_TESTS, *IN_PIPELINE_TESTS, *IN_BERT_TESTS, *IN_EXPERT_TESTS, *LOSSES, *UNUSUAL_GRAPHS}
NAMES = sorted(name for name in (*FAMILIES, *MODELS) if name not in ELSEWHERE and "dropout" not in name)


FINER = list(zip(NAMES, cycle(OTHERS), strict=False))
CASES = [(model, ALWAYS) for model, layout in FINER if layout != OTHERS[-1]]  # that one has this in it
CASES += [(model, OTHERS[-1]) for model in SIGNALS]  # series, speech and images
CASES += list(zip(LOSSES, cycle(OF_LOSSES), strict=False))


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "layout"), CASES, ids=name_of)
def test_family_equals_one_process(lab: Lab, model: str, layout: dict[str, int]) -> None:
    assert lab.check(Case(model, layout)).wrong == []


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), FINER, ids=name_of)
def test_family_cut_finer_equals_one_process(lab: Lab, model: str, layout: dict[str, int]) -> None:
    assert lab.check(Case(model, layout)).wrong == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", UNUSUAL_GRAPHS)
def test_unusual_graph_equals_one_process(lab: Lab, model: str) -> None:
    assert lab.check(Case(model, {"tp": 2, "pp": 2, "dp": 2})).wrong == []
