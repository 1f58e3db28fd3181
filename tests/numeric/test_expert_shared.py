"""Experts that have a layer in common: over ep each rank's rows add to its gradient, on every layout."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from passes.moe import exchange
from passes.partition.typings import experts as options
from passes.partition.typings.base import Form, Option, Site
from passes.partition.typings.table import RULES
from passes.program.ops.aten import aten
from passes.types.types import I
from tests.models.shared_experts import PLACES, Shared
from tests.numeric.test_expert_layouts import batch_of, built, check, in_blocks
from tests.tools.captures import plan_again
from tests.tools.simulated_mesh import spec_of

LENGTH = 8
LAYOUTS: dict[str, dict[str, int]] = {
    "alone": {},
    "tp2": {"tp": 2},
    "dp2·ep2": {"dp": 2, "ep": 2},
    "tp2·dp2·ep2, etp 1": {"tp": 2, "dp": 2, "ep": 2, "etp": 1},
    "tp2·dp2·ep2, etp 2": {"tp": 2, "dp": 2, "ep": 2, "etp": 2},
    "cp2·tp2·ep4, etp 1": {"cp": 2, "tp": 2, "ep": 4, "etp": 1},
    "tp2·dp2, etp 1": {"tp": 2, "dp": 2, "etp": 1},
}
CUT = {"tensor_parallel": {"sequence_parallel": True, "vocabulary_multiple": 8}}
CASES = [(place, layout) for place in PLACES for layout in LAYOUTS]


def hold(place: str, layout: str, **more: object) -> None:
    make = in_blocks if more else built
    check(lambda: make(partial(Shared, place)), LAYOUTS[layout], length=LENGTH, **more)


@pytest.mark.sampled(1)
@pytest.mark.check
@pytest.mark.covering(1, pairs=2)
@pytest.mark.parametrize(("place", "layout"), CASES)
def test_every_layout_equals_one_process(place: str, layout: str) -> None:
    hold(place, layout)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", PLACES)
def test_with_sequence_parallelism_and_recompute(place: str) -> None:
    hold(place, "tp2·dp2·ep2, etp 1", **CUT)
    hold(place, "tp2·dp2·ep2, etp 1", recompute="full")


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


def test_a_gradient_that_is_taken_for_the_whole_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(site: Site) -> Iterator[Option]:
        for option in options.share(site):
            yield Option((I,), option.out, Form.WHOLE)

    monkeypatch.setitem(RULES, exchange.share, whole)
    with pytest.raises(AssertionError, match="of the gradients' norm"):
        hold("last", "tp2·dp2·ep2, etp 1")
