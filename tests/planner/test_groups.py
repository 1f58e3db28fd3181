"""Which settings each parameter has, by globs of the spec and by its shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from passes.errors import PlanError
from planner.spec.spec import Spec
from planner.updates import Settings, base_of, settings_of


@dataclass(frozen=True)
class Row:
    name: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()


ROWS = (Row("wte.weight", (9, 4), ("lm_head.weight",)), Row("h.0.norm.weight", (4,)), Row("h.0.mlp.up.bias", (8,)))


def found(**optimizer: Any) -> dict[str, Settings]:
    spec = Spec.load({"mesh": {}, "batch": {"global": 1, "micro": 1}, "optimizer": {"lr": 1e-3, **optimizer}})
    again = Spec.load(spec.to_dict())
    assert settings_of(spec.optimizer, ROWS) == settings_of(again.optimizer, ROWS)
    return settings_of(spec.optimizer, ROWS)


def test_without_groups_all_have_the_section() -> None:
    assert found() == {}


def test_vectors_do_not_decay() -> None:
    made = found(no_decay="vectors", weight_decay=0.1)
    assert {name: s.weight_decay for name, s in made.items()} == {"h.0.norm.weight": 0.0, "h.0.mlp.up.bias": 0.0}


def test_a_group_changes_the_keys_that_it_writes() -> None:
    made = found(groups={"*.bias": {"lr": 1e-4}, "*norm*": {"betas": [0.5, 0.6], "eps": 1e-6}})
    assert made["h.0.mlp.up.bias"] == Settings(1e-4, (0.9, 0.95), 1e-8, 0.01)
    assert made["h.0.norm.weight"] == Settings(1e-3, (0.5, 0.6), 1e-6, 0.01)
    base = Settings(1e-3, (0.9, 0.95), 1e-8, 0.01)
    assert [s.told(base) for s in made.values()] == ["betas 0.5 0.6, eps 1e-06", "lr 0.0001"]
    assert made["h.0.mlp.up.bias"].factor(base) == pytest.approx(0.1)


def test_a_group_goes_before_what_vectors_have() -> None:
    made = found(no_decay="vectors", groups={"*.bias": {"weight_decay": 0.3}})
    assert made["h.0.mlp.up.bias"].weight_decay == 0.3
    assert made["h.0.norm.weight"].weight_decay == 0.0


def test_a_tied_parameter_has_every_name() -> None:
    assert list(found(groups={"lm_head*": {"lr": 3e-5}})) == ["wte.weight"]


def test_two_globs_may_say_the_same() -> None:
    assert len(found(groups={"h.*": {"weight_decay": 0.5}, "*.bias": {"weight_decay": 0.5, "lr": 1e-5}})) == 2


@pytest.mark.parametrize(
    ("groups", "what", "fix"),
    [
        ({"*.biass": {"lr": 1e-5}}, "'*.biass' names no parameter", "such as h.0.mlp.up.bias"),
        ({"h.*": {"lr": 1e-5}, "*.bias": {"lr": 1e-4}}, "give h.0.mlp.up.bias different values of lr", "narrower"),
    ],
)
def test_globs_that_name_nothing_or_contradict_are_refused(groups: Any, what: str, fix: str) -> None:
    with pytest.raises(PlanError) as error:
        found(groups=groups)
    assert what in error.value.what
    assert fix in error.value.fix


def test_the_base_is_the_section() -> None:
    spec = Spec.load({"mesh": {}, "batch": {"global": 1, "micro": 1}, "optimizer": {"lr": 0.0}})
    base = base_of(spec.optimizer)
    assert Settings(1e-3, (0.9, 0.95), 1e-8, 0.0).factor(base) == 1.0
