"""Weights of experts do not depend on how those are folded: drawn, gathered, saved and loaded alike.

"stacks": a Mixtral. "a loop": each expert has parameters of its own.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from planner import meta_parameters
from planner.frozen_plan import Plan
from runtime.engine.engine import Engine
from runtime.fuzz.forks import StoreHost
from tests.models import experts, hugging_face
from tests.tools.captures import plan_again
from tests.tools.checkpoints import assert_same
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
def test_names_values_and_files_are_those_of_one_process_and_an_update_changes_every_expert(
    one, found, directory, case
):
    kind, name = case
    before, after = one[kind]["fresh"], found[case]["trained"]
    for which in ("fresh", "loaded"):
        assert list(found[case][which]) == list(before)
        for parameter, value in before.items():
            assert torch.equal(found[case][which][parameter], value), (which, parameter)
    of_experts = [n for n in before if "experts" in n]
    assert len(of_experts) == {"stacks": 4, "a loop": 16}[kind]
    for parameter in of_experts:
        of_each = [tensor if kind == "stacks" else tensor[None] for tensor in (before[parameter], after[parameter])]
        assert all(not torch.equal(b, a) for b, a in zip(*of_each, strict=True)), parameter
    files = [load_file(directory_of(directory, kind, which) / "model.safetensors") for which in (name, "one")]
    assert_same(*files)
