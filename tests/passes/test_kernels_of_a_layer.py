"""Kernels that a layer of a Llama launches in bfloat16, forward and backward, and bytes that they read and write."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest
import torch

from planner import plan
from runtime import Engine
from tests.tools.kernels import Kernels, norm_of_a_gpu

transformers = pytest.importorskip("transformers")
HIDDEN, LENGTH = 128, 64
SPEC = {
    "mesh": {},
    "batch": {"global": 1, "micro": 1},
    "inputs": {"input_ids": {"shape": [LENGTH], "dtype": "int64", "high": 64}, "labels": {"like": "input_ids"}},
    "precision": {"parameters": "bfloat16"},
}


class Launched(NamedTuple):
    kernels: int
    bytes: int


def engine_of(num_layers: int, fuse_norms: bool) -> Engine:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=num_layers, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return Engine(plan(transformers.LlamaForCausalLM(config), {**SPEC, "fuse_norms": fuse_norms}))


def as_on_a_gpu(engine: Engine) -> int:
    """Norms are one kernel each way; how many there are."""
    count = 0
    for stage in engine.program.stages:
        for node in stage.module.graph.find_nodes(op="call_function", target=torch.ops.aten.rms_norm.default):
            x, _, _, eps = node.args
            node.target, node.args = norm_of_a_gpu, (x, eps)
            count += 1
        stage.module.recompile()
    return count


@cache
def step(num_layers: int, fuse_norms: bool) -> tuple[Launched, float]:
    ids = torch.arange(LENGTH).view(1, LENGTH) * 7 % 64
    with engine_of(num_layers, fuse_norms) as engine:
        assert as_on_a_gpu(engine) == fuse_norms * (2 * num_layers + 1)
        engine.forward_backward({"input_ids": ids, "labels": ids})
        with Kernels() as seen:
            loss = engine.forward_backward({"input_ids": ids, "labels": ids})
    return Launched(seen.num_kernels, seen.num_bytes), loss


def of_a_layer(fuse_norms: bool) -> Launched:
    two, one = step(2, fuse_norms)[0], step(1, fuse_norms)[0]
    return Launched(two.kernels - one.kernels, two.bytes - one.bytes)


def test_a_layer_with_norms_of_one_op_launches_fewer_kernels_and_moves_fewer_bytes():
    spelled, fused = of_a_layer(False), of_a_layer(True)
    assert spelled.kernels - fused.kernels >= 2 * 16  # two norms: seven forward and eleven or more backward become two
    assert fused.kernels <= 84
    assert fused.bytes <= 0.78 * spelled.bytes


def test_the_kernel_of_a_norm_computes_what_is_spelled_out():
    assert step(2, True)[1] == pytest.approx(step(2, False)[1], rel=1e-3)
