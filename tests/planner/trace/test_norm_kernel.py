"""On a cluster of GPUs a plan remarks on spelled-out norms, and counts norms of one op as their kernel keeps them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planner import Plan, plan

transformers = pytest.importorskip("transformers")
HIDDEN, LENGTH = 32, 16


def planned(num_layers: int = 2, **sections: Any) -> Plan:
    config = transformers.LlamaConfig(
        num_hidden_layers=num_layers, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_attention_heads=4,
        vocab_size=64, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    ids = {"shape": [LENGTH], "dtype": "int64", "high": 64}
    spec = {
        "mesh": {},
        "batch": {"global": 1, "micro": 1},
        "inputs": {"input_ids": ids, "labels": ids},
        "compile": False,
    }
    return plan(model, {**spec, "precision": {"parameters": "bfloat16"}, **sections})


def remarks(made: Plan) -> list[str]:
    return [row.what for row in made.diagnostics if "RMS norms are spelled out" in row.what]


@pytest.mark.thorough
def test_the_remark_stands_on_gpus_alone_and_goes_with_the_norms():
    (remark,) = remarks(planned(cluster="h200"))
    assert remark.startswith("5 RMS norms are spelled out, in 35 ops")
    assert remarks(planned()) == []
    assert remarks(planned(cluster="h200", fuse_norms=True)) == []


@pytest.mark.thorough
def test_a_norm_of_one_kernel_keeps_what_it_reads_and_a_root_for_each_row():
    """Spelled out, each of the two norms of a layer keeps x in float32 instead; roots and results are the same."""

    def of_a_layer(**sections: Any) -> int:
        two, one = (planned(n, cluster="h200", **sections).memory[0].of_microbatch[0] for n in (2, 1))
        return two - one

    assert of_a_layer() - of_a_layer(fuse_norms=True) == 2 * LENGTH * HIDDEN * (4 - 2)
