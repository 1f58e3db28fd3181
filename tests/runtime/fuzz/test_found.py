"""Cases that ``tests.fuzz`` found once, as small as they failed, are equal to one process."""

from pathlib import Path
from typing import Any

import pytest

from runtime.fuzz.forks import StoreHost, in_fork, prepare
from runtime.fuzz.run import CASE_SECONDS, Outcome, Verdict
from tests.fuzz.drawing import campaign_of, case_with
from tests.tools.planted.search import outcomes_of
from tests.tools.planted.table import FAULTS

FOUND: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a compiled piece that a backward reruns gives the tuple of a topk": (
        {"experts": "rows"},
        {"recompute": "first full", "compile": True, "continued on": "tp"},
    ),
    "a bias that regions of graphs share is summed with partial sums": (
        {"norm_place": "post", "shared_layer": True},
        {"mesh.tp": 2, "cuda_graphs.impl": "emulate"},
    ),
    "attention without a causal mask over cp gives its result the strides of q": (
        {"layers": 1, "kind": "encoder", "positions": "rotary"},
        {"mesh.cp": 2},
    ),
    "positions are trained and the embedding is frozen": ({"frozen": "embedding"}, {"mesh.cp": 2}),
    "an audit evaluates before the step whose memory is measured": (
        {},
        {"mesh.tp": 2, "recompute": "full", "audit.every": 1},
    ),
    "a norm along the features of experts that are sharded over etp": (
        {"layers": 1, "mlp": "gated", "experts": "rows", "inner_norm": True},
        {"mesh.tp": 2, "mesh.dp": 2, "mesh.ep": 2, "mesh.etp": 2},
    ),
    "a product of gathered keys saves its operands, and no copy of them": (
        {"layers": 1, "key_heads": "one", "attention": "spelled"},
        {"mesh.cp": 2},
    ),
    "an input is gathered again only for products with stored weights": (
        {"layers": 1, "length": 6},
        {"mesh.tp": 4, "tensor_parallel.sequence_parallel": True, "tensor_parallel.overrides": "head"},
    ),
    "no W waits for a product with a part of a replicated weight": (
        {},
        {"mesh.tp": 2, "mesh.pp": 2, "tensor_parallel.overrides": "head", "pipeline.schedule": "zero_bubble"},
    ),
    "a recomputed block frees the gathered inputs of its products": (
        {"layers": 1},
        {
            "mesh.tp": 2,
            "tensor_parallel.sequence_parallel": True,
            "tensor_parallel.regather": False,
            "recompute": "full",
        },
    ),
    "a recomputed block frees the input copies of its products with a bias": (
        {"kind": "vision", "norm": "rms", "norm_place": "parallel", "inner_norm": True},
        {"mesh.dp": 2, "recompute": "full"},
    ),
    "products of one op save their input, and no copies of it": (
        {"kind": "vision", "inner": 36, "norm_place": "none", "loss": "squares"},
        {"mesh.tp": 3, "tensor_parallel.overrides": "attention", "recompute": "first full"},
    ),
    "experts without tokens are not updated, with sequences over cp too": (
        {"experts": "rows", "skips_empty": True, "bias": False, "shared_layer": True, "loss": "weighted"},
        {"mesh.cp": 2},
    ),
    "a rerun that draws a mask again recomputes no input of the dropout": (
        {"layers": 1, "dropout": 0.1},
        {"mesh.tp": 2, "precision.parameters": "bfloat16", "recompute": "full", "dropout": "layout_invariant"},
    ),
    "a microbatch in the model's data type is no activation": (
        {"kind": "vision", "layers": 1, "attention": "spelled"},
        {"mesh.tp": 3, "tensor_parallel.sequence_parallel": True},
    ),
    "a tensor that two stages of a rank hold counts once": (
        {"kind": "encoder_decoder"},
        {"mesh.tp": 2, "mesh.pp": 2, "mesh.vpp": 2, "pipeline.schedule": "zero_bubble_v"},
    ),
    "a gradient between two stages of a rank is a message": (
        {"kind": "encoder_decoder", "bias": False},
        {
            "mesh.tp": 2,
            "mesh.pp": 2,
            "mesh.vpp": 2,
            "batch.micro": 1,
            "tensor_parallel.overrides": "mlp",
            "pipeline.schedule": "zero_bubble_v",
        },
    ),
    "a rerun that reads one result of a product for two blocks holds no other": (
        {"kind": "encoder_decoder", "attention": "spelled"},
        {"mesh.tp": 2, "recompute": "first full"},
    ),
    "a W waits with the copy that its product made of its input": (
        {"kind": "vision", "convolution": True, "norm": "rms", "layers": 3},
        {"mesh.pp": 2, "pipeline.schedule": "zero_bubble", "recompute": "full"},
    ),
    "the gradient of a weight that ranks cut comes with the cut's backward": (
        {},
        {"mesh.tp": 2, "mesh.dp": 2, "tensor_parallel.overrides": "head", "optimizer.zero": 2},
    ),
    "ranks without rows of experts gather sharded weights at the op where the others do": (
        {
            "layers": 3,
            "norm_place": "none",
            "qkv": "fused",
            "experts": "rows",
            "skips_empty": True,
            "shared_layer": True,
        },
        {"mesh.tp": 2, "mesh.dp": 2, "mesh.ep": 2, "microbatches": 1, "optimizer.zero": 3, "recompute": "selective"},
    ),
    "a rerun leaves the logits of a loss between blocks as the loss left them": (
        {"early_losses": "each"},
        {"mesh.pp": 2, "microbatches": 1, "recompute": "full"},
    ),
    "no gradient waits for a W that has no weights to train": (
        {"tied": True, "frozen": "embedding"},
        {"mesh.pp": 2, "pipeline.schedule": "zero_bubble"},
    ),
}


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_a_case_that_failed_is_equal(name: str, tmp_path: Path):
    model, spec = FOUND[name]
    prepare()
    assert campaign_of(0, 2, tmp_path).outcome_of(case_with(model, spec)) == Outcome(Verdict.EQUAL)


MESHES = {"ep": {"mesh.dp": 2, "mesh.ep": 2}, "tp": {"mesh.tp": 2}, "cp": {"mesh.cp": 2}}


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("axis", MESHES)
@pytest.mark.parametrize("kind", ["rows", "dense", "stacked"])
def test_experts_train_in_half_precision_as_in_one_process(kind: str, axis: str, half: str, tmp_path: Path):
    prepare()
    given = {"precision.parameters": "bfloat16", "half precision": half, "precision.loss_scale": "dynamic"}
    case = case_with({"experts": kind, "routing": "steady"}, MESHES[axis] | given).sensible(2)
    assert case.to_spec()["precision"]["parameters"] == half
    assert campaign_of(0, 2, tmp_path).outcome_of(case) == Outcome(Verdict.EQUAL)


def test_routers_that_follow_rounded_scores_are_not_drawn_in_half_precision():
    case = case_with({"experts": "rows"}, {"precision.parameters": "bfloat16"}).sensible(2)
    assert case.to_spec()["precision"]["parameters"] == "float32"


OF_SEEDS = {
    seed: [name for name, fault in FAULTS.items() if fault.seed == seed]
    for seed in sorted({f.seed for f in FAULTS.values()})
}


@pytest.fixture(scope="module")
def host() -> StoreHost:
    prepare()
    return StoreHost()


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("seed", OF_SEEDS)
def test_each_fault_planted_in_a_case_is_found_and_without_one_it_is_equal(seed: int, host: StoreHost):
    limit = CASE_SECONDS * (1 + len(OF_SEEDS[seed]))
    found = in_fork(outcomes_of, seed, OF_SEEDS[seed], host, timeout_seconds=limit)
    wanted = {"": Verdict.EQUAL} | dict.fromkeys(OF_SEEDS[seed], Verdict.DIFFERS)
    assert {name: outcome.verdict for name, outcome in found.items()} == wanted, found
