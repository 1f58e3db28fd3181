"""Experts with computed stacks, such as those with adapters, and experts with a layer in common train as one process.

Ranks are threads of this process. Experts with slots: tests/numeric/test_expert_slots.py; with peft:
tests/numeric/test_adapters.py."""

from collections.abc import Iterator
from functools import partial

import pytest
from torch import nn

from passes.errors import PlanError
from passes.moe import exchange
from passes.partition.typings import experts as options
from passes.partition.typings.base import Form, Option, Site
from passes.partition.typings.table import RULES
from passes.program.ops.aten import aten
from passes.types.types import I
from planner import plan
from tests.models import sorted_experts, stacked_experts
from tests.models.adapted_experts import Added, LowRank, Normed, Widened, adapted
from tests.models.experts import Layer, masks
from tests.numeric.test_expert_layouts import FOLDINGS, batch_of, built, check, in_blocks, layer_of
from tests.tools.captures import plan_again
from tests.tools.simulated_mesh import spec_of

# ---- experts with computed stacks, such as those with adapters


LAYOUTS = {"alone": {}, "tp2": {"tp": 2}, **FOLDINGS, "cp2·ep2": {"cp": 2, "ep": 2}}
WAYS = {
    "sorted": lambda: sorted_experts.Sorting(sorted_experts.by_places),
    "every token": lambda: layer_of(stacked_experts.biased),
    "masked": lambda: layer_of(stacked_experts.masked),
    "looked up": lambda: layer_of(stacked_experts.of_pairs),
}
LENGTH = 8
KINDS = (LowRank, Added, Normed)
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


# ---- experts that have a layer in common: over ep each rank's rows add to its gradient, on every layout


PLACES = ("norm", "first", "middle", "last")


class Shared(Layer):
    """Four experts [8 → 12 → 8], 2 a token."""

    def __init__(self, place: str, hidden: int = 8, width: int = 12) -> None:
        super().__init__(masks, hidden, width)
        common = {
            "norm": nn.LayerNorm(hidden),
            "first": nn.Linear(hidden, width),
            "middle": nn.Linear(width, width),
            "last": nn.Linear(width, hidden),
        }[place]

        def expert() -> nn.Sequential:
            first = common if place == "first" else nn.Linear(hidden, width)
            last = common if place == "last" else nn.Linear(width, hidden)
            front = [common] if place == "norm" else []
            middle = [common, nn.GELU()] if place == "middle" else []
            return nn.Sequential(*front, first, nn.GELU(), *middle, last)

        self.experts = nn.ModuleList(expert() for _ in range(self.num_experts))


SHARED_LAYOUTS: dict[str, dict[str, int]] = {
    "alone": {},
    "tp2": {"tp": 2},
    "dp2·ep2": {"dp": 2, "ep": 2},
    "tp2·dp2·ep2, etp 1": {"tp": 2, "dp": 2, "ep": 2, "etp": 1},
    "tp2·dp2·ep2, etp 2": {"tp": 2, "dp": 2, "ep": 2, "etp": 2},
    "cp2·tp2·ep4, etp 1": {"cp": 2, "tp": 2, "ep": 4, "etp": 1},
    "tp2·dp2, etp 1": {"tp": 2, "dp": 2, "etp": 1},
}
CUT = {"tensor_parallel": {"sequence_parallel": True, "vocabulary_multiple": 8}}
CASES = [(place, layout) for place in PLACES for layout in SHARED_LAYOUTS]


def hold_shared(place: str, layout: str, **more: object) -> None:
    make = in_blocks if more else built
    check(lambda: make(partial(Shared, place)), SHARED_LAYOUTS[layout], length=LENGTH, **more)


@pytest.mark.sampled(1)
@pytest.mark.check
@pytest.mark.covering(1, pairs=2)
@pytest.mark.parametrize(("place", "layout"), CASES)
def test_a_shared_layer_equals_one_process_on_every_layout(place: str, layout: str) -> None:
    hold_shared(place, layout)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", PLACES)
def test_with_sequence_parallelism_and_recompute(place: str) -> None:
    hold_shared(place, "tp2·dp2·ep2, etp 1", **CUT)
    hold_shared(place, "tp2·dp2·ep2, etp 1", recompute="full")


def test_what_comes_before_the_first_own_weight_is_computed_once() -> None:
    made = plan_again(built(partial(Shared, "norm")), spec_of(batch_of(2), {}))
    graph = made.to_run()[0].program.graph.graph
    own = [n for n in graph.find_nodes(op="call_function", target=aten.layer_norm.default) if "experts" in str(n.args)]
    assert len(own) == 1


def test_a_weight_is_shared_only_between_axes() -> None:
    batch = batch_of(4)
    for mesh, count in (({}, 0), ({"dp": 2, "ep": 2}, 2)):  # the matrix and its bias
        made = plan_again(built(partial(Shared, "last")), spec_of(batch, mesh))
        graph = made.to_run()[0].program.graph.graph
        assert len(graph.find_nodes(op="call_function", target=exchange.share)) == count


@pytest.mark.parametrize(
    ("op", "held"),
    [
        (exchange.own_slices, lambda: hold("sorted", LowRank, SEPARATE)),
        (exchange.share, lambda: hold_shared("last", SEPARATE)),
    ],
    ids=["own_slices", "share"],
)
def test_a_gradient_that_is_taken_for_the_whole_is_seen(monkeypatch: pytest.MonkeyPatch, op, held) -> None:
    def whole(site: Site) -> Iterator[Option]:
        for option in options.share(site):
            yield Option((I,), option.out, Form.WHOLE)

    monkeypatch.setitem(RULES, op, whole)
    with pytest.raises(AssertionError, match="of the gradients' norm"):
        held()
