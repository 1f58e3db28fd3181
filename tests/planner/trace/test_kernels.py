"""On a cluster of GPUs attention and norms are counted with their kernels, and spelled-out norms are remarked on."""

from typing import Any

import pytest
import torch
from torch import Tensor

from planner import Plan, plan
from planner.trace.attention_kernels import attention, kernel_of
from planner.trace.observe import Like, Operand, observe
from tests.models.families import build
from tests.tools.captures import plan_again
from tests.tools.graphed_runs import spec_of

BF16, F32 = torch.bfloat16, torch.float32
ON_HOPPER = [("cuDNN", BF16, 64, 4, False), ("cuDNN", BF16, 64, 2, True), ("flash", BF16, 20, 4, False)]
CASES: list[tuple[str, torch.dtype, int, int, bool]] = [  # kernel, dtype, features and key heads of 4, whether masked
    ("flash", BF16, 64, 4, False),
    ("flash", BF16, 64, 2, False),
    ("flash", BF16, 20, 4, False),
    ("memory-efficient", BF16, 64, 4, True),
    ("memory-efficient", BF16, 512, 4, False),
    ("memory-efficient", F32, 20, 4, False),
    ("math", BF16, 64, 2, True),
    ("math", BF16, 20, 4, True),
    ("math", F32, 64, 2, False),
    ("math", torch.float64, 64, 4, False),
]


def _given(dtype: torch.dtype, width: int, groups: int, is_masked: bool) -> list[Tensor | None]:
    q, k, v = (torch.empty(2, heads, 48, width, dtype=dtype, device="meta") for heads in (4, groups, groups))
    return [q, k, v, torch.empty(48, 48, dtype=torch.bool, device="meta") if is_masked else None]


@pytest.mark.parametrize("case", [*((False, *c) for c in CASES), *((True, *c) for c in ON_HOPPER)], ids=str)
def test_a_gpu_takes_the_kernel_that_its_inputs_admit_and_keeps_what_that_keeps(case: Any) -> None:
    cudnn, kernel, dtype, width, groups, is_masked = case
    q, k, v, mask = _given(dtype, width, groups, is_masked)
    assert q is not None and k is not None and v is not None  # noqa: PT018
    assert kernel_of(q, k, v, mask, cudnn=cudnn) == kernel
    likes = [Like.contiguous(x.shape, x.dtype, x.is_floating_point()) for x in (q, k, v, mask) if x is not None]
    operands = tuple(Operand(i) for i in range(len(likes)))
    seen = observe(attention, operands, {"dropout_p": 0.1, "enable_gqa": groups < 4, "cudnn": cudnn}, likes)
    scores = 2 * 4 * 48 * 48 * dtype.itemsize
    rows = 64 if kernel == "memory-efficient" else 48
    if kernel == "math":
        assert max(seen.hidden) >= scores
    else:
        assert (seen.operands, seen.results) == (tuple(range(len(likes))), (0,))
        place = [8, 8] if kernel == "cuDNN" else [16]  # of the generator
        assert sorted(seen.hidden) == sorted([2 * 4 * rows * 4, *place])  # sums of rows
    assert seen.made[0].like.shape == q.shape


def test_on_hopper_values_narrower_than_keys_and_masks_of_shared_keys_keep_no_scores() -> None:
    q, k = (torch.empty(1, heads, 48, 192, dtype=BF16, device="meta") for heads in (4, 2))
    v, mask = torch.empty(1, 2, 48, 128, dtype=BF16, device="meta"), torch.empty(48, 48, dtype=BF16, device="meta")
    assert kernel_of(q, k, v, mask) == "math"
    assert kernel_of(q, k, v, mask, cudnn=True) == "cuDNN"
    assert kernel_of(q, k, v, mask.requires_grad_(), cudnn=True) == "math"  # cuDNN has no gradient of a mask


def _plan(cluster: str | None) -> Plan:
    entry = build("gpt2-dropout")
    entry.model.train()
    spec = spec_of(entry, None, precision={"parameters": "bfloat16"})
    return plan_again(entry.model, spec | ({"cluster": cluster} if cluster else {}))


def _said(made: Plan) -> set[str]:
    return {row.what for row in made.diagnostics if row.what.startswith("memory of attention with dropout")}


@pytest.mark.thorough
def test_a_plan_counts_dropout_in_attention_by_the_device_of_its_cluster_and_says_so() -> None:
    alone, cpu, gpu = _plan(None), _plan("cpu-local"), _plan("dgx-h100")
    of_cpu = "memory of attention with dropout is that of the CPU kernel, which saves its scores and probabilities"
    assert _said(alone) == _said(cpu) == {of_cpu}
    (said,) = _said(gpu)
    assert "that of the cuDNN kernel of a GPU, which saves its result and one value per row, no probabilities" in said
    kept = [made.memory[0].of_microbatch[0] for made in (alone, cpu, gpu)]
    assert kept[0] == kept[1]
    config = build("gpt2-dropout").model.config
    shares = 2 * config.n_layer * config.n_head * 12 * 12 * 2  # bfloat16, of 2 sequences of 12 tokens
    assert kept[0] - kept[2] > 2 * shares  # of the shares, of what dropout leaves of them, and of its mask


# ---- on a cluster of GPUs a plan remarks on spelled-out norms, and counts norms of one op as their kernel keeps them


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
