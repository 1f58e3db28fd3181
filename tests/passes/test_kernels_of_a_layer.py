"""Kernels that a layer of a Llama launches in bfloat16, forward and backward, and bytes that they read and write."""

from __future__ import annotations

from functools import cache
from math import inf
from typing import Any, NamedTuple

import pytest
import torch

from planner import plan
from runtime import Engine
from runtime.optimizer import unmixed
from tests.tools.compiled_kernels import PiecesOfAGpu
from tests.tools.kernels import Kernels, norm_of_a_gpu

transformers = pytest.importorskip("transformers")
HIDDEN, LENGTH = 128, 64
BAR = 0.7
SPEC = {
    "mesh": {},
    "batch": {"global": 1, "micro": 1},
    "inputs": {"input_ids": {"shape": [LENGTH], "dtype": "int64", "high": 64}, "labels": {"like": "input_ids"}},
    "precision": {"parameters": "bfloat16"},
}


class Launched(NamedTuple):
    kernels: int
    bytes: int


def engine_of(num_layers: int, **more: Any) -> Engine:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=num_layers, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return Engine(plan(transformers.LlamaForCausalLM(config), {**SPEC, **more}))


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


CASES: dict[str, dict[str, Any]] = {
    "spelled": {},
    "fused": {"fuse_norms": True},
    "compiled": {"compile": True},
    "again": {"recompute": "selective"},
    "again, compiled": {"recompute": "selective", "compile": True},
    "again, compiled, in graphs": {
        "recompute": "selective", "compile": True, "cuda_graphs": {"impl": "emulate", "scope": []},
    },
}  # fmt: skip


@cache
def step(num_layers: int, case: str) -> tuple[Launched, float]:
    ids, more = torch.arange(LENGTH).view(1, LENGTH) * 7 % 64, CASES[case]
    with engine_of(num_layers, **more) as engine, pytest.MonkeyPatch.context() as patch:
        assert as_on_a_gpu(engine) == more.get("fuse_norms", False) * (2 * num_layers + 1)
        pieces = PiecesOfAGpu(engine.program)
        patch.setattr(unmixed, "largest_on_cpu", lambda tensors: torch._foreach_norm(list(tensors), inf))
        engine.forward_backward({"input_ids": ids, "labels": ids})
        with Kernels() as seen:
            pieces.seen = seen
            loss = engine.forward_backward({"input_ids": ids, "labels": ids})
    return Launched(seen.num_kernels, seen.num_bytes), loss


def of_a_layer(case: str) -> Launched:
    two, one = step(2, case)[0], step(1, case)[0]
    return Launched(two.kernels - one.kernels, two.bytes - one.bytes)


@pytest.mark.thorough
def test_a_layer_with_norms_of_one_op_launches_fewer_kernels_and_moves_fewer_bytes():
    spelled, fused = of_a_layer("spelled"), of_a_layer("fused")
    assert spelled.kernels - fused.kernels >= 2 * 16  # two norms: seven forward and eleven or more backward become two
    assert fused.kernels <= 84
    assert fused.bytes <= 0.78 * spelled.bytes


@pytest.mark.thorough
def test_a_layer_with_compiled_norms_rotary_and_swiglu_launches_fewer_kernels_and_moves_fewer_bytes():
    spelled, compiled = of_a_layer("spelled"), of_a_layer("compiled")
    assert compiled.kernels <= 80
    assert compiled.bytes <= BAR * spelled.bytes


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["again, compiled", "again, compiled, in graphs"])
def test_a_layer_that_runs_again_does_so_in_compiled_pieces(case: str):
    spelled, compiled = of_a_layer("again"), of_a_layer(case)
    assert compiled.kernels <= spelled.kernels - 40
    assert compiled.bytes <= BAR * spelled.bytes


@pytest.mark.thorough
def test_the_kernel_of_a_norm_computes_what_is_spelled_out():
    assert step(2, "fused")[1] == pytest.approx(step(2, "spelled")[1], rel=1e-3)
