"""An expert that no token of the whole batch chose, and that the forward skips, rests: value, moments and count of
updates stay, as they do in one process, where its gradient is None. With few tokens that is so in every step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.moe import MoE
from planner import plan
from runtime import Engine
from tests.tools.laboratory import Lab
from tests.tools.training import Trained, trained_by_spec, trained_on

NUM_STEPS, LENGTH, VOCABULARY = 6, 4, 64
GRAPHS = {"cuda_graphs": {"impl": "emulate", "scope": ["attn", "moe_router"], "warmup_steps": 1}}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp2 pp2": ({"tp": 2, "pp": 2}, {}),
    "dp2 tp2, along the sequence": ({"dp": 2, "tp": 2}, {"tensor_parallel": {"sequence_parallel": True}}),
    "ep2 dp2, recomputed": ({"ep": 2, "dp": 2}, {"recompute": "full"}),
    "ep2 etp1 tp2, graphs": ({"ep": 2, "etp": 1, "tp": 2}, GRAPHS),
}


def build() -> MoE:
    torch.manual_seed(0)
    sizes = {"vocabulary": VOCABULARY, "length": LENGTH, "width": 32, "num_layers": 2, "hidden": 32}
    return MoE(**sizes, num_experts=8, top_k=2).double()


def spec_of(mesh: dict[str, int], **rest: Any) -> dict[str, Any]:
    ids = {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY}
    return {
        "mesh": mesh,
        "batch": {"global": 2, "micro": 1},
        "inputs": {"input_ids": ids, "targets": ids},
        "optimizer": {"lr": 1e-2, "weight_decay": 0.1},
        **rest,
    }


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = (2, LENGTH)
    names = ("input_ids", "targets")
    return [{n: torch.randint(VOCABULARY, shape, generator=generator) for n in names} for _ in range(NUM_STEPS)]


def one_process() -> Trained:
    return trained_by_spec(build(), spec_of({}), batches())


def on(host: Any, layout: str) -> Trained:
    mesh, rest = LAYOUTS[layout]
    return trained_on(host, plan(build(), spec_of(mesh, **rest)), batches())


@pytest.mark.thorough
def test_alone_it_rests_as_in_torch() -> None:
    engine = Engine(plan(build(), spec_of({})))
    losses, truth = [engine.train_step(batch).loss for batch in batches()], one_process()
    assert losses == pytest.approx(truth.losses, rel=1e-12)
    assert truth.furthest(engine.gather_parameters()) < 1e-11
    assert engine.optimizer.optimizer is not None
    counts = engine.optimizer.optimizer.updates()[1]
    assert {0, NUM_STEPS} < set(counts.values())  # some never, some always, some now and then
    assert all(".experts.experts." in name for name in counts)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_every_layout_it_rests_as_in_torch(lab: Lab, layout: str) -> None:
    found, truth = lab.call(on, layout), one_process()
    assert found.losses == pytest.approx(truth.losses, rel=1e-9)
    assert truth.furthest(found.parameters) < 1e-9


@pytest.mark.thorough
def test_a_save_knows_who_has_rested(tmp_path: Path) -> None:
    first = Engine(plan(build(), spec_of({})))
    for batch in batches()[:3]:
        first.train_step(batch)
    first.save(tmp_path)
    second = Engine(plan(build(), spec_of({})))
    second.load(tmp_path)
    for batch in batches()[3:]:
        second.train_step(batch)
    assert one_process().furthest(second.gather_parameters()) < 1e-11
