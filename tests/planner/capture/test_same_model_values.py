"""Models that a forward could tell apart have different digests; what has no certain form has none."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.tools.model_digest import Uncertain, digest_of


class Config:
    def __init__(self) -> None:
        self.sizes, self.nested = [4, 4], {"scale": 0.5}


class Slotted:
    __slots__ = ("count",)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act = torch.relu
        self.config = Config()
        self.width = 4
        self.calls, self.draws, self.slotted = itertools.count(), torch.Generator().manual_seed(1), Slotted()
        self.slotted.count = 1
        self.register_buffer("table", torch.arange(4.0))


def set_scale(model: Small) -> None:
    model.config.nested["scale"] = 0.25


def tie(model: Small) -> None:
    model.down.weight = model.up.weight


CHANGES: dict[str, Callable[[Small], Any]] = {
    "an int": lambda m: setattr(m, "width", 5),
    "an int that becomes a bool": lambda m: setattr(m, "width", True),
    "a number deep in a config": set_scale,
    "a new attribute": lambda m: setattr(m, "more", None),
    "values of a buffer": lambda m: m.table.add_(1),
    "dtype": lambda m: m.down.double(),
    "a frozen parameter": lambda m: m.up.bias.requires_grad_(False),
    "a tie": tie,
    "another shape": lambda m: setattr(m, "up", nn.Linear(4, 5)),
    "a mode": lambda m: m.down.eval(),
    "another class": lambda m: setattr(m, "up", nn.Identity()),
    "a function": lambda m: setattr(m, "act", torch.nn.functional.softplus),
    "a counter that counts": lambda m: next(m.calls),
    "a generator that draws": lambda m: torch.rand(1, generator=m.draws),
    "a slot": lambda m: setattr(m.slotted, "count", 2),
    "a tensor that is an attribute": lambda m: setattr(m, "mask", torch.ones(2)),
}
REFUSED: dict[str, Callable[[Small], Any]] = {
    "a closure": lambda m: setattr(m, "act", lambda x: x * m.width),
    "a hook": lambda m: m.up.register_forward_hook(print),
    "a hook of a parameter": lambda m: m.up.weight.register_hook(abs),
    "a generator": lambda m: setattr(m, "calls", (x for x in ())),
    "random numbers": lambda m: setattr(m, "draws", random.Random(1)),
    "a class of a function": lambda m: setattr(m, "up", type("Made", (nn.Module,), {})()),
    "a module elsewhere": lambda m: setattr(m, "others", [nn.Linear(1, 1)]),
    "a patched forward": lambda m: setattr(m.up, "forward", m.down.forward),
}


def test_two_models_that_are_built_alike_have_one_digest():
    assert digest_of(Small()) == digest_of(Small())
    assert digest_of(Small().to("meta").to_empty(device="cpu")) != ""


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_another_digest(name: str):
    model = Small()
    before = digest_of(model)
    CHANGES[name](model)
    assert digest_of(model) != before


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_certain_form_is_refused(name: str):
    model = Small()
    REFUSED[name](model)
    with pytest.raises(Uncertain):
        digest_of(model)


def test_values_of_parameters_do_not_count():
    model = Small()
    before = digest_of(model)
    with torch.no_grad():
        model.up.weight.add_(1)
    assert digest_of(model) == before
