"""The loss is found in whatever a forward returns: dataclasses, mappings and objects that export does not know."""

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from passes.errors import PlanError
from planner.capture.export import capture
from tests.models.one_body import OneBody, batch


class Cache:
    """An object that is no structure of tensors."""


@dataclass
class Result:
    loss: Tensor
    logits: Tensor
    cache: Any = field(default_factory=Cache)


@dataclass(frozen=True, slots=True)
class Parts:
    total: Tensor
    inner: Any


class Pair(tuple):
    """A kind of tuple of the user's own."""


class Returning(OneBody):
    def __init__(self, result: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__(lambda model, x: model.up(x))
        self.result = result

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.body(self, self.embed(ids)))
        return self.result(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


FOUND: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dataclass": Result,
    "dataclass in a tuple": lambda loss, logits: (logits, Result(loss, logits)),
    "dataclass in a dict": lambda loss, logits: {"out": [Result(loss, logits)]},
    "dataclass in a dataclass": lambda loss, logits: Parts(loss, Result(logits, logits)),
    "kind of tuple": lambda loss, logits: Pair((logits, loss)),
    "mapping": lambda loss, logits: UserDict(loss=loss, logits=logits),
    "namespace": lambda loss, logits: SimpleNamespace(loss=loss, logits=logits),
    "dict with an object": lambda loss, logits: {"loss": loss, "cache": Cache()},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FOUND)
def test_the_loss_is_found(name: str) -> None:
    program = capture(Returning(FOUND[name]), batch())
    assert program.node(program.loss).target == plain_loss()
    assert set(program.parameters.values()) == {f"{m}.{p}" for m in ("up", "head") for p in ("weight", "bias")} | {
        "embed.weight",
        "scale",
    }


def plain_loss() -> Any:
    program = capture(Returning(lambda loss, logits: loss), batch())
    return program.node(program.loss).target


def test_a_field_is_named_in_the_spec() -> None:
    model = Returning(lambda loss, logits: Parts(loss, Result(loss * 2, logits)))
    with pytest.raises(PlanError, match=r"several outputs could be the loss: total, inner\.loss"):
        capture(model, batch())
    assert capture(model, batch(), loss="total").outputs == {"total": 0}


def test_the_users_model_still_returns_its_own_type() -> None:
    model = Returning(Result)
    before = copy.copy(vars(model))
    capture(model, batch())
    assert vars(model) == before
    assert not model._forward_hooks
    assert isinstance(model(**batch()), Result)


def test_an_object_without_tensors_is_an_error() -> None:
    with pytest.raises(PlanError, match="the forward returns a Cache") as caught:
        capture(Returning(lambda loss, logits: Cache()), batch())
    assert "dataclass" in caught.value.fix
