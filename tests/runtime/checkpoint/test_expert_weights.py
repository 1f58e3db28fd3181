"""Weights of experts do not depend on how those are folded: drawn, gathered, saved and loaded alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.tools.chosen_cases import chosen
from tests.tools.expert_weights import CASES, directory_of, on_ranks, write_and_read
from tests.tools.laboratory import session_lab

pytestmark = pytest.mark.slow
EVERY = [(kind, name) for kind, names in CASES.items() for name in names]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def one(directory: Path) -> dict[str, dict[str, Any]]:
    """What one process found, by the kind of model."""
    return {kind: write_and_read(kind, "one", None, directory_of(directory, kind, "one")) for kind in CASES}


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, directory: Path, one: dict[str, Any]
) -> dict[tuple[str, str], dict[str, Any]]:
    """What rank 0 found for each case, of four forks."""
    return session_lab().call(on_ranks, directory, chosen(request, "case"))


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_names_shapes_and_values_are_those_of_one_process(one, found, case):
    for which in ("fresh", "loaded"):
        expected, actual = one[case[0]]["fresh"], found[case][which]
        assert list(actual) == list(expected)
        for parameter, value in expected.items():
            assert torch.equal(actual[parameter], value), (which, parameter)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_an_update_has_changed_every_expert_before_they_are_loaded(one, found, case):
    before, after = one[case[0]]["fresh"], found[case]["trained"]
    of_experts = [n for n in before if "experts" in n]
    assert len(of_experts) == {"stacks": 4, "a loop": 16}[case[0]]
    for parameter in of_experts:
        of_each = [tensor if case[0] == "stacks" else tensor[None] for tensor in (before[parameter], after[parameter])]
        changed = [not torch.equal(b, a) for b, a in zip(*of_each, strict=True)]
        assert all(changed), parameter


@pytest.mark.usefixtures("found")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_files_hold_the_same_tensors(directory, case):
    files = [directory_of(directory, case[0], which) / "model.safetensors" for which in (case[1], "one")]
    with safe_open(files[0], "pt") as ours, safe_open(files[1], "pt") as theirs:
        names = list(theirs.keys())
        assert list(ours.keys()) == names
        assert all(torch.equal(ours.get_tensor(n), theirs.get_tensor(n)) for n in names)
