"""A model's own methods fill what lies on meta: in the order of ``Module.apply``, seeded by place, and nothing else."""

import random

import pytest
import torch
from torch import Tensor, nn

from passes.errors import PlanError
from planner import meta_parameters
from runtime.weights.own_methods import OwnMethods

SHAPE = (6, 4)


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.empty(SHAPE)), nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        nn.init.constant_(self.other, random.random())


class Pair(nn.Module):
    """Its own method has the last word on one weight of what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Leaf(), Leaf()
        self.register_buffer("seen", torch.zeros(1))
        self.seen: Tensor

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            self.first.weight.data.mul_(3.0)
            self.seen.add_(1)


def meta(kind: type[nn.Module]) -> nn.Module:
    with meta_parameters():
        return kind()


def test_calls_follow_each_other_from_the_inside_out():
    plain, pair = meta(Leaf), meta(Pair)
    seeded = OwnMethods(pair, 5)
    first, second = (seeded.value(f"{name}.weight", SHAPE, torch.float32) for name in ("first", "second"))
    assert first.std() / second.std() == pytest.approx(3.0, rel=0.5)
    assert not torch.equal(first / 3, second)
    assert OwnMethods(plain, 5).value("other", (3,), torch.float32).unique().numel() == 1


def test_values_follow_seed_and_place_alone():
    def values(seed: int, names: list[str]) -> dict[str, Tensor]:
        own = OwnMethods(meta(Pair), seed)
        return {name: own.value(name, SHAPE if "weight" in name else (3,), torch.float32) for name in names}

    names = ["first.weight", "first.other", "second.weight", "second.other"]
    torch.manual_seed(1)
    all_of_them = values(5, names)
    torch.manual_seed(2)
    random.seed(2)
    for name in names:
        assert torch.equal(values(5, [name])[name], all_of_them[name])
    assert not torch.equal(values(6, names)["first.weight"], all_of_them["first.weight"])


def test_model_and_generators_are_left_as_they_were():
    pair = meta(Pair)
    before = dict(pair.named_parameters())
    state = torch.get_rng_state()
    OwnMethods(pair, 5).value("first.weight", SHAPE, torch.float32)
    assert all(value is before[name] for name, value in pair.named_parameters())
    assert pair.get_buffer("seen").item() == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_a_low_dtype_holds_the_same_values_rounded():
    own = OwnMethods(meta(Leaf), 5)
    exact = own.value("weight", SHAPE, torch.float32)
    assert torch.equal(own.value("weight", SHAPE, torch.bfloat16), exact.to(torch.bfloat16))


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))


class Half(Bare):
    def reset_parameters(self) -> None:
        self.scale.data[:2].fill_(1.0)


class Failing(Bare):
    def reset_parameters(self) -> None:
        self.scale.data.fill_(self.linear.weight.sum().item())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Bare, "parameter scale on the meta device is not initialized by any method"),
        (Half, "parameter scale on the meta device is not fully initialized"),
        (Failing, "reset_parameters of the model failed on the meta device"),
    ],
)
def test_what_gets_no_value_is_refused_by_name(kind: type[nn.Module], text: str):
    with pytest.raises(PlanError, match=text) as error:
        OwnMethods(meta(kind), 5).value("scale", (4,), torch.float32)
    assert "initialization.method: normal" in str(error.value)
