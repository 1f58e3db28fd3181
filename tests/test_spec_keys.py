"""A key of the spec is read or refused: another value of any key changes the plan or the training, or is an error.

The keys are those of the models (and so of specs/reference.yaml). One that is neither read nor refused has no case that
could pass here, and one without a case fails the first test.
"""

import copy
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from examples.gpt import GPT
from planner import PlanError, plan
from planner.spec.fields import Section
from planner.spec.inputs import InputSpec
from planner.spec.spec import Spec
from runtime.engine.engine import Engine
from runtime.verify.batches import random_batch
from tests.tools.captures import plan_again

VOCABULARY, LENGTH = 97, 8
BASE: dict[str, Any] = {
    "mesh": {"tp": 2, "pp": 2, "dp": 2},
    "batch": {"global": 8, "micro": 1},
    "inputs": {
        "input_ids": {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY},
        "targets": {"like": "input_ids"},
    },
}
INTERLEAVED = {"mesh.vpp": 2, "pipeline.schedule": "interleaved_1f1b"}
COSINE = {"optimizer.schedule.kind": "cosine", "optimizer.schedule.steps": 10}

# key -> another valid value, and what has to stand beside it in both specs. The plan may become one that is refused.
CHANGES_THE_PLAN: dict[str, tuple[Any, dict[str, Any]]] = {
    "mesh.tp": (1, {}),
    "mesh.pp": (1, {}),
    "mesh.dp": (1, {}),
    "mesh.cp": (2, {}),
    "mesh.vpp": (1, INTERLEAVED),
    "mesh.etp": (1, {}),
    "mesh.order": ("dp-tp-pp", {}),
    "batch.global": (16, {}),
    "batch.micro": (2, {}),
    "inputs.shape": ([4], {}),
    "inputs.dtype": ("float32", {"inputs.high": None}),
    "tensor_parallel.sequence_parallel": (True, {}),
    "tensor_parallel.regather": (False, {"tensor_parallel.sequence_parallel": True}),
    "tensor_parallel.overrides": ({"*.attention.*": "replicate"}, {}),
    "tensor_parallel.vocabulary_multiple": (1, {}),
    "pipeline.schedule": ("gpipe", {}),
    "pipeline.split": ([1, 3], {}),
    "pipeline.group_size": (4, INTERLEAVED),
    "optimizer.no_decay": ("vectors", {}),
    "optimizer.groups": ({"*": {"lr": 1e-3}}, {}),
    "optimizer.zero": (0, {}),
    "optimizer.shard_group": (2, {"mesh.dp": 4, "batch.global": 8}),
    "optimizer.reshard": (False, {"optimizer.zero": 3}),
    "optimizer.alignment": ("none", {}),
    "optimizer.bucket_size": (1000, {}),
    "optimizer.ema": (0.9, {}),
    "precision.parameters": ("bfloat16", {}),
    "precision.gradients": ("bfloat16", {}),
    "precision.gather": ("bfloat16", {"optimizer.zero": 3}),
    "recompute": ("full", {}),
    "compile": (True, {}),
    "cuda_graphs.impl": ("emulate", {}),
    "cuda_graphs.scope": (["attn"], {"cuda_graphs.impl": "emulate"}),
}
CHANGES_THE_TRAINING: dict[str, tuple[Any, dict[str, Any]]] = {
    "optimizer.lr": (1e-3, {}),
    "optimizer.betas": ([0.5, 0.6], {}),
    "optimizer.eps": (1e-2, {}),
    "optimizer.weight_decay": (0.5, {}),
    "optimizer.clip_grad_norm": (0.01, {"optimizer.eps": 1e-2}),  # Adam's update hardly feels a common factor
    "optimizer.schedule.kind": ("linear", COSINE),
    "optimizer.schedule.warmup": (5, {}),
    "optimizer.schedule.steps": (20, COSINE),
    "optimizer.schedule.min_lr": (1e-5, COSINE),
    "optimizer.schedule.decay": (4, {**COSINE, "optimizer.schedule.kind": "wsd", "optimizer.schedule.decay": 9}),
    "optimizer.schedule.power": (2.0, {**COSINE, "optimizer.schedule.kind": "polynomial"}),
    "precision.loss_scale": (3.0, {}),
    "seed": (1, {}),
    "initialization.method": ("model", {}),
    "initialization.std": (0.1, {}),
    "initialization.residual_scale": (False, {}),
}
REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "mesh.ep": (2, {}),
    "inputs.like": ("none such", {}),
    "loss": ({"output": "none such"}, {}),
    "cluster": ("no-such-cluster", {}),
    "attention": ("cudnn", {}),  # without cp; with it: tests/runtime/test_attention.py
    "devices": (4, {}),  # without auto it says how many ranks the mesh has
}
# these have tests of their own: of layouts with dropout, of norms, of ranks that begin with other weights, below, of
# recorded graphs, NaN and Inf, compiled code
BELOW = [
    "dropout",
    "fuse_norms",
    "initial_weights",
    "inputs.high",
    "cuda_graphs.warmup_steps",
    "precision.nonfinite",
    "emulate_precision_casts",
]
# what they change is tested beside what reads them: tests/runtime/data/
OF_BATCHES = [
    "data.mixture",
    "data.objective",
    "data.packing",
    "data.overlong",
    "data.validation",
    "data.inputs",
    "data.mask.share",
    "data.mask.ngram",
]
# tests/runtime/audit/
OF_AUDITS = ["audit.every", "audit.on_difference", "audit.tolerance"]
OF_UPDATE_RULES = [
    "optimizer.name",
    "optimizer.momentum",
    "optimizer.nesterov",
    "optimizer.adjust_lr",
    "optimizer.split",
    "optimizer.options",
]
# tests/numeric/test_update_rules.py, tests/numeric/test_muon.py
OF_FORECASTS = [
    "experts.imbalance",  # tests/runtime/profiling/test_imbalance.py
    "data.mean_document",  # tests/planner/tables/test_rows.py
]
OF_FORMS = ["inputs.joined", "inputs.batch_dim", "inputs.value"]  # tests/planner/test_forms.py
OF_LENGTHS = ["batch.tokens"]  # tests/numeric/test_lengths.py
OF_LOSSES = ["batch.statistics"]  # tests/numeric/test_global_sums.py
OF_UNKNOWN_OPS = ["tensor_parallel.infer_rules"]  # tests/planner/capture/test_inferred_rules.py


def with_keys(keys: dict[str, Any]) -> dict[str, Any]:
    """BASE with these dotted keys."""
    spec = copy.deepcopy(BASE)
    for path, value in keys.items():
        section = spec
        *parents, last = place(path).split(".")
        for name in parents:
            section = section.setdefault(name, {})
        section[last] = value
    return spec


def place(key: str) -> str:
    """The dotted path of a key; the keys of inputs stand in one of them."""
    section, _, name = key.partition(".")
    tensor = "targets" if name == "like" else "input_ids"
    return f"inputs.{tensor}.{name}" if section == "inputs" and name in InputSpec.model_fields else key


def leaves(model: type[Section], path: str = "") -> Iterator[str]:
    """Every key that holds no further keys."""
    for name, field in model.model_fields.items():
        key = f"{path}{field.alias or name}"
        kind = InputSpec if key == "inputs" else field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from leaves(kind, f"{key}.")
        else:
            yield key


def build(num_layers: int = 4) -> GPT:
    torch.manual_seed(0)
    return GPT(VOCABULARY, LENGTH, 32, num_layers, 4)


@cache
def facts(keys: str) -> dict[str, Any]:
    """All of the plan of BASE with ``keys`` (as JSON) but the words of the spec; of one that is refused, why."""
    try:
        return {**plan_again(build(), with_keys(json.loads(keys))).to_dict(), "spec": None}
    except PlanError as error:
        return {"refused": error.what}


@cache
def training(keys: str) -> str:
    """Three updates in one process, from fresh weights, with ``keys`` (as JSON)."""
    spec = {**with_keys(json.loads(keys)), "mesh": {}}
    with torch.device("meta"):
        model = build(1)
    ids = torch.arange(8 * LENGTH).view(8, LENGTH) * 7 % VOCABULARY
    with Engine(plan_again(model, spec)) as engine:
        reports = [engine.train_step({"input_ids": ids, "targets": ids.roll(-1, 1)}) for _ in range(3)]
        weights = {name: value.double().sum().item() for name, value in engine.gather_parameters().items()}
        return str(([(r.loss, r.grad_norm, r.lr) for r in reports], weights, engine.loss_scale.value))


def test_every_key_has_a_case():
    elsewhere = [
        *BELOW,
        *OF_BATCHES,
        *OF_AUDITS,
        *OF_UPDATE_RULES,
        *OF_FORECASTS,
        *OF_FORMS,
        *OF_LENGTHS,
        *OF_LOSSES,
        *OF_UNKNOWN_OPS,
    ]
    assert sorted([*CHANGES_THE_PLAN, *CHANGES_THE_TRAINING, *REFUSED, *elsewhere]) == sorted(leaves(Spec))


@pytest.mark.thorough
@pytest.mark.parametrize("key", CHANGES_THE_PLAN)
def test_another_value_changes_the_plan(key):
    value, needs = CHANGES_THE_PLAN[key]
    before, after = facts(json.dumps(needs)), facts(json.dumps({**needs, key: value}))
    assert "refused" not in before
    assert before != after


@pytest.mark.thorough
@pytest.mark.parametrize("key", CHANGES_THE_TRAINING)
def test_another_value_changes_the_training(key):
    value, needs = CHANGES_THE_TRAINING[key]
    assert training(json.dumps(needs)) != training(json.dumps({**needs, key: value}))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_there_yet_is_refused_at_its_key(key):
    value, needs = REFUSED[key]
    with pytest.raises(PlanError) as error:
        plan_again(build(), with_keys({**needs, key: value}))
    assert str(error.value.where) in (place(key), *needs)
    assert error.value.fix


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("split", "blocks"),
    [
        ([[1], [3]], [1, 3]),
        ("Et|t*3L", [1, 3]),
        ("Et*4|L", [4, 0]),
        ([["embedding"], ["decoder"] * 4 + ["loss"]], [0, 4]),
        ({"first": 3}, [3, 1]),
        ({"last": 3}, [1, 3]),
        ({"embedding": True, "loss": True}, [2, 2]),
    ],
    ids=str,
)
def test_every_way_to_write_a_split_decides_the_stages(split, blocks):
    decided = plan_again(build(), with_keys({"pipeline.split": split}))
    assert [len(stage.blocks) for stage in decided.stages] == blocks


def test_another_high_draws_other_inputs():
    decided = plan(build(), BASE)
    low, all_ = (random_batch(Spec.load(with_keys({"inputs.high": n})), decided, seed=0) for n in (5, VOCABULARY))
    assert low["input_ids"].max() < 5 <= all_["input_ids"].max() < VOCABULARY
