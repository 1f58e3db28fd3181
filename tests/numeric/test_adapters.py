"""Models wrapped by peft, planned unmodified: each method equals one process on each layout, or is refused by line."""

from typing import Any

import pytest
import torch

from tests.models.adapted import ADAPTED
from tests.tools.laboratory import Case, Lab, name_of
from tests.tools.limits import HANG_SECONDS

pytest.importorskip("peft")

SEQUENCE_PARALLEL = {"tensor_parallel": {"sequence_parallel": True, "vocabulary_multiple": 8}}
LAYOUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tp": 2, "pp": 2}, {}),
    ({"tp": 2, "dp": 2}, SEQUENCE_PARALLEL),
    ({"pp": 2, "vpp": 2, "dp": 2}, {"pipeline": {"schedule": "interleaved_1f1b"}}),
    ({"cp": 2, "tp": 2}, {}),
]
# Grouped products have no float64.
PRECISION = {"mixtral-lora-experts": {"precision": {"parameters": "float32"}}}


@pytest.mark.sampled(1)
@pytest.mark.covering(pairs=2)
@pytest.mark.parametrize(("mesh", "rest"), LAYOUTS, ids=[name_of(mesh) for mesh, _ in LAYOUTS])
@pytest.mark.parametrize("kind", ADAPTED)
def test_an_adapted_model_equals_one_process(lab: Lab, kind: str, mesh: dict[str, int], rest: dict[str, Any]) -> None:
    case = Case(kind, mesh, rest | PRECISION.get(kind, {}))
    assert lab.check(case).wrong == []


@pytest.mark.thorough
@pytest.mark.covering(pairs=1)
@pytest.mark.parametrize("mesh", [{"tp": 4}, {"dp": 4}], ids=name_of)
@pytest.mark.parametrize("kind", ADAPTED)
def test_an_adapted_model_over_four_ranks_of_an_axis(lab: Lab, kind: str, mesh: dict[str, int]) -> None:
    assert lab.check(Case(kind, mesh, PRECISION.get(kind, {}))).wrong == []


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "mesh",
    [{"dp": 2, "ep": 2}, {"tp": 2, "ep": 2, "etp": 1}, {"cp": 2, "ep": 2}, {"pp": 2, "dp": 2, "ep": 2}],
    ids=name_of,
)
def test_adapted_stacks_of_experts_equal_one_process(lab: Lab, mesh: dict[str, int]) -> None:
    kind = "mixtral-lora-experts"
    assert lab.check(Case(kind, mesh, PRECISION[kind])).wrong == []


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "prompt", "gpt2-prefix"])
def test_an_adapted_model_with_its_base_in_shards_equals_one_process(lab: Lab, kind: str) -> None:
    case = Case(kind, {"tp": 2, "dp": 2}, {"optimizer": {"zero": 3}})
    frozen = [buffer for buffer in lab.plan(case).optimizer.buffers if buffer.rule == "frozen"]
    assert sum(buffer.num_elements for buffer in frozen) >= 2 * sum(buffer.shard_elements for buffer in frozen) > 0
    assert lab.check(case).wrong == []


def held(plan: Any, batches: list[dict[str, torch.Tensor]]) -> tuple[set[str], set[str]]:
    """Of one rank: the names of its parameters with a gradient buffer, and of those that train."""
    from runtime import Engine

    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        engine.train_step(batches[0])
        buffers = plan.shards.buffers_of_rank(engine.mesh.pp_rank, 0)
        trained = {p.fqn for stage in engine.program.stages for p in stage.parameters if p.requires_grad}
        return {name for buffer in buffers for name in buffer.by_name}, trained


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "prompt"])
def test_frozen_weights_have_no_gradient_buffer_and_no_optimizer_state(lab: Lab, kind: str) -> None:
    found = lab.run(Case(kind, {"tp": 2, "pp": 2}, job=held))
    assert any(trained for _, trained in found)
    for in_buffers, trained in found:
        assert in_buffers == trained
        assert not any("base_layer" in name or "norm" in name for name in trained)
