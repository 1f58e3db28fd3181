"""Each example spec with a model of its sizes: the whole plan as text. Accept a change that is meant by
EXPECTTEST_ACCEPT=1, and read the difference."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from torch import nn

from planner import PlanError, plan
from tests.models.plain import plain
from tests.tools.paths import GOLDEN, ROOT

SPECS = sorted(path.stem for path in (ROOT / "specs").glob("*.yaml"))
LARGE = {"llama_405b_tp8_pp16_dp128": lambda: plain(128256, 4096, 16384, 128, 126)}
ENCODERS = {"bert_tp2_pp2"}


def model_of(name: str) -> Callable[[], nn.Module]:
    """A model of the vocabulary and the length that the spec names."""
    tokens = yaml.safe_load((ROOT / "specs" / f"{name}.yaml").read_text())["inputs"]["input_ids"]
    return LARGE.get(name, lambda: plain(tokens["high"], *tokens["shape"], causal=name not in ENCODERS))


def text_of(name: str) -> str:
    try:
        return plan(model_of(name)(), Path("specs") / f"{name}.yaml").describe()
    except PlanError as error:
        return f"{error}\n"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=(pytest.mark.slow, pytest.mark.thorough) if n in LARGE else ()) for n in SPECS]
)
def test_the_plan_of_an_example_spec_is_the_golden_text(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    text, golden = text_of(name), GOLDEN / "specs" / f"{name}.txt"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_every_golden_plan_has_its_spec():
    assert sorted(path.stem for path in (GOLDEN / "specs").iterdir()) == SPECS
