"""Errors of a user's own classes, whatever they derive from and whatever their words do, are one message each."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from passes.errors import PlanError
from planner import capture, plan
from planner.capture.model.reference import load_model
from planner.spec.spec import Spec

SPEC = {"mesh": {"tp": 1}, "batch": {"global": 2, "micro": 2}, "inputs": {"x": {"shape": [4], "dtype": "float32"}}}
MODEL = """
class Mute(Exception):
    def __str__(self):
        raise ValueError("no words")

class Own(BaseException):
    pass

def build():
    raise {error}
"""


class Own(BaseException):
    pass


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Raises(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.linear, self.error = nn.Linear(4, 4), error

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_tensor(x):
            raise self.error
        return self.linear(x).sum()


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum()


@pytest.mark.parametrize(
    ("error", "words"), [("Mute()", "Mute"), ("Own('why')", "Own: why"), ("SystemExit(0)", "SystemExit: 0")]
)
def test_a_model_that_fails_is_named_with_its_error(tmp_path: Path, error: str, words: str) -> None:
    (tmp_path / "strange.py").write_text(MODEL.format(error=error))
    with pytest.raises(PlanError, match=f"failed when called without arguments: {words}"):
        load_model(f"{tmp_path}/strange.py:build")
    (tmp_path / "worse.py").write_text(MODEL.format(error=error) + "build()\n")
    with pytest.raises(PlanError, match=f"cannot be imported: {words}"):
        load_model(f"{tmp_path}/worse.py:build")


@pytest.mark.parametrize(("error", "words"), [(Mute(), ""), (Own("why"), "Own: why")], ids=["mute", "own"])
def test_a_forward_that_fails_is_named_with_its_error(error: BaseException, words: str) -> None:
    with pytest.raises(PlanError, match=f"the model cannot be captured: {words}"):
        plan(Raises(error), Spec.load(SPEC))


def test_a_hook_that_export_leaves_behind_is_no_change_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 keeps one if the forward raises: all captures before it would count as those of others."""
    export = torch.export.export
    own = hooks.register_module_buffer_registration_hook(lambda *_: None)

    def leaves_a_hook(*given: object, **named: object) -> object:
        hooks.register_module_buffer_registration_hook(lambda *_: None)
        return export(*given, **named)  # pyright: ignore

    try:
        before = capture(Sum(), SPEC)
        monkeypatch.setattr(torch.export, "export", leaves_a_hook)
        with pytest.raises(PlanError, match="cannot be captured: no"):
            capture(Raises(ValueError("no")), SPEC)
        assert list(hooks._global_buffer_registration_hooks) == [own.id]
        assert plan(before, SPEC)
    finally:
        own.remove()
