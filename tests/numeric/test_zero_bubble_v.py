"""Two chunks a rank in a v, with gradients of weights as actions of their own, give what one process gives.

Loss and embedding are on rank 0, a tied weight has both its readers there, and one rank hands itself values.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.tools.laboratory import Case, Lab

V: dict[str, Any] = {"pipeline": {"schedule": "zero_bubble_v"}}
SEQUENCE = {"tensor_parallel": {"sequence_parallel": True}}
GRAPHS = {"cuda_graphs": {"impl": "emulate", "scope": ["attn", "mlp"], "warmup_steps": 1}}
TWO = {"pp": 2, "vpp": 2}
CASES = {
    "tied embedding and head": Case("gpt2", TWO, V),
    "untied": Case("gpt2-untied", TWO, V),
    "llama": Case("llama", TWO, V),
    "encoder and decoder": Case("t5", TWO, V),
    "values that skip stages": Case("skips", TWO, V),
    "four ranks": Case("gpt2-8-layers", {"pp": 4, "vpp": 2}, V),
    "four ranks of llama": Case("llama-8-layers", {"pp": 4, "vpp": 2}, V),
    "fewer microbatches than ranks": Case("gpt2-8-layers", {"pp": 4, "vpp": 2}, V, num_sequences=4),
    "with tp": Case("gpt2", {"tp": 2} | TWO, V),
    "with tp along the sequence": Case("llama", {"tp": 2} | TWO, V | SEQUENCE),
    "with dp": Case("gpt2", {"dp": 2} | TWO, V),
    "blocks computed again": Case("gpt2", TWO, V | {"recompute": "full"}),
    "attention computed again": Case("llama", TWO, V | {"recompute": "selective"}),
    "graphs": Case("gpt2", TWO, V | GRAPHS, num_sequences=16),
    "a split of ranks": Case("gpt2-8-layers", TWO, {"pipeline": V["pipeline"] | {"split": [[1, 2], [4, 1]]}}),
    "a layout": Case("gpt2", TWO, {"pipeline": V["pipeline"] | {"split": "Et*2|t|t|L"}}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_v_equals_one_process(lab: Lab, name: str) -> None:
    assert lab.check(CASES[name]).wrong == []
