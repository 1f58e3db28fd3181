"""Weights of experts do not depend on how those are folded: drawn, gathered, saved and loaded alike.

"stacks": a Mixtral. "a loop": each expert has parameters of its own.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from planner import meta_parameters
from planner.frozen_plan import Plan
from runtime.engine.engine import Engine
from runtime.fuzz.forks import StoreHost
from tests.models import experts, hugging_face
from tests.tools.captures import plan_again
from tests.tools.laboratory import session_lab
from tests.tools.limits import HANG_SECONDS
from tests.tools.ranks import Ranks
from tests.tools.tiers import chosen

LENGTH = min(experts.LENGTH, hugging_face.LENGTH)
VOCABULARY = min(experts.VOCABULARY, hugging_face.VOCABULARY)

LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "dp4, ep2": {"dp": 4, "ep": 2},
    "tp2 dp2, ep2 etp1": {"tp": 2, "dp": 2, "ep": 2, "etp": 1},
    "tp2 dp2, ep2": {"tp": 2, "dp": 2, "ep": 2},
    "pp2 dp2, etp2": {"pp": 2, "dp": 2, "etp": 2},
    "dp4, ep2 etp2": {"dp": 4, "ep": 2, "etp": 2},
}
CASES: dict[str, list[str]] = {
    "stacks": ["dp4, ep2", "tp2 dp2, ep2 etp1", "tp2 dp2, ep2", "pp2 dp2, etp2"],
    "a loop": ["dp4, ep2", "tp2 dp2, ep2 etp1", "dp4, ep2 etp2"],
}


@cache
def plan_of(kind: str, name: str) -> Plan:
    with meta_parameters():
        is_loop = kind == "a loop"
        model = experts.Net(experts.Layer(experts.masks)) if is_loop else hugging_face.build("mixtral")
    ids = {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY}
    return plan_again(
        model,
        {
            "mesh": LAYOUTS[name],
            "batch": {"global": 8, "micro": 2},
            "inputs": {"input_ids": ids, "labels": ids},
            "tensor_parallel": {"vocabulary_multiple": 4},
        },
    )


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {n: torch.randint(2, VOCABULARY, (8, LENGTH), generator=generator) for n in ("input_ids", "labels")}


def write_and_read(kind: str, name: str, source: Path | None, target: Path) -> dict[str, Any]:
    """Fresh values, saved to ``target``; then, after an update, those of ``source`` (left out: ``target``)."""
    with Engine(plan_of(kind, name), timeout_seconds=HANG_SECONDS) as engine:
        fresh = engine.gather_parameters()
        engine.save_pretrained(target)
        engine.train_step(batch())
        trained = engine.gather_parameters()
        engine.load_pretrained(source or target)
        return {"fresh": fresh, "trained": trained, "loaded": engine.gather_parameters()}


def directory_of(directory: Path, kind: str, name: str) -> Path:
    return directory / f"{kind} {name}".replace(", ", "_").replace(" ", "_")


def on_ranks(host: StoreHost, directory: Path, cases: list[tuple[str, str]]) -> dict[tuple[str, str], dict[str, Any]]:
    """What rank 0 finds. Each layout is planned here, for all its ranks."""
    for case in cases:
        plan_of(*case)
    return Ranks(4, "forks", host).run(run_cases, directory, cases)[0]


def run_cases(directory: Path, cases: list[tuple[str, str]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Each layout in turn reads what the one before it has written; the first what one process wrote."""
    found = {}
    for kind, names in CASES.items():
        source = directory_of(directory, kind, "one")
        for name in (n for n in names if (kind, n) in cases):
            target = directory_of(directory, kind, name)
            found[kind, name] = write_and_read(kind, name, source, target)
            source = target
    return found


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


@pytest.mark.thorough
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
