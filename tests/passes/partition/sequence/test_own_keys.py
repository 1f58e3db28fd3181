"""What a rank of cp keeps of attention: its own keys and values. Held against autograd, and against one process."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from passes.program.ops.sequence import causal_attention, gather_sequence, gathered_attention
from planner import plan
from planner.trace.lowered import Lowered
from tests.models import hugging_face
from tests.models.plannable import MODELS, build, spec_of
from tests.tools.saved_memory import kept_bytes, measured
from tests.tools.simulated_mesh import equals_one_process
from tests.tools.simulated_ranks import built


def targets(name: str, mesh: dict[str, int], train: bool = False) -> Counter[Any]:
    made: Any = plan(build(name).train(train), spec_of(name, mesh=mesh))
    asked = (causal_attention, gather_sequence, gathered_attention)
    return Counter(n.target for n in made.decisions.program.graph.graph.nodes if n.target in asked)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["gpt2", "llama", "llama, one key head", "bert"])
def test_attention_gathers_for_itself(name):
    assert targets(name, {"cp": 2}) == {gathered_attention: 2}


@pytest.mark.thorough
def test_what_draws_or_shares_key_heads_gathers_before():
    assert targets("gpt2", {"cp": 2}, train=True) == {causal_attention: 2, gather_sequence: 4}
    assert targets("llama, one key head", {"cp": 2, "tp": 2}) == {causal_attention: 2, gather_sequence: 4}


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_what_a_rank_keeps_falls_as_one_over_cp_and_is_what_the_plan_says(family):
    kept = {}
    for cp in (1, 2, 4):
        made, ranks = measured(lambda: hugging_face.build(family), hugging_face.batch(family), {"cp": cp})
        trace = Lowered(made.decisions, made.shards).trace(0)  # pyright: ignore[reportArgumentType]
        assert [rank.total for rank in ranks] == [kept_bytes(trace)] * cp
        kept[cp] = kept_bytes(trace)
    assert kept[2] <= kept[1] / 2 * 1.05
    assert kept[4] <= kept[1] / 4 * 1.05


CASES = [
    ("gpt", {"cp": 2}),
    ("gpt", {"cp": 4}),
    ("llama", {"cp": 2, "tp": 2}),
    ("llama, one key head", {"cp": 2, "tp": 2}),
    ("bert", {"cp": 2, "dp": 2}),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "mesh"), CASES, ids=str)
def test_ranks_of_cp_train_as_one_process(name, mesh):
    def make() -> Any:
        return built(MODELS[name].make).eval()

    equals_one_process(make, batch_of(name, mesh.get("dp", 1)), mesh, loss=1e-6, gradient=1e-6)


def batch_of(name: str, dp: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    entry = MODELS[name]
    return {n: torch.randint(0, entry.vocabulary, (2 * dp, 16), generator=generator) for n in entry.inputs}
