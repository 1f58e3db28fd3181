"""Two chunks a rank in a v, with gradients of weights as actions of their own, give what one process gives.

Loss and embedding are on rank 0, a tied weight has both its readers there, and one rank hands itself values.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
    "with dp, tied, in small buckets": Case("llama-tied", {"dp": 2} | TWO, V | {"optimizer": {"bucket_size": 500}}),
    "blocks computed again": Case("gpt2", TWO, V | {"recompute": "full"}),
    "attention computed again": Case("llama", TWO, V | {"recompute": "selective"}),
    "graphs": Case("gpt2", TWO, V | GRAPHS, num_sequences=16),
    "a split of ranks": Case("gpt2-8-layers", TWO, {"pipeline": V["pipeline"] | {"split": [[1, 2], [4, 1]]}}),
    "a layout": Case("gpt2", TWO, {"pipeline": V["pipeline"] | {"split": "Et*2|t|t|L"}}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_a_v_equals_one_process(lab: Lab, name: str) -> None:
    assert lab.check(CASES[name]).wrong == []


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [TWO, {"dp": 2} | TWO, {"tp": 2} | TWO], ids=str)
def test_it_trains_as_in_a_loop_to_the_last_digits(lab: Lab, mesh: dict[str, int]) -> None:
    loop = lab.run(Case("llama-tied", mesh, {"pipeline": {"schedule": "interleaved_1f1b"}}))[0]
    folded = lab.run(Case("llama-tied", mesh, V))[0]
    torch.testing.assert_close(folded.losses, loop.losses, rtol=1e-12, atol=0)
    for name, gradient in loop.gradients.items():
        torch.testing.assert_close(folded.gradients[name], gradient, rtol=1e-11, atol=1e-12)
    for name, value in loop.parameters.items():
        torch.testing.assert_close(folded.parameters[name], value, rtol=0, atol=1e-9)
