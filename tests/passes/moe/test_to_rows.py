"""Experts on rows compute what they did: ``to_rows`` alone, in one process, beside the program that it rewrites.

In float64, graphs of float32 and of bfloat16 differ by the order of sums alone. In bfloat16 the rows are as near to
float64 as the program is.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn

from passes.errors import PlanError
from passes.moe import exchange
from passes.moe.find import find_experts
from passes.moe.open import to_rows
from passes.program.program import Program, copied
from tests.models import (
    experts,
    hashed_experts,
    hugging_face,
    routers,
    selected_rows,
    sliced_experts,
    slots,
    sorted_experts,
    stacked_experts,
)
from tests.models.adapted_experts import Added, LowRank, Normed, adapted
from tests.models.drawn_experts import DrawnNet
from tests.models.hugging_face import MOE
from tests.tools.expert_programs import OPENINGS, SPELLINGS, Make, apart, captured, of, results

NEAR = 1e-11
NEAR_IN_HALF = 1.5  # of the distance of the program in bfloat16 from itself in float64, with 2^-9 for a rounding
LAYERS = SPELLINGS | {
    **of(experts.Layer, experts.WAYS),
    **of(selected_rows.Selecting, (*selected_rows.FLAT, *selected_rows.OF_BATCHES)),
    **of(sliced_experts.Sliced, sliced_experts.WAYS),
    **of(slots.Slots, slots.WAYS),
    **of(routers.Routed, routers.SCORES),
    "adapted": lambda: adapted(stacked_experts.Stacks(stacked_experts.biased), LowRank),
    "adapted by an einsum": lambda: adapted(stacked_experts.Stacks(stacked_experts.of_pairs), Added),
    "adapted of rows": lambda: adapted(sorted_experts.Sorting(sorted_experts.by_places), Normed),
}
HASHED = {
    numbers.__name__: partial(hashed_experts.Hashing, numbers, sorted_experts.by_places)
    for numbers in hashed_experts.NUMBERS
}


def made(name: str) -> tuple[Make, Mapping[str, Tensor]]:
    """A model and a batch."""
    if name not in MOE:
        return HASHED.get(name, partial(net, name)), experts.batch()
    return lambda: hugging_face.made(MOE[name]), hugging_face.batch("mixtral")


def net(name: str) -> nn.Module:
    return experts.Net(LAYERS[name]())


def on_rows(program: Program) -> Program:
    """A copy with every layer of experts on rows."""
    changed = copied(program)
    found = find_experts(changed)
    layers = list(found.layers)
    assert layers
    assert not found.doubts
    for place, layer in enumerate(layers):
        layers[place] = to_rows(changed, layer, layers)
    assert {n.target for n in changed.graph.graph.nodes} & {exchange.meet, exchange.send_slots}
    return changed


def check(program: Program, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """The results of the program in float64."""
    exact = dict(results(program, values))
    most, where = apart(program, exact, dict(results(on_rows(program), values)))
    assert most < NEAR, f"{where} is {most:.1e} away"
    return exact


NAMES = [*LAYERS, *HASHED, *MOE]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [n if n in OPENINGS else pytest.param(n, marks=pytest.mark.thorough) for n in NAMES])
def test_rows_are_the_program_in_float64(name: str) -> None:
    check(*captured(*made(name)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [n if n in OPENINGS else pytest.param(n, marks=pytest.mark.thorough) for n in NAMES])
def test_rows_of_bfloat16(name: str) -> None:
    program, values = captured(*made(name), precision={"parameters": "bfloat16"})
    exact = check(program, values)
    own, _ = apart(program, exact, dict(results(program, values, as_written=True)))
    most, where = apart(program, exact, dict(results(on_rows(program), values, as_written=True)))
    assert most < NEAR_IN_HALF * own + 2**-9, f"{where} is {most:.1e} away, that of the program {own:.1e}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(100))
def test_rows_of_five_drawn_layers(seed: int) -> None:
    check(*captured(lambda: DrawnNet(seed).double()))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [*stacked_experts.WAYS, *experts.WAYS], ids=lambda w: w.__name__)
def test_a_token_of_all_experts_is_right_or_refused(way: Any) -> None:
    """Of two experts, both: a dim of experts and one of choices have one size."""
    layer = stacked_experts.Stacks if way in stacked_experts.WAYS else experts.Layer
    program, values = captured(lambda: experts.Net(layer(way, num_experts=2, top_k=2)))
    with suppress(PlanError):
        check(program, values)
