"""Two attributes of a model are one module: export then runs stand-ins of its modules, and all checks still hold."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.errors import PlanError
from passes.program.source_lines import module_of
from planner.capture.export import capture
from planner.capture.python.state import PythonState
from tests.models.one_body import OneBody, batch


class Cache:
    """An object that is no structure of tensors."""


class Wrapped(nn.Module):
    """Holds a model, and its embedding a second time."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = OneBody(body)
        self.inner.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.same = self.inner.embed

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return {"loss": self.inner(ids, labels), "cache": Cache()}


def sliced(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers[:0:-1]:
        x = layer(x)
    return x


def counted(model: Any, x: Tensor) -> Tensor:
    model.calls = getattr(model, "calls", 0) + 1
    return x * model.calls


def test_an_object_beside_the_loss_is_left_out() -> None:
    program = capture(Wrapped(lambda model, x: model.layers[0](x)), batch())
    assert program.graph.graph.find_nodes(op="output")


def test_state_that_a_forward_changes_is_refused_with_module_and_line() -> None:
    with pytest.raises(PlanError, match="Python state") as caught:
        capture(Wrapped(counted), batch())
    assert (caught.value.where.module, caught.value.where.file) == ("inner", __file__)
    assert "model.calls = " in caught.value.where.code


@pytest.mark.thorough
def test_layers_of_a_slice_have_the_names_that_the_model_has() -> None:
    program = capture(Wrapped(sliced), batch())
    names = [module_of(node) for node in program.graph.graph.nodes]
    assert list(dict.fromkeys(name for name in names if "layers" in name)) == ["inner.layers.2", "inner.layers.1"]


class Held(nn.Module):
    """Keeps tokens in a dict that no call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = OneBody(lambda model, x: model.up(x))
        self.kept = {"rows": torch.arange(3), "names": ["a", "b"]}
        self.same = self.inner.embed

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.inner.embed(ids) + self.inner.embed(self.kept["rows"]).sum(0)
        return F.cross_entropy(self.inner.head(x).flatten(0, 1), labels.flatten())


def test_containers_that_export_replaces_by_equal_ones_are_no_change() -> None:
    model = Held()
    state = PythonState(model)
    model.kept = {**model.kept, "names": ["a", "b"]}
    assert state.changes() == []
    model.kept["names"] = ["a"]
    assert [change.what for change in state.changes()] == ["kept"]
    assert capture(Held(), batch()).loss
