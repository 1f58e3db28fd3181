"""Sequence parallelism changes what is held between blocks, not what is computed."""

from __future__ import annotations

from itertools import cycle

import pytest

from tests.tools.laboratory import Case, Lab

SEQUENCE_PARALLEL = {"tensor_parallel": {"sequence_parallel": True, "vocabulary_multiple": 8}}
ALWAYS = ["gpt", "llama"]
OTHERS = ["gpt2", "bert", "qwen3", "gemma2", "gpt_neox", "falcon-7b", "bloom", "t5", "normed-keys", "einsum", "frozen"]
# What the sums of a step over dp add to those over tp does not follow the family; nor does tp 2 without a pipeline.
FINEST = [{"tp": 4}, {"tp": 2, "pp": 2}]
LAYOUTS = [*FINEST, {"tp": 2}, {"tp": 2, "dp": 2}]
CASES = [(model, layout) for model in ALWAYS for layout in LAYOUTS]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in zip(OTHERS, cycle(FINEST), strict=False)]


def name_of(layout: dict[str, int]) -> str:
    return "-".join(f"{axis}{size}" for axis, size in layout.items())


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "layout"), CASES, ids=lambda x: x if isinstance(x, str) else name_of(x))
def test_sequence_parallel_equals_one_process(lab: Lab, model: str, layout: dict[str, int]) -> None:
    assert lab.check(Case(model, layout, SEQUENCE_PARALLEL)).wrong == []


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["gpt", "gpt2"])
def test_what_is_gathered_may_be_kept(lab: Lab, model: str) -> None:
    cut = {"tensor_parallel": {**SEQUENCE_PARALLEL["tensor_parallel"], "regather": False}}
    assert lab.check(Case(model, {"tp": 2}, cut)).wrong == []


def test_exchanges_between_blocks_are_halves_of_an_all_reduce(lab: Lab) -> None:
    plan = lab.plan(Case("gpt", {"tp": 2}, SEQUENCE_PARALLEL))
    kinds = {(c.kind, c.phase) for c in plan.collectives if c.block == "blocks.1"}
    assert kinds == {(kind, phase) for kind in ("all_gather", "reduce_scatter") for phase in ("forward", "backward")}


def test_gradients_of_norms_and_biases_are_summed_over_tp_once_a_step(lab: Lab) -> None:
    plan = lab.plan(Case("gpt", {"tp": 2}, SEQUENCE_PARALLEL))
    step = [c.where for c in plan.collectives if c.phase == "step" and c.axis == "tp"]
    num_norms_and_biases = sum("norm" in p.name or p.name.endswith(("out.bias", "down.bias")) for p in plan.parameters)
    assert len(step) == 1
    assert f"gradients of {num_norms_and_biases} parameters" in step[0]
