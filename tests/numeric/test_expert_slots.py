"""Experts with a fixed number of slots train as one process does, microbatch by microbatch, in every spelling.

Ranks are threads of this process; tests/numeric/test_experts.py runs one of the same as processes.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner import PlanError
from tests.models import experts, slots
from tests.models.adapted_experts import Added, LowRank, Normed, adapted
from tests.models.slots import Way
from tests.numeric.test_expert_layouts import FOLDINGS, batch_of
from tests.tools.captures import plan_again
from tests.tools.simulated_mesh import equals_one_process, spec_of

UNKNOWN = (slots.expert_choice,)  # experts fill all their slots, whoever chose what


def built(way: Way, capacity: int = 3, change: type[nn.Module] | None = None, **more: Any) -> nn.Module:
    """``change``: of the stacks (tests.models.adapted_experts)."""
    torch.manual_seed(3)
    layer = slots.Slots(way, capacity, **more)
    model = experts.Net(adapted(layer, change) if change is not None else layer).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def alone(model: nn.Module, batch: Mapping[str, Tensor], dp: int, counts: list[list[int]]) -> Tensor:
    """The mean loss of dp microbatches; ``counts`` gets how many tokens of each chose each expert."""

    def count(_: nn.Module, __: tuple[Tensor, ...], scores: Tensor) -> None:
        way: Way = model.layer.way  # type: ignore[union-attr,assignment]
        chosen = scores.topk(slots.CHOICES.get(way, 2), -1).indices
        groups = chosen.view(2 if way in (slots.by_sequence, slots.experts_first) else 1, -1)
        counts.extend(group.bincount(minlength=slots.E).tolist() for group in groups)

    handle = model.get_submodule("layer.gate").register_forward_hook(count)
    losses = [model(**{n: x.chunk(dp)[i] for n, x in batch.items()}) for i in range(dp)]
    handle.remove()
    return torch.stack(losses).mean()


def check(way: Way, batch: Mapping[str, Tensor], mesh: Mapping[str, int], capacity: int = 3, **more: Any) -> None:
    counts: list[list[int]] = []
    ran = equals_one_process(
        lambda: built(way, capacity, **more),
        dict(batch),
        mesh,
        alone=lambda model: alone(model, batch, mesh.get("dp", 1), counts),
    )
    told = Counter[tuple[str, str, str]]()
    for row in ran.plan.collectives:
        if row.per == "microbatch":
            told[row.axis, row.kind, row.phase] += row.bytes
    for program in ran.programs:
        sent = {(axis.name, *key): n for axis in program.axes.values() for key, n in axis.bytes.items() if n}
        assert sent == told
    figures = sum(p.load.figures for r, p in enumerate(ran.programs) if not ran.plan.mesh.place(r)["tp"]).tolist()  # type: ignore[union-attr]
    if way in UNKNOWN or "least" in more:
        assert len(figures) == slots.E
    else:
        assert figures[: slots.E] == torch.tensor(counts).sum(0).tolist()
        assert figures[slots.E] == sum(max(n - capacity, 0) for group in counts for n in group)


@pytest.mark.thorough
@pytest.mark.covering(pairs=2)
@pytest.mark.parametrize("folding", FOLDINGS)
@pytest.mark.parametrize("change", [LowRank, Added, Normed], ids=lambda change: change.__name__)
def test_slots_of_experts_with_computed_stacks(change: type[nn.Module], folding: str) -> None:
    mesh = FOLDINGS[folding]
    check(slots.one_hot, batch_of(2 * mesh.get("dp", 1)), mesh, change=change)


@pytest.mark.thorough
@pytest.mark.parametrize("way", slots.WAYS, ids=lambda w: w.__name__)
def test_every_spelling_of_slots(way):
    check(way, batch_of(4), FOLDINGS["tp2·dp2·ep2, etp 2"])


@pytest.mark.sampled(1)
@pytest.mark.covering(pairs=2)
@pytest.mark.parametrize("folding", [name for name in FOLDINGS if name != "tp2·dp2·ep2, etp 2"])
@pytest.mark.parametrize("way", [slots.one_hot, slots.unbound], ids=lambda w: w.__name__)
def test_slots_under_every_folding(way, folding):
    mesh = FOLDINGS[folding]
    check(way, batch_of(2 * mesh.get("dp", 1)), mesh)


@pytest.mark.thorough
@pytest.mark.parametrize("capacity", [1, 6])
@pytest.mark.parametrize("way", [slots.switch, slots.scattered, slots.chunks], ids=lambda w: w.__name__)
def test_one_token_and_one_slot_and_all_tokens_to_one_expert(way, capacity):
    mesh = FOLDINGS["tp2·dp2·ep2, etp 1"]
    check(way, batch_of(2, 1), mesh, capacity, favoured=40.0)
    check(way, batch_of(4), mesh, capacity, favoured=40.0)


@pytest.mark.thorough
@pytest.mark.parametrize("way", [slots.by_sequence, slots.experts_first], ids=lambda w: w.__name__)
def test_groups_of_tokens_that_are_as_many_as_slots(way):
    check(way, batch_of(4), FOLDINGS["ep2·dp2"], 2)


@pytest.mark.thorough
def test_all_tokens_dropped():
    check(slots.written, batch_of(4), FOLDINGS["ep2·dp2"], least=2.0)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", slots.REFUSED, ids=lambda w: w.__name__)
def test_what_is_not_computed_slot_by_slot_is_told(way):
    with pytest.raises(PlanError, match=slots.REFUSED[way]) as raised:
        plan_again(built(way), spec_of(batch_of(4), FOLDINGS["ep2·dp2"]))
    assert "slots.py" in str(raised.value)


@pytest.mark.thorough
def test_a_plan_tells_slots_and_what_is_sent():
    made = plan_again(built(slots.one_hot), spec_of(batch_of(4), FOLDINGS["ep2·dp2"]))
    (row,) = made.experts
    assert (row.how, row.bytes) == ("3 slots of each expert", 4 * 3 * 8 * 8)
    assert "3 slots of each expert" in made.describe()
    taken = plan_again(built(slots.expert_choice), spec_of(batch_of(4), FOLDINGS["ep2·dp2"]))
    assert taken.experts[0].how == "3 slots that each expert fills"


@pytest.mark.thorough
def test_experts_that_ep_does_not_divide_are_told():
    with pytest.raises(PlanError, match="4 experts are not divisible by ep = 3"):
        plan_again(built(slots.one_hot), spec_of(batch_of(6), {"dp": 3, "ep": 3}))
