"""Weights of experts do not depend on how those are folded: drawn, gathered, saved and loaded alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from runtime.distributed.launch import launch
from tests.tools.expert_weights import CASES, directory_of, run_cases, write_and_read

pytestmark = pytest.mark.slow
EVERY = [(kind, name) for kind, names in CASES.items() for name in names]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def one(directory: Path) -> dict[str, dict[str, Any]]:
    """What one process found, by the kind of model."""
    return {kind: write_and_read(kind, {}, None, directory_of(directory, kind, "one")) for kind in CASES}


@pytest.fixture(scope="module")
def found(directory: Path, one: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """What rank 0 found for each case, in one launch of four."""
    return launch(run_cases, 4, directory, timeout_seconds=280)[0]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("kind", "name"), EVERY)
@pytest.mark.parametrize("which", ["fresh", "loaded"])
def test_names_shapes_and_values_are_those_of_one_process(one, found, kind, name, which):
    expected, actual = one[kind]["fresh"], found[kind, name][which]
    assert list(actual) == list(expected)
    for parameter, value in expected.items():
        assert torch.equal(actual[parameter], value), parameter


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_an_update_has_changed_every_expert_before_they_are_loaded(one, found, kind, name):
    before, after = one[kind]["fresh"], found[kind, name]["trained"]
    of_experts = [n for n in before if "experts" in n]
    assert len(of_experts) == {"stacks": 4, "a loop": 16}[kind]
    for parameter in of_experts:
        of_each = [tensor if kind == "stacks" else tensor[None] for tensor in (before[parameter], after[parameter])]
        changed = [not torch.equal(b, a) for b, a in zip(*of_each, strict=True)]
        assert all(changed), parameter


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_files_hold_the_same_tensors(directory, found, kind, name):
    files = [directory_of(directory, kind, which) / "model.safetensors" for which in (name, "one")]
    with safe_open(files[0], "pt") as ours, safe_open(files[1], "pt") as theirs:
        names = list(theirs.keys())
        assert list(ours.keys()) == names
        assert all(torch.equal(ours.get_tensor(n), theirs.get_tensor(n)) for n in names)
