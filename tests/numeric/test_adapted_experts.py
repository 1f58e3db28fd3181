"""Experts with computed stacks, such as those with adapters, train as one process does on every layout.

Ranks are threads of this process. Experts with slots: tests/numeric/test_expert_slots.py; with peft:
tests/numeric/test_adapters.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import nn

from passes.moe import exchange
from passes.partition.typings import experts as options
from passes.partition.typings.base import Form, Option, Site
from passes.partition.typings.table import RULES
from passes.types.types import I
from planner import PlanError, plan
from tests.models import sorted_experts, stacked_experts
from tests.models.adapted_experts import Added, LowRank, Normed, Widened, adapted
from tests.numeric.test_expert_layouts import FOLDINGS, batch_of, built, check, layer_of
from tests.tools.simulated_mesh import spec_of

LAYOUTS = {"alone": {}, "tp2": {"tp": 2}, **FOLDINGS, "cp2·ep2": {"cp": 2, "ep": 2}}
WAYS = {
    "sorted": lambda: sorted_experts.Sorting(sorted_experts.by_places),
    "every token": lambda: layer_of(stacked_experts.biased),
    "masked": lambda: layer_of(stacked_experts.masked),
    "looked up": lambda: layer_of(stacked_experts.of_pairs),
}
KINDS = (LowRank, Added, Normed)
LENGTH = 8
SEPARATE = "tp2·dp2·ep2, etp 1"


def model_of(way: str, kind: type[nn.Module], **options: object) -> nn.Module:
    return built(lambda: adapted(WAYS[way](), kind, **options))  # pyright: ignore[reportArgumentType]


def hold(way: str, kind: type[nn.Module], layout: str, **options: object) -> None:
    check(lambda: model_of(way, kind, **options), LAYOUTS[layout], length=LENGTH)


@pytest.mark.sampled(4)
@pytest.mark.check
@pytest.mark.covering(1, pairs=2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_every_layout_equals_one_process(way: str, kind: type[nn.Module], layout: str) -> None:
    hold(way, kind, layout)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [SEPARATE, "ep2·dp2"])
@pytest.mark.parametrize(("rank", "trains"), [(1, True), (2, False), (3, True)])
def test_ranks_of_adapters_and_frozen_stacks(rank: int, trains: bool, layout: str) -> None:
    hold("sorted", LowRank, layout, rank=rank, trains=trains)


def test_the_stack_is_sharded_over_ep_and_its_factors_are_not() -> None:
    made = plan(model_of("sorted", LowRank), spec_of(batch_of(4), {"dp": 2, "ep": 2}))
    graph = made.to_run()[0].program.graph.graph
    assert len(graph.find_nodes(op="call_function", target=exchange.own_slices)) == 4
    local = {row.name.removeprefix("layer.parametrizations."): row.local_shape for row in made.parameters}
    assert local["up.original"] == (2, 8, 12)
    assert local["up.0.a"] == (8, 8)


def test_a_number_that_all_experts_share_is_refused_over_ep() -> None:
    with pytest.raises(PlanError, match="experts share"):
        hold("sorted", Widened, "ep2·dp2")


def test_a_gradient_that_is_taken_for_the_whole_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(site: Site) -> Iterator[Option]:
        for option in options.share(site):
            yield Option((I,), option.out, Form.WHOLE)

    monkeypatch.setitem(RULES, exchange.own_slices, whole)
    with pytest.raises(AssertionError, match="of the gradients' norm"):
        hold("sorted", LowRank, SEPARATE)
