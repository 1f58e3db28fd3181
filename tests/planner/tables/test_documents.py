"""What a plan says of attention within documents, and what their mean length does to the forecast."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planner import Plan
from tests.models.of_documents import Gpt
from tests.tools.captures import plan_again

LENGTH = 12
INPUTS = ("tokens", "targets", "position_ids", "document_ids")


def planned(mean: int | None = None, cluster: str | None = None, **more: Any) -> Plan:
    inputs = {name: {"shape": [LENGTH], "dtype": "int64"} for name in INPUTS}
    spec = {
        "mesh": {"tp": 2},
        "batch": {"global": 4, "micro": 2},
        "inputs": inputs,
        "tensor_parallel": {"vocabulary_multiple": 8},
        "data": {"packing": "documents"} | ({} if mean is None else {"mean_document": mean}),
        "cluster": cluster,
    }
    with torch.device("meta"):
        model = Gpt()
    return plan_again(model, spec | more)


def remarks(made: Plan, word: str) -> list[str]:
    return [row.what for row in made.diagnostics if word in row.what]


@pytest.mark.thorough
def test_the_plan_lists_attention_within_documents() -> None:
    assert remarks(planned(4), "within documents") == [
        "2 attentions run within documents: 33% of the pairs of a sequence of 12, for documents of 4 tokens"
    ]
    (found,) = (row for row in planned().diagnostics if "within documents" in row.what)
    assert "unless documents are shorter" in found.what
    assert "data.mean_document" in found.fix


def test_under_graphs_and_without_packing_it_computes_all_pairs() -> None:
    graphs = planned(cuda_graphs={"impl": "emulate", "scope": ["attn"]})
    assert not remarks(graphs, "within documents")
    assert "as CUDA graphs hold the blocks of no document" in remarks(graphs, "compute all pairs")[0]
    assert not remarks(planned(data={"packing": True}), "documents")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mean", [2, 3, 6])
def test_products_of_attention_are_in_proportion_to_documents(mean: int) -> None:
    """Of a rank: 2 heads, 2 products forward and 5 backward (flash) of width 8, 4 sequences, 2 layers."""
    found, whole = planned(mean).step_flops(), planned(LENGTH).step_flops()
    pairs = LENGTH * (LENGTH - mean)
    assert whole - found == pytest.approx(2 * 7 * 2 * 8 * 4 * 2 * pairs)


def test_memory_is_that_of_documents() -> None:
    few, all_ = (planned(mean).memory[0] for mean in (3, LENGTH))
    assert few.parameters == all_.parameters
    assert few.total <= all_.total


def test_time_is_less_with_short_documents() -> None:
    seconds = [planned(mean, "dgx-a100").cost for mean in (3, LENGTH)]
    assert seconds[0] is not None
    assert seconds[1] is not None
    assert seconds[0].flops < seconds[1].flops
