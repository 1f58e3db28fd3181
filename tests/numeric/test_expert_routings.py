"""Whatever the router chooses, experts spread over ranks give what one process gives, and nobody waits forever.

Ranks are threads of this process: one that waits longer than a minute fails the test (tests/tools/simulated_ranks.py).
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import Phase, given
from hypothesis import strategies as st
from torch import Tensor

from tests.models.routed import VOCABULARY, Experts, Routed, loop, stacks
from tests.tools.examples import examples
from tests.tools.simulated_mesh import Batch, equals_one_process

FOLDINGS: dict[str, dict[str, int]] = {
    "ep2·dp2": {"dp": 2, "ep": 2},
    "tp2·ep2, etp 1": {"tp": 2, "ep": 2, "etp": 1},
    "tp2·dp2·ep2, etp 1": {"tp": 2, "dp": 2, "ep": 2, "etp": 1},
    "tp2·dp2·ep2, etp 2": {"tp": 2, "dp": 2, "ep": 2, "etp": 2},
    "dp4·etp2·ep2": {"dp": 4, "etp": 2, "ep": 2},
    "tp2·dp2·ep4, etp 1": {"tp": 2, "dp": 2, "ep": 4, "etp": 1},
}
WAYS = pytest.mark.parametrize("way", [loop, stacks], ids=lambda w: w.__name__)
OVER = pytest.mark.parametrize("folding", FOLDINGS)


def favoured(num_experts: int, *chosen: int) -> Tensor:
    """Scores by which every token goes to these, in this order."""
    scores = torch.zeros(VOCABULARY, num_experts)
    for place, expert in enumerate(chosen):
        scores[:, expert] = 3.0 - 0.5 * place
    return scores


def by_half(num_experts: int, low: tuple[int, ...], high: tuple[int, ...]) -> Tensor:
    """Ids of the lower half of the vocabulary go to some, those of the upper half to others."""
    half = VOCABULARY // 2
    return torch.cat([favoured(num_experts, *low)[:half], favoured(num_experts, *high)[half:]])


def drawn(num_experts: int, spread: float = 2.0, seed: int = 0) -> Tensor:
    return torch.randn(VOCABULARY, num_experts, generator=torch.Generator().manual_seed(seed)) * spread


def ids(rows: int, length: int, low: int = 0, high: int = VOCABULARY) -> Tensor:
    return torch.randint(low, high, (rows, length), generator=torch.Generator().manual_seed(rows + length))


def batch_of(input_ids: Tensor) -> Batch:
    return {"input_ids": input_ids, "labels": input_ids.roll(1, 0).roll(1, 1)}


def maker(way: Experts, scores: Tensor, top_k: int, change: Callable[[Routed], object] = lambda _: None):
    def make() -> Routed:
        torch.manual_seed(0)
        model = Routed(way, scores, top_k).double()
        change(model)
        return model

    return make


def tokens_of_experts(make: Callable[[], Routed], input_ids: Tensor) -> list[int]:
    model = make()
    return torch.bincount(model.chosen(input_ids)[2].flatten(), minlength=model.num_experts).tolist()


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.covering(pairs=2)
@OVER
@WAYS
def test_all_tokens_to_one_expert(way: Experts, folding: str) -> None:
    mesh = FOLDINGS[folding]
    rows = 2 * mesh.get("dp", 1)
    make, batch = maker(way, favoured(4, 2), 1), batch_of(ids(rows, 5))
    assert tokens_of_experts(make, batch["input_ids"]) == [0, 0, rows * 5, 0]
    equals_one_process(make, batch, mesh)


@pytest.mark.sampled(1)
@pytest.mark.covering(pairs=2)
@OVER
@WAYS
def test_a_rank_whose_experts_get_nothing(way: Experts, folding: str) -> None:
    mesh = FOLDINGS[folding]
    rows = 2 * mesh.get("dp", 1)
    make, batch = maker(way, favoured(8, 7, 6), 2), batch_of(ids(rows, 4))
    assert tokens_of_experts(make, batch["input_ids"]) == [0] * 6 + [rows * 4] * 2
    equals_one_process(make, batch, mesh)


@pytest.mark.sampled(1)
@pytest.mark.covering(pairs=2)
@OVER
@WAYS
def test_ranks_whose_tokens_go_to_different_experts(way: Experts, folding: str) -> None:
    """The first half of the batch, so of the dp ranks, to the last experts; the other half to the first."""
    mesh = FOLDINGS[folding]
    rows = 2 * mesh.get("dp", 1)
    half = VOCABULARY // 2
    apart = torch.cat([ids(rows // 2, 4, 0, half), ids(rows // 2, 4, half, VOCABULARY)])
    make = maker(way, by_half(4, (3, 2), (0, 1)), 2)
    assert tokens_of_experts(make, apart[: rows // 2])[:2] == [0, 0]
    equals_one_process(make, batch_of(apart), mesh)


@pytest.mark.thorough
@pytest.mark.covering(pairs=2)
@pytest.mark.parametrize("top_k", [1, 4])
@OVER
@WAYS
def test_one_choice_and_all_choices(way: Experts, folding: str, top_k: int) -> None:
    mesh = FOLDINGS[folding]
    equals_one_process(maker(way, drawn(4), top_k), batch_of(ids(mesh.get("dp", 1), 5)), mesh)


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [{"dp": 4, "ep": 4}, {"tp": 2, "dp": 2, "ep": 4, "etp": 1}], ids=str)
@WAYS
def test_one_expert_a_rank(way: Experts, mesh: dict[str, int]) -> None:
    equals_one_process(maker(way, drawn(4), 2), batch_of(ids(4, 5)), mesh)


@pytest.mark.thorough
@pytest.mark.covering(pairs=2)
@pytest.mark.parametrize("top_k", [1, 2])
@OVER
@WAYS
def test_one_token_a_rank(way: Experts, folding: str, top_k: int) -> None:
    """Where it makes one row alone, some rank of tp has none to send."""
    mesh = FOLDINGS[folding]
    equals_one_process(maker(way, drawn(4), top_k), batch_of(ids(mesh.get("dp", 1), 1)), mesh)


@pytest.mark.thorough
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("length", [3, 7])
@WAYS
def test_rows_that_tp_does_not_divide(way: Experts, length: int, top_k: int) -> None:
    ran = equals_one_process(maker(way, drawn(4), top_k), batch_of(ids(2, length)), FOLDINGS["tp2·dp2·ep2, etp 1"])
    sent = {program.axes["ep"].bytes["all_to_all", "backward"] for program in ran.programs}
    assert len(sent) > 1, "one tp rank sends a row more than the other"


@pytest.mark.sampled(1)
@pytest.mark.covering(1, pairs=2)
@OVER
@WAYS
def test_a_router_that_finds_all_experts_equal(way: Experts, folding: str) -> None:
    def no_gate(model: Routed) -> None:
        model.gate.weight.data.zero_()

    mesh = FOLDINGS[folding]
    equals_one_process(
        maker(way, torch.zeros(VOCABULARY, 4), 2, no_gate), batch_of(ids(2 * mesh.get("dp", 1), 4)), mesh
    )


FROZEN: dict[str, Callable[[str], bool]] = {
    "all experts": lambda name: name.startswith(("experts", "up", "down")),
    "some of them": lambda name: name.startswith(("experts.1.", "experts.2.0", "up")),
    "the router": lambda name: name.startswith(("gate", "scores")),
    "all but the last expert": lambda name: not name.startswith(("experts.3.", "up", "down")),
    "what experts read": lambda name: name.startswith(("tokens", "norm")),
    "all but the experts": lambda name: not name.startswith(("experts", "up", "down")),
    "all but the router": lambda name: not name.startswith(("gate", "scores")),
}


@pytest.mark.sampled(1)
@pytest.mark.covering(pairs=2)
@pytest.mark.parametrize("which", FROZEN)
@pytest.mark.parametrize("folding", ["ep2·dp2", "tp2·dp2·ep2, etp 1", "dp4·etp2·ep2"])
@WAYS
def test_frozen_parameters(way: Experts, folding: str, which: str) -> None:
    def freeze(model: Routed) -> None:
        frozen = [p.requires_grad_(False) for name, p in model.named_parameters() if FROZEN[which](name)]
        assert frozen

    mesh = FOLDINGS[folding]
    make, batch = maker(way, drawn(4), 2, freeze), batch_of(ids(2 * mesh.get("dp", 1), 4))
    equals_one_process(make, batch, mesh)


@pytest.mark.sampled(2)
@pytest.mark.covering(1, pairs=2)
@OVER
@pytest.mark.parametrize(("dtype", "loss", "gradient"), [(torch.float32, 1e-5, 1e-4), (torch.bfloat16, 2e-2, 5e-2)])
def test_grouped_products_of_the_kernel(folding: str, dtype: torch.dtype, loss: float, gradient: float) -> None:
    mesh = FOLDINGS[folding]
    make, batch = maker(stacks, drawn(4), 2, lambda model: model.to(dtype)), batch_of(ids(2 * mesh.get("dp", 1), 6))
    equals_one_process(make, batch, mesh, loss=loss, gradient=gradient)


@pytest.mark.thorough
@given(
    st.sampled_from([loop, stacks]),
    st.sampled_from(list(FOLDINGS)),
    st.sampled_from([(4, 1), (4, 2), (4, 3), (4, 4), (8, 1), (8, 3)]),
    st.integers(1, 3),
    st.integers(1, 6),
    st.sampled_from([0.3, 2.0, 6.0]),
    st.integers(0, 1000),
)
@examples(15, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # a failure costs seconds
def test_any_routing(
    way: Experts, folding: str, sizes: tuple[int, int], rows: int, length: int, spread: float, seed: int
) -> None:
    num_experts, top_k = sizes
    mesh = FOLDINGS[folding]
    make = maker(way, drawn(num_experts, spread, seed), top_k)
    equals_one_process(make, batch_of(ids(rows * mesh.get("dp", 1), length)), mesh)
