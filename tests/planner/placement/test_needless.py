"""Nothing is computed whole that can be cut: the share of FLOPs, the exchanges, and numbers equal to one process."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.errors import PlanError
from planner import Plan
from tests.models.computed_weights import COMPUTED
from tests.models.needless import (
    ATTENTION,
    LOOPS,
    LOSSES,
    NO_ATTENTION,
    WIDTH,
    ConvolutionModule,
    HeadModules,
    JoinedBiases,
    JoinedBiasesOfFive,
    Layered,
    Mixing,
    Mlp,
    batch,
)
from tests.models.recurrences import CHAINS
from tests.tools.simulated_ranks import assert_equals_one_process, num_collectives, planned


class Written(nn.Module):
    """``way(hidden)`` [b, s, 4 w] between two linears."""

    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.way(self.up(x)))


def first_features(x: Tensor) -> Tensor:
    out = x.clone()
    out[..., :WIDTH] = F.gelu(x[..., :WIDTH])
    return out


def few_of_many(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[..., :6] = x[..., :6].tanh()
    out[..., 6:] = F.gelu(x[..., 6:])
    return out


def the_rest_is_zero(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[..., : WIDTH + WIDTH // 2] = F.gelu(x[..., : WIDTH + WIDTH // 2])
    return out


def even_and_odd(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[..., ::2] = x[..., ::2] * 2 - x[..., 1::2]
    out[..., 1::2] = x[..., 1::2] + F.gelu(x[..., ::2])
    return out


def every_fourth(x: Tensor) -> Tensor:
    out = F.gelu(x)
    out[..., 1::4] = x[..., 2::4].sin()
    return out


WAYS = {f.__name__: f for f in (first_features, few_of_many, the_rest_is_zero, even_and_odd, every_fourth)}


# ---- nothing is computed whole that can be cut: the share of FLOPs, the exchanges, and numbers equal to one process


OUTSIDE = 4  # a lookup, the head's f, the loss's maximum and its sums

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "biases and new zeros": lambda: JoinedBiases(torch.zeros_like),
    "biases and a buffer": lambda: JoinedBiasesOfFive(lambda held: held),
    "convolutions, batch norm in training": lambda: ConvolutionModule(frozen=False),
    "convolutions, batch norm in evaluation": lambda: ConvolutionModule(frozen=True),
}


OF_CHAINS = {  # of the FLOPs at tp 2; the rest is computed whole on each rank
    "lstm cell": 2 / 11,
    "gru cell": 2 / 9,
    "gru cell without biases": 2 / 9,
    "rnn cell": 2 / 5,
    "scalar memory": 15 / 17,
    "focal modulation": 1.0,
    "gated mixing": 5 / 6,
}
SHARED_OUT: dict[str, tuple[Callable[[], nn.Module], float]] = {
    **{f"computed weight, {name}": (make, 1.0) for name, make in COMPUTED.items()},
    **{f"parts are written, {name}": (partial(Written, way), 1.0) for name, way in WAYS.items()},
    **{name: (make, OF_CHAINS[name]) for name, make in CHAINS.items()},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SHARED_OUT)
def test_products_of_a_layer_are_sharded_as_far_as_they_can(name):
    make, share = SHARED_OUT[name]
    made = assert_equals_one_process(lambda: Layered(make), batch(), 2)
    assert made.summary.flops_sharded_fraction == pytest.approx(share)


@pytest.mark.thorough
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_cut_with_one_exchange_each_way(name):
    made = assert_equals_one_process(lambda: Layered(LAYERS[name]), batch(), 2)
    assert made.summary.flops_sharded_fraction == 1.0
    assert num_collectives(made) == OUTSIDE + 2 * 2


@pytest.mark.thorough
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_over_classes_leaves_the_head_cut(name):
    made = assert_equals_one_process(lambda: Layered(Mlp, LOSSES[name]()), batch(), 2)
    assert made.summary.flops_sharded_fraction == 1.0
    assert num_collectives(made) == OUTSIDE + 2 * 2
    assert [p.style for p in made.parameters if p.name == "head.weight"] == ["vocab"]


# A projection's f and g; the exchange of a stack, both ways; what is gathered of the gradients of stacked biases.
EXCHANGES = {"stacked weights": 2, "sliced": 2, "summed": 6, "modules with biases": 5}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LOOPS)
def test_heads_in_a_loop_go_to_ranks(name):
    made = assert_equals_one_process(lambda: Layered(LOOPS[name]), batch(48), 2)
    assert made.summary.flops_sharded_fraction == 1.0
    assert made.summary.parameters_sharded_fraction > 0.94
    assert num_collectives(made) == OUTSIDE + 2 * EXCHANGES.get(name, 4)
    assert warnings_of(made) == ""


@pytest.mark.thorough
@pytest.mark.parametrize("tp", [2, 4])
def test_few_tokens_exchange_scores_once_for_all_heads_rather_than_weights(tp):
    made = assert_equals_one_process(lambda: Layered(LOOPS["modules"]), batch(), tp)
    assert made.summary.flops_sharded_fraction == 1.0
    assert num_collectives(made) == OUTSIDE + 2 * 4
    assert not any(c.kind == "all_to_all" for c in made.collectives)


class Dropped(HeadModules):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([F.dropout(head(x), 0.1) for head in self.heads], dim=-1))


class Unequal(HeadModules):
    """Its second head looks at half of the features."""

    def forward(self, x: Tensor) -> Tensor:
        masked = x * (torch.arange(x.shape[-1]) < 8)
        return self.out(torch.cat([head(masked if i == 1 else x * 1.0) for i, head in enumerate(self.heads)], dim=-1))


class ReadOutside(HeadModules):
    """The weights of its first head are read beside it."""

    def forward(self, x: Tensor) -> Tensor:
        parts = [head(x) for head in self.heads]
        return self.out(torch.cat(parts, dim=-1)) + self.heads[0].query(x).sum(-1, keepdim=True)  # pyright: ignore


def num_softmaxes(made: Plan) -> int:
    return sum("softmax" in str(node.target) for node in made.decisions.program.graph.graph.nodes)  # pyright: ignore


@pytest.mark.thorough
def test_dropped_heads_are_joined_too():
    assert num_softmaxes(planned(lambda: Layered(Dropped), batch(48), 2)) == 2


@pytest.mark.thorough
def test_heads_that_differ_stay_apart():
    assert num_softmaxes(assert_equals_one_process(lambda: Layered(Unequal), batch(), 2)) == 2 * 4


@pytest.mark.thorough
def test_weights_that_are_read_beside_the_loop_may_be_joined():
    assert num_softmaxes(assert_equals_one_process(lambda: Layered(ReadOutside), batch(), 2)) == 2


def warnings_of(made: Plan) -> str:
    return "; ".join(d.what for d in made.diagnostics if d.level == "warning")


class Three(nn.Module):
    """What ``way`` makes beside an MLP that tp 3 divides; its own 4 heads it does not."""

    def __init__(self, way: Callable[..., Tensor]) -> None:
        super().__init__()
        self.mixing, self.up, self.down = Mixing(way), nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x + self.mixing(x))))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NO_ATTENTION)
def test_products_of_activations_without_scores_are_not_called_attention(name):
    assert "attention" not in warnings_of(planned(lambda: Layered(lambda: Three(NO_ATTENTION[name])), batch(), 3))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ATTENTION)
def test_heads_around_a_softmax_are(name):
    with pytest.raises(PlanError, match="attention: 4 query heads not divisible by tp = 3"):
        planned(lambda: Layered(lambda: Three(ATTENTION[name])), batch(), 3)


class Vectors(nn.Module):
    """No matrix at all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return ((ids.double().unsqueeze(-1) * self.scale).sum(-1) - labels).square().mean()


@pytest.mark.parametrize(
    ("make", "tp", "fix"),
    [
        (lambda: Layered(Mlp), 1_000_003, "choose tp from {1, 64}"),
        (lambda: Layered(Mlp), 3, "choose tp from {1, 2, 4}"),
        (Vectors, 2, "set mesh.tp: 1"),
    ],
)
def test_a_tp_that_cuts_nothing_is_an_error_with_one_that_does(make, tp, fix):
    with pytest.raises(PlanError, match=f"tp = {tp} shards nothing") as caught:
        planned(make, batch(), tp)
    assert str(caught.value).endswith(f"fix: {fix}")
    assert "at:  mesh.tp" in str(caught.value)


@pytest.mark.parametrize(("make", "tp"), [(lambda: Layered(Mlp), 3), (Vectors, 2)])
def test_overrides_may_ask_for_just_that(make, tp):
    assert {p.style for p in planned(make, batch(), tp, {"*": "replicate"}).parameters} == {"replicate"}
