"""Gradients and weights of which ranks keep shards (zero 2 and 3): training equals one process on every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import Engine
from tests.tools.laboratory import Case, Lab
from tests.tools.limits import HANG_SECONDS
from tests.tools.training import Batch, train

LAYOUTS: list[dict[str, int]] = [
    {"dp": 2},
    {"dp": 4},
    {"tp": 2, "dp": 2},
    {"pp": 2, "dp": 2},
    {"cp": 2, "dp": 2},
    {"tp": 2, "pp": 2, "dp": 2},
]
CASES = [(model, layout, zero) for model in ("gpt", "gpt2") for layout in LAYOUTS for zero in (2, 3)]
CASES += [(model, layout, 3) for model in ("llama", "t5", "bert") for layout in LAYOUTS[::2]]
CASES += [
    ("experts", layout, 3)
    for layout in ({"dp": 2}, {"dp": 2, "ep": 2}, {"dp": 4, "ep": 2}, {"tp": 2, "dp": 2, "ep": 2, "etp": 1})
]
CASES += [("mixtral", {"dp": 4, "ep": 2}, 3)]
CASES += [("frozen", layout, 3) for layout in LAYOUTS[::2]]


@pytest.mark.sampled(1)
@pytest.mark.covering(pairs=2)
@pytest.mark.parametrize(("model", "layout", "zero"), CASES, ids=str)
def test_sharded_gradients_and_weights_equal_one_process(
    lab: Lab, model: str, layout: dict[str, int], zero: int
) -> None:
    precision = {"precision": {"parameters": "float32"}} if model == "mixtral" else {}  # grouped products
    assert lab.check(Case(model, layout, {"optimizer": {"zero": zero}, **precision})).wrong == []


GROUPS: list[tuple[str, dict[str, int], int]] = [
    *(("gpt2", {"dp": 4}, zero) for zero in (1, 2, 3)),
    ("gpt", {"tp": 2, "dp": 4}, 3),
    ("gpt2", {"pp": 2, "dp": 4}, 3),
    ("gpt", {"cp": 2, "dp": 2}, 3),
    ("experts", {"dp": 4, "ep": 2}, 3),
    ("frozen", {"dp": 4}, 3),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "layout", "zero"), GROUPS, ids=str)
def test_shards_within_groups_with_copies_beyond_equal_one_process(
    lab: Lab, model: str, layout: dict[str, int], zero: int
) -> None:
    case = Case(model, layout, {"optimizer": {"zero": zero, "shard_group": 2}}, micro=1)
    made = lab.plan(case)
    assert made.mesh.replica == 2
    assert any(row.axis == "replica" for row in made.collectives)
    assert lab.check(case).wrong == []


FEATURES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "weights stay whole for a step": ({"dp": 2}, {"optimizer": {"zero": 3, "reshard": False}}),
    "the last blocks stay whole for a step": ({"pp": 2, "dp": 2}, {"optimizer": {"zero": 3, "reshard": 2}}),
    "small buckets": ({"dp": 2}, {"optimizer": {"zero": 3, "bucket_size": 1000}}),
    "recomputed": ({"pp": 2, "dp": 2}, {"optimizer": {"zero": 3}, "recompute": "full"}),
    "recomputed in part": ({"dp": 2}, {"optimizer": {"zero": 3}, "recompute": "selective"}),
    "along the sequence": (
        {"tp": 2, "dp": 2},
        {"optimizer": {"zero": 3}, "tensor_parallel": {"sequence_parallel": True}},
    ),
    "chunks": (
        {"pp": 2, "vpp": 2, "dp": 2},
        {"optimizer": {"zero": 3}, "pipeline": {"schedule": "interleaved_1f1b"}},
    ),
    "gradients of weights wait": (
        {"pp": 2, "dp": 2},
        {"optimizer": {"zero": 3}, "pipeline": {"schedule": "zero_bubble"}},
    ),
    "in a v": (
        {"pp": 2, "vpp": 2, "dp": 2},
        {"optimizer": {"zero": 2}, "pipeline": {"schedule": "zero_bubble_v"}},
    ),
    "compiled": ({"dp": 2}, {"optimizer": {"zero": 3}, "compile": True}),
    "a mean of the weights": ({"dp": 2}, {"optimizer": {"zero": 3, "ema": 0.9}}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", FEATURES, ids=str)
def test_sharded_weights_beside_other_features_equal_one_process(lab: Lab, name: str) -> None:
    layout, rest = FEATURES[name]
    assert lab.check(Case("gpt", layout, rest)).wrong == []


def saved_and_loaded(plan: Any, batches: list[Batch], directory: str) -> dict[str, Any]:
    """After a step: full parameters, then those of an engine that loads what this one wrote."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        engine.train_step(batches[0])
        trained = engine.gather_parameters()
        engine.save_pretrained(directory)
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        weights = engine.optimizer.buffers.weights
        weights.most_bytes = 0
        engine.load_pretrained(directory)
        loaded = engine.gather_parameters()
        sizes = [bucket.parameters.nbytes for buffer in engine.optimizer.buffers.buffers for bucket in buffer.buckets]
        return {"trained": trained, "loaded": loaded, "whole": weights.most_bytes, "largest": max(sizes)}


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2, "dp": 2}], ids=str)
def test_files_of_weights_bring_one_bucket_at_a_time(lab: Lab, tmp_path: Path, layout: dict[str, int]) -> None:
    case = Case("gpt2", layout, {"optimizer": {"zero": 3}}, job=saved_and_loaded, job_arguments=(str(tmp_path),))
    ranks = lab.run(case)
    assert ranks[0]["trained"].keys() == ranks[0]["loaded"].keys()
    assert all(torch.equal(x, ranks[0]["loaded"][name]) for name, x in ranks[0]["trained"].items())
    assert all(0 < found["whole"] <= found["largest"] for found in ranks)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("zero", [2, 3])
def test_one_microbatch_gives_the_bits_of_zero_1(lab: Lab, zero: int) -> None:
    unclipped = [{"optimizer": {"zero": z, "clip_grad_norm": None}} for z in (1, zero)]  # the norm sums other shards
    cases = [Case("gpt", {"dp": 2}, rest, 4, 2, train) for rest in unclipped]
    truth, found = (lab.run(case)[0] for case in cases)
    assert found.losses == truth.losses
    assert found.furthest(truth.parameters) == 0.0
